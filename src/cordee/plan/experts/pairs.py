"""Replica counts for GPUs of two slots, where they decide everything.

For given counts the best pairing is known: the heaviest replica with the lightest, and so on. A maximum of T can be
reached if and only if, for every x between T/2 and T, no more replicas are above x than are at or below T - x. So the
search is over counts alone: one more replica of an expert, one fewer of another, to lessen the sum of what those
conditions are violated by; a condition that stays violated weighs more, and what was just changed rests (tabu).
"""

import numpy as np
from numpy.typing import NDArray

from cordee.plan.experts.shape import Floats, Ints

CONDITIONS = (256, 64)
"""Values of x that are looked at: where problems are small, and where they are large."""
CHOICES = 6
"""Replica counts of an expert that are looked at, around the first one."""
FIRST = (6, 2)
"""Experts that are looked at to get one more, likewise."""
STEPS = 150
"""Steps at most; on real loads, 100 found what 600 did to 0.1 points."""
SMALL = 5_000
"""Experts of all layers together up to which problems are small."""
REST = 6
"""Steps for which an expert that changed is left alone; up to two more, by its layer, so that layers do not cycle."""
AIMS = (0.998, 0.995, 0.992)
"""What is aimed at, as a share of the best maximum so far, in turn."""
TURN = 20
"""Steps for each aim."""
WORK = 50e6
"""Numbers that effort 1 looks at: about 0.2 s of CPU."""


def pair_max(loads: Floats, counts: Ints) -> Floats:
    """The fullest GPU of two slots under the best pairing of so many replicas."""
    problems, experts = loads.shape
    expert = np.repeat(np.tile(np.arange(experts), problems), counts.ravel()).reshape(problems, -1)
    share = np.sort(np.take_along_axis(loads / counts, expert, axis=1), axis=1)
    half = share.shape[1] // 2
    found: Floats = (share[:, :half] + share[:, ::-1][:, :half]).max(axis=1)
    return found


def pair_counts(loads: Floats, counts: Ints, gpus: int, effort: float) -> Ints:
    """Better replica counts than those given, or the same."""
    problems, experts = loads.shape
    large = int(problems * experts > SMALL)
    conditions, first = CONDITIONS[large], min(FIRST[large], experts - 1)
    steps = min(STEPS, int(effort * WORK / (problems * experts * conditions * (first + 1))))
    if steps == 0 or experts < 3 or (counts == 1).all():
        return counts
    return _Tabu(loads / (loads.sum(axis=1, keepdims=True) / gpus), counts, conditions, first).run(steps)


class _Tabu:
    """Counts, the conditions' values under them, and weights."""

    def __init__(self, loads: Floats, counts: Ints, conditions: int, first: int) -> None:
        self.first = first
        self.loads, self.counts, self.best = loads, counts.copy(), counts.copy()
        self.best_max = pair_max(loads, counts)
        self.base = np.maximum(counts - CHOICES // 2, 0)
        self.rests_until = np.zeros(loads.shape, dtype=np.int64)
        self.rows = np.arange(len(loads))
        self.aims = np.empty(len(loads))
        self.weights: NDArray[np.float32] = np.empty((len(loads), conditions), dtype=np.float32)
        # What each number of replicas of an expert adds to each condition; the sums; what one more or fewer changes.
        self.terms = np.empty((*loads.shape, CHOICES, conditions), dtype=np.float32)
        self.value = np.empty_like(self.weights)
        self.more = np.empty((*loads.shape, conditions), dtype=np.float32)
        self.fewer = np.empty_like(self.more)
        self._aim(self.rows, AIMS[0])

    def _aim(self, rows: Ints, share: float) -> None:
        """Aim at a share of the best maximum: what follows from it."""
        conditions = self.weights.shape[1]
        aim = self.aims[rows] = self.best_max[rows] * share
        x = aim[:, None] * (0.5 + 0.5 * (np.arange(conditions) + 0.5) / conditions)
        options = self.base[rows][:, :, None] + np.arange(CHOICES)
        each = (self.loads[rows][:, :, None] / np.maximum(options, 1))[..., None]
        above = (each > x[:, None, None, :]).astype(np.float32)
        above -= each <= (aim[:, None] - x)[:, None, None, :]
        above *= options[..., None]
        self.terms[rows] = above
        self.weights[rows] = 1
        at = (self.counts - self.base)[rows]
        now = _taken(above, at)
        self.value[rows] = now.sum(axis=1)
        self.more[rows] = _taken(above, np.minimum(at + 1, CHOICES - 1)) - now
        self.fewer[rows] = _taken(above, np.maximum(at - 1, 0)) - now

    def run(self, steps: int) -> Ints:
        """So many steps; the best counts seen."""
        share = AIMS[0]
        for step in range(steps):
            self._step(step)
            found = pair_max(self.loads, self.counts)
            better = found < self.best_max * (1 - 1e-9)
            self.best_max[better], self.best[better] = found[better], self.counts[better]
            if step % TURN == TURN - 1:
                share = AIMS[(step // TURN + 1) % len(AIMS)]
                self._aim(self.rows, share)
            elif (reached := np.flatnonzero(self.best_max <= self.aims)).size:
                self._aim(reached, share)
        return self.best

    def _step(self, step: int) -> None:
        rows, first = self.rows, self.first
        at = self.counts - self.base
        resting = self.rests_until > step
        alone = _violated(self.value[:, None] + self.more, self.weights)
        alone[resting | (at == CHOICES - 1)] = np.inf
        up = np.argpartition(alone, first - 1, axis=1)[:, :first]
        risen = self.value[:, None] + self.more[rows[:, None], up]
        cannot = np.where(resting | (at == 0) | (self.counts <= 1), np.inf, 0)
        both = np.stack(
            [_violated(risen[:, i, None] + self.fewer, self.weights) + cannot for i in range(first)], axis=1
        )
        both += np.where(np.isinf(alone[rows[:, None], up]), np.inf, 0)[:, :, None]
        both[rows[:, None], np.arange(first), up] = np.inf
        chosen = both.reshape(len(rows), -1).argmin(axis=1)
        which, down = np.divmod(chosen, self.loads.shape[1])
        rows = rows[np.isfinite(both[rows, which, down])]
        which, down = which[rows], down[rows]
        rose = up[rows, which]
        self.value[rows] = risen[rows, which] + self.fewer[rows, down]
        self._change(rows, rose, 1)
        self._change(rows, down, -1)
        self.rests_until[rows, rose] = step + REST + (rows + step) % 3
        self.rests_until[rows, down] = step + REST + (7 * rows + step) % 3
        self.weights *= np.float32(0.98)
        self.weights += np.float32(0.02) + np.float32(0.1) * np.maximum(self.value, 0)

    def _change(self, rows: Ints, expert: Ints, by: int) -> None:
        self.counts[rows, expert] += by
        at = self.counts[rows, expert] - self.base[rows, expert]
        now = self.terms[rows, expert, at]
        self.more[rows, expert] = self.terms[rows, expert, np.minimum(at + 1, CHOICES - 1)] - now
        self.fewer[rows, expert] = self.terms[rows, expert, np.maximum(at - 1, 0)] - now


def _violated(values: NDArray[np.float32], weights: NDArray[np.float32]) -> Floats:
    np.maximum(values, 0, out=values)
    found: Floats = np.einsum("pek,pk->pe", values, weights)
    return found


def _taken(terms: NDArray[np.float32], at: Ints) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.take_along_axis(terms, at[:, :, None, None], axis=2)[:, :, 0]
    return found
