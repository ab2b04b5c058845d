"""The play by time slots: the open requests of a replica as one number, and latencies looked up by it.

    open requests a replica n:  dn/dt = arriving work / replicas - rate(n)

A mean request is one unit of work; `rate(n)` and the latencies at n come from plays request by request of stretches of
the same trace (`exact.py`), at loads from light to beyond the capacity. A day is played in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from cordee.simulate.services.answer import GOAL
from cordee.simulate.services.arrivals import Arrivals
from cordee.simulate.services.exact import ExactPlay
from cordee.simulate.services.replica import ReplicaModel
from cordee.simulate.services.steps import StepTable

LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Loads of the plays, over what a replica could do at most."""
PLAYED, PLAYED_MAX = 1_500, 4_000
"""Requests of each play; a load with many open requests takes more of them to settle."""
SETTLES = 4
WARM = 0.3
"""The fraction of a play, from its start, that is not looked at: the replicas were empty."""
POOLS = (1, 3, 8)
"""Replicas that are played together: with more of them a burst finds an idle one more often."""
BINS = 24
CURVE_POINTS = 16
PIECE_S = 2.0
IDLE = 0.05
"""Open requests a replica below which a piece of a play says nothing of its rate."""
SUBSTEPS = 4
SLOT_S = 10.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bin:
    """Latencies of the requests that met about so many open requests in a replica; rows in any order."""

    open: float
    ttft_s: Floats
    tpot_s: Floats


@dataclass(frozen=True)
class Calibration:
    """The result of plays of one number of replicas.

    Attributes:
        open: open requests a replica, rising from 0.
        rate: units of work a second that a replica then does.
        bins: latencies, by open requests.
    """

    open: Floats
    rate: Floats
    bins: tuple[Bin, ...]

    @cached_property
    def centres(self) -> list[float]:
        """The open requests of each bin."""
        return [each.open for each in self.bins]

    @cached_property
    def most(self) -> float:
        """Units of work a second, at most."""
        return float(self.rate[-1])

    def step(self, open_requests: float, work_per_s: float, seconds: float) -> float:
        """Return the open requests of a replica after these seconds; never negative, and stable for any step."""
        known = max(open_requests, float(self.open[1]))
        leaves = float(np.interp(known, self.open, self.rate)) / known
        stays = exp(-seconds * leaves)
        return open_requests * stays + work_per_s / leaves * (1 - stays)

    def bin(self, open_requests: float) -> tuple[int, float]:
        """Return the bin of so many open requests, and the seconds of wait beyond it."""
        index = int(np.searchsorted(self.centres, open_requests))
        last = len(self.bins) - 1
        if index > last:
            return last, (open_requests - self.centres[last]) / self.most
        if index and open_requests - self.centres[index - 1] < self.centres[index] - open_requests:
            index -= 1
        return index, 0.0


def pool_of(replicas: int) -> int:
    """Return the number of replicas whose plays stand for this number.

    >>> [pool_of(replicas) for replicas in (1, 2, 4, 5, 100)]
    [1, 3, 3, 8, 8]
    """
    return min(POOLS, key=lambda each: abs(log(max(1, replicas) / each)))


def work_of(model: ReplicaModel, arrivals: Arrivals) -> Floats:
    """Return the work of each request in mean requests."""
    prompts = arrivals.input_tokens / arrivals.input_tokens.mean()
    answers = arrivals.output_tokens / arrivals.output_tokens.mean()
    found: Floats = model.prefill_fraction * prompts + (1 - model.prefill_fraction) * answers
    return found


def calibrate(model: ReplicaModel, arrivals: Arrivals, replicas: int) -> Calibration:
    """Return what plays of stretches of the arrivals through so many replicas show."""
    plays = [
        _play(model, arrivals, replicas, load, number / max(1, len(LOADS) - 1)) for number, load in enumerate(LOADS)
    ]
    opens, rates = _curve(np.concatenate([_rates(each, replicas) for each in plays]))
    curve = Calibration(opens, rates, ())
    rows = np.concatenate([_rows(curve, each, replicas) for each in plays])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    parts = np.array_split(rows, min(BINS, max(1, len(rows) // 40)))
    bins = tuple(Bin(float(part[:, 0].mean()), part[:, 1], part[:, 2]) for part in parts if len(part))
    return Calibration(opens, rates, bins)


@dataclass(frozen=True, slots=True)
class _Played:
    """The requests of one play: arrival, end, work and latencies of each."""

    at_s: Floats
    end_s: Floats
    work: Floats
    ttft_s: Floats
    tpot_s: Floats


def _play(model: ReplicaModel, arrivals: Arrivals, replicas: int, load: float, place: float) -> _Played:
    """Play a stretch of the arrivals, its time scaled to this load; `place` is where in the trace, from 0 to 1."""
    wanted = int(SETTLES * load * model.full.sequences * replicas)
    count = min(arrivals.count, PLAYED_MAX, max(PLAYED, wanted))
    first = int(place * (arrivals.count - count))
    chosen = slice(first, first + count)
    work = work_of(model, arrivals)[chosen]
    at_s = arrivals.at_s[chosen] - arrivals.at_s[first]
    span_s = float(work.sum()) / (load * replicas * model.full.requests_per_s)
    at_s = at_s * span_s / max(float(at_s[-1]), 1e-9)
    traced = [arrivals.request(first + index, float(at)) for index, at in enumerate(at_s)] if arrivals.traced else ()
    part = Arrivals(arrivals.name, at_s, arrivals.input_tokens[chosen], arrivals.output_tokens[chosen], tuple(traced))
    play = ExactPlay(model, part, steps=StepTable(model.speed))
    play.advance(0.0, float(at_s[-1]) + 1e-9, range(replicas))
    play.finish()
    found = play.outcomes
    starts = np.array([each.arrival_s for each in found])
    return _Played(
        starts,
        starts + np.array([each.e2e_s for each in found]),
        work[np.searchsorted(at_s, starts)],
        np.array([each.ttft_s for each in found]),
        np.array([each.tpot_s for each in found]),
    )


def _rates(played: _Played, replicas: int) -> Floats:
    """Return open requests and work a second of a replica in each short piece of a play, until the last arrival.

    The work of a request is spread evenly over the time for which it is open.
    """
    pieces = max(1, int(played.at_s[-1] / PIECE_S))
    edges = np.linspace(0.0, float(played.at_s[-1]), pieces + 1)
    pace = played.work / np.maximum(played.end_s - played.at_s, 1e-6)
    found = np.empty((pieces, 2))
    for number, (low, high) in enumerate(pairwise(edges)):
        overlap = np.clip(np.minimum(played.end_s, high) - np.maximum(played.at_s, low), 0, None)
        found[number] = overlap.sum(), (pace * overlap).sum()
    rates: Floats = found / ((edges[1] - edges[0]) * replicas)
    return rates


def _curve(pieces: Floats) -> tuple[Floats, Floats]:
    """Return open requests from 0 on and the work a second at each: means over pieces alike, never falling."""
    pieces = pieces[(pieces[:, 0] > IDLE) & (pieces[:, 1] > 0)]
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    groups = np.array_split(pieces, min(CURVE_POINTS, len(pieces)))
    opens = np.array([0.0, *(float(each[:, 0].mean()) for each in groups)])
    rates = np.array([0.0, *(float(each[:, 1].mean()) for each in groups)])
    return np.maximum.accumulate(opens), np.maximum.accumulate(rates)


def _rows(curve: Calibration, played: _Played, replicas: int) -> Floats:
    """Return TTFT and TPOT of each played request, and before them the open requests that the slots have.

    They are the mean over its time, as a play that is overloaded fills up while its requests run.
    """
    slots = np.bincount((played.at_s / SLOT_S).astype(np.int64), weights=played.work)
    more = int(played.end_s.max() / SLOT_S) + 1 - len(slots)
    opens = [0.0]
    for number, work in enumerate((*slots, *[0.0] * more)):
        # The last requests came within a part of their slot.
        seconds = min(SLOT_S, max(1e-3, float(played.at_s[-1]) - SLOT_S * number)) if number < len(slots) else SLOT_S
        now = _advance(curve, opens[-1], work / seconds / replicas, seconds)
        opens.append(_advance(curve, now, 0.0, SLOT_S - seconds) if seconds < SLOT_S else now)
    edges = SLOT_S * np.arange(len(opens))
    passed = np.concatenate(([0.0], np.cumsum((np.array(opens[1:]) + np.array(opens[:-1])) / 2 * SLOT_S)))
    mean = np.interp(played.end_s, edges, passed) - np.interp(played.at_s, edges, passed)
    mean /= np.maximum(played.end_s - played.at_s, 1e-6)
    settled = played.at_s >= WARM * played.at_s[-1]
    rows: Floats = np.column_stack((mean, played.ttft_s, played.tpot_s))[settled]
    return rows


def _advance(curve: Calibration, open_requests: float, work_per_s: float, seconds: float) -> float:
    for _ in range(SUBSTEPS):
        open_requests = curve.step(open_requests, work_per_s, seconds / SUBSTEPS)
    return open_requests


@dataclass(frozen=True, slots=True)
class SlotState:
    """A service at the end of a slot.

    Attributes:
        requests: that arrived in it.
        attained: those of them within both latencies.
        open: at its end, of all replicas.
        ttft_p99_s, tpot_p99_s: of those that arrived; 0 without any.
    """

    requests: int
    attained: float
    open: float
    ttft_p99_s: float
    tpot_p99_s: float


@dataclass
class FluidPlay:
    """A service by time slots.

    Attributes:
        most: replicas that the service may have.
        calibrations: by the number of replicas that were played together; plays of one service share them.
        open: requests, of all replicas.
    """

    model: ReplicaModel
    arrivals: Arrivals
    most: int = 8
    calibrations: dict[int, Calibration] = field(default_factory=dict)
    slot_s: float = SLOT_S
    open: float = 0.0

    def __post_init__(self) -> None:
        slots = (self.arrivals.at_s / self.slot_s).astype(np.int64)
        self.requests = np.bincount(slots)
        self.work = np.bincount(slots, weights=work_of(self.model, self.arrivals))
        self._weights: dict[tuple[int, int], float] = {}
        self._waits: list[tuple[float, int, int, float]] = []
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}

    @cached_property
    def capacity_per_s(self) -> float:
        """Requests a second of one replica, at most, that met the SLO in the plays."""
        calibration = self.calibration(self.most)
        return float(np.interp(self.open_within_slo, calibration.open, calibration.rate))

    @cached_property
    def open_within_slo(self) -> float:
        """Open requests of a replica, at most, at which its latencies met the SLO in the plays."""
        calibration = self.calibration(self.most)
        within = [each.open for each in calibration.bins if self._attained(each, 0.0) >= GOAL]
        return within[-1] if within else calibration.centres[0]

    @property
    def request_tokens(self) -> int:
        """Tokens that a mean request has in the cache."""
        return self.arrivals.mean_input + self.arrivals.mean_output // 2

    @property
    def slots(self) -> int:
        """Slots until the last request."""
        return len(self.requests)

    def calibration(self, replicas: int) -> Calibration:
        """Return the calibration for so many replicas; the first of each kind is played now."""
        pool = pool_of(replicas)
        if pool not in self.calibrations:
            self.calibrations[pool] = calibrate(self.model, self.arrivals, pool)
        return self.calibrations[pool]

    def restart(self) -> "FluidPlay":
        """Return the same service before its first request, with what the plays have shown."""
        return FluidPlay(self.model, self.arrivals, self.most, self.calibrations, self.slot_s)

    def advance(self, slot: int, replicas: int) -> SlotState:
        """Play one slot with so many ready replicas."""
        requests = int(self.requests[slot]) if slot < self.slots else 0
        work = float(self.work[slot]) if slot < self.slots else 0.0
        if not replicas:
            self.open += work
            return SlotState(requests, 0.0, self.open, self.slot_s, 0.0)
        calibration = self.calibration(replicas)
        before = self.open / replicas
        after = _advance(calibration, before, work / replicas / self.slot_s, self.slot_s)
        self.open = after * replicas
        index, wait_s = calibration.bin((before + after) / 2)
        pool = pool_of(replicas)
        ttft_s, tpot_s, attained = self._statistics(pool, index)
        if wait_s > 0:
            self._waits.append((requests, pool, index, wait_s))
            attained = self._attained(calibration.bins[index], wait_s)
        else:
            self._weights[pool, index] = self._weights.get((pool, index), 0.0) + requests
        return SlotState(requests, requests * attained, self.open, ttft_s + wait_s, tpot_s)

    def _statistics(self, pool: int, index: int) -> tuple[float, float, float]:
        key = (pool, index)
        if key not in self._known:
            each = self.calibrations[pool].bins[index]
            self._known[key] = (
                float(np.percentile(each.ttft_s, 99)),
                float(np.percentile(each.tpot_s, 99)),
                self._attained(each, 0.0),
            )
        return self._known[key]

    def _attained(self, each: Bin, wait_s: float) -> float:
        slo = self.model.slo
        kept = np.ones(len(each.ttft_s), dtype=bool)
        if slo.ttft_s is not None:
            kept &= each.ttft_s + wait_s <= slo.ttft_s
        if slo.tpot_s is not None:
            kept &= each.tpot_s <= slo.tpot_s
        return float(kept.mean())

    def percentiles(self, *fractions: float) -> tuple[list[float], list[float]]:
        """Return the quantiles of TTFT and TPOT over all requests that met a ready replica."""
        rows = [(weight, pool, index, 0.0) for (pool, index), weight in self._weights.items()] + self._waits
        ttfts, tpots, weights = [], [], []
        for weight, pool, index, wait_s in rows:
            each = self.calibrations[pool].bins[index]
            ttfts.append(each.ttft_s + wait_s)
            tpots.append(each.tpot_s)
            weights.append(np.full(len(each.ttft_s), weight / len(each.ttft_s)))
        if not rows:
            return [0.0] * len(fractions), [0.0] * len(fractions)
        weighted = np.concatenate(weights)
        return (
            _quantiles(np.concatenate(ttfts), weighted, fractions),
            _quantiles(np.concatenate(tpots), weighted, fractions),
        )


def _quantiles(values: Floats, weights: Floats, fractions: Sequence[float]) -> list[float]:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    places = np.searchsorted(passed, np.array(fractions) * passed[-1])
    return [float(values[order][min(place, len(values) - 1)]) for place in places]
