"""The job around a user's loop, in processes of its own: it leaves on a signal and goes on bit by bit."""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cordee.event_json import decode
from cordee.events import (
    CheckpointCommitted,
    Estimate,
    Measured,
    MetricsLogged,
    RankLeft,
    Reported,
    Restored,
    SpanClass,
)
from cordee.telemetry.host import free_port
from cordee.train.reading import Reading
from cordee.train.report import Reporter
from cordee.train.settings import settings
from forks import start

SCRIPT = str(Path(__file__).with_name("job_script.py"))
LIMIT_S = 120.0
# torch asks the name server about each of its peers; a slow one would stall the tests.
PATIENT = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
UNDER_AGENT = {"CORDEE_JOB": "test-abcdef", "CORDEE_EPOCH": "1", "CORDEE_ATTEMPT": "test-abcdef.1"}


def environment(**extra: str) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    return {**outside, **PATIENT, **extra}


class Rank:
    """One process of a job; reads what it writes, so that a test can wait for it."""

    def __init__(self, command: list[str], env: dict[str, str], **files: int) -> None:
        read, write = os.pipe()
        self.process = start(command, env, stderr=write, **files)
        os.close(write)
        self.lines: list[str] = []
        self.stderr = os.fdopen(read)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with self.stderr:
            self.lines += self.stderr

    def wait(self) -> int:
        code = self.process.wait(LIMIT_S)
        self.reader.join(LIMIT_S)
        return code


def gang(
    out: Path, world: int, *args: str, script: str = SCRIPT, within: tuple[str, ...] = (), **env: str
) -> list[Rank]:
    """Ranks as an agent starts them; `within`: the command that each is started by."""
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), **env}
    command = [*within, sys.executable, script, "--out", str(out), *args]
    return [Rank(command, environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared)) for rank in range(world)]


def alone(out: Path, *args: str, **env: str) -> Rank:
    return Rank([sys.executable, SCRIPT, "--out", str(out), *args], environment(**env))


def steps_of(out: Path, rank: int = 0) -> list[int]:
    path = out / f"steps{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until_step(out: Path, step: int, ranks: list[Rank], rank: int = 0) -> None:
    """Return when a rank has begun the step."""
    tick = threading.Event()
    while step not in steps_of(out, rank):
        assert ranks[0].process.poll() is None, "".join(ranks[0].lines)
        tick.wait(0.005)


def until_line(rank: Rank, text: str) -> None:
    """Return when the rank has written a line with this text."""
    tick = threading.Event()
    while not any(text in line for line in list(rank.lines)):
        assert rank.process.poll() is None, "".join(rank.lines)
        tick.wait(0.005)


def end_of(out: Path, rank: int = 0) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((out / f"end{rank}.json").read_text())
    return end


def events_of(spool: Path, rank: int) -> list[Any]:
    return [decode(json.loads(line)["event"]) for line in (spool / f"rank{rank}.jsonl").read_text().splitlines()]


def folders(base: Path, *names: str) -> list[Path]:
    paths = [base / name for name in names]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("uninterrupted")
    rank = alone(out)
    assert rank.wait() == 0
    assert "unprotected" in "".join(rank.lines)
    return end_of(out)


@pytest.mark.parametrize("slurm", [False, True])
def test_a_signal_costs_no_step_and_no_bit(tmp_path: Path, uninterrupted: dict[str, Any], slurm: bool) -> None:
    out, to = folders(tmp_path, "out", "to")
    env = {"SLURM_JOB_ID": "7"} if slurm else {}
    first = alone(out, "--to", str(to), "--hold", "0:20", **env)
    until_step(out, 20, [first])
    first.process.send_signal(signal.SIGUSR1 if slurm else signal.SIGTERM)
    first.process.send_signal(signal.SIGTERM)  # a second notice changes nothing
    assert first.wait() == 75, "".join(first.lines)
    assert not (out / "end0.json").exists(), "a line after the loop has run"
    assert alone(out, "--to", str(to)).wait() == 0
    end = end_of(out)
    assert steps_of(out) == list(range(60)), "a step was repeated or left out"
    losses = uninterrupted["losses"]
    assert end["losses"] == losses[-len(end["losses"]) :] and 0 < len(end["losses"]) < 60
    for name in ("weights", "buffers", "at", "seen"):
        assert end[name] == uninterrupted[name], name


def test_its_reports_have_no_gap_and_its_commits_are_told(tmp_path: Path) -> None:
    out, to, spool = folders(tmp_path, "out", "to", "spool")
    told = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_CHECKPOINT_TO": str(to), "CORDEE_GRACE_S": "30"}
    planned = Estimate(layout="dp1", gpus=1, peak_bytes=1, gpu_memory_bytes=0, flop_per_token=1e6, gpu_flop_per_s=1e12)
    told["CORDEE_ESTIMATE"] = json.dumps(asdict(planned))
    assert alone(out, "--every", "25", "--to", "/nowhere", **told).wait() == 0
    events = events_of(spool, 0)
    first, last = [event for event in events if isinstance(event, Measured)]
    assert (first.step, last.step, last.steps_total) == (3, 60, 60)
    assert 50e6 < first.peak_bytes <= last.peak_bytes < 4e9, "resident memory of a process that has imported torch"
    assert last.step_us > 0
    assert last.mfu == pytest.approx(last.tokens_per_s * 1e6 / 1e12)
    spans = [event for event in events if isinstance(event, Reported)]
    assert all(before.at_us == after.from_us for before, after in pairwise(spans))
    assert spans[0].span is SpanClass.RESTART
    useful = [span for span in spans if span.span is SpanClass.USEFUL]
    assert sum(span.steps for span in useful) == 60 and sum(span.tokens for span in useful) == 60 * 16
    assert next(span.first_step for span in useful if span.steps) == 0
    assert all(span.steps == 0 for span in spans if span.span is not SpanClass.USEFUL)
    assert [event.step for event in events if isinstance(event, Restored)] == [0]
    assert [event.step for event in events if isinstance(event, CheckpointCommitted)] == [25, 50, 60]
    assert events[-1] == RankLeft(
        at_us=events[-1].at_us, job_id="test-abcdef", epoch=1, rank=0, how="finished", step=60
    )


def test_at_a_rung_it_leaves_with_its_metrics_and_goes_on_bit_by_bit(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    out, to = folders(tmp_path, "out", "to")
    for epoch, (code, step) in enumerate([(75, 20), (75, 40), (0, 60)], start=1):
        [spool] = folders(tmp_path, f"spool{epoch}")
        told = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_CHECKPOINT_TO": str(to), "CORDEE_EPOCH": str(epoch)}
        told |= {"CORDEE_TRIAL": '{"lr": 0.01}', "CORDEE_RUNGS": "20,40,60"}
        rank = alone(out, "--steps", "1000", **told)
        assert rank.wait() == code, "".join(rank.lines)
        *_, logged, left = (each for each in events_of(spool, 0) if isinstance(each, MetricsLogged | RankLeft))
        assert (logged.step, set(logged.names)) == (step, {"loss"})
        assert logged.values[-1] == pytest.approx(uninterrupted["losses"][step - 1][1])
        assert (left.how, left.step) == ("checkpointed" if code else "finished", step)
    assert steps_of(out) == list(range(60)), "a step was repeated or left out, or it went beyond its last rung"
    assert end_of(out)["weights"] == uninterrupted["weights"]


def test_a_step_that_never_ends_is_left_at_the_deadline(tmp_path: Path) -> None:
    out, to, spool = folders(tmp_path, "out", "to", "spool")
    told = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_CHECKPOINT_TO": str(to), "CORDEE_GRACE_S": "2"}
    rank = alone(out, "--every", "10", "--hang", "0:15", **told)
    until_step(out, 15, [rank])
    until_line(rank, "of step 10: ")  # durable, which may take longer than the grace period
    rank.process.send_signal(signal.SIGTERM)
    assert rank.wait() == 60, "".join(rank.lines)
    assert [(event.how, event.step) for event in events_of(spool, 0) if isinstance(event, RankLeft)] == [
        ("aborted", 15)
    ]
    assert alone(out, **{**told, "CORDEE_EPOCH": "2"}).wait() == 0
    assert steps_of(out) == [*range(16), *range(10, 60)], "it goes on from the checkpoint of step 10"


def test_output_that_cannot_be_written_keeps_no_rank(tmp_path: Path) -> None:
    out, to = folders(tmp_path, "out", "to")
    args = ("--out", str(out), "--to", str(to), "--every", "10", "--grace", "2s", "--hang", "0:15")
    with Path("/dev/full").open("w") as full:
        rank = Rank([sys.executable, SCRIPT, *args], environment(), stdout=full.fileno())
    try:
        until_step(out, 15, [rank])
        until_line(rank, "of step 10: ")  # durable, which may take longer than the grace period
        rank.process.send_signal(signal.SIGTERM)
        assert rank.wait() == 60, "".join(rank.lines)
    finally:
        rank.process.kill()
    assert "leaves in step 15; durable: step 10" in "".join(rank.lines)


def test_the_last_record_needs_no_device(tmp_path: Path) -> None:
    class Lost(Reading):
        """A loss on a device that has failed."""

        def is_ready(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    reporter = Reporter(settings({**UNDER_AGENT, "CORDEE_SPOOL": str(tmp_path)}), 0)
    reporter.switch(SpanClass.USEFUL, 0)
    reporter.log(Lost("loss", 1.0), 16)
    reporter.left("checkpointed", 1)
    reporter.close()
    span, left = events_of(tmp_path, 0)[-2:]
    assert (span.span, span.tokens, span.loss) == (SpanClass.USEFUL, 16, None)
    assert (left.how, left.step) == ("checkpointed", 1)


def test_no_room_for_a_checkpoint_ends_no_loop_but_the_job_is_not_finished(tmp_path: Path) -> None:
    out, to, spool = folders(tmp_path, "out", "to", "spool")
    told = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_CHECKPOINT_TO": str(to)}
    rank = alone(out, "--every", "25", "--hold", "0:3", **told)
    until_step(out, 3, [rank])
    chunks = [path for path in to.rglob("*") if path.is_dir() and path.name == "chunks"]
    for path in chunks or [to / "chunks"]:
        if path.exists():
            path.rmdir()
        path.write_text("in the way")
    (out / "go").touch()
    assert rank.wait() == 1, "".join(rank.lines)
    lines = "".join(rank.lines)
    assert "checkpoint failed" in lines and "of step 60, failed; durable: nothing" in lines
    assert steps_of(out) == list(range(60)), "the loop went on to its end"
    assert (out / "weights0").exists() and not (out / "end0.json").exists(), "the block ran to its end, and then raised"
    left = [event for event in events_of(spool, 0) if isinstance(event, RankLeft)]
    assert [(event.how, event.step) for event in left] == [("aborted", 60)]


@pytest.mark.gang
def test_a_gang_under_torchrun_leaves_at_one_step_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole, out, to = folders(tmp_path, "whole", "out", "to")
    for rank in (ranks := gang(whole, 2)):
        assert rank.wait() == 0, "".join(ranks[0].lines)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT]
    first = Rank([*torchrun, "--out", str(out), "--to", str(to), "--hold", "0:20"], environment())
    until_step(out, 20, [first])
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 1, "torchrun itself exits 1 on SIGTERM"
    assert "its checkpoint is durable" in "".join(first.lines)
    for rank in (ranks := gang(out, 2, "--to", str(to))):
        assert rank.wait() == 0, "".join(ranks[0].lines)
    for rank in range(2):
        assert steps_of(out, rank) == list(range(60)), "a step was repeated or left out"
        ends = end_of(whole, rank), end_of(out, rank)
        assert len({end["weights"] for end in ends}) == 1 and len({end["at"] for end in ends}) == 1
        assert ends[0]["losses"][-1] == ends[1]["losses"][-1]
    assert end_of(whole)["buffers"] == end_of(out)["buffers"], "those of rank 0, which differ from rank 1's"


@pytest.mark.gang
@pytest.mark.parametrize("how", ["hang", "freeze"])
def test_a_rank_that_hangs_does_not_hold_the_others(tmp_path: Path, how: str) -> None:
    """A hung rank still pledges; a frozen one does not, and the round is aborted. Either way all others end in time."""
    out, to, spool = folders(tmp_path, "out", "to", "spool")
    told = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_CHECKPOINT_TO": str(to), "CORDEE_GRACE_S": "4"}
    ranks = gang(out, 3, f"--{how}", "1:12", "--every", "10", **told)
    until_step(out, 12, ranks, rank=1)
    ranks[2].process.send_signal(signal.SIGTERM)  # one rank alone hears of it
    try:
        for number in (0, 2) if how == "freeze" else (0, 1, 2):
            assert ranks[number].wait() == 60, "".join(ranks[number].lines)
            left = [event.how for event in events_of(spool, number) if isinstance(event, RankLeft)]
            assert left == ["aborted"]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.wait()
    commits = [event.step for event in events_of(spool, 0) if isinstance(event, CheckpointCommitted)]
    assert commits == [10], "what was durable before stays"
