"""Random small worlds: nodes, queues, jobs and what their scripts do, drawn from a seed. Small on purpose: crowded."""

import random

from cordee.events import Capacity, Job, Node, Queue, Tier
from cordee.ids import JobId
from cordee.schedule.policy import NAMED, Policy
from cordee.simulate.ranks import Script
from cordee.simulate.work import Work
from cordee.units import US_PER_S

QUICK = Policy(
    levels_gpu_us=(40 * US_PER_S, 300 * US_PER_S),
    preempt_after_us=5 * US_PER_S,
    time_slice_us=10 * US_PER_S,
    patience_us=900 * US_PER_S,
)
"""Cordee's own rules on the scale of minutes: in worlds this small, turns change within a job's run."""


def policy(dice: random.Random) -> tuple[str, Policy]:
    """Mostly Cordee's own."""
    name = dice.choice(("quick", "quick", "quick", "cordee", *NAMED))
    return name, QUICK if name == "quick" else NAMED[name]


def nodes(dice: random.Random) -> list[Node]:
    """One to four."""
    counted = dice.random() < 0.5  # CPU and memory
    return [_node(dice, number, counted) for number in range(dice.randint(1, 4))]


def _node(dice: random.Random, number: int, counted: bool) -> Node:
    gpus = dice.choice((2, 4, 8, 8, 8))
    return Node(
        name=f"n{number}",
        epoch=1,
        gpu_name=dice.choice(("H100", "H100", "H100", "H100", "H100", "A100")),
        gpus=gpus,
        capacity=dice.choice((Capacity.ON_DEMAND, Capacity.ON_DEMAND, Capacity.SPOT)),
        micro_usd_per_gpu_hour=dice.choice((0, 2_000_000, 3_600_000)),
        domain=(dice.choice(("r1", "r2")),),
        island_gpus=dice.choice((0, 0, gpus // 2)),
        unavailable=dice.choice(((), (), (), (0,))),
        cpu_milli=dice.choice((8_000, 64_000)) if counted else None,
        memory_bytes=64_000_000_000 if counted else None,
    )


def queues(dice: random.Random, gpus: int) -> tuple[Queue, ...]:
    """Two siblings, one of them with two inside; none in a third of the worlds. Not all of them can be."""
    if dice.random() < 0.33:
        return ()
    quotas = {name: dice.randint(0, gpus // 2) for name in ("red", "blue")}
    found = [_queue(dice, name, None, quota) for name, quota in quotas.items()]
    if dice.random() < 0.6:
        inner = dice.randint(0, quotas["red"])
        found += [_queue(dice, "red/a", "red", inner), _queue(dice, "red/b", "red", quotas["red"] - inner)]
    return tuple(found)


def _queue(dice: random.Random, name: str, parent: str | None, quota: int) -> Queue:
    return Queue(
        name=name,
        parent=parent,
        quota_gpus=quota,
        limit_gpus=dice.choice((None, None, None, quota + dice.randint(0, 8))),
        lend=dice.random() < 0.75,
        weight=dice.choice((1, 1, 3)),
        user_gpus=dice.choice((None, None, None, dice.randint(1, 8))),
        gpu_us_per_day=dice.choice((*[None] * 8, dice.randint(200, 20_000) * US_PER_S)),
        micro_usd_per_day=dice.choice((*[None] * 9, dice.randint(10_000, 1_000_000))),
    )


def jobs(dice: random.Random) -> list[tuple[Job, Script]]:
    """Four to twelve."""
    return [_job(dice, f"j{number}") for number in range(dice.randint(4, 12))]


def _job(dice: random.Random, name: str) -> tuple[Job, Script]:
    gpus = dice.choice((1, 1, 2, 2, 2, 3, 4, 4, 4, 6, 8, 8, 12))
    part = gpus == 1 and dice.random() < 0.5
    protected = dice.random() < 0.75
    halves = tuple(each for each in (gpus // 2, gpus // 4) if each)
    job = Job(
        job_id=JobId(name),
        name=name,
        owner=dice.choice(("ann", "bob")),
        gpus=gpus,
        queue=dice.choice(("default", "red", "red/a", "red/b", "blue", "unknown")),
        tier=dice.choice(tuple(Tier)),
        priority=dice.randint(0, 1),
        gpu_name=dice.choice((None, None, None, "H100")),
        capacity=dice.choice((*[Capacity.ANY] * 8, Capacity.ON_DEMAND, Capacity.SPOT)),
        time_limit_us=dice.choice((None, None, None, dice.randint(20, 600) * US_PER_S)),
        cost_limit_micro_usd=dice.choice((None, None, None, None, dice.randint(1_000, 500_000))),
        grace_us=dice.choice((0, 5, 20, 20, 40)) * US_PER_S,
        requeue=dice.random() < 0.85,
        protected=protected,
        checkpoint_every_us=60 * US_PER_S,
        save_us=dice.choice((2, 10)) * US_PER_S,
        restart_us=10 * US_PER_S,
        min_run_us=dice.choice((0, 0, 0, 30)) * US_PER_S,
        gpu_milli=dice.choice((200, 250, 500, 700)) if part else 1000,
        cpu_milli=dice.choice((0, 0, 500 * gpus)),
        memory_bytes=dice.choice((0, 0, 4_000_000_000 * gpus)),
        unit_gpus=dice.choice((None, None, None, 2 if gpus > 1 else 1)) if not part else None,
        within=dice.choice((None, None, None, None, "rack", "node")) if not part else None,
        sizes=halves if dice.random() < 0.35 and not part else (),
        estimate_us=dice.choice((None, None, dice.randint(20, 400) * US_PER_S)),
        preemptions_max=dice.choice((None, None, None, 0, 1)),
    )
    work = Work(
        steps=dice.randint(5, 100),
        step_us=dice.randint(1, 5 * US_PER_S),
        start_us=dice.randint(1, 15) * US_PER_S,
        every_us=dice.randint(15, 90) * US_PER_S if protected else None,
        stall_us=dice.randint(0, 3) * US_PER_S,
        handles_notice=protected and dice.random() < 0.8,
        reports=dice.random() < 0.9,
        gpus=gpus if dice.random() < 0.5 else None,
    )
    return job, Script(work=work, fails=dice.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 4)))
