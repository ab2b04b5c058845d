"""Fits the efficiency table of a chip to measured steps: a few physical shares, held near what is published of them.

Least squares on log(predicted / measured), linearised a few times. A source is a draw from a population: what all of
its rows have in common (a slow network card, an old library) is its own, and says about the table only what sources
that differ by `SOURCE_NOISE` can say. Sources, and rows of a source, far from the others count by their distance, not
its square.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cordee.hardware.catalog import ChipEfficiency
from cordee.plan.step import INTERVAL_SIGMAS
from step_cases import Stack

# How far each may move from its uncalibrated value: the standard deviation of its logarithm.
FREEDOM = {
    "product_fraction": 0.2,
    "product8_fraction": 0.1,
    "attention_fraction": 0.2,
    "vendor_attention_fraction": 0.2,
    "grouped_fraction": 0.1,
    "memory_fraction": 0.2,
    "stream_fraction": 0.1,
    "island_fraction": 0.12,
    "network_fraction": 0.2,
    "network_decay": 0.5,
    "host_s": 0.5,
    "exposed_fraction": 0.5,
    "portable_fraction": 0.1,
}
# Products of a chip whose long ones were measured: no further than those in 8 bits, which were measured on all.
SUSTAINED_FREEDOM = 0.1
# What remains unexplained of a source's middle, and of a row against it: as logarithms.
SOURCE_NOISE, ROW_NOISE = 0.10, 0.08
# A source with more rows than this counts as if it had so many: they repeat each other.
ENOUGH_ROWS = 10
ROUNDS = 6
# Hosts differ however well one is known: processors of one year and software of another (assumed).
HOSTS_DIFFER = 0.3
NINE_OF_TEN = 0.9


def fit_table(
    stack: Stack, start: ChipEfficiency, rows: np.ndarray, names: Sequence[str] = tuple(FREEDOM)
) -> ChipEfficiency:
    """The table that explains these rows of a stack best, without going far from `start`.

    Its `host_spread` is what is not known of `host_s` after the fit, and never less than hosts differ.
    """
    first = np.log([getattr(start, name) for name in names])
    freedom = np.array([freedom_of(name, start, stack.ceiling) for name in names])
    groups = [np.flatnonzero(stack.groups[rows] == name) for name in sorted(set(stack.groups[rows]))]
    now, left = first, np.diag(1 / freedom)
    for _ in range(ROUNDS):
        error = _errors(stack, start, names, now)[rows]
        moved = [_errors(stack, start, names, now + 0.02 * unit)[rows] for unit in np.eye(len(names))]
        slopes = np.stack([(one - error) / 0.02 for one in moved], axis=1)
        parts = [_weighed(error[group], slopes[group]) for group in groups]
        left = np.vstack([slope for slope, _ in parts] + [np.diag(1 / freedom)])
        right = np.concatenate([one for _, one in parts] + [(now - first) / freedom])
        step = np.clip(np.linalg.lstsq(left, -right, rcond=None)[0], -0.3, 0.3)
        now = np.minimum(now + step, 0.0)
        if np.abs(step).max() < 0.005:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(left.T @ left)))[list(names).index("host_s")]
    seen = {"software": tuple(sorted(set(stack.software[rows]))), "fitted_on": tuple(sorted(set(stack.sources[rows])))}
    return replace(_table(start, names, now), host_spread=float(max(spread, HOSTS_DIFFER)), **seen)


def freedom_of(name: str, start: ChipEfficiency, ceiling: float) -> float:
    """How far a fraction may move; `ceiling` is what the best product of a short test reaches of the nameplate.

    A table that begins below it has the rate that long products sustain, as measured; the others fall from the ceiling
    to that rate in the fit.
    """
    sustained = name == "product_fraction" and start.product_fraction < ceiling
    return SUSTAINED_FREEDOM if sustained else FREEDOM[name]


def _weighed(error: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the fit squares of one source: its middle, and its rows' distances from it."""
    distance = np.abs(error - np.median(error))
    trust = 1 / np.maximum(1.0, distance / (1.5 * ROW_NOISE))
    middle, middle_slope = np.average(error, weights=trust), np.average(slopes, axis=0, weights=trust)
    noise = np.hypot(SOURCE_NOISE, ROW_NOISE / np.sqrt(min(len(error), ENOUGH_ROWS)))
    whole = 1 / np.sqrt(max(1.0, abs(middle) / SOURCE_NOISE)) / noise
    each = np.sqrt(trust * min(1.0, ENOUGH_ROWS / len(error))) / ROW_NOISE
    lines = np.vstack([middle_slope[None] * whole, (slopes - middle_slope) * each[:, None]])
    return lines, np.concatenate([[middle * whole], (error - middle) * each])


def _errors(stack: Stack, start: ChipEfficiency, names: Sequence[str], logs: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(stack.predict(_table(start, names, logs)) / stack.measured))


def _table(start: ChipEfficiency, names: Sequence[str], logs: np.ndarray) -> ChipEfficiency:
    return replace(start, **{name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)})


def spread_of(errors: np.ndarray, doubts: np.ndarray, sources: np.ndarray) -> float:
    """The spread with which the middle source has nine of ten of its rows inside their intervals.

    Errors are logarithms on sources that a fit did not see; `doubts` are the standard deviations that the planner knows
    of already. A source of few rows counts for less, as in the fit; one that is slower as a whole is only one.
    """
    needed = np.sqrt(np.maximum(0.0, (errors / INTERVAL_SIGMAS) ** 2 - doubts**2))
    own = [needed[sources == name] for name in sorted(set(sources))]
    enough = np.array([np.quantile(rows, NINE_OF_TEN, method="inverted_cdf") for rows in own])
    weights = np.array([min(len(rows), ENOUGH_ROWS) for rows in own])
    order = np.argsort(enough)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(enough[order][np.searchsorted(reached, 0.5)])
