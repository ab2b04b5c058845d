"""A serving answer in a terminal: layouts by price, the memory of a GPU, prices of tokens, the curve, the levers."""

import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.plan.launch import Launch
from cordee.plan.serving.ask import ServingAnswer
from cordee.plan.serving.curve import ServingCurve
from cordee.plan.serving.disaggregation import PhasesPlan
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.levers.renting import HourPrice
from cordee.plan.serving.memory.kv import is_linear
from cordee.plan.serving.memory.memory import ServingMemory
from cordee.plan.serving.memory.visible import case_visible_bytes
from cordee.plan.serving.performance import Performance
from cordee.plan.serving.request import Traffic
from cordee.units import format_count, format_digits_usd, format_gb, format_latency, format_usd, plural
from cordee.view.memory import LIMIT, SERVING_PARTS, MemoryBar, full_scale_bytes, memory_cells

SHOWN = 8
COLOURS = {"weights": "blue", "kv": "green", "activations": "yellow", "other": "bright_black", "limit": "bold"}
NARROW_BAR, WIDE_BAR = 10, 40
NARROW = 64
"""Below so many columns a table has no bars, and the figures that matter most alone."""


def print_serving(answer: ServingAnswer, *, show_all: bool, with_curve: bool, with_levers: bool) -> None:
    """Print the answer; the summary comes last."""
    out = console()
    if answer.why is not None:
        title(out, answer.why.heading, answer.why.ground)
        indented(out, answer.why.message, style="")
        if answer.why.hint:
            indented(out, answer.why.hint)
        return
    _header(out, answer)
    _layouts(out, answer, show_all=show_all)
    _memory(out, answer.nearest)
    _speed(out, answer.nearest)
    if answer.nearest.fits:
        _cache(out, answer)
    if answer.nearest.prices is not None:
        _prices(out, answer)
    if answer.phases_wanted is not None:
        _phases(out, answer)
    if with_curve and answer.curve is not None:
        _curve(out, answer.curve, answer)
    if with_levers and answer.levers:
        _levers(out, answer.levers)
    _sources(out, answer)
    out.print()
    out.print(answer.summary, style="bold")
    if answer.phases_summary:
        out.print(answer.phases_summary, style="bold")


def print_settings(launch: Launch, answer: ServingAnswer) -> None:
    """Print the engine's command, and on standard error what has to be said of it."""
    print(launch.text)
    notes = [f"layout {launch.layout}: {answer.phases_summary or answer.summary}", *launch.notes]
    for each in (*notes, *(f"not as planned: {launch.launcher} has no {each}" for each in launch.cannot)):
        print(f"note: {each}", file=sys.stderr)


def _header(out: Console, answer: ServingAnswer) -> None:
    request = answer.request
    engine = f", {request.engine.name} {request.engine.versions}"
    out.print(Text.assemble((request.shape.name, "bold"), " on ", (answer.where, "bold"), engine))
    case = answer.nearest.case
    indented(out, f"{_load(request.traffic)}; {request.slo}; a context of up to {case.max_context_tokens:,} tokens; "
             f"weights in {', '.join(each.name for each in request.weights)}, "
             f"KV in {', '.join(each.name for each in request.kv)}")  # fmt: skip


def _load(traffic: Traffic) -> str:
    lengths = f"{traffic.input_tokens:,} + {traffic.output_tokens:,} tokens"
    cached = f", {traffic.cached_fraction:.0%} of each prompt cached" if traffic.cached_fraction else ""
    if traffic.requests:
        return f"a trace of {plural(len(traffic.requests), 'request')} of {lengths} on average"
    if traffic.rate_per_s is not None:
        noun = "request" if traffic.rate_per_s == 1 else "requests"
        return f"{traffic.rate_per_s:g} {noun} of {lengths} a second{cached}"
    if traffic.concurrency is not None:
        return f"{plural(traffic.concurrency, 'concurrent request')} of {lengths}{cached}"
    return f"as many requests of {lengths} as the latencies allow{cached}"


def _layouts(out: Console, answer: ServingAnswer, *, show_all: bool) -> None:
    groups = (
        (
            "Layouts that meet the SLO" if answer.request.slo.limits else "Layouts that fit",
            "cheapest first",
            answer.serving,
        ),
        (
            "Layouts that miss it" if answer.request.slo.limits else "Layouts that cannot keep up",
            "nearest first",
            answer.late,
        ),
        ("Layouts that do not fit", "nearest first", answer.rejected),
    )
    shown = [each for *_, found in groups for each in (found if show_all else found[:SHOWN])]
    scale = _Scale(out, shown, answer.request.gpu.visible_bytes)
    for name, order, found in groups:
        if not found:
            continue
        title(out, f"{name}: {len(found)}", order)
        fits = found[0].fits
        table = scale.table(_columns(answer, out) if fits else ("short by",))
        for each in found if show_all else found[:SHOWN]:
            cells = _speeds(each, answer, out) if fits else [Text(format_gb(each.shortfall_bytes), "red")]
            bar = [] if out.width < NARROW else [scale.bar(each)]
            table.add_row("", each.name, f"{each.replicas}x", *bar, *cells)
        out.print(table)
        if len(found) > SHOWN and not show_all:
            out.print(f"  and {len(found) - SHOWN} more (--all)", style="dim")
    out.print(scale.legend())
    if answer.fits and not answer.request.slo.limits:
        indented(out, "No latency is limited; with --ttft and --tpot only layouts that meet them are compared.")
    if answer.refusals:
        indented(out, answer.refusals, style="red")
    if answer.best is None and (answer.remedies or answer.floor):
        title(out, "What would work")
        if answer.floor:
            indented(out, answer.floor, style="")
        for remedy in answer.remedies:
            indented(out, str(remedy), style="")


def _columns(answer: ServingAnswer, out: Console) -> tuple[str, ...]:
    if out.width < NARROW:
        return ("TTFT", "TPOT", *(["$/Mtok"] if _priced(answer, out) else []))
    names = ["concurrency", "req/s", "TTFT", "TPOT"]
    if out.width >= 100:
        names.insert(0, "KV tokens")
    return (*names, *(["$/Mtok"] if _priced(answer, out) else []))


def _priced(answer: ServingAnswer, out: Console) -> bool:
    """Return whether a layout's line has a price: there is one, and room for it."""
    names = max(len(each.name) for each in answer.candidates)
    return answer.request.price is not None and (out.width >= NARROW or names <= out.width - 32)


def _speeds(each: ServingCandidate, answer: ServingAnswer, out: Console) -> list[str | Text]:
    """Return the columns of a layout that fits; a latency over its limit is red."""
    slo, speed, narrow = answer.request.slo, each.performance, out.width < NARROW
    cells: list[str | Text] = [format_count(each.memory.kv_tokens)] if out.width >= 100 else []
    priced = _priced(answer, out)
    if speed is None:
        busy = Text(f"max {each.capacity_per_s:,.1f}" + "/s" * narrow, "red")
        return [*cells, *([busy] if narrow else [f"{each.sequences:,}", busy, ""]), "", *([""] if priced else [])]
    cells += [] if narrow else [f"{speed.sequences:,.0f}", f"{speed.requests_per_s:,.1f}"]
    for found, limit in ((speed.ttft, slo.ttft_s), (speed.tpot, slo.tpot_s)):
        seconds = getattr(found, slo.statistic)
        cells.append(Text(format_latency(seconds), "red" if limit is not None and seconds > limit else ""))
    if priced:
        cells.append("" if each.usd_per_mtok is None else format_digits_usd(each.usd_per_mtok))
    return cells


class _Scale:
    """One scale for all bars, so that the GPU's memory is in one line."""

    def __init__(self, out: Console, shown: Sequence[ServingCandidate], memory_bytes: int) -> None:
        self.ascii_only = not out.encoding.lower().startswith("utf")
        self.narrow = out.width < NARROW
        self.memory_bytes = memory_bytes
        self.full_bytes = full_scale_bytes([_memory_bar(each) for each in shown], memory_bytes)
        self.names = max(len("layout"), *(len(each.name) for each in shown))
        columns = 62 if out.width >= 100 else 52
        self.width = max(NARROW_BAR, min(WIDE_BAR, out.width - self.names - columns))

    def table(self, others: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        table.add_column("", no_wrap=True, width=1)
        table.add_column("layout", no_wrap=True, min_width=self.names)
        table.add_column("", no_wrap=True, justify="right")
        if not self.narrow:
            table.add_column("one GPU", no_wrap=True, min_width=self.width)
        for name in others:
            table.add_column(name, justify="right", no_wrap=True)
        return table

    def bar(self, each: ServingCandidate) -> Text:
        drawn = Text()
        for part, cells in memory_cells(_memory_bar(each), self.memory_bytes, self.full_bytes, self.width):
            drawn.append(self.glyph(part) * cells, COLOURS.get(part, ""))
        return drawn

    def glyph(self, part: str) -> str:
        if part == "limit":
            return LIMIT[self.ascii_only]
        return SERVING_PARTS[part][1][self.ascii_only] if part else " "

    def legend(self) -> Text:
        legend = Text("  ")
        for part in SERVING_PARTS:
            legend.append(self.glyph(part), COLOURS[part])
            legend.append(f" {'KV cache' if part == 'kv' else part}  ", "dim")
        legend.append(self.glyph("limit"), "bold")
        return legend.append(f" {format_gb(self.memory_bytes)} that CUDA reports", "dim")


def _memory_bar(each: ServingCandidate) -> MemoryBar:
    return MemoryBar(each.name, each.parts, shown=SERVING_PARTS)


def _memory(out: Console, found: ServingCandidate) -> None:
    """Print one GPU of the nearest layout, part by part."""
    title(out, f"Memory of one GPU of {found.name}", f"the engine may use {found.case.memory_fraction:.0%}")
    limit = case_visible_bytes(found.case)
    scale = _Scale(out, [found], limit)
    width = max(10, min(50, out.width - 36))
    full, done = max(scale.full_bytes, sum(found.parts.values())), 0
    for part, size in found.parts.items():
        if not size:
            continue
        group = next(name for name, (names, _, _) in SERVING_PARTS.items() if part in names)
        start, end = (round(at / full * width) for at in (done, done + size))
        end = min(width, max(end, start + 1))
        row = Text(f"  {'KV cache' if part == 'kv' else part:<14}{format_gb(size):>9}  ")
        row.append(" " * min(start, end - 1)).append(scale.glyph(group) * (end - min(start, end - 1)), COLOURS[group])
        out.print(row)
        done += size
    if not found.fits:
        indented(out, f"short by {format_gb(found.shortfall_bytes)} for one request of "
                 f"{found.case.max_context_tokens:,} tokens", style="red")  # fmt: skip


def _speed(out: Console, found: ServingCandidate) -> None:
    speed = found.performance
    if speed is None:
        return
    title(out, f"Speed of {plural(found.replicas, 'replica')}", plural(found.gpus, "GPU"))
    prompts, answers = format_count(speed.input_tokens_per_s), format_count(speed.output_tokens_per_s)
    indented(out, f"{prompts} tokens of prompts and {answers} of answers a second", style="")
    _latencies(out, speed, ("mean", "p50", "p90", "p99") if speed.played else ("mean",))


def _latencies(out: Console, found: Performance | PhasesPlan, names: Sequence[str]) -> None:
    """Print these statistics of the latencies."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    names = names if out.width >= NARROW else [name for name in names if name in ("mean", "p99")]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for what, seconds in (("TTFT", found.ttft), ("TPOT", found.tpot), ("end to end", found.e2e)):
        table.add_row(f"  {what}", *(format_latency(getattr(seconds, name)) for name in names))
    out.print(table)


def _cache(out: Console, answer: ServingAnswer) -> None:
    found, traffic = answer.nearest, answer.request.traffic
    held = found.memory
    title(out, "KV cache of one replica")
    shortest, longest = traffic.request_tokens, found.case.max_context_tokens
    room = {tokens: plural(held.sequences(tokens), "concurrent request") for tokens in (shortest, longest)}
    # Without blocks that sequences share, the cache has a slot of the longest context for each.
    slots = f", each in a slot of --context {longest}" if found.case.engine.memory.covers == "none" else ""
    lines = (
        _cache_size(held),
        f"room for {room[shortest]} of {shortest:,} tokens; the engine runs {found.case.slots:,} at most{slots}",
        (f"room for one sequence of {held.longest_context_tokens:,} tokens; the model has "
         f"{answer.request.shape.positions:,} positions; room for {room[longest]} of {longest:,} tokens"),
    )  # fmt: skip
    for line in lines:
        indented(out, line, style="")
    if answer.engine_log:
        title(out, f"What {found.case.engine.name} will log", "in GiB: 2^30 bytes")
    for line in answer.engine_log:
        indented(out, line)


def _cache_size(held: ServingMemory) -> str:
    """Return tokens and blocks of each data-parallel rank; bytes where layers keep different numbers of tokens."""
    case, ranks = held.case, held.case.layout.dp
    each = f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""
    if not is_linear(case.shape):
        return f"{format_gb(held.kv_bytes)} on each GPU{each}; a sequence's size is not proportional to its tokens"
    tokens, low, high = (number // ranks for number in (held.kv_tokens, *held.kv_tokens_interval))
    block = plural(case.engine.block_tokens, "token")
    return f"{tokens:,} tokens ({format_count(low)} to {format_count(high)}) in {held.blocks:,} blocks of {block}{each}"


def _prices(out: Console, answer: ServingAnswer) -> None:
    found = answer.nearest
    prices, price = found.prices, found.request.price
    assert prices is not None and price is not None and found.usd_per_hour is not None, "printed with a price"
    title(
        out,
        "Price of a million tokens",
        f"{plural(found.gpus, 'GPU')}, {format_usd(found.usd_per_hour)} an hour",
    )
    parts = (("input", prices.input_usd), ("cached input", prices.cached_usd), ("output", prices.output_usd))
    indented(out, "   ".join(f"{name} {format_digits_usd(usd)}" for name, usd in parts), style="")
    if answer.electricity_usd_per_mtok is not None:
        watts = (
            f"{format_digits_usd(answer.electricity_usd_per_mtok)} of electricity for a million tokens, if you own them"
        )
        indented(out, watts)
    if answer.hours:
        indented(out, _by_hour(answer.hours))
    if answer.against_api is not None:
        indented(out, f"Against the API: {answer.against_api}.", style="")


def _by_hour(hours: Sequence[HourPrice]) -> str:
    """Return the prices of the busiest and of the quietest hour that has a load, in one line."""
    priced = [each for each in hours if each.usd_per_mtok is not None]
    ends = (max(priced, key=lambda each: each.load), min(priced, key=lambda each: each.load))
    texts = [
        f"hour {each.hour} {format_digits_usd(each.usd_per_mtok or 0.0)} (load {each.load:.0%}; "
        f"{format_digits_usd(each.rented_usd_per_mtok or 0.0)} on the {plural(each.replicas, 'replica')} it needs)"
        for each in ends
    ]
    return f"a million tokens by the hour: {', '.join(texts)}"


def _phases(out: Console, answer: ServingAnswer) -> None:
    """Print the replicas of each phase, their latencies and prices, and the way of the KV cache."""
    found = answer.phases
    title(out, "Prefill and decode apart", "" if found is None else plural(found.gpus, "GPU"))
    if found is None:
        indented(out, answer.phases_summary, style="red")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for name in ("", "layout", "replicas", "GPUs", "$/Mtok"):
        table.add_column(name, justify="left" if name in ("", "layout") else "right", no_wrap=True)
    for name, pool, usd in (("prefill", found.prefill, found.input_usd), ("decode", found.decode, found.output_usd)):
        price = "" if usd is None else format_digits_usd(usd)
        table.add_row(f"  {name}", pool.name, str(pool.replicas), str(pool.gpus), price)
    out.print(table)
    if found.keeps_up:
        _latencies(out, found, ("mean", "p50", "p90", "p99"))
    indented(out, found.transfer)


def _curve(out: Console, curve: ServingCurve, answer: ServingAnswer) -> None:
    replicas = plural(answer.nearest.replicas, "replica")
    title(out, f"Throughput against latency of {replicas} of {answer.nearest.name}", "by the concurrency of each")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    bars, narrow = max(6, min(40, out.width - 76)), out.width < NARROW
    table.add_column("" if narrow else "  concurrency", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("tokens/s", no_wrap=True, min_width=bars)
    for name in ("tok/s", "TTFT", "TPOT") if narrow else ("", "each added", "TTFT", "TPOT", "$/Mtok"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    ascii_only = not out.encoding.lower().startswith("utf")
    most = max(point.output_tokens_per_s for point in curve.points)
    for point in curve.points:
        knee = curve.knee is not None and point.sequences == curve.knee.sequences
        meets = point.candidate.keeps_slo
        usd = point.candidate.usd_per_mtok
        bar = Text(("#" if ascii_only else "▓") * max(1, round(bars * point.output_tokens_per_s / most)),
                   "bold" if knee else "green" if meets else "red")  # fmt: skip
        rate, times = format_count(point.output_tokens_per_s), map(format_latency, (point.ttft_s, point.tpot_s))
        note = Text("<- knee" if knee else "" if meets else "misses the SLO", "bold" if knee else "red")
        if narrow:
            table.add_row(f"{point.sequences:,}", rate, *times, Text("knee" if knee else "" if meets else "late"))
            continue
        dollars = "" if usd is None else format_digits_usd(usd)
        table.add_row(f"  {point.sequences:,}", bar, rate, f"{point.added_fraction:.0%}", *times, dollars, note)
    out.print(table)


def _levers(out: Console, levers: Sequence[Lever]) -> None:
    """Print each lever with its factors, and its crossover on the lines below."""
    title(out, "Levers", "tokens of a GPU and dollars of a token, after over before, at full load")
    rows = [("lever", "change", "tokens", "dollars", "$/Mtok"), *map(_lever_cells, levers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells, each in zip(rows, (None, *levers), strict=True):
        name, change, tokens, *money = (
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        factor = None if each is None else each.factor
        style = "" if factor is None else "green" if factor > 1.02 else "red" if factor < 0.98 else ""
        row = Text.assemble(f"  {name}  {change}  ", (tokens, style), "  " + "  ".join(money))
        row.rstrip()
        if row.cell_len > out.width:  # what does not go into a line goes into two
            indented(out, f"{cells[0]}: {cells[1]}", style="")
            row = Text.assemble("    ", (tokens, style), "  " + "  ".join(money))
        out.print(row, style="dim" if each is None else "", no_wrap=True)
        if each is not None:
            for line in textwrap.wrap(each.crossover, out.width - 4):
                out.print("    " + line, style="dim", no_wrap=True)


def _lever_cells(each: Lever) -> tuple[str, ...]:
    factors = ("" if factor is None else f"{factor:.2f}x" for factor in (each.factor, each.usd_factor))
    return (each.name, each.change, *factors, "" if each.usd_per_mtok is None else format_digits_usd(each.usd_per_mtok))


def _sources(out: Console, answer: ServingAnswer) -> None:
    title(out, "Sources")
    for source in answer.sources:
        indented(out, source)
