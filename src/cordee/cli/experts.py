"""`cordee experts`: replicate and place a model's experts from their loads, or say that moving them does not pay."""

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.cli.experts_stream import follow, print_stream, stream_json
from cordee.cli.experts_text import Outcome, experts_page, print_outcome
from cordee.cli.plan_more import write_page
from cordee.errors import InputError
from cordee.plan.experts import (
    LAYOUTS,
    Costs,
    Fleet,
    Placement,
    Policy,
    Rebalance,
    balance_bound,
    checked_loads,
    checked_placement,
    mapping,
    plan_experts,
    rebalance,
    trivial_placement,
)
from cordee.plan.experts.prove import least_max_of_pairs
from cordee.plan.experts.shape import Floats
from cordee.units import parse_bytes, parse_bytes_per_s, parse_duration_s

Loads = Annotated[
    list[Path],
    typer.Argument(
        help="Tokens of each expert (columns) in each layer (rows): CSV, or JSON rows. Several: windows in order, "
        "and what the controller does after each."
    ),
]
Gpus = Annotated[int, typer.Option(help="GPUs that share the experts.")]
Replicas = Annotated[int, typer.Option(help="Slots for experts in each layer, over all GPUs.")]
Nodes = Annotated[int, typer.Option(help="Nodes that the GPUs are in.")]
Groups = Annotated[
    int, typer.Option(help="Groups of experts that each stay on one node; 1: an expert may go anywhere.")
]
Present = Annotated[Path | None, typer.Option("--from", help="What serves now: improve it by few moves.")]
Moves = Annotated[str, typer.Option(help="With --from: share of all slots that may change.")]
ExpertBytes = Annotated[str, typer.Option(help="Weights of one expert.")]
Link = Annotated[str, typer.Option(help="What one GPU receives.")]
Share = Annotated[str, typer.Option(help="Share of the time that is in the experts.")]
Horizon = Annotated[str, typer.Option(help="How long the loads are expected to stay like this.")]
Trust = Annotated[bool, typer.Option("--trust-counts", help="Take the loads as exact: no test for noise.")]
Effort = Annotated[float, typer.Option(min=0, help="Search for replica counts on GPUs of two slots; 1 is 0.2 s.")]
Prove = Annotated[bool, typer.Option(help="A tighter bound for two slots a GPU; takes seconds, needs scipy.")]
LayoutName = Annotated[str, typer.Option("--layout", help="Whose mappings --out writes: deepseek, vllm or sglang.")]
Out = Annotated[Path | None, typer.Option(help="Write the mappings of the placement to serve with, as JSON.")]
Dense = Annotated[int, typer.Option(min=0, help="Dense layers before the first: sglang's file has rows for them.")]
Html = Annotated[Path | None, typer.Option(help="Write the whole as one page.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Under which names mappings from slot to expert are found in a file.
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
    share: Share = "33%",
    horizon: Horizon = "10m",
    trust_counts: Trust = False,
    effort: Effort = 1.0,
    prove: Prove = False,
    layout: LayoutName = "deepseek",
    out: Out = None,
    dense_layers: Dense = 0,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Replicate and place a model's experts from their loads, or say that it does not pay to move them."""
    windows = [checked_loads(read_rows(path)) for path in loads]
    counted = windows[0]
    fleet = Fleet(gpus, replicas, nodes, groups)
    fleet.check(counted.shape[1])
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}", hint=f"one of: {', '.join(LAYOUTS)}")
    if out is None and layout != "deepseek":
        raise InputError(f"--layout {layout} is of the file that --out writes", hint="add --out maps.json")
    costs = Costs(
        parse_bytes(expert_bytes), parse_bytes_per_s(link), _share("--share", share), parse_duration_s(horizon)
    )
    moved = _share("--moves", moves)
    now = trivial_placement(fleet, *counted.shape)
    if present is not None:
        now = checked_placement(read_slots(present, len(counted), dense_layers), fleet, *counted.shape)
    if len(windows) > 1:
        if html is not None or prove or trust_counts:
            raise InputError("--html, --prove and --trust-counts are of one window", hint="give one file of loads")
        start = now if present is not None else plan_experts(counted, fleet, effort=effort)
        policy = Policy(moved_share_max=moved, costs=costs)
        seen, serving = follow(loads, windows, start, policy)
        _write(out, serving, layout, dense_layers)
        if as_json:
            print(json.dumps(stream_json(seen, serving), indent=2))
        else:
            print_stream(seen, policy, serving.slots.size)
        return
    bound, fresh = balance_bound(counted, fleet), plan_experts(counted, fleet, effort=effort)
    if prove:
        reached = fresh.gpu_loads(counted).max(axis=1)
        bound = counted.sum(axis=1) / gpus / least_max_of_pairs(counted, fleet, reached)
    found = rebalance(counted, now, costs, moved_share_max=moved, trust=trust_counts) if present is not None else None
    outcome = Outcome(loads[0].name, counted, fleet, now, found.after if found else fresh, fresh, bound, found)
    _write(out, outcome.placement, layout, dense_layers)
    if html is not None:
        write_page(html, experts_page(outcome))
    if as_json:
        print(json.dumps(experts_json(outcome), indent=2))
    else:
        print_outcome(outcome)


def _write(out: Path | None, placement: Placement, layout: str, dense_layers: int) -> None:
    """The mappings of an engine, if they were asked for."""
    if out is not None:
        maps = mapping(placement, layout, dense_layers=dense_layers)  # type: ignore[arg-type]
        write_page(out, json.dumps(maps) + "\n")


def read_rows(path: Path) -> list[list[float]]:
    """Rows of numbers from a CSV or JSON file.

    Raises:
        InputError: it cannot be read, or a cell is not a number.
    """
    text = _text(path)
    if text.lstrip().startswith(("[", "{")):
        rows = _json(path, text)
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
            return rows
        raise InputError(f"{path} is JSON, but no list of rows", hint="one row for each layer, one number an expert")
    found = []
    for at, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row:
            continue
        try:
            found.append([float(cell) for cell in row])
        except ValueError:
            bad = next(cell for cell in row if not _is_number(cell))
            hint = "one row for each layer, one number for each expert, no heading"
            raise InputError(f"{path} line {at}: {bad!r} is not a number", hint=hint) from None
    return found


def read_slots(path: Path, layers: int, dense_layers: int = 0) -> Any:
    """The expert in each slot from a file of this command, of DeepSeek's, vLLM's or SGLang's names.

    SGLang's file may have a row for each dense layer before the first: those are left out.

    Raises:
        InputError: it cannot be read, or has none of these names.
    """
    told = _json(path, _text(path))
    if isinstance(told, dict) and isinstance(told.get("placement"), dict):
        told = told["placement"]
    if isinstance(told, dict):
        told = next((told[name] for name in SLOT_NAMES if name in told), None)
    if not isinstance(told, list):
        raise InputError(f"{path} holds no placement", hint=f"JSON with one of: {', '.join(SLOT_NAMES)}")
    return told[dense_layers:] if len(told) == layers + dense_layers else told


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
        raise InputError(f"{path} is not valid JSON: {error}", hint="is it complete?") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _share(flag: str, text: str) -> float:
    """A share of `13%`; a bare number is refused."""
    number = text.strip().removesuffix("%")
    if not text.strip().endswith("%") or not _is_number(number) or not 0 <= float(number) <= 100:
        raise InputError(f"{flag} {text!r} is not a share", hint="write 0% to 100%")
    return float(number) / 100


def _balance(placement: Placement, loads: Floats) -> dict[str, Any]:
    found = placement.balance(loads)
    return {"mean": float(found.mean()), "worst": float(found.min()), "layers": found.tolist()}


def experts_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, version 1; `placement` has DeepSeek's names and is what `--from` takes."""
    loads, fleet = outcome.loads, outcome.fleet
    return {
        "version": 1,
        "layers": len(loads),
        "experts": loads.shape[1],
        "tokens": float(loads.sum()),
        "gpus": fleet.gpus,
        "nodes": fleet.nodes,
        "replicas": fleet.replicas,
        "groups": fleet.groups,
        "slots_per_gpu": fleet.slots,
        "policy": "hierarchical" if fleet.domains > 1 else "global",
        "bound": {
            "mean": float(outcome.bound.mean()), "worst": float(outcome.bound.min()), "layers": outcome.bound.tolist()
        },
        "before": _balance(outcome.before, loads),
        "after": _balance(outcome.placement, loads),
        "fresh": _balance(outcome.fresh, loads),
        "rebalance": outcome.found and _rebalance(outcome.found),
        "gpu_loads_before": outcome.before.gpu_loads(loads).tolist(),
        "gpu_loads_after": outcome.placement.gpu_loads(loads).tolist(),
        "placement": mapping(outcome.placement, "deepseek"),
    }  # fmt: skip


def _rebalance(found: Rebalance) -> dict[str, Any]:
    return {
        "pays": found.pays,
        "says": found.says,
        "balance_found": float(found.balance_found.mean()),
        "layers_beyond_noise": found.layers_beyond_noise,
        "moved_slots": found.moved_slots,
        "moved_fraction": found.moved_slots / found.before.slots.size,
        "moved_bytes": found.moved_bytes,
        "transfer_s": found.transfer_s,
        "saved_s": found.saved_s,
    }
