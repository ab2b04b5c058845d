"""Chains of a world: jobs that start after others, and people who hold, pause, resume, requeue and prioritize.

All is drawn from a generator of its own, so that the rest of a seed's world stays as it was without chains.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cordee.control.tick import Control
from cordee.events import (
    After,
    AfterEnd,
    HoldReleased,
    Job,
    JobHeld,
    JobPrioritized,
    MaintenanceBooked,
    RequeueRequested,
)
from cordee.ids import JobId
from cordee.units import US_PER_S

if TYPE_CHECKING:
    from faults_world.world import FaultWorld


def chains_rng(seed: int) -> random.Random | None:
    """Return the generator of a world's chains; None: it has none."""
    rng = random.Random(f"chains/{seed}")
    return rng if rng.random() < 0.5 else None


def chained(jobs: list[Job], rng: random.Random) -> list[Job]:
    """Let some jobs start after earlier ones."""
    found: list[Job] = []
    for job in jobs:
        before = rng.sample(found, min(len(found), rng.choice((0, 0, 0, 1, 2))))
        after = tuple(
            After(of=each.job_id, end=rng.choice((AfterEnd.OK, AfterEnd.ANY, AfterEnd.ANY))) for each in before
        )
        found.append(replace(job, after=after))
    return found


def plan(world: "FaultWorld", rng: random.Random, begin_us: int, span_us: int) -> None:
    """Let people ask for something at random times; what they hold they resume before the faults stop, or then."""
    for _ in range(rng.randint(1, 6)):
        job_id = rng.choice(world.jobs)[0].job_id
        at_us = begin_us + rng.randint(1, span_us)
        what = rng.choice(("hold", "pause", "pause", "requeue", "requeue", "prioritize"))
        world.engine.at(at_us, _ask, world, job_id, what, rng.randint(1, 200) * US_PER_S)
    if rng.random() < 0.5:
        node, after_us = rng.choice(world.nodes).name, rng.randint(1, 900) * US_PER_S
        world.engine.at(
            begin_us + rng.randint(1, span_us), _book, world, node, after_us, rng.randint(1, 300) * US_PER_S
        )


def _ask(world: "FaultWorld", job_id: JobId, what: str, for_us: int) -> None:
    if job_id not in world.accepted:
        return
    world.injected[what] = world.injected.get(what, 0) + 1
    world.note(f"{what}: {job_id}")
    world.request(_request(job_id, what))
    if what in ("hold", "pause"):
        world.engine.at(world.engine.now_us() + for_us, release, world, job_id)


def _book(world: "FaultWorld", node: str, after_us: int, for_us: int) -> None:
    """Let an operator book a node for maintenance."""
    world.injected["maintenance"] = world.injected.get("maintenance", 0) + 1
    from_us = world.engine.now_us() + after_us

    def ask(control: Control) -> None:
        if node in control.state.nodes.records:
            control.note(
                MaintenanceBooked(
                    at_us=control.fold.last_us, booking=f"m-{node}", node=node, from_us=from_us,
                    until_us=from_us + for_us, by="ann", why="firmware",
                )
            )  # fmt: skip

    world.request(ask)


def release(world: "FaultWorld", job_id: JobId) -> None:
    """Let a job that was held start again."""

    def ask(control: Control) -> None:
        control.note(HoldReleased(at_us=control.fold.last_us, job_id=job_id, by="ann"))

    world.request(ask)


def _request(job_id: JobId, what: str) -> Callable[[Control], None]:
    def ask(control: Control) -> None:
        record, at_us = control.state.jobs[job_id], control.fold.last_us
        if what in ("hold", "pause"):
            control.note(JobHeld(at_us=at_us, job_id=job_id, by="ann", leave=what == "pause"))
        elif what == "requeue" and (record.phase.ended or record.stop is None):
            control.note(RequeueRequested(at_us=at_us, job_id=job_id, by="ann"))
        elif what == "prioritize":
            control.note(JobPrioritized(at_us=at_us, job_id=job_id, by="ann"))

    return ask
