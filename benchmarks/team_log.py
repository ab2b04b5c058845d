"""Homes for `team.py`, as an earlier server left them: a month of a team's jobs, or very many nodes.

The events go through the store that the server writes to, so that the tables of jobs and attempts, the snapshot, the
segments and the retired jobs are those that a server would have made.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cordee.control.snapshots import make
from cordee.control.store.sql import SqlStore
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    Lease,
    Node,
    NodeDown,
    NodeUp,
    Outcome,
    Queue,
    QueuesSet,
    RanksEnded,
    RanksStarted,
    Reported,
    Restored,
    ServerUp,
    SpanClass,
)
from cordee.ids import JobId

S, MINUTE, DAY = 1_000_000, 60_000_000, 86_400_000_000
LANES, LANE_NODES, NODES = 10, 4, 40
PRICE = 2_990_000  # micro-dollars of a GPU-hour
PEOPLE = tuple(f"user{number}" for number in range(5))
QUEUES = (
    Queue(name="research", quota_gpus=24, weight=2),
    Queue(name="batch", limit_gpus=24),
    Queue(name="product", quota_gpus=8),
)
_TAIL = 4_000  # events after the snapshot: a server makes the next one after 5,000
_COMMIT = 2_000
_GANG = 4  # nodes of a job in the large cluster


def month(home: Path, jobs: int) -> JobId:
    """Write a log of so many jobs of 1 to 4 GPUs over four weeks, and return the id of one that ended long ago."""
    events = list(_month(jobs, time.time_ns() // 1000 - 29 * DAY))
    database = f"sqlite:///{home / 'cordee.db'}"
    _write(database, events)
    head = events[:-_TAIL]
    ended = [event.job_id for event in head if isinstance(event, JobEnded)]
    counts = make(database, len(head), ended)
    print(f"a snapshot of {counts['number']} events is made, {counts['retired']} jobs are retired", file=sys.stderr)
    return ended[len(ended) // 2]


def _month(jobs: int, from_us: int) -> Iterator[Event]:
    yield ServerUp(at_us=from_us)
    yield QueuesSet(at_us=from_us, queues=QUEUES)
    for number in range(NODES):
        node = Node(name=f"sim{number}", epoch=1, gpu_name="slot", gpus=1, micro_usd_per_gpu_hour=PRICE)
        yield NodeUp(at_us=from_us + 1, node=node)
    round_us = 28 * DAY * LANES // jobs
    for first in range(0, jobs, LANES):
        begin_us = from_us + S + first // LANES * round_us
        lives = [_life(first + lane, lane, begin_us, round_us) for lane in range(min(LANES, jobs - first))]
        yield from sorted((event for life in lives for event in life), key=lambda event: event.at_us)
    for number in range(NODES):
        yield NodeDown(at_us=from_us + 28 * DAY + MINUTE, node=f"sim{number}", epoch=1, why="its machine was stopped")


def _life(serial: int, lane: int, from_us: int, lasts_us: int) -> Iterator[Event]:
    """Yield a job from its submission to its end; one of 17 fails."""
    gpus = (1, 1, 2, 4)[serial % 4]
    nodes = [f"sim{LANE_NODES * lane + each}" for each in range(gpus)]
    name = ("pretrain", "finetune", "eval")[serial % 3]
    job = Job(
        job_id=JobId(f"{name}-{serial:06x}"),
        name=name,
        owner=PEOPLE[serial % len(PEOPLE)],
        gpus=gpus,
        queue=QUEUES[serial // 7 % len(QUEUES)].name,
        protected=True,
    )
    ids = {"job_id": job.job_id, "epoch": 1}
    spec = {"name": name, "run": ["torchrun", "train.py"], "gpus": gpus, "queue": job.queue}
    begin_us, end_us = from_us + lasts_us // 10, from_us + lasts_us * 9 // 10
    yield JobSubmitted(at_us=from_us + lane * S, job=job, spec=json.dumps(spec))
    leases = tuple(Lease(node=node, gpus=(0,)) for node in nodes)
    yield AttemptPlaced(at_us=begin_us, leases=leases, **ids)
    for node in nodes:
        yield RanksStarted(at_us=begin_us + S, node=node, launch="one process per GPU", **ids)
    yield Restored(at_us=begin_us + 20 * S, step=0, generation=None, **ids)
    useful = {"span": SpanClass.USEFUL, "from_us": begin_us + 20 * S, "first_step": 0, "steps": 1_000}
    yield Reported(at_us=end_us - S, tokens=10**8, loss=2.5, **useful, **ids)
    failed = serial % 17 == 0
    outcome, why = (Outcome.FAILED, "rank 0 ended with exit code 1") if failed else (Outcome.FINISHED, "")
    for node in nodes:
        yield RanksEnded(at_us=end_us, node=node, outcome=outcome, **ids)
    yield AttemptEnded(at_us=end_us, outcome=outcome, why=why, **ids)
    yield JobEnded(at_us=end_us, job_id=job.job_id, state="failed" if failed else "done", why=why or "finished")


def large(home: Path, nodes: int) -> None:
    """Write a log of so many nodes of 8 GPUs, most of which run jobs of 4 nodes."""
    _write(f"sqlite:///{home / 'cordee.db'}", list(_large(nodes, time.time_ns() // 1000 - MINUTE)))


def _large(nodes: int, at_us: int) -> Iterator[Event]:
    yield ServerUp(at_us=at_us)
    names = [f"n{number}" for number in range(nodes)]
    for at, name in enumerate(names):
        where = (f"block-{at // 512}", f"rack-{at // 16}")
        node = Node(name=name, epoch=1, gpu_name="H100-SXM-80GB", gpus=8, micro_usd_per_gpu_hour=PRICE, domain=where)
        yield NodeUp(at_us=at_us, node=node)
    busy = nodes * 4 // 5
    for first in range(0, busy - busy % _GANG, _GANG):
        job_id, gang = JobId(f"train-{first:06x}"), names[first : first + _GANG]
        job = Job(job_id=job_id, name="train", owner=PEOPLE[first // _GANG % 5], gpus=8 * _GANG, protected=True)
        yield JobSubmitted(at_us=at_us, job=job, spec='{"name": "train", "run": ["true"], "gpus": 32}')
        leases = tuple(Lease(node=name, gpus=tuple(range(8))) for name in gang)
        yield AttemptPlaced(at_us=at_us, job_id=job_id, epoch=1, leases=leases)
        for name in gang:
            yield RanksStarted(at_us=at_us, job_id=job_id, epoch=1, node=name)


def _write(database: str, events: list[Event]) -> None:
    """Commit the events, with no command left to carry out."""
    store, waiting = SqlStore(database), iter(events)
    done = 0
    while piece := list(islice(waiting, _COMMIT)):
        store.commit(piece)
        if placed := [number for number, event in enumerate(piece, done + 1) if isinstance(event, AttemptPlaced)]:
            store.confirm(placed)
        done += len(piece)
        if done % (10 * _COMMIT) == 0 or done == len(events):
            print(f"{done:,} of {len(events):,} events are written", file=sys.stderr, flush=True)
    store.close()
