"""Trees of queues for the tests of quotas: their jobs, their holdings, and one tree of two levels."""

from pathlib import Path

from cordee.events import Job, Queue, Tier
from cordee.ids import JobId
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.queues import check
from cordee.schedule.quota.quotas import Quotas
from cordee.units import US_PER_HOUR

ROOT = Path(__file__).parent.parent.parent
HOUR = US_PER_HOUR
NANO = 2_000_000_000  # per GPU-hour: two dollars


def a_job(queue: str, gpus: int, *, owner: str = "ann", name: str = "a", tier: str = "standard", **more) -> Job:
    return Job(job_id=JobId(name), name=name, owner=owner, gpus=gpus, queue=queue, tier=Tier(tier), **more)


def gpus(count: float, **more) -> Held:
    return Held(gpu_milli=round(count * 1000), nano_usd_per_hour=round(count * NANO), **more)


def quotas(*queues: Queue, cluster: int = 32, **more) -> Quotas:
    check(queues, cluster)
    made = Quotas(queues, **more)
    made.resize(gpus(cluster), 0)
    return made


def hold(tree: Quotas, queue: str, count: int, at_us: int = 0, owner: str = "ann", **more) -> Job:
    job = a_job(queue, count, owner=owner, **more)
    tree.put(job, gpus(count), at_us)
    return job


TREE = (
    Queue(name="x", quota_gpus=16),
    Queue(name="x1", parent="x", quota_gpus=8),
    Queue(name="x2", parent="x", quota_gpus=4),
    Queue(name="y", quota_gpus=16),
    Queue(name="y1", parent="y", quota_gpus=8),
    Queue(name="y2", parent="y", quota_gpus=8),
)
