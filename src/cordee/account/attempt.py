"""The account of one attempt: its leases and their prices, and the cause of its losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cordee.account.energy import AttemptEnergy
from cordee.account.replica import ReplicaTimeline
from cordee.account.split import MILLI, Class, Split, rounded
from cordee.account.timeline import Conclusion, Segment, Timeline
from cordee.events import AttemptPlaced, GpusSampled, Job, Lease, Node, NoticeGiven, NoticeReason, Outcome
from cordee.frozen import quick_init
from cordee.ids import JobId
from cordee.units import US_PER_HOUR

_NO_ENERGY = Split()

_CHARGED = frozenset(NoticeReason) - {NoticeReason.QUOTA}
"""The job that gains by these pays; a queue that takes back what it lent does not: the borrower knew."""


class Charged(NamedTuple):
    """The job that is charged with another one's losses."""

    job_id: JobId
    owner: str
    queue: str
    service: str


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt's account. `cause` says why its losses were lost, and `charged` which job pays for them."""

    job_id: JobId
    epoch: int
    owner: str
    queue: str
    service: str  # of which it was a replica; "": of none
    gpus: int
    placed_us: int
    ended_us: int | None  # None: live, and every class provisional
    outcome: Outcome | None
    gpu_us: Split
    micro_usd: Split
    cause: str | None
    charged: Charged | None
    steps: int
    steps_repeated: int  # done before by an attempt of this job that did not keep them
    tokens: int  # of steps that are not lost; of a replica, those that it served
    price_sources: tuple[str, ...]
    energy_mj: Split = _NO_ENERGY  # as counted by the driver
    integrated_mj: int = 0  # the part of it that is power over time, where there was no counter

    @property
    def for_job(self) -> JobId | None:
        """Return the job that is charged with its losses."""
        return None if self.charged is None else self.charged.job_id


class OpenAttempt:
    """An attempt whose account is not closed; `replica` is its time if it is one, else `timeline`."""

    __slots__ = (
        "epoch", "freed_us", "job", "leases", "notice", "outcome", "placed_us", "prices", "replica", "sources",
        "steps_repeated", "stopped", "timeline",
    )  # fmt: skip
    epoch: int
    freed_us: dict[str, int]
    job: Job
    leases: dict[str, Lease]
    notice: NoticeGiven | None
    outcome: Outcome | None
    placed_us: int
    prices: dict[str, int]
    replica: ReplicaTimeline | None
    sources: tuple[str, ...]
    steps_repeated: int
    stopped: bool
    timeline: Timeline

    def __init__(
        self, job: Job, event: AttemptPlaced, nodes: Mapping[str, Node], placed_us: int, *, detailed: bool
    ) -> None:
        self.job, self.epoch, self.placed_us = job, event.epoch, placed_us
        self.timeline = Timeline(placed_us, detailed=detailed)
        self.replica = ReplicaTimeline(placed_us, detailed=detailed) if job.service is not None else None
        self.leases = {lease.node: lease for lease in event.leases}
        self.prices = {name: nodes[name].micro_usd_per_gpu_hour for name in self.leases}
        self.sources = tuple(sorted({nodes[name].price_source for name in self.leases}))
        if not job.gpus:
            cores = "the server's price when the job was submitted" if job.micro_usd_per_cpu_hour else "not billed"
            self.sources = (f"CPU cores: {cores}",)
        self.freed_us = {}
        self.notice = self.outcome = None
        self.stopped = False
        self.steps_repeated = 0

    def draw(self, event: GpusSampled) -> None:
        """Count the energy of a sample."""
        time = self.replica or self.timeline
        if time.energy is None:
            time.energy = AttemptEnergy(self.placed_us)
        time.energy.add(event)

    @property
    def energy(self) -> AttemptEnergy | None:
        """Return what its GPUs drew; None: nothing was counted."""
        return (self.replica or self.timeline).energy

    def segments(self, now_us: int) -> tuple[Segment, ...]:
        """Return its time until its last GPUs were free, or until now; its timeline must keep details."""
        return self._concluded().segments(max(self._ends_us(now_us)))

    def held_micro_usd(self, now_us: int) -> int:
        """Return the micro-dollars of its leases until their ends, or until now: the sum of those of its row."""
        ends = zip(self.leases.items(), self._ends_us(now_us), strict=True)
        rates = ((self.job.nano_usd_per_hour(each, self.prices[name]), end_us) for (name, each), end_us in ends)
        cost = sum((end_us - self.placed_us) * rate for rate, end_us in rates)
        return cost // (MILLI * US_PER_HOUR)

    def row(self, now_us: int, jobs: Mapping[JobId, Job]) -> AttemptRow:
        """Return the account until its GPUs were free, or until now; `jobs` are those that may be charged."""
        held: dict[int, list[int]] = {}  # end: thousandths of GPUs, and nano-dollars an hour
        ends_us = self._ends_us(now_us)
        for (name, lease), end_us in zip(self.leases.items(), ends_us, strict=True):
            sums = held.setdefault(end_us, [0, 0])
            sums[0] += lease.gpu_milli
            sums[1] += self.job.nano_usd_per_hour(lease, self.prices[name])
        concluded = self._concluded()
        gpu_us: dict[Class, int] = {}
        cost: dict[Class, int] = {}
        for end_us, (milli, rate) in held.items():
            for cls, time_us in concluded.split(end_us).items():
                gpu_us[cls] = gpu_us.get(cls, 0) + time_us * milli
                cost[cls] = cost.get(cls, 0) + time_us * rate
        split = rounded(gpu_us, MILLI)
        cause = None if self.outcome is None or not split.lost else self._cause(self.outcome)
        return AttemptRow(
            job_id=self.job.job_id,
            epoch=self.epoch,
            owner=self.job.owner,
            queue=self.job.queue,
            service=self.job.service or "",
            gpus=sum(len(lease.gpus) for lease in self.leases.values()),
            placed_us=self.placed_us,
            ended_us=None if self.outcome is None else max(self.freed_us.values()),
            outcome=self.outcome,
            gpu_us=split,
            micro_usd=rounded(cost, MILLI * US_PER_HOUR),
            cause=cause,
            charged=self._charged(jobs) if cause else None,
            steps=self.timeline.steps,
            steps_repeated=self.steps_repeated,
            tokens=concluded.tokens,
            price_sources=self.sources,
            energy_mj=Split.of(concluded.energy_mj(max(ends_us))),
            integrated_mj=0 if self.energy is None else self.energy.integrated_mj,
        )

    def _concluded(self) -> Conclusion:
        return (self.replica or self.timeline).conclude(self.outcome)

    def _ends_us(self, now_us: int) -> list[int]:
        """Return the end of each lease; now, of one that is held."""
        return [self.freed_us.get(name, max(now_us, self.placed_us)) for name in self.leases]

    def _charged(self, jobs: Mapping[JobId, Job]) -> Charged | None:
        job_id = self.notice.for_job if self.notice is not None and self.notice.reason in _CHARGED else None
        if job_id is None:
            return None
        job = jobs.get(job_id)
        if job is None:
            return Charged(job_id, job_id, job_id, "")
        return Charged(job_id, job.owner, job.queue, job.service or "")

    def _cause(self, outcome: Outcome) -> str:
        if self.notice is not None:
            return self.notice.reason.value
        if self.timeline.rolled_back and outcome in (Outcome.FINISHED, Outcome.CHECKPOINTED):
            return "rollback"
        if outcome is Outcome.KILLED:
            return "stop" if self.stopped else "kill"
        return "failure" if outcome is Outcome.FAILED else "infrastructure"
