"""The audit log: what is recorded and what never is, one chain under concurrent writers, each way to tamper."""

import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_scene import OTHER, SPEC, TOKEN, Api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage import new_database

from cordee.answers.queues import QueueRules, QueuesSubmission
from cordee.control.acts import QUIET, Act, carried_out
from cordee.control.audited import record_tokens
from cordee.control.members import token_id
from cordee.control.roles import ADMIN, Bearer, grants_of
from cordee.control.store.audit import (
    ALL_MAX,
    DONE,
    EQUAL_MAX,
    REFUSED,
    AuditFilter,
    AuditHead,
    AuditRecord,
    audit,
    fault,
)
from cordee.control.store.database import make_engine
from cordee.control.store.sql import SqlStore
from cordee.errors import StoreError
from cordee.events import ServerUp

MINUTE = 60_000_000


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/cordee.db"
    database: str = request.getfixturevalue("postgres").database()
    return database


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    store = SqlStore(url)
    yield store
    store.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.close()


def checked(store: SqlStore, *known: AuditHead) -> str | None:
    before = store.audit.head()
    return fault(store.audit.records(), [before, *known], store.audit.head)


def filled(store: SqlStore, count: int) -> list[AuditRecord]:
    store.audit.add([(Act(at, who=f"user-{at % 3}", named="POST /x", object=f"o{at}"), DONE, 1) for at in range(count)])
    return list(store.audit.records())


def tampered(url: str, *statements: str) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        for each in statements:
            connection.exec_driver_sql(each)
    engine.dispose()


def records(api: Api) -> list[AuditRecord]:
    return list(api.scene.store.audit.records())


def asked(api: Api, token: str, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", "User-Agent": "a test"}
    return httpx.request(method, api.url + path, headers=headers, timeout=30, verify=False, **more)


# -- the chain ----------------------------------------------------------------------------------------------------


def test_records_are_numbered_and_each_has_the_hash_of_the_one_before(store: SqlStore) -> None:
    found = filled(store, 5)
    assert [each.number for each in found] == [1, 2, 3, 4, 5]
    assert [each.before for each in found] == ["", *(each.hash for each in found[:-1])]
    assert store.audit.head() == AuditHead(5, found[-1].hash)
    assert checked(store) is None


COLUMNS = [each.name for each in audit.columns if each.name not in ("number", "hash")]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_field_is_noticed_and_its_record_named(tmp_path: Path, column: str) -> None:
    url = f"sqlite:///{tmp_path}/cordee.db"
    store = SqlStore(url)
    filled(store, 6)
    kind = audit.c[column].type
    value = "99" if isinstance(kind, sa.BigInteger) else "'mallory'"
    tampered(url, f'update audit set "{column}" = {value} where number = 4')
    assert checked(store) == "record 4 was changed: its hash is of other content"
    store.close()


def test_each_way_to_tamper_is_named(url: str, store: SqlStore) -> None:
    found = filled(store, 6)
    tampered(url, "delete from audit where number = 3")
    assert checked(store) == "record 3 is missing: the next one is 4"
    tampered(url, "update audit set number = 3 where number = 4")
    assert checked(store) == "record 3 was changed: its hash is of other content"
    tampered(url, "update audit set number = 4 where number = 3", _insert(found[2]))
    assert checked(store) is None, "all is as it was"
    swap = ["update audit set number = 100 where number = 2", "update audit set number = 2 where number = 5"]
    tampered(url, *swap, "update audit set number = 5 where number = 100")
    assert checked(store) == "record 2 was changed: its hash is of other content"
    tampered(url, "delete from audit where number in (2, 5)", _insert(found[1]), _insert(found[4]))
    tampered(url, "delete from audit where number > 4")
    assert checked(store) == "record 5 is missing: the log reached to record 6"
    tampered(url, _insert(found[4]), _insert(found[5]), "delete from audit where number = 1")
    assert checked(store) == "record 1 is missing: the next one is 2"


def _insert(record: AuditRecord) -> str:
    values = asdict(record)
    names = ", ".join(f'"{name}"' for name in values)
    shown = ["null" if each is None else repr(each) for each in values.values()]
    return f"insert into audit ({names}) values ({', '.join(shown)})"


def _rehashed(record: AuditRecord, **changes: Any) -> AuditRecord:
    new = replace(record, **changes)
    return replace(new, hash=new.digest())


def test_a_record_with_a_hash_made_to_fit_does_not_fit_the_next_one(url: str, store: SqlStore) -> None:
    found = filled(store, 6)
    forged = _rehashed(found[2], who="mallory")
    tampered(url, "delete from audit where number = 3", _insert(forged))
    assert checked(store) == "record 4 does not follow the record before it: one of both was replaced"


def test_a_log_written_anew_as_a_whole_is_told_from_a_copy_of_its_head(url: str, store: SqlStore) -> None:
    found = filled(store, 6)
    copy, last, lines = store.audit.head(), AuditHead(), []
    for each in found[:4]:
        forged = _rehashed(each, who="mallory", before=last.hash)
        last = AuditHead(forged.number, forged.hash)
        lines.append(_insert(forged))
    tampered(url, "delete from audit", *lines, f"update audit_head set number = 4, hash = '{last.hash}'")
    assert checked(store) is None, "inside the database nothing is left to tell"
    assert checked(store, copy) == "record 5 is missing: the log reached to record 6"
    assert checked(store, AuditHead(4, found[3].hash)) == (
        "record 4 is not the one that was known: the log was written anew up to it"
    )


def test_a_record_put_behind_the_last_one_is_noticed(url: str, store: SqlStore) -> None:
    found = filled(store, 3)
    tampered(url, _insert(_rehashed(found[2], number=4, before=found[2].hash)))
    assert checked(store) == "record 4 was added: the server wrote 3"


acts = st.tuples(st.text(max_size=12), st.sampled_from(["POST /a", "PUT /b"]), st.text(max_size=8), st.integers(1, 9))
tampers = st.sampled_from(["drop", "swap", "edit", "double"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(acts, min_size=2, max_size=8), tampers, st.data())
def test_any_history_verifies_and_any_tampering_does_not(
    tmp_path_factory: pytest.TempPathFactory, history: list[Any], how: str, data: st.DataObject
) -> None:
    store = SqlStore(new_database(tmp_path_factory.mktemp("history") / "cordee.db"))
    store.audit.add([(Act(1, who=who, named=named, object=about), DONE, n) for who, named, about, n in history])
    found, head = list(store.audit.records()), store.audit.head()
    store.close()
    assert fault(found, [head]) is None
    at = data.draw(st.integers(0, len(found) - 1))
    broken = {
        "drop": found[:at] + found[at + 1 :],
        "swap": [*found[:at], *reversed(found[at : at + 2]), *found[at + 2 :]],
        "edit": [*found[:at], _rehashed(found[at], detail="x"), *found[at + 1 :]],
        "double": [*found[: at + 1], *found[at:]],
    }[how]
    assert (fault(broken, [head]) is None) == (broken == found)


def test_concurrent_writers_make_one_chain(url: str, store: SqlStore) -> None:
    others = [SqlStore(url) for _ in range(3)]
    start = threading.Barrier(len(others))

    def write(which: int, own: SqlStore) -> None:
        start.wait()
        for at in range(15):
            own.audit.add([(Act(at, who=f"w{which}", named="POST /x", object=str(at)), DONE, 1)])

    threads = [threading.Thread(target=write, args=pair) for pair in enumerate(others)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for own in others:
        own.close()
    found = list(store.audit.records())
    assert len(found) == 45 and checked(store) is None
    for which in range(3):
        assert [each.object for each in found if each.who == f"w{which}"] == [str(at) for at in range(15)]


def test_a_record_is_there_exactly_if_its_change_is(store: SqlStore) -> None:
    with carried_out(Act(7, who="ada", named="POST /x")):
        store.commit([ServerUp(at_us=1)])
        with pytest.raises(StoreError), store.writing() as connection:
            connection.execute(audit.update().values(who="mallory"))
            raise StoreError("it fails")
    [record] = store.audit.records()
    assert (record.who, record.event, record.outcome) == ("ada", 1, DONE)
    store.commit([ServerUp(at_us=2)])
    assert store.audit.head().number == 1, "the server's own commits have no record: they are events"


# -- what is recorded ---------------------------------------------------------------------------------------------


def test_a_submission_and_what_follows_are_recorded_with_who_and_from_where(api: Api) -> None:
    body = {"job_id": "gpt-abcdef", "spec": SPEC, "unprotected": True}
    assert asked(api, OTHER, "POST", "/v1/jobs", json=body).status_code == 201
    assert asked(api, OTHER, "POST", "/v1/jobs/gpt-abcdef/stop").status_code == 200
    number = api.scene.control.number
    assert asked(api, OTHER, "POST", "/v1/jobs/gpt-abcdef/stop").status_code == 200, "it is stopped already"
    assert asked(api, OTHER, "POST", "/v1/nodes/local/drain", json={"why": "x"}).status_code == 403
    found = records(api)
    operations = [(each.operation, each.object, each.queue, each.outcome) for each in found]
    assert operations == [
        ("POST /v1/jobs", "gpt-abcdef", "default", DONE),
        ("POST /v1/jobs/{ref}/stop", "gpt-abcdef", "default", DONE),
        ("POST /v1/jobs/{ref}/stop", "gpt-abcdef", "default", DONE),
        ("POST /v1/nodes/{name}/drain", "local", "", REFUSED),
    ]
    assert {(each.who, each.address, each.agent, each.token) for each in found} == {
        ("bob", "127.0.0.1", "a test", token_id(OTHER))
    }
    assert [each.event for each in found] == [number - 1, number, None, None]
    assert checked(api.scene.store) is None


def test_reading_leaves_no_record_but_its_refusal_does(api: Api) -> None:
    for path in ("/v1/jobs", "/v1/health", "/v1/audit", "/nothing/here"):
        asked(api, OTHER, "GET", path)
    assert records(api) == []
    assert asked(api, "a-token-that-nobody-has", "GET", "/v1/jobs").status_code == 401
    [refused] = records(api)
    assert (refused.who, refused.operation, refused.outcome) == ("", "GET /v1/jobs", REFUSED)


def test_a_login_and_a_logout_are_recorded_with_one_session(api: Api) -> None:
    with httpx.Client(base_url=api.url, follow_redirects=True, timeout=60) as browser:
        assert browser.post("/login", data={"token": "wrong"}).status_code == 401
        page = browser.post("/login", data={"token": OTHER}).text
        form = re.search(r'name="form" value="([0-9a-f]+)"', page)
        assert form is not None
        assert browser.post("/logout", data={"form": form[1]}).status_code == 200
        ticket = httpx.post(
            f"{api.url}/v1/web-tickets", headers={"Authorization": f"Bearer {OTHER}"}, timeout=60
        ).json()["url"]
        browser.get(ticket)
    wrong, came, left, again = records(api)
    assert (wrong.operation, wrong.who, wrong.outcome) == ("POST /login", "", REFUSED)
    assert (came.operation, came.who, came.token) == ("POST /login", "bob", token_id(OTHER))
    assert (left.operation, left.who, left.session) == ("POST /logout", "bob", came.session)
    assert (again.operation, again.who) == ("GET /login", "bob") and again.session != came.session


def test_no_secret_comes_into_the_log(api: Api) -> None:
    spec = SPEC | {"secrets": ["WANDB_KEY"]}
    body = {"job_id": "gpt-abcdef", "spec": spec, "unprotected": True, "secrets": {"WANDB_KEY": "the-secret-value"}}
    assert asked(api, TOKEN, "POST", "/v1/jobs", json=body).status_code == 201
    asked(api, "a-token-that-was-mistyped", "POST", "/v1/jobs", json=body)
    ticket = httpx.post(f"{api.url}/v1/web-tickets", headers={"Authorization": f"Bearer {OTHER}"}, timeout=60).json()[
        "url"
    ]
    httpx.get(ticket, timeout=60)
    httpx.post(f"{api.url}/login", data={"token": TOKEN}, timeout=60)
    made = asked(api, TOKEN, "POST", "/v1/keys", json={"tenant": "acme", "name": "ci"}).json()
    text = "\n".join(map(str, records(api)))
    assert len(records(api)) >= 5
    for secret in ("the-secret-value", "mistyped", ticket.rpartition("=")[2], TOKEN, OTHER, made["secret"]):
        assert secret not in text


def test_every_route_that_changes_something_leaves_a_record(api: Api) -> None:
    """Ask each of them with a body of nonsense, or none: what is refused is recorded as well."""
    described = httpx.get(f"{api.url}/openapi.json", timeout=60).json()["paths"]
    for path, methods in described.items():
        for method in methods.keys() - {"get", "head"}:
            operation = f"{method.upper()} {path}"
            if operation in QUIET or path.startswith("/v1/agents"):
                continue
            api.scene.time.us += MINUTE
            before = api.scene.store.audit.head().number
            asked(api, TOKEN, method, re.sub(r"{\w+}", "x", path), json={"nonsense": 1})
            [record, *_] = [each for each in records(api) if each.number > before]
            assert (record.operation, record.who) == (operation, "ada")
    known = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    hidden = {"POST /v1/jobs/{job_id}/files", *(each for each in QUIET if "/v1/agents/" in each)}
    assert QUIET - hidden <= known, "no name of a route is out of date"


def test_a_flood_of_refusals_is_counted_and_does_not_fill_the_disk(api: Api) -> None:
    store = api.scene.store
    for at in range(500):
        store.audit.record(Act(at, who=f"user-{at % 2}", named="POST /x", address="10.0.0.1"), REFUSED)
    found = records(api)
    assert len(found) == 2 * EQUAL_MAX + 2
    assert sum(each.count for each in found) == 500, "none is lost"
    for at in range(2000):
        store.audit.record(Act(2 * MINUTE + at, who=f"stranger-{at}", named="POST /x"), REFUSED)
    more = records(api)[len(found) :]
    assert len(more) == 2 * ALL_MAX + 1
    assert sum(each.count for each in more) == 2000
    store.audit.record(Act(4 * MINUTE, who="stranger-1999", named="POST /x"), REFUSED)
    assert records(api)[-1].count == 1, "a new minute begins anew"


def test_tokens_and_roles_are_recorded_when_they_change(store: SqlStore) -> None:
    first = {"t" * 24: Bearer("ada", grants=ADMIN), "b" * 24: Bearer("bob")}
    record_tokens(store, first, 1)
    record_tokens(store, first, 2)
    record_tokens(
        store, {"t" * 24: Bearer("ada", grants=ADMIN), "b" * 24: Bearer("bob", True, None, grants_of(["viewer=x"]))}, 3
    )
    record_tokens(store, {"t" * 24: Bearer("ada", grants=ADMIN)}, 4)
    record_tokens(store, first, 5)
    rows = [(each.at_us, each.operation, each.who, each.detail) for each in store.audit.records()]
    assert rows == [
        (1, "token made", "ada", "admin"), (1, "token made", "bob", "user"),
        (3, "token changed", "bob", "read viewer=x"), (4, "token revoked", "bob", "read viewer=x"),
        (5, "token made", "bob", "user"),
    ]  # fmt: skip


# -- who sees what ------------------------------------------------------------------------------------------------


def test_admins_of_a_queue_see_its_records_and_everybody_the_own(api: Api) -> None:
    lead, user = "the-token-of-lea-0000000", "the-token-of-uma-0000000"
    api.operations.owners = {
        TOKEN: Bearer("ada", grants=ADMIN), OTHER: Bearer("bob"),
        lead: Bearer("lea", grants=grants_of(["admin=research"])),
        user: Bearer("uma", grants=grants_of(["user=vision"])),
    }  # fmt: skip
    queues = [QueueRules(name="research"), QueueRules(name="vision", parent="research"), QueueRules(name="product")]
    api.operations.set_queues(QueuesSubmission(queues=queues))
    for token, queue in ((user, "vision"), (OTHER, "product"), (OTHER, "research")):
        spec = SPEC | {"queue": queue, "name": f"j-{queue}"}
        body = {"job_id": f"j-{queue}-abcdef", "spec": spec, "unprotected": True}
        assert asked(api, token, "POST", "/v1/jobs", json=body).status_code == 201

    def seen(token: str, **params: Any) -> set[str]:
        found = asked(api, token, "GET", "/v1/audit", params=params).json()
        assert found["whole"] == (token == TOKEN)
        return {each["queue"] for each in found["records"]}

    assert seen(TOKEN) == {"vision", "product", "research"}
    assert seen(lead) == {"vision", "research"}
    assert seen(user) == {"vision"} and seen(OTHER) == {"product", "research"}
    assert seen(lead, queue="product") == set() and seen(TOKEN, user="uma") == {"vision"}
    assert seen(TOKEN, about="j-product-abcdef") == {"product"}
    now = api.scene.time.us
    assert seen(TOKEN, from_us=now) == set() and len(seen(TOKEN, until_us=now)) == 3
    pages = asked(api, TOKEN, "GET", "/v1/audit", params={"limit": 1, "after": 1}).json()["records"]
    assert [each["number"] for each in pages] == [2]
    last = asked(api, TOKEN, "GET", "/v1/audit", params={"limit": 1, "newest": True}).json()["records"]
    assert [each["number"] for each in last] == [3]
    assert AuditFilter().condition() is not None


def test_the_page_shows_the_newest_acts(api: Api) -> None:
    body = {"job_id": "gpt-abcdef", "spec": SPEC, "unprotected": True}
    asked(api, TOKEN, "POST", "/v1/jobs", json=body)
    for token, sees in ((TOKEN, True), (OTHER, False)):
        with httpx.Client(base_url=api.url, follow_redirects=True, timeout=60) as browser:
            page = browser.post("/login", data={"token": token, "next": "/audit"}).text
        assert "POST /login" in page, "the own login"
        assert ("gpt-abcdef" in page) is sees
        assert ("cordee audit verify" in page) is sees
