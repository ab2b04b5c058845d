"""Random inputs of a world: nodes, queues, jobs and their scripts. Worlds are small, so that they are crowded."""

import json
import random

from cordee.events import Capacity, Job, Node, Queue, Tier
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.schedule.policy import NAMED, Policy
from cordee.units import US_PER_S
from faults_world.ranks import Script

QUICK = Policy(
    levels_gpu_us=(40 * US_PER_S, 300 * US_PER_S),
    preempt_after_us=5 * US_PER_S,
    time_slice_us=10 * US_PER_S,
    patience_us=900 * US_PER_S,
)
"""Cordee's own policy on the scale of minutes, so that the order changes within the run of a job."""


def policy(rng: random.Random) -> tuple[str, Policy]:
    """Draw a policy, mostly Cordee's own."""
    name = rng.choice(("quick", "quick", "quick", "cordee", *NAMED))
    return name, QUICK if name == "quick" else NAMED[name]


def nodes(rng: random.Random) -> list[Node]:
    """Draw one to four nodes."""
    counted = rng.random() < 0.5  # CPU and memory
    return [_node(rng, number, counted) for number in range(rng.randint(1, 4))]


def _node(rng: random.Random, number: int, counted: bool) -> Node:
    gpus = rng.choice((2, 4, 8, 8, 8))
    return Node(
        name=f"n{number}",
        epoch=1,
        gpu_name=rng.choice(("H100", "H100", "H100", "H100", "H100", "A100")),
        gpus=gpus,
        capacity=rng.choice((Capacity.ON_DEMAND, Capacity.ON_DEMAND, Capacity.SPOT)),
        micro_usd_per_gpu_hour=rng.choice((0, 2_000_000, 3_600_000)),
        domain=(rng.choice(("r1", "r2")),),
        island_gpus=rng.choice((0, 0, gpus // 2)),
        unavailable=rng.choice(((), (), (), (0,))),
        cpu_milli=rng.choice((8_000, 64_000)) if counted else None,
        memory_bytes=64_000_000_000 if counted else None,
    )


def queues(rng: random.Random, gpus: int) -> tuple[Queue, ...]:
    """Draw two queues, one of them with two inside; none in a third of the worlds. Some trees are invalid."""
    if rng.random() < 0.33:
        return ()
    quotas = {name: rng.randint(0, gpus // 2) for name in ("red", "blue")}
    found = [_queue(rng, name, None, quota) for name, quota in quotas.items()]
    if rng.random() < 0.6:
        inner = rng.randint(0, quotas["red"])
        found += [_queue(rng, "red/a", "red", inner), _queue(rng, "red/b", "red", quotas["red"] - inner)]
    return tuple(found)


def _queue(rng: random.Random, name: str, parent: str | None, quota: int) -> Queue:
    return Queue(
        name=name,
        parent=parent,
        quota_gpus=quota,
        limit_gpus=rng.choice((None, None, None, quota + rng.randint(0, 8))),
        lend=rng.random() < 0.75,
        weight=rng.choice((1, 1, 3)),
        user_gpus=rng.choice((None, None, None, rng.randint(1, 8))),
        gpu_us_per_day=rng.choice((*[None] * 8, rng.randint(200, 20_000) * US_PER_S)),
        micro_usd_per_day=rng.choice((*[None] * 9, rng.randint(10_000, 1_000_000))),
    )


def jobs(rng: random.Random) -> list[tuple[Job, Script]]:
    """Draw four to twelve jobs."""
    return [_job(rng, f"j{number}") for number in range(rng.randint(4, 12))]


def _job(rng: random.Random, name: str) -> tuple[Job, Script]:
    gpus = rng.choice((1, 1, 2, 2, 2, 3, 4, 4, 4, 6, 8, 8, 12))
    part = gpus == 1 and rng.random() < 0.5
    protected = rng.random() < 0.75
    halves = tuple(each for each in (gpus // 2, gpus // 4) if each)
    job = Job(
        job_id=JobId(name),
        name=name,
        owner=rng.choice(("ann", "bob")),
        gpus=gpus,
        queue=rng.choice(("default", "red", "red/a", "red/b", "blue", "unknown")),
        tier=rng.choice(tuple(Tier)),
        priority=rng.randint(0, 1),
        gpu_name=rng.choice((None, None, None, "H100")),
        capacity=rng.choice((*[Capacity.ANY] * 8, Capacity.ON_DEMAND, Capacity.SPOT)),
        time_limit_us=rng.choice((None, None, None, rng.randint(20, 600) * US_PER_S)),
        cost_limit_micro_usd=rng.choice((None, None, None, None, rng.randint(1_000, 500_000))),
        grace_us=rng.choice((0, 5, 20, 20, 40)) * US_PER_S,
        requeue=rng.random() < 0.85,
        protected=protected,
        checkpoint_every_us=60 * US_PER_S,
        save_us=rng.choice((2, 10)) * US_PER_S,
        restart_us=10 * US_PER_S,
        min_run_us=rng.choice((0, 0, 0, 30)) * US_PER_S,
        gpu_milli=rng.choice((200, 250, 500, 700)) if part else 1000,
        cpu_milli=rng.choice((0, 0, 500 * gpus)),
        memory_bytes=rng.choice((0, 0, 4_000_000_000 * gpus)),
        unit_gpus=rng.choice((None, None, None, 2 if gpus > 1 else 1)) if not part else None,
        within=rng.choice((None, None, None, None, "rack", "node")) if not part else None,
        sizes=halves if rng.random() < 0.35 and not part else (),
        estimate_us=rng.choice((None, None, rng.randint(20, 400) * US_PER_S)),
        preemptions_max=rng.choice((None, None, None, 0, 1)),
    )
    work = Work(
        steps=rng.randint(5, 100),
        step_us=rng.randint(1, 5 * US_PER_S),
        start_us=rng.randint(1, 15) * US_PER_S,
        every_us=rng.randint(15, 90) * US_PER_S if protected else None,
        stall_us=rng.randint(0, 3) * US_PER_S,
        checkpoint_bytes=1,
        handles_notice=protected and rng.random() < 0.8,
        leaves_during_start=True,
        reports=rng.random() < 0.9,
        gpus=gpus if rng.random() < 0.5 else None,
    )
    return job, Script(work=work, fails=rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 4)))


def spec(job: Job) -> str:
    """Return the JobSpec of a job, as JSON; every second job has a launcher on each node instead of a process a GPU."""
    every = "rank" if int(job.job_id[1:]) % 2 else "node"
    grace = {"grace_s": job.grace_us / US_PER_S}
    return json.dumps({"run": ["/bin/sh"], "cwd": "/", "launch": every, "on_preempt": grace})
