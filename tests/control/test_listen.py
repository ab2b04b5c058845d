"""The port for other machines: certificates that are pinned, signed by an authority, or refused."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from api_scene import SPEC, TOKEN, Api

from certificates import make
from cordee.client import Client
from cordee.control.home import Home
from cordee.control.listen import Certificate, Listener, parse_listen, self_made
from cordee.errors import CertificateError, InputError, NoServerError, ServerError
from cordee.servers import ServerAddress, find_server, is_remote, keep_remote
from cordee.tls import client_context

OTHER_FINGERPRINT = "ab" * 32


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    home = Home(tmp_path_factory.mktemp("public"))
    api = Api(home.path, Listener.of(home, "127.0.0.1:0", None, None))
    yield api
    api.close()


def _public_url(api: Api) -> str:
    assert api.operations.members.public is not None
    return api.operations.members.public.url


def _fingerprint(api: Api) -> str:
    assert api.operations.members.public is not None and api.operations.members.public.fingerprint is not None
    return api.operations.members.public.fingerprint


def test_a_server_is_reached_on_loopback_and_over_tls(public: Api) -> None:
    assert public.client.url.startswith("http://127.0.0.1:")
    assert _public_url(public).startswith("https://127.0.0.1:")
    with Client(url=_public_url(public), token=TOKEN, fingerprint=_fingerprint(public)) as client:
        health = client.health()
        assert client.home is None
    assert (health.listens, health.fingerprint) == (_public_url(public), _fingerprint(public))


def test_the_fingerprint_is_the_one_that_openssl_computes(public: Api) -> None:
    argv = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", public.operations.home / "certificate.pem"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    with Client(url=_public_url(public), token=TOKEN, fingerprint=said.split("=")[1]) as client:
        assert client.health()


def test_nothing_is_sent_to_a_server_with_another_certificate(public: Api) -> None:
    client = Client(url=_public_url(public), token=TOKEN, fingerprint=OTHER_FINGERPRINT)
    said = f"{_fingerprint(public)}, not {OTHER_FINGERPRINT}(?s:.*)hint: ask"
    with client, pytest.raises(CertificateError, match=said):
        client.jobs()

    async def dial() -> None:
        parts = urlsplit(_public_url(public))
        await asyncio.open_connection(parts.hostname, parts.port, ssl=client_context(OTHER_FINGERPRINT))

    with pytest.raises(ssl.SSLCertVerificationError, match=said):
        asyncio.run(dial())


def test_a_self_made_certificate_needs_its_fingerprint(public: Api) -> None:
    client = Client(url=_public_url(public), token=TOKEN)
    with client, pytest.raises(CertificateError, match=r"(?s)self-signed.*hint: .*CORDEE_FINGERPRINT"):
        client.health()


def test_the_environment_names_a_server(public: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path))
    monkeypatch.setenv("CORDEE_URL", _public_url(public) + "/")
    monkeypatch.setenv("CORDEE_FINGERPRINT", _fingerprint(public).upper())
    monkeypatch.setenv("CORDEE_TOKEN", TOKEN)
    with Client() as client:
        assert client.health().listens == _public_url(public)
    with pytest.raises(NoServerError, match="no server runs on"):
        Client(tmp_path / "a-home-that-is-named")
    monkeypatch.setenv("CORDEE_FINGERPRINT", "ab:cd")
    with pytest.raises(InputError, match="'ab:cd' is not a fingerprint"):
        Client()
    monkeypatch.delenv("CORDEE_TOKEN")
    with pytest.raises(ServerError, match=r"CORDEE_URL names https://.*no token is set"):
        Client()


def test_a_home_is_connected_to_a_server(public: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not is_remote(tmp_path)
    keep_remote(tmp_path, ServerAddress(_public_url(public), TOKEN, _fingerprint(public)))
    assert is_remote(tmp_path)
    assert (tmp_path / "remote.json").stat().st_mode & 0o777 == 0o600
    with Client(tmp_path) as client:
        assert client.jobs() == []
    monkeypatch.setenv("CORDEE_TOKEN", "another-user")
    assert find_server(tmp_path).token == "another-user"
    pair = ServerAddress("https://a:8470", TOKEN, _fingerprint(public), others=("https://b:8470",))
    keep_remote(tmp_path, pair)
    monkeypatch.delenv("CORDEE_TOKEN")
    assert find_server(tmp_path) == pair
    monkeypatch.setenv("CORDEE_TOKEN", TOKEN)
    monkeypatch.setenv("CORDEE_FINGERPRINT", _fingerprint(public))
    monkeypatch.setenv("CORDEE_URL", "https://a:8470,https://b:8470/")
    assert find_server() == pair
    (tmp_path / "remote.json").write_text("{")
    with pytest.raises(ServerError, match=r"(?s)remote.json cannot be read.*cordee connect"):
        Client(tmp_path)


@pytest.mark.parametrize("url", ["gpu-1:8470", "ftp://gpu-1", "https://", "https://gpu-1:x", "https://gpu-1/v1"])
def test_a_url_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_URL", url)
    monkeypatch.setenv("CORDEE_TOKEN", TOKEN)
    with pytest.raises(InputError, match="is not the URL of a server"):
        Client()


def test_no_secret_crosses_a_network_unencrypted() -> None:
    client = Client(url="http://192.0.2.7:8470", token=TOKEN)
    with (
        client,
        pytest.raises(InputError, match=r"HF_TOKEN would cross the network unencrypted, to http://192\.0\.2\.7"),
    ):
        client.submit(SPEC | {"secrets": ["HF_TOKEN"]}, environ={"HF_TOKEN": "hf_secret"})


def test_a_certificate_of_an_authority_is_checked_by_the_system_and_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make(tmp_path, "authority")
    server = make(tmp_path, "server", names=("*.cluster", "localhost"), by=authority)
    home = Home(tmp_path / "home")
    public = Listener.of(home, "127.0.0.1:0", server.path, server.key_path)
    assert public is not None
    assert public.fingerprint is None
    assert public.url.startswith("https://localhost:"), "the name that the authority vouches for"
    api = Api(home.path, public)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    try:
        with Client(url=public.url, token=TOKEN) as client:
            assert client.health().listens == public.url
        client = Client(url=public.url.replace("localhost", "127.0.0.1"), token=TOKEN)
        with client, pytest.raises(CertificateError, match=r"(?s)not trusted.*SSL_CERT_FILE"):
            client.health()
    finally:
        api.close()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    old, good, other = make(tmp_path, "old", days=-1), make(tmp_path, "good"), make(tmp_path, "other")
    with pytest.raises(CertificateError, match=r"old.pem expired on 20\d\d-"):
        Certificate.read(old.path, old.key_path)
    with pytest.raises(CertificateError, match="is not a certificate: No such file"):
        Certificate.read(tmp_path / "missing.pem", old.key_path)
    with pytest.raises(CertificateError, match=r"good\.key is not a certificate"):
        Certificate.read(good.key_path, good.key_path)
    with pytest.raises(CertificateError, match=r"other\.key cannot be used as the key of .*good\.pem"):
        Certificate.read(good.path, other.key_path).context()
    home = Home(tmp_path / "home")
    with pytest.raises(InputError, match="belong together"):
        Listener.of(home, "127.0.0.1:0", good.path, None)
    with pytest.raises(InputError, match="--certificate needs --listen"):
        Listener.of(home, None, good.path, good.key_path)


def test_the_self_made_certificate_stays_the_same_and_its_key_is_private(tmp_path: Path) -> None:
    made = self_made(tmp_path)
    assert self_made(tmp_path) == made
    assert made.key.stat().st_mode & 0o777 == 0o600
    assert "localhost" in made.names


def test_the_port_is_kept_for_the_next_up(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.keep_settings({"slots": "4"})
    assert Listener.of(home, None, None, None) is None
    pair = make(tmp_path, "given")
    first = Listener.of(home, "127.0.0.1:0", pair.path, pair.key_path)
    assert first is not None
    with first.socket:
        again = Listener.of(home, None, None, None)
        assert again is not None and again.fingerprint == first.fingerprint
        again.socket.close()
        port = first.socket.getsockname()[1]
        with pytest.raises(ServerError, match=rf"(?s)cannot listen at 127.0.0.1:{port}: .*in use.*--listen off"):
            Listener.of(home, f"127.0.0.1:{port}", None, None)
    own = Listener.of(home, "127.0.0.1:0", None, None)
    assert own is not None and own.fingerprint == self_made(tmp_path).fingerprint, "--listen alone: the self-made one"
    own.socket.close()
    assert Listener.of(home, "off", None, None) is None
    assert json.loads((tmp_path / "settings.json").read_text())["slots"] == "4"


@pytest.mark.parametrize("text", ["", ":8470", "gpu:port", "0.0.0.0:70000"])
def test_an_address_that_cannot_be_listened_at(text: str) -> None:
    with pytest.raises(InputError, match="is not an address to listen at"):
        parse_listen(text)


def test_old_protocols_are_refused(public: Api) -> None:
    context = client_context(_fingerprint(public))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
