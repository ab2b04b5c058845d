"""`cordee plan`: does a model fit so many GPUs, how fast, for how much, and what can a preemption cost."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.cli.plan_text import Facts, Survivor, print_plan
from cordee.errors import CatalogueError, DoesNotFitError, LayoutError
from cordee.hardware.catalog import CAPACITIES, Capacity, Catalogue
from cordee.hardware.load import load_catalogue
from cordee.plan.layout import PRECISIONS, RECOMPUTES, Precision, Recompute
from cordee.plan.search import Candidate, Plan, plan_layouts
from cordee.plan.survive import survival
from cordee.units import parse_bytes_per_s, parse_duration_s
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape

# What is assumed where the user says nothing; the output names each of them.
STORAGE_PER_NODE = "2GB/s"
SPOT_MTBI = "24h"
START_S = 120.0


def plan(
    model: Annotated[str, typer.Argument(help="A model of the catalogue, a config.json, or a folder with one.")],
    *,
    gpus: Annotated[str, typer.Option(help="The job's total: 64xH100 or H100:64.")],
    seq: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", show_default="the model's, 8192 at most")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences in a step, over all GPUs.", show_default="~4M tokens")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences in a micro-batch.", show_default="tries 1 to 8")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-8bit, adamw-bf16-moments, ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    recompute: Annotated[str, typer.Option(help="none, selective, full, or auto.")] = "auto",
    layout: Annotated[str | None, typer.Option(help="Judge this one: tp=8,pp=2 (dp follows).")] = None,
    capacity: Annotated[str, typer.Option(help="Price of on-demand or spot.")] = "on-demand",
    prices: Annotated[
        Path | None,
        typer.Option(
            help="Your own prices, over the catalogue's.", show_default="prices.toml in CORDEE_HOME, ~/.cordee"
        ),
    ] = None,
    storage: Annotated[str, typer.Option(help="What a node writes to the checkpoint's storage.")] = STORAGE_PER_NODE,
    mtbi: Annotated[
        str | None, typer.Option(help="Mean time between interruptions: 6h.", show_default="by capacity")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every layout.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Does it fit, in which layout, how fast, what does it cost, and what can a preemption cost.

    Exits with 21 if no layout fits, after saying by how many bytes and what would.
    """
    catalogue = load_catalogue(prices or _own_prices())
    count, kind = parse_gpus(gpus)
    if kind is None:
        known = ", ".join(gpu.name for gpu in catalogue.gpus)
        raise CatalogueError(f"--gpus {gpus} does not say which GPU", hint=f"write {count}xH100; known are {known}")
    gpu = catalogue.find_gpu(kind)
    wanted = _capacity(capacity)
    found = plan_layouts(
        load_shape(model),
        gpu,
        count,
        seq_tokens=seq,
        global_batch=batch,
        optimizer=optimizer,
        precision=_precision(precision),
        recompute=_recompute(recompute),
        micro_batch=micro_batch,
        layout=layout,
        price=catalogue.price(gpu, wanted),
    )
    facts = Facts(found, wanted, _survivors(found, catalogue, storage, mtbi), storage)
    if as_json:
        print(json.dumps(plan_json(facts), indent=2))
    else:
        print_plan(facts, show_all=show_all)
    if found.best is None:
        raise typer.Exit(DoesNotFitError.exit_code)


def _own_prices() -> Path | None:
    """The `prices.toml` in Cordee's home, which a server bills by too (the client knows the home, but is heavy)."""
    path = Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser() / "prices.toml"
    return path if path.exists() else None


def plan_json(facts: Facts) -> dict[str, Any]:
    """The stable form: base units, version 1."""
    found = facts.plan
    shape, training, gpu = found.shape, found.training, found.gpu
    return {
        "version": 1,
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "parts": asdict(shape.parameter_count),
        },
        "gpu": {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "source": str(gpu.source)},
        "gpus": found.gpus,
        "training": {
            "seq_tokens": training.seq_tokens,
            "global_batch": training.global_batch,
            "tokens_per_step": training.tokens_per_step,
            "optimizer": training.optimizer.name,
            "precision": training.precision,
        },
        "bill": {
            "bytes_per_parameter": training.optimizer.bytes_per_parameter,
            "state_bytes": found.state_bytes,
            "fewest_gpus": found.fewest_gpus,
        },
        "price": found.price
        and {
            "capacity": found.price.capacity,
            "usd_per_gpu_hour": found.price.usd_per_gpu_hour,
            "source": str(found.price.source),
        },
        "fits": found.best is not None,
        "layouts": [_layout_json(candidate) for candidate in (*found.fitting, *found.rejected)],
        "remedies": [
            {
                "change": remedy.change,
                "gpus": remedy.gpus,
                "seq_tokens": remedy.training.seq_tokens,
                "optimizer": remedy.training.optimizer.name,
                "layout": _layout_json(remedy.candidate),
            }
            for remedy in found.remedies
        ],
        "survival": [_survivor_json(survivor) for survivor in facts.survivors],
    }


def _layout_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": str(candidate.layout),
        **asdict(candidate.layout),
        "fits": candidate.fits,
        "peak_bytes": candidate.peak_bytes,
        "wall_bytes": candidate.wall_bytes,
        "shortfall_bytes": candidate.shortfall_bytes,
        "fullest_stage": candidate.memory.worst_stage,
        "parts_bytes": candidate.memory.worst.parts(),
        "step_s": candidate.step and candidate.step.total_s,
        "step_parts_s": candidate.step and asdict(candidate.step),
        "mfu": candidate.mfu,
        "tokens_per_s": candidate.tokens_per_s,
        "usd_per_billion_tokens": candidate.usd_per_billion_tokens,
    }


def _survivor_json(survivor: Survivor) -> dict[str, Any]:
    price = survivor.price
    return {
        "capacity": survivor.capacity,
        "usd_per_gpu_hour": price and price.usd_per_gpu_hour,
        "price_source": price and str(price.source),
        "mtbi_source": survivor.mtbi_source,
        **asdict(survivor.survival),
    }


def _survivors(found: Plan, catalogue: Catalogue, storage: str, mtbi: str | None) -> tuple[Survivor, ...]:
    """What each kind of capacity has to expect."""
    nodes = -(-found.gpus // found.gpu.gpus_per_node)
    storage_bytes_per_s = nodes * parse_bytes_per_s(storage)
    if storage_bytes_per_s <= 0:
        raise LayoutError(f"--storage {storage} writes nothing", hint="write what a node reaches: 2GB/s")
    return tuple(_survivor(found, catalogue, capacity, storage_bytes_per_s, mtbi) for capacity in CAPACITIES)


def _survivor(
    found: Plan, catalogue: Catalogue, capacity: Capacity, storage_bytes_per_s: float, mtbi: str | None
) -> Survivor:
    price = catalogue.price(found.gpu, capacity)
    if mtbi is not None:
        mtbi_s, source = parse_duration_s(mtbi), "as given"
    elif capacity == "spot":
        mtbi_s, source = parse_duration_s(SPOT_MTBI), "assumed: give yours with --mtbi"
    else:
        mtbi_s, source = None, "Llama 3's rate: 419 interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783)"
    if mtbi_s is not None and mtbi_s <= 0:
        raise LayoutError(f"--mtbi {mtbi} leaves no time to work", hint="write a duration: 6h")
    expected = survival(
        found.shape,
        found.training,
        found.gpus,
        storage_bytes_per_s=storage_bytes_per_s,
        start_s=START_S,
        mtbi_s=mtbi_s,
        usd_per_gpu_hour=price.usd_per_gpu_hour if price is not None else None,
    )
    return Survivor(capacity, price, source, expected)


def _capacity(text: str) -> Capacity:
    for capacity in CAPACITIES:
        if text == capacity:
            return capacity
    raise CatalogueError(f"unknown capacity {text!r}", hint="use on-demand or spot")


def _precision(text: str) -> Precision:
    for precision in PRECISIONS:
        if text == precision:
            return precision
    raise LayoutError(f"unknown precision {text!r}", hint="use bf16, fp16 or fp32")


def _recompute(text: str) -> Recompute | None:
    for recompute in RECOMPUTES:
        if text == recompute:
            return recompute
    if text == "auto":
        return None
    raise LayoutError(f"unknown recompute {text!r}", hint="use none, selective, full or auto")
