"""`cordee plan`: does a model fit so many GPUs, how fast, for how much, and what can a preemption cost."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cordee.cli.plan_json import curve_json, plan_json
from cordee.cli.plan_more import print_curve, print_launch, print_plan_and_more, write_page
from cordee.cli.plan_page import curve_page, plan_page
from cordee.cli.plan_text import Facts, More, Survivor
from cordee.errors import CatalogueError, DoesNotFitError, LayoutError, SpecError
from cordee.hardware.catalog import CAPACITIES, Capacity, Catalogue, Gpu
from cordee.hardware.load import load_catalogue
from cordee.plan.cost import TrainingRun, training_run
from cordee.plan.curve import Curve, scaling_curve, sizes
from cordee.plan.launch import Launch, first_to_launch
from cordee.plan.layout import FRAMEWORKS, LOSSES, PRECISIONS, RECOMPUTES, LayoutWanted, parse_layout
from cordee.plan.longest import longest_contexts
from cordee.plan.own import Comparison, compare, ownership_from
from cordee.plan.search import Plan, fewest_gpus_to_train, plan_layouts, training_for
from cordee.plan.survive import ASSUMED_START_S, LevelSave, checkpoint_bytes, level_saves, survival
from cordee.plan.why import why_not
from cordee.units import parse_bytes_per_s, parse_duration_s
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape

# What is assumed where the user says nothing; the output names each of them.
STORAGE_PER_NODE = "2GB/s"
SPOT_MTBI = "24h"
SPOT_NOTICE = "30s"
LONGEST_SHOWN = 8
T = TypeVar("T", bound=str)

Model = Annotated[str, typer.Argument(help="A model of the catalogue, a config.json, or a folder with one.")]
Gpus = Annotated[str, typer.Option(help="The job's total: 64xH100 or H100:64; 8..512xH100 draws the scaling curve.")]
Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default="the model's, 8192 at most")]
Batch = Annotated[int | None, typer.Option(help="Sequences in a step, over all GPUs.", show_default="~4M tokens")]
MicroBatch = Annotated[int | None, typer.Option(help="Sequences in a micro-batch.", show_default="tries 1 to 8")]
OptimizerName = Annotated[str, typer.Option(help="adamw, adamw-8bit, adamw-bf16-moments, muon, ...")]
PrecisionName = Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")]
RecomputeName = Annotated[str, typer.Option(help="none, selective, full, or auto.")]
FrameworkName = Annotated[str, typer.Option(help="Whose buffers there are: torch, megatron or deepspeed.")]
LossName = Annotated[str, typer.Option(help="fused, parallel, compiled, eager, or auto: the framework's own.")]
LayoutText = Annotated[str | None, typer.Option(help="Judge this one: tp=8,pp=2 (dp follows).")]
WhyText = Annotated[str | None, typer.Option(help="Why not this layout, with the numbers: tp=8,pp=3.")]
Exhaustive = Annotated[
    bool, typer.Option("--exhaustive", help="Every schedule, context kind, sharding group, micro-batch and offload.")
]
MaxSeq = Annotated[bool, typer.Option("--max-seq", help="The longest context of each layout.")]
Tokens = Annotated[str | None, typer.Option(help="Time and cost to train on so many: 1.4T, 300B.")]
CapacityName = Annotated[str, typer.Option(help="Price of on-demand or spot.")]
Prices = Annotated[
    Path | None,
    typer.Option(help="Your own prices, over the catalogue's.", show_default="prices.toml in CORDEE_HOME, ~/.cordee"),
]
Storage = Annotated[str, typer.Option(help="What a node writes to the checkpoint's storage.")]
Mtbi = Annotated[
    str | None, typer.Option(help="Mean time between failures: 6h.", show_default="Llama 3's rate for so many GPUs")
]
Reclaims = Annotated[str, typer.Option(help="Mean time between reclaims of spot capacity.")]
Notice = Annotated[str, typer.Option(help="Notice that a reclaim gives.")]
Stall = Annotated[
    str | None, typer.Option(help="What an asynchronous save holds the ranks for: 2s.", show_default="saves wait")
]
Buy = Annotated[Path | None, typer.Option(help="Rent or buy, on the assumptions of this TOML file.")]
LauncherName = Annotated[str | None, typer.Option("--launch", help="Settings for torchtitan, megatron, ...")]
Html = Annotated[Path | None, typer.Option(help="Write the whole as one page.")]
All = Annotated[bool, typer.Option("--all", help="Show every layout.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class _Stops:
    """What was said of interruptions and saves."""

    storage: str
    mtbi: str | None
    reclaims: str
    notice: str
    stall: str | None


def plan(
    model: Model,
    *,
    gpus: Gpus,
    seq: Seq = None,
    batch: Batch = None,
    micro_batch: MicroBatch = None,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    recompute: RecomputeName = "auto",
    framework: FrameworkName = "torch",
    loss: LossName = "auto",
    layout: LayoutText = None,
    why: WhyText = None,
    exhaustive: Exhaustive = False,
    max_seq: MaxSeq = False,
    tokens: Tokens = None,
    capacity: CapacityName = "on-demand",
    prices: Prices = None,
    storage: Storage = STORAGE_PER_NODE,
    mtbi: Mtbi = None,
    reclaims: Reclaims = SPOT_MTBI,
    notice: Notice = SPOT_NOTICE,
    stall: Stall = None,
    buy: Buy = None,
    launcher: LauncherName = None,
    html: Html = None,
    show_all: All = False,
    as_json: AsJson = False,
) -> None:
    """Does it fit, in which layout, how fast, what does it cost, and what can a preemption cost.

    Exits with 21 if no layout fits, after saying by how many bytes and what would.
    """
    catalogue = load_catalogue(prices or _own_prices())
    first, last, kind = _gpus(gpus)
    gpu = _gpu(catalogue, gpus, last, kind)
    wanted = _one_of("capacity", capacity, CAPACITIES, CatalogueError)
    shape = load_shape(model)
    about = {
        "seq_tokens": seq, "global_batch": batch, "optimizer": optimizer,
        "precision": _one_of("precision", precision, PRECISIONS),
        "framework": _one_of("framework", framework, FRAMEWORKS),
        "loss": None if loss == "auto" else _one_of("loss", loss, LOSSES, also="auto"),
    }  # fmt: skip
    price = catalogue.price(gpu, wanted)
    if first is not None:
        training = training_for(shape, last, **about)  # type: ignore[arg-type]
        asked = parse_layout(layout) if layout else LayoutWanted()
        curve = scaling_curve(shape, gpu, sizes(first, last), training, price=price, wanted=asked)
        beside = {"--why": why, "--max-seq": max_seq, "--tokens": tokens, "--buy": buy, "--launch": launcher}
        _refuse_beside_a_range(beside)
        _tell_curve(curve, shape, gpu, html, as_json=as_json)
        return
    how = None if recompute == "auto" else _one_of("recompute", recompute, RECOMPUTES, also="auto")
    found = plan_layouts(
        shape, gpu, last, recompute=how, micro_batch=micro_batch, layout=layout, price=price, exhaustive=exhaustive,
        **about,  # type: ignore[arg-type]
    )  # fmt: skip
    stops = _Stops(storage, mtbi, reclaims, notice, stall)
    facts = Facts(found, wanted, _survivors(found, catalogue, stops), storage, _levels(found))
    more = More(
        smallest=fewest_gpus_to_train(shape, gpu, found.training, found.fewest_gpus, last) if found.best else None,
        why=why_not(found, why) if why is not None else None,
        longest=longest_contexts(found, LONGEST_SHOWN) if max_seq else (),
        run=_run(facts, tokens),
        own=_comparison(facts, buy),
        launch=_launch(found, launcher),
    )
    _tell(facts, more, html, show_all=show_all, as_json=as_json)


def _tell(facts: Facts, more: More, html: Path | None, *, show_all: bool, as_json: bool) -> None:
    """The plan in the form that was asked for; exits with 21 if nothing fits."""
    if html is not None:
        write_page(html, plan_page(facts, more))
    if as_json:
        print(json.dumps(plan_json(facts, more), indent=2))
    elif more.launch is not None:
        print_launch(more.launch, facts.plan)
    else:
        print_plan_and_more(facts, more, show_all=show_all)
    if facts.plan.best is None:
        raise typer.Exit(DoesNotFitError.exit_code)


def _refuse_beside_a_range(flags: Mapping[str, object]) -> None:
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise SpecError(f"{given[0]} asks about one number of GPUs, not a range", hint="write one: --gpus 64xH100")


def _tell_curve(curve: Curve, shape: ModelShape, gpu: Gpu, html: Path | None, *, as_json: bool) -> None:
    """The scaling curve; exits with 21 if nothing fits on any size."""
    if html is not None:
        write_page(html, curve_page(curve, shape, gpu))
    if as_json:
        print(json.dumps(curve_json(curve, shape, gpu), indent=2))
    else:
        print_curve(curve, shape, gpu)
    if curve.smallest is None:
        raise typer.Exit(DoesNotFitError.exit_code)


def _own_prices() -> Path | None:
    """The `prices.toml` in Cordee's home, which a server bills by too (the client knows the home, but is heavy)."""
    path = Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser() / "prices.toml"
    return path if path.exists() else None


def _gpus(text: str) -> tuple[int | None, int, str | None]:
    """The range, or None and the total, and the kind: `8..512xH100`, `64xH100`."""
    if match := re.match(r"\s*(\d+)\s*\.\.\s*", text):
        count, kind = parse_gpus(text[match.end() :])
        return int(match[1]), count, kind
    if match := re.fullmatch(r"\s*([A-Za-z][\w. -]*):(\d+)\s*\.\.\s*(\d+)\s*", text):
        return int(match[2]), int(match[3]), match[1]
    count, kind = parse_gpus(text)
    return None, count, kind


def _gpu(catalogue: Catalogue, text: str, count: int, kind: str | None) -> Gpu:
    if kind is None:
        known = ", ".join(gpu.name for gpu in catalogue.gpus)
        raise CatalogueError(f"--gpus {text} does not say which GPU", hint=f"write {count}xH100; known are {known}")
    return catalogue.find_gpu(kind)


def _survivors(found: Plan, catalogue: Catalogue, stops: _Stops) -> tuple[Survivor, ...]:
    """What each kind of capacity has to expect."""
    nodes = -(-found.gpus // found.gpu.gpus_per_node)
    storage_bytes_per_s = nodes * parse_bytes_per_s(stops.storage)
    if storage_bytes_per_s <= 0:
        raise LayoutError(f"--storage {stops.storage} writes nothing", hint="write what a node reaches: 2GB/s")
    return tuple(_survivor(found, catalogue, capacity, storage_bytes_per_s, stops) for capacity in CAPACITIES)


def _survivor(
    found: Plan, catalogue: Catalogue, capacity: Capacity, storage_bytes_per_s: float, stops: _Stops
) -> Survivor:
    price = catalogue.price(found.gpu, capacity)
    mtbi_s, source = None, "Llama 3's rate: 419 interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783)"
    if stops.mtbi is not None:
        mtbi_s, source = _lasting("mtbi", stops.mtbi), "as given"
    reclaim_mtbi_s = _lasting("reclaims", stops.reclaims) if capacity == "spot" else None
    if capacity == "spot":
        assumed = "assumed" if (stops.reclaims, stops.notice) == (SPOT_MTBI, SPOT_NOTICE) else "as given"
        source += f"; reclaims every {stops.reclaims} with {stops.notice} of notice ({assumed}: --reclaims, --notice)"
    best = found.best
    expected = survival(
        found.shape,
        found.training,
        found.gpus,
        storage_bytes_per_s=storage_bytes_per_s,
        start_s=ASSUMED_START_S,
        mtbi_s=mtbi_s,
        usd_per_gpu_hour=price.usd_per_gpu_hour if price is not None else None,
        stall_s=None if stops.stall is None else parse_duration_s(stops.stall),
        reclaim_mtbi_s=reclaim_mtbi_s,
        grace_s=parse_duration_s(stops.notice) if capacity == "spot" else 0.0,
        step_s=best.step.total_s if best is not None and best.step is not None else 0.0,
    )
    return Survivor(capacity, price, source, expected)


def _levels(found: Plan) -> tuple[LevelSave, ...]:
    nodes = -(-found.gpus // found.gpu.gpus_per_node)
    return level_saves(checkpoint_bytes(found.shape, found.training), found.gpus, nodes)


def _lasting(flag: str, text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds <= 0:
        raise LayoutError(f"--{flag} {text} leaves no time to work", hint="write a duration: 6h")
    return seconds


def _run(facts: Facts, tokens: str | None) -> TrainingRun | None:
    """What training on so many tokens takes, on the capacity whose price was asked for."""
    if tokens is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMBGT])", tokens.strip())
    if match is None or float(match[1]) == 0:
        raise SpecError(f"--tokens {tokens} is not a number of tokens", hint="write 300B or 1.4T")
    count = float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2].upper()]
    best, chosen = facts.plan.best, facts.chosen
    if best is None or best.step is None:
        return None
    return training_run(
        count,
        tokens_per_step=facts.plan.training.tokens_per_step,
        step_s=best.step.total_s,
        gpus=facts.plan.gpus,
        goodput=chosen.survival.goodput,
        usd_per_gpu_hour=None if chosen.price is None else chosen.price.usd_per_gpu_hour,
    )


def _comparison(facts: Facts, path: Path | None) -> Comparison | None:
    """Rent or buy, as the user's file assumes."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist", hint="give the path of a TOML file with your assumptions") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}", hint="it must be a TOML file") from None
    price = facts.chosen.price
    rent = None if price is None else price.usd_per_gpu_hour
    return compare(ownership_from(table, gpus=facts.plan.gpus, rent_usd_per_gpu_hour=rent))


def _launch(found: Plan, launcher: str | None) -> Launch | None:
    if launcher is None:
        return None
    if found.best is None:
        best = found.rejected[0]
        raise DoesNotFitError(
            f"{found.shape.name} does not fit {found.gpus} x {found.gpu.name}: there is no layout to launch",
            hint=f"{best.layout} is nearest; run the same without --launch to see what would fit",
        )
    layouts = [candidate.layout for candidate in found.fitting]
    return first_to_launch(launcher, found.shape, layouts, found.training)


def _one_of(
    what: str, text: str, known: tuple[T, ...], error: Callable[..., Exception] = LayoutError, also: str = ""
) -> T:
    for name in known:
        if text == name:
            return name
    names: list[str] = [*known, *([also] if also else [])]
    raise error(f"unknown {what} {text!r}", hint=f"use {', '.join(names[:-1])} or {names[-1]}")
