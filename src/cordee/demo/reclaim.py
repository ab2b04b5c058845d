"""A reclaim of 64 H100s on spot capacity, 47 hours into a job, in the simulator.

A plain script loses everything. The same job with the plan's interval, with and without a notice that it handles,
loses what the ledger of its simulated run holds. Nothing here is a formula: each figure is a run.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cordee.events import Capacity, CheckpointCommitted, Job, Node, Tier
from cordee.ids import JobId
from cordee.plan.survive import Survival
from cordee.schedule.gang import Work
from cordee.simulate.run import Run, Submission, run
from cordee.simulate.world import Outage
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S

GPUS, GPUS_PER_NODE = 64, 8
AT_US = 47 * US_PER_HOUR
USD_PER_GPU_HOUR = 2.99  # the rate of this example: $8,994 for 3,008 GPU-hours
BACK_US = 600 * US_PER_S  # assumed: until the cloud gives another node
JOB = JobId("llama-aaaaaa")
"""The id is fixed, as all of this example is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The cost of one reclaim, by the ledger.

    Attributes:
        reclaimed_us: when, after the start of the job.
        lost_gpu_us: GPU time of steps that are repeated.
        restart_micro_usd: of the next attempt until its first new step.
        checkpoint_micro_usd: of all checkpoints until then.
        idle_micro_usd: of the remaining nodes, while they wait for another one.
    """

    reclaimed_us: int
    lost_gpu_us: int
    lost_micro_usd: int
    restart_micro_usd: int
    checkpoint_micro_usd: int
    idle_micro_usd: int

    @property
    def micro_usd(self) -> int:
        """Return the cost of lost work and of the restart."""
        return self.lost_micro_usd + self.restart_micro_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimLosses:
    """The losses without checkpoints, with checkpoints only, and with a notice that is handled."""

    period_s: float
    save_s: float
    step_s: float
    notice_s: float
    plain: Loss
    interval_worst: Loss
    interval: tuple[Loss, ...]
    noticed: tuple[Loss, ...]

    @property
    def interval_micro_usd(self) -> int:
        """Return the expected cost without notice."""
        return round(fmean(loss.micro_usd for loss in self.interval))

    @property
    def noticed_worst(self) -> Loss:
        """Return the most expensive of those with notice."""
        return max(self.noticed, key=lambda loss: loss.micro_usd)

    @property
    def last_save_micro_usd(self) -> int:
        """Return the highest cost of the checkpoint that a notice asks for."""
        pairs = zip(self.noticed, self.interval, strict=True)
        return max(noticed.checkpoint_micro_usd - other.checkpoint_micro_usd for noticed, other in pairs)

    @property
    def idle_micro_usd(self) -> tuple[int, int]:
        """Return the lowest and highest cost of idle nodes over all runs: no checkpoint changes that."""
        idle = [loss.idle_micro_usd for loss in (self.plain, self.interval_worst, *self.interval, *self.noticed)]
        return min(idle), max(idle)


def play_reclaims(
    survival: Survival,
    *,
    step_s: float,
    usd_per_gpu_hour: float,
    notice_s: float = 120.0,
    moments: int = 16,
    seed: int = 47,
) -> ReclaimLosses:
    """Simulate the job with a reclaim at several times.

    Args:
        survival: the plan's view of this job: its interval, how long a checkpoint and a restart take.
        step_s: of the planned layout.
        usd_per_gpu_hour: what the cloud charges.
        notice_s: how long before it takes a node the cloud gives notice, where it does.
        moments: the number of reclaim times, drawn from a whole period around hour 47.
        seed: of these draws.
    """
    price = round(usd_per_gpu_hour * MICRO_USD)
    work = _protected(survival, step_s)
    plain = Work(
        steps=work.steps,
        step_us=work.step_us,
        start_us=work.start_us,
        every_us=None,
        handles_notice=False,
        reports=False,
    )
    rng = random.Random(seed)
    period_us = round(survival.period_s * US_PER_S)
    times = sorted(AT_US + rng.randrange(-period_us // 2, period_us // 2) for _ in range(moments))
    notice_us = round(notice_s * US_PER_S)
    return ReclaimLosses(
        period_s=survival.period_s,
        save_s=survival.checkpoint_s,
        step_s=step_s,
        notice_s=notice_s,
        plain=_loss(plain, price, AT_US, 0),
        interval_worst=_loss(work, price, _worst_moment_us(work, price), 0),
        interval=tuple(_loss(work, price, at_us, 0) for at_us in times),
        noticed=tuple(_loss(work, price, at_us, notice_us) for at_us in times),
    )


def _protected(survival: Survival, step_s: float) -> Work:
    """Return the planned job. A checkpoint stalls the ranks until it is durable: the dearest way."""
    step_us = round(step_s * US_PER_S)
    return Work(
        steps=2 * AT_US // step_us,
        step_us=step_us,
        start_us=round(survival.restart_s * US_PER_S),
        every_us=round((survival.period_s - survival.checkpoint_s) * US_PER_S),
        stall_us=round(survival.checkpoint_s * US_PER_S),
        checkpoint_bytes=survival.checkpoint_bytes,
    )


def _worst_moment_us(work: Work, micro_usd_per_gpu_hour: int) -> int:
    """Return the time just before the first checkpoint after hour 47 is durable."""
    undisturbed = _world(work, micro_usd_per_gpu_hour, (), until_us=2 * AT_US)
    return next(e.at_us for e in undisturbed.log if isinstance(e, CheckpointCommitted) and e.at_us >= AT_US) - 1


def _loss(work: Work, micro_usd_per_gpu_hour: int, reclaimed_us: int, notice_us: int) -> Loss:
    outage = Outage(at_us=reclaimed_us, nodes=("node-3",), notice_us=notice_us, back_us=BACK_US)
    done = _world(work, micro_usd_per_gpu_hour, (outage,), until_us=reclaimed_us + BACK_US + US_PER_HOUR)
    cut, again = done.ledger.rows(done.at_us)
    return Loss(
        reclaimed_us=reclaimed_us,
        lost_gpu_us=cut.gpu_us.lost,
        lost_micro_usd=cut.micro_usd.lost,
        restart_micro_usd=again.micro_usd.restart,
        checkpoint_micro_usd=cut.micro_usd.checkpoint,
        idle_micro_usd=done.ledger.totals(done.at_us).idle_micro_usd,
    )


def _world(work: Work, micro_usd_per_gpu_hour: int, outages: Sequence[Outage], *, until_us: int) -> Run:
    nodes = [
        Node(
            name=f"node-{number}",
            epoch=1,
            gpu_name="H100-80GB",
            gpus=GPUS_PER_NODE,
            capacity=Capacity.SPOT,
            micro_usd_per_gpu_hour=micro_usd_per_gpu_hour,
            price_source="the demo",
        )
        for number in range(GPUS // GPUS_PER_NODE)
    ]
    job = Job(
        job_id=JOB,
        name="llama-3-70b",
        owner="the team",
        gpus=GPUS,
        tier=Tier.STANDARD,
        capacity=Capacity.SPOT,
        grace_us=max([outage.notice_us for outage in outages], default=0),
        protected=work.durable,
    )
    return run(nodes, [Submission(at_us=0, job=job, work=work)], outages, until_us=until_us)
