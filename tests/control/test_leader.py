"""The lead over a PostgreSQL: one server writes, a dead or frozen one is replaced, a replaced one writes nothing."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy as sa

from cordee.agent.clock import monotonic_s
from cordee.control.store import tables
from cordee.control.store.leader import Lead
from cordee.control.store.sql import SqlStore
from cordee.errors import ReplacedError, StoreError
from cordee.events import ServerUp
from postgres import Postgres

LEASE_S = 60.0  # no stall of the machine is as long


@pytest.fixture
def database(postgres: Postgres) -> str:
    return postgres.database()


@pytest.fixture
def first(database: str) -> Iterator[Lead]:
    """The server that leads."""
    lead = Lead(database, url="http://first", lease_s=LEASE_S)
    SqlStore(database).close()  # makes the tables
    assert lead.wait(0) and lead.epoch == 1
    yield lead
    lead.close()


@pytest.fixture
def second(database: str) -> Iterator[Lead]:
    lead = Lead(database, url="http://second", lease_s=LEASE_S)
    yield lead
    lead.close()


def _sessions(lead: Lead) -> list[int]:
    with lead._engine.begin() as connection:
        query = sa.text("select pid from pg_stat_activity where application_name = :name")
        return list(connection.execute(query, {"name": lead.holder}).scalars())


def _pass(lead: Lead, seconds: float) -> None:
    """Let so much of the leader's lease be over."""
    with lead._engine.begin() as connection:
        left_us = tables.leader.c.expires_us - round(seconds * 1e6)
        connection.execute(tables.leader.update().values(expires_us=left_us))


def test_a_lease_that_is_renewed_keeps_the_lead(first: Lead, second: Lead) -> None:
    for _ in range(2):
        _pass(second, 0.75 * LEASE_S)
        first.renew()
        assert not second.wait(0)
    assert first.holds and not second.holds
    found = second.leader()
    assert found is not None and (found.epoch, found.url) == (1, "http://first") and found.left_us > 0


def test_a_server_that_ends_is_replaced_at_once(first: Lead, second: Lead, database: str) -> None:
    assert not second.wait(0)
    began_s = time.monotonic()
    first.close()
    assert second.wait(LEASE_S) and second.epoch == 2
    assert time.monotonic() - began_s < LEASE_S


def test_a_session_that_dies_frees_the_lead_before_the_lease_is_over(first: Lead, second: Lead) -> None:
    """As when the process is killed: PostgreSQL sees its socket close."""
    first.renew()
    assert not second.wait(0)
    with second._engine.begin() as connection:
        for pid in _sessions(first):
            connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
    began_s = time.monotonic()
    assert second.wait(LEASE_S)
    assert time.monotonic() - began_s < LEASE_S


def test_a_frozen_server_is_replaced_after_its_lease_and_writes_nothing(
    first: Lead, second: Lead, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It freezes, and goes on with a commit, which holds the row of the leader: its session is ended from outside."""
    with closing(SqlStore(database, lead=first)) as store:
        store.commit([ServerUp(at_us=1)])
        _pass(second, LEASE_S)
        thawed_s = monotonic_s() + LEASE_S
        monkeypatch.setattr("cordee.control.store.leader.monotonic_s", lambda: thawed_s)
        with pytest.raises(sa.exc.OperationalError), store.writing() as connection:
            connection.execute(tables.log.insert().values(number=2, at_us=2, kind="ServerUp", body="{}"))
            assert second.wait(LEASE_S) and second.epoch == 2
        assert not first.holds and second.holds
        for write in (lambda: store.commit([ServerUp(at_us=3)]), lambda: store.confirm([1]), first.renew):
            with pytest.raises(ReplacedError, match="led in epoch 1 and was replaced by http://second in epoch 2"):
                write()
        assert list(store.events()) == [(1, ServerUp(at_us=1))]


def test_a_restart_of_postgresql_changes_no_leader(postgres: Postgres, first: Lead, second: Lead) -> None:
    """Every session ends, and the lock is free: whoever asks first would get it."""
    assert not second.wait(0)
    postgres.stop("immediate")
    for ask in (first.renew, lambda: second.wait(0)):
        with pytest.raises(StoreError):
            ask()
    postgres.start()
    assert not second.wait(0.3)
    first.renew()
    assert not second.wait(0.3)
    assert first.holds


def test_servers_know_each_other(first: Lead, second: Lead) -> None:
    second.register()
    first.register()
    second.register()
    assert first.servers == second.servers == ["http://first", "http://second"]
    second.close()
    first.register()
    assert first.servers == ["http://first"]


def test_two_that_start_at_once_do_not_both_lead(database: str) -> None:
    SqlStore(database).close()
    leads = [Lead(database, url=f"http://{number}", lease_s=LEASE_S) for number in range(4)]
    won: list[Lead] = []
    threads = [threading.Thread(target=lambda lead=lead: won.append(lead) if lead.wait(0) else None) for lead in leads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    for lead in leads:
        lead.close()


def test_other_schemas_of_the_database_have_leaders_of_their_own(postgres: Postgres, first: Lead) -> None:
    other = postgres.database()
    SqlStore(other).close()
    with closing(Lead(other, url="http://other")) as lead:
        assert lead.wait(0)
        assert first.renew() is None


def test_a_database_that_does_not_answer_is_said_to(postgres: Postgres) -> None:
    host = quote(str(postgres.folder / "nowhere"), safe="")
    with pytest.raises(StoreError, match=r"cannot be opened: .*\nhint: see that it runs.* postgresql://cordee:\*\*\*@"):
        SqlStore(f"postgresql://cordee:secret@/postgres?host={host}")
    with psycopg.connect(postgres.url()) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
