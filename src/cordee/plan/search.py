"""All layouts of a model on so many GPUs: which fit, how fast they are, and what would help where none fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeVar

from cordee.errors import DoesNotFitError, LayoutError
from cordee.hardware.catalog import Gpu, Price
from cordee.plan.cost import usd_per_billion_tokens
from cordee.plan.layout import (
    Layout,
    LayoutWanted,
    Precision,
    Recompute,
    Training,
    find_optimizer,
    first_misfit,
    parse_layout,
    validate,
)
from cordee.plan.memory import RankMemory, rank_memory, state_bytes
from cordee.plan.step import StepTime, model_flop_share, step_time
from cordee.units import format_bytes
from cordee.workload.model import ModelShape

TARGET_TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192
LARGEST_SEARCH_GPUS = 65_536
ANY_LAYOUT = LayoutWanted()
T = TypeVar("T")


@dataclass(frozen=True)
class _Case:
    """What all candidates have in common."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    training: Training


@dataclass(frozen=True)
class Candidate:
    """One layout with its memory and, if it fits, its speed."""

    layout: Layout
    memory: RankMemory
    wall_bytes: int
    step: StepTime | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    usd_per_billion_tokens: float | None = None

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes on its fullest GPU."""
        return self.memory.total_bytes

    @property
    def shortfall_bytes(self) -> int:
        """Bytes over the wall; 0 if it fits."""
        return max(0, self.peak_bytes - self.wall_bytes)

    @property
    def fits(self) -> bool:
        """Whether its fullest GPU holds it."""
        return self.peak_bytes <= self.wall_bytes


@dataclass(frozen=True)
class Remedy:
    """One change after which a layout fits."""

    change: str
    gpus: int
    training: Training
    candidate: Candidate


@dataclass(frozen=True)
class Plan:
    """One row for each mesh: the fastest way to run it that fits (fastest first), or the one nearest to fitting."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    training: Training
    price: Price | None
    state_bytes: int
    fewest_gpus: int
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    remedies: tuple[Remedy, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return self.fitting[0] if self.fitting else None


@dataclass(frozen=True)
class Verdict:
    """Whether a job's model fits its GPUs; if not, by how much, and what would."""

    fits: bool
    gpus: int
    gpu: str
    model: str
    candidate: Candidate
    suggestion: Candidate | None
    remedies: tuple[Remedy, ...]

    @property
    def shortfall_bytes(self) -> int:
        """Bytes over the wall on the fullest GPU."""
        return self.candidate.shortfall_bytes

    def error(self) -> DoesNotFitError:
        """The refusal with its numbers and a layout that would fit."""
        assert not self.fits, "only what does not fit is refused"
        candidate = self.candidate
        message = (
            f"{self.model} does not fit {self.gpus} x {self.gpu}: {candidate.layout} needs "
            f"{format_bytes(candidate.peak_bytes)} on its fullest GPU, which has "
            f"{format_bytes(candidate.wall_bytes)}: {format_bytes(candidate.shortfall_bytes)} too much"
        )
        return DoesNotFitError(message, hint=self._hint())

    def _hint(self) -> str:
        if self.suggestion is not None:
            peak = format_bytes(self.suggestion.peak_bytes)
            return f"layout {self.suggestion.layout} fits with {peak}"
        if not self.remedies:
            return "use larger GPUs"
        return "; or ".join(f"{remedy.change}: {remedy.candidate.layout} fits" for remedy in self.remedies)


def fewest_gpus_to_hold(n_bytes: float, gpu: Gpu) -> int:
    """GPUs needed only to hold so many bytes, before one activation: 2.435 TB is 31 GPUs of 80 GB."""
    return max(1, -(-round(n_bytes) // gpu.memory_bytes))


def training_for(
    shape: ModelShape,
    gpus: int,
    *,
    seq_tokens: int | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    flash: bool = True,
) -> Training:
    """What is trained with, where None takes the model's sequence (8,192 at most) and about 4 million tokens a step.

    Raises:
        LayoutError: an unknown optimizer, a sequence that is longer than learned positions, or a size below 1.
    """
    if gpus < 1:
        raise LayoutError(f"a job needs at least 1 GPU, not {gpus}", hint="write --gpus 64xH100")
    seq = seq_tokens if seq_tokens is not None else min(shape.positions, LONGEST_DEFAULT_SEQUENCE)
    if seq < 1 or (shape.learned_positions and seq > shape.learned_positions):
        limit = shape.learned_positions or shape.positions
        raise LayoutError(f"{shape.name} cannot train on sequences of {seq} tokens", hint=f"use 1 to {limit}")
    batch = global_batch if global_batch is not None else _default_batch(seq, gpus)
    if batch < 1:
        raise LayoutError(f"a global batch of {batch} sequences is empty", hint="use at least 1")
    return Training(seq, batch, find_optimizer(optimizer, precision), precision, flash)


def _default_batch(seq_tokens: int, gpus: int) -> int:
    """About 4 million tokens, as a multiple of the largest divisor of the GPUs that is not above it."""
    target = max(1, TARGET_TOKENS_PER_STEP // seq_tokens)
    divisor = max(n for n in range(1, min(gpus, target) + 1) if gpus % n == 0)
    return -(-target // divisor) * divisor


def plan_layouts(
    shape: ModelShape,
    gpu: Gpu,
    gpus: int,
    *,
    seq_tokens: int | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    recompute: Recompute | None = None,
    micro_batch: int | None = None,
    flash: bool = True,
    layout: str | None = None,
    price: Price | None = None,
) -> Plan:
    """Every layout of this model on these GPUs, judged.

    Args:
        shape: the model.
        gpu: the kind of GPU.
        gpus: the job's total.
        seq_tokens: None takes the model's own, 8,192 at most.
        global_batch: sequences per step over all GPUs; None takes about 4 million tokens.
        optimizer: a name in `layout.OPTIMIZERS`.
        precision: of weights and activations.
        recompute: None tries them all.
        micro_batch: sequences; None tries 1, 2, 4 and 8.
        flash: whether attention keeps no scores.
        layout: only layouts like this (`tp=8,pp=2`).
        price: what a GPU-hour costs; None leaves dollars out.

    Raises:
        LayoutError: something does not divide.
    """
    training = training_for(
        shape, gpus, seq_tokens=seq_tokens, global_batch=global_batch,
        optimizer=optimizer, precision=precision, flash=flash,
    )  # fmt: skip
    gpu.peak_flop_per_s(precision)
    case = _Case(shape, gpu, gpus, training)
    fitting, rejected = _judge(case, _wanted(layout, recompute, micro_batch), price)
    remedies = () if fitting else _remedies(case, global_batch)
    bill = state_bytes(shape, training)
    return Plan(
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        training=training,
        price=price,
        state_bytes=bill,
        fewest_gpus=fewest_gpus_to_hold(bill, gpu),
        fitting=fitting,
        rejected=rejected,
        remedies=remedies,
    )


def check_fit(
    shape: ModelShape,
    gpu: Gpu,
    gpus: int,
    *,
    seq_tokens: int | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: Precision = "bf16",
    recompute: Recompute | None = None,
    micro_batch: int | None = None,
    flash: bool = True,
    layout: str | None = None,
) -> Verdict:
    """Whether a job may be admitted; arguments as for `plan_layouts`. With a layout, only such ones count.

    Raises:
        LayoutError: something does not divide.
    """
    training = training_for(
        shape, gpus, seq_tokens=seq_tokens, global_batch=global_batch,
        optimizer=optimizer, precision=precision, flash=flash,
    )  # fmt: skip
    case = _Case(shape, gpu, gpus, training)
    fitting, rejected = _judge(case, _wanted(layout, recompute, micro_batch))
    suggestion = None
    remedies: tuple[Remedy, ...] = ()
    constrained = layout is not None or recompute is not None or micro_batch is not None
    if not fitting and constrained:
        others, _ = _judge(case)
        suggestion = others[0] if others else None
    if not fitting and suggestion is None:
        remedies = _remedies(case, global_batch)
    return Verdict(
        fits=bool(fitting),
        gpus=gpus,
        gpu=gpu.name,
        model=shape.name,
        candidate=(fitting or rejected)[0],
        suggestion=suggestion,
        remedies=remedies,
    )


def _judge(
    case: _Case, wanted: LayoutWanted = ANY_LAYOUT, price: Price | None = None
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """One candidate for each mesh: those that fit, fastest first; the others, nearest to fitting first."""
    best: dict[str, Candidate] = {}
    for layout in _layouts(case, wanted):
        candidate = _candidate(case, layout, price)
        rival = best.get(layout.mesh)
        if rival is None or _rank(candidate) < _rank(rival):
            best[layout.mesh] = candidate
    if not best:
        validate(wanted.plainest(case.gpus), case.shape, case.gpus, case.training)
        raise LayoutError(
            f"no layout of {case.shape.name} divides {case.gpus} GPUs "
            f"and a global batch of {case.training.global_batch} sequences",
            hint="use a number of GPUs with small factors, or a global batch that it divides",
        )
    ranked = sorted(best.values(), key=_rank)
    return tuple(c for c in ranked if c.fits), tuple(c for c in ranked if not c.fits)


def _wanted(layout: str | None, recompute: Recompute | None, micro_batch: int | None) -> LayoutWanted:
    if micro_batch is not None and micro_batch < 1:
        raise LayoutError(f"a micro-batch of {micro_batch} sequences is empty", hint="use at least 1")
    wanted = parse_layout(layout) if layout is not None else ANY_LAYOUT
    return replace(wanted, recompute=wanted.recompute or recompute, micro_batch=wanted.micro_batch or micro_batch)


def _rank(candidate: Candidate) -> tuple[bool, float, Layout]:
    """What fits first, by time; then what does not, by its shortfall; ties by the layout itself."""
    seconds = candidate.step.total_s if candidate.step is not None else float(candidate.shortfall_bytes)
    return (not candidate.fits, seconds, candidate.layout)


def _layouts(case: _Case, wanted: LayoutWanted) -> Iterator[Layout]:
    """All layouts worth judging: tp stays inside an island, or inside a node of GPUs without a fast link."""
    shape, gpu, gpus, training = case.shape, case.gpu, case.gpus, case.training
    widest = min(16, gpu.island_gpus if gpu.island_gpus > 1 else gpu.gpus_per_node)
    recomputes: tuple[Recompute, ...] = ("none", "full") if training.flash else ("none", "selective", "full")
    for tp in _choices(wanted.tp, (n for n in (1, 2, 4, 8, 16) if n <= widest)):
        for pp in _choices(wanted.pp, range(1, min(shape.layers, gpus // tp) + 1)):
            dp = wanted.dp or gpus // (tp * pp)
            if tp * pp * dp != gpus:
                continue
            sp = (tp > 1 and training.seq_tokens % tp == 0) if wanted.sp is None else wanted.sp
            for zero, size, how in product(
                _choices(wanted.zero, _zero_stages(dp, pp)),
                _choices(wanted.micro_batch, (1, 2, 4, 8)),
                _choices(wanted.recompute, recomputes),
            ):
                layout = Layout(dp, tp, pp, zero, sp, size, how)
                if first_misfit(layout, shape, gpus, training) is None:
                    yield layout


def _choices(wanted: T | None, otherwise: Iterable[T]) -> Iterable[T]:
    """The one value that was asked for, or all of them."""
    return otherwise if wanted is None else (wanted,)


def _zero_stages(dp: int, pp: int) -> tuple[int, ...]:
    """Stage 2 reduces gradients after every micro-batch, which a pipeline has many of: not offered there."""
    if dp == 1:
        return (0,)
    return (0, 1, 2, 3) if pp == 1 else (0, 1, 3)


def _candidate(case: _Case, layout: Layout, price: Price | None) -> Candidate:
    shape, gpu, training = case.shape, case.gpu, case.training
    memory = rank_memory(shape, layout, training)
    candidate = Candidate(layout, memory, gpu.memory_bytes)
    if not candidate.fits:
        return candidate
    step = step_time(shape, gpu, layout, training)
    tokens_per_s = training.tokens_per_step / step.total_s
    usd = None
    if price is not None:
        usd = usd_per_billion_tokens(layout.gpus, tokens_per_s, price.usd_per_gpu_hour)
    mfu = model_flop_share(shape, gpu, training, layout.gpus, step.total_s)
    return replace(candidate, step=step, mfu=mfu, tokens_per_s=tokens_per_s, usd_per_billion_tokens=usd)


def _remedies(case: _Case, global_batch: int | None) -> tuple[Remedy, ...]:
    """What would make it fit: more GPUs; and on the same ones a smaller optimizer, or a shorter sequence."""
    found = [_more_gpus(case, global_batch)]
    training = case.training
    smaller = find_optimizer("adamw-8bit", training.precision)
    if training.optimizer.bytes_per_parameter > smaller.bytes_per_parameter:
        change = f"--optimizer {smaller.name} on the same {case.gpus} GPUs"
        found.append(_if_fits(replace(case, training=replace(training, optimizer=smaller)), change))
    shorter = training.seq_tokens // 2
    while shorter >= 1024:
        remedy = _if_fits(replace(case, training=replace(training, seq_tokens=shorter)), f"--seq {shorter}")
        if remedy is not None:
            found.append(remedy)
            break
        shorter //= 2
    return tuple(remedy for remedy in found if remedy is not None)


def _more_gpus(case: _Case, global_batch: int | None) -> Remedy | None:
    """The first of 1, 1.5, 2, 3, 4, 6, 8, ... nodes above the present number on which some layout fits."""
    node = case.gpu.gpus_per_node
    fewest = max(case.gpus + 1, fewest_gpus_to_hold(state_bytes(case.shape, case.training), case.gpu))
    nodes = 1
    while nodes * node <= LARGEST_SEARCH_GPUS:
        for total in (nodes * node, nodes * node * 3 // 2):
            if total < fewest:
                continue
            batch = global_batch or _default_batch(case.training.seq_tokens, total)
            larger = replace(case, gpus=total, training=replace(case.training, global_batch=batch))
            remedy = _if_fits(larger, f"--gpus {total}x{case.gpu.name}")
            if remedy is not None:
                return remedy
        nodes *= 2
    return None


def _if_fits(case: _Case, change: str) -> Remedy | None:
    try:
        fitting, _ = _judge(case)
    except LayoutError:  # So many GPUs divide nothing: this remedy is none.
        return None
    return Remedy(change, case.gpus, case.training, fitting[0]) if fitting else None
