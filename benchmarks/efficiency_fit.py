"""Fits the efficiency table of a chip to measured steps: a few physical shares, held near what is published of them.

Least squares on log(predicted / measured), linearised a few times. What all rows of a source have in common (a slow
network card, an old library) says less than how its rows differ, so a source's mean and its rows are weighed apart.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cordee.hardware.catalog import Efficiency
from step_cases import Stack

# How far each may move from its uncalibrated value: the standard deviation of its logarithm.
FREEDOM = {
    "product_share": 0.1,
    "product8_share": 0.1,
    "attention_share": 0.2,
    "vendor_attention_share": 0.2,
    "grouped_share": 0.1,
    "memory_share": 0.2,
    "island_share": 0.12,
    "network_share": 0.2,
    "host_s": 0.5,
    "exposed_share": 0.3,
}
# What remains unexplained of a row against its source's mean, and of that mean: as logarithms.
ROW_NOISE, SOURCE_NOISE = 0.10, 0.05
# A source with more rows than this counts as if it had so many: they repeat each other.
ENOUGH_ROWS = 10
ROUNDS = 6
# Errors beyond this count by their distance, not its square: a mistake in a source must not bend the table.
ROBUST = 0.08


def fit_table(stack: Stack, start: Efficiency, rows: np.ndarray, names: Sequence[str] = tuple(FREEDOM)) -> Efficiency:
    """The table that explains these rows of a stack best, without going far from `start`."""
    first = np.log([getattr(start, name) for name in names])
    freedom = np.array([FREEDOM[name] for name in names])
    weigh = _weighing(stack.sources[rows])
    now = first
    for _ in range(ROUNDS):
        error = _errors(stack, start, names, now)[rows]
        moved = [_errors(stack, start, names, now + 0.02 * unit)[rows] for unit in np.eye(len(names))]
        slopes = np.stack([(one - error) / 0.02 for one in moved], axis=1)
        robust = 1 / np.sqrt(np.maximum(1.0, np.abs(error) / ROBUST))
        left = np.vstack([weigh(slopes * robust[:, None]), np.diag(1 / freedom)])
        right = np.concatenate([weigh((error * robust)[:, None])[:, 0], (now - first) / freedom])
        step = np.clip(np.linalg.lstsq(left, -right, rcond=None)[0], -0.3, 0.3)
        now = np.minimum(now + step, 0.0)
        if np.abs(step).max() < 0.005:
            break
    return _table(start, names, now)


def _errors(stack: Stack, start: Efficiency, names: Sequence[str], logs: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(stack.predict(_table(start, names, logs)) / stack.measured))


def _table(start: Efficiency, names: Sequence[str], logs: np.ndarray) -> Efficiency:
    return replace(start, **{name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)})


def _weighing(sources: np.ndarray):  # type: ignore[no-untyped-def]
    """Turns a column of errors into what the fit squares: each source's mean, and its rows' distances from it."""
    groups = [np.flatnonzero(sources == name) for name in sorted(set(sources))]

    def weigh(columns: np.ndarray) -> np.ndarray:
        parts = []
        for group in groups:
            mean = columns[group].mean(axis=0, keepdims=True)
            share = np.sqrt(min(1.0, ENOUGH_ROWS / len(group)))
            parts += [mean / SOURCE_NOISE, (columns[group] - mean) / ROW_NOISE * share]
        return np.vstack(parts)

    return weigh


def spread_of(errors: np.ndarray, sources: np.ndarray) -> float:
    """The standard deviation of log errors around 0, each source counted once: bias and scatter together.

    A source's worst tenth is left out of its mean square, so that a mistake in it does not widen every interval.
    """
    squares = []
    for name in sorted(set(sources)):
        own = np.sort(errors[sources == name] ** 2)
        squares.append(own[: max(1, int(np.ceil(0.9 * len(own))))].mean())
    return float(np.sqrt(np.mean(squares)))
