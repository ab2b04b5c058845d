"""The tables of tokens and secrets, on SQLite and PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cordee.control.store.credentials import Credentials
from cordee.control.store.sql import SqlStore
from cordee.errors import StoreError
from cordee.events import Job, JobEnded, JobSubmitted
from cordee.ids import JobId

GPT = JobId("gpt-abcdef")
DAY_US = 86_400_000_000


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path}/cordee.db"
    store = SqlStore(url if request.param == "sqlite" else request.getfixturevalue("postgres").database())
    yield store
    store.close()


def _row(node: str, token_hash: str) -> dict[str, object]:
    return {"node": node, "token_hash": token_hash, "machine": f"host-{node}/1", "joined_us": 5, "by": "ada"}


def test_the_way_of_a_node(store: SqlStore) -> None:
    credentials = Credentials(store)
    credentials.add_join_token("join", uses=2, now_us=1, expires_us=10, by="ada")
    assert credentials.add_agent(_row("gpu-1", "first"), join_hash="join")
    assert credentials.add_agent(_row("gpu-1", "second"), join_hash="join"), "it joins again"
    assert not credentials.add_agent(_row("gpu-2", "third"), join_hash="join"), "used up"
    assert credentials.agent("gpu-2") is None
    second = credentials.agent_with("second")
    assert credentials.agent_with("first") is None and second is not None
    assert (second["node"], second["left_us"]) == ("gpu-1", None)
    credentials.close_agent("gpu-1", 7)
    left = credentials.agent_with("second")
    assert left is not None and left["left_us"] == 7
    assert credentials.nodes_that_left() == {"gpu-1"}
    found = credentials.join_token("join")
    assert found is not None and (found["used"], found["uses"]) == (2, 2)
    credentials.add_join_token("later", uses=1, now_us=40 * DAY_US, expires_us=41 * DAY_US, by="ada")
    assert credentials.join_token("join") is None, "it expired long ago"


def test_secrets_go_with_their_job(store: SqlStore) -> None:
    credentials = Credentials(store)
    store.commit([JobSubmitted(at_us=1, job=Job(job_id=GPT, name="gpt", owner="ada", gpus=4), spec="{}")])
    credentials.keep_secrets(GPT, {"A": "sealed", "B": "sealed too"})
    credentials.keep_secrets("other-abcdef", {"A": "another"})
    credentials.keep_secrets(GPT, {"A": "sealed anew"})
    assert credentials.sealed_secrets(GPT) == {"A": "sealed anew"}
    store.commit([JobEnded(at_us=2, job_id=GPT, state="stopped", why="ada stopped it")])
    assert credentials.sealed_secrets(GPT) == {}
    assert credentials.sealed_secrets("other-abcdef") == {"A": "another"}


def test_a_token_is_issued_once(store: SqlStore) -> None:
    credentials = Credentials(store)
    credentials.add_join_token("join", uses=1, now_us=1, expires_us=10, by="ada")
    with pytest.raises(StoreError, match="nothing was changed"):
        credentials.add_join_token("join", uses=9, now_us=1, expires_us=10, by="ada")
    found = credentials.join_token("join")
    assert found is not None and found["uses"] == 1
