"""Where a job goes that is less than a GPU: a part of one GPU, or CPU and memory alone.

A part goes to the shared GPU on which the least is left over, and opens a further GPU only when none has room. A job
without GPUs goes where the fewest GPUs are free that somebody could still want.
"""

from collections.abc import Mapping

from cordee.events import Job, Lease
from cordee.schedule.entry import Entry, gpus_of, host_share
from cordee.schedule.fill import Need, search
from cordee.schedule.free import FreeIndex
from cordee.schedule.view import Pool

_ONE = Need(1, 1, 0, False, None)


def lacks_part(index: FreeIndex, job: Job, pool: Pool, freed: Mapping[str, Entry]) -> int | None:
    """0: there is room; 1: there is none now; None: there never is, with the nodes that are up."""
    if not index.view(pool, *host_share(job, 1), empty=True, hosts=not job.gpus).total:
        return None
    if index.view(pool, *host_share(job, 1), hosts=not job.gpus).total_if(freed):
        return 0
    with index.as_if(freed):
        return 0 if job.gpus and _tightest(index, job, pool) else 1


def place_part(index: FreeIndex, job: Job, candidates: tuple[Pool, ...]) -> tuple[Lease, ...] | None:
    """The lease of a job with a part of a GPU or none, in one of these pools."""
    single = [pool for pool in candidates if len(pool) == 1]
    found = [lease for pool in single if (lease := _lease(index, job, pool)) is not None]
    if not found:
        return None
    return (min(found, key=lambda lease: (index.entries[lease.node].node.micro_usd_per_gpu_hour, _new(index, lease))),)


def _new(index: FreeIndex, lease: Lease) -> tuple[bool, int]:
    """Whether a lease breaks a GPU that was whole, else what it leaves of it."""
    shared = dict(index.entries[lease.node].shared)
    opens = not lease.gpus or lease.gpus[0] not in shared
    return opens, 0 if opens else shared[lease.gpus[0]] - lease.milli


def _lease(index: FreeIndex, job: Job, pool: Pool) -> Lease | None:
    if not job.gpus:
        view = index.view(pool, *host_share(job, 1), hosts=True)
        if not view.total:
            return None
        return Lease(node=view.first(min(view.total, key=lambda cls: (sum(cls[2]), cls))), gpus=())
    tightest = _tightest(index, job, pool)
    if tightest is not None:
        return Lease(node=tightest[1], gpus=(tightest[2],), milli=job.gpu_milli)
    shape = search(index.view(pool, *host_share(job, 1)), _ONE)
    if shape is None:
        return None
    name = shape.picks[0][0]
    return Lease(node=name, gpus=(_loneliest(index.entries[name]),), milli=job.gpu_milli)


def _tightest(index: FreeIndex, job: Job, pool: Pool) -> tuple[int, str, int] | None:
    """The shared GPU with the least left that is enough, on a node with CPU and memory for it."""
    cpu_milli, memory_bytes = host_share(job, 1)
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


def _loneliest(entry: Entry) -> int:
    """A free GPU of the island with the fewest free ones, so that other islands stay whole."""
    size = entry.node.island_gpus or entry.node.gpus
    free = gpus_of(entry.free)
    return min(free, key=lambda gpu: (sum(other // size == gpu // size for other in free), gpu))
