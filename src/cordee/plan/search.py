"""All layouts of a model on so many GPUs: which fit, how fast they are, and what would help where none fits."""

from collections.abc import Callable
from dataclasses import fields, replace

from cordee.errors import LayoutError
from cordee.hardware.catalog import Gpu, Price
from cordee.plan.buffers import cuda_bytes_of
from cordee.plan.candidates import Candidate, Layouts, Remedy
from cordee.plan.cost import usd_per_billion_tokens
from cordee.plan.doubt import doubt
from cordee.plan.layout import Layout
from cordee.plan.memory import gpu_state_bytes, rank_memory, state_bytes
from cordee.plan.memory_interval import held_surely, needed_interval_bytes
from cordee.plan.offload import host_bytes
from cordee.plan.optimum import Case, best_of_meshes, optimum
from cordee.plan.rules import validate
from cordee.plan.settings import Settings, default_batch
from cordee.plan.space import Choices
from cordee.plan.step import StepTime, model_flop_fraction, step_interval_s, step_time
from cordee.plan.training import BASES, STACKS, find_optimizer
from cordee.plan.wanted import ANY_LAYOUT, LayoutWanted
from cordee.units import format_bytes, plural

LARGEST_SEARCH_GPUS = 65_536
# Contexts are divided only where each rank keeps at least so many tokens.
FEWEST_TOKENS_PER_RANK = 8192


def fewest_gpus_to_hold(n_bytes: float, gpu: Gpu) -> int:
    """Return the GPUs needed only to hold so many bytes, before one activation: 2.448 TB is 29 GPUs of 79.18 GiB."""
    return max(1, -(-round(n_bytes) // gpu.visible_bytes))


def default_choices(case: Case) -> Choices:
    """Return the choices that are searched by default: what torch and Megatron-LM run every day.

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


def best_layout(case: Case, wanted: LayoutWanted = ANY_LAYOUT, price: Price | None = None) -> Layouts:
    """Return the one best candidate.

    Raises:
        LayoutError: no layout divides.
    """
    winner, tally = optimum(case, wanted, default_choices(case))
    if winner is None:
        raise _nothing_divides(case, wanted)
    found = (evaluate(case, winner.layout, price),)
    return Layouts(case, price, found if found[0].fits else (), () if found[0].fits else found, tally.candidates)


def best_per_mesh(case: Case, wanted: LayoutWanted, choices: Choices, price: Price | None = None) -> Layouts:
    """Return one candidate for each mesh: those that fit, fastest first; the others, nearest to fitting first.

    Raises:
        LayoutError: no layout divides.
    """
    winners, tally = best_of_meshes(case, wanted, choices)
    if not winners:
        raise _nothing_divides(case, wanted)
    ranked = sorted((evaluate(case, winner.layout, price) for winner in winners), key=_rank)
    fitting = tuple(candidate for candidate in ranked if candidate.fits)
    return Layouts(case, price, fitting, tuple(c for c in ranked if not c.fits), tally.candidates)


def _nothing_divides(case: Case, wanted: LayoutWanted) -> LayoutError:
    validate(wanted.plainest(case.gpus), case.shape, case.gpus, case.training)
    return LayoutError(
        f"no layout of {case.shape.name} divides {plural(case.gpus, 'GPU')} "
        f"and a global batch of {case.training.global_batch} sequences",
        hint="use a number of GPUs with small factors, or a global batch that it divides",
    )


def _rank(candidate: Candidate) -> tuple[bool, float, Layout]:
    """Return the sort key: what fits first, by time; then the rest by its shortfall; ties by the layout itself."""
    seconds = candidate.shortfall_bytes if candidate.step_s is None else candidate.step_s
    return (not candidate.fits, seconds, candidate.layout)


def evaluate(case: Case, layout: Layout, price: Price | None = None) -> Candidate:
    """Evaluate one layout: its memory, and its speed if it fits."""
    shape, gpu, training = case.shape, case.gpu, case.training
    memory = rank_memory(shape, layout, training, cuda_bytes_of(gpu))
    candidate = Candidate(layout, memory, gpu.visible_bytes, needed_interval_bytes(memory.total_bytes, training))
    if not candidate.fits:
        return candidate
    timed = step_time(shape, gpu, layout, training)
    step = StepTime(**{part.name: float(getattr(timed, part.name)) for part in fields(timed)})
    tokens_per_s = float(training.tokens_per_step / step.total_s)
    usd = None
    if price is not None:
        usd = usd_per_billion_tokens(layout.gpus, tokens_per_s, price.usd_per_gpu_hour)
    low, high = step_interval_s(step.total_s, gpu, doubt(shape, gpu, layout, training, step))
    return replace(
        candidate,
        step=step,
        mfu=float(model_flop_fraction(shape, gpu, training, layout.gpus, step.total_s)),
        tokens_per_s=tokens_per_s,
        usd_per_billion_tokens=usd,
        step_interval_s=(float(low), float(high)),
    )


def best_sure(case: Case, wanted: LayoutWanted, price: Price | None = None) -> Candidate | None:
    """Return the fastest layout that fits at the upper end of its interval; None if none does."""
    found = best_layout(replace(case, gpu=held_surely(case.gpu, case.training)), wanted, price).best
    return None if found is None else replace(found, gpu_memory_bytes=case.gpu.visible_bytes)


def fewest_gpus_to_train(case: Case) -> tuple[int, Layout] | None:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, ... GPUs, up to the case's, on which some layout fits, and how."""
    held = fewest_gpus_to_hold(gpu_state_bytes(case.shape, case.training), case.gpu)
    for count in _sizes(held, case.gpus):
        winner, _ = optimum(replace(case, gpus=count), ANY_LAYOUT, default_choices(case))
        if winner is not None and winner.seconds is not None:
            return count, winner.layout
    return None


def _sizes(fewest: int, most: int) -> list[int]:
    """Return powers of two and what lies half-way between them, from small to large."""
    powers = [2**n for n in range(17)]
    return [size for size in sorted({*powers, *(3 * n // 2 for n in powers[1:])}) if fewest <= size <= most]


def remedies(case: Case, global_batch: int | None) -> tuple[Remedy, ...]:
    """Return what would make it fit: more GPUs; on the same ones offload, adapters, a smaller optimizer or loss.

    And a shorter sequence.
    """
    training, state = case.training, state_bytes(case.shape, case.training)
    same = f"on the same {plural(case.gpus, 'GPU')}"
    more = _more_gpus(case, global_batch)
    found = [more]
    offload = replace(default_choices(case), offloads=("optimizer", "activations", "both"))
    found.append(_if_fits(case, f"offload to the host {same}", _on_the_host, offload))
    adapters = training.adapters
    if adapters is not None and adapters.base_bits > 4:
        small = replace(case, training=replace(training, adapters=replace(adapters, base=BASES["nf4"])))
        base = f"{format_bytes(state_bytes(case.shape, small.training))} of state instead of {format_bytes(state)}"
        smaller_base = "--base-bits 4" if adapters.magnitudes else "--train qlora"
        found.append(_if_fits(small, f"{smaller_base} {same}", lambda _case, _layout: base))
    if adapters is not None and "experts" in adapters.targets:
        attention = tuple(name for name in adapters.targets if name not in STACKS)
        fewer = replace(case, training=replace(training, adapters=replace(adapters, targets=attention)))
        found.append(_if_fits(fewer, f"--targets attention {same}", lambda _case, _layout: "experts stay as they are"))
    smaller = find_optimizer("adamw-8bit", training.precision if adapters is None else "fp32")
    if training.optimizer.bytes_per_parameter > smaller.bytes_per_parameter:
        lean = replace(case, training=replace(training, optimizer=smaller))
        less = f"{format_bytes(state_bytes(case.shape, lean.training))} of state instead of {format_bytes(state)}"
        here = _if_fits(lean, f"--optimizer {smaller.name} {same}", lambda _case, _layout: less)
        found.append(here or _more_gpus(lean, global_batch, f" --optimizer {smaller.name}"))
    found.append(_with_adapters(case, global_batch, same))
    if training.framework == "torch" and training.loss_kind == "eager":
        chunked = replace(case, training=replace(training, loss="chunked"))
        here = _if_fits(chunked, f"--loss chunked {same}", lambda _case, _layout: "logits are never whole")
        found.append(here or (None if more else _more_gpus(chunked, global_batch, " --loss chunked")))
    shorter = training.seq_tokens // 2
    while shorter >= 1024:
        brief = replace(case, training=replace(training, seq_tokens=shorter))
        remedy = _if_fits(brief, f"--seq {shorter}", lambda _case, _layout: "fewer activations and logits")
        if remedy is not None:
            found.append(remedy)
            break
        shorter //= 2
    return tuple(remedy for remedy in found if remedy is not None)


def _with_adapters(case: Case, global_batch: int | None, same: str) -> Remedy | None:
    """Return adapters over 4-bit weights in place of training in full; None where they are not planned or too large.

    Those of a mixture are on its attention, over 16-bit experts, which bitsandbytes does not quantise.
    """
    training = case.training
    if training.adapters is not None or training.tuning.stage is not None or training.tuning.frozen is not None:
        return None
    is_mixture = case.shape.experts is not None
    asked = Settings(
        train="lora" if is_mixture else "qlora", targets="attention" if is_mixture else "all",
        seq_tokens=training.seq_tokens, global_batch=global_batch, precision=training.precision,
        framework=training.framework, loss=training.loss,
    )  # fmt: skip
    try:
        adapted = replace(case, training=asked.training(case.shape, case.gpus))
    except LayoutError:
        return None
    over = "frozen weights" if is_mixture else "4-bit weights"
    change = "--train lora --targets attention" if is_mixture else "--train qlora"
    less = f"{format_bytes(state_bytes(case.shape, adapted.training))} of state: adapters over {over}"
    return _if_fits(adapted, f"{change} {same}", lambda _case, _layout: less)


def _more_gpus(case: Case, global_batch: int | None, besides: str = "") -> Remedy | None:
    """Return the first of 1.5, 2, 3, 4, 6, ... times the GPUs or nodes on which some layout fits."""
    if case.gpu.whole is not None:  # There are no gangs on MIG instances.
        case = replace(case, gpu=case.gpu.whole, gpus=0)
    node = case.gpu.gpus_per_node
    fewest = max(case.gpus + 1, fewest_gpus_to_hold(gpu_state_bytes(case.shape, case.training), case.gpu))
    for total in (*_sizes(fewest, node - 1), *(node * nodes for nodes in _sizes(1, LARGEST_SEARCH_GPUS // node))):
        if total >= fewest:
            batch = global_batch or default_batch(
                case.training.seq_tokens, total, adapted=case.training.adapters is not None
            )
            larger = replace(case, gpus=total, training=replace(case.training, global_batch=batch))
            remedy = _if_fits(larger, f"--gpus {total}x{case.gpu.name}{besides}", _together)
            if remedy is not None:
                return remedy
    return None


def _together(case: Case, layout: Layout) -> str:
    have, state = case.gpus * case.gpu.visible_bytes, state_bytes(case.shape, case.training)
    return f"{format_bytes(have)} for {format_bytes(state)} of state"


def _on_the_host(case: Case, layout: Layout) -> str:
    each = host_bytes(case.shape, layout, case.training)
    node = each * min(case.gpus, case.gpu.gpus_per_node)
    return f"{format_bytes(each)} a GPU on the host, {format_bytes(node)} a node"


def _if_fits(
    case: Case, change: str, because: Callable[[Case, Layout], str], choices: Choices | None = None
) -> Remedy | None:
    winner, _ = optimum(case, ANY_LAYOUT, choices or default_choices(case))
    if winner is None or winner.seconds is None:
        return None
    candidate = evaluate(case, winner.layout)
    if not candidate.fits:
        return None
    return Remedy(change, case.gpus, case.training, candidate, because(case, winner.layout))
