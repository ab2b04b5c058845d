"""CPU cores and host memory in the words of an explanation: what a job needs of each node, and what nodes have free."""

from collections.abc import Iterable
from dataclasses import replace

from cordee.events import Job
from cordee.schedule.placement.entry import Entry, host_request
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import fits
from cordee.schedule.placement.view import Pool
from cordee.units import format_bytes


def lacks_host(index: FreeIndex, job: Job, candidates: Iterable[Pool]) -> bool:
    """Return whether a job that has no place would have one if it needed neither CPU cores nor host memory."""
    if not job.cpu_milli and not job.memory_bytes:
        return False
    bare = replace(job, cpu_milli=0, memory_bytes=0)
    return any(fits(index, bare, pool) for pool in candidates)


def needs_of_host(job: Job) -> str:
    """Describe what a job needs on one node.

    >>> from cordee.ids import JobId
    >>> needs_of_host(Job(job_id=JobId("a"), name="a", owner="me", gpus=0, cpu_milli=1500))
    '1.5 CPU cores on one node'
    >>> needs_of_host(Job(job_id=JobId("a"), name="a", owner="me", gpus=2, memory_bytes=8 << 30))
    '4.295 GB of host memory for each GPU'
    """
    cpu_milli, memory_bytes = host_request(job, 1)
    return _amounts(cpu_milli, memory_bytes) + (" for each GPU" if job.gpus else " on one node")


def most_of_host(entries: Iterable[Entry], job: Job, *, free: bool) -> str:
    """Describe the node that has most of what a job needs: free, or at all.

    Args:
        entries: the free parts of the nodes.
        job: its CPU cores come first, then its host memory.
        free: describe what is free, not the whole node.
    """
    found = [(_has(each, free=free), each.node.name) for each in entries]
    (cpu_milli, memory_bytes), name = max(found, key=lambda each: (_fraction(each[0], job), each[1]))
    amounts = _amounts(cpu_milli if job.cpu_milli else None, memory_bytes if job.memory_bytes else None)
    return f"the most on one node is {amounts}{' free' if free else ''}, on {name}"


def _has(entry: Entry, *, free: bool) -> tuple[int | None, int | None]:
    node = entry.node
    return (entry.cpu_milli, entry.memory_bytes) if free else (node.cpu_milli, node.memory_bytes)


def _fraction(has: tuple[int | None, int | None], job: Job) -> float:
    """Return the smaller of the fractions of the job's cores and memory that a node has; a node that counts none: 1."""
    wanted = host_request(job, 1)
    parts = (have / want for have, want in zip(has, wanted, strict=True) if want and have is not None)
    return min(parts, default=1.0)


def _amounts(cpu_milli: int | None, memory_bytes: int | None) -> str:
    """Return CPU cores and memory as text; None and 0 are left out, unless nothing would be left.

    >>> _amounts(1000, None), _amounts(2500, 2_000_000_000), _amounts(0, None)
    ('1 CPU core', '2.5 CPU cores and 2 GB of host memory', '0 CPU cores')
    """
    parts = [f"{cpu_milli / 1000:g} CPU core{'' if cpu_milli == 1000 else 's'}"] if cpu_milli else []
    parts += [f"{format_bytes(memory_bytes)} of host memory"] if memory_bytes else []
    return " and ".join(parts) or ("0 CPU cores" if cpu_milli is not None else "no host memory")
