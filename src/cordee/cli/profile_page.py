"""A profile as one page to forward: the streams over time, where the span went, and the tables of the terminal."""

import math
from collections.abc import Sequence

import numpy as np

from cordee.cli.profile_text import (
    CAUSES,
    PLAN_NOTE,
    SIDES,
    Answer,
    efficiency_words,
    fitted,
    idle_words,
    parts_of,
    said_us,
    skew_words,
    verdict,
)
from cordee.telemetry.profile import RankReport
from cordee.telemetry.profile.compare import Delta
from cordee.telemetry.profile.sweep import BIT, Sweep
from cordee.view.profile import SLOTS, Strip, breakdown_svg, strips_svg
from cordee.view.report import Report, Section, report_html
from cordee.view.tables import table_html

STREAMS_DRAWN, RANKS_DRAWN, ROWS = 12, 64, 24
PARTS = {"alone": "alone", "hidden": "hidden", "transfer": "exposed-transfer", "waiting": "exposed-waiting",
         "idle": "nothing"}  # fmt: skip


def profile_page(answer: Answer) -> str:
    """The whole answer."""
    report = answer.reports[answer.shown]
    time = report.time
    sections = []
    if answer.skew is not None:
        sections += _ranks(answer)
    sections.append(_time(report))
    if report.side == "device":
        told = efficiency_words(answer.efficiency[answer.shown])
        sections.append(Section("Busy is not efficient", " ".join(told)))
    sections += [_streams(report), _classes(report), _kernels(report)]
    if report.idle.gaps:
        sections.append(_idle(report))
    if len(report.steps) > 1:
        sections.append(_steps(report))
    if answer.compared is not None:
        sections.append(_compared(answer))
    if answer.against is not None and answer.planned is not None:
        where = f"{answer.planned.model} on {answer.planned.gpus} x {answer.planned.gpu}, {answer.planned.layout}."
        table = _deltas("a step", ("planned", "measured", "off by"), answer.against.rows)
        sections.append(Section("Planned and measured", where, (table,), notes=(PLAN_NOTE,)))
    faults = [f"{each.source}: {fault.count:,} {fault.kind}; the first: {fault.example}"
              for each in answer.reports for fault in each.faults]  # fmt: skip
    if faults:
        sections.append(Section("Wrong in the profiles", "Left out; everything above is of the rest.", notes=faults))
    facts = [(f"{time.share(time.compute_us):.1%}", "of the time computing"),
             (f"{time.share(time.idle_us):.1%}", "of the time idle")]  # fmt: skip
    if time.hidden_fraction is not None:
        facts.append((f"{time.hidden_fraction:.2%}", "of the communication hidden"))
        facts.append((said_us(time.exposed_us), "communication that nothing hides"))
    mfu = answer.efficiency[answer.shown].mfu
    if mfu is not None:
        facts.append((f"{mfu:.1%}", "MFU, the model's FLOPs over the peak's"))
    on = f" on {report.gpu}" if report.gpu else ""
    return report_html(
        Report(
            title=f"{report.label}{on}", lead=f"{report.source}: {said_us(time.span_us)}{SIDES[report.side]}.",
            sections=sections, facts=facts,
            footer="Fractions of the span are of unions over the streams; other times are sums.",
        )
    )  # fmt: skip


def _time(report: RankReport) -> Section:
    parts = {PARTS[name]: (value, said_us(value)) for name, value in parts_of(report.time).items()}
    return Section("Where the time went", verdict(report), (breakdown_svg(parts, "the span in parts"),))


def _streams(report: RankReport) -> Section:
    many = len(report.streams)
    what = f"The {STREAMS_DRAWN} busiest of {many}." if many > STREAMS_DRAWN else ""
    drawn = strips_svg(
        [_strip(report, row.name, row.strip) for row in report.streams[:STREAMS_DRAWN]], report.time.span_us,
        ticks(report.time.span_us), "what ran on each stream",
    )  # fmt: skip
    names = ("", "count", "busy", "of the span", *BIT)
    rows = [
        [row.name, f"{row.count:,}", said_us(row.busy_us), f"{report.time.share(row.busy_us):.1%}",
         *(said_us(row.kinds_us[kind]) if row.kinds_us[kind] else "" for kind in BIT)]
        for row in report.streams[:ROWS]
    ]  # fmt: skip
    table = table_html(names, rows)
    heading = {"device": "Streams", "host": "Threads", "lanes": "Lines"}[report.side]
    return Section(heading, what or "What ran on each, over time.", (drawn, table))


def _strip(report: RankReport, name: str, strip: Sweep) -> Strip:
    """Shares of a stream's kinds in equal slots of the rank's span."""

    edges = np.linspace(float(report.swept.edge_ns[0]), float(report.swept.edge_ns[-1]), SLOTS + 1)
    width = max(1.0, (edges[-1] - edges[0]) / SLOTS)
    shares: dict[str, list[float]] = {
        kind: (strip.within(strip.state & bit != 0, edges[:-1], edges[1:]) / width).tolist()
        for kind, bit in BIT.items()
    }
    return Strip(name, f"{name}: busy {said_us(strip.time().busy_us)}", shares)


# From a minute on, round is what clocks and calendars call round.
_LONG_US = [seconds * 1e6 for seconds in (60, 300, 900, 1800, 3600, 7200, 18_000, 43_200, 86_400, 172_800, 604_800)]


def ticks(span_us: float) -> list[tuple[float, str]]:
    """Round marks on an axis, ten at most.

    >>> [name for _, name in ticks(129_012)]
    ['0', '20 ms', '40 ms', '60 ms', '80 ms', '100 ms', '120 ms']
    """
    if span_us <= 0:
        return [(0.0, "0")]
    size = 10.0 ** math.floor(math.log10(span_us))
    steps = _LONG_US if span_us >= _LONG_US[0] * 4 else [part * size for part in (0.1, 0.2, 0.5, 1.0)]
    step = next((each for each in steps if span_us / each <= 10), steps[-1])
    return [(at * step, said_us(at * step)) for at in range(int(span_us // step) + 1)]


def _classes(report: RankReport) -> Section:
    names = ("class", "kind", "count", "sum", "of all", "exposed")
    rows = [
        [row.belongs.name, row.belongs.kind, f"{row.count:,}", said_us(row.total_us),
         f"{row.total_us / (report.kernels_us or 1):.1%}",
         said_us(row.exposed_us) if row.belongs.communicates else ""]
        for row in report.classes
    ]  # fmt: skip
    return Section(
        "By class", "Sums: what ran side by side on two streams counts twice.",
        (table_html(names, rows),),
    )  # fmt: skip


def _kernels(report: RankReport) -> Section:
    names = ("name", "class", "count", "sum", "mean", "longest", "exposed")
    rows = [
        [fitted(row.name, 48), row.belongs.name, f"{row.count:,}", said_us(row.total_us),
         said_us(row.total_us / row.count), said_us(row.longest_us),
         said_us(row.exposed_us) if row.belongs.communicates else ""]
        for row in report.kernels[:ROWS]
    ]  # fmt: skip
    left = len(report.kernels) - ROWS
    what = f"The {ROWS} that took most; {left} more are in --json." if left > 0 else "All of them."
    noun = {"device": "Kernels", "host": "Operators", "lanes": "Slices"}[report.side]
    return Section(noun, what, (table_html(names, rows),))


def _idle(report: RankReport) -> Section:
    told = report.idle
    names = ("at", "gap", "because of", "next", "the host was in")
    rows = [
        [said_us(gap.start_us), said_us(gap.length_us), CAUSES[gap.cause], fitted(gap.before, 64), gap.host or ""]
        for gap in told.longest
    ]
    return Section(
        "Idle", f"{told.gaps:,} gaps, {said_us(report.time.idle_us)} together.",
        (table_html(names, rows),), notes=idle_words(report),
    )  # fmt: skip


def _steps(report: RankReport) -> Section:
    names = ("step", "time", "compute", "communication", "exposed", "idle")
    rows = [
        [str(step.number), said_us(step.time.span_us), f"{step.time.share(step.time.compute_us):.1%}",
         f"{step.time.share(step.time.communication_us):.1%}", said_us(step.time.exposed_us),
         f"{step.time.share(step.time.idle_us):.1%}"]
        for step in report.steps[:ROWS]
    ]  # fmt: skip
    return Section("Steps", "On the device, from the first kernel of each.", (
        table_html(names, rows),))  # fmt: skip


def _ranks(answer: Answer) -> list[Section]:
    assert answer.skew is not None, "there are several"
    span = max(report.time.span_us for report in answer.reports)
    strips = [_strip(report, report.label, report.swept) for report in answer.reports[:RANKS_DRAWN]]
    drawn = strips_svg(strips, span, ticks(span), "what ran on each rank") if _one_length(answer.reports) else ""
    matched = answer.skew.matched > 0
    names = ("", "span", "compute", "hidden", "exposed", "idle", *(("waited", "caused", "last in") if matched else ()))
    rows = []
    for report, waits in zip(answer.reports, answer.skew.ranks, strict=True):
        time = report.time
        rows.append([
            report.label, said_us(time.span_us), f"{time.share(time.compute_us):.1%}",
            "" if time.hidden_fraction is None else f"{time.hidden_fraction:.1%}", said_us(time.exposed_us),
            f"{time.share(time.idle_us):.1%}",
            *((said_us(waits.waited_us), said_us(waits.caused_us), f"{waits.last:,}") if matched else ()),
        ])  # fmt: skip
    figures = [table_html(names, rows[:RANKS_DRAWN])]
    if drawn:
        figures.insert(0, drawn)
    lanes = answer.reports[0].side == "lanes"
    lead = "On one axis." if lanes and not answer.skew.matched else " ".join(skew_words(answer.skew))
    sections = [Section(f"{len(answer.reports)} {'groups of lines' if lanes else 'ranks'}", lead, figures)]
    if answer.skew.worst:
        heads = ("collective", "n-th", "step", "last", "waited longest", "together")
        rows = [
            [fitted(wait.what, 64), str(wait.number + 1), "" if wait.step is None else str(wait.step), wait.last,
             f"{wait.longest}, {said_us(wait.longest_us)}", said_us(wait.total_us)]
            for wait in answer.skew.worst
        ]  # fmt: skip
        table = table_html(heads, rows)
        sections.append(Section("Waited for", "Collectives in which ranks waited longest.", (table,)))
    return sections


def _one_length(reports: Sequence[RankReport]) -> bool:
    """Whether the ranks can share an axis: lanes of one file do."""
    return len({report.source for report in reports}) == 1 and reports[0].side == "lanes"


def _compared(answer: Answer) -> Section:
    compared = answer.compared
    assert compared is not None, "asked for"
    tables = [_deltas("", ("before", "now", "change"), compared.times)]
    for heading, deltas in (("class", compared.classes), ("kernel", compared.kernels)):
        changed = [delta for delta in deltas if delta.change_us][:ROWS]
        if changed:
            tables.append(_deltas(heading, ("before", "now", "change"), changed))
    return Section("Compared", f"With {', '.join(answer.base)}; a mean {compared.per}.", tables)


def _deltas(heading: str, names: tuple[str, str, str], deltas: Sequence[Delta]) -> str:
    rows = []
    for delta in deltas:
        change = f"{'+' if delta.change_us > 0 else ''}{said_us(delta.change_us)}"
        share = f"{delta.change_us / delta.before_us:+.1%}" if delta.before_us else "new" if delta.change_us else ""
        rows.append([fitted(delta.name, 64), said_us(delta.before_us), said_us(delta.after_us), change, share])
    return table_html((heading, *names, ""), rows)
