"""All layouts of a model on so many GPUs: which fit, how fast they are, and what would help where none fits."""

from collections.abc import Callable
from dataclasses import fields, replace

from cordee.errors import LayoutError
from cordee.hardware.catalog import Gpu, Price
from cordee.plan.answer import Candidate, Plan, Remedy, Verdict
from cordee.plan.cost import usd_per_billion_tokens
from cordee.plan.layout import (
    FRAMEWORKS,
    Framework,
    Layout,
    LayoutWanted,
    Loss,
    Precision,
    Recompute,
    Training,
    find_optimizer,
    parse_layout,
    validate,
)
from cordee.plan.memory import rank_memory, state_bytes
from cordee.plan.offload import host_bytes
from cordee.plan.optimum import Case, best_of_meshes, optimum
from cordee.plan.space import EVERYTHING, Choices
from cordee.plan.step import StepTime, model_flop_fraction, step_interval_s, step_time
from cordee.units import format_bytes
from cordee.workload.model import ModelShape

__all__ = [
    "ANY_LAYOUT", "Candidate", "Plan", "Remedy", "Verdict", "check_fit", "fewest_gpus_to_hold", "fewest_gpus_to_train",
    "judge", "plan_layouts", "training_for",
]  # fmt: skip

TARGET_TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192
LARGEST_SEARCH_GPUS = 65_536
# Contexts are divided only where each rank keeps at least so many tokens.
FEWEST_TOKENS_PER_RANK = 8192
ANY_LAYOUT = LayoutWanted()
# Whose buffers may hold a job that does not say what it is written in.
ADMITTED: tuple[Framework, ...] = ("torch", "megatron")


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
    framework: Framework = "torch",
    loss: Loss | None = None,
) -> Training:
    """What is trained with, where None takes the model's sequence (8,192 at most) and about 4 million tokens a step.

    Raises:
        LayoutError: an unknown optimizer or framework, a sequence that is longer than learned positions, or a size
            below 1.
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
    if framework not in FRAMEWORKS:
        raise LayoutError(f"unknown framework {framework!r}", hint="use " + ", ".join(FRAMEWORKS))
    return Training(seq, batch, find_optimizer(optimizer, precision), precision, flash, framework=framework, loss=loss)


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
    framework: Framework = "torch",
    loss: Loss | None = None,
    exhaustive: bool = False,
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
        framework: whose buffers there are: torch, megatron or deepspeed.
        loss: fused, parallel, compiled or eager; None is what the framework does by itself.
        exhaustive: try every schedule, kind of context parallelism, sharding group, micro-batch and offload.

    Raises:
        LayoutError: something does not divide.
    """
    training = training_for(
        shape, gpus, seq_tokens=seq_tokens, global_batch=global_batch,
        optimizer=optimizer, precision=precision, flash=flash, framework=framework, loss=loss,
    )  # fmt: skip
    gpu.peak_flop_per_s(precision)
    case = Case(shape, gpu, gpus, training)
    wanted = _wanted(layout, recompute, micro_batch)
    choices = EVERYTHING if exhaustive else ordinary(case)
    fitting, rejected, candidates = _judge(case, wanted, choices, price)
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
        candidates=candidates,
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

    What holds a model in torch's own buffers or in Megatron-LM's can hold it: a job does not say which it uses.

    Raises:
        LayoutError: something does not divide.
    """
    wanted = _wanted(layout, recompute, micro_batch)
    cases = [
        Case(shape, gpu, gpus, training_for(
            shape, gpus, seq_tokens=seq_tokens, global_batch=global_batch,
            optimizer=optimizer, precision=precision, flash=flash, framework=framework,
        ))
        for framework in ADMITTED
    ]  # fmt: skip
    case, *others = cases
    found = _best(case, wanted)
    for each in others:
        if not found.fits and (other := _best(each, wanted)).fits:
            found = other
    suggestion = None
    remedies: tuple[Remedy, ...] = ()
    constrained = layout is not None or recompute is not None or micro_batch is not None
    if not found.fits and constrained:
        free = _best(case)
        suggestion = free if free.fits else None
    if not found.fits and suggestion is None:
        remedies = _remedies(case, global_batch)
    return Verdict(
        fits=found.fits,
        gpus=gpus,
        gpu=gpu.name,
        model=shape.name,
        candidate=found,
        suggestion=suggestion,
        remedies=remedies,
    )


def ordinary(case: Case) -> Choices:
    """What is tried where nobody asks for more: what torch and Megatron-LM run every day.

    tp stays inside an island, or inside a node of GPUs without a fast link; a context is divided only where it is long.
    """
    gpu = case.gpu
    return Choices(
        tp_max=min(16, gpu.island_gpus if gpu.island_gpus > 1 else gpu.gpus_per_node),
        cp_max=max(1, case.training.seq_tokens // FEWEST_TOKENS_PER_RANK),
        micro_batches=(1, 2, 4, 8),
        vpp_max=8,
        hsdp=False,
        sp=(True,),
        schedules=("1f1b", "interleaved"),
        cp_kinds=("ring",),
        offloads=("none",),
        ep_alone=True,
        zero2_in_pipeline=False,
    )


def _best(case: Case, wanted: LayoutWanted = ANY_LAYOUT, choices: Choices | None = None) -> Candidate:
    """The one best candidate."""
    winner, _ = optimum(case, wanted, choices or ordinary(case))
    if winner is None:
        raise _nothing_divides(case, wanted)
    return judge(case, winner.layout)


def _judge(
    case: Case, wanted: LayoutWanted, choices: Choices, price: Price | None
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...], int]:
    """One candidate for each mesh: those that fit, fastest first; the others, nearest to fitting first."""
    winners, tally = best_of_meshes(case, wanted, choices)
    if not winners:
        raise _nothing_divides(case, wanted)
    ranked = sorted((judge(case, winner.layout, price) for winner in winners), key=_rank)
    return tuple(c for c in ranked if c.fits), tuple(c for c in ranked if not c.fits), tally.candidates


def _nothing_divides(case: Case, wanted: LayoutWanted) -> LayoutError:
    validate(wanted.plainest(case.gpus), case.shape, case.gpus, case.training)
    return LayoutError(
        f"no layout of {case.shape.name} divides {case.gpus} GPUs "
        f"and a global batch of {case.training.global_batch} sequences",
        hint="use a number of GPUs with small factors, or a global batch that it divides",
    )


def _wanted(layout: str | None, recompute: Recompute | None, micro_batch: int | None) -> LayoutWanted:
    if micro_batch is not None and micro_batch < 1:
        raise LayoutError(f"a micro-batch of {micro_batch} sequences is empty", hint="use at least 1")
    wanted = parse_layout(layout) if layout is not None else ANY_LAYOUT
    return replace(wanted, recompute=wanted.recompute or recompute, micro_batch=wanted.micro_batch or micro_batch)


def _rank(candidate: Candidate) -> tuple[bool, float, Layout]:
    """What fits first, by time; then what does not, by its shortfall; ties by the layout itself."""
    seconds = candidate.step.total_s if candidate.step is not None else float(candidate.shortfall_bytes)
    return (not candidate.fits, seconds, candidate.layout)


def judge(case: Case, layout: Layout, price: Price | None = None) -> Candidate:
    """One layout with its memory, and its speed if it fits."""
    shape, gpu, training = case.shape, case.gpu, case.training
    candidate = Candidate(layout, rank_memory(shape, layout, training), gpu.memory_bytes)
    if not candidate.fits:
        return candidate
    timed = step_time(shape, gpu, layout, training)
    step = StepTime(**{part.name: float(getattr(timed, part.name)) for part in fields(timed)})
    tokens_per_s = training.tokens_per_step / step.total_s
    usd = None
    if price is not None:
        usd = usd_per_billion_tokens(layout.gpus, tokens_per_s, price.usd_per_gpu_hour)
    low, high = step_interval_s(step.total_s, gpu, step.host_fraction)
    return replace(
        candidate,
        step=step,
        mfu=float(model_flop_fraction(shape, gpu, training, layout.gpus, step.total_s)),
        tokens_per_s=tokens_per_s,
        usd_per_billion_tokens=usd,
        step_interval_s=(float(low), float(high)),
    )


def fewest_gpus_to_train(
    shape: ModelShape, gpu: Gpu, training: Training, fewest: int, most: int
) -> tuple[int, Layout] | None:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, ... GPUs between `fewest` and `most` on which some layout fits."""
    for count in _sizes(fewest, most):
        case = Case(shape, gpu, count, training)
        winner, _ = optimum(case, ANY_LAYOUT, ordinary(case))
        if winner is not None and winner.seconds is not None:
            return count, winner.layout
    return None


def _sizes(fewest: int, most: int) -> list[int]:
    """Powers of two and what lies half-way between them, from small to large."""
    powers = [2**n for n in range(17)]
    return [size for size in sorted({*powers, *(3 * n // 2 for n in powers[1:])}) if fewest <= size <= most]


def _remedies(case: Case, global_batch: int | None) -> tuple[Remedy, ...]:
    """What would make it fit: more GPUs; on the same ones offload, a smaller optimizer, or a shorter sequence."""
    training, bill = case.training, state_bytes(case.shape, case.training)
    same = f"on the same {case.gpus} GPU{'' if case.gpus == 1 else 's'}"
    found = [_more_gpus(case, global_batch)]
    offload = replace(ordinary(case), offloads=("optimizer", "activations", "both"))
    found.append(_if_fits(case, f"offload to the host {same}", _on_the_host, offload))
    smaller = find_optimizer("adamw-8bit", training.precision)
    if training.optimizer.bytes_per_parameter > smaller.bytes_per_parameter:
        lean = replace(case, training=replace(training, optimizer=smaller))
        less = f"{format_bytes(state_bytes(case.shape, lean.training))} of state instead of {format_bytes(bill)}"
        here = _if_fits(lean, f"--optimizer {smaller.name} {same}", lambda _case, _layout: less)
        found.append(here or _more_gpus(lean, global_batch, f" --optimizer {smaller.name}"))
    shorter = training.seq_tokens // 2
    while shorter >= 1024:
        brief = replace(case, training=replace(training, seq_tokens=shorter))
        remedy = _if_fits(brief, f"--seq {shorter}", lambda _case, _layout: "fewer activations and logits")
        if remedy is not None:
            found.append(remedy)
            break
        shorter //= 2
    return tuple(remedy for remedy in found if remedy is not None)


def _more_gpus(case: Case, global_batch: int | None, besides: str = "") -> Remedy | None:
    """The first of 1, 1.5, 2, 3, 4, 6, 8, ... GPUs, then nodes, above the present number on which some layout fits."""
    node = case.gpu.gpus_per_node
    fewest = max(case.gpus + 1, fewest_gpus_to_hold(state_bytes(case.shape, case.training), case.gpu))
    for total in (*_sizes(fewest, node - 1), *(node * nodes for nodes in _sizes(1, LARGEST_SEARCH_GPUS // node))):
        if total >= fewest:
            batch = global_batch or _default_batch(case.training.seq_tokens, total)
            larger = replace(case, gpus=total, training=replace(case.training, global_batch=batch))
            remedy = _if_fits(larger, f"--gpus {total}x{case.gpu.name}{besides}", _together)
            if remedy is not None:
                return remedy
    return None


def _together(case: Case, layout: Layout) -> str:
    have, bill = case.gpus * case.gpu.memory_bytes, state_bytes(case.shape, case.training)
    return f"{format_bytes(have)} for {format_bytes(bill)} of state"


def _on_the_host(case: Case, layout: Layout) -> str:
    each = host_bytes(case.shape, layout, case.training)
    node = each * min(case.gpus, case.gpu.gpus_per_node)
    return f"{format_bytes(each)} a GPU on the host, {format_bytes(node)} a node"


def _if_fits(
    case: Case, change: str, because: Callable[[Case, Layout], str], choices: Choices | None = None
) -> Remedy | None:
    winner, _ = optimum(case, ANY_LAYOUT, choices or ordinary(case))
    if winner is None or winner.seconds is None:
        return None
    candidate = judge(case, winner.layout)
    if not candidate.fits:
        return None
    return Remedy(change, case.gpus, case.training, candidate, because(case, winner.layout))
