"""A job whose ranks write anything into their spools: a real server and agent refuse it, say so, and go on."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from stage import GPT, JOB, Scene

from cordee.answers.jobs import JobDetailView
from cordee.cli.main import main
from cordee.client import Client
from cordee.control.ports import Report
from cordee.control.spawn import is_owned, start_server
from cordee.control.tick import Control
from cordee.events import (
    CheckpointCommitted,
    Event,
    Outcome,
    RankBehind,
    RankLeft,
    RanksEnded,
    Reported,
    ReportsRefused,
    SpanClass,
)
from cordee.ids import JobId

DEADLINE_S = 60.0

HOSTILE = """
import json, os, sys, time
spool = os.environ["CORDEE_SPOOL"] + "/"
now = time.time_ns() // 1000
of = {"at_us": now, "job_id": os.environ["CORDEE_JOB"], "epoch": 1}
commit = of | {"kind": "CheckpointCommitted", "step": 3, "generation": 1}
commit |= {"size_bytes": 1, "stall_us": 1, "upload_us": 1}
span = of | {"kind": "Reported", "span": "useful", "from_us": now}
behind = of | {"kind": "RankBehind", "rank": 0, "how": "stuck", "step": 1, "since_us": now}
records = [
    commit | {"step": 10**30},
    span | {"at_us": -(10**30), "from_us": -(10**30)},
    behind | {"where": "\\ud800"},
    commit | {"job_id": "other-abcdef"},
    of | {"kind": "RanksEnded", "node": "local", "outcome": "finished"},
    {"kind": "ServerShuttingDown", "at_us": now},
    commit | {"step": True, "generation": [1]},
]
lines = [json.dumps({"seq": seq, "event": event}) for seq, event in enumerate(records, start=1)]
lines += ['{"seq": 8, "event": ' + "[" * 100_000, "x" * 3_000_000, '{"seq": ' + "9" * 400 + ', "event": {}}']
lines += [json.dumps({"seq": 9, "event": commit})]
with open(spool + "rank0.jsonl", "w") as file:
    file.write("\\n".join(lines) + "\\n")
os.mkfifo(spool + "rank1.jsonl")
os.mkdir(spool + "rank2.jsonl")
os.symlink("/dev/zero", spool + "rank3.jsonl")
open(os.fsencode(spool) + b"rank\\xff.jsonl", "w").write(lines[-1])
open(spool + "rank99999.jsonl", "w").write(lines[-1])
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("server") / "home"
    start_server(home, slots="2")
    with Client(home) as client:
        yield client
        for job in client.jobs():
            client.stop(job.job_id, now=True)
        client.down()
    deadline = time.monotonic() + DEADLINE_S
    while is_owned(home) and time.monotonic() < deadline:
        time.sleep(0.05)


def until(client: Client, job_id: str, condition: Callable[[JobDetailView], bool]) -> JobDetailView:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(job := client.job(job_id)):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_no_record_of_a_job_ends_the_server(client: Client) -> None:
    pid = client.health().pid
    hostile = client.submit({"name": "evil", "run": [sys.executable, "-c", HOSTILE], "gpus": 1}).job
    job = until(client, hostile.job_id, lambda job: job.ended_us is not None and job.attempts[0].refused == 7)
    assert (job.state, job.checkpoint_step) == ("done", 3)
    refused = [event for _, event in client.events() if isinstance(event, ReportsRefused)]
    assert [event.count for event in refused] == [1, 1, 2, 3]
    assert refused[0].why == "CheckpointCommitted: step 10^30 is out of range"
    assert [
        type(event).__name__ for _, event in client.events() if getattr(event, "job_id", "") == "other-abcdef"
    ] == []
    after = client.submit({"name": "after", "run": ["true"], "gpus": 2}).job
    until(client, after.job_id, lambda job: job.state == "done")
    assert client.health().pid == pid
    log = (client.home / "nodes" / "local" / "agent.log").read_text()
    assert "rank 0: 1 record refused: CheckpointCommitted: step 10^30 is out of range" in log


def test_jobs_show_what_was_refused(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    code = HOSTILE.split("lines +=", 1)[0].replace("10**30},", "10**30},] * 3 + [", 1)
    code += 'open(spool + "rank0.jsonl", "w").write("\\n".join(lines) + "\\n")'
    job_id = client.submit({"name": "worse", "run": [sys.executable, "-c", code], "gpus": 1}).job.job_id
    until(client, job_id, lambda job: job.ended_us is not None and job.attempts[0].refused == 9)
    with suppress(SystemExit):
        main(["jobs", job_id, "--home", str(client.home)])
    assert "attempt 1: 9 records of its ranks refused: CheckpointCommitted: step True" in capsys.readouterr().out


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    yield scene
    scene.store.close()


OF = {"job_id": GPT, "epoch": 1}
COMMIT = CheckpointCommitted(at_us=2_000_000, **OF, step=10**30, generation=1, size_bytes=1, stall_us=1, upload_us=1)


@pytest.mark.parametrize(
    "event",
    [
        COMMIT,
        Reported(at_us=-(10**30), **OF, span=SpanClass.USEFUL, from_us=-(10**30)),
        RankLeft(at_us=1, **OF, rank=0, how="\ud800", step=1),
        RankLeft(at_us="now", **OF, rank=0, how="finished", step=1),  # type: ignore[arg-type]
        RankBehind(at_us=1, **OF, rank=0, how="odd", step=1, since_us=1),  # type: ignore[arg-type]
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_server_checks_what_an_agent_let_pass(scene: Scene, event: Event) -> None:
    scene.agents.report(event, source=f"{GPT}.1/rank0")
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.tick()
    assert scene.control.errors == ()
    [refused] = scene.of(ReportsRefused)
    assert isinstance(refused, ReportsRefused)
    assert (refused.job_id, refused.epoch, refused.rank, refused.count) == (GPT, 1, 0, 1)
    assert refused.why.startswith(f"{type(event).__name__}: ")
    assert scene.of(type(event)) == []
    assert scene.control.state.attempts == {}, "what came with it was taken in"
    [row] = scene.store.attempts(GPT)
    assert (row["refused"], row["refused_why"]) == (1, refused.why)


def test_a_report_that_comes_from_no_other_process_is_not_checked(scene: Scene) -> None:
    left = RankLeft(at_us=1, **OF, rank=3, how="finished", step=1)
    scene.agents.waiting.append(Report(f"{GPT}.1/rank0", 1, left, is_checked=True))
    scene.control.tick()
    assert (scene.of(RankLeft), scene.of(ReportsRefused)) == ([left], [])


def test_a_rank_reports_on_its_own_attempt_only(scene: Scene) -> None:
    left = RankLeft(at_us=1, **OF, rank=0, how="finished", step=1)
    for source in ("other-abcdef.1/rank0", f"{GPT}.2/rank0", f"{GPT}.1/rank1"):
        scene.agents.report(left, source=source)
    scene.control.tick()
    assert scene.of(RankLeft) == []
    assert [type(event) for event in scene.log()][-3:] == [ReportsRefused] * 3


def test_a_report_that_the_store_cannot_hold_is_refused_by_itself(scene: Scene) -> None:
    """Also one of an agent, which nobody checks field by field."""
    good = [RankLeft(at_us=1, **OF, rank=rank, how="finished", step=1) for rank in (0, 1)]
    bad = RanksEnded(at_us="now", **OF, node="local", outcome=Outcome.FAILED)  # type: ignore[arg-type]
    scene.agents.report(good[0], source=f"{GPT}.1/rank0")
    scene.agents.report(bad)
    scene.agents.report(good[1], source=f"{GPT}.1/rank1")
    scene.control.tick()
    assert scene.of(RankLeft) == good
    assert scene.agents.waiting == [], "all is acknowledged"


def test_a_store_that_raises_on_one_event_keeps_the_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (RankLeft(at_us=1, **OF, rank=0, how="finished", step=step) for step in (1, 13))
    commit = scene.store.commit

    def refuse(events: list[Event], **marks: object) -> None:
        if bad in events:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        commit(events, **marks)  # type: ignore[arg-type]

    monkeypatch.setattr(scene.store, "commit", refuse)
    for event in (bad, good):
        scene.agents.report(event, source=f"{GPT}.1/rank0")
    scene.control.tick()
    assert [type(event) for event in scene.log()][-2:] == [ReportsRefused, RankLeft]
    assert [source for source, _ in scene.control.errors] == [f"{GPT}.1/rank0"]
    assert scene.store.marks([f"{GPT}.1/rank0"])[f"{GPT}.1/rank0"] == 2
    scene.control.tick()
    assert scene.control.errors == ()


def test_a_report_that_cannot_be_applied_stops_neither_a_tick_nor_the_next_server(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, event: Event) -> None:
        if isinstance(event, RankLeft):
            raise KeyError(event.step)

    monkeypatch.setattr("cordee.account.ledger.Ledger.apply", fail)
    scene.agents.report(RankLeft(at_us=1, **OF, rank=0, how="finished", step=13), source=f"{GPT}.1/rank0")
    scene.control.tick()
    assert [job_id for job_id, _ in scene.control.errors] == [GPT]
    number = scene.control.number
    scene.restart()
    assert isinstance(scene.control, Control)
    assert scene.control.number == number + 1, "all was replayed, and the server is up"
    assert JobId(GPT) in scene.control.state.jobs
