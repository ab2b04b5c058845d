"""`cordee plan`: does a model fit so many GPUs, how fast, for how much, and what can a preemption cost."""

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cordee.cli import terminal
from cordee.cli.plan_cards import print_cards
from cordee.cli.plan_more import print_curve, print_launch, print_plan_and_more, write_page
from cordee.cli.plan_trace import compare, refuse_beside, refuse_untraced
from cordee.cli.stale import note_several_kinds, warned
from cordee.errors import CatalogueError, DoesNotFitError, LayoutError, SpecError
from cordee.hardware.catalog import CAPACITIES, Catalogue, Gpu
from cordee.hardware.load import load_catalogue, load_electricity
from cordee.near import did_you_mean
from cordee.plan.ask import Answer, Request, ask_curve
from cordee.plan.cards import Cards, ask_cards
from cordee.plan.cards_document import cards_document
from cordee.plan.curve import Curve
from cordee.plan.document import curve_document, plan_document
from cordee.plan.expect import DEFAULTS, Assumptions, node_storage_bytes_per_s
from cordee.plan.launch_parts import FRAMEWORKS_OF
from cordee.plan.layout import RECOMPUTES
from cordee.plan.page import curve_page
from cordee.plan.rent_or_buy import Ownership, ownership_from
from cordee.plan.rollouts import ask_stages
from cordee.plan.settings import Settings
from cordee.plan.training import FRAMEWORKS, LOSSES, PRECISIONS
from cordee.plan.wanted import LayoutWanted, layout_wanted
from cordee.planning import find_gpu, gpus_here, home_gpus, home_prices, parse_tokens, with_several_kinds
from cordee.train.trace_memory.comparison import Tracing, is_planned
from cordee.units import format_bytes, format_duration, parse_bytes_per_s, parse_duration_s
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape, model_path

# The planner's own assumptions, as a user would write them.
STORAGE_PER_NODE = f"{format_bytes(DEFAULTS.storage_bytes_per_s)}/s"
SPOT_MTBI = format_duration(DEFAULTS.reclaim_mtbi_s)
SPOT_NOTICE = format_duration(DEFAULTS.notice_s)
T = TypeVar("T", bound=str)
# The panels of --help.
TUNE, ANSWER, MONEY, TRACE = "Fine-tuning", "Answer", "Prices, storage, interruptions", "Trace"

Model = Annotated[str, typer.Argument(help="Name of a catalogued model, a config.json, or a folder with one.")]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="GPUs of the job: 64xH100, H100:64, 8xH100+8xA100 (several kinds), or here (calibrated); a range, "
        "8..512xH100, draws the scaling curve.",
        show_default="every kind of GPU",
    ),
]
Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default="the model's, at most 8192")]
Batch = Annotated[
    int | None,
    typer.Option(help="Sequences in a step, over all GPUs.", show_default="~4M tokens; with adapters 16 sequences"),
]
MicroBatch = Annotated[int | None, typer.Option(help="Sequences in a micro-batch.", show_default="searched, 1 to 8")]
OptimizerName = Annotated[
    str, typer.Option(help="Optimizer: adamw, adamw-bf16, adamw-8bit, adamw-8bit-paged, muon, ...")
]
InBackward = Annotated[
    bool,
    typer.Option(
        "--optimizer-in-backward", help="Update each weight as soon as it has a gradient.", rich_help_panel=TUNE
    ),
]
Freeze = Annotated[
    str | None, typer.Option(help="Parts that are not trained: embeddings,head,0..15 (layers).", rich_help_panel=TUNE)
]
Packed = Annotated[
    int | None,
    typer.Option(
        help="Mean tokens of the documents that are packed into a sequence.",
        show_default="one document a sequence",
        rich_help_panel=TUNE,
    ),
]
PrecisionName = Annotated[str, typer.Option(help="Precision: bf16, fp16, fp32 or fp8.")]
RecomputeName = Annotated[
    str, typer.Option(help="Activation recomputation: none, selective, full, or auto (searched).")
]
FrameworkName = Annotated[
    str | None,
    typer.Option(
        help="Framework whose buffers are counted: torch, megatron or deepspeed (torch, or that of --launch)."
    ),
]
LossName = Annotated[
    str, typer.Option(help="Loss kernel: fused, chunked, parallel, compiled, eager, or auto (the framework's).")
]
ExpertLoads = Annotated[
    Path | None,
    typer.Option(help="Tokens of each expert (columns) in each layer (rows), measured: CSV or JSON.",
                 show_default="equal loads"),
]  # fmt: skip
Train = Annotated[
    str,
    typer.Option(
        help="Train full, lora or qlora (adapters over 16-bit or 4-bit frozen weights), or dora.", rich_help_panel=TUNE
    ),
]
StageText = Annotated[
    str | None,
    typer.Option(
        help="Preference tuning or RL: dpo, dpo,reference=computed, grpo,group=8,rollouts=apart.",
        rich_help_panel=TUNE,
    ),
]
Rank = Annotated[int, typer.Option(help="Rank of the adapters.", rich_help_panel=TUNE)]
Targets = Annotated[
    str, typer.Option(help="Matrices with an adapter: all, attention, or names: q,v.", rich_help_panel=TUNE)
]
BaseBits = Annotated[
    str | None,
    typer.Option(
        help="Bits of the frozen matrices: 4, 8, 16, or nf4, nf4-double, int8, fp8.",
        show_default="16, with qlora 4",
        rich_help_panel=TUNE,
    ),
]
LoraDropout = Annotated[
    float, typer.Option(help="Dropout before the adapters: each keeps its own input.", rich_help_panel=TUNE)
]
FusedQkv = Annotated[
    bool, typer.Option("--fused-qkv", help="One adapter for queries, keys and values (LitGPT).", rich_help_panel=TUNE)
]
QuantizeHead = Annotated[
    bool, typer.Option("--quantize-head", help="Quantise the output head like the base.", rich_help_panel=TUNE)
]
Dequantized = Annotated[
    int, typer.Option(help="16-bit copies of a quantised matrix while it is used: 1 or 2.", rich_help_panel=TUNE)
]
FsdpVersion = Annotated[
    int, typer.Option(help="FSDP 2, or 1, whose flat gradients hold frozen ones too.", rich_help_panel=TUNE)
]
LayoutText = Annotated[
    str | None,
    typer.Option(help="Evaluate only layouts with these axes: tp=8,pp=2 (dp follows).", rich_help_panel=ANSWER),
]
WhyText = Annotated[
    str | None, typer.Option(help="Explain why this layout is not the answer: tp=8,pp=3.", rich_help_panel=ANSWER)
]
Exhaustive = Annotated[
    bool,
    typer.Option(
        "--exhaustive",
        help="Search every schedule, context kind, sharding group, micro-batch and offload.",
        rich_help_panel=ANSWER,
    ),
]
MaxSeq = Annotated[
    bool, typer.Option("--max-seq", help="Show the longest context of each layout.", rich_help_panel=ANSWER)
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Show time and cost of training on this many tokens: 1.4T, 300B.", rich_help_panel=ANSWER),
]
CapacityName = Annotated[str, typer.Option(help="Capacity to price: on-demand or spot.", rich_help_panel=MONEY)]
Prices = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of your prices; they replace the catalogue's.",
        show_default="prices.toml in CORDEE_HOME, ~/.cordee",
        rich_help_panel=MONEY,
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth from a node to checkpoint storage.",
        show_default=f"as calibrated, else {STORAGE_PER_NODE}",
        rich_help_panel=MONEY,
    ),
]
Mtbi = Annotated[
    str | None,
    typer.Option(
        help="Mean time between failures: 6h.", show_default="Llama 3's rate for so many GPUs", rich_help_panel=MONEY
    ),
]
Reclaims = Annotated[str, typer.Option(help="Mean time between reclaims of spot capacity.", rich_help_panel=MONEY)]
Notice = Annotated[str, typer.Option(help="Time from the notice of a reclaim to the reclaim.", rich_help_panel=MONEY)]
Stall = Annotated[
    str | None,
    typer.Option(
        help="Time for which an asynchronous save stops the ranks: 2s.",
        show_default="saves are synchronous",
        rich_help_panel=MONEY,
    ),
]
Buy = Annotated[
    Path | None,
    typer.Option(help="Compare renting with buying, by the assumptions in this TOML file.", rich_help_panel=MONEY),
]
LauncherName = Annotated[
    str | None,
    typer.Option(
        "--launch", help="Print the settings of a launcher: torchtitan, megatron, ...", rich_help_panel=ANSWER
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show every layout.", rich_help_panel=ANSWER)]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Run the model's own code on fake ranks, without a GPU, and compare its memory.",
        rich_help_panel=TRACE,
    ),
]
ModelCodeName = Annotated[
    str | None,
    typer.Option(
        help="Code to trace: hf (transformers) or torchtitan.",
        show_default="torchtitan for Llama",
        rich_help_panel=TRACE,
    ),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile each layer by itself, and the loss, with torch.compile.")
]
Autocast = Annotated[
    bool, typer.Option("--autocast", help="Trace fp32 weights under autocast, also with FSDP2.", rich_help_panel=TRACE)
]


def plan(
    model: Model,
    *,
    gpus: Gpus = None,
    seq: Seq = None,
    batch: Batch = None,
    micro_batch: MicroBatch = None,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    recompute: RecomputeName = "auto",
    framework: FrameworkName = None,
    loss: LossName = "auto",
    compiled: Compiled = False,
    expert_loads: ExpertLoads = None,
    train: Train = "full",
    rank: Rank = 16,
    targets: Targets = "all",
    base_bits: BaseBits = None,
    lora_dropout: LoraDropout = 0.0,
    fused_qkv: FusedQkv = False,
    quantize_head: QuantizeHead = False,
    dequantized: Dequantized = 1,
    fsdp_version: FsdpVersion = 2,
    freeze: Freeze = None,
    packed: Packed = None,
    optimizer_in_backward: InBackward = False,
    stage: StageText = None,
    layout: LayoutText = None,
    why: WhyText = None,
    exhaustive: Exhaustive = False,
    max_seq: MaxSeq = False,
    tokens: Tokens = None,
    capacity: CapacityName = "on-demand",
    prices: Prices = None,
    storage: Storage = None,
    mtbi: Mtbi = None,
    reclaims: Reclaims = SPOT_MTBI,
    notice: Notice = SPOT_NOTICE,
    stall: Stall = None,
    buy: Buy = None,
    launcher: LauncherName = None,
    html: terminal.Html = None,
    show_all: All = False,
    trace: Trace = False,
    model_code: ModelCodeName = None,
    autocast: Autocast = False,
    models: terminal.Models = False,
    kinds_: terminal.Kinds = False,
    as_json: terminal.Json = False,
) -> None:
    """Plan a training run: the layouts that fit, their speed and price, and the cost of a preemption.

    Without --gpus: list the kinds of GPU that hold it, the cheapest first. If none does: exit 21, and what would.
    """
    catalogue, gpu, first, last = _hardware(gpus, prices)
    settings = _settings(
        seq, batch, optimizer, precision, framework=_framework(framework, launcher), loss=loss, loads=expert_loads,
        packed_tokens=packed, freeze=freeze, optimizer_in_backward=optimizer_in_backward, train=train, rank=rank,
        targets=targets, base_bits=base_bits, lora_dropout=lora_dropout, fused_qkv=fused_qkv, compiled=compiled,
        quantize_head=quantize_head, dequantized=dequantized, fsdp_version=fsdp_version, model_code=model_code,
    )  # fmt: skip
    wanted, of_plans = _layout(layout, recompute, micro_batch), (stage, launcher, why, max_seq, tokens, buy, html)
    tracing = Tracing(model, gpu, last, model_code, autocast, wanted, settings) if trace else None
    if _is_planned(tracing, of_plans, gpus, first, model_code, autocast, as_json):
        _show(Request(
            shape=load_shape(model), gpu=gpu, layout=wanted, stage=stage, why=why, prices=catalogue.prices,
            settings=settings, contexts=max_seq, capacity=_one_of("capacity", capacity, CAPACITIES, CatalogueError),
            gpus=last, launcher=launcher, assumed=_assumptions(gpu, storage, mtbi, reclaims, notice, stall, prices),
            search="everything" if exhaustive else "meshes", tokens=None if tokens is None else parse_tokens(tokens),
        ), () if gpus else catalogue.gpus, first, buy, html, tracing, model, show_all, as_json)  # fmt: skip


def _is_planned(
    tracing: Tracing | None, of_plans: Sequence[object], gpus: str | None, first: int | None, code: str | None,
    autocast: bool, as_json: bool,
) -> bool:  # fmt: skip
    """Refuse flags that the answer would drop; return whether there is a plan, or a model without one was traced."""
    if tracing is None:
        refuse_untraced(code, autocast=autocast)
        return True
    names = ("--stage", "--launch", "--why", "--max-seq", "--tokens", "--buy", "--html")
    given = [name for name, value in zip(names, of_plans, strict=True) if value not in (None, False)]
    refuse_beside(given, gpus, is_range=first is not None)
    if not is_planned(tracing.model):
        compare(tracing, None, as_json=as_json)
        return False
    return True


def _hardware(gpus: str | None, prices: Path | None) -> tuple[Catalogue, Gpu, int | None, int]:
    """Return the catalogue, a kind of GPU, the first number of them where a range is asked for, and the last."""
    catalogue = load_catalogue(prices or home_prices(), home_gpus())
    if gpus is None:
        return catalogue, warned(catalogue.gpus[0]), None, 1
    gpus, catalogue = _kinds(gpus, catalogue)
    first, last, kind = _gpus(gpus)
    return catalogue, warned(find_gpu(catalogue, gpus, last, kind)), first, last


def _show(
    request: Request, kinds: Sequence[Gpu], first: int | None, buy: Path | None, html: Path | None,
    tracing: Tracing | None, model: str, show_all: bool, as_json: bool,
) -> None:  # fmt: skip
    """Answer for each kind of GPU, for a range of sizes from the first, or for the request's GPUs, traced or not."""
    if kinds:
        _refuse_beside(request, buy, "the GPUs", html)
        _print_cards(ask_cards(request, kinds), show_all=show_all, as_json=as_json)
    elif first is not None:
        _refuse_beside(request, buy, "one number of GPUs, not a range")
        _print_curve(request, ask_curve(request, first), html, as_json=as_json)
    elif tracing is not None:
        compare(tracing, request, as_json=as_json)
    else:
        answer = ask_stages(_with_ownership(request, buy))
        _print(answer, html, model_path=model_path(model), show_all=show_all, as_json=as_json)


def _layout(text: str | None, recompute: str, micro_batch: int | None) -> LayoutWanted:
    """Return the axes that the flags fix."""
    again = None if recompute == "auto" else _one_of("recompute", recompute, RECOMPUTES, also="auto")
    return layout_wanted(text, again, micro_batch)


def _framework(asked: str | None, launcher: str | None) -> str:
    """Return the framework that is asked for, that of the launcher, or torch."""
    return asked or FRAMEWORKS_OF.get(launcher or "", "torch")


def _settings(
    seq: int | None,
    batch: int | None,
    optimizer: str,
    precision: str,
    *,
    framework: str,
    loss: str,
    loads: Path | None,
    **tuning: Any,
) -> Settings:
    """Return the training settings of the flags; `tuning` are those that a fine-tuner sets."""
    return Settings(
        seq_tokens=seq,
        global_batch=batch,
        optimizer=optimizer,
        precision=_one_of("precision", precision, PRECISIONS),
        framework=_one_of("framework", framework, FRAMEWORKS),
        loss=None if loss == "auto" else _one_of("loss", loss, LOSSES, also="auto"),
        expert_loads=None if loads is None else _expert_loads(loads),
        **tuning,
    )


def _assumptions(
    gpu: Gpu, storage: str | None, mtbi: str | None, reclaims: str, notice: str, stall: str | None, prices: Path | None
) -> Assumptions:
    """Return what the flags say of storage and interruptions, and the price list of electricity."""
    return Assumptions(
        storage_bytes_per_s=node_storage_bytes_per_s(gpu) if storage is None else parse_bytes_per_s(storage),
        mtbi_s=None if mtbi is None else parse_duration_s(mtbi),
        reclaim_mtbi_s=parse_duration_s(reclaims),
        notice_s=parse_duration_s(notice),
        stall_s=None if stall is None else parse_duration_s(stall),
        electricity=load_electricity(prices or home_prices()),
    )


def _print(answer: Answer, html: Path | None, *, model_path: str | None, show_all: bool, as_json: bool) -> None:
    """Print the answer in the form that was asked for; exit with 21 if nothing fits."""
    if html is not None:
        write_page(html, answer.page())
    if as_json:
        terminal.print_json(plan_document(answer, model_path))
    elif answer.launch is not None:
        print_launch(answer.launch, answer, model_path)
    else:
        print_plan_and_more(answer, show_all=show_all)
    if not answer.fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def _expert_loads(path: Path) -> tuple[tuple[float, ...], ...]:
    from cordee.cli.experts import read_rows

    return tuple(tuple(row) for row in read_rows(path))


def _with_ownership(request: Request, buy: Path | None) -> Request:
    return request if buy is None else replace(request, ownership=_ownership(request, buy))


def _print_cards(found: Cards, *, show_all: bool, as_json: bool) -> None:
    """Print every kind of GPU; exit with 21 if none holds it."""
    if as_json:
        terminal.print_json(cards_document(found))
    else:
        print_cards(found, show_all=show_all)
    if not found.fitting:
        raise typer.Exit(DoesNotFitError.exit_code)


def _refuse_beside(request: Request, buy: Path | None, what: str, html: Path | None = None) -> None:
    """Refuse options that need what is not given."""
    flags: dict[str, object] = {
        "--why": request.why, "--max-seq": request.contexts, "--tokens": request.tokens, "--buy": buy,
        "--launch": request.launcher, "--html": html,
    }  # fmt: skip
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise SpecError(f"{given[0]} needs {what}", hint="write --gpus 64xH100")


def _print_curve(request: Request, curve: Curve, html: Path | None, *, as_json: bool) -> None:
    """Print the scaling curve; exit with 21 if nothing fits on any size."""
    shape, gpu = request.shape, request.gpu
    if html is not None:
        write_page(html, curve_page(curve, shape, gpu))
    if as_json:
        terminal.print_json(curve_document(curve, shape, gpu))
    else:
        print_curve(curve, shape, gpu)
    if curve.smallest is None:
        raise typer.Exit(DoesNotFitError.exit_code)


def _kinds(text: str, catalogue: Catalogue) -> tuple[str, Catalogue]:
    """Return the GPUs of this host, or of several kinds, as one kind of a catalogue; say what several run at."""
    found = with_several_kinds(gpus_here(text, catalogue), catalogue)
    note_several_kinds(found[1].gpus[-1])
    return found


def _gpus(text: str) -> tuple[int | None, int, str | None]:
    """Return the range's first size or None, the total, and the kind: `8..512xH100`, `64xH100`."""
    if match := re.match(r"\s*(\d+)\s*\.\.\s*", text):
        count, kind = parse_gpus(text[match.end() :])
        return int(match[1]), count, kind
    if match := re.fullmatch(r"\s*([A-Za-z][\w. -]*):(\d+)\s*\.\.\s*(\d+)\s*", text):
        return int(match[2]), int(match[3]), match[1]
    count, kind = parse_gpus(text)
    return None, count, kind


def _ownership(request: Request, path: Path) -> Ownership:
    """Read the assumptions of rent or buy; GPUs and rent come from the request where the file has none."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist", hint="give the path of a TOML file with your assumptions") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}", hint="it must be a TOML file") from None
    rent = None if request.price is None else request.price.usd_per_gpu_hour
    return ownership_from(table, gpus=request.gpus, rent_usd_per_gpu_hour=rent)


def _one_of(
    what: str, text: str, known: tuple[T, ...], error: Callable[..., Exception] = LayoutError, also: str = ""
) -> T:
    for name in known:
        if text == name:
            return name
    raise error(f"unknown {what} {text!r}", hint=did_you_mean(text, [*known, *([also] if also else [])]))
