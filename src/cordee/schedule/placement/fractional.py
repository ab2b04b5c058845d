"""Room for a job that needs less than a GPU: a MIG instance, a fraction of one GPU, or only CPU and memory."""

from collections.abc import Iterable, Mapping

from cordee.events import Job, Lease
from cordee.schedule.placement.entry import Entry, host_request
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.mig import could_ever, first_on
from cordee.schedule.placement.view import Pool
from cordee.schedule.policy import Packing


def find_instance(index: FreeIndex, job: Job, candidates: Iterable[Pool], packing: Packing = "mix") -> Lease | None:
    """Return the lease of a job's MIG instance; None if no candidate pool has room for it.

    A lower price goes first, then GPUs that have instances, then the place that harms later instances least. If a whole
    GPU has to be cut, the packing chooses its node, as for a job of one GPU.
    """
    candidates = tuple(candidates)
    found = []
    for kind in dict.fromkeys(kind for pool in candidates for kind in pool):
        tally = index.kinds.get(kind)
        place = None if tally is None else tally.boards.find(job, index.entries)
        if place is not None:
            found.append(place)
    lease: Lease | None = min(found, key=lambda each: each[0], default=(None, None))[1]
    if lease is None or not index.entries[lease.node].free >> lease.gpus[0] & 1:
        return lease
    kind = index.entries[lease.node].kind
    chosen = index.packer(packing).pick((*host_request(job, 1), 1, 1000), [kind])
    return lease if chosen is None else first_on(index.entries[chosen[0]], job) or lease


def _lacks_instance(index: FreeIndex, job: Job, pool: Pool, freed: Mapping[str, Entry]) -> int | None:
    key = (pool, host_request(job, 1), job.mig, job.gpu_milli)
    if key not in index.holds:
        index.holds[key] = any(entry.kind in pool and could_ever(entry, job) for entry in index.entries.values())
    if not index.holds[key]:
        return None
    with index.as_if(freed):
        return 0 if find_instance(index, job, [pool]) else 1


def lacks_part(index: FreeIndex, job: Job, pool: Pool, freed: Mapping[str, Entry]) -> int | None:
    """Return 0 if there is room, 1 if there is none now, None if the nodes that are up can never hold the job."""
    if job.mig is not None:
        return _lacks_instance(index, job, pool, freed)
    if not index.view(pool, *host_request(job, 1), empty=True, hosts=not job.gpus).total:
        return None
    if index.view(pool, *host_request(job, 1), hosts=not job.gpus).total_if(freed):
        return 0
    with index.as_if(freed):
        return 0 if job.gpus and _tightest(index, job, pool) else 1


def _tightest(index: FreeIndex, job: Job, pool: Pool) -> tuple[int, str, int] | None:
    """Return the tightest shared GPU that has enough left, on a node with CPU and memory for the job."""
    cpu_milli, memory_bytes = host_request(job, 1)
    found = []
    for kind in pool:
        for milli, name, gpu in index.shared(kind, job.gpu_milli):
            entry = index.entries[name]
            if (entry.cpu_milli is None or entry.cpu_milli >= cpu_milli) and (
                entry.memory_bytes is None or entry.memory_bytes >= memory_bytes
            ):
                found.append((milli, name, gpu))
                break
    return min(found, default=None)
