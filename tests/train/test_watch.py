"""A rank that stands still, is frozen or slow is told about, by name, with its stack; and a gang that hangs ends."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_job import LIMIT_S, UNDER_AGENT, Rank, environment, events_of, folders, gang

from cordee.events import Behind, RankBehind, RankLeft, Reported, SpanClass
from cordee.ids import JobId
from cordee.train.report import Reporter
from cordee.train.settings import HangLimits, settings
from cordee.train.step_timer import StepTimer
from cordee.train.watch.watch import RankWatch

WATCHED = str(Path(__file__).with_name("watched_script.py"))


def until(true: Callable[[], Any], what: str) -> Any:
    tick = threading.Event()
    for _ in range(round(LIMIT_S / 0.01)):
        if found := true():
            return found
        tick.wait(0.01)
    raise AssertionError(f"not within {LIMIT_S} s: {what}")


def told(spool: Path, rank: int, how: Behind) -> list[RankBehind]:
    path = spool / f"rank{rank}.jsonl"
    events = events_of(spool, rank) if path.exists() and path.read_text().endswith("\n") else []
    return [event for event in events if isinstance(event, RankBehind) and event.how is how]


def test_a_rank_alone_tells_of_itself_and_its_pause_is_a_stall(tmp_path: Path) -> None:
    mine = settings({}, to=None)
    mine = replace(mine, job_id=JobId("a-bcdefg"), epoch=1, spool=tmp_path, hang=HangLimits(report_s=0.2))
    pace, reporter, hung = StepTimer(), Reporter(mine, 0), []
    watch = RankWatch(
        mine, rank=0, world_size=1, store=None, prefix="", timer=pace, reporter=reporter, on_hung=hung.append
    )
    reporter.switch(SpanClass.USEFUL, 0)
    for step in range(3):
        pace.began()
        reporter.stepped(step)
        pace.ended()
    watch.begin()
    (stuck,) = until(lambda: told(tmp_path, 0, Behind.STUCK), "it stands still")
    assert (stuck.rank, stuck.step) == (0, 3) and "test_watch.py" in stuck.where
    assert any("in test_a_rank_alone_tells_of_itself" in line for line in stuck.stack)
    pace.began()
    reporter.stepped(3)
    pace.ended()
    pace._took_s.extend([30.0] * 20)  # no stall of this machine is another pause
    until(lambda: told(tmp_path, 0, Behind.OVER), "it goes on")
    assert watch._loop._longest_pause_s >= 0.2, "a pause that ended was none to tell of"
    watch.end()
    watch.close()
    reporter.switch(SpanClass.RESTART, 4)
    reporter.close()
    spans = [event for event in events_of(tmp_path, 0) if isinstance(event, Reported)]
    kinds = [(span.span, span.first_step, span.steps) for span in spans]
    assert kinds[-3:] == [(SpanClass.USEFUL, 0, 3), (SpanClass.STALL, 3, 0), (SpanClass.USEFUL, 3, 1)]
    assert spans[-2].at_us - spans[-2].from_us >= 200_000 and not hung


def test_the_first_step_may_compile_and_long_steps_are_waited_for() -> None:
    pace = StepTimer()
    mine = replace(settings({}), hang=HangLimits(report_s=60.0))
    watch = RankWatch(
        mine,
        rank=0,
        world_size=1,
        store=None,
        prefix="",
        timer=pace,
        reporter=Reporter(mine, 0),
        on_hung=lambda s: None,
    )
    watch.close()
    assert watch._loop.limit_s() == 600.0
    pace.began()
    pace.ended()
    assert watch._loop.limit_s() == 60.0
    pace._took_s.extend([30.0] * 20)
    assert watch._loop.limit_s() == 300.0
    watch._loop.running, watch._renew_at_s = True, math.inf
    watch._loop.step, watch._loop._went_on_s = pace.step, time.monotonic() - 1000.0
    watch.keep_alive()
    watch._look(time.monotonic())
    assert not watch._loop.stuck, "an evaluation that asks between its batches hangs nowhere"
    watch._look(time.monotonic() + 299.0)
    assert not watch._loop.stuck
    watch._look(time.monotonic() + 301.0)
    assert watch._loop.stuck, "and if it no longer does, it may"


@pytest.mark.gang
def test_a_slow_rank_and_then_a_hung_one_are_named_and_the_gang_ends(tmp_path: Path) -> None:
    out, spool = folders(tmp_path, "out", "spool")
    env = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_HANG_REPORT_S": "3", "CORDEE_HANG_RESTART_S": "8"}
    ranks = gang(out, 4, script=WATCHED, **env)
    try:
        until(lambda: (out / "steps0").exists() and len((out / "steps0").read_text()) >= 30, "steps")
        assert not told(spool, 0, Behind.SLOW), "nobody was slow"
        (out / "slow").touch()
        (slow,) = until(lambda: told(spool, 0, Behind.SLOW), "rank 2 is slow")
        assert slow.rank == 2 and 0.1 <= slow.waited < 0.8
        (out / "slow").unlink()
        assert until(lambda: told(spool, 0, Behind.OVER), "it is no longer")[0].rank == 2
        (out / "hang").touch()
        assert [rank.wait() for rank in ranks] == [60] * 4
    finally:
        for rank in ranks:
            rank.process.kill()
    (stuck,) = told(spool, 0, Behind.STUCK)
    assert stuck.rank == 3 and "in next_batch: " in stuck.where, "the innermost line of the script itself"
    assert "in next_batch: " in "\n".join(ranks[0].lines), "and its stack is in the log"
    left = [event.how for rank in range(4) for event in events_of(spool, rank) if isinstance(event, RankLeft)]
    assert left == ["hung"] * 4
    assert len(list(spool.glob("flight_*"))) == 4, "torch's flight records"


@pytest.mark.gang
def test_a_frozen_process_is_named_by_the_others(tmp_path: Path) -> None:
    out, to, spool = folders(tmp_path, "out", "to", "spool")
    env = {**UNDER_AGENT, "CORDEE_SPOOL": str(spool), "CORDEE_HANG_REPORT_S": "2", "CORDEE_HANG_RESTART_S": "6"}
    ranks = gang(out, 3, "--freeze", "1:12", "--every", "10", CORDEE_CHECKPOINT_TO=str(to), **env)
    try:
        assert [ranks[number].wait() for number in (0, 2)] == [60, 60], "".join(ranks[0].lines)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.wait()
    (silent,) = told(spool, 0, Behind.SILENT)
    assert silent.rank == 1 and silent.where == f"its process {ranks[1].process.pid} is stopped by a signal"
    assert "durable: step 10" in "".join(ranks[0].lines)


def test_watch_reports_a_thread_that_never_releases_the_interpreter(tmp_path: Path) -> None:
    """A call into C that does not let other threads in: no Python thread can say where it is."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, cordee\n"
        "with cordee.job({}) as job:\n"
        "    for step in job.steps(10):\n"
        "        if step == 3:\n"
        "            ctypes.PyDLL(None).sleep(3)\n"
    )
    rank = Rank([sys.executable, str(script)], environment(CORDEE_HANG_REPORT_S="1"))
    assert rank.wait() == 0
    lines = "".join(rank.lines)
    assert "Timeout (0:00:01)!" in lines and f'File "{script}", line 5 in <module>' in lines


def test_hang_limits_of_the_agent_win() -> None:
    alone = settings({}, hang="30m")
    assert (alone.hang.report_s, alone.hang.restart_s) == (60.0, 1800.0)
    assert settings({}).hang.restart_s is None
    under = settings({"CORDEE_HANG_REPORT_S": "0", "CORDEE_HANG_RESTART_S": "90"}, hang="30m")
    assert (under.hang.report_s, under.hang.restart_s) == (0.0, 90.0)


def test_a_record_that_ranks_write_is_small(tmp_path: Path) -> None:
    """The agent reads the last 64 KiB of a spool for how its rank left."""
    from cordee.train.watch.stacks import STACK_LINES_MAX, main_stack

    def deep(n: int) -> tuple[str, tuple[str, ...]]:
        return main_stack() if n == 0 else deep(n - 1)

    where, stack = deep(200)
    assert len(stack) == STACK_LINES_MAX and len(json.dumps([where, stack])) < 1 << 14
