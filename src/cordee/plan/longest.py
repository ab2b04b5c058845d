"""The longest context of each layout: how far the sequence can grow until the memory is full."""

from dataclasses import dataclass, replace

from cordee.plan.buffers import cuda_bytes_of
from cordee.plan.candidates import Layouts
from cordee.plan.layout import Layout
from cordee.plan.memory import peak_bytes
from cordee.plan.memory_interval import held_surely
from cordee.plan.optimum import Case, optimum
from cordee.plan.rules import first_misfit
from cordee.plan.search import default_choices
from cordee.plan.settings import default_batch
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted

LONGEST_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class LongestContext:
    """A layout and the longest sequence that it holds, with the fewest in a micro-batch; 0 if it holds none.

    `seq_tokens` fits as planned, `sure_seq_tokens` at the upper end of the plan's interval as well.
    """

    layout: Layout
    seq_tokens: int
    sure_seq_tokens: int
    peak_bytes: int
    positions: int


def longest_contexts(layouts: Layouts, wanted: LayoutWanted, shown: int) -> tuple[LongestContext, ...]:
    """Return the longest context of the first layouts, as they are and with everything recomputed, longest first.

    Layouts for longer sequences are searched as well, since context parallelism pays only there: each search asks for
    twice what the layouts before hold, until none holds it.
    """
    tried: dict[Layout, LongestContext] = {}
    for candidate in (*layouts.fitting, *layouts.rejected)[:shown]:
        for layout in variants(candidate.layout, layouts.case.training.sequences_together):
            tried[layout] = tried.get(layout) or longest_context(layouts.case, layout)
    longest = max(found.seq_tokens for found in tried.values())
    while longest and (better := _best_at(layouts.case, wanted, 2 * longest)) is not None and better not in tried:
        tried[better] = longest_context(layouts.case, better)
        longest = max(longest, tried[better].seq_tokens)
    return tuple(sorted(tried.values(), key=lambda found: (-found.seq_tokens, found.layout)))


def _best_at(case: Case, wanted: LayoutWanted, seq_tokens: int) -> Layout | None:
    """Return the fastest layout that fits sequences of this length; None if none does, or the model has no such."""
    shape, training = case.shape, case.training
    if seq_tokens > (shape.learned_positions or LONGEST_TOKENS):
        return None
    batch = default_batch(seq_tokens, case.gpus, adapted=case.training.adapters is not None)
    longer = replace(case, training=replace(training, seq_tokens=seq_tokens, global_batch=batch))
    winner, _ = optimum(longer, wanted, default_choices(longer))
    fewest = training.sequences_together
    return None if winner is None or winner.seconds is None else replace(winner.layout, micro_batch=fewest)


def variants(layout: Layout, fewest: int) -> tuple[Layout, ...]:
    """Return a layout with the fewest sequences in a micro-batch, as it is and with everything recomputed."""
    lean = replace(layout, micro_batch=fewest)
    return (lean,) if lean.recompute == "full" else (lean, replace(lean, recompute="full"))


def longest_context(case: Case, layout: Layout) -> LongestContext:
    """Return the longest sequence that a layout holds, as planned and surely."""
    tokens = _longest_tokens(case, layout)
    sure = _longest_tokens(replace(case, gpu=held_surely(case.gpu, case.training)), layout)
    peak = round(_peak(case, layout, tokens)) if tokens else 0
    return LongestContext(layout, tokens, sure, peak, case.shape.positions)


def _longest_tokens(case: Case, layout: Layout) -> int:
    """Search by halving, in steps that the layout divides; memory never falls as the sequence grows."""
    step = 256 * layout.tp * layout.cp
    low, high = 0, (case.shape.learned_positions or LONGEST_TOKENS) // step
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(case, layout, middle * step) <= case.gpu.visible_bytes:
            low = middle
        else:
            high = middle - 1
    return low * step


def _peak(case: Case, layout: Layout, seq_tokens: int) -> float:
    training = _with_sequence(case.training, layout, seq_tokens)
    misfit = first_misfit(layout, case.shape, case.gpus, training)
    assert misfit is None, f"a step of the search divides: {misfit}"
    return float(peak_bytes(case.shape, layout, training, cuda_bytes_of(case.gpu)))


def _with_sequence(training: Training, layout: Layout, seq_tokens: int) -> Training:
    """Return no more micro-batches than fill the pipeline twice: a number that every schedule runs."""
    count = 2 * layout.pp if layout.pp > 1 else 1
    return replace(training, seq_tokens=seq_tokens, global_batch=layout.dp * layout.micro_batch * count)
