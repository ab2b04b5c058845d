"""Search for replica counts on GPUs of two slots, where the best placement follows from them.

For given counts the best pairing is known: the heaviest replica with the lightest, and so on. A maximum of T can be
reached if and only if, for every size x above T/2 that a replica can have, no more replicas are of x or above than are
at or below T - x. So the search is over counts alone: one more replica of an expert, one fewer of another, to lessen
the sum of what those conditions are violated by; a condition that stays violated weighs more, and what was just
changed rests (tabu).
"""

import numpy as np
from numpy.typing import NDArray

from cordee.hardware.arrays import Floats, Ints

CONDITIONS = (128, 64)
"""Most conditions, for small and for large problems; the first is nearly always all of them."""
CHOICES = 6
"""Replica counts of an expert to try, around the first one."""
SHORT = (16, 6)
"""Candidates for one replica more, and one fewer, likewise: those that alone lessen violations most."""
STEPS = 1000
"""Most steps."""
SMALL = 5_000
"""A problem of up to so many experts, over all layers, is small."""
REST = 2
"""Tabu tenure: steps for which a changed expert stays; up to `UNEVEN` more, by step and layer, against cycles."""
UNEVEN = 7
AIM = (0.998, 0.99)
"""The next target, as a fraction of the best maximum, likewise: fewer steps are larger ones."""
FADES, GROWS = np.float32(0.98), np.float32(2.0)
"""The fraction of a condition's weight that a step keeps, and what a violation of one replica adds."""
WORK = 50e6
"""Numbers evaluated at effort 1: about 0.2 s of CPU."""


def pair_max(loads: Floats, counts: Ints) -> Floats:
    """Return the load of the fullest GPU under the best pairing of so many replicas."""
    problems, experts = loads.shape
    expert = np.repeat(np.tile(np.arange(experts), problems), counts.ravel()).reshape(problems, -1)
    replica_load = np.sort(np.take_along_axis(loads / counts, expert, axis=1), axis=1)
    half = replica_load.shape[1] // 2
    found: Floats = (replica_load[:, :half] + replica_load[:, ::-1][:, :half]).max(axis=1)
    return found


def pair_counts(loads: Floats, counts: Ints, gpus: int, effort: float) -> Ints:
    """Return replica counts at least as good as the given ones."""
    problems, experts = loads.shape
    large = int(problems * experts > SMALL)
    conditions, short = min(CONDITIONS[large], experts * CHOICES), min(SHORT[large], experts)
    steps = min(STEPS, int(effort * WORK / (problems * conditions * (2 * experts + short**2))))
    if steps == 0 or experts < 3 or (counts == 1).all():
        return counts
    return _Tabu(loads / (loads.sum(axis=1, keepdims=True) / gpus), counts, conditions, short, AIM[large]).run(steps)


class _Tabu:
    """Replica counts, the values of the conditions, and their weights."""

    def __init__(self, loads: Floats, counts: Ints, conditions: int, short: int, aim: float) -> None:
        self.short, self.aim = short, aim
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
        self._aim(self.rows)

    def _aim(self, rows: Ints) -> None:
        """Set the target a little below the best maximum, with its conditions."""
        aim = self.aims[rows] = self.best_max[rows] * self.aim
        options = self.base[rows][:, :, None] + np.arange(CHOICES)
        each = self.loads[rows][:, :, None] / np.maximum(options, 1)
        x = _sizes(each.reshape(len(rows), -1), aim, self.weights.shape[1])[:, None, None, :]
        above = (each[..., None] >= x).astype(np.float32)
        above -= each[..., None] <= aim[:, None, None, None] - x
        above *= options[..., None]
        self.terms[rows] = above
        self.weights[rows] = 1
        at = (self.counts - self.base)[rows]
        now = _taken(above, at)
        self.value[rows] = now.sum(axis=1)
        self.more[rows] = _taken(above, np.minimum(at + 1, CHOICES - 1)) - now
        self.fewer[rows] = _taken(above, np.maximum(at - 1, 0)) - now

    def run(self, steps: int) -> Ints:
        """Run so many steps; return the best counts."""
        for step in range(steps):
            self._step(step)
            found = pair_max(self.loads, self.counts)
            better = found < self.best_max * (1 - 1e-9)
            self.best_max[better], self.best[better] = found[better], self.counts[better]
            if (reached := np.flatnonzero(self.best_max <= self.aims)).size:
                self._aim(reached)
        return self.best

    def _step(self, step: int) -> None:
        rows, at, resting = self.rows, self.counts - self.base, self.rests_until > step
        up, up_cannot = self._shortlist(self.more, resting | (at == CHOICES - 1))
        down, down_cannot = self._shortlist(self.fewer, resting | (at == 0) | (self.counts <= 1))
        after = self.value[:, None] + self.more[rows[:, None], up]
        both = after[:, :, None] + self.fewer[rows[:, None], down][:, None]
        left = _violated(both.reshape(len(rows), -1, both.shape[-1]), self.weights).reshape(both.shape[:-1])
        left[up_cannot[:, :, None] | down_cannot[:, None] | (up[:, :, None] == down[:, None])] = np.inf
        rose, fell = np.divmod(left.reshape(len(rows), -1).argmin(axis=1), self.short)
        rows = rows[np.isfinite(left[rows, rose, fell])]
        rose, fell = up[rows, rose[rows]], down[rows, fell[rows]]
        self.value[rows] += self.more[rows, rose] + self.fewer[rows, fell]
        self._change(rows, rose, 1)
        self._change(rows, fell, -1)
        self.rests_until[rows, rose] = step + REST + (rows + step**2) % UNEVEN
        self.rests_until[rows, fell] = step + REST + (7 * rows + step**2 // 3) % UNEVEN
        self.weights *= FADES
        self.weights += (1 - FADES) + GROWS * np.maximum(self.value, 0)

    def _shortlist(self, change: NDArray[np.float32], cannot: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the experts whose change alone leaves the least violation, and which of them cannot change."""
        left = _violated(self.value[:, None] + change, self.weights)
        left[cannot] = np.inf
        short: Ints = np.argpartition(left, self.short - 1, axis=1)[:, : self.short]
        return short, np.take_along_axis(cannot, short, axis=1)

    def _change(self, rows: Ints, expert: Ints, by: int) -> None:
        self.counts[rows, expert] += by
        at = self.counts[rows, expert] - self.base[rows, expert]
        now = self.terms[rows, expert, at]
        self.more[rows, expert] = self.terms[rows, expert, np.minimum(at + 1, CHOICES - 1)] - now
        self.fewer[rows, expert] = self.terms[rows, expert, np.maximum(at - 1, 0)] - now


def _sizes(each: Floats, aim: Floats, conditions: int) -> Floats:
    """Return the loads above half of the target that replicas can have, thinned to so many; those above it count once.

    Where there are fewer, the last one is repeated: no replica above the aim.
    """
    over = aim[:, None] * (1 + 1e-9)
    sizes = np.sort(np.where(each > aim[:, None] / 2, np.minimum(each, over), over), axis=1)
    kept = np.maximum((sizes < over).sum(axis=1, keepdims=True), conditions - 1)
    at = np.minimum(np.arange(conditions) * kept // (conditions - 1), sizes.shape[1] - 1)
    found: Floats = np.take_along_axis(sizes, at, axis=1)
    return found


def _violated(values: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    np.maximum(values, 0, out=values)
    found: NDArray[np.float32] = (values @ weights[:, :, None])[..., 0]
    return found


def _taken(terms: NDArray[np.float32], at: Ints) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.take_along_axis(terms, at[:, :, None, None], axis=2)[:, :, 0]
    return found
