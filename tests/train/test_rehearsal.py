"""Rehearsals on real ranks: notice, save, some steps past it, and the same steps after the resume."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cordee.control.rehearsed.verdict import Verdict, compare
from cordee.event_json import decode
from cordee.events import CheckpointCommitted, Measured, RankLeft, StepsRehearsed
from cordee.train.rehearsal import rehearsal
from cordee.train.report import Reporter
from cordee.train.settings import settings
from cordee.workload.rehearsal import REHEARSAL_ENV
from runs import Runs, runs_of

SCRIPT = Path(__file__).with_name("rehearsed_script.py")


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with runs_of(SCRIPT) as found:
        yield found


def rehearsed(run: Runs, folder: Path, fault: str, world: int) -> Verdict:
    """The verdict on two attempts of these ranks; the first one gets notice in its second step."""
    found = []
    for epoch, notice, code in ((1, "step 1", 75), (2, None, 0)):
        spool = folder / f"spool{epoch}"
        spool.mkdir()
        env = {
            "CORDEE_JOB": "tiny-rehearsal-abcdef",
            "CORDEE_EPOCH": str(epoch),
            "CORDEE_SPOOL": str(spool),
            "CORDEE_CHECKPOINT_TO": str(folder / "to"),
            "CORDEE_GRACE_S": "200",
            "CORDEE_CLOUD": "none",
            REHEARSAL_ENV: "2+3",
        }
        assert run(fault, world=world, notice=notice, env=env) == [code] * world, run.said()
        said = "".join(run.lines)
        assert [said.count(f"step {step}") for step in range(6)] == [*[world * (epoch == 1)] * 2, *[world] * 3, 0]
        events = [
            [decode(json.loads(line)["event"]) for line in (spool / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(world)
        ]
        measured = [event for event in events[0] if isinstance(event, Measured)]
        saved = [event.step for event in events[0] if isinstance(event, CheckpointCommitted)]
        assert saved == ([2] if epoch == 1 else []) and (epoch == 2 or measured[0].step == 2)
        left = [event.how for rank in events for event in rank if isinstance(event, RankLeft)]
        assert left == [("checkpointed" if epoch == 1 else "finished")] * world
        found.append({event.rank: event for rank in events for event in rank if isinstance(event, StepsRehearsed)})
    assert {event.to for event in found[0].values()} == {str(folder / "to")}
    return compare(*found)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_steps_past_the_save_are_those_after_the_resume(run: Runs, tmp_path: Path, world: int) -> None:
    found = rehearsed(run, tmp_path, "gang" if world > 1 else "", world)
    assert (found.passed, found.notes) == (True, ()), found
    assert found.why == "3 steps after the resume have the same losses to the bit"


def test_a_state_without_its_optimizer_is_found_out(run: Runs, tmp_path: Path) -> None:
    found = rehearsed(run, tmp_path, "forgets", 1)
    assert not found.passed and "another loss in step 4" in found.why


def test_a_script_without_a_destination_is_no_rehearsal() -> None:
    nothing = settings({})
    reporter = Reporter(nothing, 0)
    assert rehearsal(0, reporter, None, {}) is None
    with pytest.raises(Exception, match="no checkpoint destination"):
        rehearsal(0, reporter, None, {REHEARSAL_ENV: "3+3"})
