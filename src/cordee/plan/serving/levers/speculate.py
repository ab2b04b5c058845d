"""Speculation by batch: the gain of a draft, the best number of drafted tokens, and the batch at which the gain ends.

A small batch waits for weights, so that checking k + 1 tokens costs hardly more than computing one. A large batch waits
for products, and a rejected token costs as much of them as an accepted one. The gain is accepted tokens x plain step /
checking step.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.plan.serving.speed.speculation import Speculation

StepSeconds = Callable[[int, int], float]
"""Seconds of a step with so many sequences, each with so many tokens: 1, or the draft and one more."""
DraftSeconds = Callable[[int], float]
"""Seconds to draft one token for each of so many sequences."""
DRAFT_TOKENS_MAX = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def no_draft_s(batch: int) -> float:
    """Return the seconds of a draft that costs nothing: a look-up in the prompt."""
    return 0.0


def speculation_gain(step_s: StepSeconds, batch: int, draft: Speculation) -> float:
    """Return how many times as fast decoding is with this draft at this batch.

    Checking 4 tokens costs 1.5 steps; 3 drafted at 70 % give 2.533 tokens:

    >>> round(speculation_gain(lambda batch, each: 1.0 if each == 1 else 1.5, 8, Speculation(3, 0.7)), 3)
    1.689
    """
    checking_s = step_s(batch, draft.draft_tokens + 1) + draft.draft_tokens * draft.draft_s
    return draft.tokens_per_step * step_s(batch, 1) / checking_s


@dataclass(frozen=True, slots=True)
class SpeculationPoint:
    """The best draft at a batch; 0 drafted tokens and a gain of 1 where none is faster."""

    batch: int
    draft_tokens: int
    gain: float


def best_draft(
    step_s: StepSeconds,
    batch: int,
    acceptance: float,
    draft_s: DraftSeconds = no_draft_s,
    most: int = DRAFT_TOKENS_MAX,
) -> SpeculationPoint:
    """Return the number of drafted tokens with the largest gain at this batch."""
    gains = [speculation_gain(step_s, batch, Speculation(k, acceptance, draft_s(batch))) for k in range(1, most + 1)]
    gain = max(gains)
    return SpeculationPoint(batch, gains.index(gain) + 1, gain) if gain > 1 else SpeculationPoint(batch, 0, 1.0)


@dataclass(frozen=True, slots=True)
class SpeculationCurve:
    """The best draft by batch.

    Attributes:
        pays_up_to: the largest batch at which a draft is faster; None: at none.
    """

    points: tuple[SpeculationPoint, ...]
    pays_up_to: int | None

    @property
    def always(self) -> bool:
        """Return whether drafts are faster at the largest batch that was tried, too."""
        return self.pays_up_to == self.points[-1].batch

    def __str__(self) -> str:
        if self.pays_up_to is None:
            return "speculation is faster at no batch"
        first = self.points[0]
        end = f"at all batches up to {self.pays_up_to:,}" if self.always else f"up to batch {self.pays_up_to}"
        return f"{first.gain:.2f}x as fast at batch {first.batch} with a draft of {first.draft_tokens}, faster {end}"


def speculation_curve(
    step_s: StepSeconds, acceptance: float, draft_s: DraftSeconds = no_draft_s, batches: Sequence[int] = BATCHES
) -> SpeculationCurve:
    """Return the best draft at each batch, and the batch from which on plain decoding is as fast.

    Between the last tried batch with a gain and the first without one the exact batch is found by halving.
    """
    points = tuple(best_draft(step_s, batch, acceptance, draft_s) for batch in batches)
    paying = [index for index, point in enumerate(points) if point.draft_tokens]
    if not paying:
        return SpeculationCurve(points, None)
    last = paying[-1]
    if last == len(points) - 1:
        return SpeculationCurve(points, points[last].batch)
    between = range(points[last].batch, points[last + 1].batch + 1)
    lost = bisect.bisect_left(
        between, True, key=lambda batch: best_draft(step_s, batch, acceptance, draft_s).draft_tokens == 0
    )
    return SpeculationCurve(points, between[lost - 1] if lost else points[last].batch)


def acceptance_needed(
    step_s: StepSeconds, batch: int, draft_tokens: int, draft_s: DraftSeconds = no_draft_s
) -> float | None:
    """Return the acceptance from which this draft is faster at this batch; None: not even if all tokens are right."""
    if speculation_gain(step_s, batch, Speculation(draft_tokens, 1.0, draft_s(batch))) <= 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        gains = speculation_gain(step_s, batch, Speculation(draft_tokens, middle, draft_s(batch))) > 1
        low, high = (low, middle) if gains else (middle, high)
    return high
