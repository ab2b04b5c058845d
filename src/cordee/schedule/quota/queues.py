"""The rules for a tree of queues as it is declared. Holdings are counted in `quotas.py`."""

import re
from collections.abc import Collection, Sequence

from cordee.errors import QueuesError
from cordee.events import Queue
from cordee.near import did_you_mean

DEFAULT = "default"
"""The queue of jobs that name none, or one that no longer exists. It always exists."""

NAME = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}"


def check(queues: Sequence[Queue], cluster_gpus: int | None = None) -> None:
    """Check these queues against each other and against the cluster's GPUs (None: no node is known yet).

    Raises:
        QueuesError: a rule is violated; the text has the numbers.
    """
    by_name: dict[str, Queue] = {}
    for queue in queues:
        if queue.name in by_name:
            raise QueuesError(f"two queues are named {queue.name}", hint="give each queue a name of its own")
        by_name[queue.name] = queue
        _check_one(queue)
    for queue in queues:
        if queue.parent is not None and queue.parent not in by_name:
            raise QueuesError(
                f"{queue.name} is inside {queue.parent}, which is no queue", hint=near(queue.parent, by_name)
            )
    for queue in queues:
        _check_no_cycle(queue, by_name)
    for queue in queues:
        inside = [each for each in queues if each.parent == queue.name]
        guaranteed = sum(each.quota_gpus for each in inside)
        if guaranteed > queue.quota_gpus:
            raise QueuesError(
                f"the quotas inside {queue.name} come to {guaranteed} GPUs ({_sum(inside)}), "
                f"but its own is {queue.quota_gpus}",
                hint=f"give {queue.name} a quota of {guaranteed}, or those inside it less",
            )
    top = [queue for queue in queues if queue.parent is None]
    guaranteed = sum(queue.quota_gpus for queue in top)
    if cluster_gpus is not None and guaranteed > cluster_gpus:
        raise QueuesError(
            f"{guaranteed} GPUs are guaranteed ({_sum(top)}), but the cluster has {cluster_gpus}",
            hint=f"lower them by {guaranteed - cluster_gpus}: a queue may borrow beyond its quota whatever is free",
        )


def near(name: str, known: Collection[str]) -> str:
    """Return a hint with the name that was probably meant, and all names."""
    return did_you_mean(name, sorted(known) or [DEFAULT], listed="the queues are ")


def _check_one(queue: Queue) -> None:
    if not re.fullmatch(NAME, queue.name):
        raise QueuesError(f"{queue.name!r} cannot name a queue", hint="use letters, digits, dots, dashes and slashes")
    least = {"quota_gpus": 0, "limit_gpus": 0, "weight": 1, "user_gpus": 1, "gpu_us_per_day": 1, "micro_usd_per_day": 1}
    for field, lowest in least.items():
        value = getattr(queue, field)
        if value is not None and value < lowest:
            raise QueuesError(f"{queue.name}: {field} is {value}", hint=f"use {lowest} or more")
    if queue.limit_gpus is not None and queue.limit_gpus < queue.quota_gpus:
        raise QueuesError(
            f"{queue.name} has a quota of {queue.quota_gpus} GPUs, but may hold {queue.limit_gpus} at most",
            hint="a limit counts quota and borrowed together: raise it, or lower the quota",
        )


def _check_no_cycle(queue: Queue, by_name: dict[str, Queue]) -> None:
    path = [queue.name]
    while (parent := by_name[path[-1]].parent) is not None:
        if parent in path:
            circle = " inside ".join([*path[path.index(parent) :], parent])
            raise QueuesError(f"the queues go in a circle: {circle}", hint="one of them has to be outermost")
        path.append(parent)


def _sum(queues: Sequence[Queue]) -> str:
    return " + ".join(f"{queue.name} {queue.quota_gpus}" for queue in queues if queue.quota_gpus)
