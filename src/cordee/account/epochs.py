"""The cost of a job by epoch of its data, from the times at which its epochs began."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from cordee.account.attempt import AttemptRow
from cordee.account.curves import CurvePoint


class EpochCost(NamedTuple):
    """The micro-dollars held from the first step of an epoch until that of the next one."""

    epoch: int
    first_step: int
    micro_usd: int


def epoch_costs(points: Iterable[CurvePoint], rows: Sequence[AttemptRow], now_us: int) -> list[EpochCost]:
    """Divide what a job's attempts cost over the epochs of its data; the parts sum to the whole.

    The cost of an attempt is spread evenly over its time. Time before the first epoch counts as the first one's.

    Args:
        points: of the metric `epoch`; one that is not whole is rounded down.
        rows: the job's attempts.
        now_us: the end of an attempt that is live.
    """
    begins: dict[int, CurvePoint] = {}
    for point in points:
        if point.value == point.value and abs(point.value) < 1e15:
            begins.setdefault(int(point.value // 1), point)
    if not begins:
        return []
    epochs = sorted(begins)
    times = list(accumulate((begins[epoch].at_us for epoch in epochs), max))
    sums = dict.fromkeys(epochs, 0)
    for row in rows:
        end_us = max(row.placed_us + 1, now_us if row.ended_us is None else row.ended_us)
        cuts = [row.placed_us, *(at_us for at_us in times if row.placed_us < at_us < end_us), end_us]
        paid = 0
        for from_us, to_us in pairwise(cuts):
            until = row.micro_usd.held * (to_us - row.placed_us) // (end_us - row.placed_us)
            sums[epochs[max(0, bisect_right(times, from_us) - 1)]] += until - paid
            paid = until
    return [EpochCost(epoch, begins[epoch].step, sums[epoch]) for epoch in epochs]
