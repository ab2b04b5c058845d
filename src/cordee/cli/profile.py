"""`cordee profile`: where the time of GPUs went, by the files of PyTorch's profiler; compared with the plan."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cordee.cli import terminal
from cordee.cli.plan_more import write_page
from cordee.cli.profile_json import profile_json
from cordee.cli.profile_text import Answer, Planned, print_answer
from cordee.errors import CatalogueError, DoesNotFitError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan import Request, Settings, ask
from cordee.plan.wanted import layout_wanted
from cordee.telemetry.profile import (
    KernelTable,
    RankReport,
    account,
    against_plan,
    compare,
    efficiency,
    load_kernels,
    read_profile,
    skew,
)
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape

Files = Annotated[list[Path], typer.Argument(help="Profiles, .json or .json.gz: one of each rank.")]
Kernels = Annotated[Path | None, typer.Option(help="Your own classes of kernels, TOML; they come before ours.")]
Base = Annotated[list[Path] | None, typer.Option(help="Compare with this profile; again for each of its ranks.")]
RankNumber = Annotated[
    int | None, typer.Option("--rank", help="The rank that is told in full.", show_default="the one waited for most")
]
Flop = Annotated[float | None, typer.Option(min=0, help="The model's FLOPs in a step on one GPU, for MFU: 2.1e15.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps in the profile.", show_default="by the profiler's marks")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="Whose peak counts.", show_default="what the profile says")]
Precision = Annotated[str, typer.Option(help="bf16, fp16, fp8, ...: which peak.")]
PlanModel = Annotated[str | None, typer.Option("--plan", help="Compare with the plan of this model.")]
Gpus = Annotated[str | None, typer.Option(help="--plan: the job's GPUs, 64xH100.")]
LayoutText = Annotated[str | None, typer.Option(help="--plan: the layout, tp=8,pp=2.")]
Seq = Annotated[int | None, typer.Option(help="--plan: tokens in a sequence.")]
Batch = Annotated[int | None, typer.Option(help="--plan: sequences in a step, over all GPUs.")]
MicroBatch = Annotated[int | None, typer.Option(help="--plan: sequences in a micro-batch.")]
Top = Annotated[int, typer.Option(min=1, help="Kernels and gaps that are listed.")]
Html = Annotated[Path | None, typer.Option(help="Write the whole as one page.")]


def profile(
    files: Files,
    *,
    kernels: Kernels = None,
    base: Base = None,
    rank: RankNumber = None,
    flop_per_step: Flop = None,
    steps: Steps = None,
    gpu: GpuName = None,
    precision: Precision = "bf16",
    plan: PlanModel = None,
    gpus: Gpus = None,
    layout: LayoutText = None,
    seq: Seq = None,
    batch: Batch = None,
    micro_batch: MicroBatch = None,
    top: Top = 8,
    html: Html = None,
    as_json: terminal.Json = False,
) -> None:
    """Say where each rank's time went: computing, communicating, exposed, waiting, idle; and whose fault it was."""
    if plan is None and (gpus or layout or seq or batch or micro_batch):
        raise SpecError("--gpus, --layout, --seq, --batch and --micro-batch are the plan's", hint="add --plan MODEL")
    table = load_kernels(kernels)
    planned = _planned(plan, gpus, layout, precision, seq=seq, batch=batch, micro_batch=micro_batch)
    reports = _reports(files, table)
    before = _reports(base, table) if base else []
    flop = flop_per_step if flop_per_step is not None or planned is None else planned.flop_per_step
    peak = _peak(gpu or (planned.gpu if planned else None), precision, reports)
    waits = skew(reports)
    answer = Answer(
        reports=reports,
        shown=_shown(
            reports, rank, waits.ranks.index(max(waits.ranks, key=lambda each: each.caused_us)) if waits else 0
        ),
        efficiency=[efficiency(each, flop, peak, steps) for each in reports],
        skew=waits,
        compared=compare(before, reports) if before else None,
        base=[path.name for path in base or ()],
        planned=planned,
        against=against_plan(reports, planned.step, steps) if planned else None,
        top=top,
    )
    if html is not None:
        from cordee.cli.profile_page import profile_page

        write_page(html, profile_page(answer))
    if as_json:
        print(json.dumps(profile_json(answer), indent=2))
    else:
        print_answer(answer)


def _reports(paths: Sequence[Path], table: KernelTable) -> list[RankReport]:
    """Of all files, by rank; a file in which nothing ran is an error only if no other has anything."""
    found: list[RankReport] = []
    empty = []
    for order, path in enumerate(paths):
        with _bar(path) as progress:
            read = read_profile(path, table.categories, progress)
        reports = account(read, table, order)
        found += reports
        if not reports:
            faults = "; ".join(f"{fault.count:,} {fault.kind}" for fault in read.faults)
            empty.append(f"{path.name} ({read.events:,} events{'; ' + faults if faults else ''})")
    if empty:
        told = f"nothing ran in {', '.join(empty)}: no kernel, no operator, no slice of time"
        if not found:
            raise SpecError(told, hint="was the profiler running? torch.profiler exports what its last cycle saw")
        terminal.stderr().print(f"warning: {told}", highlight=False, markup=False)
    found.sort(key=lambda report: report.rank)
    labels = [report.label for report in found]
    # Two files of one rank, say of two runs, are told apart by their names.
    return [
        replace(report, label=f"{report.label} of {report.source}") if labels.count(report.label) > 1 else report
        for report in found
    ]


@contextmanager
def _bar(path: Path) -> Iterator[Callable[[int], None] | None]:
    """How far the file is read, on terminals only."""
    if not sys.stderr.isatty() or not path.exists():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal.stderr(), transient=True) as shown:
        task = shown.add_task(path.name[:32], total=path.stat().st_size)
        yield lambda done: shown.update(task, completed=done)


def _shown(reports: Sequence[RankReport], rank: int | None, straggler: int) -> int:
    """The place of the rank that is told in full."""
    if rank is None:
        return straggler
    places = [at for at, report in enumerate(reports) if report.rank == rank]
    if not places:
        there = ", ".join(str(report.rank) for report in reports)
        raise SpecError(f"--rank {rank}: no such rank", hint=f"the profiles are of rank {there}")
    return places[0]


def _peak(name: str | None, precision: str, reports: Sequence[RankReport]) -> float | None:
    """FLOP/s of the GPU that was named, or of the one that the profile names if it is known."""
    catalogue = load_catalogue()
    if name is not None:
        return catalogue.find_gpu(name).peak_flop_per_s(precision)
    told = next((report.gpu for report in reports if report.gpu), None)
    try:
        return None if told is None else catalogue.find_gpu(told).peak_flop_per_s(precision)
    except CatalogueError:
        return None


def _planned(
    model: str | None, gpus: str | None, layout: str | None, precision: str, *, seq: int | None, batch: int | None,
    micro_batch: int | None,
) -> Planned | None:  # fmt: skip
    """The plan of the layout that was profiled.

    Raises:
        DoesNotFitError: the plan says that it cannot have run so.
    """
    if model is None:
        return None
    if gpus is None:
        raise SpecError(f"--plan {model}: on which GPUs did it run", hint="add --gpus 64xH100, and --layout tp=8,pp=2")
    count, kind = parse_gpus(gpus)
    if kind is None:
        raise SpecError(f"--gpus {gpus} names no GPU", hint="write --gpus 64xH100")
    if precision not in ("bf16", "fp16", "fp32", "fp8"):
        raise SpecError(f"--precision {precision} is not planned", hint="bf16, fp16, fp32 or fp8")
    shape, chip = load_shape(model), load_catalogue().find_gpu(kind)
    settings = Settings(seq_tokens=seq, global_batch=batch, precision=precision)  # type: ignore[arg-type]
    wanted = layout_wanted(layout, None, micro_batch)
    found = ask(Request(shape=shape, gpu=chip, gpus=count, settings=settings, layout=wanted))
    best = found.best
    if best is None or best.step is None:
        raise DoesNotFitError(f"the plan has no layout of {model} on {gpus} that fits", hint="`cordee plan` says why")
    training = found.training
    flop = shape.train_flop_per_token(training.seq_tokens) * training.tokens_per_step / count
    return Planned(shape.name, count, chip.name, best.layout.mesh, best.step, best.mfu, float(flop))
