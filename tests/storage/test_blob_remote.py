"""The object store: the same promises as the file store, on a network that loses, tears, delays and refuses."""

import os
import threading

import pytest
from cloud_world import azure, azure_server, google, google_server  # noqa: F401 - fixtures

from cordee.errors import DestinationError, FencedError
from cordee.storage.log import Log, read_entries
from cordee.storage.remote import MULTIPART_BYTES, TRIES, RemoteBlobs
from s3_world import PAGE, Proxy

# What a request for one part of a blob has in its path.
PARTS = {"s3": "partNumber", "gs": "partNumber", "az": "comp=block&"}


@pytest.fixture(params=["s3", "gs", "az"])
def scheme(request) -> str:
    return request.param


@pytest.fixture
def cloud(scheme, request) -> Proxy:
    return request.getfixturevalue({"s3": "s3", "gs": "google", "az": "azure"}[scheme])


@pytest.fixture
def blobs(scheme, cloud) -> RemoteBlobs:
    return RemoteBlobs(f"{scheme}://bucket/run", wait_s=0.0)


def once(fault: str, method: str):
    """This fault, at the first request of this method only."""
    left = [fault]
    return lambda found, path: left.pop() if left and found == method else None


@pytest.mark.parametrize("size", [0, 1, 100_000, MULTIPART_BYTES + 17])
def test_get_returns_the_bytes_that_were_put(blobs, scheme, cloud, size) -> None:
    data = memoryview(os.urandom(size + 1))[1:]
    assert blobs.put_if_absent("a/b/c", data)
    assert blobs.get("a/b/c") == data
    assert blobs.size("a/b/c") == size
    parts = [path for method, path in cloud.seen if PARTS[scheme] in path]
    assert len(parts) == (3 if size > MULTIPART_BYTES else 0)
    assert not blobs.put_if_absent("a/b/c", data)


def test_the_first_wins_and_the_second_changes_nothing(blobs) -> None:
    assert blobs.put_if_absent("k", b"first")
    assert not blobs.put_if_absent("k", b"second")
    assert not blobs.put_if_absent("k", b"first"), "the same bytes, but no answer of ours was lost"
    assert blobs.get("k") == b"first"
    blobs.put("k", b"third")
    assert blobs.get("k") == b"third"
    blobs.delete("k")
    blobs.delete("k")
    assert blobs.get("k") is None and blobs.size("k") is None


@pytest.mark.parametrize("seed", range(3))
def test_one_of_eight_writers_wins_whatever_the_network_does(blobs, cloud, seed) -> None:
    ready = threading.Barrier(8)
    won: list[int] = []

    def write(me: int) -> None:
        ready.wait()
        try:
            if blobs.put_if_absent("log/1", str(me).encode()):
                won.append(me)
        except DestinationError:
            pass

    threads = [threading.Thread(target=write, args=(me,)) for me in range(8)]
    with cloud.failing(cloud.by_chance(seed, 0.4)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(won) == 1 and blobs.get("log/1") == str(won[0]).encode(), f"replay: -k eight_writers, seed {seed}"


def test_a_create_whose_answer_was_lost_finds_its_own_bytes_and_has_won(blobs, cloud) -> None:
    with cloud.failing(once("lost answer", "PUT")):
        assert blobs.put_if_absent("log/1", b"nonce 1")
    assert [method for method, _ in cloud.seen] == ["PUT", "PUT", "GET"]
    with cloud.failing(once("lost request", "PUT")):
        assert blobs.put_if_absent("log/2", b"nonce 1")
    with cloud.failing(once("lost answer", "PUT")):
        assert not blobs.put_if_absent("log/1", b"nonce 2"), "somebody else's bytes are there"


def test_an_answer_that_never_comes_is_given_up_and_asked_for_again(cloud, scheme) -> None:
    blobs = RemoteBlobs(f"{scheme}://bucket/run", wait_s=0.0, request_s=0.5)
    with cloud.failing(once("hangs", "PUT")):
        assert blobs.put_if_absent("log/1", b"nonce 1")
    with cloud.failing(once("hangs", "GET")):
        assert blobs.get("log/1") == b"nonce 1"


@pytest.mark.parametrize("fault", ["500", "503", "torn", "lost answer"])
def test_reads_get_the_whole_blob_or_an_error(blobs, cloud, fault) -> None:
    data = os.urandom(300_000)
    blobs.put("chunk", data)
    blobs.put("log/b", b"")
    blobs.put("log/a", b"")
    with cloud.failing(once(fault, "GET")):
        assert blobs.get("chunk") == data
    with cloud.failing(once(fault, "GET")):
        assert list(blobs.list("log")) == ["log/a", "log/b"]
    with (
        cloud.failing(lambda method, path: fault),
        pytest.raises(DestinationError, match=r"cannot read chunk in (s3|gs|az)://") as e,
    ):
        blobs.get("chunk")
    assert f"tried {TRIES} times" in e.value.hint


def test_a_store_that_refuses_is_not_asked_again(cloud, scheme, blobs) -> None:
    with pytest.raises(DestinationError, match="cannot create k") as error:
        RemoteBlobs(f"{scheme}://no-such-bucket/x", wait_s=0.0).put_if_absent("k", b"")
    assert "does the bucket exist" in error.value.hint and len(cloud.seen) == 1
    with cloud.failing(lambda method, path: "403"), pytest.raises(DestinationError, match="AccessDenied") as error:
        blobs.get("k")
    assert "credentials" in error.value.hint and len(cloud.seen) == 2


def test_list_keeps_to_its_folder_over_pages(blobs, scheme, cloud) -> None:
    keys = [f"log/{n:04d}" for n in range(3 * PAGE + 1)]
    for key in keys:
        blobs.put(key, b"")
    blobs.put("logs/x", b"")
    cloud.seen.clear()
    assert list(blobs.list("log")) == keys
    assert len(cloud.seen) == (1 if scheme == "az" else 4), "pages: Azurite has 5,000 in one"
    assert list(blobs.list("nothing")) == []


@pytest.mark.parametrize("seed", range(4))
def test_two_attempts_on_a_bad_network_leave_one_history(blobs, cloud, seed) -> None:
    """Every append that was reported is in the log once, in order, and the old attempt is fenced."""
    told: dict[str, list[int]] = {"a": [], "b": []}
    with cloud.failing(cloud.by_chance(seed, 0.25)):
        old = Log.open(blobs, nonce="a")
        for save in range(4):
            told["a"].append(old.append("commit", save=save, step=save))
        new = Log.open(blobs, nonce="b")
        for save in range(4):
            told["b"].append(new.append("commit", save=save, step=save))
            with pytest.raises(FencedError):
                old.append("commit", save=9, step=9)
    found = read_entries(blobs)
    assert [(entry.record.nonce, entry.record.kind) for entry in found] == [("a", "open")] + [("a", "commit")] * 4 + [
        ("b", "open")
    ] + [("b", "commit")] * 4, f"replay: -k bad_network, seed {seed}"
    assert told == {"a": [1, 2, 3, 4], "b": [6, 7, 8, 9]}


def test_other_clouds_are_opened_by_their_scheme_and_what_the_environment_lacks_is_said(monkeypatch) -> None:
    assert str(RemoteBlobs("gs://bucket/run/")) == "gs://bucket/run"
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(DestinationError, match="Account must be specified"):
        RemoteBlobs("az://container/run")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert str(RemoteBlobs("az://container/run")) == "az://container/run"
