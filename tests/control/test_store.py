"""The store: everything of a commit or nothing, the outbox, the marks, the schema and its migrations."""

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from cordee.control.store import tables
from cordee.control.store.database import make_engine
from cordee.control.store.sql import SqlStore
from cordee.errors import StoreError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Behind,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Lease,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    RanksStarted,
    ServerUp,
)
from cordee.ids import JobId

GPT = JobId("gpt-abcdef")
JOB = Job(job_id=GPT, name="gpt", owner="ada", gpus=4)
PLACED = AttemptPlaced(at_us=3, job_id=GPT, epoch=1, leases=(Lease(node="local", gpus=(0, 1, 2, 3)),))
NOTICE = NoticeGiven(at_us=5, job_id=GPT, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=9)
KILL = KillOrdered(at_us=9, job_id=GPT, epoch=1, why="the grace period is over")
ENDED = AttemptEnded(at_us=10, job_id=GPT, epoch=1, outcome=Outcome.KILLED, why="killed")
SAVED = CheckpointCommitted(at_us=6, job_id=GPT, epoch=1, step=7, generation=1, size_bytes=10, stall_us=1, upload_us=1)
LIFE: list[Event] = [
    ServerUp(at_us=1),
    JobSubmitted(at_us=2, job=JOB, spec='{"run": "true"}'),
    PLACED,
    RanksStarted(at_us=4, job_id=GPT, epoch=1, node="local"),
    NOTICE,
    SAVED,
    KILL,
    ENDED,
    JobEnded(at_us=11, job_id=GPT, state="stopped", why="ada stopped it"),
]


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


def _rows(url: str, query: str) -> list[tuple[object, ...]]:
    engine = make_engine(url)
    try:
        with engine.begin() as connection:
            result = connection.exec_driver_sql(query)
            return [tuple(row) for row in result] if result.returns_rows else []
    finally:
        engine.dispose()


def _everything(store: SqlStore) -> dict[str, list[tuple[object, ...]]]:
    with store._engine.connect() as connection:
        found = {name: connection.execute(table.select()).all() for name, table in tables.metadata.tables.items()}
    return {name: sorted(map(tuple, rows), key=repr) for name, rows in found.items()}


def test_the_log_comes_back_as_it_was_written(store: SqlStore, url: str) -> None:
    store.commit(LIFE[:4])
    store.commit(LIFE[4:])
    assert list(store.events()) == list(enumerate(LIFE, start=1))
    assert list(store.events(after=7)) == [(8, ENDED), (9, LIFE[8])]
    store.close()
    again = SqlStore(url)
    assert [event for _, event in again.events()] == LIFE
    again.close()


def test_a_long_log_is_read_in_pages(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.control.store.sql._PAGE", 4)
    events = [ServerUp(at_us=i) for i in range(12)]
    store.commit(events)
    assert [event for _, event in store.events()] == events


def test_tables_follow_the_log(store: SqlStore, url: str) -> None:
    store.commit(LIFE[:4])
    assert _rows(url, "select state from jobs") == [("running",)]
    assert _rows(url, "select epoch, state, started_us from attempts") == [(1, "running", 4)]
    held_up = RankBehind(at_us=4, job_id=GPT, epoch=1, rank=2, how=Behind.STUCK, step=7, since_us=3)
    for event, why in (
        (held_up, "rank 2 has stood still, in step 7"),
        (replace(held_up, epoch=9, rank=0), "rank 2 has stood still, in step 7"),
        (replace(held_up, how=Behind.OVER), ""),
    ):
        store.commit([event])
        assert _rows(url, "select state, why from jobs") == [("running", why)]
    store.commit(LIFE[4:])
    store.commit([held_up])
    assert _rows(url, "select job_id, owner, state, ended_us, why from jobs") == [
        (GPT, "ada", "stopped", 11, "ada stopped it")
    ]
    assert _rows(url, "select state, notice_reason, checkpoint_step, outcome, ended_us from attempts") == [
        ("ended", "preempt", 7, "killed", 10)
    ]


def test_a_fault_between_statements_leaves_nothing(store: SqlStore) -> None:
    """Each statement of a commit fails in turn: every table stays as it was, and then the commit can be made."""
    store.commit(LIFE[:2], seen=[("node/local/1", 1)])
    before = _everything(store)
    marks = [("node/local/1", 2), ("gpt-abcdef.1/rank0", 1)]
    statements = left = 0

    def fail(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise sa.exc.OperationalError("a statement", {}, sqlite3.OperationalError("disk I/O error"))

    sa.event.listen(store._engine, "before_cursor_execute", fail)
    while True:
        left = statements
        try:
            store.commit(LIFE[2:8], seen=marks)
        except StoreError as error:
            assert "6 events were not written: disk I/O error" in error.message
            left = 1000
            assert _everything(store) == before
            statements += 1
        else:
            break
    assert statements > 10
    assert left == 0, "each statement has failed once"
    sa.event.remove(store._engine, "before_cursor_execute", fail)
    assert len(list(store.events())) == 8
    marks = {"node/local/1": 2, "gpt-abcdef.1/rank0": 1}
    assert store.marks(list(marks)) == marks


def test_marks_move_with_the_events(store: SqlStore) -> None:
    assert store.marks(["node/local/1"]) == {"node/local/1": 0}
    store.commit([], seen=[("node/local/1", 3)])
    store.commit([ServerUp(at_us=1)], seen=[("node/local/1", 4), ("other", 1)])
    others = [f"rank{number}" for number in range(1500)]  # one query takes a part of them
    assert store.marks(["node/local/1", *others, "other"]) == {"node/local/1": 4, "other": 1} | dict.fromkeys(others, 0)


def test_commands_wait_in_order_until_confirmed(store: SqlStore) -> None:
    store.commit(LIFE[:7])
    assert [pending.command for pending in store.pending()] == [PLACED, NOTICE, KILL]
    assert {pending.spec for pending in store.pending()} == {'{"run": "true"}'}
    first = store.pending()[0]
    store.confirm([first.number])
    store.confirm([first.number])  # a second confirmation changes nothing
    assert [pending.command for pending in store.pending()] == [NOTICE, KILL]


def test_an_ended_attempt_leaves_no_command_behind(store: SqlStore) -> None:
    """A start that was delivered, but whose confirmation was lost, must not go out after the attempt's end."""
    other = AttemptPlaced(at_us=10, job_id=GPT, epoch=2, leases=PLACED.leases)
    store.commit([*LIFE[:8], other])
    assert [pending.command for pending in store.pending()] == [other]


def test_migrations_make_the_tables_that_the_code_knows(store: SqlStore) -> None:
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_a_newer_schema_is_refused_and_left_alone(url: str) -> None:
    SqlStore(url).close()
    _rows(url, "update alembic_version set version_num = '9999'")
    with pytest.raises(StoreError, match=r"schema 9999.*\nhint: a newer Cordee wrote it"):
        SqlStore(url)
    assert _rows(url, "select version_num from alembic_version") == [("9999",)]


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "cordee.db").write_text("this is no database, and long enough to be looked at" * 10)
    with pytest.raises(StoreError, match="file is not a database"):
        SqlStore(f"sqlite:///{tmp_path}/cordee.db")


def test_it_is_durable_and_does_not_block_readers(store: SqlStore, url: str) -> None:
    with store._engine.connect().execution_options(cordee_read=True) as connection:
        if url.startswith("sqlite"):
            assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("pragma synchronous").scalar() == 2
        else:
            assert connection.exec_driver_sql("show synchronous_commit").scalar() == "on"
            connection.exec_driver_sql("select * from log")
        store.commit([ServerUp(at_us=1)])


def test_a_text_that_the_database_cannot_hold_is_the_events_own_fault(store: SqlStore, url: str) -> None:
    """PostgreSQL's texts hold no NUL. Were it the store's fault, the tick would try the same commit forever."""
    store.commit(LIFE[:3])
    ended = replace(ENDED, why="killed\0")
    if url.startswith("postgresql"):
        with pytest.raises(ValueError, match="cannot hold an event"):
            store.commit([ended])
        assert len(list(store.events())) == 3
    else:
        store.commit([ended])
        assert list(store.events(after=3)) == [(4, ended)]
