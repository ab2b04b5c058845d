"""The text of `cordee profile`: where the time went, exposed communication, stragglers, defects of the files."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.telemetry.profile import Efficiency, PlanComparison, ProfileComparison, RankReport, Skew
from cordee.telemetry.profile.answer import PlanOfProfile, ProfileAnswer
from cordee.telemetry.profile.compare import Delta
from cordee.telemetry.profile.kernels import Kind
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
from cordee.telemetry.profile.sweep import Breakdown
from cordee.units import plural

# The parts of the bar in their order: name, label, style, and a shade for terminals without colour.
PARTS = {
    "alone": ("compute alone", "blue", "\u2588"),
    "hidden": ("communication behind compute", "green", "\u2593"),
    "transfer": ("exposed transfer", "yellow", "\u2592"),
    "waiting": ("exposed waiting", "red", "!"),
    "idle": ("idle", "bright_black", "\u2591"),
}
KIND_STYLES = {"compute": "blue", "memory": "magenta", "transfer": "yellow", "waiting": "red"}
RANKS_SHOWN, STEPS_SHOWN = 16, 8


def print_profile(answer: ProfileAnswer) -> None:
    """Print all ranks side by side, then one in full, then the comparisons."""
    out = console()
    report = answer.reports[answer.shown]
    if answer.skew is not None:
        _print_ranks(out, answer)
        _print_skew(out, answer.skew, answer.reports)
        out.print()
    _print_head(out, report)
    _print_time(out, report)
    _print_efficiency(out, answer.efficiency[answer.shown], report)
    _print_classes(out, report)
    _print_kernels(out, report, answer.top)
    _print_streams(out, report)
    _print_idle(out, report, answer.top)
    _print_steps(out, report)
    if answer.compared is not None:
        _print_compared(out, answer.compared, answer.base, answer.top)
    if answer.against is not None and answer.planned is not None:
        _print_plan(out, answer.against, answer.planned, answer.efficiency[answer.shown])
    _print_faults(out, answer.reports)


def grid(*columns: str, words: Sequence[str] = ()) -> Table:
    """Return a table without lines; the first column and those in `words` hold text, all others numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for at, column in enumerate(columns):
        left = not at or column in words
        made.add_column(
            column if at else f"  {column}", justify="left" if left else "right", no_wrap=True, overflow="ellipsis"
        )
    return made


def _print_head(out: Console, report: RankReport) -> None:
    count = sum(row.count for row in report.kernels)
    what = {"device": "kernels and copies", "host": "pieces of operators", "tracks": "slices"}[report.side]
    out.print(
        Text.assemble((report.label, "bold"), f" on {report.gpu}" if report.gpu else "", (f"  {report.source}", "dim"))
    )
    tracks = {"device": "stream", "host": "thread", "tracks": "track"}[report.side]
    many = plural(len(report.streams), tracks)
    steps = f", {plural(len(report.steps), 'step')}" if report.steps else ""
    out.print(f"{count:,} {what} on {many}{steps}, {format_us(report.time.span_us)}{SIDES[report.side]}", style="dim")


def _print_time(out: Console, report: RankReport) -> None:
    time = report.time
    title(out, "Where the time went")
    out.print(_bar(span_parts(time), out.width - 4), no_wrap=True)
    table = grid("", "time", "of the span")
    for name, value in span_parts(time).items():
        words, style, shade = PARTS[name]
        if value or name in ("alone", "idle"):
            table.add_row(Text.assemble((f"  {shade} ", style), words), format_us(value), f"{time.fraction(value):.2%}")
    out.print(table)
    indented(out, verdict(report), style="")


def _bar(parts: dict[str, float], width: int) -> Text:
    """Return the parts as one line of cells, at least one for each part."""
    total = sum(parts.values())
    bar = Text("  ")
    cells = {name: max(1, round(value / total * width)) for name, value in parts.items() if value > 0}
    widest = max(cells, key=lambda name: cells[name])
    cells[widest] -= sum(cells.values()) - width
    for name, count in cells.items():
        bar.append(PARTS[name][2] * count, PARTS[name][1])
    return bar


def _print_efficiency(out: Console, efficient: Efficiency, report: RankReport) -> None:
    if report.side != "device":
        return
    title(out, "Utilisation and MFU")
    for sentence in efficiency_sentences(efficient):
        indented(out, sentence, style="")


def _print_classes(out: Console, report: RankReport) -> None:
    noun = {"device": "Kernels", "host": "Operators", "tracks": "Slices"}[report.side]
    title(out, f"{noun} by class", "sums: time on two streams counts twice")
    table = grid("class", "count", "sum", "of all", "exposed")
    for row in report.classes:
        exposed = format_us(row.exposed_us) if row.kernel_class.communicates else ""
        table.add_row(
            Text.assemble(("  \u2588 ", KIND_STYLES[row.kernel_class.kind]), row.kernel_class.name), f"{row.count:,}",
            format_us(row.total_us), f"{row.total_us / (report.kernels_us or 1):.1%}", exposed,
        )  # fmt: skip
    out.print(table)
    key = Text("  ")
    for kind in dict.fromkeys(row.kernel_class.kind for row in report.classes):
        key.append_text(Text.assemble(("\u2588 ", KIND_STYLES[kind]), (f"{kind}  ", "dim")))
    out.print(key)


def _print_kernels(out: Console, report: RankReport, top: int) -> None:
    noun = {"device": "Kernels", "host": "Operators", "tracks": "Slices"}[report.side]
    left = len(report.kernels) - top
    title(out, noun, f"the {top} longest in sum; {left} more" if left > 0 else "")
    table = grid("name", "count", "sum", "mean", "longest", "exposed")
    room = max(20, out.width - 52)
    for row in report.kernels[:top]:
        exposed = format_us(row.exposed_us) if row.kernel_class.communicates else ""
        table.add_row(
            f"  {fitted(row.name, room)}", f"{row.count:,}", format_us(row.total_us),
            format_us(row.total_us / row.count), format_us(row.longest_us), exposed,
        )  # fmt: skip
    out.print(table)


def _print_streams(out: Console, report: RankReport) -> None:
    if len(report.streams) < 2:
        return
    title(out, {"device": "Streams", "host": "Threads", "tracks": "Tracks"}[report.side])
    table = grid("", "count", "busy", "of the span", "compute", "transfer", "waiting", "memory")
    for row in report.streams[:RANKS_SHOWN]:
        kinds = [format_us(row.kinds_us[kind]) if row.kinds_us[kind] else "" for kind in KINDS_ORDER]
        table.add_row(
            f"  {row.name}",
            f"{row.count:,}",
            format_us(row.busy_us),
            f"{report.time.fraction(row.busy_us):.1%}",
            *kinds,
        )
    out.print(table)


KINDS_ORDER: tuple[Kind, ...] = ("compute", "transfer", "waiting", "memory")


def _print_idle(out: Console, report: RankReport, top: int) -> None:
    idle = report.idle
    if not idle.gaps:
        return
    title(out, "Idle", f"{plural(idle.gaps, 'gap')}, {format_us(report.time.idle_us)} in total")
    for sentence in idle_sentences(report):
        indented(out, sentence, style="")
    why = ["because of"] if report.side == "device" else []
    table = grid("at", "gap", *why, "next", words=("because of", "next"))
    room = max(16, out.width - 44)
    for gap in idle.longest[:top]:
        because = [CAUSES[gap.cause]] if why else []
        table.add_row(f"  {format_us(gap.start_us)}", format_us(gap.length_us), *because, fitted(gap.before, room))
    out.print(table)


def _print_steps(out: Console, report: RankReport) -> None:
    if len(report.steps) < 2:
        return
    title(out, "Steps", "on the device, from the first kernel of each step")
    table = grid("step", "time", "compute", "hidden", "exposed", "idle")
    for step in report.steps[:STEPS_SHOWN]:
        table.add_row(f"  {step.number}", format_us(step.time.span_us), *_fractions(step.time))
    out.print(table)
    _more(out, len(report.steps) - STEPS_SHOWN, "steps")


def _fractions(time: Breakdown) -> list[str]:
    hidden = "" if time.hidden_fraction is None else f"{time.hidden_fraction:.1%}"
    return [f"{time.compute_fraction:.1%}", hidden, format_us(time.exposed_us), f"{time.idle_fraction:.1%}"]


def _more(out: Console, left: int, noun: str) -> None:
    if left > 0:
        indented(out, f"and {left:,} {noun} more: --json has them all")


def _print_ranks(out: Console, answer: ProfileAnswer) -> None:
    assert answer.skew is not None, "there are several"
    noun = "processes" if answer.reports[answer.shown].side == "tracks" else "ranks"
    out.print(Text(f"{len(answer.reports)} {noun}", "bold"))
    waits_columns = ("waited", "caused", "last in") if answer.skew.matched else ()
    table = grid("", "span", "compute", "hidden", "exposed", "idle", *waits_columns)
    for report, waits in list(zip(answer.reports, answer.skew.ranks, strict=True))[:RANKS_SHOWN]:
        waited = [format_us(waits.waited_us), format_us(waits.caused_us), f"{waits.last:,}"]
        cells = waited if answer.skew.matched else []
        table.add_row(f"  {report.label}", format_us(report.time.span_us), *_fractions(report.time), *cells)
    out.print(table)
    _more(out, len(answer.reports) - RANKS_SHOWN, "ranks")


def _print_skew(out: Console, waits: Skew, reports: Sequence[RankReport]) -> None:
    if waits.matched or reports[0].side != "tracks":
        for sentence in skew_sentences(waits):
            indented(out, sentence, style="")
    if waits.worst:
        title(out, "Stragglers", "collectives with the longest waits")
        table = grid(
            "collective", "n-th", "step", "last", "waited longest", "together", words=("last", "waited longest")
        )
        room = max(16, out.width - 60)
        for wait in waits.worst:
            step = "" if wait.step is None else str(wait.step)
            longest = f"{wait.longest}, {format_us(wait.longest_us)}"
            table.add_row(
                f"  {fitted(wait.what, room)}", str(wait.number + 1), step, wait.last, longest, format_us(wait.total_us)
            )
        out.print(table)
    if waits.steps:
        title(out, "Steps across ranks")
        table = grid("step", "longest", "compute: least", "most", "waited: most", "straggler", words=("straggler",))
        for row in waits.steps[:STEPS_SHOWN]:
            table.add_row(
                f"  {row.number}", format_us(max(row.span_us)), format_us(min(row.compute_us)),
                format_us(max(row.compute_us)), format_us(max(row.waited_us)), row.straggler or "",
            )  # fmt: skip
        out.print(table)
        _more(out, len(waits.steps) - STEPS_SHOWN, "steps")


def _delta_row(delta: Delta, name: str) -> list[str | Text]:
    change = delta.change_us
    fraction = f"{change / delta.before_us:+.1%}" if delta.before_us else "new" if change else ""
    sign = "+" if change > 0 else ""
    style = "red" if change > 0 else "green" if change < 0 else ""
    return [
        f"  {name}", format_us(delta.before_us), format_us(delta.after_us),
        Text(f"{sign}{format_us(change)}", style), fraction,
    ]  # fmt: skip


def _print_compared(out: Console, compared: ProfileComparison, base: Sequence[str], top: int) -> None:
    title(out, "Compared", f"with {', '.join(base)}; means of a {compared.per}")
    table = grid("", "before", "now", "change", "")
    for delta in compared.times:
        table.add_row(*_delta_row(delta, delta.name))
    out.print(table)
    for heading, deltas in (("classes that changed", compared.classes), ("kernels that changed", compared.kernels)):
        changed = [delta for delta in deltas if delta.change_us][:top]
        if not changed:
            continue
        table = grid(heading, "before", "now", "change", "")
        for delta in changed:
            table.add_row(*_delta_row(delta, fitted(delta.name, max(20, out.width - 46))))
        out.print()
        out.print(table)


def _print_plan(out: Console, against: PlanComparison, planned: PlanOfProfile, efficient: Efficiency) -> None:
    title(out, "Planned and profiled", planned_layout(planned))
    table = grid("a step", "planned", "profiled", "off by", "")
    for delta in against.rows:
        table.add_row(*_delta_row(delta, delta.name))
    out.print(table)
    if planned.mfu is not None and efficient.mfu is not None:
        indented(out, f"MFU: {planned.mfu:.1%} planned, {efficient.mfu:.1%} profiled.", style="")
    indented(out, PLAN_NOTE)


def _print_faults(out: Console, reports: Sequence[RankReport]) -> None:
    found = [(report, defect) for report in reports for defect in report.defects]
    if not found:
        return
    title(out, "Defects of the files", "left out of all figures")
    for report, defect in found:
        indented(out, f"{report.source}: {defect.count:,} {defect.kind}; for example {defect.example}", style="yellow")
