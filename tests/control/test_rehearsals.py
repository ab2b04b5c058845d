"""Rehearsals over the API, with agents that a test plays: notice, verdict, and what later jobs gain from them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from api_scene import Api

from cordee.control.fold import Fold
from cordee.control.rehearsed.verdict import TOLERANCE, compare
from cordee.control.snapshot import loaded, taken
from cordee.events import (
    CheckpointCommitted,
    Failure,
    JobSubmitted,
    Measured,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    RanksEnded,
    RehearsalEnded,
    Reported,
    Restored,
    SpanClass,
    StepsRehearsed,
)
from cordee.ids import JobId
from cordee.workload.spec import JobSpec

S = 1_000_000
JOB = JobId("gpt-rehearsal-abcdef")


def steps(rank: int = 0, losses: tuple[float | None, ...] = (2.0, 1.5, 1.25), **changes: Any) -> StepsRehearsed:
    made = StepsRehearsed(
        at_us=1,
        job_id=JOB,
        epoch=1,
        rank=rank,
        first_step=3,
        losses=losses,
        weights=7.5,
        state=("data sampler 11", "own random numbers 22"),
        to="/c/x",
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("again", "passed", "says"),
    [
        (steps(), True, "3 steps after the resume have the same losses to the bit"),
        (steps(losses=(2.0, 1.5, 1.25001)), True, "within 8.0e-06"),
        (steps(losses=(2.0, 1.6, 1.25)), False, "another loss in step 4: 1.6 instead of 1.5 on rank 0"),
        (steps(losses=(2.0, None, 1.25)), False, "another loss in step 4: nan instead of 1.5"),
        (steps(weights=7.6), False, "another norm of the weights: 7.6 instead of 7.5"),
        (steps(state=("data sampler 12", "own random numbers 22")), False, "position in the data differs (sampler on"),
        (steps(first_step=4), False, "began with another step than the save"),
        (None, False, "rank 0 reported nothing"),
    ],
)
def test_the_steps_after_a_resume_are_compared(again: StepsRehearsed | None, passed: bool, says: str) -> None:
    drawn = compare({0: steps()}, {} if again is None else {0: again})
    assert drawn.passed is passed and says in drawn.why, drawn.why


def test_a_verdict_names_the_ranks_and_a_pass_names_what_it_could_not_see() -> None:
    off = 1.5 * (1 + 2 * TOLERANCE)
    drawn = compare({0: steps(), 1: steps(1)}, {0: steps(), 1: steps(1, losses=(2.0, off, 1.25))})
    assert not drawn.passed and "on rank 1; rank 1 of 2 differ" in drawn.why
    silent = steps(losses=(None, None, None), state=("own random numbers 22",))
    drawn = compare({0: silent}, {0: replace(silent, state=("own random numbers 23",))})
    assert drawn.passed and "the same weights to the bit" in drawn.why
    assert [note.partition(",")[0] for note in drawn.notes] == [
        "no loss was logged",
        "no sampler or data loader is in the state: its position in the data is the script's affair",
        "random numbers differed after the resume",
    ]


@dataclass
class World:
    """A server with one node of four slots, whose rehearsal a test plays."""

    api: Api
    job_id: JobId = JOB

    def start(self, spec: dict[str, Any], **how: Any) -> None:
        self.job_id = JobId(self.api.client.rehearse(spec, **how).job.job_id)
        self.turn()

    def turn(self, seconds: float = 1.0) -> None:
        self.api.scene.time.us += round(seconds * S)
        for _ in range(4):
            self.api.scene.control.tick()
            self.api.rehearsals.controller.step()
        self.api.scene.control.tick()

    def report(self, kind: Any, **fields: Any) -> None:
        scene = self.api.scene
        epoch = scene.control.state.jobs[self.job_id].epoch
        event = kind(at_us=scene.time.us, job_id=self.job_id, epoch=epoch, **fields)
        scene.agents.report(event, source="" if kind is RanksEnded else f"{self.job_id}.{epoch}/rank0")
        self.turn()

    def attempt(self, step: int, losses: tuple[float | None, ...]) -> None:
        """Play an attempt that starts at this step, gets notice before step 3, and runs three steps more."""
        self.report(Restored, step=step, generation=step or None)
        measured = {"rank": 0, "peak_bytes": 10**9, "steps_total": 100, "step_us": 2 * S}
        now_us = self.api.scene.time.us
        self.report(Reported, span=SpanClass.USEFUL, from_us=now_us, first_step=step, steps=3)
        self.report(Measured, step=3 if not step else 6, **measured)
        if not step:
            saved = {"size_bytes": 10, "stall_us": S, "upload_us": 9 * S}
            self.report(CheckpointCommitted, step=3, generation=1, **saved)
        self.report(StepsRehearsed, rank=0, first_step=3, losses=losses, weights=1.0, state=(), to="/c")
        self.report(RankLeft, rank=0, how="finished" if step else "checkpointed", step=6)
        self.report(RanksEnded, node="local", outcome=Outcome.FINISHED if step else Outcome.CHECKPOINTED)

    def result(self) -> RehearsalEnded:
        [found] = [event for event in self.api.scene.of(RehearsalEnded) if isinstance(event, RehearsalEnded)]
        return found


@pytest.fixture
def world(api: Api) -> World:
    return World(api)


def spec_in(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "train.py").write_text("print('a script')\n")
    flags = {"gpus": "2", "name": "gpt", "checkpoint_to": str(folder / "c")} | more
    made = JobSpec.from_flags(run=["python", "train.py"], **flags)
    return made.model_copy(update={"cwd": str(folder)}).model_dump(mode="json")


def test_a_rehearsal_gets_notice_passes_and_gives_later_jobs_its_figures(world: World, tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    before = world.api.client.submit(spec)
    assert before.rehearsed is None
    world.api.client.stop(before.job.job_id, now=True)
    world.start(spec)
    job = world.api.scene.control.state.jobs[world.job_id].job
    assert (job.name, job.gpus, job.rehearsed_steps, job.retries) == ("gpt-rehearsal", 2, 3, (("script", 0),))
    world.attempt(0, (2.0, 1.5, 1.0))
    notices = [event for event in world.api.scene.of(NoticeGiven) if isinstance(event, NoticeGiven)]
    assert [each.reason for each in notices if each.job_id == world.job_id] == [NoticeReason.REHEARSAL]
    world.attempt(3, (2.0, 1.5, 1.0))
    found = world.result()
    assert found.passed and (found.gpus, found.steps, found.save_us, found.step_us) == (2, 3, 10 * S, 2 * S)
    assert found.restart_us is not None and found.gpu_name == "slot"
    made = world.api.client.submit(spec)
    assert made.rehearsed is not None and made.rehearsed.passed and made.rehearsed.grace_s == 17.0
    later = world.api.scene.control.state.jobs[JobId(made.job.job_id)].job
    assert (later.grace_us, later.save_us, later.restart_us) == (17 * S, 10 * S, found.restart_us)
    plan = later.estimate_on(2)
    assert plan is not None and (plan.step_us, plan.step_us_low, plan.save_us) == (2 * S, S, 10 * S)
    # Another number of GPUs has only the grace; a grace of its own, a limit of the operator, and other code win.
    other = world.api.operations.admitted(JobSpec.model_validate(spec | {"gpus": 4}), JobId("x-abcdef"), "ada").job
    assert (other.grace_us, other.estimates, other.restart_us) == (17 * S, (), 60 * S)
    own = world.api.client.submit(spec | {"on_preempt": {"grace_s": 44}})
    assert world.api.scene.control.state.jobs[JobId(own.job.job_id)].job.grace_us == 44 * S
    (tmp_path / "settings.json").write_text('{"grace_max": "12s"}')
    limited = world.api.operations.admitted(JobSpec.model_validate(spec), JobId("x-abcdef"), "ada").job
    assert limited.grace_us == 12 * S
    (tmp_path / "train.py").write_text("print('another script')\n")
    assert world.api.client.submit(spec).rehearsed is None
    fold = world.api.scene.control.fold
    again = loaded(taken(fold), fold.state.policy, fold.number)
    assert isinstance(again, Fold) and again.rehearsals.results == fold.rehearsals.results != {}


def failed(tail: str, code: int | None = 1, signal: int | None = None) -> Failure:
    return Failure(rank=1, exit_code=code, signal=signal, tail=("Traceback", tail))


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (failed("ValueError: no such file"), "rank 1 failed (exit code 1): ValueError: no such file"),
        (
            failed("torch.OutOfMemoryError: CUDA out of memory."),
            "1 ran out of memory: torch.Out",
        ),
    ],
)
def test_a_script_that_fails_ends_its_rehearsal_at_once_with_the_reason(
    world: World, tmp_path: Path, failure: Failure, says: str
) -> None:
    world.start(spec_in(tmp_path))
    world.report(RanksEnded, node="local", outcome=Outcome.FAILED, failure=failure)
    assert not world.result().passed and says in world.result().why
    assert world.api.client.rehearsals()[0].why == world.result().why


def test_a_notice_that_is_ignored_and_a_lost_checkpoint_end_the_rehearsal(world: World, tmp_path: Path) -> None:
    world.start(spec_in(tmp_path), limit_s=60.0)
    world.report(Restored, step=0, generation=None)
    world.report(Measured, rank=0, step=3, peak_bytes=1, steps_total=100, step_us=S)
    world.turn(16.0)
    world.report(RanksEnded, node="local", outcome=Outcome.KILLED)
    assert "the notice was ignored: it did not leave within 15 s" in world.result().why
    assert world.api.client.job(world.job_id).state in ("stopping", "stopped")


def test_a_save_that_failed_at_the_notice_says_why(world: World, tmp_path: Path) -> None:
    world.start(spec_in(tmp_path), limit_s=60.0)
    world.report(Restored, step=0, generation=None)
    world.report(Measured, rank=0, step=3, peak_bytes=1, steps_total=100, step_us=S)
    world.turn()
    said = "cordee: no checkpoint of step 3: batches were read from the loader itself"
    tail = (said, "hint: take them from sampler.batches(loader)", "cordee: left at step 3: durable: nothing")
    failure = Failure(rank=0, exit_code=60, signal=None, tail=tail)
    world.report(RanksEnded, node="local", outcome=Outcome.KILLED, failure=failure)
    why = "no checkpoint was durable when it had left after its notice: no checkpoint of step 3: batches were read from"
    assert why in world.result().why


def test_a_script_without_cordee_and_one_that_is_too_short_do_not_pass(world: World, tmp_path: Path) -> None:
    world.start(spec_in(tmp_path))
    world.report(RanksEnded, node="local", outcome=Outcome.FINISHED)
    assert "never entered cordee.job()" in world.result().why


@pytest.mark.parametrize(("gpu", "gpus", "fewest"), [(None, 4, 4), (2, 4, 2)])
def test_a_job_without_a_model_is_rehearsed_on_all_its_gpus_unless_told(
    world: World, tmp_path: Path, gpu: int | None, gpus: int, fewest: int
) -> None:
    made = world.api.client.rehearse(spec_in(tmp_path, gpus=str(gpus)), gpus=gpu)
    assert made.job.gpus == fewest and made.why_gpus
    submitted = [event for event in world.api.scene.of(JobSubmitted) if isinstance(event, JobSubmitted)]
    assert submitted[-1].job.rehearsed_steps == 3
