"""Step times from a table that fills itself: a play asks for few kinds of steps very often."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

from cordee.plan.serving.queueing.batching import Steps

GRAIN = 0.08
"""The distance of two entries of a size, as a fraction; between contexts it is interpolated."""


@dataclass
class StepTable:
    """The step times of a replica, within a few percent, at a fraction of the time."""

    steps: Steps
    _mixed: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    _answers: dict[tuple[int, int], float] = field(default_factory=dict)

    def step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int = 0, context_tokens: float = 0.0, *, each: int = 1
    ) -> float:
        """Return the seconds of one step; see `Speed.step_s`. Chunks of a step count with their mean length."""
        answers = self._answers_s(sequences, context_tokens) if sequences else 0.0
        if not prefill:
            return answers
        count = len(prefill)
        new = sum(tokens for tokens, _ in prefill) / count
        past = sum(before for _, before in prefill) / count
        key = (count, _entry(new), _entry(past), _entry(sequences))
        if key not in self._mixed:
            chunk = (_size(key[1]), _size(key[2]))
            self._mixed[key] = self.steps.step_s([chunk] * count, _size(key[3]), 0.0)
        alone = self._answers_s(sequences, 0.0) if sequences else 0.0
        return self._mixed[key] + answers - alone

    def _answers_s(self, sequences: int, context_tokens: float) -> float:
        place = log(context_tokens / sequences + 1) / GRAIN
        low = int(place)
        below, above = self._at(sequences, low), self._at(sequences, low + 1)
        return below + (place - low) * (above - below)

    def _at(self, sequences: int, entry: int) -> float:
        key = (sequences, entry)
        if key not in self._answers:
            context = (exp(entry * GRAIN) - 1) * sequences
            self._answers[key] = self.steps.step_s([], sequences, context)
        return self._answers[key]


def _entry(size: float) -> int:
    """Return the number of the entry that stands for a size.

    >>> [_size(_entry(size)) for size in (0, 1, 100, 5000)]
    [0, 1, 103, 4816]
    """
    return round(log(size + 1) / GRAIN)


def _size(entry: int) -> int:
    return max(0, round(exp(entry * GRAIN)) - 1)
