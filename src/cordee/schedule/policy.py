"""The policy of a scheduler: one value for each question that schedulers answer differently.

The default is Cordee's own answer to each. The others are here so that the same code can be compared on the same
trace: FIFO, SJF, EASY, Tiresias and the rest are combinations of these values (`NAMED`).
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from cordee.errors import InputError
from cordee.units import US_PER_S

Order = Literal["service", "fifo", "sjf", "srsf", "las"]
"""Orders in a tier and a queue: levels of service with a bound on waiting (ours), arrival, SJF, shortest remaining,
2D-LAS."""

Backfill = Literal["easy", "fit", "none"]
"""Backfill around a reservation for the first gang that waits (`service`: that is overdue); around nothing; never."""

Victims = Literal["dollars", "newest", "lowest", "none"]
"""Choice of victims: the set that loses the fewest dollars; newest first; lowest tier and priority first; none."""


Packing = Literal["mix", "fgd", "tight"]
"""Choice among nodes that hold a job: least harm to the mix of shapes (ours, and FGD's form of it); best fit."""

_LEVEL_END = 2**62
"""The end of GPU time that a level may have: with what a job receives on it, it fits into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of victims beside what they lose.

    Attributes:
        cascade: the factor by which a victim counts more for each tier below its own, because it may preempt jobs
            of those in its turn.
        favour: the part by which a victim of the preemptor's own tier counts less with each doubling of the GPU-hours
            that it has received.
    """

    cascade: float = 1.0
    favour: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules of one scheduler.

    Attributes:
        spares: number of nodes of each pool kept free for jobs that lost theirs.
        notice: whether victims get notice; if not, they are killed at once.
        levels_gpu_us: GPU time received at which a job moves down a level, for the orders `service` and `las`. None:
            those bounds of `state.history.LADDER` at which the rate of ends falls, learnt from the log. They rise, and
            are below 2**62 (1.28e9 GPU-hours).
        preempt_after_us: the time that a job waits before it preempts within its own tier or moves other jobs; running
            jobs often end by then.
        time_slice_us: the time that an attempt runs, unless it is the job's first, before its own tier may preempt it
            or it may be moved.
        patience: a job that has waited for longer than this many times the run time of the cluster's long jobs
            (`History.long_run_us`), and two time slices at least, is overdue: it goes first in its tier, may preempt
            any level of that tier, and is not preempted by it any more, or not while its turn lasts (`state.overdue`);
            the order `service` only. None: no job is ever overdue.
        patience_us: the same as a fixed time, instead of `patience`.
        patience_fraction: the fraction of all GPUs that overdue jobs may hold where no job waits. The more GPUs are
            asked for, the fewer they may hold (`state.overdue`).
        weights: of victims, beside what they lose.
        move_fraction: running jobs of up to this fraction of a waiting job's size move elsewhere to make room for it.
        awaits_checkpoint: a job that cannot save within its grace and whose time slice is over keeps its place until
            its next checkpoint is durable, if that is due within an interval and `time_slice_us`; the orders
            `service` and `las` only.
        resize: whether elastic jobs start smaller, shrink and grow.

    The patience is from a study over many clusters, made with levels by powers of 8 and another allowance. The levels
    were chosen on one cluster after it (docs/decisions/0036-patience-without-a-place.md).
    """

    order: Order = "service"
    backfill: Backfill = "easy"
    victims: Victims = "dollars"
    packing: Packing = "mix"
    spares: int = 0
    notice: bool = True
    levels_gpu_us: tuple[int, ...] | None = None
    preempt_after_us: int = 90 * US_PER_S
    time_slice_us: int = 1800 * US_PER_S
    patience: float | None = 0.5
    patience_us: int | None = None
    patience_fraction: float = 0.6
    weights: Weights = Weights()
    move_fraction: float = 0.75
    awaits_checkpoint: bool = True
    resize: bool = True

    def __post_init__(self) -> None:
        levels = self.levels_gpu_us or ()
        if any(low >= high for low, high in pairwise((-1, *levels, _LEVEL_END))):
            raise InputError(
                f"levels {levels} are no bounds in GPU-microseconds",
                hint=f"they rise, from 0 on, and each is below {_LEVEL_END:,}",
            )

    @property
    def takes_turns(self) -> bool:
        """Return whether a running job can lose its place to a waiting one of its own tier."""
        return self.order in ("service", "srsf", "las") and self.victims != "none"

    @property
    def guards(self) -> bool:
        """Return whether overdue jobs go first."""
        return self.order == "service" and (self.patience_us is not None or self.patience is not None)


_PEER = Policy(
    order="fifo", preempt_after_us=0, time_slice_us=0, patience=None, weights=Weights(favour=0.0), move_fraction=0.0,
    awaits_checkpoint=False, resize=False,
)  # fmt: skip
"""Rules that all other schedulers have in common: the features that only ours has are off."""

NAMED = MappingProxyType(
    {
        "cordee": Policy(),
        "fifo": replace(_PEER, order="fifo", backfill="none", victims="none"),
        "fit": replace(_PEER, order="fifo", backfill="fit", victims="none"),
        "easy": replace(_PEER, order="fifo", backfill="easy", victims="none"),
        "sjf": replace(_PEER, order="sjf", backfill="fit", victims="none"),
        "srsf": replace(_PEER, order="srsf", backfill="fit"),
        "las": replace(_PEER, order="las", backfill="fit", levels_gpu_us=(3_250 * US_PER_S,)),
        "fgd": Policy(packing="fgd"),
        "kill": Policy(notice=False),
    }
)
"""Known schedulers: strict FIFO, FIFO in which a job that fits may pass others, EASY, SJF, SRSF and 2D-LAS as in
Tiresias (Gu et al., NSDI 2019, section 3; its threshold of 3,250 GPU-seconds), and our own without notices."""
