"""Counts of GPUs, nodes, jobs and queues, for metrics: their number does not grow with the cluster."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cordee.answers.queues import QueueView
from cordee.control.operations import Operations
from cordee.schedule.state.records import NodeRecord, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCounts:
    """The cluster in numbers.

    Attributes:
        gpus, nodes, jobs: by state; ended jobs are not counted.
        queues: as the API answers them.
        oldest_wait_us: how long the job that was submitted first of those that wait has existed.
        held_micro_usd_per_hour, idle_micro_usd_per_hour: the price of GPUs that are held, and of others.
        works: whether the last tick was without an error.
        log_number: events in the log.
    """

    gpus: Mapping[str, int]
    nodes: Mapping[str, int]
    jobs: Mapping[str, int]
    queues: list[QueueView]
    oldest_wait_us: int
    held_micro_usd_per_hour: int
    idle_micro_usd_per_hour: int
    works: bool
    log_number: int


def cluster_counts(operations: Operations) -> ClusterCounts:
    """Count what is there now; the lock is held for a pass over nodes and attempts."""
    control, now_us = operations.control, operations.clock.now_us()
    with control.changed:
        records = list(control.state.nodes.records.values())
        attempts = list(control.state.attempts.values())
        jobs = Counter(each.phase for each in control.state.jobs.values() if not each.phase.ended)
        submitted = (control.state.jobs[each].submitted_us for each in control.state.waiting.job_ids())
        oldest_us = min(submitted, default=now_us)
    held: dict[str, set[int]] = {}
    for attempt in attempts:
        for lease in attempt.held:
            held.setdefault(lease.node, set()).update(lease.gpus)
    gpus = Counter[str]({"held": 0, "free": 0, "cordoned": 0, "unavailable": 0, "down": 0})
    nodes = Counter[str]({"up": 0, "silent": 0, "cordoned": 0, "down": 0})
    prices = Counter[str]()
    for record in records:
        node, taken = record.node, held.get(record.node.name, set())
        state = _state(record)
        nodes[state] += 1
        spare = node.gpus - len(taken | set(node.unavailable))
        gpus["held"] += len(taken)
        gpus["unavailable"] += len(set(node.unavailable) - taken) if record.up else 0
        gpus[{"up": "free", "silent": "free"}.get(state, state)] += spare if record.up else node.gpus - len(taken)
        prices["held"] += len(taken) * node.micro_usd_per_gpu_hour
        prices["idle"] += spare * node.micro_usd_per_gpu_hour if record.up else 0
    return ClusterCounts(
        gpus=gpus,
        nodes=nodes,
        jobs={phase.value: jobs[phase] for phase in Phase if not phase.ended},
        queues=operations.queues().queues,
        oldest_wait_us=max(0, now_us - oldest_us),
        held_micro_usd_per_hour=prices["held"],
        idle_micro_usd_per_hour=prices["idle"],
        works=operations.ticks.problem is None,
        log_number=control.number,
    )


def _state(record: NodeRecord) -> str:
    if not record.up:
        return "down"
    if record.cordoned_by is not None:
        return "cordoned"
    return "silent" if record.unreachable else "up"
