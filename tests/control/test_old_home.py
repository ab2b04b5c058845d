"""A home that version 0.1.0 left: today's server migrates it, and today's agent settles what the old one reported."""

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cordee.client import Client, JobDetailView
from cordee.control.spawn import is_owned, start_server
from cordee.control.store.sql import SqlStore
from cordee.events import NoticeGiven, NoticeReason, Outcome, RanksEnded
from cordee.ids import JobId

OLD = Path(__file__).parents[1] / "data" / "home_0_1"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("old") / "home"
    shutil.copytree(OLD, home)
    connection = sqlite3.connect(home / "cordee.db")
    connection.executescript((home / "cordee.sql").read_text())
    connection.close()
    home.chmod(0o700)
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[Client]:
    start_server(home, slots="2")
    with Client(home) as client:
        yield client
        client.stop("last", now=True)
        client.down()
    deadline = time.monotonic() + DEADLINE_S
    while is_owned(home) and time.monotonic() < deadline:
        time.sleep(0.05)


def until(client: Client, ref: str, condition: Callable[[JobDetailView], bool]) -> JobDetailView:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(job := client.job(ref)):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_jobs_of_the_old_home_are_there(client: Client) -> None:
    first = client.job("first")
    assert (first.state, first.queue, first.checkpoint_step, len(first.attempts)) == ("done", "team", 5, 2)
    assert first.attempts[0].notice_reason == "time-slice"
    assert (first.attempts[0].refused, first.attempts[0].refused_why) == (0, "")
    assert client.job("woe").state == "failed"
    assert client.why("first").text.endswith("done: finished")
    assert {queue.name for queue in client.queues().queues} == {"default", "team"}


def test_the_end_that_the_old_agent_reported_last_is_settled(client: Client, home: Path) -> None:
    job = until(client, "last", lambda job: job.attempts[0].ended_us is not None)
    assert (job.attempts[0].outcome, job.attempts[0].why) == ("failed", "rank 0 exited by SIGTERM")
    ended = [event for _, event in client.events() if isinstance(event, RanksEnded)]
    [last] = [event for event in ended if event.job_id == JobId("last-aghxr9") and event.epoch == 1]
    assert last.outcome is Outcome.FAILED
    deadline = time.monotonic() + DEADLINE_S
    while (home / "nodes" / "local" / "2.jsonl").exists():
        assert time.monotonic() < deadline, "the old stream is settled and goes"
        time.sleep(0.05)


def test_costs_of_the_old_home_add_up(client: Client) -> None:
    rows = {row.key: row for row in client.cost("job").rows}
    first = rows["first-jx6d95"]
    assert (first.attempts, first.steps, first.tokens) == (2, 10, 200)
    assert first.gpu_us.held == first.gpu_us.useful + first.gpu_us.restart
    assert rows["woe-799fpc"].gpu_us.lost == rows["woe-799fpc"].gpu_us.held


def test_the_old_log_is_decided_again(client: Client, home: Path) -> None:
    until(client, "last", lambda job: job.attempts[0].ended_us is not None)
    argv = [sys.executable, "-m", "cordee", "replay", str(home), "--policy", "fifo"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_reason_of_a_time_slice_has_its_name_in_the_log_too(home: Path, client: Client) -> None:
    store = SqlStore(f"sqlite:///{home / 'cordee.db'}")
    notices = [event for _, event in store.events() if isinstance(event, NoticeGiven)]
    store.close()
    assert [notice.reason for notice in notices if notice.job_id == "first-jx6d95"] == [NoticeReason.TIME_SLICE]
