"""Nodes as placement sees them: the leased part of each, and the free part.

GPUs are bits of a mask; of a shared GPU the free thousandths are known, of one that is cut (MIG) its instances. CPU and
host memory go along with GPUs.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cordee.events import Capacity, Job, Lease, Node

Kind = tuple[str, Capacity, tuple[str, ...]]
"""A GPU's name, the capacity it was bought as, and for whom its node is reserved (`ReservationMade.whom`), if it is."""


Taken = tuple[tuple[int, int, str], ...]
"""The leased instances of a GPU, ascending: first memory slice, memory slices, profile."""


@lru_cache(maxsize=1 << 16)
def mask_of(gpus: tuple[int, ...]) -> int:
    """Return the bit mask of GPU indices.

    >>> mask_of((0, 2))
    5
    """
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


@lru_cache(maxsize=1 << 16)
def gpus_of(mask: int) -> tuple[int, ...]:
    """Return the GPU indices of a bit mask, ascending.

    >>> gpus_of(5)
    (0, 2)
    """
    return tuple(gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1)


def host_request(job: Job, gpus: int) -> tuple[int, int]:
    """Return the CPU milli-cores and bytes of host memory that `gpus` GPUs of a job take along, rounded up.

    A job without GPUs takes all of it in one place.

    >>> from cordee.ids import JobId
    >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=8, cpu_milli=20_001, memory_bytes=80)
    >>> host_request(job, 4)
    (10004, 40)
    """
    if not job.cpu_milli and not job.memory_bytes:
        return 0, 0
    parts, taken = max(1, job.gpus), max(1, gpus)
    return taken * -(-job.cpu_milli // parts), taken * -(-job.memory_bytes // parts)


class Used(NamedTuple):
    """The leased part of a node: whole GPUs, parts of GPUs as (index, milli), CPU and memory, MIG instances."""

    whole: int = 0  # mask
    parts: tuple[tuple[int, int], ...] = ()
    cpu_milli: int = 0
    memory_bytes: int = 0
    mig: tuple[tuple[int, Taken, int], ...] = ()  # GPU, its instances, their thousandths

    @property
    def touched(self) -> int:
        """The mask of GPUs that are leased in whole or in part."""
        touched = self.whole | mask_of(tuple([gpu for gpu, _ in self.parts])) if self.parts else self.whole
        return touched | mask_of(tuple(gpu for gpu, _, _ in self.mig)) if self.mig else touched

    @property
    def milli(self) -> int:
        """The thousandths of GPUs that are leased."""
        whole = 1000 * self.whole.bit_count() + sum(milli for _, milli in self.parts)
        return whole + sum(milli for _, _, milli in self.mig)

    def plus(self, lease: Lease, job: Job) -> "Used":
        """Return the leased part with this lease added; a GPU that is leased already is a programming error.

        >>> from cordee.ids import JobId
        >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=1, gpu_milli=300)
        >>> Used().plus(Lease(node="n", gpus=(2,), milli=300), job).parts
        ((2, 300),)
        """
        cpu_milli, memory_bytes = host_request(job, len(lease.gpus))
        mask, host = mask_of(lease.gpus), (self.cpu_milli + cpu_milli, self.memory_bytes + memory_bytes)
        if lease.instance is not None:
            twice = mask & (self.whole | mask_of(tuple(gpu for gpu, _ in self.parts)))
            assert not twice, f"{job.job_id} leases an instance of GPU {lease.gpus[0]} of {lease.node}, which is leased"
            return Used(self.whole, self.parts, *host, _with(self.mig, lease))
        if lease.milli >= 1000:
            twice = mask & self.touched
            assert not twice, f"{job.job_id} leases GPUs {gpus_of(twice)} of {lease.node} twice"
            return Used(self.whole | mask, self.parts, *host, self.mig)
        parts, whole = dict(self.parts), self.whole
        twice = mask & (whole | mask_of(tuple(gpu for gpu, _, _ in self.mig)))
        assert not twice, f"{job.job_id} leases GPUs {gpus_of(twice)} of {lease.node} twice"
        for gpu in lease.gpus:
            parts[gpu] = parts.get(gpu, 0) + lease.milli
            assert parts[gpu] <= 1000, f"{job.job_id} leases {parts[gpu]} milli of GPU {gpu} of {lease.node}"
        return Used(whole, tuple(sorted(parts.items())), *host, self.mig)

    def minus(self, lease: Lease, job: Job) -> "Used":
        """Return the leased part without this lease, which must be in it."""
        cpu_milli, memory_bytes = host_request(job, len(lease.gpus))
        whole, left, mig = self.whole, self.parts, self.mig
        if lease.instance is not None:
            mig = _without(mig, lease)
        elif lease.milli >= 1000:
            whole &= ~mask_of(lease.gpus)
        else:
            parts = dict(left)
            for gpu in lease.gpus:
                parts[gpu] -= lease.milli
            left = tuple(sorted((gpu, milli) for gpu, milli in parts.items() if milli))
        return Used(whole, left, self.cpu_milli - cpu_milli, self.memory_bytes - memory_bytes, mig)


def _with(mig: tuple[tuple[int, Taken, int], ...], lease: Lease) -> tuple[tuple[int, Taken, int], ...]:
    """Return the instances of all GPUs with that of a lease; two that overlap are a programming error."""
    instance, (gpu,) = lease.instance, lease.gpus
    assert instance is not None, "the lease has no instance"
    by_gpu = {each: (taken, milli) for each, taken, milli in mig}
    taken, milli = by_gpu.get(gpu, ((), 0))
    end = instance.start + instance.size
    over = [each for each in taken if each[0] < end and instance.start < each[0] + each[1]]
    assert not over, f"{instance.profile} at {instance.start} of GPU {gpu} of {lease.node} overlaps {over}"
    taken = tuple(sorted((*taken, (instance.start, instance.size, instance.profile))))
    by_gpu[gpu] = taken, milli + lease.milli
    return tuple((each, *by_gpu[each]) for each in sorted(by_gpu))


def _without(mig: tuple[tuple[int, Taken, int], ...], lease: Lease) -> tuple[tuple[int, Taken, int], ...]:
    """Return the instances of all GPUs without that of a lease, which must be among them."""
    instance, (gpu,) = lease.instance, lease.gpus
    assert instance is not None, "the lease has no instance"
    gone = (instance.start, instance.size, instance.profile)
    left = []
    for each, taken, milli in mig:
        if each != gpu:
            left.append((each, taken, milli))
        elif len(taken) > 1:
            left.append((each, tuple(other for other in taken if other != gone), milli - lease.milli))
    return tuple(left)


class Entry(NamedTuple):
    """The free part of a node that is up."""

    node: Node
    free: int  # mask of GPUs without any lease
    usable: int  # number of GPUs that may be leased whole, free or leased
    kind: Kind  # what a job can ask for, and for whom the node is reserved
    shared: tuple[tuple[int, int], ...] = ()  # partly leased GPUs: (index, free milli)
    cpu_milli: int | None = None  # free; None: not counted
    memory_bytes: int | None = None
    mig: tuple[tuple[int, Taken], ...] = ()  # GPUs on which instances may be placed, with those that are leased

    @property
    def reserved(self) -> tuple[str, ...]:
        """For whom the node is reserved; several: only for jobs that are each of them."""
        return self.kind[2]

    def plus(self, leases: Iterable[tuple[Lease, Job]]) -> "Entry":
        """Return the entry as it would be without these leases on it."""
        free, shared, cpu_milli, memory_bytes = self.free, dict(self.shared), self.cpu_milli, self.memory_bytes
        mig, cuts = dict(self.mig), self.node.mig
        for lease, job in leases:
            if lease.instance is not None:
                gone = (lease.instance.start, lease.instance.size, lease.instance.profile)
                mig[lease.gpus[0]] = tuple(each for each in mig.get(lease.gpus[0], ()) if each != gone)
                free |= 0 if mig[lease.gpus[0]] or cuts is None or not cuts.switched else mask_of(lease.gpus)
            elif lease.milli >= 1000:
                free |= mask_of(lease.gpus)
            else:
                for gpu in lease.gpus:
                    left = shared.pop(gpu, 0) + lease.milli
                    if left >= 1000:
                        free |= 1 << gpu
                    else:
                        shared[gpu] = left
            if cpu_milli is not None or memory_bytes is not None:
                cpu, memory = host_request(job, len(lease.gpus))
                cpu_milli = None if cpu_milli is None else cpu_milli + cpu
                memory_bytes = None if memory_bytes is None else memory_bytes + memory
        free &= ~mask_of(self.node.unavailable)
        parts = tuple(sorted(shared.items()))
        if cuts is not None:
            mig |= {gpu: () for gpu in cuts.gpus if free >> gpu & 1}
            mig = {gpu: mig[gpu] for gpu in sorted(mig) if gpu not in self.node.unavailable}
        return Entry(self.node, free, self.usable, self.kind, parts, cpu_milli, memory_bytes, tuple(mig.items()))

    def holding(self, leases: Iterable[Lease]) -> "Entry":
        """Return the entry with these leases of instances on it, which may overlap those that leave."""
        free, mig = self.free, dict(self.mig)
        for lease in leases:
            (gpu,), instance = lease.gpus, lease.instance
            if instance is not None and gpu in mig:
                mig[gpu] = tuple(sorted({*mig[gpu], (instance.start, instance.size, instance.profile)}))
                free &= ~mask_of(lease.gpus)
        return self._replace(free=free, mig=tuple(mig.items()))

    def without(self, mask: int) -> "Entry":
        """Return the entry without these GPUs."""
        mig = self.mig
        if mig:
            mig = tuple(each for each in mig if not mask >> each[0] & 1)
        if not self.free & mask and mig is self.mig:
            return self
        free, cpu_milli, memory_bytes = self.free & ~mask, self.cpu_milli, self.memory_bytes
        return Entry(self.node, free, self.usable, self.kind, self.shared, cpu_milli, memory_bytes, mig)


def entry_of(node: Node, used: Used, reserved: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a node with this leased part, reserved for somebody or not.

    >>> node = Node(name="n", epoch=1, gpu_name="H100", gpus=4, unavailable=(3,))
    >>> entry = entry_of(node, Used(whole=1, parts=((1, 400),)))
    >>> gpus_of(entry.free), entry.usable, entry.shared
    ((2,), 3, ((1, 600),))
    """
    usable = (1 << node.gpus) - 1 & ~mask_of(node.unavailable)
    touched = used.touched
    free = usable & ~touched
    mig: tuple[tuple[int, Taken], ...] = ()
    if node.mig is not None:
        mig = _cut(node, used, free)
        if not node.mig.switched:
            whole = ~mask_of(node.mig.gpus)
            free, usable, touched = free & whole, usable & whole, touched & whole
    return Entry(
        node,
        free,
        (usable | touched).bit_count(),
        (node.gpu_name, node.capacity, reserved),
        tuple([(gpu, 1000 - milli) for gpu, milli in used.parts if milli < 1000]),
        None if node.cpu_milli is None else node.cpu_milli - used.cpu_milli,
        None if node.memory_bytes is None else node.memory_bytes - used.memory_bytes,
        mig,
    )


def _cut(node: Node, used: Used, free: int) -> tuple[tuple[int, Taken], ...]:
    """Return the GPUs on which instances may be placed, with those that are leased.

    >>> from cordee.events import MigGpus, MigProfile
    >>> small = MigProfile(name="1g.10gb", size=1, compute=1, starts=(0, 1, 2, 3, 4, 5, 6), instances=7)
    >>> node = Node(name="n", epoch=1, gpu_name="H100", gpus=2, mig=MigGpus(gpus=(1,), profiles=(small,)))
    >>> _cut(node, Used(mig=((1, ((0, 1, "1g.10gb"),), 125),)), 0b01)
    ((1, ((0, 1, '1g.10gb'),)),)
    """
    cuts, taken = node.mig, {gpu: each for gpu, each, _ in used.mig}
    if cuts is None:
        return ()
    there = (gpu for gpu in sorted(cuts.gpus) if (free >> gpu & 1 or gpu in taken) and gpu not in node.unavailable)
    return tuple((gpu, taken.get(gpu, ())) for gpu in there)
