"""Databases that earlier versions left: the schema is brought to today's, and the log and the tables are whole."""

import sqlite3
from pathlib import Path

import pytest

from cordee.control.backup import DATABASE, check, database_of
from cordee.control.fold import Fold
from cordee.control.snapshot import taken
from cordee.control.snapshots import make, newest_fold
from cordee.control.store.sql import SqlStore
from cordee.schedule import Policy

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(params=["home_0_1", "home_schema_2"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.executescript((DATA / request.param / "cordee.sql").read_text())
    connection.close()
    return database_of(tmp_path)


def test_every_earlier_schema_is_upgraded(database: str) -> None:
    store = SqlStore(database)
    states = {row["name"]: row["state"] for row in store.jobs()}
    assert states == {"first": "done", "woe": "failed", "last": "running"}
    store.close()
    number, faults = check(database)
    assert number > 20 and not faults


def test_an_old_log_has_snapshots_and_segments(database: str) -> None:
    store = SqlStore(database)
    whole = Fold(Policy())
    before = list(store.events())
    whole.apply(before)
    number, ended = whole.number, whole.ended_jobs()
    assert make(database, number, ended)["retired"] == len(ended) == 2
    whole.retire(ended)
    assert taken(newest_fold(store, Policy())).body == taken(whole).body
    assert store.archive.move(number, segment=4)
    assert list(store.events()) == before
    store.close()
    assert check(database) == (number, [])
