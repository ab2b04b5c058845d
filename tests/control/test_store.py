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


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/cordee.db"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(_url(tmp_path))
    yield store
    store.close()


def _rows(folder: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "cordee.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def _everything(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    return {name: _rows(folder, f"select * from {name}") for name in tables.metadata.tables}


def test_the_log_comes_back_as_it_was_written(store: SqlStore, tmp_path: Path) -> None:
    store.commit(LIFE[:4])
    store.commit(LIFE[4:])
    assert list(store.events()) == list(enumerate(LIFE, start=1))
    assert list(store.events(after=7)) == [(8, ENDED), (9, LIFE[8])]
    store.close()
    again = SqlStore(_url(tmp_path))
    assert [event for _, event in again.events()] == LIFE
    again.close()


def test_a_long_log_is_read_in_pages(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.control.store.sql._PAGE", 4)
    events = [ServerUp(at_us=i) for i in range(12)]
    store.commit(events)
    assert [event for _, event in store.events()] == events


def test_tables_follow_the_log(store: SqlStore, tmp_path: Path) -> None:
    store.commit(LIFE[:4])
    assert _rows(tmp_path, "select state from jobs") == [("running",)]
    assert _rows(tmp_path, "select epoch, state, started_us from attempts") == [(1, "running", 4)]
    held_up = RankBehind(at_us=4, job_id=GPT, epoch=1, rank=2, how=Behind.STUCK, step=7, since_us=3)
    for event, why in (
        (held_up, "rank 2 has stood still, in step 7"),
        (replace(held_up, epoch=9, rank=0), "rank 2 has stood still, in step 7"),
        (replace(held_up, how=Behind.OVER), ""),
    ):
        store.commit([event])
        assert _rows(tmp_path, "select state, why from jobs") == [("running", why)]
    store.commit(LIFE[4:])
    store.commit([held_up])
    assert _rows(tmp_path, "select job_id, owner, state, ended_us, why from jobs") == [
        (GPT, "ada", "stopped", 11, "ada stopped it")
    ]
    assert _rows(tmp_path, "select state, notice_reason, checkpoint_step, outcome, ended_us from attempts") == [
        ("ended", "preempt", 7, "killed", 10)
    ]


@pytest.mark.parametrize("statement", range(20))
def test_a_fault_between_statements_leaves_nothing(tmp_path: Path, statement: int) -> None:
    """The n-th statement of a commit fails: afterwards every table is as it was, and the commit can be made."""
    store = SqlStore(_url(tmp_path))
    store.commit(LIFE[:2], seen=[("node/local/1", 1)])
    before = _everything(tmp_path)
    count = 0

    def fail(*_: object) -> None:
        nonlocal count
        count += 1
        if count == statement + 1:
            raise sa.exc.OperationalError("a statement", {}, sqlite3.OperationalError("disk I/O error"))

    sa.event.listen(store._engine, "before_cursor_execute", fail)
    marks = [("node/local/1", 2), ("gpt-abcdef.1/rank0", 1)]
    with pytest.raises(StoreError, match="6 events were not written: disk I/O error"):
        store.commit(LIFE[2:8], seen=marks)
    sa.event.remove(store._engine, "before_cursor_execute", fail)
    assert _everything(tmp_path) == before
    store.commit(LIFE[2:8], seen=marks)
    assert len(list(store.events())) == 8
    assert (store.mark("node/local/1"), store.mark("gpt-abcdef.1/rank0")) == (2, 1)
    store.close()


def test_marks_move_with_the_events(store: SqlStore) -> None:
    assert store.mark("node/local/1") == 0
    store.commit([], seen=[("node/local/1", 3)])
    store.commit([ServerUp(at_us=1)], seen=[("node/local/1", 4), ("other", 1)])
    assert (store.mark("node/local/1"), store.mark("other")) == (4, 1)


def test_commands_wait_in_order_until_confirmed(store: SqlStore) -> None:
    store.commit(LIFE[:7])
    assert [pending.command for pending in store.pending()] == [PLACED, NOTICE, KILL]
    assert {pending.spec for pending in store.pending()} == {'{"run": "true"}'}
    first = store.pending()[0]
    store.confirm(first.number)
    store.confirm(first.number)  # a second confirmation changes nothing
    assert [pending.command for pending in store.pending()] == [NOTICE, KILL]


def test_an_ended_attempt_leaves_no_command_behind(store: SqlStore) -> None:
    """A start that was delivered, but whose confirmation was lost, must not go out after the attempt's end."""
    other = AttemptPlaced(at_us=10, job_id=GPT, epoch=2, leases=PLACED.leases)
    store.commit([*LIFE[:8], other])
    assert [pending.command for pending in store.pending()] == [other]


def test_migrations_make_the_tables_that_the_code_knows(tmp_path: Path, store: SqlStore) -> None:
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    SqlStore(_url(tmp_path)).close()
    connection = sqlite3.connect(tmp_path / "cordee.db")
    connection.execute("update alembic_version set version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match=r"schema 9999.*\nhint: a newer Cordee wrote it"):
        SqlStore(_url(tmp_path))
    assert _rows(tmp_path, "select version_num from alembic_version") == [("9999",)]


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "cordee.db").write_text("this is no database, and long enough to be looked at" * 10)
    with pytest.raises(StoreError, match="file is not a database"):
        SqlStore(_url(tmp_path))


def test_it_is_durable_and_does_not_block_readers(store: SqlStore) -> None:
    with store._engine.connect().execution_options(cordee_read=True) as connection:
        assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2
        store.commit([ServerUp(at_us=1)])
