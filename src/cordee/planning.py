"""`cordee.plan(model, gpus)` for notebooks, and the files that a plan is made from: models, GPUs, prices.

`plan/` itself reads no file. What a user writes (`64xH100`, a folder, a list of prices) becomes a `Request` here.
"""

import os
import re
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from cordee.errors import CatalogueError, SpecError, TraceError
from cordee.hardware.catalog import PRICED, Capacity, Catalogue, Gpu
from cordee.hardware.load import load_catalogue, load_electricity, load_speedups, own_gpu_files
from cordee.hardware.several import joined, joined_prices
from cordee.near import did_you_mean
from cordee.plan.ask import Answer, Request
from cordee.plan.expect import Assumptions, node_storage_bytes_per_s
from cordee.plan.layout import Recompute
from cordee.plan.rollouts import ask_stages
from cordee.plan.serving.ask import ServingAnswer, ServingRequest
from cordee.plan.serving.ask import ask as ask_serving
from cordee.plan.serving.disaggregation import parse_phases
from cordee.plan.serving.engine import Engine, find_engine
from cordee.plan.serving.formats import KV, WEIGHTS, Format, default_format, find_format
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, parse_serving_layout
from cordee.plan.serving.price.price import TokenPrices
from cordee.plan.serving.request import STATISTICS, Draft, EngineLimits, LeverAssumptions, Pricing, Slo, Traffic
from cordee.plan.settings import Settings
from cordee.plan.training import Loss, Precision
from cordee.plan.wanted import layout_wanted
from cordee.units import parse_bytes_per_s, parse_latency_s, parse_rate_per_s, parse_token_count
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape
from cordee.workload.request_files import load_requests
from cordee.workload.spec import ModelSpec
from cordee.workload.tuning import ModelCode, Trained, tuned

T = TypeVar("T", bound=str)
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class SettingsGiven(TypedDict, total=False):
    """The fields of `Settings` that a notebook may give."""

    seq_tokens: int
    global_batch: int
    optimizer: str
    precision: Precision
    framework: str
    loss: Loss
    optimizer_in_backward: bool
    freeze: str
    packed_tokens: int
    train: Trained
    rank: int
    targets: str
    base_bits: int | str
    lora_dropout: float
    fused_qkv: bool
    quantize_head: bool
    dequantized: int
    fsdp_version: int
    compiled: bool
    model_code: ModelCode


def plan(
    model: str | Path,
    gpus: str,
    *,
    layout: str | None = None,
    recompute: Recompute | None = None,
    micro_batch: int | None = None,
    capacity: Capacity = "on-demand",
    prices: Path | None = None,
    assumed: Assumptions | None = None,
    tokens: str | None = None,
    stage: str | None = None,
    **settings: Unpack[SettingsGiven],
) -> Answer:
    """Plan a model of the catalogue, a config.json or a folder with one, on GPUs such as `64xH100`.

    Args:
        model: what to train.
        gpus: the job's total and the kind of GPU; `8xH100+8xA100` for a gang over several kinds.
        layout: consider only layouts like this one: `tp=8,pp=2`.
        recompute: none, selective or full; None tries all.
        micro_batch: sequences; None tries 1 to 8.
        capacity: the kind whose price counts.
        prices: a `prices.toml` over the catalogue's; None takes the one in Cordee's home, if there is one.
        assumed: storage and interruptions.
        tokens: how many to train on, for time and cost: `300B`, `1.4T`.
        stage: a stage with a reference: `dpo`, `grpo,group=8,rollouts=apart`.
        **settings: the fields of `Settings`: `seq_tokens`, `global_batch`, `optimizer`, `train`, ...

    Raises:
        CatalogueError, ShapeError, LayoutError, SpecError: something is unknown, unreadable or does not divide.
    """
    catalogue = load_catalogue(prices or home_prices(), home_gpus())
    gpus, catalogue = with_several_kinds(gpus_here(gpus, catalogue), catalogue)
    count, kind = parse_gpus(gpus)
    gpu = find_gpu(catalogue, gpus, count, kind)
    electricity = load_electricity(prices or home_prices())
    return ask_stages(
        Request(
            shape=load_shape(str(model)),
            gpu=gpu,
            gpus=count,
            settings=Settings(**settings),  # type: ignore[arg-type]
            layout=layout_wanted(layout, recompute, micro_batch),
            assumed=assumed or Assumptions(storage_bytes_per_s=node_storage_bytes_per_s(gpu), electricity=electricity),
            prices=catalogue.prices,
            capacity=capacity,
            tokens=None if tokens is None else parse_tokens(tokens),
            stage=stage,
        )
    )


def settings_of(model: ModelSpec) -> Settings:
    """Return the settings of training that a job's `model` says."""
    return Settings(
        seq_tokens=model.seq,
        global_batch=model.global_batch,
        optimizer=model.optimizer,
        precision=model.precision,
        framework=model.framework,
        loss=model.loss,
        **tuned(model.tune),
    )


class ServingGiven(TypedDict, total=False):
    """The rest of a serving question beside the model and the GPUs, as it is written on the command line."""

    input_tokens: int
    output_tokens: int
    rate: str | None
    concurrency: int | None
    requests: Path | None
    cached: float
    imbalance: float | None
    ttft: str | None
    tpot: str | None
    statistic: str
    weights: str | None
    kv: str
    layout: str | None
    disaggregate: str | None
    engine: str | None
    context: str | None
    max_sequences: int | None
    memory_fraction: float | None
    acceptance: float
    draft: str | None
    prefix: float
    kv_bandwidth: str | None
    capacity: str
    prices: Path | None
    hours: str | None
    api: str | None
    why: str | None
    launcher: str | None


def serve_plan(model: str | Path, gpus: str, **given: Unpack[ServingGiven]) -> ServingAnswer:
    """Plan the serving of a model of the catalogue, a config.json or a folder with one, on GPUs such as `8xH100`.

    Args:
        model: what to serve.
        gpus: the GPUs of all replicas, and their kind.
        **given: as on the command line: `rate="5/s"`, `ttft="500ms"`, `kv="fp8"`, `layout="tp=2"`, ...

    Raises:
        CatalogueError, ShapeError, LayoutError, SpecError, UnitError, TraceError: something is unknown, unreadable or
            does not divide.
    """
    wanted = given.get("disaggregate")
    return ask_serving(serving_request(model, gpus, **given), None if wanted is None else parse_phases(wanted))


def serving_request(model: str | Path, gpus: str, **given: Unpack[ServingGiven]) -> ServingRequest:
    """Return the question of `serve_plan`.

    Raises:
        CatalogueError, ShapeError, LayoutError, SpecError, UnitError, TraceError: something is unknown or unreadable.
    """
    catalogue = load_catalogue(given.get("prices") or home_prices(), home_gpus())
    gpus, catalogue = with_several_kinds(gpus_here(gpus, catalogue), catalogue)
    count, kind = parse_gpus(gpus)
    gpu = find_gpu(catalogue, gpus, count, kind)
    layout, context = given.get("layout"), given.get("context")
    shape, engine = load_shape(str(model)), parse_engine(given.get("engine") or "vllm")
    ttft, tpot = given.get("ttft"), given.get("tpot")
    bandwidth = given.get("kv_bandwidth")
    return ServingRequest(
        shape=shape,
        gpu=gpu,
        gpus=count,
        engine=engine,
        model=str(model),
        traffic=_traffic(given),
        slo=Slo(
            ttft_s=None if ttft is None else parse_latency_s(str(ttft)),
            tpot_s=None if tpot is None else parse_latency_s(str(tpot)),
            statistic=_one_of("statistic", given.get("statistic", "p99"), STATISTICS),
        ),
        weights=_weights(given.get("weights"), shape, gpu, engine),
        kv=_kv(given.get("kv", "bf16"), engine),
        layout=ANY_SERVING_LAYOUT if layout is None else parse_serving_layout(layout),
        limits=EngineLimits(
            context_tokens=None if context is None else parse_token_count(str(context)),
            max_sequences=given.get("max_sequences"),
            memory_fraction=given.get("memory_fraction"),
        ),
        pricing=Pricing(
            prices=catalogue.prices,
            capacity=_one_of("capacity", given.get("capacity", "on-demand"), PRICED),
            busy_fractions=_hours(given.get("hours")),
            other_gpus=tuple(each for each in catalogue.gpus if each.name != gpu.name),
            api=_api_prices(given.get("api")),
        ),
        assumed=LeverAssumptions(
            acceptance=given.get("acceptance", 0.7),
            draft=_draft(given.get("draft")),
            prefix_fraction=given.get("prefix", 0.5),
            kv_bytes_per_s=None if bandwidth is None else parse_bytes_per_s(bandwidth),
            speedups=load_speedups(),
        ),
        why=given.get("why"),
        launcher=given.get("launcher"),
    )


def parse_engine(text: str) -> Engine:
    """Return the engine of `vllm` or `vllm@0.21`.

    Raises:
        LayoutError: no such engine, or a version before the first that is known.
    """
    name, _, version = text.partition("@")
    return find_engine(name, version or None)


def _traffic(given: ServingGiven) -> Traffic:
    """Return the traffic; a trace brings its own lengths and its own rate."""
    path, rate = given.get("requests"), given.get("rate")
    if path is None:
        return Traffic(
            input_tokens=given.get("input_tokens", 1000),
            output_tokens=given.get("output_tokens", 200),
            rate_per_s=None if rate is None else parse_rate_per_s(str(rate)),
            concurrency=given.get("concurrency"),
            cached_fraction=given.get("cached", 0.0),
            imbalance=given.get("imbalance"),
        )
    if rate is not None or given.get("concurrency") is not None:
        raise SpecError(f"{path} has its own arrivals", hint="leave out --rate and --concurrency beside --requests")
    found = load_requests(path)
    if not found:
        raise TraceError(f"{path} has no requests with an answer", hint="give a trace of at least one")
    return Traffic(
        input_tokens=max(1, round(sum(each.input_tokens for each in found) / len(found))),
        output_tokens=max(1, round(sum(each.output_tokens for each in found) / len(found))),
        requests=found,
        imbalance=given.get("imbalance"),
    )


def _weights(text: str | None, shape: ModelShape, gpu: Gpu, engine: Engine) -> tuple[Format, ...]:
    """Return the formats to try: the checkpoint's own, those that are named (`bf16,fp8`), or with `any` each kind.

    `any` takes the formats of 16, 8 and 4 bits that the engine serves and whose products the GPU computes.
    """
    if text is None:
        return (default_format(shape.native_format, engine.weights),)
    if text != "any":
        return tuple(find_format(WEIGHTS, name) for name in text.split(","))
    own = default_format(shape.native_format, engine.weights)
    kinds = (own.name, "bf16", "fp8", "nvfp4", "int4", "gguf-q8_0", "gguf-q4_k_m")
    found = [WEIGHTS[name] for name in dict.fromkeys(kinds) if name in engine.weights]
    smaller = [each for each in found if each.bits <= own.bits]
    return tuple(each for each in smaller if each.weight_only or each.products in gpu.flop_per_s or each is own)


def _kv(text: str, engine: Engine) -> tuple[Format, ...]:
    """Return the formats of the KV cache to try: those that are named, or with `any` 16 and 8 bits."""
    names = [name for name in ("bf16", "fp8", "q8_0") if name in engine.kv] if text == "any" else text.split(",")
    return tuple(find_format(KV, name) for name in names)


def _draft(text: str | None) -> Draft | None:
    """Return the draft model of this name, or of this fraction of the model's parameters."""
    if text is None:
        return None
    try:
        fraction = float(text)
    except ValueError:
        return Draft(text, load_shape(text))
    return Draft(f"{fraction:.2g} of the parameters", fraction=fraction)


def _api_prices(text: str | None) -> TokenPrices | None:
    """Return dollars of a million input, cached and output tokens; cached ones cost as others if two are given.

    Raises:
        SpecError: not two or three amounts.
    """
    if text is None:
        return None
    try:
        prices = [float(part.strip().removeprefix("$")) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (2, 3) or min(prices) < 0:
        hint = "write dollars of a million input, cached and output tokens: 0.5,0.05,1.5"
        raise SpecError(f"--api {text} is not a price list", hint=hint)
    return TokenPrices(prices[0], prices[1] if len(prices) == 3 else prices[0], prices[-1])


def _hours(text: str | None) -> tuple[float, ...]:
    """Return the loads of the hours of a day.

    Raises:
        SpecError: not 24 numbers from 0, or all of them 0.
    """
    if text is None:
        return (1.0,)
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if len(loads) != 24 or min(loads) < 0 or max(loads) <= 0:
        count = f"{len(loads)} loads" if loads else repr(text)
        raise SpecError(
            f"--hours {count} is not a day", hint="write 24 numbers, the busiest hour the largest: 0.2,...,1"
        )
    return loads


def _one_of(what: str, text: str, known: tuple[T, ...]) -> T:
    for name in known:
        if text == name:
            return name
    raise SpecError(f"unknown {what} {text!r}", hint=did_you_mean(text, known))


def gpus_here(text: str, catalogue: Catalogue, *, cpu: bool = False) -> str:
    """Return `here` and `2xhere` as the calibrated device of this host: `8xH100`; anything else as it is.

    Without a number it is all of them. A GPU comes before the CPU, unless `cpu` is asked for.

    Raises:
        CatalogueError: nothing on this host was calibrated.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?here(?::(\d+))?\s*", text)
    if match is None:
        return text
    host = socket.gethostname()
    own = [gpu for gpu in catalogue.gpus if gpu.measured is not None and gpu.measured.fingerprint.get("host") == host]
    own = [gpu for gpu in own if gpu.is_synchronous or not cpu]
    if not own:
        has_driver = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))
        there = "is calibrated" if has_driver else "is calibrated, and it has no GPU"
        raise CatalogueError(
            f"nothing on {host} {there}: `here` stands for what cordee calibrate has measured of this machine",
            hint="cordee calibrate "
            + ("first" if has_driver else "measures the CPU, a device like others here; or name GPUs: 8xH100"),
        )
    gpu = min(own, key=lambda each: each.is_synchronous)
    measured = gpu.measured
    assert measured is not None, "it is one of those"
    count = match[1] or match[2] or measured.fingerprint.get("count", "1")
    return f"{count}x{gpu.name}"


def with_several_kinds(text: str, catalogue: Catalogue) -> tuple[str, Catalogue]:
    """Return `8xH100+8xA100` as 16 GPUs of one kind that ranks with equal work can count on, and a catalogue with it.

    `16xH100 and A100` is as many of each. Any other text is returned as it is.

    Raises:
        CatalogueError: a kind is unknown, or they have no precision in common.
        SpecError: so many do not divide among the kinds.
    """
    kind = r"[A-Za-z][\w.-]*(?: (?!and )[\w.-]+)*"
    if re.fullmatch(rf"\s*\d+\s*[x*]\s*{kind}(?:\s*\+\s*\d+\s*[x*]\s*{kind})+\s*", text):
        parts = [(int(count), name) for count, name in re.findall(rf"(\d+)\s*[x*]\s*({kind})", text)]
    elif match := re.fullmatch(rf"\s*(\d+)\s*[x*]\s*({kind}(?: and {kind})+)\s*", text):
        names = match[2].split(" and ")
        each, left = divmod(int(match[1]), len(names))
        if left:
            hint = f"say how many of each: {each + left}x{names[0]}+" + "+".join(f"{each}x{name}" for name in names[1:])
            raise SpecError(f"{match[1]} GPUs do not divide among {len(names)} kinds", hint=hint)
        parts = [(each, name) for name in names]
    else:
        return text, catalogue
    counts: dict[Gpu, int] = {}
    for count, name in parts:
        gpu = catalogue.find_gpu(name)
        counts[gpu] = counts.get(gpu, 0) + count
    total = sum(counts.values())
    if len(counts) == 1:
        return f"{total}x{next(iter(counts)).name}", catalogue
    gpu = joined(counts)
    prices = (*catalogue.prices, *joined_prices(gpu.name, counts, catalogue.prices))
    return f"{total}x{gpu.name}", replace(catalogue, gpus=(*catalogue.gpus, gpu), prices=prices)


def find_gpu(catalogue: Catalogue, text: str, count: int, kind: str | None) -> Gpu:
    """Return the GPU that a text such as `64xH100` names.

    Raises:
        CatalogueError: it names none, or one that is unknown.
    """
    if kind is None:
        known, named = ", ".join(gpu.name for gpu in catalogue.gpus), f"{count}xH100"
        with suppress(CatalogueError):  # 4090 is a card, not so many
            named = f"1x{catalogue.find_gpu(str(count)).name}"
        raise CatalogueError(f"--gpus {text} does not say which GPU", hint=f"write {named}; known are {known}")
    gpu = catalogue.find_gpu(kind)
    together = min(count, gpu.gpus_per_node) if gpu.is_synchronous else 1  # ranks on one host have one memory
    return replace(gpu, memory_bytes=gpu.memory_bytes // together) if together > 1 else gpu


def home_prices() -> Path | None:
    """Return the `prices.toml` in Cordee's home, which a server accounts by too; None if there is none."""
    return _in_home("prices.toml")


def home_gpus() -> tuple[Path, ...]:
    """Return the files in Cordee's home that describe GPUs, which a server plans by too."""
    return own_gpu_files(_home())


def _in_home(name: str) -> Path | None:
    path = _home() / name
    return path if path.exists() else None


def _home() -> Path:
    return Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser()


def parse_tokens(text: str) -> float:
    """Return the tokens of `300B` or `1.4T`.

    >>> parse_tokens("300B"), parse_tokens("1.4T")
    (300000000000.0, 1400000000000.0)

    Raises:
        SpecError: not such a text, or no tokens.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMBGT])", text.strip())
    if match is None or float(match[1]) == 0:
        raise SpecError(f"--tokens {text} is not a number of tokens", hint="write 300B or 1.4T")
    return float(match[1]) * _COUNTS[match[2].upper()]
