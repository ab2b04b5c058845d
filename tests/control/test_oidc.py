"""Logins with an OpenID provider: a real one's code flow with roles by group, and what forgers and strangers get."""

import base64
import hashlib
import hmac
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from api_scene import TOKEN, Api
from joserfc import jwt
from joserfc.jwk import RSAKey
from oidc_world import Forger, begun, consented
from stage import Scene

from cordee.control.roles import ADMIN, EVERYWHERE, Bearer, Grant, Role
from cordee.control.web.oidc_settings import FILE, read_oidc
from cordee.control.web.sessions import IDLE_S, LASTS_S
from cordee.errors import InputError

S = 1_000_000
ROLES = """
[roles]
vision = "user=vision"
platform = "admin"
"""


def settings(folder: Path, issuer: str, more: str = "") -> None:
    base = f'issuer = "{issuer}"\nclient_id = "cordee"\nname = "Example"\n'
    (folder / FILE).write_text(base + more + ROLES)


@pytest.fixture
def forger() -> Iterator[Forger]:
    forger = Forger()
    yield forger
    forger.close()


@contextmanager
def serving(folder: Path, issuer: str, more: str = "") -> Iterator[Api]:
    settings(folder, issuer, more)
    api = Api(folder, scene=Scene(folder, at_us=round(time.time() * S)))
    try:
        yield api
    finally:
        api.close()


@pytest.fixture
def api(tmp_path: Path, forger: Forger) -> Iterator[Api]:
    with serving(tmp_path, forger.issuer) as api:
        yield api


@contextmanager
def browsing(api: Api) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=30) as browser:
        yield browser


def logged_in(browser: httpx.Client, forger: Forger) -> httpx.Response:
    return browser.get("/login/back", params=consented(forger, begun(browser)))


def refused(api: Api, forger: Forger, why: str) -> None:
    """Check that a login is refused, begins no session, and is recorded."""
    with browsing(api) as browser:
        answer = logged_in(browser, forger)
        assert answer.status_code == 403 and why in answer.text, answer.text
        assert browser.get("/queues").status_code == 303, "nobody is logged in"
    record = list(api.scene.store.audit.records())[-1]
    assert (record.operation, record.outcome, record.who) == ("GET /login/back", "refused", "")


# -- a real provider ----------------------------------------------------------------------------------------------


def test_a_real_provider_logs_somebody_in_with_the_roles_of_the_groups(tmp_path: Path) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # the provider's own; pytest restores the filters
    mock = pytest.importorskip("oidc_provider_mock")
    claims = {"email": "omar@example.com", "email_verified": True, "groups": ["platform", "others"]}
    user = mock.User(sub="omar", claims=claims)
    with mock.run_server_in_thread(user_claims=[user], require_nonce=True) as provider:
        issuer = f"http://localhost:{provider.server_port}"
        (tmp_path / "secret").write_text("s3cret")
        more = f'domains = ["example.com"]\nshort_names = true\nclient_secret_file = "{tmp_path}/secret"\n'
        with serving(tmp_path, issuer, more) as api, browsing(api) as browser:
            assert "Log in with Example" in browser.get("/login").text
            sent = browser.get("/login/with", params={"next": "/queues"})
            form = httpx.post(sent.headers["location"], data={"sub": "omar"}, timeout=30)
            assert form.headers["location"].startswith(f"{api.url}/login/back?"), form.text
            back = browser.get(form.headers["location"])
            assert (back.status_code, back.headers["location"]) == (303, "/queues"), back.text
            page = browser.get("/audit")
            assert page.status_code == 200 and "<span>omar</span>" in page.text
            assert "cordee audit verify" in page.text, "an admin, by the group"
            again = browser.get(form.headers["location"])
            assert again.status_code == 403, "an answer is good once"
            [login, _] = api.scene.store.audit.records()
            assert (login.who, login.outcome) == ("omar", "done") and "platform" in login.detail
            out = browser.post("/logout", data={"form": _form(page.text)}, follow_redirects=True)
            assert f"{issuer}/oauth2/end_session?client_id=cordee" in out.text, "there too, if the person wants"
            assert browser.get("/queues").status_code == 303


def _form(html: str) -> str:
    return html.partition('name="form" value="')[2].partition('"')[0]


# -- what goes there and comes back -------------------------------------------------------------------------------


def test_a_login_has_a_state_a_nonce_and_a_challenge_of_its_own(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        first, second = begun(browser), begun(browser)
        assert all(first[name] != second[name] for name in ("state", "nonce", "code_challenge"))
        assert all(len(first[name]) >= 43 for name in ("state", "nonce", "code_challenge"))
        assert first["code_challenge_method"] == "S256" and first["redirect_uri"] == f"{api.url}/login/back"
        assert browser.get("/login/back", params=consented(forger, second)).status_code == 303
        verifier = forger.forms[-1]["code_verifier"]
        digest = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        assert digest == second["code_challenge"]
        session = next(each for each in browser.cookies.jar if not each.name.endswith("_login"))
        assert session.has_nonstandard_attr("HttpOnly") and session.get_nonstandard_attr("SameSite") == "lax"


def test_the_answer_to_another_browsers_login_begins_no_session(api: Api, forger: Forger) -> None:
    with browsing(api) as mallory, browsing(api) as victim:
        stolen = consented(forger, begun(mallory))
        for answer in (victim.get("/login/back", params=stolen), victim.get("/login/back")):
            assert answer.status_code == 403 and "has not begun a login" in answer.text
        begun(victim)
        answer = victim.get("/login/back", params=stolen)
        assert answer.status_code == 403 and "begun elsewhere" in answer.text
        assert victim.get("/queues").status_code == 303
        assert forger.forms == [], "and no code was shown to the provider"


def test_an_answer_is_good_once_and_for_ten_minutes(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        wanted = begun(browser)
        cookie = {each.name: each.value or "" for each in browser.cookies.jar}
        assert browser.get("/login/back", params=consented(forger, wanted)).status_code == 303
        browser.cookies.update(cookie)
        again = browser.get("/login/back", params=consented(forger, wanted, "code-2"))
        assert again.status_code == 403 and "used already" in again.text
    with browsing(api) as browser:
        wanted = begun(browser)
        api.scene.time.us += 601 * S
        late = browser.get("/login/back", params=consented(forger, wanted))
        assert late.status_code == 403 and "longer than 10 minutes" in late.text


def test_a_cookie_that_this_server_did_not_sign_is_none(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        wanted = begun(browser)
        [name] = [each.name for each in browser.cookies.jar]
        body = json.loads(base64.urlsafe_b64decode(browser.cookies[name].partition(".")[0]))
        forged = base64.urlsafe_b64encode(json.dumps(body | {"to": "https://evil.example"}).encode()).decode()
        cookie = {"Cookie": f"{name}={forged}.{browser.cookies[name].rpartition('.')[2]}"}
        answer = httpx.get(f"{api.url}/login/back", params=consented(forger, wanted), headers=cookie, timeout=30)
        assert answer.status_code == 403


@pytest.mark.parametrize("to", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_a_login_elsewhere_leads_back_to_this_server_only(api: Api, forger: Forger, to: str) -> None:
    with browsing(api) as browser:
        answer = browser.get("/login/back", params=consented(forger, begun(browser, to)))
        assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_what_the_provider_refuses_is_said_and_escaped(api: Api) -> None:
    with browsing(api) as browser:
        params = {"state": begun(browser)["state"], "error": "<script>access_denied"}
        answer = browser.get("/login/back", params=params)
        assert answer.status_code == 403 and "access_denied" in answer.text and "<script>access" not in answer.text


def test_an_answer_that_names_another_issuer_is_refused(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        params = consented(forger, begun(browser)) | {"iss": "https://evil.example"}
        assert "another provider" in browser.get("/login/back", params=params).text
        assert forger.forms == []


# -- forged tokens ------------------------------------------------------------------------------------------------

FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "issuer": ({"iss": "https://evil.example"}, "iss"),
    "audience": ({"aud": "another-program"}, "aud"),
    "several audiences": ({"aud": ["cordee", "another-program"]}, "for another program"),
    "authorized party": ({"azp": "another-program"}, "for another program"),
    "nonce": ({"nonce": "of another login"}, "nonce"),
    "no nonce": ({"nonce": None}, "nonce"),
    "expired": ({"exp": int(time.time()) - 3600}, "expired"),
    "no expiry": ({"exp": None}, "exp"),
    "from the future": ({"iat": int(time.time()) + 86_400}, "in the future"),
    "no subject": ({"sub": None}, "sub"),
    "no address": ({"email": None}, "does not say"),
    "address not verified": ({"email_verified": False}, "not verified"),
    "no group with a role": ({"groups": ["others"]}, "no group"),
    "groups that are none": ({"groups": {"vision": 1}}, "no group"),
    "a name with a line break": ({"email": "a@example.com\nroot"}, "does not say"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_token_with_other_claims_begins_no_session(api: Api, forger: Forger, what: str) -> None:
    changes, why = FORGED[what]
    forger.made = lambda claims: forger.signed(
        {name: each for name, each in (claims | changes).items() if each is not None}
    )
    refused(api, forger, why)


def _by_secret(secret: bytes, claims: dict[str, Any]) -> str:
    body = _plain({"alg": "HS256", "kid": "one"}, claims).removesuffix(".")
    signature = hmac.digest(secret, body.encode(), "sha256")
    return f"{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _plain(header: dict[str, Any], claims: dict[str, Any]) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in (header, claims)]
    return ".".join([*parts, ""])


def test_a_token_that_the_provider_did_not_sign_begins_no_session(api: Api, forger: Forger) -> None:
    stranger = RSAKey.generate_key(2048, {"kid": "one"})
    public = forger.keys[0].as_pem(private=False)
    honest = forger.signed
    forgeries = {
        "alg none": lambda claims: _plain({"alg": "none"}, claims),
        "alg None": lambda claims: _plain({"alg": "None", "kid": "one"}, claims),
        "another key of the same id": lambda claims: jwt.encode({"alg": "RS256", "kid": "one"}, claims, stranger),
        "the public key as a secret": lambda claims: _by_secret(public, claims),
        "a changed body": lambda claims: _changed(honest(claims)),
        "a signature cut off": lambda claims: honest(claims).rpartition(".")[0] + ".",
        "no token": lambda claims: "",
        "nonsense": lambda claims: "a.b.c",
    }
    for what, made in forgeries.items():
        forger.made = made
        with browsing(api) as browser:
            answer = logged_in(browser, forger)
            assert answer.status_code == 403 and "is not good" in answer.text, (what, answer.text)
            assert browser.get("/queues").status_code == 303, what


def _changed(token: str) -> str:
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "==")) | {"groups": ["platform"]}
    return ".".join([head, base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode(), signature])


def test_a_replayed_code_is_the_providers_to_refuse(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        assert logged_in(browser, forger).status_code == 303
        params = {"code": "code-1", "state": begun(browser)["state"]}
        answer = browser.get("/login/back", params=params)
        assert answer.status_code == 403 and "the code is not good: invalid_grant" in answer.text


def test_clocks_may_differ_by_a_minute(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        forger.claims |= {"exp": int(time.time()) - 30, "iat": int(time.time()) + 30}
        assert logged_in(browser, forger).status_code == 303


def test_keys_that_the_provider_has_changed_are_read_again(api: Api, forger: Forger) -> None:
    with browsing(api) as browser:
        assert logged_in(browser, forger).status_code == 303
        forger.keys = [RSAKey.generate_key(2048, {"kid": "two"})]
        assert logged_in(browser, forger).status_code == 403, "they were read a moment ago"
        api.scene.time.us += 31 * S
        assert logged_in(browser, forger).status_code == 303
        assert forger.asked.count("/jwks") == 2, "a forger's key ids do not make this server ask again and again"


EVIL = "http://evil.example"


@pytest.mark.parametrize("discovery", [{"issuer": EVIL}, {"authorization_endpoint": EVIL}])
def test_a_provider_that_is_none_is_said_so(api: Api, forger: Forger, discovery: dict[str, Any]) -> None:
    forger.discovery = discovery
    with browsing(api) as browser:
        answer = browser.get("/login/with")
        assert answer.status_code == 503 and "evil.example" not in answer.headers.get("location", "")


def test_a_provider_that_does_not_answer_leaves_the_login_with_a_token(api: Api, forger: Forger) -> None:
    forger.close()
    with browsing(api) as browser:
        answer = browser.get("/login/with")
        assert answer.status_code == 503 and "does not answer" in answer.text
        assert browser.post("/login", data={"token": TOKEN}).status_code == 303


# -- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_ends_when_nobody_uses_it_and_at_the_latest_after_its_time(api: Api, forger: Forger) -> None:
    with browsing(api) as idle, browsing(api) as busy:
        assert logged_in(idle, forger).status_code == logged_in(busy, forger).status_code == 303
        for _ in range(LASTS_S // IDLE_S):
            assert busy.get("/queues").status_code == 200
            api.scene.time.us += (IDLE_S - 60) * S
        assert idle.get("/queues").status_code == 303
        assert busy.get("/queues").status_code == 200
        api.scene.time.us += IDLE_S * S - 60 * S
        assert busy.get("/queues").status_code == 303, "twelve hours are over"


def test_a_session_is_void_after_its_logout_and_a_restart_keeps_the_others(tmp_path: Path, forger: Forger) -> None:
    with serving(tmp_path, forger.issuer) as api, browsing(api) as one, browsing(api) as two:
        assert logged_in(one, forger).status_code == logged_in(two, forger).status_code == 303
        kept = {each.name: each.value or "" for each in one.cookies.jar}
        assert one.post("/logout", data={"form": _form(one.get("/queues").text)}).status_code == 303
        stolen = httpx.get(f"{api.url}/queues", cookies=kept, timeout=30)
        assert stolen.status_code == 303, "a copy of its cookie is void as well"
        assert two.get("/queues").status_code == 200
        still = {each.name: each.value or "" for each in two.cookies.jar}
    with serving(tmp_path, forger.issuer) as api:
        assert httpx.get(f"{api.url}/queues", cookies=still, timeout=30).status_code == 200
        assert httpx.get(f"{api.url}/queues", cookies=kept, timeout=30).status_code == 303


def test_a_session_has_the_roles_that_its_groups_have_now(tmp_path: Path, forger: Forger) -> None:
    forger.claims["groups"] = ["platform"]
    with serving(tmp_path, forger.issuer) as api, browsing(api) as browser:
        assert logged_in(browser, forger).status_code == 303
        assert "cordee audit verify" in browser.get("/audit").text
        kept = {each.name: each.value or "" for each in browser.cookies.jar}
    with serving(tmp_path, forger.issuer) as api:
        settings(tmp_path, forger.issuer)
        text = (tmp_path / FILE).read_text().replace('platform = "admin"', 'platform = "viewer"')
    (tmp_path / FILE).write_text(text)
    api = Api(tmp_path, scene=Scene(tmp_path, at_us=round(time.time() * S)))
    page = httpx.get(f"{api.url}/audit", cookies=kept, timeout=30)
    assert page.status_code == 200 and "cordee audit verify" not in page.text
    api.close()
    (tmp_path / FILE).write_text(text.replace('platform = "viewer"', ""))
    api = Api(tmp_path, scene=Scene(tmp_path, at_us=round(time.time() * S)))
    assert httpx.get(f"{api.url}/audit", cookies=kept, timeout=30).status_code == 303, "the group has no role any more"
    api.close()


def test_a_session_ends_with_the_token_that_it_came_from(api: Api) -> None:
    with browsing(api) as browser:
        assert browser.post("/login", data={"token": TOKEN}).status_code == 303
        assert browser.get("/queues").status_code == 200
        api.operations.owners = {"another-token-of-this-home": Bearer("ada", grants=ADMIN)}
        assert browser.get("/queues").status_code == 303


# -- the settings -------------------------------------------------------------------------------------------------


def test_groups_give_roles_and_everyone_may_have_some(tmp_path: Path) -> None:
    settings(tmp_path, "https://accounts.example", 'everyone = "viewer"\n')
    found = read_oidc(tmp_path)
    assert found is not None
    vision, seeing = Grant("vision", Role.USER), Grant(EVERYWHERE, Role.VIEWER)
    assert found.grants(["vision", "unknown"]) == (vision, seeing) and found.grants([]) == (seeing,)
    assert found.issuer == "https://accounts.example"


BASE = 'issuer = "https://a.example"\nclient_id = "c"\n'
SEES = BASE + 'everyone = "viewer"\n'
WRONG = {
    "issuer = 1": "issuer",
    'issuer = "http://accounts.example"\nclient_id = "c"': "is not an https URL",
    BASE + 'everyone = "owner"': "is no role",
    BASE: "nobody could log in",
    SEES + "short_names = true": "one domain",
    SEES + 'user = "sub"\ndomains = ["x"]': "domains needs",
    SEES + 'scopes = ["email"]': "openid",
    SEES + 'secret = "x"': "secret",
    SEES + 'client_secret_file = "a"\nclient_secret_env = "b"': "one of",
    "issuer": "cannot be read",
}


@pytest.mark.parametrize("text", WRONG)
def test_settings_that_cannot_be_used_are_refused_with_the_key(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InputError) as error:
        read_oidc(tmp_path)
    assert WRONG[text] in error.value.message and FILE in error.value.message


def test_a_secret_is_in_a_file_or_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(tmp_path, "https://accounts.example", f'client_secret_file = "{tmp_path}/secret"\n')
    found = read_oidc(tmp_path)
    assert found is not None
    with pytest.raises(InputError, match="cannot be read"):
        found.secret()
    (tmp_path / "secret").write_text("s3cret\n")
    assert found.secret() == "s3cret"
    settings(tmp_path, "https://accounts.example", 'client_secret_env = "OIDC_SECRET"\n')
    found = read_oidc(tmp_path)
    assert found is not None
    with pytest.raises(InputError, match="the environment has no OIDC_SECRET"):
        found.secret()
    monkeypatch.setenv("OIDC_SECRET", "of the environment")
    assert found.secret() == "of the environment"
    assert urlsplit(found.issuer).scheme == "https"
