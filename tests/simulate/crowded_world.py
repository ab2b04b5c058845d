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
    dice = random.Random(seed)
    nodes = [
        Node(name=f"n{n}", epoch=1, gpu_name="H100", gpus=8, capacity=Capacity.SPOT, micro_usd_per_gpu_hour=2_000_000)
        for n in range(6)
    ]
    jobs = [_submission(dice, number) for number in range(40)]
    reclaims = [
        Outage(
            at_us=dice.randrange(1000, 20_000) * S + dice.randrange(S),
            nodes=(f"n{number}",),
            notice_us=dice.choice((0, 30, 120)) * S,
            back_us=dice.randrange(1, 900) * S,
        )
        for number in range(6)
    ]
    return run(nodes, jobs, reclaims, **more)


def _submission(dice: random.Random, number: int) -> Submission:
    durable = dice.random() < 0.8
    work = Work(
        steps=dice.randrange(10, 300),
        step_us=dice.randrange(S, 9 * S),
        start_us=dice.randrange(60 * S),
        every_us=dice.randrange(60, 600) * S if durable else None,
        stall_us=dice.randrange(5 * S),
        upload_us=dice.randrange(30 * S),
        handles_notice=durable and dice.random() < 0.9,
        reports=dice.random() < 0.9,
    )
    name = f"job{number}"
    job = Job(
        job_id=job_id(name, dice.randbytes(6)),
        name=name,
        owner=dice.choice("abc"),
        gpus=dice.choice((1, 2, 4, 8, 16, 24)),
        tier=dice.choice(TIERS),
        priority=dice.randrange(3),
        protected=durable,
    )
    return Submission(at_us=dice.randrange(8000) * S, job=job, work=work)


if __name__ == "__main__":
    log = crowded(int(sys.argv[1])).log
    text = "\n".join(json.dumps(encode(event)) for event in log)
    print(len(log), hashlib.sha256(text.encode()).hexdigest())
