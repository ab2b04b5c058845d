"""The comparison as one page: policies side by side, waits, GPUs held over time, and the attempts on each node."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import cordee
from cordee.events import Outcome
from cordee.simulate.answer import NONE, PolicyComparison, PolicyResult, duration_of, patience_of, unended
from cordee.simulate.compare import Result, Scenario
from cordee.simulate.frontier import Figure, Recommendation, sentences
from cordee.simulate.gantt import Held
from cordee.simulate.knee import RULE, weighed
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, format_micro_usd
from cordee.view.chart import Axis, ChartLine, Mark, chart_html
from cordee.view.gantt import Bar, gantt_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

_QUANTILES = 200
_SAMPLES = 300
_BARS = 2500  # in one drawing
_HOURS = (24 * 7, 48, 24, 12, 6, 3, 1)  # of a drawing: the longest that is not too full
_NEAR = 0.1  # points whose names would lie upon each other
_TICKS_S = (1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
_CLOSE_TICKS_S = (
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(3600 * hours for hours in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)),
    *(86_400 * days for days in (1, 2, 3, 5, 7, 14, 30, 60, 90, 180, 365)),
)
"""Of an axis on which fewer than three of the others lie."""
_KIND = {Outcome.FINISHED: "finished", Outcome.CHECKPOINTED: "left", None: "runs"}


def comparison_page(
    scenario: Scenario, answer: PolicyComparison, results: Sequence[Result], advice: Recommendation | None = None
) -> str:
    """Return the page, self-contained; with a recommendation, where there is one."""
    means_s = [(jct.mean, each.policy) for each in answer.policies if (jct := each.summary.jct_s) is not None]
    best_s, best = min(means_s, key=lambda each: each[0], default=(None, "no job ended"))
    if any(each.policy == best and each.knows_run_times for each in answer.policies):
        best += ", which knows the run times"
    facts = [
        (f"{answer.jobs:,}", f"jobs of {answer.trace}"),
        (f"{answer.gpus:,}", f"GPUs on {answer.nodes:,} nodes"),
        (_or_none(best_s, format_duration), f"shortest mean JCT: {best}"),
        (format_micro_usd(min(each.lost_micro_usd for each in answer.policies)), "least money lost by a policy"),
    ]
    lead = (
        "The same jobs arrived at the same cluster under each policy. The code that decided is the code that schedules "
        "production jobs; the clock and the nodes were simulated."
    )
    sections = [None if advice is None else _recommendation(advice), _table(answer), _frontier(answer)]
    sections += [_waits(results), _cluster(results), _losses(answer)]
    sections += _gantts(scenario, results)
    footer = (
        f"Written by cordee {cordee.__version__} with `cordee simulate`, seed {answer.seed}. "
        "The same trace, cluster, policy and seed give the same page."
    )
    return report_html(HtmlReport("Policies on one trace", lead, [each for each in sections if each], facts, footer))


def _or_none(value: float | None, write: Callable[[float], str]) -> str:
    return NONE if value is None else write(value)


def _table(answer: PolicyComparison) -> Section:
    rows: list[tuple[str, Callable[[PolicyResult], str]]] = [
        ("JCT, mean", lambda each: duration_of(each.summary.jct_s, lambda jct_s: jct_s.mean)),
        ("JCT, median", lambda each: duration_of(each.summary.jct_s, lambda jct_s: jct_s.p50)),
        ("JCT, p99", lambda each: duration_of(each.summary.jct_s, lambda jct_s: jct_s.p99)),
        ("wait for the first start, mean", lambda each: duration_of(each.summary.wait_s, lambda wait_s: wait_s.mean)),
        ("wait for the first start, p99", lambda each: duration_of(each.summary.wait_s, lambda wait_s: wait_s.p99)),
        ("longest time without GPUs", lambda each: duration_of(each.summary.away_s, lambda away_s: away_s.max)),
        ("goodput: useful of held GPU time", lambda each: f"{each.summary.goodput:.2%}"),
        ("GPU time held", lambda each: f"{each.summary.held_fraction:.1%}"),
        ("fragmented", lambda each: f"{each.summary.fragmented:.2%}"),
        ("slowdown, p99", lambda each: _or_none(each.summary.slowdown_p99, "{:,.1f}".format)),
        ("slowdown, largest", lambda each: _or_none(each.summary.slowdown_max, "{:,.0f}".format)),
        ("slowdown, Jain's index", lambda each: _or_none(each.summary.slowdown_jain, "{:.3f}".format)),
        ("preemptions", lambda each: f"{each.summary.preemptions:,}"),
        ("GPU-hours lost", lambda each: f"{each.lost_gpu_hours:,.1f}"),
        ("money lost", lambda each: format_micro_usd(each.lost_micro_usd)),
        ("jobs that ended", lambda each: f"{each.summary.ended:,}"),
    ]
    columns = ["", *(each.policy for each in answer.policies)]
    table = table_html(columns, [[name, *(show(each) for each in answer.policies)] for name, show in rows])
    notes = [
        f"{each.policy}: {each.description}" + (", knows the true run times" if each.knows_run_times else "")
        for each in answer.policies
    ]
    notes += unended(answer)
    notes += [f"{left.rows:,} rows of the trace are left out: {left.kind}" for left in answer.left_out]
    notes += [f"{each.rows:,} rows of the trace are changed: {each.kind}" for each in answer.changed]
    notes += [f"price: {source}" for source in answer.price_sources]
    return Section(
        "Side by side",
        "JCT is the job completion time, from submission to the end. "
        "Lost is work that was repeated and the time of saves on notice; restarts are not in it. "
        "Fragmented is GPU time that was free while the smallest waiting gang would have fitted by number.",
        (table,),
        notes=notes,
    )


def _recommendation(advice: Recommendation) -> Section:
    """Return the figures that the rule weighs, with their spread."""
    columns = ("", "JCT, mean", "slowdown, p99", "longest time without GPUs", "GPU-hours lost")
    rows = []
    for each in advice.costs:
        figures = (each.jct_s, each.slowdown_p99, each.away_s, each.lost_gpu_hours)
        chosen = "" if each.chosen is None else f"{each.chosen} of {advice.samples}"
        rows.append([each.policy, *map(_over, figures), chosen])
    table = table_html((*columns, "recommended"), rows)
    title, *notes = sentences(advice)
    over = (
        f"Figures over those of {advice.baseline}: in the trace, and the 10th to the 90th percentile in resampled ones."
    )
    lead = f"{title[0].upper()}{title[1:]}. {over}"
    return Section("Recommendation", lead, (table,), notes=notes)


def _over(figure: Figure) -> str:
    """Return a figure over the baseline's."""
    if figure.over is None:
        return ""
    spread = figure.over_low is not None and figure.over_high is not None
    return f"{figure.over:.2f}" + (f" ({figure.over_low:.2f} to {figure.over_high:.2f})" if spread else "")


def _frontier(answer: PolicyComparison) -> Section | None:
    """Return the mean against the longest time away; one policy alone is no frontier."""
    figures = {each.policy: weighed(each.summary) for each in answer.policies}
    points = {name: (each.away_s, each.jct_s) for name, each in figures.items() if each is not None}
    patiences = {name: patience for name in points if (patience := patience_of(name)) is not None}
    if len(patiences) < 2 or min(min(point) for point in points.values()) <= 0:
        return None
    away = _time_axis("longest time without GPUs", [away_s for away_s, _ in points.values()])
    mean = _time_axis("mean JCT", [jct_s for _, jct_s in points.values()])
    lines = [ChartLine("patience", [points[name] for name in patiences])]
    marks: list[Mark] = []
    for name, patience in patiences.items():
        point = points[name]
        if marks and math.dist(map(math.log, point), map(math.log, (marks[-1].x, marks[-1].y))) < _NEAR:
            marks[-1] = replace(marks[-1], name=f"{marks[-1].name}, {patience}")
        else:
            marks.append(Mark(*point, patience))
        if name == answer.knee:
            marks[-1] = replace(marks[-1], name=f"{marks[-1].name} (knee)")
    lines += [ChartLine(name, [point]) for name, point in points.items() if name not in patiences]
    figure = chart_html(lines, away, mean, marks, label="mean JCT by the longest time without GPUs")
    lead = "Patience, the numbers, moves along the line; further left and further down is better."
    return Section("The frontier", lead, (figure,), notes=() if answer.knee is None else (f"The knee: {RULE}.",))


def _waits(results: Sequence[Result]) -> Section:
    fraction = Axis("fraction of jobs", lambda value: f"{value:.0%}")
    distributions = (
        (
            "JCT of jobs that ended",
            "JCT",
            [each.metrics.jct_us for each in results],
        ),
        ("wait for the first start", "waits", [each.metrics.wait_us for each in results]),
    )
    figures = []
    for axis, label, times_us in distributions:
        lines = [ChartLine(each.policy.name, _cdf(own)) for each, own in zip(results, times_us, strict=True) if own]
        if lines:
            times_s = [time_s for line in lines for time_s, _ in line.points]
            figures.append(chart_html(lines, _time_axis(axis, times_s), fraction, label=label))
    return Section("Waits", "Distributions over all jobs; further left is better.", figures)


def _time_axis(name: str, times_s: Sequence[float]) -> Axis:
    """Return an axis with round times; where hardly any lies between these times, with the least and the greatest."""
    low_s, high_s = min(times_s), max(times_s)
    for ticks in (_TICKS_S, _CLOSE_TICKS_S):
        between = [tick for tick in ticks if low_s <= tick <= high_s]
        if len(between) > 2:
            break
    return Axis(name, format_duration, log=True, ticks=between if len(between) > 1 else (low_s, high_s))


def _cdf(values_us: Sequence[int]) -> list[tuple[float, float]]:
    """Return points of the distribution; less than a second is drawn as a second."""
    ordered = sorted(values_us)
    points = []
    for step in range(_QUANTILES + 1):
        index = min(len(ordered) - 1, step * len(ordered) // _QUANTILES)
        points.append((max(1.0, ordered[index] / US_PER_S), (index + 1) / len(ordered)))
    return points


def _cluster(results: Sequence[Result]) -> Section:
    held, waiting = [], []
    for each in results:
        points = _thinned(each.metrics.occupancy.points)
        if len(points) > 1:
            days = [(at_us - points[0][0]) / (24 * US_PER_HOUR) for at_us, *_ in points]
            held_gpus = [(day, point[1] / 1000) for day, point in zip(days, points, strict=True)]
            waiting_jobs = [(day, float(point[2])) for day, point in zip(days, points, strict=True)]
            held.append(ChartLine(each.policy.name, held_gpus, steps=True))
            waiting.append(ChartLine(each.policy.name, waiting_jobs, steps=True))
    if not held:
        return Section("The cluster over time", "No run was long enough to be drawn.")
    day = Axis("day", lambda value: f"{value:g}")
    figures = (
        chart_html(held, day, Axis("GPUs held", lambda value: f"{value:,.0f}"), label="GPUs held over time"),
        chart_html(waiting, day, Axis("waiting jobs", lambda value: f"{value:,.0f}"), label="waiting jobs over time"),
    )
    return Section("The cluster over time", "GPUs held and waiting jobs.", figures)


def _thinned(points: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    step = max(1, len(points) // _SAMPLES)
    return list(points[::step])


def _losses(answer: PolicyComparison) -> Section | None:
    losses = [(each.policy, lost) for each in answer.policies for lost in each.summary.lost]
    rows = [
        [policy, lost.cause, _hours(lost.redone_gpu_us), _hours(lost.save_gpu_us), format_micro_usd(lost.micro_usd)]
        for policy, lost in losses
    ]
    if not rows:
        return None
    names = ("policy", "cause", "GPU-hours repeated", "GPU-hours saving", "money")
    return Section("Losses by cause", "By the ledger.", (table_html(names, rows),))


def _hours(gpu_us: int) -> str:
    return f"{gpu_us / US_PER_HOUR:,.1f}"


def _gantts(scenario: Scenario, results: Sequence[Result]) -> list[Section]:
    """Draw the same window under each policy: the one in which most jobs waited under the first."""
    busiest = max(results[0].metrics.occupancy.points, key=lambda point: (point[2], point[1]), default=None)
    if busiest is None:
        return []
    names = results[0].gantt.nodes
    lanes = {node.name: node.gpus for node in scenario.nodes if node.name in set(names)}
    from_us, to_us = _window(results, busiest[0])
    figures = []
    for each in results:
        bars = [_bar(held) for held in each.gantt.window(from_us, to_us)]
        figures.append(
            f"<figcaption><b>{each.policy.name}</b></figcaption>"
            + gantt_html(lanes, bars, from_us, to_us, f"attempts on the nodes under {each.policy.name}")
        )
    day = from_us / (24 * US_PER_HOUR)
    lead = (
        f"{format_duration((to_us - from_us) / US_PER_S)} from day {day:,.1f}, when most jobs waited; "
        f"{'all' if len(lanes) == len(scenario.nodes) else f'the first {len(lanes)}'} nodes."
    )
    return [Section("Attempts on the nodes", lead, figures)]


def _window(results: Sequence[Result], at_us: int) -> tuple[int, int]:
    starts = [sorted(held.from_us for held in each.gantt.held) for each in results]
    for hours in _HOURS:
        half_us = hours * US_PER_HOUR // 2
        from_us = max(0, at_us - half_us)
        to_us = from_us + 2 * half_us
        if max(bisect_left(each, to_us) - bisect_left(each, from_us) for each in starts) <= _BARS:
            break
    last_us = max((held.to_us for each in results for held in each.gantt.window(from_us, to_us)), default=to_us)
    return from_us, min(to_us, last_us)  # no empty days behind the last job


def _bar(held: Held) -> Bar:
    kind = _KIND.get(held.outcome, "cut")
    length = format_duration((held.to_us - held.from_us) / US_PER_S)
    word = held.outcome.value if held.outcome else "still runs"
    return Bar(held.node, held.gpus, held.from_us, held.to_us, kind, f"{held.job_id}: {word}, {length}")
