"""The answer in a terminal: state, layouts against the GPU's memory, survival, sources.

Sections that are printed only when asked for are in `plan_more.py`.
"""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cordee.hardware.power import EnergyUse
from cordee.plan.ask import Answer
from cordee.plan.candidates import Candidate
from cordee.plan.cost import egress_usd, storage_usd_per_month
from cordee.plan.layout import Layout
from cordee.plan.memory import outer_parameters
from cordee.plan.memory_interval import residuals_of
from cordee.plan.stages import stage_in_words
from cordee.plan.states import all_adapter_parameters, reference_bytes, trained_parameters
from cordee.plan.survive import Survival
from cordee.plan.training import Adapters, Frozen, Training
from cordee.units import (
    GiB,
    format_bytes,
    format_count,
    format_duration,
    format_gb,
    format_kg,
    format_whole_usd,
    plural,
)
from cordee.view.memory import LIMIT, PARTS, MemoryBar, full_scale_bytes, memory_cells
from cordee.workload.model import ModelShape

SHOWN = 8
PIPED_WIDTH = 100
NARROWEST = 20
NARROWEST_BAR = 11
WIDEST_FOLDED = 26
TIGHT = "*"
LARGE_LOSS = 1 / 3  # of the peak, at which another loss is proposed
COLOURS = {
    "weights": "blue",
    "gradients": "green",
    "optimizer": "magenta",
    "activations": "yellow",
    "other": "bright_black",
    "limit": "bold",
}
STAGES_LISTED = 8  # one by one
WORDS = {  # words of a layout that are no axis of the mesh, by their beginnings
    "vpp": "{} chunks a rank",
    "mb": "micro-batches of {} sequences",
    "split=": "stages of {} layers",
    "full": "full recomputation",
}


def print_plan(out: Console, answer: Answer, *, show_all: bool) -> None:
    """Print the state, the layouts, the best one's memory, and what interruptions cost if anything fits."""
    print_header(out, answer)
    _state(out, answer)
    _layouts(out, answer, show_all)
    _waterfall(out, answer)
    if answer.fits:
        _survival(out, answer)


def console() -> Console:
    """Return standard output, with a width of its own where it is a pipe."""
    terminal = Console(highlight=False)
    if terminal.is_terminal:
        return terminal
    # A pipe has no width of its own, unless COLUMNS says so: wide enough for every table.
    columns = os.environ.get("COLUMNS", "")
    return Console(highlight=False, width=max(NARROWEST, int(columns)) if columns.isdecimal() else PIPED_WIDTH)


def title(out: Console, text: str, aside: str = "") -> None:
    """Print a heading, with a note beside it."""
    out.print()
    out.print(Text.assemble((text, "bold"), ("  " + aside if aside else "", "dim")))


def print_header(out: Console, plan: Answer) -> None:
    """Print the model, the GPUs and the training."""
    training, gpu = plan.training, plan.request.gpu
    where = f"{plan.request.gpus} x {gpu.name}"
    each = f" of {format_bytes(gpu.memory_bytes)}"
    if gpu.visible_bytes != gpu.memory_bytes:  # a vendor's GB are GiB, less what the driver keeps
        each += f" (CUDA shows {gpu.visible_bytes / GiB:.1f} GiB = {format_gb(gpu.visible_bytes)})"
    out.print(Text.assemble((plan.request.shape.name, "bold"), " on ", (where, "bold"), each))
    out.print(settings_in_words(plan.request.shape, training), style="dim")


def settings_in_words(shape: ModelShape, training: Training) -> str:
    """Return the sequences, the batch, and what is trained how."""
    return (
        f"sequences of {training.seq_tokens:,} tokens, {training.global_batch:,} in a step "
        f"({format_count(training.tokens_per_step)} tokens), {training.precision}, {training.optimizer.name}"
        + _adapters_in_words(training, has_experts=shape.experts is not None)
        + _tuning_in_words(training)
    )


def _state(out: Console, plan: Answer) -> None:
    gpus = plan.request.gpus
    title(out, "State")
    if plan.training.adapters is None:
        _trained_state(out, plan)
    else:
        _adapter_state(out, plan, plan.training.adapters)
    copy = float(reference_bytes(plan.request.shape, Layout(), plan.training, 0))
    if copy:
        out.print(Text.assemble("  and a frozen copy as the reference ", (format_bytes(copy), "bold")))
    have = format_bytes(gpus * plan.request.gpu.visible_bytes)
    hold = plural(plan.fewest_gpus_to_hold, "GPU")
    if plan.request.gpu.whole is not None:  # a MIG instance, of which a job has one
        hold = plural(plan.fewest_gpus_to_hold, "such instance")
    fewest = plan.fewest_gpus_to_train
    train = "" if fewest is None else f"; {fewest[0]} is the fewest tried that trains it ({_in_words(fewest[1])})"
    has = plural(gpus, "GPU has", "GPUs have")
    indented(out, f"needs at least {hold} for its state{train}; {has} {have}", style="")


def _adapters_in_words(training: Training, *, has_experts: bool) -> str:
    adapters = training.adapters
    if adapters is None:
        return ""
    kind = "adapters with magnitudes (DoRA)" if adapters.magnitudes else "adapters"
    base = f"{adapters.base_bits}-bit base" + ("" if adapters.base_bits in (4, 16) else f" ({adapters.base.name})")
    words = f", {kind} of rank {adapters.rank} on {', '.join(adapters.targets)} over a {base}"
    return words + ", experts in 16 bits" * (has_experts and adapters.base_bits < 16)


def _tuning_in_words(training: Training) -> str:
    frozen, packed = training.tuning.frozen, training.tuning.packed_tokens
    parts = [] if frozen is None else _frozen_in_words(frozen)
    words = f", {', '.join(parts)} frozen" if parts else ""
    words += f", documents of {packed:,} tokens" if packed else ""
    words += ", updated in the backward pass" if training.optimizer.in_backward else ""
    stage = training.tuning.stage
    return words if stage is None else f"{words}, {stage_in_words(stage, training.adapters)}"


def _frozen_in_words(frozen: Frozen) -> list[str]:
    ends = [name for name, is_frozen in (("embeddings", frozen.embeddings), ("head", frozen.head)) if is_frozen]
    return [*ends, *([plural(len(frozen.layers), "layer")] if frozen.layers else [])]


def _adapter_state(out: Console, plan: Answer, adapters: Adapters) -> None:
    """Print the frozen weights and what is trained of a model with adapters."""
    shape, optimizer = plan.request.shape, plan.training.optimizer
    trained = all_adapter_parameters(shape, adapters)
    each = trained * optimizer.bytes_per_parameter
    frozen = f"{shape.parameters:,} frozen parameters = {format_bytes(plan.state_bytes - each)}"
    product = f"{trained:,} of adapters x {optimizer.bytes_per_parameter:g} bytes = {format_bytes(each)}"
    out.print(f"  {frozen}")
    out.print(Text.assemble(f"  {product}; together ", (format_bytes(plan.state_bytes), "bold")))


def _trained_state(out: Console, plan: Answer) -> None:
    optimizer, shape = plan.training.optimizer, plan.request.shape
    outer = outer_parameters(shape) if optimizer.outer_extra_bytes else 0
    product = f"{shape.parameters - outer:,} parameters x {optimizer.bytes_per_parameter:g} bytes"
    if plan.training.tuning.frozen is not None:
        own = trained_parameters(shape, Layout(), plan.training, 0)
        outer, trained = round(float(own.outer)) if outer else 0, round(float(own.dense))
        frozen = f"{shape.parameters - trained:,} frozen x {plan.training.activation_bytes} bytes"
        product = f"{frozen} + {trained - outer:,} trained x {optimizer.bytes_per_parameter:g}"
    if outer:
        product += f" + {outer:,} x {optimizer.bytes_per_parameter + optimizer.outer_extra_bytes:g}"
    out.print(Text.assemble(f"  {product} = ", (format_bytes(plan.state_bytes), "bold")))
    wide = plan.training.keeps_fp32
    terms = (
        ("fp32 weights" if wide else "weights", optimizer.master_bytes if wide else optimizer.weight_bytes),
        ("gradients", optimizer.master_bytes if wide else optimizer.gradient_bytes),
        ("fp32 master", 0 if wide else optimizer.master_bytes),
        ("moments", optimizer.moment_bytes),
    )
    out.print("  " + " + ".join(f"{name} {size:g}" for name, size in terms if size), style="dim")
    if shape.experts is not None:
        out.print(f"  {shape.active_parameters:,} of them are active for one token", style="dim")


def _in_words(layout: Layout) -> str:
    """Return a layout for a sentence: commas, and full recomputation in words."""
    words = str(layout).split()
    recomputes = ["full recomputation"] if "full" in words else []
    return ", ".join([" ".join(word for word in words if word != "full"), *recomputes])


def _layouts(out: Console, plan: Answer, show_all: bool) -> None:
    fitting = plan.fitting if show_all else plan.fitting[:SHOWN]
    rejected = plan.rejected if show_all else plan.rejected[:SHOWN]
    scale = _Scale.of(out, plan, (*fitting, *rejected))
    if fitting:
        title(
            out,
            f"Layouts that fit: {len(plan.fitting)}",
            f"fastest first; best of {plan.layouts.candidates:,} candidates",
        )
        speeds = ("step", "MFU", "tok/s", "$/1B tok")
        table = _table(scale, *(name for name in speeds if name in scale.columns))
        for candidate in fitting:
            table.add_row(*_judged(candidate, scale), *_speed(candidate, scale))
        out.print(table)
        _more(out, len(plan.fitting) - len(fitting))
    if rejected:
        title(out, f"Layouts that do not fit: {len(plan.rejected)}", "nearest first")
        table = _table(scale, "over by")
        for candidate in rejected:
            table.add_row(*_judged(candidate, scale), Text(_over_by(candidate), "red"))
        out.print(table)
        _more(out, len(plan.rejected) - len(rejected))
    out.print(_legend(plan, scale.ascii_only))
    fewest = plan.fewest_gpus_to_train
    layouts = [each.layout for each in (*fitting, *rejected)]
    words = _legend_of_words(layouts if fewest is None else [*layouts, fewest[1]])
    if words:
        indented(out, words)
    if any(each.tight for each in fitting):
        indented(out, _tight_in_words(plan))
    for sentence in (plan.expert_balance, plan.uneven_rows):
        if sentence is not None:
            indented(out, sentence, style="")
    if not plan.fits:
        title(out, "What would fit")
        for remedy in plan.remedies:
            indented(out, str(remedy), style="")
        indented(out, "without --gpus: which kinds of GPU hold it", style="")


def _tight_in_words(plan: Answer) -> str:
    """Explain the mark, and name the layout to take where the fastest one has it."""
    more = residuals_of(plan.training).high
    words = f"{TIGHT} tight: fits as planned, but nine of ten such runs need up to {more:.0%} more"
    best, sure = plan.nearest, plan.sure
    if not best.tight:
        return words
    if sure is None:
        return f"{words}; none fits surely"
    return f"{words}; the fastest that fits surely is {sure.layout}: {format_gb(sure.peak_bytes)}, {sure.step_s:,.1f} s"


def _waterfall(out: Console, plan: Answer) -> None:
    """Print the fullest GPU of the best layout, part by part, against its memory."""
    candidate = plan.nearest
    memory, limit = candidate.memory, candidate.gpu_memory_bytes
    title(out, f"Fullest GPU of {candidate.layout}", f"stage {memory.worst_stage}, at {memory.peak_event}")
    width = max(10, min(50, out.width - 36))
    full = max(limit, candidate.peak_bytes)
    ascii_only = not out.encoding.lower().startswith("utf")
    limit_at = round(limit / full * width)
    done = 0
    for part, size in memory.worst.parts().items():
        if not size:
            continue
        group = next((name for name, (parts, _, _) in PARTS.items() if part in parts), "other")
        start, end = (round(at / full * width) for at in (done, done + size))
        end = min(width, max(end, start + 1))
        start = min(start, end - 1)
        row = Text(f"  {part:<14}{format_gb(size):>9}  ")
        for at in range(width + 1):
            if at == limit_at:
                row.append(_glyph("limit", ascii_only), "bold")
            row.append(_glyph(group, ascii_only) if start <= at < end else " ", COLOURS[group])
        row.rstrip()
        out.print(row)
        done += size
    left = limit - candidate.peak_bytes
    rest = f"{format_gb(left)} free" if left >= 0 else f"over by {format_gb(-left)}"
    out.print(f"  {'total':<14}{format_gb(candidate.peak_bytes):>9}  {rest}", style="" if left >= 0 else "red")
    if memory.worst.loss_bytes > LARGE_LOSS * candidate.peak_bytes and plan.training.loss_kind == "eager":
        indented(out, "--loss chunked (Liger, Unsloth) never has all logits at once: the loss is a small part then")
    low, high = candidate.needed_interval_bytes
    verdict = "tight, the upper end does not fit" if candidate.tight else "all of it fits" if high <= limit else ""
    needed = f"nine of ten such runs need {format_gb(low)} to {format_gb(high)}"
    indented(out, f"{needed}: {verdict}" if verdict else needed, style="yellow" if candidate.tight else "dim")
    if plan.seen_interval_bytes is not None:
        low, high = plan.seen_interval_bytes
        seen = "all of it" if low == limit else f"{format_gb(low)} to {format_gb(high)}"
        indented(out, f"nvidia-smi shows {seen}: torch keeps what it has freed")


@dataclass(frozen=True)
class _Scale:
    """One scale for both tables, so that the GPU's memory is in one line."""

    name_width: int
    bar_width: int
    full_bytes: int
    ascii_only: bool
    columns: frozenset[str]

    @classmethod
    def of(cls, out: Console, plan: Answer, shown: Sequence[Candidate]) -> "_Scale":
        names = max(len("layout"), *(len(str(candidate.layout)) for candidate in shown))
        sizes = max(len(format_gb(candidate.peak_bytes)) for candidate in shown)
        over = max(len(_over_by(candidate)) for candidate in shown)
        # A narrow terminal gives its room to the bars; tokens a second follow from the step.
        widths = {"step": 9, "MFU": 4} | ({"tok/s": 6} if out.width >= 100 else {})
        widths |= {"$/1B tok": 9} if plan.request.price is not None else {}

        def left() -> int:
            # Each column is followed by a space, and names stand two to the right.
            columns = max(sum(width + 1 for width in widths.values()), over + 1)
            return out.width - (names + 3) - (sizes + 1) - columns - 1

        # Long names take the room of tokens a second, then two lines, and only then the room of other columns.
        for name, narrowest in (("tok/s", names), ("", WIDEST_FOLDED), ("MFU", WIDEST_FOLDED), ("$/1B tok", NARROWEST)):
            if left() < NARROWEST_BAR:
                widths.pop(name, None)
                names = min(names, max(narrowest, names + min(0, left() - NARROWEST_BAR)))
        full_bytes = full_scale_bytes([_bar(candidate) for candidate in shown], plan.request.gpu.visible_bytes)
        ascii_only = not out.encoding.lower().startswith("utf")
        return cls(names, max(NARROWEST_BAR, min(60, left())), full_bytes, ascii_only, frozenset(widths))


def _table(scale: _Scale, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True, width=1)
    table.add_column("layout", width=scale.name_width, overflow="fold")
    table.add_column("fullest GPU"[: scale.bar_width], no_wrap=True, min_width=scale.bar_width)
    table.add_column("", justify="right", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _judged(candidate: Candidate, scale: _Scale) -> tuple[Text, str, Text, str]:
    """Return the columns that both tables have."""
    mark = Text(TIGHT if candidate.tight else "", "yellow")
    return mark, str(candidate.layout), _drawn(candidate, scale), format_gb(candidate.peak_bytes)


def _over_by(candidate: Candidate) -> str:
    return f"+{format_gb(candidate.shortfall_bytes)}"


def _bar(candidate: Candidate) -> MemoryBar:
    return MemoryBar(str(candidate.layout), candidate.memory.worst.parts())


def _drawn(candidate: Candidate, scale: _Scale) -> Text:
    drawn = Text()
    for part, cells in memory_cells(_bar(candidate), candidate.gpu_memory_bytes, scale.full_bytes, scale.bar_width):
        drawn.append(_glyph(part, scale.ascii_only) * cells, COLOURS.get(part, ""))
    return drawn


def _glyph(part: str, ascii_only: bool) -> str:
    if part == "limit":
        return LIMIT[ascii_only]
    return PARTS[part][1][ascii_only] if part else " "


def _legend(plan: Answer, ascii_only: bool) -> Text:
    legend = Text("  ")
    for part in PARTS:
        legend.append(_glyph(part, ascii_only), COLOURS[part])
        legend.append(f" {part}  ", "dim")
    legend.append(_glyph("limit", ascii_only), "bold")
    legend.append(f" {format_bytes(plan.request.gpu.visible_bytes)}", "dim")
    return legend


def _legend_of_words(layouts: Sequence[Layout]) -> str:
    """Explain the words of these layouts that are no axis of the mesh, each by the first one that is there."""
    used = " ".join(map(str, layouts)).split()
    first = {begin: next((word for word in used if word.startswith(begin)), "") for begin in WORDS}
    return "; ".join(f"{word}: {WORDS[begin].format(_number(word, begin))}" for begin, word in first.items() if word)


def _number(word: str, begin: str) -> str:
    """Return the number in a word of a layout, or the sizes of the stages that it lists.

    >>> _number("mb4", "mb"), _number("split=27x2-26", "split="), _number("split=3-4x30-3", "split=")
    ('4', '27, 27 and 26', '3, 30 x 4 and 3')
    """
    if begin != "split=":
        return word.removeprefix(begin)
    runs = [each.partition("x") for each in word.removeprefix(begin).split("-")]
    sizes = [layers for layers, _, stages in runs for _ in range(int(stages or 1))]
    if len(sizes) > STAGES_LISTED:
        sizes = [f"{stages} x {layers}" if stages else layers for layers, _, stages in runs]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]}"


def _speed(candidate: Candidate, scale: _Scale) -> list[str]:
    """Return the columns of a layout that fits, as far as there is room."""
    assert candidate.step is not None and candidate.mfu is not None and candidate.tokens_per_s is not None, "it fits"
    dollars = candidate.usd_per_billion_tokens
    cells = {
        "step": f"{candidate.step.total_s:,.1f} s",
        "MFU": f"{candidate.mfu:.0%}",
        "tok/s": format_count(candidate.tokens_per_s),
        "$/1B tok": format_whole_usd(dollars) if dollars is not None else "",
    }
    return [cell for name, cell in cells.items() if name in scale.columns]


def _more(out: Console, hidden: int) -> None:
    if hidden > 0:
        out.print(f"  and {hidden} more (--all)", style="dim")


def _survival(out: Console, plan: Answer) -> None:
    expected_on = plan.expectations
    one = expected_on[0].survival
    each = plan.training.optimizer.checkpoint_bytes_per_parameter
    of = "trained " if plan.training.adapters else ""
    title(out, "Checkpoints and interruptions")
    size, time = format_bytes(one.checkpoint_bytes), format_duration(one.checkpoint_s)
    weight = Text.assemble("a checkpoint is ", (size, "bold"), f" ({each:g} bytes a {of}parameter): ", (time, "bold"))
    weight.append(f" at {format_bytes(plan.request.assumed.storage_bytes_per_s)}/s a node")
    out.print(Padding(weight, (0, 0, 0, 2)))
    times = ", ".join(
        f"{save.level} {format_duration(save.seconds)} (survives {save.survives})" for save in plan.level_saves
    )
    indented(out, f"time to save, assumed: {times}")
    captures = [format_bytes(plan.capture_bytes_per_node(held=held)) for held in (False, True)]
    indented(
        out,
        f"captures take {captures[0]} of a node's host memory; {captures[1]} if kept there as a storage level (ram)",
    )
    if one.upload_s:
        held = format_duration(one.stall_s)
        indented(
            out, f"asynchronous: a save stops the ranks for {held} and is durable {format_duration(one.upload_s)} later"
        )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  capacity", no_wrap=True)
    is_priced = any(on.survival.lost_usd_expected is not None for on in expected_on)
    losses = ("with notice", "expected", "at worst") if is_priced else ()
    for name in ("MTBF", "save every", "goodput", *losses):
        table.add_column(name, justify="right", no_wrap=True)
    for on in expected_on:
        expected = on.survival
        table.add_row(
            f"  {on.capacity}", format_duration(expected.mtbi_s),
            format_duration(expected.period_s), f"{expected.goodput:.1%}", *(_losses(expected) if is_priced else ()),
        )  # fmt: skip
    out.print(table)
    what = "The dollars are the loss by one preemption" if is_priced else "A preemption loses"
    indented(out, f"{what}: with {_notice(plan, one)} only the restart; without, half an interval between saves on "
                  "average, a whole one at worst.")  # fmt: skip
    for on in expected_on:
        expected = on.survival
        if expected.reclaim_mtbi_s is not None:
            enough = "is enough for" if expected.grace_is_enough else "is too short for"
            indented(out, f"{format_duration(expected.grace_s)} of notice {enough} a last checkpoint.")
    rate = plan.survival.usd_per_hour
    if rate is not None:
        hourly, daily = format_whole_usd(rate), format_whole_usd(24 * rate)
        line = f"Without checkpoints a preemption loses all work: {hourly} for each hour run, {daily} for each day."
        indented(out, line, style="")
    stored, gone = storage_usd_per_month(one.checkpoint_bytes), egress_usd(one.checkpoint_bytes)
    indented(
        out,
        f"In S3 a checkpoint costs {format_whole_usd(stored)} a month, and {format_whole_usd(gone)} of egress.",
    )


def _notice(plan: Answer, expected: Survival) -> str:
    """Return the notice that an orderly stop needs: the ranks end their step and write a checkpoint."""
    needed = expected.notice_needed_s
    if plan.best is None or plan.best.step_s is None:
        return f"{format_duration(needed)} of notice (a checkpoint)"
    return f"{format_duration(plan.best.step_s + needed)} of notice (a step and a checkpoint)"


def _losses(expected: Survival) -> list[str]:
    sizes = (expected.lost_usd_with_notice, expected.lost_usd_expected, expected.lost_usd_worst)
    return ["no price" if size is None else format_whole_usd(size) for size in sizes]


def print_energy(out: Console, plan: Answer) -> None:
    """Print what a step and a billion tokens draw and emit, and the whole run if its tokens are known."""
    step = plan.energy
    if plan.no_energy is not None:
        out.print()
        indented(out, plan.no_energy)
    if step is None:
        return
    title(out, "Energy", "at most: boards at their limits")
    unit = "a step" if plan.rollouts is None else "an iteration"
    parts = [f"{unit} {_drawn_in_words(step)}"]
    each = plan.energy_of(1e9 / plan.training.tokens_per_step * step.seconds)
    if plan.rollouts is None and each is not None:
        parts.append(f"a billion tokens {_drawn_in_words(each)}")
    whole = plan.run_energy
    if whole is not None:
        parts.append(f"the run {_drawn_in_words(whole)}")
    indented(out, "; ".join(parts), style="")
    draw, factor = step.draw, step.electricity.building_factor
    indented(out, f"{step.gpus} x ({draw.watts:g} W + {draw.host.watts:g} W of its host) x {factor:g} of the building")


def _drawn_in_words(use: EnergyUse) -> str:
    kwh = f"{use.kwh:,.0f} kWh" if use.kwh >= 100 else f"{use.kwh:.3g} kWh"
    return kwh if use.kg_co2e is None else f"{kwh} = {format_kg(use.kg_co2e)} CO2e"


def print_sources(out: Console, answer: Answer) -> None:
    """Print the sources of prices, rates and speeds."""
    title(out, "Sources")
    gpu = answer.request.gpu
    for on in answer.expectations:
        price = on.price
        what = f"${price.usd_per_gpu_hour:.2f} a GPU-hour: {price.source}" if price else "price unknown: give --prices"
        indented(out, f"{on.capacity} {what}")
    for on in answer.expectations if answer.fits else ():
        indented(out, f"{on.capacity} interruptions: {on.mtbi_source}")
    indented(out, f"{gpu.name}: {gpu.source}")
    if answer.energy is not None:
        for source in answer.energy.sources:
            indented(out, source)
    found = residuals_of(answer.training)
    low = f"{found.low:+.0%}" if found.low else "0%"
    within = f"within {low} and {found.high:+.0%} of their plans"
    indented(out, f"memory: {found.runs} published peaks ({found.source}), nine of ten {within}")
    counted = "MFU counts causal attention once, no recomputation"
    indented(out, f"step time: {gpu.efficiency.source}{answer.nearest.expected}; {counted}")


def indented(out: Console, text: str, style: str = "dim") -> None:
    """Print a paragraph, indented by two spaces."""
    for line in textwrap.wrap(text, max(NARROWEST, out.width) - 2):
        out.print("  " + line, style=style, no_wrap=True)
