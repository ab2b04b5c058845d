"""A crowded cluster with many jobs and reclaims, drawn from a seed; run by itself it prints its log's digest."""

import hashlib
import json
import random
import sys
from typing import Any

from cordee.event_json import encode
from cordee.events import Capacity, Job, Node, Tier
from cordee.ids import job_id
from cordee.schedule.gang import Work
from cordee.simulate.run import Run, Submission, run
from cordee.simulate.world import Outage

S = 1_000_000
TIERS = list(Tier)


def crowded(seed: int, **more: Any) -> Run:
    """40 jobs on 6 nodes, 6 reclaims."""
    rng = random.Random(seed)
    nodes = [
        Node(name=f"n{n}", epoch=1, gpu_name="H100", gpus=8, capacity=Capacity.SPOT, micro_usd_per_gpu_hour=2_000_000)
        for n in range(6)
    ]
    jobs = [_submission(rng, number) for number in range(40)]
    reclaims = [
        Outage(
            at_us=rng.randrange(1000, 20_000) * S + rng.randrange(S),
            nodes=(f"n{number}",),
            notice_us=rng.choice((0, 30, 120)) * S,
            back_us=rng.randrange(1, 900) * S,
        )
        for number in range(6)
    ]
    return run(nodes, jobs, reclaims, **more)


def _submission(rng: random.Random, number: int) -> Submission:
    durable = rng.random() < 0.8
    work = Work(
        steps=rng.randrange(10, 300),
        step_us=rng.randrange(S, 9 * S),
        start_us=rng.randrange(60 * S),
        every_us=rng.randrange(60, 600) * S if durable else None,
        stall_us=rng.randrange(5 * S),
        upload_us=rng.randrange(30 * S),
        handles_notice=durable and rng.random() < 0.9,
        reports=rng.random() < 0.9,
    )
    name = f"job{number}"
    job = Job(
        job_id=job_id(name, rng.randbytes(6)),
        name=name,
        owner=rng.choice("abc"),
        gpus=rng.choice((1, 2, 4, 8, 16, 24)),
        tier=rng.choice(TIERS),
        priority=rng.randrange(3),
        protected=durable,
    )
    return Submission(at_us=rng.randrange(8000) * S, job=job, work=work)


if __name__ == "__main__":
    log = crowded(int(sys.argv[1])).log
    text = "\n".join(json.dumps(encode(event)) for event in log)
    print(len(log), hashlib.sha256(text.encode()).hexdigest())
