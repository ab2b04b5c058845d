"""The longest context of each layout: how far the sequence can grow until the wall."""

from dataclasses import dataclass, replace

from cordee.plan.answer import Candidate, Plan
from cordee.plan.layout import Layout, Training, first_misfit
from cordee.plan.memory import peak_bytes

LONGEST_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class LongestContext:
    """A layout and the longest sequence that it holds, with one sequence in a micro-batch; 0 if it holds none."""

    layout: Layout
    seq_tokens: int
    peak_bytes: int
    positions: int


def longest_contexts(plan: Plan, shown: int) -> tuple[LongestContext, ...]:
    """Of the plan's first layouts, the longest context each, as it is and with everything recomputed."""
    tried: dict[Layout, LongestContext] = {}
    for candidate in (*plan.fitting, *plan.rejected)[:shown]:
        for layout in _variants(candidate):
            if layout not in tried:
                tried[layout] = longest_context(plan, layout)
    return tuple(sorted(tried.values(), key=lambda found: (-found.seq_tokens, found.layout)))


def _variants(candidate: Candidate) -> tuple[Layout, ...]:
    lean = replace(candidate.layout, micro_batch=1)
    return (lean,) if lean.recompute == "full" else (lean, replace(lean, recompute="full"))


def longest_context(plan: Plan, layout: Layout) -> LongestContext:
    """By halving, in steps that the layout divides; memory never falls as the sequence grows."""
    shape, step = plan.shape, 256 * layout.tp * layout.cp
    limit = shape.learned_positions or LONGEST_TOKENS
    low, high = 0, limit // step
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(plan, layout, middle * step) <= plan.gpu.memory_bytes:
            low = middle
        else:
            high = middle - 1
    peak = round(_peak(plan, layout, low * step)) if low else 0
    return LongestContext(layout, low * step, peak, shape.positions)


def _peak(plan: Plan, layout: Layout, seq_tokens: int) -> float:
    training = _with_sequence(plan.training, layout, seq_tokens)
    misfit = first_misfit(layout, plan.shape, plan.gpus, training)
    assert misfit is None, f"a step of the search divides: {misfit}"
    return float(peak_bytes(plan.shape, layout, training))


def _with_sequence(training: Training, layout: Layout, seq_tokens: int) -> Training:
    """No more micro-batches than fill the pipeline twice: a number that every schedule runs, whatever the sequence."""
    return replace(training, seq_tokens=seq_tokens, global_batch=layout.dp * (2 * layout.pp if layout.pp > 1 else 1))
