"""`cordee experts`: replicate and place the experts of a model from measured loads, where it pays."""

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.cli import terminal
from cordee.cli.experts_stream import print_stream
from cordee.cli.experts_text import experts_page, print_answer
from cordee.cli.plan_more import write_page
from cordee.errors import InputError
from cordee.near import did_you_mean
from cordee.plan.experts import (
    MAPPING_FORMATS,
    ExpertPlacement,
    Fleet,
    MoveCosts,
    RebalancePolicy,
    balance_bound,
    checked_loads,
    checked_placement,
    mapping,
    plan_experts,
    rebalance,
    trivial_placement,
)
from cordee.plan.experts.answer import ExpertsAnswer, follow
from cordee.plan.experts.document import experts_document, stream_document
from cordee.plan.experts.prove import least_max_of_pairs
from cordee.units import parse_bytes, parse_bytes_per_s, parse_duration_s

Loads = Annotated[
    list[Path],
    typer.Argument(
        help="Tokens of each expert (columns) in each layer (rows), as CSV or JSON rows. Several files are windows in "
        "order; the controller's action after each is shown."
    ),
]
Gpus = Annotated[int, typer.Option(help="Number of GPUs that hold the experts.")]
Replicas = Annotated[int, typer.Option(help="Expert replicas in each layer, over all GPUs.")]
Nodes = Annotated[int, typer.Option(help="Number of nodes.")]
Groups = Annotated[int, typer.Option(help="Groups of experts, each on one node; 1: an expert may be on any GPU.")]
Present = Annotated[
    Path | None, typer.Option("--from", help="Current placement (JSON); change as few slots as pay off.")
]
Moves = Annotated[str, typer.Option(help="With --from: largest fraction of slots that may change.")]
ExpertBytes = Annotated[str, typer.Option(help="Size of the weights of one expert.")]
Link = Annotated[str, typer.Option(help="Bandwidth at which a GPU receives weights.")]
ExpertFraction = Annotated[str, typer.Option(help="Fraction of the step time that is spent in the experts.")]
Horizon = Annotated[str, typer.Option(help="Time for which the loads are expected to hold.")]
Trust = Annotated[bool, typer.Option("--trust-counts", help="Skip the noise test.")]
Effort = Annotated[float, typer.Option(min=0, help="Search time with two slots a GPU; 1 is 0.2 s.")]
Prove = Annotated[bool, typer.Option(help="Prove a tighter bound for two slots a GPU; takes seconds and needs scipy.")]
LayoutName = Annotated[str, typer.Option("--layout", help="Format of --out: deepseek, vllm or sglang.")]
Out = Annotated[Path | None, typer.Option(help="Write the placement's mappings as JSON.")]
Dense = Annotated[
    int,
    typer.Option(min=0, help="Number of dense layers before the first expert layer; sglang's file has rows for them."),
]

# Names of the mapping from slot to expert in files of engines.
SLOT_NAMES = ("phy2log", "physical_to_logical_map")


def experts(
    loads: Loads,
    *,
    gpus: Gpus,
    replicas: Replicas,
    nodes: Nodes = 1,
    groups: Groups = 1,
    present: Present = None,
    moves: Moves = "13%",
    expert_bytes: ExpertBytes = "44.04MB",
    link: Link = "400Gbps",
    expert_fraction: ExpertFraction = "33%",
    horizon: Horizon = "10m",
    trust_counts: Trust = False,
    effort: Effort = 1.0,
    prove: Prove = False,
    layout: LayoutName = "deepseek",
    out: Out = None,
    dense_layers: Dense = 0,
    html: terminal.Html = None,
    as_json: terminal.Json = False,
) -> None:
    """Replicate and place the experts of a model from measured loads; with --from, only if moving pays."""
    windows = [checked_loads(read_rows(path)) for path in loads]
    counted = windows[0]
    fleet = Fleet(gpus, replicas, nodes, groups)
    fleet.check(counted.shape[1])
    if layout not in MAPPING_FORMATS:
        raise InputError(f"unknown layout {layout!r}", hint=did_you_mean(layout, MAPPING_FORMATS))
    if out is None and layout != "deepseek":
        raise InputError(f"--layout {layout} needs --out", hint="add --out maps.json")
    costs = MoveCosts(
        parse_bytes(expert_bytes),
        parse_bytes_per_s(link),
        _fraction("--expert-fraction", expert_fraction),
        parse_duration_s(horizon),
    )
    moved = _fraction("--moves", moves)
    now = trivial_placement(fleet, *counted.shape)
    if present is not None:
        now = checked_placement(read_slots(present, len(counted), dense_layers), fleet, *counted.shape)
    if len(windows) > 1:
        if html is not None or prove or trust_counts:
            hint = "give one file of loads"
            raise InputError("--html, --prove and --trust-counts need a single window", hint=hint)
        start = now if present is not None else plan_experts(counted, fleet, effort=effort)
        policy = RebalancePolicy(moved_fraction_max=moved, costs=costs)
        windows_run, serving = follow([path.name for path in loads], windows, start, policy)
        _write(out, serving, layout, dense_layers)
        if as_json:
            terminal.print_json(stream_document(windows_run, serving))
        else:
            print_stream(windows_run, policy, serving.slots.size)
        return
    bound, fresh = balance_bound(counted, fleet), plan_experts(counted, fleet, effort=effort)
    if prove:
        reached = fresh.gpu_loads(counted).max(axis=1)
        bound = counted.sum(axis=1) / gpus / least_max_of_pairs(counted, fleet, reached)
    found = None
    if present is not None:
        found = rebalance(counted, now, costs, moved_fraction_max=moved, trust=trust_counts)
    answer = ExpertsAnswer(loads[0].name, counted, fleet, now, found.after if found else fresh, fresh, bound, found)
    _write(out, answer.placement, layout, dense_layers)
    if html is not None:
        write_page(html, experts_page(answer))
    if as_json:
        terminal.print_json(experts_document(answer))
    else:
        print_answer(answer)


def _write(out: Path | None, placement: ExpertPlacement, layout: str, dense_layers: int) -> None:
    """Write the mappings of an engine, if asked for."""
    if out is not None:
        maps = mapping(placement, layout, dense_layers=dense_layers)  # type: ignore[arg-type]
        write_page(out, json.dumps(maps) + "\n")


def read_rows(path: Path) -> list[list[float]]:
    """Read rows of numbers from a CSV or JSON file.

    Raises:
        InputError: it cannot be read, or a cell is not a number.
    """
    text = _text(path)
    if text.lstrip().startswith(("[", "{")):
        rows = _json(path, text)
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
            return rows
        raise InputError(
            f"{path} is JSON, but not a list of rows", hint="write one row for each layer, one number for each expert"
        )
    found = []
    for at, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row:
            continue
        try:
            found.append([float(cell) for cell in row])
        except ValueError:
            bad = next(cell for cell in row if not _is_number(cell))
            hint = "write one row for each layer and one number for each expert, without a header"
            raise InputError(f"{path} line {at}: {bad!r} is not a number", hint=hint) from None
    return found


def read_slots(path: Path, layers: int, dense_layers: int = 0) -> Any:
    """Read the expert in each slot from a file of this command, or one in DeepSeek's, vLLM's or SGLang's format.

    SGLang's file may have rows for the dense layers before the first, which are left out.

    Raises:
        InputError: it cannot be read, or has none of these names.
    """
    found = _json(path, _text(path))
    if isinstance(found, dict) and isinstance(found.get("placement"), dict):
        found = found["placement"]
    if isinstance(found, dict):
        found = next((found[name] for name in SLOT_NAMES if name in found), None)
    if not isinstance(found, list):
        raise InputError(f"{path} has no placement", hint=f"give JSON with one of {', '.join(SLOT_NAMES)}")
    return found[dense_layers:] if len(found) == layers + dense_layers else found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path} cannot be read: {why}", hint="give a CSV or JSON file") from None


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", hint="check that the file is complete") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _fraction(flag: str, text: str) -> float:
    """Parse `13%`; a bare number is refused."""
    number = text.strip().removesuffix("%")
    if not text.strip().endswith("%") or not _is_number(number) or not 0 <= float(number) <= 100:
        raise InputError(f"{flag} {text!r} is not a fraction", hint="write 0% to 100%")
    return float(number) / 100
