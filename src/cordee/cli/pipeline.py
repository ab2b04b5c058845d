"""`cordee pipeline`: every pipeline schedule on given times, how far from the best; drawn, written for torch, run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.pipeline_page import picture, pipeline_page, trace_text
from cordee.cli.pipeline_text import Asked, Ran, comparison_json, own_json, print_comparison, print_own
from cordee.cli.plan_more import write_page
from cordee.errors import LayoutError, SpecError, UnitError
from cordee.plan.pipeline import SCHEDULES, Costs, Room, Timeline, compare, faults, table_csv, table_of, timeline
from cordee.plan.pipeline.compare import Comparison
from cordee.plan.pipeline.measured import measure, overheads, predicted, usual_passes
from cordee.units import parse_bytes, parse_duration_s

BEST = "best"
RUN_RANKS_MAX, RUN_STEPS = 16, 4
# A bare unit of time is this long when a schedule is rehearsed.
RUN_UNIT_S = 0.1

Ranks = Annotated[int, typer.Option(help="Ranks of the pipeline.")]
MicroBatches = Annotated[int, typer.Option("--microbatches", "--micro-batches", help="Micro-batches of a step.")]
Times = Annotated[
    str,
    typer.Option(
        help="Forward, gradient of the input, of the weights, over a rank's layers; fb: a forward and a backward "
        "overlapped. Plain numbers, or durations."
    ),
]
Latency = Annotated[str, typer.Option(help="From the end of a pass to its output on the next rank, in the same unit.")]
Stages = Annotated[str | None, typer.Option(help="Sizes of equal slices of the model: 1,1,1,1.4.")]
Chunks = Annotated[int, typer.Option(help="Chunks on a rank, of interleaved 1F1B.")]
Memory = Annotated[
    str | None, typer.Option(help="What a rank may hold: 8 activations, or 60GB with --activation.", show_default="any")
]
Activation = Annotated[str | None, typer.Option(help="Bytes of one micro-batch's activations on a rank: 2GB.")]
Weights = Annotated[str | None, typer.Option(help="Bytes of a rank's weights and their states: DualPipe has two.")]
ScheduleName = Annotated[
    str | None,
    typer.Option(help="Draw, write or run this one; `best` is the searched order.", show_default="the choice"),
]
NoSearch = Annotated[bool, typer.Option("--no-search", help="Only the named schedules.")]
OwnTable = Annotated[
    Path | None, typer.Option("--table", help="Check and time a table of your own: CSV as torch reads it.")
]
Html = Annotated[Path | None, typer.Option(help="Write all of them as one page, drawn.")]
Svg = Annotated[Path | None, typer.Option(help="Write the schedule's picture.")]
ChromeTrace = Annotated[Path | None, typer.Option(help="Write its timeline as a Chrome trace, for Perfetto.")]
Csv = Annotated[Path | None, typer.Option(help="Write its table, for torch's pipeline runtime.")]
Run = Annotated[bool, typer.Option("--run", help="Rehearse it on ranks of this machine, with waits for passes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    html: Html = None,
    svg: Svg = None,
    chrome_trace: ChromeTrace = None,
    csv: Csv = None,
    run: Run = False,
    as_json: AsJson = False,
) -> None:
    """Compare pipeline schedules: step, bubble and activations of each, and how far it is from the best."""
    costs, in_seconds = parse_times(times, latency, stages)
    room = parse_room(memory, activation, weights)
    if schedule is not None and schedule not in (*SCHEDULES, BEST):
        raise LayoutError(f"unknown schedule {schedule!r}", hint=f"known are {', '.join(SCHEDULES)}, and {BEST}")
    if table is not None:
        if schedule or html or chrome_trace or csv or run:
            raise SpecError(
                f"--table {table}: of a table of your own only --svg is written", hint="leave the others out"
            )
        _own(table, costs, room, in_seconds, svg, as_json=as_json)
        return
    compared = compare(ranks, microbatches, costs, room=room, chunks=chunks, search=not no_search)
    chosen = _chosen(compared, schedule)
    ran = _rehearse(chosen, costs, in_seconds) if run else None
    asked = Asked(compared, chosen, in_seconds, ran)
    if html is not None:
        write_page(html, pipeline_page(asked))
    if svg is not None:
        write_page(svg, picture(chosen, in_seconds))
    if chrome_trace is not None:
        write_page(chrome_trace, trace_text(asked))
    if csv is not None:
        write_page(csv, table_csv(chosen.table))
    if as_json:
        print(json.dumps(comparison_json(asked), indent=2))
    else:
        print_comparison(asked)


def parse_times(times: str, latency: str, stages: str | None) -> tuple[Costs, bool]:
    """Costs of `f=1,b=1,w=1` or `f=12ms,b=13ms,w=9ms,fb=30ms`, and whether they are in seconds.

    Raises:
        UnitError: a part cannot be read, or some are bare numbers and some durations.
        LayoutError: a time that no pass can take.
    """
    parts: dict[str, str] = {}
    for part in times.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in ("f", "b", "w", "fb") or not value.strip() or name.strip() in parts:
            hint = "write f=1,b=1,w=1, and fb=2.6 for a forward and a backward that overlap; or durations: f=12ms,..."
            raise UnitError(f"--times {times}: {part.strip()!r} is no time of a pass", hint=hint)
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
        raise UnitError(f"{mixed}: some are plain numbers, some durations", hint="give all of them in one way")
    read = {name: parse_duration_s(text) if bare[name] is None else bare[name] for name, text in parts.items()}
    depth = tuple(_number(size, "--stages") for size in stages.split(",")) if stages else ()
    return Costs(
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
        raise UnitError(f"{flag}: {text.strip()!r} is no number", hint="write numbers with commas between: 1,1,1,1.4")
    return value


def parse_room(memory: str | None, activation: str | None, weights: str | None) -> Room | None:
    """What a rank may hold, in activations.

    Raises:
        UnitError: bytes without the bytes of an activation, or the other way round.
    """
    if memory is None:
        if activation or weights:
            raise UnitError("--activation and --weights are of no use without --memory", hint="add --memory 60GB")
        return None
    most = _bare(memory)
    if most is not None:
        if activation or weights:
            raise UnitError(
                f"--memory {memory} counts activations already", hint=f"write --memory {memory}GB for bytes"
            )
        return Room(most)
    size = parse_bytes(memory)
    if activation is None:
        hint = "add --activation, the bytes of one micro-batch on a rank: `cordee plan --json` says them"
        raise UnitError(f"--memory {memory}: how many activations is that", hint=hint)
    one, copy = parse_bytes(activation), parse_bytes(weights) if weights else 0
    if one <= 0:
        raise UnitError(
            f"--activation {activation} is nothing", hint="give the bytes of one micro-batch on a rank: 2GB"
        )
    if copy >= size:
        raise UnitError(
            f"--weights {weights} leave nothing of --memory {memory} for activations", hint="give more memory"
        )
    return Room((size - copy) / one, copy / one)


def _chosen(compared: Comparison, schedule: str | None) -> Timeline:
    """The timeline that is drawn.

    Raises:
        LayoutError: it does not exist for these numbers, or nothing fits.
    """
    if schedule == BEST:
        if compared.best is None:
            raise LayoutError("no order was searched", hint="leave out --no-search, or ask with fewer micro-batches")
        return compared.best.timeline
    if schedule is not None:
        row = next(row for row in compared.rows if row.schedule == schedule)
        if row.timeline is None:
            raise LayoutError(f"{schedule} {row.why_not}")
        return row.timeline
    if compared.choice is not None and compared.choice.timeline is not None:
        return compared.choice.timeline
    if compared.best is not None:
        return compared.best.timeline
    assert compared.room is not None, "without a limit GPipe fits"
    least = min((row.timeline.peak for row in compared.rows if row.timeline is not None), default=0.0)
    raise LayoutError(
        f"nothing fits: room for {compared.room.activations:g} activations, and the leanest schedule needs {least:g}",
        hint="give more memory, smaller micro-batches or more ranks",
    )


def _own(path: Path, costs: Costs, room: Room | None, in_seconds: bool, svg: Path | None, *, as_json: bool) -> None:
    """A table of the user's: what is wrong with it, or how long it takes."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    own = table_of(path.name, rows)
    wrong = faults(own, costs, None if room is None else room.of(own.placement))
    run = None if wrong else timeline(own, costs)
    if svg is not None and run is not None:
        write_page(svg, picture(run, in_seconds))
    if as_json:
        print(json.dumps(own_json(own, wrong, run, costs), indent=2))
    else:
        print_own(own, wrong, run, costs, in_seconds=in_seconds)
    if wrong:
        raise SystemExit(LayoutError.exit_code)


def _rehearse(chosen: Timeline, costs: Costs, in_seconds: bool) -> Ran:
    """The schedule on real ranks, with waits of the given times; the first half of the steps predicts the second."""
    from cordee.train.pipeline.rehearse import Block, rehearse

    table = chosen.table
    if table.placement.ranks > RUN_RANKS_MAX or table.placement.ranks < 2:
        raise LayoutError(f"{table.placement.ranks} ranks cannot be rehearsed here: from 2 to {RUN_RANKS_MAX}")
    if costs.depth:
        raise LayoutError("a rehearsal is of equal stages", hint="leave out --stages")
    unit = 1.0 if in_seconds else RUN_UNIT_S
    block = Block("waits", costs.forward_s * unit, costs.inner_s * unit, costs.weight_s * unit)
    one = rehearse([table], ranks=table.placement.ranks, block=block, steps=RUN_STEPS)[0]
    half = RUN_STEPS // 2
    over = overheads(table.placement, one.steps[:half])
    said = predicted(replace(table, name=f"{table.name}, predicted"), usual_passes(one.steps[:half]), over)
    return Ran(one.steps[-1], said, measure(one.steps[-1], over), one.gradient_error)
