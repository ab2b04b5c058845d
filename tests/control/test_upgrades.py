"""Databases that earlier versions left: the schema is brought to today's, and the log and the tables are whole."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.command import upgrade
from api_scene import Api

from cordee.control.backup import DATABASE, check, database_of
from cordee.control.fold import Fold
from cordee.control.snapshot import taken
from cordee.control.snapshots import make, newest_fold
from cordee.control.store.database import _config, make_engine
from cordee.control.store.leader import Lead
from cordee.control.store.sql import SqlStore
from cordee.errors import StoreError
from cordee.schedule import Policy
from postgres import Postgres

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(params=["home_0_1", "home_schema_2", "home_schema_5"])
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


def test_costs_and_jobs_of_an_earlier_version_are_read(database: str, tmp_path: Path) -> None:
    """Rows of retired jobs of an earlier version's form are not used: the whole log is replayed."""
    api = Api(tmp_path)
    try:
        assert {row.key.partition("-")[0] for row in api.client.cost("job").rows} == {"first", "woe", "last"}
        assert {job.name: api.client.job(job.job_id).state for job in api.client.jobs()}["woe"] == "failed"
        assert len(list(api.client.events())) == check(database)[0]
    finally:
        api.close()


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


def test_a_schema_is_not_upgraded_under_a_server_that_leads(postgres: Postgres) -> None:
    """The first schema with servers, whose leader has a column less."""
    database = postgres.database()
    engine = make_engine(database)
    row = {
        "id": 1,
        "epoch": 3,
        "holder": "old",
        "url": "https://old:8470",
        "expires_us": time.time_ns() // 1000 + 10**8,
    }
    leads = sa.table("leader", *map(sa.column, row))
    with engine.begin() as connection:
        (config := _config()).attributes["connection"] = connection
        upgrade(config, "0005")
        connection.execute(leads.insert().values(row))
    with closing(Lead(database, url="https://new:8470")) as lead:
        with pytest.raises(StoreError, match=r"(?s)an earlier version, and https://old:8470 leads.*end that server"):
            SqlStore(database, lead=lead)
        with engine.begin() as connection:
            connection.execute(leads.update().values(expires_us=0))
        SqlStore(database, lead=lead).close()
        assert lead.wait(0) and lead.epoch == 4
    engine.dispose()
