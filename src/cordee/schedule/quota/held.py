"""Holdings as amounts that add up, and one queue with the holdings of itself and of all queues inside it.

`quotas.py` walks these from a job's queue up to the cluster. GPUs count in thousandths: a job may have a part of one.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from cordee.events import Job, Lease, Node, Queue
from cordee.schedule.placement.entry import host_request
from cordee.schedule.quota.day import Day

MILLI = 1000

K = TypeVar("K")


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

    def negated(self) -> "Held":
        """Return the amount that adds up with this one to nothing."""
        return Held(-self.gpu_milli, -self.cpu_milli, -self.memory_bytes, -self.nano_usd_per_hour)


NOTHING = Held()


def held_by(job: Job, leases: Sequence[Lease], micro_usd_per_gpu_hour: Sequence[int]) -> Held:
    """Return the holdings of an attempt by these leases, at their nodes' prices."""
    gpu_milli = cpu_milli = memory_bytes = nano_usd_per_hour = 0
    for lease, price in zip(leases, micro_usd_per_gpu_hour, strict=True):
        cpu, memory = host_request(job, len(lease.gpus))
        gpu_milli += lease.gpu_milli
        cpu_milli += cpu
        memory_bytes += memory
        nano_usd_per_hour += job.nano_usd_per_hour(lease, price)
    return Held(gpu_milli, cpu_milli, memory_bytes, nano_usd_per_hour)


def offered_by(node: Node) -> Held:
    """Return the resources that a node adds to the cluster while it is up."""
    gpus = node.gpus - len(node.unavailable)
    return Held(
        gpu_milli=gpus * MILLI,
        cpu_milli=node.cpu_milli or 0,
        memory_bytes=node.memory_bytes or 0,
        nano_usd_per_hour=gpus * MILLI * node.micro_usd_per_gpu_hour,
    )


class Borrowed:
    """GPUs, CPU and memory that a queue has borrowed, decayed: base + rate x clock.

    Attributes:
        cpu_milli, memory_bytes: what the queue holds now.
        base, rate: of GPUs, CPU and memory.
    """

    __slots__ = ("base", "cpu_milli", "memory_bytes", "rate")
    base: tuple[int, int, int]
    cpu_milli: int
    memory_bytes: int
    rate: tuple[int, int, int]

    def __init__(self) -> None:
        self.cpu_milli = self.memory_bytes = 0
        self.base, self.rate = (0, 0, 0), (0, 0, 0)

    def hold(self, gpu_milli: int, quota_milli: int, held: Held, clock: int) -> None:
        """Hold more CPU and memory, and count the holdings beyond the quota as borrowed from now on."""
        self.cpu_milli += held.cpu_milli
        self.memory_bytes += held.memory_bytes
        over = gpu_milli - quota_milli
        if not quota_milli:
            rate = (gpu_milli, self.cpu_milli, self.memory_bytes)
        elif over <= 0:
            rate = (0, 0, 0)
        else:
            rate = (over, self.cpu_milli * over // gpu_milli, self.memory_bytes * over // gpu_milli)
        if rate != self.rate:
            (a, b, c), (x, y, z), (u, v, w) = self.base, rate, self.rate
            self.base = (a - (x - u) * clock, b - (y - v) * clock, c - (z - w) * clock)
            self.rate = rate

    def inherit(self, before: "Borrowed", clock: int) -> None:
        """Take over what the same queue borrowed in the tree before; it holds nothing yet."""
        (a, b, c), (x, y, z) = before.base, before.rate
        self.base = (a + x * clock, b + y * clock, c + z * clock)


class Holder:
    """A queue with the holdings of all jobs in and under it. An inner queue has a leaf for its own."""

    __slots__ = (
        "borrowed",
        "day",
        "graces",
        "held",
        "inner",
        "inside",
        "leaving",
        "nano",
        "net",
        "net_occupied",
        "occupied",
        "path",
        "queue",
        "quota",
        "users",
    )

    def __init__(self, queue: Queue, parent: "Holder | None") -> None:
        self.queue, self.quota = queue, queue.quota_gpus * MILLI
        self.inside: list[Holder] = []
        self.path: tuple[Holder, ...] = (self, *(parent.path if parent else ()))  # up to the cluster
        self.held = self.nano = 0
        self.leaving = 0  # the part of `held` that has notice
        self.inner = 0  # `held`, and the quota that inner queues keep
        self.occupied = 0  # GPUs that no other queue may use: `inner`, or its quota if it does not lend
        self.net = 0  # `inner` after jobs with notice have left
        self.net_occupied = 0  # `occupied` after jobs with notice have left
        self.users: dict[str, int] = {}
        self.graces: dict[int, int] = {}  # thousandths of GPUs held by jobs with that grace period
        self.borrowed = Borrowed()
        limited = queue.gpu_us_per_day is not None or queue.micro_usd_per_day is not None
        self.day = Day() if limited else None
        if parent is not None:
            parent.inside.append(self)

    @property
    def staying(self) -> int:
        """Return the GPUs that it holds after jobs with notice have left."""
        return self.held - self.leaving

    def move(self, owner: str, grace_us: int, held: Held, clock: int, at_us: int) -> None:
        """Add to its holdings."""
        gpu = held.gpu_milli
        self.held += gpu
        self.nano += held.nano_usd_per_hour
        count(self.users, owner, gpu)
        count(self.graces, grace_us, gpu)
        self.borrowed.hold(self.held, self.quota, held, clock)
        if self.day is not None:
            self.day.add(at_us, (gpu, held.nano_usd_per_hour))

    def value(self, since_us: int) -> object:
        """Return a deep copy as plain values, to compare; of its day only the part since then."""
        borrowed = self.borrowed
        held = (
            self.held,
            borrowed.cpu_milli,
            borrowed.memory_bytes,
            self.nano,
            self.leaving,
            self.inner,
            self.occupied,
            self.net,
        )
        day = None if self.day is None else self.day.value(since_us)
        return (held, dict(self.users), dict(self.graces), borrowed.base, borrowed.rate, day)

    def occupied_with(self, inner: int) -> int:
        """Return the GPUs that it would occupy if it and its inner queues held and kept this amount."""
        return inner if self.queue.lend else max(inner, self.quota)


def count(amounts: dict[K, int], key: K, more: int) -> None:
    """Add to an amount; an amount of zero is dropped."""
    amount = amounts.get(key, 0) + more
    if amount:
        amounts[key] = amount
    else:
        amounts.pop(key, None)
