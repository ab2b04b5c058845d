"""The text of `cordee profile`: where the time went, exposed communication, stragglers, defects of the files."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.plan.step import StepTime
from cordee.telemetry.profile import AgainstPlan, Comparison, Efficiency, RankReport, Skew
from cordee.telemetry.profile.account import short_name
from cordee.telemetry.profile.compare import Delta
from cordee.telemetry.profile.kernels import Kind
from cordee.telemetry.profile.sweep import Time
from cordee.units import format_duration

# Where the time went, in the order of the bar: name, words, style, and a shade for where there is no colour.
PARTS = {
    "alone": ("compute alone", "blue", "\u2588"),
    "hidden": ("communication behind compute", "green", "\u2593"),
    "transfer": ("exposed transfer", "yellow", "\u2592"),
    "waiting": ("exposed waiting", "red", "!"),
    "idle": ("idle", "bright_black", "\u2591"),
}
KIND_STYLES = {"compute": "blue", "memory": "magenta", "transfer": "yellow", "waiting": "red"}
RANKS_SHOWN, STEPS_SHOWN = 16, 8
SIDES = {
    "device": " from its first kernel to the end of its last",
    "host": "; no GPU in this profile: this is what the host's threads did themselves",
    "lanes": " from the first slice in the file to the last",
}


@dataclass(frozen=True)
class Planned:
    """The plan of the layout that was profiled; `flop_per_step` are those of one GPU."""

    model: str
    gpus: int
    gpu: str
    layout: str
    step: StepTime
    mfu: float | None
    flop_per_step: float


@dataclass(frozen=True)
class Answer:
    """All that was found; `shown` is the place of the rank that is told in full."""

    reports: Sequence[RankReport]
    shown: int
    efficiency: Sequence[Efficiency]
    skew: Skew | None
    compared: Comparison | None
    base: Sequence[str]
    planned: Planned | None
    against: AgainstPlan | None
    top: int


def said_us(value_us: float) -> str:
    """Microseconds for people.

    >>> said_us(129_012), said_us(42), said_us(0.25), said_us(2_500_000), said_us(7.2e9), said_us(0)
    ('129 ms', '42 us', '0.25 us', '2.5 s', '2h', '0')
    """
    size = abs(value_us)
    if size >= 60e6:
        return format_duration(value_us / 1e6)
    for unit, least, per in (("s", 1e6, 1e6), ("ms", 1e3, 1e3), ("us", 0, 1)):
        if size >= least and size:
            shown = value_us / per
            return f"{shown:,.0f} {unit}" if abs(shown) >= 1000 else f"{shown:.3g} {unit}"
    return "0"


def parts_of(time: Time) -> dict[str, float]:
    """The span in five parts that add up to it."""
    return {
        "alone": time.alone_us, "hidden": time.hidden_us, "transfer": time.exposed_transfer_us,
        "waiting": time.exposed_waiting_us, "idle": time.idle_us,
    }  # fmt: skip


def print_answer(answer: Answer) -> None:
    """Several ranks side by side, then one in full, then what it is compared with."""
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
    """A table without lines; the first column is words, as are those named, all others numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for at, column in enumerate(columns):
        left = not at or column in words
        made.add_column(
            column if at else f"  {column}", justify="left" if left else "right", no_wrap=True, overflow="ellipsis"
        )
    return made


def _print_head(out: Console, report: RankReport) -> None:
    count = sum(row.count for row in report.kernels)
    what = {"device": "kernels and copies", "host": "pieces of operators", "lanes": "slices"}[report.side]
    out.print(
        Text.assemble((report.label, "bold"), f" on {report.gpu}" if report.gpu else "", (f"  {report.source}", "dim"))
    )
    lanes = {"device": "stream", "host": "thread", "lanes": "line"}[report.side]
    many = f"{len(report.streams)} {lanes}{'s' if len(report.streams) != 1 else ''}"
    steps = f", {len(report.steps)} step{'s' if len(report.steps) != 1 else ''}" if report.steps else ""
    out.print(f"{count:,} {what} on {many}{steps}, {said_us(report.time.span_us)}{SIDES[report.side]}", style="dim")


def _print_time(out: Console, report: RankReport) -> None:
    time = report.time
    title(out, "Where the time went")
    out.print(_bar(parts_of(time), out.width - 4), no_wrap=True)
    table = grid("", "time", "of the span")
    for name, value in parts_of(time).items():
        words, style, shade = PARTS[name]
        if value or name in ("alone", "idle"):
            table.add_row(Text.assemble((f"  {shade} ", style), words), said_us(value), f"{time.share(value):.2%}")
    out.print(table)
    indented(out, verdict(report), style="")


def verdict(report: RankReport) -> str:
    """The figures that are quoted, in a sentence or two."""
    time = report.time
    told = f"Computing {time.share(time.compute_us):.2%} of the time, "
    if time.hidden_fraction is None:
        return f"{told}idle {time.share(time.idle_us):.2%}; nothing communicates."
    told += f"communicating {time.share(time.communication_us):.2%}, idle {time.share(time.idle_us):.2%}."
    told += (
        f" {time.hidden_fraction:.2%} of the communication is hidden behind compute, "
        f"{said_us(time.exposed_us)} is exposed"
        f" ({time.share(time.exposed_us):.2%} of the time)."
    )
    if report.waiting_kernels_us:
        told += (
            f" Kernels that only wait take {said_us(report.waiting_kernels_us)} of the "
            f"{said_us(report.communication_kernels_us)} of communication kernels."
        )
    return told


def _bar(parts: dict[str, float], width: int) -> Text:
    """The parts as one line; a part that there is has a cell."""
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
    title(out, "Busy is not efficient")
    for sentence in efficiency_words(efficient):
        indented(out, sentence, style="")


def efficiency_words(efficient: Efficiency) -> tuple[str, str]:
    """What nvidia-smi would show, and the MFU."""
    busy = (
        f"Utilisation as nvidia-smi shows it: {efficient.busy_fraction:.1%}. It counts a kernel that waits as busy: "
        f"computing is {efficient.compute_fraction:.1%}."
    )
    if efficient.mfu is not None:
        assert efficient.peak_flop_per_s is not None and efficient.flop_per_step is not None, "the MFU is of both"
        steps = f"{efficient.steps} step{'s' if efficient.steps != 1 else ''}"
        doubt = " More than 100%: the model, the layout or the number of steps is wrong."
        return busy, (
            f"MFU: {efficient.mfu:.1%}, {efficient.flop_per_step / 1e12:,.4g} TFLOP a step, {steps}, of a peak of "
            f"{efficient.peak_flop_per_s / 1e12:,.4g} TFLOP/s.{doubt}"
        )
    if efficient.flop_per_step is not None:
        return busy, "MFU: the GPU's peak is not known; name one that is, with --gpu H100."
    return busy, "MFU: not known from a profile alone; give --flop-per-step, or --plan with the model and its layout."


def _print_classes(out: Console, report: RankReport) -> None:
    noun = {"device": "Kernels", "host": "Operators", "lanes": "Slices"}[report.side]
    title(out, f"{noun} by class", "sums; side by side on two streams counts twice")
    table = grid("class", "count", "sum", "of all", "exposed")
    for row in report.classes:
        exposed = said_us(row.exposed_us) if row.belongs.communicates else ""
        table.add_row(
            Text.assemble(("  \u2588 ", KIND_STYLES[row.belongs.kind]), row.belongs.name), f"{row.count:,}",
            said_us(row.total_us), f"{row.total_us / (report.kernels_us or 1):.1%}", exposed,
        )  # fmt: skip
    out.print(table)
    key = Text("  ")
    for kind in dict.fromkeys(row.belongs.kind for row in report.classes):
        key.append_text(Text.assemble(("\u2588 ", KIND_STYLES[kind]), (f"{kind}  ", "dim")))
    out.print(key)


def _print_kernels(out: Console, report: RankReport, top: int) -> None:
    noun = {"device": "Kernels", "host": "Operators", "lanes": "Slices"}[report.side]
    left = len(report.kernels) - top
    title(out, noun, f"the {top} that took most; {left} more" if left > 0 else "")
    table = grid("name", "count", "sum", "mean", "longest", "exposed")
    room = max(20, out.width - 52)
    for row in report.kernels[:top]:
        exposed = said_us(row.exposed_us) if row.belongs.communicates else ""
        table.add_row(
            f"  {fitted(row.name, room)}", f"{row.count:,}", said_us(row.total_us),
            said_us(row.total_us / row.count), said_us(row.longest_us), exposed,
        )  # fmt: skip
    out.print(table)


def fitted(name: str, width: int) -> str:
    """A kernel's name without parameters, its end kept: that is where names differ, but for NCCL's.

    >>> fitted("void at::native::reduce_kernel<512, 1>(int)", 20)
    '...ve::reduce_kernel'
    >>> fitted("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20)
    'AllReduce_Sum_bf1...'
    """
    bare = short_name(name)
    if bare in ("cutlass::device_kernel", "cutlass::Kernel", "cutlass::Kernel2"):
        inside = name.partition("<")[2].partition("<")[0].partition(">")[0]
        bare = f"{inside.strip()} (cutlass)"
    if len(bare) <= width:
        return bare
    collective = bare.removeprefix("ncclDevKernel_").removeprefix("ncclKernel_")
    if len(collective) < len(bare):
        return collective if len(collective) <= width else collective[: width - 3] + "..."
    return "..." + bare[3 - width :]


def _print_streams(out: Console, report: RankReport) -> None:
    if len(report.streams) < 2:
        return
    title(out, {"device": "Streams", "host": "Threads", "lanes": "Lines"}[report.side])
    table = grid("", "count", "busy", "of the span", "compute", "transfer", "waiting", "memory")
    for row in report.streams[:RANKS_SHOWN]:
        kinds = [said_us(row.kinds_us[kind]) if row.kinds_us[kind] else "" for kind in KINDS_ORDER]
        table.add_row(
            f"  {row.name}", f"{row.count:,}", said_us(row.busy_us), f"{report.time.share(row.busy_us):.1%}", *kinds
        )
    out.print(table)


CAUSES = {"host": "the host", "queued": "dependency", "unknown": "not known"}
KINDS_ORDER: tuple[Kind, ...] = ("compute", "transfer", "waiting", "memory")


def _print_idle(out: Console, report: RankReport, top: int) -> None:
    told = report.idle
    if not told.gaps:
        return
    title(out, "Idle", f"{told.gaps:,} gaps, {said_us(report.time.idle_us)} together")
    for sentence in idle_words(report):
        indented(out, sentence, style="")
    why = ["because of"] if report.side == "device" else []
    table = grid("at", "gap", *why, "next", words=("because of", "next"))
    room = max(16, out.width - 44)
    for gap in told.longest[:top]:
        because = [CAUSES[gap.cause]] if why else []
        table.add_row(f"  {said_us(gap.start_us)}", said_us(gap.length_us), *because, fitted(gap.before, room))
    out.print(table)


def idle_words(report: RankReport) -> list[str]:
    """Whose the idle time was."""
    told = report.idle
    if report.side != "device":
        return []
    if not told.launched:
        return ["The profile has no launches, so it cannot be told why the GPU stood idle."]
    host = f"{said_us(told.host_us)} waited for the host: the next kernel was launched after the GPU had fallen idle."
    queued = f"{said_us(told.queued_us)} waited with the next kernel launched already: for another stream, or to begin."
    words = [f"{host} {queued}"]
    if told.queue_us_median is not None:
        words.append(f"In the median a kernel begins {said_us(told.queue_us_median)} after its launch.")
    if told.stretches:
        worst = told.stretches[0]
        words.append(
            f"Launch-bound for {said_us(told.launch_bound_us)}: the worst stretch begins at {said_us(worst.start_us)}, "
            f"{worst.operations:,} operations in {said_us(worst.length_us)}, {said_us(worst.idle_us)} of it idle."
        )
    held = [gap for gap in told.longest if gap.cause == "host" and gap.host]
    if held:
        words.append(f"In the longest of the host's gaps, {said_us(held[0].length_us)}, it was in {held[0].host}.")
    return words


def _print_steps(out: Console, report: RankReport) -> None:
    if len(report.steps) < 2:
        return
    title(out, "Steps", "on the device, from the first kernel of each")
    table = grid("step", "time", "compute", "hidden", "exposed", "idle")
    for step in report.steps[:STEPS_SHOWN]:
        table.add_row(f"  {step.number}", said_us(step.time.span_us), *_shares(step.time))
    out.print(table)
    _more(out, len(report.steps) - STEPS_SHOWN, "steps")


def _shares(time: Time) -> list[str]:
    hidden = "" if time.hidden_fraction is None else f"{time.hidden_fraction:.1%}"
    return [f"{time.share(time.compute_us):.1%}", hidden, said_us(time.exposed_us), f"{time.share(time.idle_us):.1%}"]


def _more(out: Console, left: int, noun: str) -> None:
    if left > 0:
        indented(out, f"and {left:,} {noun} more: --json has them all")


def _print_ranks(out: Console, answer: Answer) -> None:
    assert answer.skew is not None, "there are several"
    noun = "groups of lines" if answer.reports[answer.shown].side == "lanes" else "ranks"
    out.print(Text(f"{len(answer.reports)} {noun}", "bold"))
    table = grid("", "span", "compute", "hidden", "exposed", "idle", "waited", "caused", "last in")
    for report, waits in list(zip(answer.reports, answer.skew.ranks, strict=True))[:RANKS_SHOWN]:
        waited = [said_us(waits.waited_us), said_us(waits.caused_us), f"{waits.last:,}"] if answer.skew.matched else []
        table.add_row(
            f"  {report.label}", said_us(report.time.span_us), *_shares(report.time), *(waited or ["", "", ""])
        )
    out.print(table)
    _more(out, len(answer.reports) - RANKS_SHOWN, "ranks")


def _print_skew(out: Console, waits: Skew, reports: Sequence[RankReport]) -> None:
    if waits.matched or reports[0].side != "lanes":
        for sentence in skew_words(waits):
            indented(out, sentence, style="")
    if waits.worst:
        title(out, "Waited for", "collectives in which ranks waited longest")
        table = grid(
            "collective", "n-th", "step", "last", "waited longest", "together", words=("last", "waited longest")
        )
        room = max(16, out.width - 60)
        for wait in waits.worst:
            step = "" if wait.step is None else str(wait.step)
            longest = f"{wait.longest}, {said_us(wait.longest_us)}"
            table.add_row(
                f"  {fitted(wait.what, room)}", str(wait.number + 1), step, wait.last, longest, said_us(wait.total_us)
            )
        out.print(table)
    if waits.steps:
        title(out, "Steps across ranks")
        table = grid("step", "longest", "compute: least", "most", "waited: most", "straggler", words=("straggler",))
        for row in waits.steps[:STEPS_SHOWN]:
            table.add_row(
                f"  {row.number}", said_us(max(row.span_us)), said_us(min(row.compute_us)),
                said_us(max(row.compute_us)), said_us(max(row.waited_us)), row.straggler or "",
            )  # fmt: skip
        out.print(table)
        _more(out, len(waits.steps) - STEPS_SHOWN, "steps")


def skew_words(waits: Skew) -> list[str]:
    """Who waits for whom."""
    if not waits.matched:
        words = ["No collective is on several of these ranks, so it cannot be told who waited for whom."]
    else:
        most = max(waits.ranks, key=lambda each: each.caused_us)
        total = sum(each.caused_us for each in waits.ranks)
        words = [
            f"{waits.matched:,} collectives matched. Who is in one the shortest came last: the others waited for it."
        ]
        if total:
            words.append(
                f"Most was waited for {most.label}: {said_us(most.caused_us)} of {said_us(total)}, last in "
                f"{most.last:,} of {waits.matched:,}."
            )
    if waits.unmatched:
        words.append(f"Not matched, since the ranks have unequal numbers of them: {'; '.join(waits.unmatched[:4])}.")
    return words


def _delta_row(delta: Delta, name: str) -> list[str | Text]:
    change = delta.change_us
    share = f"{change / delta.before_us:+.1%}" if delta.before_us else "new" if change else ""
    sign = "+" if change > 0 else ""
    style = "red" if change > 0 else "green" if change < 0 else ""
    return [
        f"  {name}", said_us(delta.before_us), said_us(delta.after_us), Text(f"{sign}{said_us(change)}", style), share
    ]  # fmt: skip


def _print_compared(out: Console, compared: Comparison, base: Sequence[str], top: int) -> None:
    title(out, "Compared", f"with {', '.join(base)}; a mean {compared.per}")
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


def _print_plan(out: Console, against: AgainstPlan, planned: Planned, efficient: Efficiency) -> None:
    title(out, "Planned and measured", f"{planned.model}, {planned.gpus} x {planned.gpu}, {planned.layout}")
    table = grid("a step", "planned", "measured", "off by", "")
    for delta in against.rows:
        table.add_row(*_delta_row(delta, delta.name))
    out.print(table)
    if planned.mfu is not None and efficient.mfu is not None:
        indented(out, f"MFU: {planned.mfu:.1%} planned, {efficient.mfu:.1%} measured.", style="")
    indented(out, PLAN_NOTE)


PLAN_NOTE = (
    "The plan's idle is bubble and host; a pipeline's bubble is seen in a profile as receives that nothing hides, so "
    "compare what is not computing as a whole."
)


def _print_faults(out: Console, reports: Sequence[RankReport]) -> None:
    told = [(report, fault) for report in reports for fault in report.faults]
    if not told:
        return
    title(out, "Wrong in the profiles", "left out; everything above is of the rest")
    for report, fault in told:
        indented(out, f"{report.source}: {fault.count:,} {fault.kind}; the first: {fault.example}", style="yellow")
