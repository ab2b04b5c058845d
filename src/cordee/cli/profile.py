"""`cordee profile`: where the time of GPUs went, by the files of PyTorch's profiler; compared with the plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn

from cordee.cli import terminal
from cordee.cli.plan_more import write_page
from cordee.cli.profile_plan import PlanFlags, find_profiles, planned_by_flags, planned_job
from cordee.cli.profile_text import print_profile
from cordee.errors import CatalogueError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.planning import home_gpus
from cordee.telemetry.profile import (
    KernelTable,
    RankReport,
    account,
    compare,
    compare_with_plan,
    efficiency,
    load_kernels,
    read_profile,
    skew,
)
from cordee.telemetry.profile.answer import ProfileAnswer
from cordee.telemetry.profile.document import profile_document

Files = Annotated[
    list[Path] | None,
    typer.Argument(help="Profiles, one for each rank: .json or .json.gz.", show_default="those of --job"),
]
Kernels = Annotated[Path | None, typer.Option(help="TOML file of kernel classes, tried before the built-in ones.")]
Base = Annotated[list[Path] | None, typer.Option(help="Compare with this profile; repeat for each rank.")]
RankNumber = Annotated[int | None, typer.Option("--rank", help="Rank to show in full.", show_default="the straggler")]
Flop = Annotated[float | None, typer.Option(min=0, help="FLOPs of the model in one step on one GPU, for MFU: 2.1e15.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Number of steps in the profile.", show_default="the marked ones")
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="GPU whose peak FLOP/s MFU divides by.", show_default="the profile's")
]
Precision = Annotated[str, typer.Option(help="Precision whose peak FLOP/s MFU divides by: bf16, fp16, fp32 or fp8.")]
PlanModel = Annotated[str | None, typer.Option("--plan", help="Compare with the plan of this model.")]
Gpus = Annotated[str | None, typer.Option(help="With --plan: GPUs of the job, 64xH100.")]
JobName = Annotated[
    str | None, typer.Option("--job", help="Compare with the plan of this job; without files, read the job's profile.")
]
LayoutText = Annotated[str | None, typer.Option(help="With --plan: layout, tp=8,pp=2.")]
Seq = Annotated[int | None, typer.Option(help="With --plan: tokens in a sequence.")]
Batch = Annotated[int | None, typer.Option(help="With --plan: sequences in a step, over all GPUs.")]
MicroBatch = Annotated[int | None, typer.Option(help="With --plan: sequences in a micro-batch.")]
Top = Annotated[int, typer.Option(min=1, help="Number of kernels and gaps to list.")]


def profile(
    files: Files = None,
    *,
    job: JobName = None,
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
    html: terminal.Html = None,
    home: terminal.Home = None,
    as_json: terminal.Json = False,
) -> None:
    """Break down the time of each rank (compute, hidden and exposed communication, idle), and name stragglers."""
    planned = planned_by_flags(PlanFlags(plan, gpus, layout, precision, seq, batch, micro_batch))
    if job is not None:
        if planned is not None:
            raise SpecError("--job and --plan both name a plan", hint="remove one of them")
        found = planned_job(job, home)
        planned, files = found.planned, files or find_profiles(found)
    if not files:
        raise SpecError("no profile was given", hint="give the files, or add --job JOB")
    table = load_kernels(kernels)
    reports = _reports(files, table)
    before = _reports(base, table) if base else []
    flop = flop_per_step if flop_per_step is not None or planned is None else planned.flop_per_step
    peak = _peak(gpu or (planned.gpu if planned else None), precision, reports)
    waits = skew(reports)
    answer = ProfileAnswer(
        reports=reports,
        shown=_shown(
            reports, rank, waits.ranks.index(max(waits.ranks, key=lambda each: each.caused_us)) if waits else 0
        ),
        efficiency=[efficiency(each, flop, peak, steps) for each in reports],
        skew=waits,
        compared=compare(before, reports) if before else None,
        base=[path.name for path in base or ()],
        planned=planned,
        against=compare_with_plan(reports, planned.step, steps) if planned else None,
        top=top,
    )
    if html is not None:
        from cordee.telemetry.profile.page import profile_page

        write_page(html, profile_page(answer))
    if as_json:
        terminal.print_json(profile_document(answer))
    else:
        print_profile(answer)


def _reports(paths: Sequence[Path], table: KernelTable) -> list[RankReport]:
    """Return the reports of all files by rank; a file without operations is an error only if all files are."""
    found: list[RankReport] = []
    empty = []
    for order, path in enumerate(paths):
        size_bytes = path.stat().st_size if path.exists() else 0
        with terminal.progress(path.name[:32], size_bytes, DownloadColumn()) as progress:
            read = read_profile(path, table.categories, progress)
        reports = account(read, table, order)
        found += reports
        if not reports:
            defects = "; ".join(f"{defect.count:,} {defect.kind}" for defect in read.defects)
            empty.append(f"{path.name} ({read.events:,} events{'; ' + defects if defects else ''})")
    if empty:
        message = f"no kernel, operator or slice in {', '.join(empty)}"
        if not found:
            raise SpecError(message, hint="check the schedule of torch.profiler: it exports its last active cycle")
        terminal.stderr().print(f"warning: {message}", highlight=False, markup=False)
    found.sort(key=lambda report: report.rank)
    labels = [report.label for report in found]
    # Two files of one rank, as of two runs, are distinguished by their names.
    return [
        replace(report, label=f"{report.label} of {report.source}") if labels.count(report.label) > 1 else report
        for report in found
    ]


def _shown(reports: Sequence[RankReport], rank: int | None, straggler: int) -> int:
    """Return the place of the rank that is shown in full."""
    if rank is None:
        return straggler
    places = [at for at, report in enumerate(reports) if report.rank == rank]
    if not places:
        there = ", ".join(str(report.rank) for report in reports)
        raise SpecError(f"--rank {rank}: no such rank", hint=f"the profiles have ranks {there}")
    return places[0]


def _peak(name: str | None, precision: str, reports: Sequence[RankReport]) -> float | None:
    """Return the FLOP/s of the named GPU, or of the profile's if the catalogue has it."""
    catalogue = load_catalogue(gpu_files=home_gpus())
    if name is not None:
        return catalogue.find_gpu(name).peak_flop_per_s(precision)
    profiled = next((report.gpu for report in reports if report.gpu), None)
    try:
        return None if profiled is None else catalogue.find_gpu(profiled).peak_flop_per_s(precision)
    except CatalogueError:
        return None
