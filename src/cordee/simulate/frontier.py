"""The frontier of a policy's patience, beside other schedulers, and a recommendation from it.

A longer patience shortens the mean and lengthens the longest time away. Of the policies whose mean JCT is within
`WITHIN` of the shortest, the recommended one has the shortest time away: the knee of the frontier. How much of that is
chance is told by the same trace with its weeks drawn again: with replacement, one after another, from a seed.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cordee.simulate.compare import Result, Scenario
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.units import US_PER_S

PATIENCES = (0.1, 0.5, 2, 8)
"""The points that are drawn: the default, and what is much less or more patient."""

FRONTIER = (*(f"cordee:{patience}" for patience in PATIENCES), "2d-las", "easy")
"""The policies on a frontier."""

WITHIN = 1.05
"""The mean JCT of a recommended policy over the shortest one."""

DAY_US = 86_400 * US_PER_S
WEEKS_MIN = 4
"""The length of a trace in weeks below which its days are drawn again, not its weeks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A figure in the trace itself, and the smallest and the largest in the resampled ones."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a policy."""

    policy: str
    knows_run_times: bool
    jct_s: Range
    slowdown_p99: Range
    away_s: Range
    lost_gpu_hours: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The policy at the knee; `chosen` counts the resampled traces in which it would have been recommended as well."""

    policy: str
    chosen: int
    samples: int
    seed: int
    costs: tuple[Cost, ...]


def resampled(scenario: Scenario, seed: int) -> Scenario:
    """Return a scenario of weeks, or of a short trace of days, that are drawn with replacement, one after another."""
    from_us, until_us = scenario.window_us
    read = sorted(scenario.jobs(replace(scenario.tally(), strict=False)), key=lambda job: job.submit_us)
    read = [job for job in read if from_us <= job.submit_us and (until_us is None or job.submit_us < until_us)]
    read = read[: scenario.limit]
    first_us, last_us = (read[0].submit_us, read[-1].submit_us) if read else (0, 0)
    block_us = 7 * DAY_US if last_us - first_us >= WEEKS_MIN * 7 * DAY_US else DAY_US
    weeks: dict[int, list[TraceJob]] = {}
    for job in read:
        weeks.setdefault((job.submit_us - first_us) // block_us, []).append(job)
    count = max(weeks, default=0) + 1
    drawn = [random.Random(f"{seed}/weeks/{index}").randrange(count) for index in range(count)]

    def draw(tally: Tally) -> Iterator[TraceJob]:
        for index, week in enumerate(drawn):
            for job in weeks.get(week, ()):
                tally.jobs += 1
                moved_us = job.submit_us + (index - week) * block_us
                yield replace(job, job_id=f"{index}-{job.job_id}", submit_us=moved_us)

    return replace(scenario, jobs=draw, window_us=(from_us, None), limit=None)


def knee(results: Sequence[Result]) -> str:
    """Return the policy with the shortest time away among those of nearly the shortest mean JCT.

    A policy that knows the run times is none that a cluster can run, so it is never recommended.
    """
    known = [each for each in results if not each.policy.estimates] or list(results)
    within_s = WITHIN * min(each.summary.jct_s.mean for each in known)
    near = [each for each in known if each.summary.jct_s.mean <= within_s]
    return min(near, key=lambda each: (each.summary.away_s.max, each.summary.jct_s.mean, each.policy.name)).policy.name


def recommendation(results: Sequence[Result], samples: Sequence[Sequence[Result]], seed: int) -> Recommendation:
    """Return the policy at the knee of a trace's frontier, with the spread over resampled ones."""
    chosen = knee(results)
    return Recommendation(
        policy=chosen,
        chosen=sum(knee(sample) == chosen for sample in samples),
        samples=len(samples),
        seed=seed,
        costs=tuple(_cost(result, [sample[index] for sample in samples]) for index, result in enumerate(results)),
    )


def _cost(result: Result, samples: Sequence[Result]) -> Cost:
    summaries = [result.summary, *(each.summary for each in samples)]
    return Cost(
        policy=result.policy.name,
        knows_run_times=result.policy.estimates,
        jct_s=_range([each.jct_s.mean for each in summaries]),
        slowdown_p99=_range([each.slowdown_p99 for each in summaries]),
        away_s=_range([each.away_s.max for each in summaries]),
        lost_gpu_hours=_range([each.lost_gpu_hours for each in summaries]),
    )


def _range(values: Sequence[float]) -> Range:
    return Range(value=values[0], low=min(values), high=max(values))
