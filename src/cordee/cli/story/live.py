"""Parts 2 to 4: a real gang is pushed aside for another one, resumes, and is compared with one that nobody pushed."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from cordee.account.ledger import attempt_segments
from cordee.cli.story import claims
from cordee.cli.story.stage import Stage
from cordee.cli.story.teller import Teller
from cordee.events import CheckpointCommitted, Event, JobEnded, Reported
from cordee.ids import JobId
from cordee.view.timeline import timeline_svg
from cordee.workload.spec import JobSpec

STEPS_PRODUCTION = 12
STEPS_AT_RISK = 5
CHECKPOINT_EVERY = "4s"


@dataclass(frozen=True, slots=True)
class Cast:
    """Who took part."""

    pushed: JobId
    production: JobId
    alone: JobId


def tell_live(teller: Teller, stage: Stage, steps: int) -> Cast:
    """Run the three jobs, two of them for so many steps, and check what they claim."""
    pushed = _tell_gang(teller, stage, steps)
    production = _tell_push(teller, stage, pushed)
    alone = _tell_resume(teller, stage, pushed, production, steps)
    return Cast(pushed, production, alone)


def _tell_gang(teller: Teller, stage: Stage, steps: int) -> JobId:
    lead = (
        f"A preemptible job of {stage.ranks} ranks trains a small GPT with PyTorch FSDP2 on the sources of Python's "
        "own standard library. Either all its ranks run or none does. It writes checkpoints as it goes."
    )
    with teller.part("The gang", lead):
        pushed = stage.submit(_spec(stage, "gpt", "preemptible", steps))
        stage.follow(lambda event: _is_worth_pushing(event, stage.events, pushed, steps), "the gang starts and trains")
        started = _started(stage.out / "gpt")
        teller.claim(claims.whole_gang(stage.events, pushed, stage.ranks, started))
    return pushed


def _tell_push(teller: Teller, stage: Stage, pushed: JobId) -> JobId:
    lead = (
        f"A production job of {stage.ranks} ranks arrives, and there is no free slot. The scheduler gives the first "
        "job notice. Its ranks agree on one step that all of them can reach, save there, and leave."
    )
    with teller.part("The push", lead):
        production = stage.submit(_spec(stage, "release", "production", STEPS_PRODUCTION))
        stage.follow(lambda event: _is_end(event, production), "the production job takes the slots and runs")
        teller.claim(claims.preempted_for(stage.events, pushed, production))
        teller.claim(claims.left_together(stage.events, pushed, stage.ranks))
        teller.claim(claims.whole_gang(stage.events, production, stage.ranks, _started(stage.out / "release")))
        teller.claim(claims.none_overlapped(stage.events, pushed, production))
    return production


def _tell_resume(teller: Teller, stage: Stage, pushed: JobId, production: JobId, steps: int) -> JobId:
    lead = (
        "Nobody submits the first job again: it was queued again when it left, starts as soon as there is room, and "
        "goes on. Then the same job runs once more without being pushed, and the weights are compared bit by bit."
    )
    with teller.part("The resume", lead):
        if not any(_is_end(event, pushed) for event in stage.events):
            stage.follow(lambda event: _is_end(event, pushed), "the first job resumes")
        teller.claim(claims.resumed_by_itself(stage.events, pushed))
        teller.claim(claims.whole_gang(stage.events, pushed, stage.ranks, _started(stage.out / "gpt")))
        teller.claim(claims.no_step_repeated(_traces(stage.out / "gpt"), stage.ranks, steps))
        alone = stage.submit(_spec(stage, "gpt-alone", "preemptible", steps))
        stage.follow(lambda event: _is_end(event, alone), "the same job runs without interruption")
        teller.claim(claims.same_bits(_digests(stage.out / "gpt"), _digests(stage.out / "gpt-alone")))
        title = "The three jobs: attempts, checkpoints and the preemption"
        teller.figure(timeline_svg(stage.events, attempt_segments(stage.events), title=title))
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


def _is_worth_pushing(event: Event, events: Sequence[Event], job_id: JobId, steps: int) -> bool:
    """Some steps beyond its first checkpoint, so that there is something to lose; on a fast machine half-way."""
    if not isinstance(event, Reported) or event.job_id != job_id or not event.steps:
        return False
    reached = event.first_step + event.steps
    saved = max((event.step for event in events if _is_checkpoint(event, job_id)), default=None)
    return reached >= steps // 2 or (saved is not None and reached >= saved + STEPS_AT_RISK)


def _is_end(event: Event, job_id: JobId) -> bool:
    return isinstance(event, JobEnded) and event.job_id == job_id


def _lines(out: Path) -> dict[int, list[dict[str, int]]]:
    """By rank, what each wrote at the start of each step: {"epoch": 1, "step": 0}."""
    found = {}
    for path in sorted(out.glob("steps-rank*.jsonl")):
        rank = int(path.stem.removeprefix("steps-rank"))
        found[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def _traces(out: Path) -> dict[int, list[int]]:
    return {rank: [each["step"] for each in lines] for rank, lines in _lines(out).items()}


def _started(out: Path) -> dict[int, int]:
    """By epoch, how many ranks came to a step."""
    epochs = [epoch for lines in _lines(out).values() for epoch in {each["epoch"] for each in lines}]
    return {epoch: epochs.count(epoch) for epoch in epochs}


def _digests(out: Path) -> dict[str, str]:
    """By file, the digest of the final weights that it holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("weights*"))}
