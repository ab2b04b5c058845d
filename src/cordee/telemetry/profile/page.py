"""The page of `cordee profile`: streams over time, the breakdown of the span, and the tables of the terminal."""

import math
from collections.abc import Sequence

import numpy as np

from cordee.telemetry.profile.account import RankReport
from cordee.telemetry.profile.answer import ProfileAnswer
from cordee.telemetry.profile.compare import Delta
from cordee.telemetry.profile.sentences import (
    CAUSES,
    PLAN_NOTE,
    SIDES,
    efficiency_sentences,
    fitted,
    format_us,
    idle_sentences,
    planned_layout,
    skew_sentences,
    span_parts,
    verdict,
)
from cordee.telemetry.profile.sweep import BIT, Sweep
from cordee.units import plural
from cordee.view.profile import SLOTS, Strip, breakdown_html, strips_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

STREAMS_DRAWN, RANKS_DRAWN, ROWS = 12, 64, 24
PARTS = {"alone": "alone", "hidden": "hidden", "transfer": "exposed-transfer", "waiting": "exposed-waiting",
         "idle": "nothing"}  # fmt: skip


def profile_page(answer: ProfileAnswer) -> str:
    """Return the page of an answer."""
    report = answer.reports[answer.shown]
    time = report.time
    sections = []
    if answer.skew is not None:
        sections += _ranks(answer)
    sections.append(_time(report))
    if report.side == "device":
        words = efficiency_sentences(answer.efficiency[answer.shown])
        sections.append(Section("Busy is not efficient", " ".join(words)))
    sections += [_stream_rows(report), _classes(report), _kernel_rows(report)]
    if report.idle.gaps:
        sections.append(_idle(report))
    if len(report.steps) > 1:
        sections.append(_steps(report))
    if answer.compared is not None:
        sections.append(_compared(answer))
    if answer.against is not None and answer.planned is not None:
        where = f"{planned_layout(answer.planned)}."
        table = _deltas("a step", ("planned", "profiled", "off by"), answer.against.rows)
        sections.append(Section("Planned and profiled", where[0].upper() + where[1:], (table,), notes=(PLAN_NOTE,)))
    defects = [f"{each.source}: {defect.count:,} {defect.kind}; for example {defect.example}"
              for each in answer.reports for defect in each.defects]  # fmt: skip
    if defects:
        sections.append(Section("Defects of the files", "Left out of all figures.", notes=defects))
    facts = [(f"{time.compute_fraction:.1%}", "of the time computing"),
             (f"{time.idle_fraction:.1%}", "of the time idle")]  # fmt: skip
    if time.hidden_fraction is not None:
        facts.append((f"{time.hidden_fraction:.2%}", "of the communication hidden"))
        facts.append((format_us(time.exposed_us), "of exposed communication"))
    mfu = answer.efficiency[answer.shown].mfu
    if mfu is not None:
        facts.append((f"{mfu:.1%}", "MFU"))
    on = f" on {report.gpu}" if report.gpu else ""
    return report_html(
        HtmlReport(
            title=f"{report.label}{on}", lead=f"{report.source}: {format_us(time.span_us)}{SIDES[report.side]}.",
            sections=sections, facts=facts,
            footer="Fractions of the span are of unions over the streams; other times are sums.",
        )
    )  # fmt: skip


def _time(report: RankReport) -> Section:
    parts = {PARTS[name]: (value, format_us(value)) for name, value in span_parts(report.time).items()}
    return Section("Where the time went", verdict(report), (breakdown_html(parts, "the span in parts"),))


def _stream_rows(report: RankReport) -> Section:
    many = len(report.streams)
    what = f"The {STREAMS_DRAWN} busiest of {many}." if many > STREAMS_DRAWN else ""
    drawn = strips_html(
        [_strip(report, row.name, row.strip) for row in report.streams[:STREAMS_DRAWN]], report.time.span_us,
        ticks(report.time.span_us), "activity of each stream",
    )  # fmt: skip
    names = ("", "count", "busy", "of the span", *BIT)
    rows = [
        [row.name, f"{row.count:,}", format_us(row.busy_us), f"{report.time.fraction(row.busy_us):.1%}",
         *(format_us(row.kinds_us[kind]) if row.kinds_us[kind] else "" for kind in BIT)]
        for row in report.streams[:ROWS]
    ]  # fmt: skip
    table = table_html(names, rows)
    heading = {"device": "Streams", "host": "Threads", "tracks": "Tracks"}[report.side]
    return Section(heading, what or "Activity over time.", (drawn, table))


def _strip(report: RankReport, name: str, strip: Sweep) -> Strip:
    """Return the fraction of each kind in equal slots of the rank's span."""
    edges = np.linspace(float(report.swept.edge_ns[0]), float(report.swept.edge_ns[-1]), SLOTS + 1)
    width = max(1.0, (edges[-1] - edges[0]) / SLOTS)
    fractions: dict[str, list[float]] = {
        kind: (strip.within(strip.state & bit != 0, edges[:-1], edges[1:]) / width).tolist()
        for kind, bit in BIT.items()
    }
    return Strip(name, f"{name}: busy {format_us(strip.time().busy_us)}", fractions)


# From a minute on, marks are at round times of a clock.
_LONG_US = [seconds * 1e6 for seconds in (60, 300, 900, 1800, 3600, 7200, 18_000, 43_200, 86_400, 172_800, 604_800)]


def ticks(span_us: float) -> list[tuple[float, str]]:
    """Return round marks of an axis, ten at most.

    >>> [name for _, name in ticks(129_012)]
    ['0', '20 ms', '40 ms', '60 ms', '80 ms', '100 ms', '120 ms']
    """
    if span_us <= 0:
        return [(0.0, "0")]
    size = 10.0 ** math.floor(math.log10(span_us))
    steps = _LONG_US if span_us >= _LONG_US[0] * 4 else [part * size for part in (0.1, 0.2, 0.5, 1.0)]
    step = next((each for each in steps if span_us / each <= 10), steps[-1])
    return [(at * step, format_us(at * step)) for at in range(int(span_us // step) + 1)]


def _classes(report: RankReport) -> Section:
    names = ("class", "kind", "count", "sum", "of all", "exposed")
    rows = [
        [row.kernel_class.name, row.kernel_class.kind, f"{row.count:,}", format_us(row.total_us),
         f"{row.total_us / (report.kernels_us or 1):.1%}",
         format_us(row.exposed_us) if row.kernel_class.communicates else ""]
        for row in report.classes
    ]  # fmt: skip
    return Section(
        "By class", "Sums: time on two streams counts twice.",
        (table_html(names, rows),),
    )  # fmt: skip


def _kernel_rows(report: RankReport) -> Section:
    names = ("name", "class", "count", "sum", "mean", "longest", "exposed")
    rows = [
        [fitted(row.name, 48), row.kernel_class.name, f"{row.count:,}", format_us(row.total_us),
         format_us(row.total_us / row.count), format_us(row.longest_us),
         format_us(row.exposed_us) if row.kernel_class.communicates else ""]
        for row in report.kernels[:ROWS]
    ]  # fmt: skip
    left = len(report.kernels) - ROWS
    what = f"The {ROWS} longest in sum; {left} more are in --json." if left > 0 else "All of them."
    noun = {"device": "Kernels", "host": "Operators", "tracks": "Slices"}[report.side]
    return Section(noun, what, (table_html(names, rows),))


def _idle(report: RankReport) -> Section:
    idle = report.idle
    names = ("at", "gap", "because of", "next", "the host was in")
    rows = [
        [format_us(gap.start_us), format_us(gap.length_us), CAUSES[gap.cause], fitted(gap.before, 64), gap.host or ""]
        for gap in idle.longest
    ]
    return Section(
        "Idle", f"{plural(idle.gaps, 'gap')}, {format_us(report.time.idle_us)} together.",
        (table_html(names, rows),), notes=idle_sentences(report),
    )  # fmt: skip


def _steps(report: RankReport) -> Section:
    names = ("step", "time", "compute", "communication", "exposed", "idle")
    rows = [
        [str(step.number), format_us(step.time.span_us), f"{step.time.compute_fraction:.1%}",
         f"{step.time.communication_fraction:.1%}", format_us(step.time.exposed_us),
         f"{step.time.idle_fraction:.1%}"]
        for step in report.steps[:ROWS]
    ]  # fmt: skip
    return Section("Steps", "On the device, from the first kernel of each step.", (
        table_html(names, rows),))  # fmt: skip


def _ranks(answer: ProfileAnswer) -> list[Section]:
    assert answer.skew is not None, "there are several"
    span = max(report.time.span_us for report in answer.reports)
    strips = [_strip(report, report.label, report.swept) for report in answer.reports[:RANKS_DRAWN]]
    drawn = strips_html(strips, span, ticks(span), "activity of each rank") if _one_length(answer.reports) else ""
    matched = answer.skew.matched > 0
    names = ("", "span", "compute", "hidden", "exposed", "idle", *(("waited", "caused", "last in") if matched else ()))
    rows = []
    for report, waits in zip(answer.reports, answer.skew.ranks, strict=True):
        time = report.time
        rows.append([
            report.label, format_us(time.span_us), f"{time.compute_fraction:.1%}",
            "" if time.hidden_fraction is None else f"{time.hidden_fraction:.1%}", format_us(time.exposed_us),
            f"{time.idle_fraction:.1%}",
            *((format_us(waits.waited_us), format_us(waits.caused_us), f"{waits.last:,}") if matched else ()),
        ])  # fmt: skip
    figures = [table_html(names, rows[:RANKS_DRAWN])]
    if drawn:
        figures.insert(0, drawn)
    tracks = answer.reports[0].side == "tracks"
    lead = "On one axis." if tracks and not answer.skew.matched else " ".join(skew_sentences(answer.skew))
    sections = [Section(f"{len(answer.reports)} {'processes' if tracks else 'ranks'}", lead, figures)]
    if answer.skew.worst:
        heads = ("collective", "n-th", "step", "last", "waited longest", "together")
        rows = [
            [fitted(wait.what, 64), str(wait.number + 1), "" if wait.step is None else str(wait.step), wait.last,
             f"{wait.longest}, {format_us(wait.longest_us)}", format_us(wait.total_us)]
            for wait in answer.skew.worst
        ]  # fmt: skip
        table = table_html(heads, rows)
        sections.append(Section("Stragglers", "Collectives with the longest waits.", (table,)))
    return sections


def _one_length(reports: Sequence[RankReport]) -> bool:
    """Return whether the ranks share a clock, as the tracks of one file do."""
    return len({report.source for report in reports}) == 1 and reports[0].side == "tracks"


def _compared(answer: ProfileAnswer) -> Section:
    compared = answer.compared
    assert compared is not None, "asked for"
    tables = [_deltas("", ("before", "now", "change"), compared.times)]
    for heading, deltas in (("class", compared.classes), ("kernel", compared.kernels)):
        changed = [delta for delta in deltas if delta.change_us][:ROWS]
        if changed:
            tables.append(_deltas(heading, ("before", "now", "change"), changed))
    return Section("Compared", f"With {', '.join(answer.base)}; means of a {compared.per}.", tables)


def _deltas(heading: str, names: tuple[str, str, str], deltas: Sequence[Delta]) -> str:
    rows = []
    for delta in deltas:
        change = f"{'+' if delta.change_us > 0 else ''}{format_us(delta.change_us)}"
        fraction = f"{delta.change_us / delta.before_us:+.1%}" if delta.before_us else "new" if delta.change_us else ""
        rows.append([fitted(delta.name, 64), format_us(delta.before_us), format_us(delta.after_us), change, fraction])
    return table_html((heading, *names, ""), rows)
