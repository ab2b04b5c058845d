"""The frontier of Cordee's patience beside other schedulers, and a recommendation from it.

How much of a recommendation is chance is told by resampled traces: blocks of the trace, drawn with replacement from a
seed, one after another (Künsch 1989). Every policy gets the same resampled traces, so policies are compared on each.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

from cordee.schedule.policy import Policy
from cordee.simulate.answer import PolicyComparison
from cordee.simulate.compare import Result, Scenario, taken
from cordee.simulate.knee import RULE, SAME, Weighed, can_be_chosen, knee, weighed
from cordee.simulate.metrics import Summary
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.units import US_PER_S, format_duration, format_micro_usd, plural

PATIENCES = (0.02, 0.1, 0.5, 2, 8)
"""The patiences that are compared: the default (0.5), longer ones, and shorter ones for clusters of short jobs."""

FRONTIER = (*(f"cordee:{patience:g}" for patience in PATIENCES), "2d-las", "fifo", "srsf", "sjf", "easy")
"""The policies on a frontier."""

DAY_US = 86_400 * US_PER_S
BLOCKS_MIN = 4
"""The least number of whole weeks, or of whole days, of a trace whose weeks, or days, are drawn."""

SAMPLES_MIN = 4
"""Of resampled traces, where the caller does not say how many."""

SHORT_BLOCKS = 8
"""The number of blocks of a trace that is shorter; they begin at any time of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure in the trace itself, and its spread over resampled traces: 10th to 90th percentile.

    Attributes:
        value: None: no job ended.
        low, high: of the figure; None: not run on resampled traces.
        over: the figure over the baseline's in the trace; None: the baseline has nearly none of it.
        over_low, over_high: the same in each resampled trace.
    """

    value: float | None
    low: float | None
    high: float | None
    over: float | None
    over_low: float | None
    over_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a policy; `chosen`: the resampled traces in which it is recommended, None if no server can run it."""

    policy: str
    knows_run_times: bool
    chosen: int | None
    jct_s: Figure
    slowdown_p99: Figure
    away_s: Figure
    lost_gpu_hours: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended policy for a trace.

    Attributes:
        policy: by the trace itself.
        clear: it is recommended in at least half of the resampled traces.
        other: if not: the policy that is recommended most often beside it.
        rule: how a policy is chosen.
        baseline: the policy over which the others are given.
        samples: number of resampled traces.
        block_s: length of the blocks that are drawn.
        failed_cycles: scheduling cycles that failed in the resampled traces; there should be none.
        compared: the policies on the trace itself.
    """

    policy: str
    clear: bool
    other: str | None
    rule: str
    baseline: str
    samples: int
    block_s: float
    failed_cycles: int
    costs: tuple[Cost, ...]
    compared: PolicyComparison


def samples_for(jobs: int) -> int:
    """Return how many resampled traces are run unless the caller says: 4 to 20, fewer of a trace of more jobs."""
    return max(SAMPLES_MIN, min(20, 10_000 // max(1, jobs)))


def resampled(scenario: Scenario, seed: int) -> Scenario:
    """Return a scenario of as many blocks of the trace as it has, drawn with replacement, one after another."""
    read = taken(scenario)
    times_us = [job.submit_us for job in read]
    first_us = times_us[0] if read else 0
    block_us, step_us = _block(times_us)
    span_us = times_us[-1] - first_us if read else 0
    count = max(1, round(span_us / block_us))
    starts = max(1, round((span_us - block_us) / step_us) + 1)
    drawn = [step_us * random.Random(f"{seed}/blocks/{index}").randrange(starts) for index in range(count)]

    def draw(tally: Tally) -> Iterator[TraceJob]:
        for index, start_us in enumerate(drawn):
            from_us = first_us + start_us
            for job in read[bisect_left(times_us, from_us) : bisect_left(times_us, from_us + block_us)]:
                tally.jobs += 1
                moved_us = job.submit_us - start_us + index * block_us
                yield replace(job, job_id=f"{index}-{job.job_id}", submit_us=moved_us)

    return replace(scenario, jobs=draw, window_us=(scenario.window_us[0], None), limit=None)


def block_us(scenario: Scenario) -> int:
    """Return the length of the blocks that are drawn of this trace."""
    return _block([job.submit_us for job in taken(scenario)])[0]


def _block(times_us: Sequence[int]) -> tuple[int, int]:
    """Return the length of a block, and of which time a block's beginning is a multiple.

    Blocks begin at any day of the trace, so that all of it is drawn and none is empty behind its end. Weeks and days
    keep the times of day of the submissions. A trace that is too short for them has no pattern of days.
    """
    span_us = times_us[-1] - times_us[0] if times_us else 0
    for whole_us in (7 * DAY_US, DAY_US):
        if span_us >= BLOCKS_MIN * whole_us:
            return whole_us, DAY_US
    return max(1, span_us // SHORT_BLOCKS), 1


def recommendation(
    compared: PolicyComparison,
    results: Sequence[Result],
    samples: Sequence[Sequence[Result]],
    block_us: int,
) -> Recommendation:
    """Return the policy that is recommended for a trace, and what each costs in it and in resampled ones.

    Args:
        compared: the answer of `results`.
        results: on the trace; jobs ended under at least one policy that can be recommended.
        samples: on each resampled trace, those that can be.
        block_us: the length of the blocks that were drawn.
    """
    chosen = knee([(each.policy, each.summary) for each in results])
    assert chosen is not None, "at least one policy can be recommended"
    votes = Counter(knee([(each.policy, each.summary) for each in sample]) for sample in samples)
    others = [name for name, _ in votes.most_common() if name not in (chosen, None)]
    clear = 2 * votes[chosen] >= len(samples)
    able = [each for each in results if can_be_chosen(each.policy)]
    baseline = next((each for each in able if each.policy.policy == Policy()), able[0])
    drawn = [{each.policy.name: each.summary for each in sample} for sample in samples]
    return Recommendation(
        policy=chosen,
        clear=clear,
        other=None if clear or not others else others[0],
        rule=RULE,
        baseline=baseline.policy.name,
        samples=len(samples),
        block_s=block_us / US_PER_S,
        failed_cycles=sum(each.errors for sample in samples for each in sample),
        costs=tuple(
            _cost(each, baseline, drawn, votes[each.policy.name] if can_be_chosen(each.policy) else None)
            for each in results
        ),
        compared=compared,
    )


def sentences(answer: Recommendation) -> list[str]:
    """Return the recommendation, how sure it is, and how it was made."""
    chosen = {each.policy: each.chosen for each in answer.costs if each.chosen is not None}
    of = plural(answer.samples, "resampled trace")
    same = len({_figures(each) for each in answer.costs if each.chosen is not None}) == 1 < len(chosen)
    if same:
        lines = [SAME]
    elif answer.clear:
        lines = [f"recommended: {answer.policy}, in {chosen[answer.policy]} of {of} as well"]
    else:
        lines = [f"no clear winner: {answer.policy} or {answer.other}"]
        lines.append(f"{of}: {', '.join(f'{count} for {name}' for name, count in chosen.items() if count)}")
    if answer.clear and not same:
        patience = answer.policy.partition(":")[2] or "default"
        lines.append(f"a server takes it by: cordee up --patience {patience}")
    if not same:
        lines += _beside(answer)
    lines.append(f"rule: {answer.rule}")
    drawn = format_duration(answer.block_s) if answer.block_s >= 1 else "less than a second"
    lines.append(
        f"a resampled trace: blocks of {drawn} of this one, drawn with replacement,"
        f" seeds from {answer.compared.seed} on"
    )
    if answer.failed_cycles:
        lines.append(f"{plural(answer.failed_cycles, 'scheduling cycle')} failed on resampled traces")
    return lines


def _beside(answer: Recommendation) -> Iterator[str]:
    """Yield what the default and other schedulers' policies would have cost, beside the recommended one."""
    costs = {each.policy: each for each in answer.costs}
    others = [each for each in answer.costs if each.chosen is None]
    if answer.policy != answer.baseline:
        others.insert(0, costs[answer.baseline])
    lost = {each.policy: (each.lost_gpu_hours, each.lost_micro_usd) for each in answer.compared.policies}
    its_hours, its_usd = lost[answer.policy]
    chosen = costs[answer.policy]
    for other in others:
        why = ", which knows the run times" if other.knows_run_times else ""
        hours, usd = lost[other.policy]
        yield (
            f"{other.policy}{why}, beside {answer.policy}:"
            f" mean JCT {_than(other.jct_s, chosen.jct_s, 'longer', 'shorter')},"
            f" p99 slowdown {_than(other.slowdown_p99, chosen.slowdown_p99, 'higher', 'lower')},"
            f" longest time away {_than(other.away_s, chosen.away_s, 'longer', 'shorter')},"
            f" {abs(hours - its_hours):,.1f} {'more' if hours >= its_hours else 'fewer'} GPU-hours lost"
            f" ({format_micro_usd(abs(usd - its_usd))})"
        )


def _than(figure: Figure, other: Figure, more: str, less: str) -> str:
    """Return a figure beside another one in words."""
    if not figure.value or not other.value:
        return "the same" if figure.value == other.value else f"{more if figure.value else less}"
    ratio = figure.value / other.value
    if ratio >= 3:
        return f"{ratio:,.0f} times as {more.removesuffix('er')}"
    return (
        "the same"
        if abs(ratio - 1) < 0.005
        else f"{abs(ratio - 1):.0%} {more if ratio > 1 else less}".replace("%", " %")
    )


def _figures(cost: Cost) -> tuple[float | None, ...]:
    return cost.jct_s.value, cost.slowdown_p99.value, cost.away_s.value, cost.lost_gpu_hours.value


def _cost(result: Result, baseline: Result, samples: Sequence[dict[str, Summary]], chosen: int | None) -> Cost:
    name, other = result.policy.name, baseline.policy.name
    own, its = weighed(result.summary), weighed(baseline.summary)
    both = [(weighed(each[name]), weighed(each[other])) for each in samples if name in each]

    def figure(read: Callable[[Weighed], float]) -> Figure:
        low, high = _middle([read(mine) for mine, _ in both if mine is not None])
        pairs = [(read(mine), read(yours)) for mine, yours in both if mine is not None and yours is not None]
        over_low, over_high = _middle([mine / yours for mine, yours in pairs if yours > 0])
        value = None if own is None else read(own)
        over = value / read(its) if value is not None and its is not None and read(its) > 0 else None
        return Figure(value=value, low=low, high=high, over=over, over_low=over_low, over_high=over_high)

    return Cost(
        policy=result.policy.name,
        knows_run_times=result.policy.estimates,
        chosen=chosen,
        jct_s=figure(lambda figures: figures.jct_s),
        slowdown_p99=figure(lambda figures: figures.slowdown_p99),
        away_s=figure(lambda figures: figures.away_s),
        lost_gpu_hours=figure(lambda figures: figures.lost_gpu_hours),
    )


def _middle(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 10th and the 90th percentile.

    >>> _middle([1.0, 2.0, 3.0]), _middle([4.0]), _middle([])
    ((1.2, 2.8), (4.0, 4.0), (None, None))
    """
    if len(values) < 2:
        return (values[0], values[0]) if values else (None, None)
    tenths = quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]
