"""Calibrations in a terminal: what was reached, by size, and what is kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.text import Text

from cordee.account.drift import WeekOfSteps
from cordee.agent.calibration.check import Checked
from cordee.agent.calibration.files import Kept
from cordee.agent.calibration.session import Calibration
from cordee.agent.calibration.together import Together
from cordee.cli import terminal
from cordee.hardware.catalog import Gpu
from cordee.hardware.measured import SPEED_MOVED, Sample
from cordee.units import US_PER_S, format_bytes, format_duration, format_latency, plural

_SHOWN = (
    ("products", "product {} forward", "flop"),
    ("their gradients", "product {} weight", "flop"),
    ("products in fp8", "product fp8 forward", "flop"),
    ("experts side by side", "grouped {}", "flop"),
    ("attention", "attention {} forward", "flop"),
    ("its gradient", "attention {} backward", "flop"),
    ("copy", "copy {}", "moved"),
    ("softmax", "softmax {} forward", "moved"),
    ("RMS norm, eager", "norm {} forward", "moved"),
    ("gate (SiLU), eager", "gate {} forward", "moved"),
    ("rotation, eager", "rotate {} forward", "moved"),
    ("RMS norm, Triton", "triton-norm {}", "moved"),
    ("softmax, Triton", "triton-softmax {}", "moved"),
    ("scan, Triton", "triton-scan {}", "moved"),
    ("copy, Triton", "triton-copy {}", "moved"),
    ("strided copy, Triton", "triton-strided {}", "moved"),
    ("tiles, Triton", "triton-tile {}", "tile"),
    ("4-bit weights, Triton", "triton-int4 {}", "flop"),
    ("int8 to 16 bits", "dequantise int8 {}", "written"),
    ("NF4 to 16 bits", "dequantise nf4 {}", "written"),
    ("AdamW, fused", "adamw-fused", "each"),
    ("host, an operation", "issue recorded", "each"),
    ("all-reduce", "all-reduce", "sent"),
    ("copies to the device", "to-device pinned", "sent"),
)
_ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    best: str
    at: str
    least: str
    doubt: float


def print_calibration(found: Calibration) -> None:
    """Print what was reached at the best and the smallest size, how well it is known, and where it is kept."""
    out = terminal.stdout()
    marks, how = found.fingerprint, found.quality
    assert how is not None and found.path is not None, "it was written"
    device = marks.get("gpu") or f"{marks.get('cpu', '')}, {plural(int(marks.get('threads', 1)), 'thread')}"
    out.print(Text.assemble((found.name, "bold"), f"  {device}, torch {marks.get('torch', '?')}, {found.precision}"))
    table = terminal.table("", "REACHED", "AT", "LEAST", "KNOWN TO", right=("REACHED", "LEAST", "KNOWN TO"))
    for row in _rows(found):
        table.add_row(row.name, row.best, row.at, row.least, f"{row.doubt:.1%}")
    out.print(table)
    others = ", ".join(f"{each.name} {each.has}" for each in found.others)
    noise = f"{how.points} points, known to {how.doubt:.1%} in the median; load {found.load:.1f}"
    out.print(noise + (f", beside {others}" if others else ""), style="dim", highlight=False)
    for each in found.refused:
        out.print(f"not measured: {each.what}: {each.why}", style="dim", highlight=False)
    for name, value in _numbers(found):
        out.print(f"{name} {value}", style="dim", highlight=False)
    out.print(f"written to {found.path}", highlight=False, soft_wrap=True)
    flag = "" if found.precision == "bf16" else f" --precision {found.precision}"
    out.print(f"plan with it: cordee plan MODEL --gpus here{flag}", highlight=False)


def _rows(found: Calibration) -> Iterator[_Row]:
    for name, table, kind in _SHOWN:
        samples = [each for each in found.samples if each.table == table.format(found.precision)]
        if samples:
            best = max(samples, key=lambda each: each.rate)
            least = min(samples, key=lambda each: each.rate)
            known = sorted(each.doubt for each in samples)[len(samples) // 2]
            shown = (_figure(kind, each, found.precision) for each in (best, least))
            yield _Row(name, next(shown), _at(best, kind), next(shown), known)


def _figure(kind: str, sample: Sample, precision: str) -> str:
    rate = sample.rate
    if kind in ("flop", "tile"):
        return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
    if kind == "each":
        return f"{1e6 / rate:.2f} us" if rate < 1e7 else f"{1e9 / rate:.2f} ns"
    moved = {"moved": 2 * _ITEM[precision], "written": _ITEM[precision], "sent": 1}[kind] * rate
    return f"{format_bytes(moved)}/s"


def _at(sample: Sample, kind: str) -> str:
    sizes = [f"{size:,.0f}" for size in sample.at]
    units = {"moved": " elements", "written": " elements", "sent": " bytes", "tile": " results a tile"}
    unit = units.get(kind, "")
    return " x ".join(sizes) + unit


def _numbers(found: Calibration) -> Iterator[tuple[str, str]]:
    numbers = found.numbers
    yield "memory", f"{format_bytes(numbers['memory_bytes'])}, {format_bytes(numbers['context_bytes'])} of it libraries"
    if numbers.get("repeated_runs") or numbers.get("waited_s"):
        slower, repeated = numbers["slowed_fraction"], plural(round(numbers["repeated_runs"]), "run")
        waited = format_duration(numbers["waited_s"])
        yield "speed", f"a product took up to {slower:.0%} longer for a while: {repeated} repeated, {waited} waited"
    moved = numbers.get("slower_than_before", 0.0)
    if moved > SPEED_MOVED:
        yield "speed", f"a product takes {moved:.0%} longer than in the calibration before: calibrate again later"
    if (earlier := 1 / (1 + moved) - 1) > SPEED_MOVED:
        yield "speed", f"a product took {earlier:.0%} longer in the calibration before: its plans were too slow"
    if "sustained_watts" in numbers:
        watts, mhz = numbers["sustained_watts"], numbers["sustained_mhz"]
        kept = f"{numbers['sustained_fraction']:.0%} of the first rate"
        yield "under load", f"the board draws {watts:,.0f} W at {mhz:,.0f} MHz, and products keep {kept}"
    if "int4_rows" in numbers:
        yield "4-bit weights", f"are faster than 16-bit ones up to {numbers['int4_rows']:.0f} rows (Triton's kernel)"
    if "write_bytes_per_s" in numbers:
        read, write = (f"{format_bytes(numbers[f'{way}_bytes_per_s'])}/s" for way in ("read", "write"))
        yield "storage", f"{write} written and synced, {read} read"


def print_together(found: Together) -> None:
    """Print the rate of each collective by the ranks and nodes that take part, and of storage that all use at once."""
    out, numbers = terminal.stdout(), found.numbers
    ranks, nodes = (plural(round(numbers[f"{name}s_together"]), name) for name in ("rank", "node"))
    out.print(Text.assemble((found.name, "bold"), f"  {ranks} on {nodes}"))
    table = terminal.table("", "AMONG", "REACHED", "AT", "LEAST", "SPREAD", right=("REACHED", "LEAST", "SPREAD"))
    for (name, among), samples in _grouped(found.samples):
        best = max(samples, key=lambda each: each.rate)
        least = min(each.p25_s for each in samples)
        noun = "node" if name.endswith(" nodes") else "rank"
        spread = sorted(each.spread for each in samples)[len(samples) // 2]
        table.add_row(
            name.removesuffix(" nodes"), plural(round(among), noun), f"{format_bytes(best.rate)}/s",
            format_bytes(best.work), format_latency(least), f"{spread:.0%}",
        )  # fmt: skip
    out.print(table)
    if "exposed_fraction" in numbers:
        beside = "a gather and a product at once: {:.0%} of the shorter one is not hidden"
        out.print(beside.format(numbers["exposed_fraction"]), style="dim", highlight=False)
    for way in ("write", "read"):
        if f"node_{way}_bytes_per_s" in numbers:
            usual, late = (format_bytes(numbers[f"node_{way}{each}_bytes_per_s"]) for each in ("", "_p95"))
            node = f"storage, all ranks at once: {way} {usual}/s a node by the median, {late}/s by the 95th percentile"
            out.print(node, style="dim", highlight=False)
    out.print(f"added to {found.path}", highlight=False, soft_wrap=True)


def _grouped(samples: Sequence[Sample]) -> Iterator[tuple[tuple[str, float], list[Sample]]]:
    """Yield samples by collective and by the ranks or nodes that take part, in the order of measuring."""
    for key in dict.fromkeys((each.table, each.at[0]) for each in samples):
        yield key, [each for each in samples if (each.table, each.at[0]) == key]


def print_checked(found: Checked, gpu: Gpu) -> None:
    """Print each part of a step as planned and as measured."""
    out = terminal.stdout()
    batch = f"{plural(found.sequences, 'sequence')} of {found.seq_tokens:,} tokens"
    out.print(Text.assemble((found.model, "bold"), f", {plural(found.layers, 'layer')}, {batch}, on {gpu.name}"))
    table = terminal.table(
        "", "PLANNED", "MEASURED", "OFF BY", "SPREAD", right=("PLANNED", "MEASURED", "OFF BY", "SPREAD")
    )
    for each in found.parts:
        style = "bold" if each is found.step else ""
        times = (format_latency(each.planned_s), format_latency(each.measured_s))
        table.add_row(each.part, *times, f"{each.off:+.1%}", f"{each.spread:.1%}", style=style)
    out.print(table)
    low, high = (format_latency(each) for each in (found.planned_from_s, found.planned_to_s))
    inside = found.planned_from_s <= found.step.measured_s <= found.planned_to_s
    said = f"the plan expects nine of ten steps between {low} and {high}: "
    out.print(said + ("this one is" if inside else "this one is not"), highlight=False)
    if not inside:
        out.print("calibrate again on an idle machine, or see how the model differs from an eager Hugging Face one")


def print_kept(kept: Sequence[Kept]) -> None:
    """Print the calibrations of this machine, each with what has changed since."""
    table = terminal.table("DEVICE", "OF", "CHANGED SINCE", "FILE", folds=("CHANGED SINCE", "FILE"))
    for each in kept:
        changed = Text(", ".join(each.changed), style="yellow") if each.changed else Text("nothing", style="green")
        table.add_row(each.name, each.as_of, changed, str(each.path))
    terminal.stdout().print(table)
    if any(each.changed for each in kept):
        terminal.stdout().print(
            "run cordee calibrate again: plans with a stale table are as good as what has not changed"
        )


def print_history(weeks: Sequence[WeekOfSteps]) -> None:
    """Print measured over planned step times by kind of GPU and week, and which kinds have changed."""
    out = terminal.stdout()
    if not weeks:
        out.print("no job has both planned and measured its step time yet")
        return
    right = ("ATTEMPTS", "MEASURED/PLANNED", "AGAINST BEFORE")
    table = terminal.table("GPU", "WEEK OF", *right, right=right)
    for week in weeks:
        changed = "" if week.changed_by is None else f"{week.changed_by:+.0%}"
        table.add_row(
            week.gpu_name, _day(week), str(week.attempts), f"{week.over_plan:.2f}",
            Text(changed, style="yellow" if week.is_change else ""),
        )  # fmt: skip
    out.print(table)
    newest = {week.gpu_name: week for week in weeks}
    for name, week in newest.items():
        if week.changed_by is not None and week.is_change:
            way = "longer" if week.changed_by > 0 else "shorter"
            out.print(
                f"steps on {name} take {abs(week.changed_by):.0%} {way} than before the week of {_day(week)}: "
                "see cordee doctor, then run cordee calibrate there",
                highlight=False,
            )


def _day(week: WeekOfSteps) -> str:
    return f"{datetime.fromtimestamp(week.from_us // US_PER_S, UTC):%Y-%m-%d}"
