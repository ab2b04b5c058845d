"""Forecast when jobs start and end, with a spread: several runs forward, each with its own run times and arrivals.

A job that reported its number of steps runs for those that are left, at its own pace or at the planned one. The run
times of all others come from jobs of the same kind, given how long each has run (schedule/forecast/run_times.py).
Arrivals are those of the last days, shifted by a random offset. The same seed gives the same answer, unless the time
budget cuts it short: then it rests on fewer draws, or on draws that went less far, and the answer says so.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import NormalDist
from typing import Literal

from cordee.account.measured import StepsLeft
from cordee.events import Job, Lease
from cordee.ids import JobId
from cordee.schedule.forecast.forward import Ahead, Arrival, Draw, Fate, forward
from cordee.schedule.forecast.run_times import drawn_us, left_us
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.units import US_PER_HOUR

DRAWS = 20
HORIZON_US = 7 * 24 * US_PER_HOUR
BUDGET_S = 2.0
_GRAIN = 0.02
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly however many there are
_DAY_US = 24 * US_PER_HOUR
_LONGEST_US = 10 * 365 * _DAY_US  # no run time is drawn longer
_NORMAL = NormalDist()
_NINE_OF_TEN = _NORMAL.inv_cdf(0.95)  # standard deviations on either side that hold nine of ten values
_PAST_US = (_DAY_US, 7 * _DAY_US)  # at least and at most this much of the past comes again


RunTimeSource = Literal["its own steps", "its plan", "other jobs"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a time over the draws: one in ten is earlier than p10. None: later than every draw went."""

    p10_us: int | None
    p50_us: int | None
    p90_us: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of one job.

    Attributes:
        at_us: when it was made.
        draws: the number of runs.
        seen_us: how far every draw went that did not reach the end of the job.
        learnt_from: the number of jobs that have ended, whose run times are known.
        source: of the job's own run time.
        start: when it is placed next.
        end: when it ends for good.
        leases: where it is placed in the draw whose start is the median one.
        preemptions: how often it gets notice, on average.
    """

    at_us: int
    draws: int
    seen_us: int
    learnt_from: int
    source: RunTimeSource
    start: Spread
    end: Spread
    leases: tuple[Lease, ...]
    preemptions: float


def forecast(
    snapshot: Snapshot,
    now_us: int,
    watch: Sequence[JobId],
    steps_left: Mapping[JobId, StepsLeft] | None = None,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    grain: float = _GRAIN,
    arrivals: bool = True,
    budget_s: float | None = BUDGET_S,
    clock: Callable[[], float] = time.thread_time,
) -> dict[JobId, Forecast]:
    """Forecast jobs that have not ended, with as many draws as the budget allows, but at least one.

    Args:
        snapshot: the state.
        now_us: the time of that state.
        watch: the jobs.
        steps_left: of the jobs that reported their number of steps.
        seed: of the draws.
        draws: the most.
        grain: see `forward`.
        arrivals: whether as many jobs arrive as in the last days; else none.
        budget_s: processor time of this thread, in seconds; None: unlimited.
        clock: measures it.
    """
    deadline_s = None if budget_s is None else clock() + budget_s

    def go_on(decisions: int) -> bool:
        return not decisions or deadline_s is None or clock() < deadline_s

    steps_left = steps_left or {}
    live = sorted(job_id for job_id, record in snapshot.jobs.items() if not record.phase.ended)
    rng = random.Random(str(seed))
    offsets = {job_id: rng.random() for job_id in watch}
    runs: list[Ahead] = []
    while len(runs) < draws and (not runs or go_on(1)):
        rng = random.Random(f"{seed}/{len(runs)}")
        # Run times of watched jobs are spread evenly over the draws, however few these are.
        us = {job_id: rng.random() for job_id in live}
        us |= {job_id: (offsets[job_id] + len(runs) * _GOLDEN) % 1 for job_id in watch if job_id in us}
        lengths_us = {
            job_id: _steps_us(steps_left[job_id], snapshot.jobs[job_id].job.gpus, u)
            if job_id in steps_left
            else left_us(snapshot, job_id, now_us, u)
            for job_id, u in us.items()
        }
        draw = Draw(left_us=lengths_us, arrivals=_arrivals(snapshot, now_us, rng) if arrivals else ())
        ahead = forward(snapshot, now_us, draw, watch, until_us=now_us + HORIZON_US, grain=grain, go_on=go_on)
        if runs and ahead.cut:
            break  # it went less far than the others, and would only make the jobs look late
        runs.append(ahead)
    ended = len(snapshot.jobs) - len(live)
    return {job_id: _summary(job_id, runs, now_us, ended, _source(steps_left.get(job_id))) for job_id in watch}


def _steps_us(left: StepsLeft, gpus: int, u: float) -> int:
    """Return how long the steps take on so many GPUs, for a uniform u in [0, 1): log-normal on each side."""
    deviations = _NORMAL.inv_cdf(max(u, 1e-9)) / _NINE_OF_TEN
    bound_us = left.high_us if deviations > 0 else left.low_us
    step_us: float = left.step_us * (bound_us / left.step_us) ** abs(deviations)
    return max(1, min(_LONGEST_US, round(left.steps * step_us * max(1, left.gpus) / max(1, gpus))))


def _source(left: StepsLeft | None) -> RunTimeSource:
    if left is None:
        return "other jobs"
    return "its own steps" if left.measured else "its plan"


def _summary(job_id: JobId, runs: list[Ahead], now_us: int, learnt_from: int, source: RunTimeSource) -> Forecast:
    fates = [run.fates[job_id] for run in runs]
    blind = [run.until_us for run, fate in zip(runs, fates, strict=True) if fate.end_us is None]
    started = sorted((fate for fate in fates if fate.start_us is not None), key=_start_us)
    middle = started[min(len(started) - 1, _rank(len(fates), 0.5))] if started else Fate()
    return Forecast(
        at_us=now_us,
        draws=len(runs),
        seen_us=min(blind, default=max(run.until_us for run in runs)),
        learnt_from=learnt_from,
        source=source,
        start=_spread([fate.start_us for fate in fates]),
        end=_spread([fate.end_us for fate in fates]),
        leases=middle.leases,
        preemptions=sum(fate.preemptions for fate in fates) / len(fates),
    )


def _start_us(fate: Fate) -> int:
    return fate.start_us or 0


def _spread(times_us: list[int | None]) -> Spread:
    """Return percentiles by nearest rank; a time that no draw reached is later than all others."""
    seen = sorted(at_us for at_us in times_us if at_us is not None)
    ranks = (_rank(len(times_us), quantile) for quantile in (0.1, 0.5, 0.9))
    return Spread(*(seen[rank] if rank < len(seen) else None for rank in ranks))


def _rank(count: int, quantile: float) -> int:
    return max(0, ceil(quantile * count) - 1)


def _arrivals(snapshot: Snapshot, now_us: int, rng: random.Random) -> Iterator[Arrival]:
    """Repeat the jobs of the last days, from a random moment on, without end."""
    first_us = next((record.submitted_us for record in snapshot.jobs.values()), now_us)
    past_us = min(max(now_us - first_us, _PAST_US[0]), _PAST_US[1])
    offset_us = int(rng.random() * past_us)
    past: list[tuple[int, Job]] = []
    for record in reversed(snapshot.jobs.values()):
        if record.submitted_us < now_us - past_us:
            break
        past.append(((record.submitted_us - now_us + offset_us) % past_us, record.job))
    past.sort(key=lambda each: (each[0], each[1].job_id))
    while past:
        for at_us, job in past:
            again = replace(job, job_id=JobId(f"{job.job_id}+{now_us + at_us}"), after=())
            yield Arrival(at_us=now_us + at_us, job=again, left_us=drawn_us(snapshot, job, 0, rng.random()))
        now_us += past_us
