"""Answers in a terminal that are printed when asked for: why not, longest contexts, a run, rent or buy, the curve."""

import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, print_energy, print_plan, print_sources, title
from cordee.errors import DestinationError
from cordee.hardware.catalog import Gpu, Price
from cordee.plan.ask import Answer
from cordee.plan.cost import TrainingRun, hold_usd, storage_usd_per_month
from cordee.plan.curve import WORTH, Curve
from cordee.plan.iteration import RolloutPlan
from cordee.plan.launch import Launch
from cordee.plan.longest import LongestContext
from cordee.plan.rent_or_buy import Comparison
from cordee.plan.why import Why
from cordee.units import format_bytes, format_count, format_duration, format_gb, format_whole_usd, plural
from cordee.workload.model import ModelShape


def print_plan_and_more(answer: Answer, *, show_all: bool) -> None:
    """Print the plan and what was asked beyond it; the sources come last."""
    out = console()
    if answer.why is not None:
        _why(out, answer.why)
        return
    print_plan(out, answer, show_all=show_all)
    if answer.rollouts is not None:
        _rollouts(out, answer.rollouts, answer.request.price)
    if answer.longest_contexts:
        _longest(out, answer.longest_contexts)
    if answer.run is not None:
        _run(out, answer.run, answer)
    print_energy(out, answer)
    if answer.rent_or_buy is not None:
        _own(out, answer.rent_or_buy)
    print_sources(out, answer)
    out.print()
    out.print(answer.summary, style="bold")


def _rollouts(out: Console, made: RolloutPlan, price: Price | None) -> None:
    """Print one iteration of GRPO: its parts in their order, and what limits the completions at once."""
    title(out, "One iteration of GRPO", f"{made.completions:,} completions")
    where = f"on {made.gpus} of {plural(made.all_gpus, 'GPU')}" if made.apart else "on the same GPUs"
    engines = f"{plural(made.replicas, 'engine')} of {made.engine} {where}, {made.concurrent:,} at once in each"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    parts = [("completions", made.generate_s, engines)]
    if made.reference_s:
        parts.append(("log probabilities", made.reference_s, "passes without gradients: the reference, the old policy"))
    parts += [
        ("updates", made.update_s, plural(made.trainers, "GPU")),
        ("weights", made.weights_s, "to the engine, in 16 bits"),
    ]
    whole = "the longer side and the weights" if made.overlap else "all of them, one after another"
    if price is not None:
        usd = 1000 * hold_usd(made.all_gpus, made.iteration_s, price.usd_per_gpu_hour)
        whole += f"; {format_whole_usd(usd)} a thousand"
    for name, seconds, note in [*parts, ("iteration", made.iteration_s, whole)]:
        table.add_row(f"  {name}", f"{seconds:,.1f} s", note)
    out.print(table)
    cache = f"The cache of an engine holds {made.kv_tokens:,} tokens; a GPU has {format_gb(made.engine_bytes)} in use."
    idle = f" GPUs wait {made.idle_fraction:.0%} of the time for the other side." if made.apart else ""
    indented(out, cache + idle)


def print_launch(launch: Launch, plan: Answer, model_path: str | None) -> None:
    """Print the settings, to be put into a file, and on standard error what has to be said of them.

    `model_path` is where the model was read, None for one of the catalogue: a job's YAML names it so.
    """
    name = f"  name: {plan.request.shape.name}\n"
    print(launch.text if model_path is None else launch.text.replace(name, f"  config: {model_path}\n", 1))
    best = plan.best
    assert best is not None, "what does not fit is not launched"
    notes = [f"layout {launch.layout}"]
    if launch.layout != str(best.layout):
        notes.append(f"{best.layout} is faster, but {launch.launcher} cannot run it as planned")
    notes += [f"not as planned: {each}" for each in launch.cannot]
    for each in (*notes, *launch.notes):
        print(f"note: {each}", file=sys.stderr)


def print_curve(curve: Curve, shape: ModelShape, gpu: Gpu) -> None:
    """Print tokens a second of each size, the part of it that added GPUs bring, and the knee."""
    out = console()
    training = curve.training
    out.print(
        Text.assemble(
            (shape.name, "bold"), f" on {curve.points[0].gpus} to ", (f"{curve.points[-1].gpus} x {gpu.name}", "bold")
        )
    )
    out.print(
        f"sequences of {training.seq_tokens:,} tokens, {training.global_batch:,} in a step whatever the size, "
        f"{training.precision}, {training.optimizer.name}",
        style="dim",
    )
    most = max((point.tokens_per_s or 0.0 for point in curve.points), default=0.0)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  GPUs", justify="right", no_wrap=True)
    bars = max(8, min(40, out.width - 70))
    table.add_column("tokens/s", no_wrap=True, min_width=bars)
    for name in ("", "each added", "MFU", "$/1B tok"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    ascii_only = not out.encoding.lower().startswith("utf")
    for point in curve.points:
        found = point.candidate
        if found is None or point.tokens_per_s is None or point.added_fraction is None or found.mfu is None:
            table.add_row(f"  {point.gpus}", "", "", "", "", "", Text("no layout fits", "red"))
            continue
        bar = max(1, round(bars * math.log2(1 + point.tokens_per_s) / math.log2(1 + most)))
        knee = curve.knee is not None and point.gpus == curve.knee.gpus
        price = found.usd_per_billion_tokens
        table.add_row(
            f"  {point.gpus}",
            Text(("#" if ascii_only else "▓") * bar, "bold" if knee else "green"),
            format_count(point.tokens_per_s),
            f"{point.added_fraction:.0%}",
            f"{found.mfu:.0%}",
            "" if price is None else format_whole_usd(price),
            Text(f"{found.layout}{'  <- knee' if knee else ''}", "bold" if knee else ""),
        )
    title(out, "Scaling", "bars are logarithmic; each added GPU relative to the best size")
    out.print(table)
    out.print()
    indented(out, _knee(curve), style="")


def _knee(curve: Curve) -> str:
    first = "" if curve.smallest is None else f"The smallest size that fits is {plural(curve.smallest.gpus, 'GPU')}. "
    if curve.knee is None:
        return f"{first}There is no knee: every added GPU adds more than {WORTH:.0%} of the best throughput per GPU."
    return (
        f"{first}The knee is at {plural(curve.knee.gpus, 'GPU')}: beyond it an added GPU adds less than {WORTH:.0%} of "
        "the best throughput per GPU."
    )


def _why(out: Console, why: Why) -> None:
    title(out, f"Why not {why.asked}", why.ground)
    indented(out, why.message, style="")
    if why.hint:
        indented(out, why.hint)


def _longest(out: Console, longest: tuple[LongestContext, ...]) -> None:
    title(out, "Longest context", "micro-batches of one sequence, at most twice as many as pipeline stages")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  layout", no_wrap=True)
    for name in ("surely", "probably", "fullest GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in longest:
        peak = format_gb(found.peak_bytes) if found.seq_tokens else "none"
        table.add_row(f"  {found.layout}", f"{found.sure_seq_tokens:,}", f"{found.seq_tokens:,}", peak)
    out.print(table)
    indented(out, "surely: it fits at the upper end of the plan's interval; probably: as planned, with this peak")
    indented(out, f"The model supports {longest[0].positions:,} positions.")


def _run(out: Console, run: TrainingRun, answer: Answer) -> None:
    title(out, f"Training on {format_count(run.tokens)} tokens", answer.request.capacity)
    cost = "" if run.usd is None else f", {format_whole_usd(run.usd)}"
    out.print(f"  {plural(run.steps, 'step')}, {format_duration(run.run_s)}, {run.gpu_hours:,.0f} GPU-hours{cost}")
    kept = answer.survival
    saves = int(run.run_s / kept.period_s)
    lines = [
        f"this includes a goodput of {kept.goodput:.1%}"
        + ("" if run.usd_lost is None else f": {format_whole_usd(run.usd_lost)} pays for time that is not useful")
    ]
    two, all_bytes = 2 * kept.checkpoint_bytes, saves * kept.checkpoint_bytes
    lines.append(
        f"{saves:,} checkpoints; the last two kept cost {format_whole_usd(storage_usd_per_month(two))} a month, "
        f"all of them ({format_bytes(all_bytes)}) {format_whole_usd(storage_usd_per_month(all_bytes))}"
    )
    for line in lines:
        indented(out, line)


def _own(out: Console, own: Comparison) -> None:
    assumed = own.assumed
    title(out, "Rent or buy", f"{plural(assumed.gpus, 'GPU')}, needed {assumed.busy_fraction:.0%} of the time")
    indented(out, own.verdict, style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  over its life", no_wrap=True)
    for name in ("at once", "a month", f"{assumed.life_years:g} years"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("  rent", "", format_whole_usd(assumed.rent_usd_per_month), format_whole_usd(own.rent_usd))
    table.add_row(
        "  own",
        format_whole_usd(assumed.purchase_usd),
        format_whole_usd(assumed.running_usd_per_month),
        format_whole_usd(own.own_usd),
    )
    out.print(table)
    indented(
        out,
        f"Owned, a used GPU-hour costs {format_whole_usd(own.own_usd_per_gpu_hour)}; "
        f"rented {format_whole_usd(assumed.rent_usd_per_gpu_hour)}.",
    )
    if own.break_even_busy_fraction is not None:
        indented(out, f"Both cost the same if the GPUs are needed {own.break_even_busy_fraction:.0%} of the time.")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  break-even month if this is", no_wrap=True)
    for name in ("a fifth less", "as assumed", "a fifth more"):
        table.add_column(name, justify="right", no_wrap=True)
    for swing in own.swings:
        months = (swing.low_month, own.break_even_month, swing.high_month)
        table.add_row(
            f"  {swing.name} = {swing.value:g}", *("never" if month is None else str(month) for month in months)
        )
    out.print(table)


def write_page(path: Path, page: str) -> None:
    """Write the page and say so beside the output.

    Raises:
        DestinationError: it cannot be written there.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        hint = "give a path in a folder that exists"
        raise DestinationError(f"{path} cannot be written: {error.strerror}", hint=hint) from None
    print(f"note: written to {path}", file=sys.stderr)
