"""The serving answer as a JSON document: base units, the schema in `ServingDocument.model_json_schema()`.

Version 1. New keys may come; old ones keep their meaning until the version changes.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from cordee.document import Row, read_from
from cordee.plan.document import GpuRow, ModelRow, PriceRow
from cordee.plan.launch import Launch
from cordee.plan.serving.answer import ServingAnswer
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.levers.renting import HourPrice
from cordee.plan.serving.price.own_or_api import BreakEven
from cordee.plan.serving.price.price import TokenPrices
from cordee.plan.serving.queueing.served import Percentiles
from cordee.plan.serving.request import Statistic
from cordee.plan.serving.why import Ground

Text = Annotated[str, BeforeValidator(str)]


class EngineRow(Row):
    """The engine, and the first version that behaves so."""

    name: str
    version: str


class TrafficRow(Row):
    """The requests to serve."""

    input_tokens: int
    output_tokens: int
    rate_per_s: float | None
    concurrency: int | None
    cached_fraction: float
    imbalance: float | None
    traced_requests: Annotated[int, BeforeValidator(lambda found: found if isinstance(found, int) else len(found))] = (
        read_from("requests")
    )


class SloRow(Row):
    """The latencies to meet."""

    ttft_s: float | None
    tpot_s: float | None
    statistic: Statistic


class ServingPartsRow(Row):
    """Bytes of one GPU, part by part."""

    weights: int
    activations: int
    graphs: int
    context: int
    communication: int
    kv: int


class KvRow(Row):
    """The KV cache of one replica."""

    tokens: int = read_from("kv_tokens")
    tokens_interval: tuple[int, int] = read_from("kv_tokens_interval")
    blocks: int
    block_bytes: int
    longest_context_tokens: int
    pinned_host_bytes: int


class PerformanceRow(Row):
    """All replicas under the traffic."""

    sequences: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles = read_from("ttft")
    tpot_s: Percentiles = read_from("tpot")
    e2e_s: Percentiles = read_from("e2e")
    played: bool
    requests: int
    refused: int


class ServingLayoutRow(Row):
    """One layout of a replica in its formats."""

    layout: Text = read_from("case", "layout")
    tp: int = read_from("case", "layout", "tp")
    pp: int = read_from("case", "layout", "pp")
    dp: int = read_from("case", "layout", "dp")
    ep: bool = read_from("case", "layout", "ep")
    weights: str = read_from("case", "weights", "name")
    kv: str = read_from("case", "kv", "name")
    replicas: int
    gpus: int
    fits: bool
    keeps_slo: bool
    shortfall_bytes: int
    max_context_tokens: int = read_from("case", "max_context_tokens")
    max_sequences: int = read_from("case", "max_sequences")
    sequences: int
    parts_bytes: ServingPartsRow = read_from("parts")
    kv_cache: KvRow = read_from("memory")
    performance: PerformanceRow | None
    prices: TokenPrices | None
    usd_per_mtok: float | None
    usd_per_hour: float | None


class ServingRemedyRow(Row):
    """A change after which a layout meets the SLO."""

    change: str
    layout: ServingLayoutRow = read_from("candidate")


class ServingPointRow(Row):
    """One point of throughput against latency."""

    sequences: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    added_fraction: float
    usd_per_mtok: float | None = read_from("candidate", "usd_per_mtok")
    keeps_slo: bool = read_from("candidate", "keeps_slo")


class ServingWhyRow(Row):
    """Why not a layout, or a concurrency."""

    asked: str
    ground: Ground
    message: str
    hint: str
    layout: ServingLayoutRow | None = read_from("candidate")


class PoolRow(Row):
    """The replicas of one phase."""

    layout: Text = read_from("case", "layout")
    weights: str = read_from("case", "weights", "name")
    kv: str = read_from("case", "kv", "name")
    replicas: int
    gpus: int


class PhasesRow(Row):
    """Replicas for prefill and others for decode, with the way of a mean prompt's KV cache between them."""

    prefill: PoolRow
    decode: PoolRow
    gpus: int
    requests_per_s: float
    ttft_s: Percentiles = read_from("ttft")
    tpot_s: Percentiles = read_from("tpot")
    e2e_s: Percentiles = read_from("e2e")
    sent_bytes: int
    sent_s: float
    keeps_slo: bool
    refused: int
    input_usd: float | None
    output_usd: float | None
    usd_per_mtok: float | None


class ServingDocument(Row):
    """The whole answer."""

    version: Literal[1] = 1
    summary: str
    model: ModelRow
    model_path: str | None
    gpu: GpuRow
    gpus: int
    engine: EngineRow
    traffic: TrafficRow
    slo: SloRow
    price: PriceRow | None
    fits: bool
    keeps_slo: bool
    layouts: tuple[ServingLayoutRow, ...]
    phases: PhasesRow | None
    engine_log: tuple[str, ...]
    curve: tuple[ServingPointRow, ...]
    knee_sequences: int | None
    hours: tuple[HourPrice, ...]
    levers: tuple[Lever, ...]
    electricity_usd_per_mtok: float | None
    against_api: BreakEven | None
    method: str
    sources: tuple[str, ...]
    floor: str
    remedies: tuple[ServingRemedyRow, ...]
    why: ServingWhyRow | None
    launch: Launch | None


def serving_document(answer: ServingAnswer, model_path: str | None = None) -> ServingDocument:
    """Return the answer as a document; `model_path` is where its model was read, None for one of the catalogue."""
    request, curve = answer.request, answer.curve
    return ServingDocument.model_validate(
        {
            "summary": answer.summary,
            "model": request.shape,
            "model_path": model_path,
            "gpu": request.gpu,
            "gpus": request.gpus,
            "engine": request.engine,
            "traffic": request.traffic,
            "slo": request.slo,
            "price": request.price,
            "fits": answer.fits,
            "keeps_slo": answer.best is not None,
            "layouts": tuple(_layout(each) for each in answer.candidates),
            "phases": answer.phases,
            "engine_log": answer.engine_log,
            "curve": () if curve is None else curve.points,
            "knee_sequences": None if curve is None or curve.knee is None else curve.knee.sequences,
            "hours": answer.hours,
            "levers": answer.levers,
            "electricity_usd_per_mtok": answer.electricity_usd_per_mtok,
            "against_api": answer.against_api,
            "method": answer.method,
            "sources": answer.sources,
            "floor": answer.floor,
            "remedies": answer.remedies,
            "why": answer.why,
            "launch": answer.launch,
        }
    )


def _layout(each: ServingCandidate) -> ServingLayoutRow:
    return ServingLayoutRow.model_validate(each)
