"""Holdings as amounts that add up, and one queue with the holdings of itself and of all queues inside it.

`quotas.py` walks these from a job's queue up to the cluster. GPUs count in thousandths: a job may have a part of one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cordee.events import Job, Lease, Node, Queue
from cordee.schedule.placement.entry import host_request
from cordee.schedule.quota.day import Day

MILLI = 1000


class Held(NamedTuple):
    """An amount of GPUs, CPU, memory and money per hour."""

    gpu_milli: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0
    nano_usd_per_hour: int = 0

    def plus(self, other: "Held", times: int = 1) -> "Held":
        """Return the sum."""
        return Held(
            self.gpu_milli + times * other.gpu_milli,
            self.cpu_milli + times * other.cpu_milli,
            self.memory_bytes + times * other.memory_bytes,
            self.nano_usd_per_hour + times * other.nano_usd_per_hour,
        )

    def less(self, other: "Held") -> "Held":
        """Return the difference."""
        return self.plus(other, -1)


NOTHING = Held()


def held_by(job: Job, leases: Sequence[Lease], micro_usd_per_gpu_hour: Sequence[int]) -> Held:
    """Return what an attempt holds by these leases, at their nodes' prices; CPU and memory lie beside its GPUs."""
    requests = [host_request(job, len(lease.gpus)) for lease in leases]
    prices = zip(leases, micro_usd_per_gpu_hour, strict=True)
    return Held(
        gpu_milli=sum(len(lease.gpus) * lease.milli for lease in leases),
        cpu_milli=sum(cpu_milli for cpu_milli, _ in requests),
        memory_bytes=sum(memory_bytes for _, memory_bytes in requests),
        nano_usd_per_hour=sum(len(lease.gpus) * lease.milli * price for lease, price in prices),
    )


def offered_by(node: Node) -> Held:
    """Return what a node that is up adds to the cluster."""
    gpus = node.gpus - len(node.unavailable)
    return Held(
        gpu_milli=gpus * MILLI,
        cpu_milli=node.cpu_milli or 0,
        memory_bytes=node.memory_bytes or 0,
        nano_usd_per_hour=gpus * MILLI * node.micro_usd_per_gpu_hour,
    )


class Holder:
    """A queue with the holdings of all jobs in and under it. An inner queue has a leaf for its own."""

    __slots__ = (
        "base",
        "claim",
        "cpu",
        "day",
        "graces",
        "held",
        "inner",
        "inside",
        "leaving",
        "memory",
        "nano",
        "net",
        "net_claim",
        "path",
        "queue",
        "quota",
        "rate",
        "users",
    )

    def __init__(self, queue: Queue, parent: "Holder | None") -> None:
        self.queue, self.quota = queue, queue.quota_gpus * MILLI
        self.inside: list[Holder] = []
        self.path: tuple[Holder, ...] = (self, *(parent.path if parent else ()))  # up to the cluster
        self.held = self.cpu = self.memory = self.nano = 0
        self.leaving = 0  # the part of held that has notice
        self.inner = 0  # held, and the quota that inner queues keep
        self.claim = 0  # inner, or its quota if it does not lend
        self.net = 0  # inner once those with notice have left
        self.net_claim = 0  # claim once those with notice have left
        self.users: dict[str, int] = {}
        self.graces: dict[int, int] = {}  # thousandths of GPUs held by jobs with that grace period
        self.base, self.rate = (0, 0, 0), (0, 0, 0)  # borrowed GPUs, CPU, memory: used is base + rate x clock
        limited = queue.gpu_us_per_day is not None or queue.micro_usd_per_day is not None
        self.day = Day() if limited else None
        if parent is not None:
            parent.inside.append(self)

    @property
    def staying(self) -> int:
        """Return what it holds once jobs with notice have left."""
        return self.held - self.leaving

    def move(self, owner: str, grace_us: int, held: Held, clock: int, at_us: int) -> None:
        """Add to its holdings."""
        gpu = held.gpu_milli
        self.held += gpu
        self.cpu += held.cpu_milli
        self.memory += held.memory_bytes
        self.nano += held.nano_usd_per_hour
        count(self.users, owner, gpu)
        count(self.graces, grace_us, gpu)
        self.recount(clock)
        if self.day is not None:
            self.day.add(at_us, (gpu, held.nano_usd_per_hour))

    def recount(self, clock: int) -> None:
        """Count its holdings beyond its quota as borrowed from now on."""
        over = self.held - self.quota
        if not self.quota:
            rate = (self.held, self.cpu, self.memory)
        elif over <= 0:
            rate = (0, 0, 0)
        else:
            rate = (over, self.cpu * over // self.held, self.memory * over // self.held)
        if rate != self.rate:
            (a, b, c), (x, y, z), (u, v, w) = self.base, rate, self.rate
            self.base = (a - (x - u) * clock, b - (y - v) * clock, c - (z - w) * clock)
            self.rate = rate

    def inherit(self, before: "Holder", clock: int) -> None:
        """Take over the borrowed use of the same queue in the tree before; it holds nothing yet."""
        (a, b, c), (x, y, z) = before.base, before.rate
        self.base = (a + x * clock, b + y * clock, c + z * clock)

    def value(self, since_us: int) -> object:
        """Return a deep copy as plain values, to compare; of days the part since then."""
        held = (self.held, self.cpu, self.memory, self.nano, self.leaving, self.inner, self.claim, self.net)
        day = None if self.day is None else self.day.value(since_us)
        return (held, dict(self.users), dict(self.graces), self.base, self.rate, day)

    def claim_of(self, inner: int) -> int:
        """Return its claim if it and its inner queues held and kept this much."""
        return inner if self.queue.lend else max(inner, self.quota)


def count(amounts: dict[Any, int], key: Any, more: int) -> None:
    """Add to an amount; an amount of zero is dropped."""
    amount = amounts.get(key, 0) + more
    if amount:
        amounts[key] = amount
    else:
        amounts.pop(key, None)
