"""The best checkpoint interval, and the cost of a preemption with and without a checkpoint.

A save holds the ranks for its stall s and is durable an upload d later (a synchronous save is all stall). With an
interval of t, an interruption loses half an interval and the upload, and each costs a restart R. Failures come without
notice; reclaims come with a notice that may be long enough for a last save.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cordee.plan.cost import hold_usd
from cordee.plan.layout import Layout
from cordee.plan.states import all_adapter_parameters, frozen_bytes, trained_parameters
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100s.
LLAMA3_MTBI_GPU_HOURS = 54 * 24 * 16_384 / 419

ASSUMED_START_S = 120.0
"""Assumed: from placed to the first step, besides reading the checkpoint."""


@dataclass(frozen=True, slots=True)
class StorageLevel:
    """A place for checkpoints: what each GPU or each node writes to it, and what it survives."""

    name: str
    bytes_per_s: float
    each: Literal["GPU", "node"]
    survives: str


# Assumed: a copy over PCIe 4 x16, one good NVMe drive or a stripe of older ones, a node's part of an object store.
STORAGE_LEVELS = (
    StorageLevel("host memory", 25e9, "GPU", "a process crash"),
    StorageLevel("local NVMe", 6e9, "node", "the end of the job"),
    StorageLevel("object store", 2e9, "node", "the loss of a node"),
)


@dataclass(frozen=True, slots=True)
class LevelSave:
    """Seconds of one checkpoint to a storage level."""

    level: str
    seconds: float
    survives: str


def level_saves(n_bytes: int, gpus: int, nodes: int) -> tuple[LevelSave, ...]:
    """Return the seconds of one checkpoint to each level, all ranks writing their part at once.

    >>> [round(save.seconds, 1) for save in level_saves(980_000_000_000, 64, 8)]
    [0.6, 20.4, 61.2]
    """
    writers = {"GPU": gpus, "node": nodes}
    return tuple(
        LevelSave(level.name, n_bytes / (level.bytes_per_s * writers[level.each]), level.survives)
        for level in STORAGE_LEVELS
    )


def capture_bytes_per_node(n_bytes: int, nodes: int, *, held: bool) -> int:
    """Return the host memory of a node's captures: one of its part of the state, and a second if some are held.

    >>> capture_bytes_per_node(980_000_000_000, 8, held=True) / 1e9
    245.0
    """
    return -(-n_bytes // nodes) * (2 if held else 1)


@dataclass(frozen=True, slots=True)
class Survival:
    """Checkpoints, interruptions and losses of a job of this size. Dollars are those of all its GPUs.

    `checkpoint_s` is from the save's start until it is durable; of it, `stall_s` holds the ranks. `mtbi_s` counts
    failures and reclaims together; `lost_s_expected` is the work that an interruption without notice undoes.
    """

    checkpoint_bytes: int
    checkpoint_s: float
    restart_s: float
    mtbi_s: float
    period_s: float
    goodput: float
    usd_per_hour: float | None
    lost_usd_worst: float | None
    lost_usd_expected: float | None
    lost_usd_with_notice: float | None
    stall_s: float
    upload_s: float
    lost_s_expected: float
    reclaim_mtbi_s: float | None
    grace_s: float
    grace_is_enough: bool

    @property
    def notice_needed_s(self) -> float:
        """Notice within which a last checkpoint can be written, once the step in progress is done."""
        return self.checkpoint_s


def checkpoint_bytes(shape: ModelShape, training: Training) -> int:
    """Return the bytes of one checkpoint: master weights and moments, 12 a parameter for AdamW; of adapters alone.

    Frozen parts of a model that is trained otherwise are in it as they are.
    """
    if training.adapters is not None:
        trained = all_adapter_parameters(shape, training.adapters)
        return round(trained * training.optimizer.checkpoint_bytes_per_parameter)
    if training.tuning.frozen is not None:
        own = float(trained_parameters(shape, Layout(), training, 0).total)
        frozen = float(frozen_bytes(shape, Layout(), training, 0))
        return round(own * training.optimizer.checkpoint_bytes_per_parameter + frozen)
    return round(shape.parameters * training.optimizer.checkpoint_bytes_per_parameter)


def best_period_s(mtbi_s: float, restart_s: float, checkpoint_s: float, upload_s: float = 0.0) -> float:
    """Return the period (work and its save) that keeps the most time useful: the maximum of `goodput`.

    For a synchronous save `checkpoint_s` is its whole time; for an asynchronous one it is the stall, and the next save
    never starts before the last one is durable.

    >>> round(best_period_s(6000, 600, 10), 1)
    373.5
    >>> best_period_s(6000, 600, 0.1, upload_s=60)
    60.0
    """
    c = checkpoint_s
    return max(float(upload_s), c + math.sqrt(2 * (mtbi_s + restart_s + upload_s) * c + c * c))


def goodput(period_s: float, mtbi_s: float, restart_s: float, checkpoint_s: float, upload_s: float = 0.0) -> float:
    """Return the useful fraction of held time at this period: (1 - s/t) * M / (M + R + d + t/2).

    >>> round(goodput(373.5, 6000, 600, 10), 4)
    0.8604
    """
    return (1 - checkpoint_s / period_s) * mtbi_s / (mtbi_s + restart_s + upload_s + period_s / 2)


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Failures without notice, and reclaims with `grace_s` of it. None: never."""

    failure_mtbi_s: float | None
    reclaim_mtbi_s: float | None = None
    grace_s: float = 0.0

    @property
    def per_s(self) -> float:
        """All interruptions of a second."""
        return sum(1 / between for between in (self.failure_mtbi_s, self.reclaim_mtbi_s) if between)


def lost_fraction(
    period_s: float, stops: Interruptions, *, restart_s: float, stall_s: float, upload_s: float, leave_s: float
) -> float:
    """Return the seconds lost for one that is kept, apart from the stalls: the sum of rate times loss.

    `leave_s` is what leaving in order takes (the step in progress and a save): a reclaim whose grace is shorter is
    lost like a failure, another one costs its save and the restart.
    """
    undone = period_s / 2 + upload_s + restart_s
    warned = stall_s + upload_s + restart_s if stops.grace_s >= leave_s else undone
    failures = undone / stops.failure_mtbi_s if stops.failure_mtbi_s else 0.0
    return failures + (warned / stops.reclaim_mtbi_s if stops.reclaim_mtbi_s else 0.0)


def best_period_of_s(
    stops: Interruptions, *, restart_s: float, stall_s: float, upload_s: float, leave_s: float
) -> float:
    """Return the period that maximises (1 - s/t) / (1 + a + b*t), which is s + sqrt(s^2 + s(1 + a)/b).

    With failures alone this is `best_period_s`. Where nothing is ever lost (b = 0) the period is infinite.
    """
    losses = {"restart_s": restart_s, "stall_s": stall_s, "upload_s": upload_s, "leave_s": leave_s}
    at_zero = lost_fraction(0.0, stops, **losses)
    slope = lost_fraction(1.0, stops, **losses) - at_zero
    if slope <= 0:
        return math.inf
    best = stall_s + math.sqrt(stall_s**2 + stall_s * (1 + at_zero) / slope)
    return max(upload_s, best)


def lost_usd(gpus: int, lost_s: float, restart_s: float, usd_per_gpu_hour: float) -> float:
    """Return the dollars of work that is done again, and of the restart.

    >>> round(lost_usd(64, 47 * 3600, 0, 2.99))
    8994
    """
    return hold_usd(gpus, lost_s + restart_s, usd_per_gpu_hour)


@dataclass(frozen=True, slots=True)
class Saving:
    """The cost of a job's checkpoints: storage, restart, and the stall of a save.

    `storage_bytes_per_s` is of all its nodes together. `start_s` passes from the stop until ranks run again, before
    they read the checkpoint. `stall_s` is how long an asynchronous save holds the ranks; None: it is synchronous and
    holds them for the whole write.
    """

    storage_bytes_per_s: float
    start_s: float = ASSUMED_START_S
    stall_s: float | None = None


def survival(
    shape: ModelShape,
    training: Training,
    gpus: int,
    saving: Saving,
    *,
    mtbi_s: float | None = None,
    period_s: float | None = None,
    usd_per_gpu_hour: float | None = None,
    reclaim_mtbi_s: float | None = None,
    grace_s: float = 0.0,
    step_s: float = 0.0,
) -> Survival:
    """Return what this job has to expect from interruptions.

    Args:
        shape: the model.
        training: its optimizer decides the checkpoint's size.
        gpus: the job's total.
        saving: how its checkpoints are written and read.
        mtbi_s: mean time between failures; None takes Llama 3's rate for so many GPUs.
        period_s: the period to evaluate; None takes the best one.
        usd_per_gpu_hour: None leaves the dollars out.
        reclaim_mtbi_s: mean time between the cloud's reclaims; None: there are none.
        grace_s: the notice that a reclaim gives.
        step_s: the step that has to end before a last save.
    """
    n_bytes = checkpoint_bytes(shape, training)
    write_s = n_bytes / saving.storage_bytes_per_s
    held_s = write_s if saving.stall_s is None else min(saving.stall_s, write_s)
    # An asynchronous save still takes the whole write after the ranks go on.
    upload_s = 0.0 if saving.stall_s is None else write_s
    restart_s = saving.start_s + write_s
    failures_s = mtbi_s if mtbi_s is not None else LLAMA3_MTBI_GPU_HOURS / gpus * 3600
    stops = Interruptions(failures_s, reclaim_mtbi_s, grace_s)
    durable_s = held_s + upload_s
    losses = {"restart_s": restart_s, "stall_s": held_s, "upload_s": upload_s, "leave_s": step_s + durable_s}
    chosen_s = period_s if period_s is not None else best_period_of_s(stops, **losses)
    useful = (1 - held_s / chosen_s) / (1 + lost_fraction(chosen_s, stops, **losses))

    def usd(lost_s: float) -> float | None:
        return None if usd_per_gpu_hour is None else lost_usd(gpus, lost_s, restart_s, usd_per_gpu_hour)

    return Survival(
        checkpoint_bytes=n_bytes,
        checkpoint_s=durable_s,
        restart_s=restart_s,
        mtbi_s=1 / stops.per_s,
        period_s=chosen_s,
        goodput=useful,
        usd_per_hour=None if usd_per_gpu_hour is None else hold_usd(gpus, 3600, usd_per_gpu_hour),
        lost_usd_worst=usd(chosen_s + upload_s),
        lost_usd_expected=usd(chosen_s / 2 + upload_s),
        lost_usd_with_notice=usd(0.0),
        stall_s=held_s,
        upload_s=upload_s,
        lost_s_expected=chosen_s / 2 + upload_s,
        reclaim_mtbi_s=reclaim_mtbi_s,
        grace_s=grace_s,
        grace_is_enough=grace_s >= step_s + durable_s,
    )
