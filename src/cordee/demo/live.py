"""Parts 2 to 4: a real gang is preempted for another one, resumes, and is compared with an uninterrupted run."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from cordee.account.ledger import attempt_segments
from cordee.demo import claims
from cordee.demo.narrator import Narrator
from cordee.demo.stage import Stage
from cordee.events import CheckpointCommitted, Event, JobEnded, Reported
from cordee.ids import JobId
from cordee.view.timeline import timeline_svg
from cordee.workload.spec import JobSpec

STEPS_PRODUCTION = 12
STEPS_AT_RISK = 5
CHECKPOINT_EVERY = "4s"


@dataclass(frozen=True, slots=True)
class LiveJobs:
    """The jobs of the live parts."""

    preempted: JobId
    production: JobId
    alone: JobId


def run_live(narrator: Narrator, stage: Stage, steps: int) -> LiveJobs:
    """Run the three jobs, two of them for `steps` steps, and check the claims about them."""
    preempted = _run_gang(narrator, stage, steps)
    production = _preempt(narrator, stage, preempted)
    alone = _resume(narrator, stage, preempted, production, steps)
    return LiveJobs(preempted, production, alone)


def _run_gang(narrator: Narrator, stage: Stage, steps: int) -> JobId:
    lead = (
        f"A preemptible job of {stage.ranks} ranks trains a small GPT with PyTorch FSDP2 on the sources of Python's "
        "own standard library. Either all its ranks run or none does. It writes checkpoints as it goes."
    )
    with narrator.part("The gang", lead):
        preempted = stage.submit(_spec(stage, "gpt", "preemptible", steps))
        stage.follow(
            lambda event: _has_work_to_lose(event, stage.events, preempted, steps), "the gang starts and trains"
        )
        started = _started(stage.out / "gpt")
        narrator.claim(claims.whole_gang(stage.events, preempted, stage.ranks, started))
    return preempted


def _preempt(narrator: Narrator, stage: Stage, preempted: JobId) -> JobId:
    lead = (
        f"A production job of {stage.ranks} ranks arrives, and there is no free slot. The scheduler gives the first "
        "job notice. Its ranks agree on one step that all of them can reach, save there, and leave."
    )
    with narrator.part("The preemption", lead):
        production = stage.submit(_spec(stage, "release", "production", STEPS_PRODUCTION))
        stage.follow(lambda event: _is_end(event, production), "the production job takes the slots and runs")
        narrator.claim(claims.preempted_for(stage.events, preempted, production))
        narrator.claim(claims.left_together(stage.events, preempted, stage.ranks))
        narrator.claim(claims.whole_gang(stage.events, production, stage.ranks, _started(stage.out / "release")))
        narrator.claim(claims.none_overlapped(stage.events, preempted, production))
    return production


def _resume(narrator: Narrator, stage: Stage, preempted: JobId, production: JobId, steps: int) -> JobId:
    lead = (
        "The first job was queued again when it left. It starts as soon as there is room, and continues. Then the same "
        "job runs once more without being preempted, and the weights are compared bit by bit."
    )
    with narrator.part("The resume", lead):
        if not any(_is_end(event, preempted) for event in stage.events):
            stage.follow(lambda event: _is_end(event, preempted), "the first job resumes")
        narrator.claim(claims.resumed_by_itself(stage.events, preempted))
        narrator.claim(claims.whole_gang(stage.events, preempted, stage.ranks, _started(stage.out / "gpt")))
        narrator.claim(claims.no_step_repeated(_steps(stage.out / "gpt"), stage.ranks, steps))
        alone = stage.submit(_spec(stage, "gpt-alone", "preemptible", steps))
        stage.follow(lambda event: _is_end(event, alone), "the same job runs without interruption")
        narrator.claim(claims.same_bits(_digests(stage.out / "gpt"), _digests(stage.out / "gpt-alone")))
        title = "The three jobs: attempts, checkpoints and the preemption"
        narrator.figure(timeline_svg(stage.events, attempt_segments(stage.events), title=title))
    return alone


def _spec(stage: Stage, name: str, tier: str, steps: int) -> JobSpec:
    out = stage.out / name
    out.mkdir(parents=True)
    run = [sys.executable, "-m", "cordee.train.demo", "--steps", str(steps), "--out", str(out)]
    return JobSpec.from_flags(
        run=run,
        gpus=str(stage.ranks),
        name=name,
        tier=tier,
        launch="rank",
        checkpoint_to=str(stage.home / "checkpoints"),
        checkpoint_every=CHECKPOINT_EVERY,
        cwd=str(out),
    )


def _is_checkpoint(event: Event, job_id: JobId) -> TypeGuard[CheckpointCommitted]:
    return isinstance(event, CheckpointCommitted) and event.job_id == job_id


def _has_work_to_lose(event: Event, events: Sequence[Event], job_id: JobId, steps: int) -> bool:
    """Return whether it is some steps beyond its first checkpoint, and has work to lose; or half-way."""
    if not isinstance(event, Reported) or event.job_id != job_id or not event.steps:
        return False
    reached = event.first_step + event.steps
    saved = max((event.step for event in events if _is_checkpoint(event, job_id)), default=None)
    return reached >= steps // 2 or (saved is not None and reached >= saved + STEPS_AT_RISK)


def _is_end(event: Event, job_id: JobId) -> bool:
    return isinstance(event, JobEnded) and event.job_id == job_id


def step_lines(out: Path) -> dict[int, list[dict[str, int]]]:
    """Return by rank what it wrote at the start of each step: {"epoch": 1, "step": 0}."""
    found = {}
    for path in sorted(out.glob("steps-rank*.jsonl")):
        rank = int(path.stem.removeprefix("steps-rank"))
        found[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def _steps(out: Path) -> dict[int, list[int]]:
    return {rank: [each["step"] for each in lines] for rank, lines in step_lines(out).items()}


def _started(out: Path) -> dict[int, int]:
    """Return by epoch how many ranks reached a step."""
    epochs = [epoch for lines in step_lines(out).values() for epoch in {each["epoch"] for each in lines}]
    return {epoch: epochs.count(epoch) for epoch in epochs}


def _digests(out: Path) -> dict[str, str]:
    """Return by file the digest of the final weights in it."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("weights*"))}
