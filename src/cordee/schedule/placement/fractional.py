"""Room for a job that needs less than a GPU: a fraction of one GPU, or only CPU and memory."""

from collections.abc import Mapping

from cordee.events import Job
from cordee.schedule.placement.entry import Entry, host_request
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.view import Pool


def lacks_part(index: FreeIndex, job: Job, pool: Pool, freed: Mapping[str, Entry]) -> int | None:
    """Return 0 if there is room, 1 if there is none now, None if the nodes that are up can never hold the job."""
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
