"""`cordee pipeline`: compare pipeline schedules for given pass times; draw, export and rehearse one."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.pipeline_text import print_comparison, print_own
from cordee.cli.plan_more import write_page
from cordee.errors import LayoutError, SpecError, UnitError
from cordee.near import did_you_mean
from cordee.plan.pipeline import (
    SCHEDULES,
    MemoryLimit,
    PassTimes,
    ScheduleTimeline,
    compare,
    table_csv,
    table_of,
    timeline,
    violations,
)
from cordee.plan.pipeline.answer import PipelineAnswer, Rehearsal
from cordee.plan.pipeline.compare import ScheduleComparison
from cordee.plan.pipeline.document import pipeline_document, table_document
from cordee.plan.pipeline.measured import measure, median_passes, overheads, predicted
from cordee.plan.pipeline.page import picture, pipeline_chrome_trace, pipeline_page
from cordee.units import parse_bytes, parse_duration_s

BEST = "best"
RUN_RANKS_MAX, RUN_STEPS = 16, 4
# A bare unit of time is this long when a schedule is rehearsed.
RUN_UNIT_S = 0.1

Ranks = Annotated[int, typer.Option(help="Ranks of the pipeline.")]
MicroBatches = Annotated[int, typer.Option("--microbatches", "--micro-batches", help="Micro-batches in a step.")]
Times = Annotated[
    str,
    typer.Option(
        help="Time of each pass over a rank's layers: f forward, b input gradient, w weight gradient, fb an "
        "overlapped forward and backward; plain numbers or durations."
    ),
]
Latency = Annotated[str, typer.Option(help="Time from a pass to the arrival of its output, in the same unit.")]
Stages = Annotated[str | None, typer.Option(help="Relative sizes of the stages: 1,1,1,1.4.")]
Chunks = Annotated[int, typer.Option(help="Chunks (virtual stages) on a rank, for interleaved 1F1B.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory limit of a rank: 8 (activations), or 60GB with --activation.", show_default="none"),
]
Activation = Annotated[str | None, typer.Option(help="Bytes of one micro-batch's activations on a rank: 2GB.")]
Weights = Annotated[str | None, typer.Option(help="Bytes of a rank's weights and states; DualPipe holds two copies.")]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help="Schedule to draw, write or rehearse; `best`: the one found by the search.",
        show_default="the recommended one",
    ),
]
NoSearch = Annotated[bool, typer.Option("--no-search", help="Skip the search; compare the named schedules only.")]
OwnTable = Annotated[Path | None, typer.Option("--table", help="Check and time your own table: CSV as torch reads it.")]
Svg = Annotated[Path | None, typer.Option(help="Draw the schedule.")]
ChromeTrace = Annotated[
    Path | None, typer.Option(help="Write the schedule's timeline as a Chrome trace, for Perfetto.")
]
Csv = Annotated[Path | None, typer.Option(help="Write the schedule as CSV, for torch's pipeline runtime.")]
Run = Annotated[
    bool, typer.Option("--run", help="Rehearse the schedule on ranks of this machine; passes are timed waits.")
]


def pipeline(
    *,
    ranks: Ranks = 8,
    microbatches: MicroBatches = 20,
    times: Times = "f=1,b=1,w=1",
    latency: Latency = "0",
    stages: Stages = None,
    chunks: Chunks = 2,
    memory: Memory = None,
    activation: Activation = None,
    weights: Weights = None,
    schedule: ScheduleName = None,
    no_search: NoSearch = False,
    table: OwnTable = None,
    html: terminal.Html = None,
    svg: Svg = None,
    chrome_trace: ChromeTrace = None,
    csv: Csv = None,
    run: Run = False,
    as_json: terminal.Json = False,
) -> None:
    """Compare pipeline schedules: step time, bubble, activations held, and the gap to the lower bound."""
    costs, in_seconds = parse_times(times, latency, stages)
    room = parse_room(memory, activation, weights)
    if schedule is not None and schedule not in (*SCHEDULES, BEST):
        raise LayoutError(f"unknown schedule {schedule!r}", hint=did_you_mean(schedule, (*SCHEDULES, BEST)))
    if table is not None:
        if schedule or html or chrome_trace or csv or run:
            raise SpecError(f"--table {table} can be combined with --svg only", hint="remove the other flags")
        _own(table, costs, room, in_seconds, svg, as_json=as_json)
        return
    compared = compare(ranks, microbatches, costs, room=room, chunks=chunks, search=not no_search)
    chosen = _chosen(compared, schedule)
    ran = _rehearse(chosen, costs, in_seconds) if run else None
    answer = PipelineAnswer(compared, chosen, in_seconds, ran)
    if html is not None:
        write_page(html, pipeline_page(answer))
    if svg is not None:
        write_page(svg, picture(chosen, in_seconds))
    if chrome_trace is not None:
        write_page(chrome_trace, pipeline_chrome_trace(answer))
    if csv is not None:
        write_page(csv, table_csv(chosen.table))
    if as_json:
        terminal.print_json(pipeline_document(answer))
    else:
        print_comparison(answer)


def parse_times(times: str, latency: str, stages: str | None) -> tuple[PassTimes, bool]:
    """Parse the pass times of `f=1,b=1,w=1` or `f=12ms,b=13ms,w=9ms,fb=30ms`, and whether they are in seconds.

    Raises:
        UnitError: a part cannot be read, or some are bare numbers and some durations.
        LayoutError: a time that no pass can take.
    """
    parts: dict[str, str] = {}
    for part in times.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in ("f", "b", "w", "fb") or not value.strip() or name.strip() in parts:
            hint = "write f=1,b=1,w=1, and fb=2.6 for a forward and a backward that overlap; or durations: f=12ms,..."
            raise UnitError(f"--times {times}: {part.strip()!r} is not a pass time", hint=hint)
        parts[name.strip()] = value.strip()
    missing = [name for name in ("f", "b", "w") if name not in parts]
    if missing:
        raise UnitError(f"--times {times}: {', '.join(missing)} is missing", hint="write f=1,b=1,w=1")
    bare = {name: _bare(value) for name, value in parts.items()}
    if latency != "0":
        bare["latency"], parts["latency"] = _bare(latency), latency
    in_seconds = all(value is None for value in bare.values())
    if not in_seconds and any(value is None for value in bare.values()):
        mixed = ", ".join(f"{name}={parts[name]}" for name in bare)
        raise UnitError(
            f"{mixed}: some are plain numbers, some durations", hint="write all as numbers, or all as durations"
        )
    read = {name: parse_duration_s(text) if bare[name] is None else bare[name] for name, text in parts.items()}
    depth = tuple(_number(size, "--stages") for size in stages.split(",")) if stages else ()
    return PassTimes(
        read["f"] or 0.0, read["b"] or 0.0, read["w"] or 0.0, read.get("fb"), read.get("latency") or 0.0, depth
    ), in_seconds  # fmt: skip


def _bare(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number(text: str, flag: str) -> float:
    value = _bare(text)
    if value is None:
        raise UnitError(f"{flag}: {text.strip()!r} is not a number", hint="write numbers with commas: 1,1,1,1.4")
    return value


def parse_room(memory: str | None, activation: str | None, weights: str | None) -> MemoryLimit | None:
    """Return the memory limit of a rank in activations.

    Raises:
        UnitError: bytes without the bytes of an activation, or the other way round.
    """
    if memory is None:
        if activation or weights:
            raise UnitError("--activation and --weights need --memory", hint="add --memory 60GB")
        return None
    most = _bare(memory)
    if most is not None:
        if activation or weights:
            raise UnitError(
                f"--memory {memory} counts activations, not bytes", hint=f"write --memory {memory}GB for bytes"
            )
        return MemoryLimit(most)
    size = parse_bytes(memory)
    if activation is None:
        hint = "add --activation, the bytes of one micro-batch on a rank: cordee plan --json has them"
        raise UnitError(f"--memory {memory} is in bytes, but the size of an activation is missing", hint=hint)
    one, copy = parse_bytes(activation), parse_bytes(weights) if weights else 0
    if one <= 0:
        raise UnitError(
            f"--activation {activation} is not a size", hint="give the bytes of one micro-batch on a rank: 2GB"
        )
    if copy >= size:
        raise UnitError(
            f"--weights {weights} leaves nothing of --memory {memory} for activations", hint="use more memory"
        )
    return MemoryLimit((size - copy) / one, copy / one)


def _chosen(compared: ScheduleComparison, schedule: str | None) -> ScheduleTimeline:
    """Return the timeline to show.

    Raises:
        LayoutError: the schedule does not exist for these numbers, or none fits.
    """
    if schedule == BEST:
        if compared.best is None:
            raise LayoutError("no schedule was searched", hint="remove --no-search, or use fewer micro-batches")
        return compared.best.timeline
    if schedule is not None:
        row = next(row for row in compared.rows if row.schedule == schedule)
        if row.timeline is None:
            raise LayoutError(f"{schedule} {row.misfit}")
        return row.timeline
    if compared.choice is not None and compared.choice.timeline is not None:
        return compared.choice.timeline
    if compared.best is not None:
        return compared.best.timeline
    assert compared.room is not None, "without a limit GPipe fits"
    least = min((row.timeline.peak for row in compared.rows if row.timeline is not None), default=0.0)
    raise LayoutError(
        f"no schedule fits: a rank has memory for {compared.room.activations:g} activations, but needs {least:g}",
        hint="use more memory, smaller micro-batches or more ranks",
    )


def _own(
    path: Path, costs: PassTimes, room: MemoryLimit | None, in_seconds: bool, svg: Path | None, *, as_json: bool
) -> None:
    """Check and time the user's own table."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    own = table_of(path.name, rows)
    wrong = violations(own, costs, None if room is None else room.for_placement(own.placement))
    run = None if wrong else timeline(own, costs)
    if svg is not None and run is not None:
        write_page(svg, picture(run, in_seconds))
    if as_json:
        terminal.print_json(table_document(own, wrong, run, costs))
    else:
        print_own(own, wrong, run, costs, in_seconds=in_seconds)
    if wrong:
        raise SystemExit(LayoutError.exit_code)


def _rehearse(chosen: ScheduleTimeline, costs: PassTimes, in_seconds: bool) -> Rehearsal:
    """Run the schedule on real ranks with timed waits; the first half of the steps predicts the second."""
    from cordee.train.pipeline.rehearse import StageModel, rehearse

    table = chosen.table
    if table.placement.ranks > RUN_RANKS_MAX or table.placement.ranks < 2:
        raise LayoutError(f"{table.placement.ranks} ranks cannot be rehearsed", hint=f"use 2 to {RUN_RANKS_MAX}")
    if costs.depth:
        raise LayoutError("--run needs equal stages", hint="remove --stages")
    unit = 1.0 if in_seconds else RUN_UNIT_S
    model = StageModel("waits", costs.forward_s * unit, costs.inner_s * unit, costs.weight_s * unit)
    one = rehearse([table], ranks=table.placement.ranks, stage_model=model, steps=RUN_STEPS)[0]
    half = RUN_STEPS // 2
    over = overheads(table.placement, one.steps[:half])
    prediction = predicted(replace(table, name=f"{table.name}, predicted"), median_passes(one.steps[:half]), over)
    return Rehearsal(one.steps[-1], prediction, measure(one.steps[-1], over), one.gradient_error)
