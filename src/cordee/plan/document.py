"""The answer as a JSON document: base units, the schema in `PlanDocument.model_json_schema()`.

Version 2. New keys may come; old ones keep their meaning until the version changes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

from pydantic import AliasGenerator, AliasPath, BeforeValidator, ConfigDict

from cordee.document import Row, read_from
from cordee.hardware.catalog import Capacity, Gpu
from cordee.plan.ask import Answer
from cordee.plan.cost import TrainingRun
from cordee.plan.curve import Curve
from cordee.plan.expect import Expectation
from cordee.plan.launch import Launch
from cordee.plan.layout import ContextKind, Layout, Offload, Recompute
from cordee.plan.rent_or_buy import Ownership, Swing
from cordee.plan.survive import LevelSave, Survival
from cordee.plan.training import Framework, Frozen, Loss, Precision, Stage
from cordee.plan.why import Ground
from cordee.workload.model import ModelShape, ParameterCount
from cordee.workload.tuning import TuneSpec, tuned

Text = Annotated[str, BeforeValidator(str)]
Rounded = Annotated[int, BeforeValidator(lambda value: round(float(value)))]
_AXES = {axis.name for axis in fields(Layout)}


def _first(found: object) -> object:
    return found[0] if isinstance(found, tuple) else found


def _aliases(path: Callable[[str], str | AliasPath]) -> ConfigDict:
    """Return the settings of a model whose fields are read from this path of attributes, by name."""
    return ConfigDict(alias_generator=AliasGenerator(validation_alias=path))


class ModelRow(Row):
    """The model and its parameters by part."""

    name: str
    parameters: int
    active_parameters: int
    parts: ParameterCount = read_from("parameter_count")


class GpuRow(Row):
    """The kind of GPU."""

    name: str
    memory_bytes: int
    source: Text


class AdaptersRow(Row):
    """Adapters over frozen weights."""

    rank: int
    targets: tuple[str, ...]
    base: str = read_from("base", "name")
    base_bits: int
    dropout: float
    magnitudes: bool


class TrainingRow(Row):
    """The training, every default filled in."""

    seq_tokens: int
    global_batch: int
    tokens_per_step: int
    optimizer: str = read_from("optimizer", "name")
    precision: Precision
    framework: Framework
    loss: Loss = read_from("loss_kind")
    expert_imbalance_by_ep: Annotated[
        dict[int, float] | None, BeforeValidator(lambda pairs: dict(pairs or ()) or None)
    ] = read_from("imbalance_by_ep")
    adapters: AdaptersRow | None
    frozen: Frozen | None = read_from("tuning", "frozen")
    packed_tokens: int | None = read_from("tuning", "packed_tokens")
    optimizer_in_backward: bool = read_from("optimizer", "in_backward")
    stage: Stage | None = read_from("tuning", "stage")


class StateRow(Row):
    """Weights, gradients and optimizer states, and the GPUs that they need."""

    bytes_per_parameter: float = read_from("training", "optimizer", "bytes_per_parameter")
    state_bytes: int
    fewest_gpus: int = read_from("fewest_gpus_to_hold")
    fewest_gpus_to_train: Annotated[int | None, BeforeValidator(_first)]


class PriceRow(Row):
    """The price that the dollars are counted with."""

    capacity: Capacity
    usd_per_gpu_hour: float
    source: Text


class PartsRow(Row):
    """Bytes of the fullest GPU, part by part."""

    model_config = _aliases(lambda name: f"{name}_bytes")

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int
    fragmentation: int
    context: int


class StepRow(Row):
    """Seconds of a step, part by part."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    pipeline_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float
    offload_s: float
    host_s: float
    reference_s: float


class LayoutRow(Row):
    """One layout, its memory and, if it fits, its speed."""

    model_config = _aliases(lambda name: AliasPath("layout", name) if name in _AXES else name)

    layout: Text
    dp: int
    tp: int
    pp: int
    zero: int
    sp: bool
    micro_batch: int
    recompute: Recompute
    cp: int
    ep: int
    etp: int | None
    shard: int | None
    schedule: str
    vpp: int
    cp_kind: ContextKind
    split: tuple[int, ...] | None
    recompute_layers: int | None
    offload: Offload
    fits: bool
    peak_bytes: int
    gpu_memory_bytes: int
    shortfall_bytes: int
    needed_bytes_nine_of_ten: tuple[int, int] = read_from("needed_interval_bytes")
    tight: bool
    fullest_stage: int = read_from("memory", "worst_stage")
    parts_bytes: PartsRow = read_from("memory", "worst")
    step_s: float | None
    step_s_nine_of_ten: tuple[float, float] | None = read_from("step_interval_s")
    step_parts_s: StepRow | None = read_from("step")
    mfu: float | None
    tokens_per_s: float | None
    usd_per_billion_tokens: float | None


class MomentRow(Row):
    """Bytes that are allocated at one event of the step."""

    event: str
    weights_bytes: Rounded
    gradients_bytes: Rounded
    optimizer_bytes: Rounded
    activations_bytes: Rounded
    loss_bytes: Rounded
    buffers_bytes: Rounded


class TimelineRow(Row):
    """The events of the fullest stage of the best layout, in their order."""

    layout: Text
    stage: int = read_from("memory", "worst_stage")
    peak_event: str = read_from("memory", "peak_event")
    events: tuple[MomentRow, ...] = read_from("memory", "worst_timeline")


class RemedyRow(Row):
    """A change after which a layout fits."""

    change: str
    because: str
    gpus: int
    seq_tokens: int = read_from("training", "seq_tokens")
    optimizer: str = read_from("training", "optimizer", "name")
    layout: LayoutRow = read_from("candidate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalRow(Survival):
    """Price, interruptions and losses on one kind of capacity."""

    capacity: Capacity
    usd_per_gpu_hour: float | None
    price_source: str | None
    mtbi_source: str


class WhyRow(Row):
    """Why the best layout is not another one."""

    asked: str
    ground: Ground
    message: str
    hint: str
    layout: LayoutRow | None = read_from("candidate")
    more_s: Annotated[dict[str, float], BeforeValidator(dict)]


class ContextRow(Row):
    """The longest sequence of a layout."""

    layout: Text
    seq_tokens: int
    sure_seq_tokens: int
    peak_bytes: int


class RentOrBuyRow(Row):
    """Rent against purchase, and the assumptions that move the answer most."""

    assumed: Ownership
    break_even_month: int | None
    rent_usd: float
    own_usd: float
    own_usd_per_gpu_hour: float
    break_even_busy_fraction: float | None
    swings: tuple[Swing, ...]
    verdict: str


class RolloutsRow(Row):
    """One iteration of GRPO: completions, passes without gradients, updates and the weights' way to the engine."""

    engine: str
    gpus: int
    trainers: int
    apart: bool
    overlap: bool
    completions: int
    replicas: int
    concurrent: int
    kv_tokens: int
    engine_bytes: int
    generate_s: float
    weights_s: float
    reference_s: float
    update_s: float
    iteration_s: float
    idle_fraction: float


class EnergyRow(Row):
    """Energy of the whole building with boards at their limits, and what the grid emits for it."""

    gpus: int
    seconds: float
    board_watts: float = read_from("draw", "watts")
    host_watts: float = read_from("draw", "host", "watts")
    building_factor: float = read_from("electricity", "building_factor")
    kwh: float
    kg_co2e: float | None
    usd: float
    sources: tuple[str, ...]


class PlanDocument(Row):
    """The whole answer."""

    version: Literal[2] = 2
    summary: str
    model: ModelRow
    model_path: str | None
    gpu: GpuRow
    gpus: int
    training: TrainingRow
    tune: TuneSpec
    state: StateRow
    price: PriceRow | None
    fits: bool
    candidates: int
    layouts: tuple[LayoutRow, ...]
    sure: LayoutRow | None
    timeline: TimelineRow
    seen_bytes_nine_of_ten: tuple[int, int] | None
    remedies: tuple[RemedyRow, ...]
    survival: tuple[SurvivalRow, ...]
    storage_levels: tuple[LevelSave, ...]
    capture_bytes_per_node: int
    why: WhyRow | None
    longest_contexts: tuple[ContextRow, ...]
    rollouts: RolloutsRow | None
    energy: EnergyRow | None
    run_energy: EnergyRow | None
    run: TrainingRun | None
    rent_or_buy: RentOrBuyRow | None
    launch: Launch | None


class PointRow(Row):
    """The best layout of one size; None where nothing fits or divides."""

    gpus: int
    layout: LayoutRow | None = read_from("candidate")
    added_fraction: float | None


class CurveDocument(Row):
    """The scaling curve."""

    version: Literal[2] = 2
    model: ModelRow
    gpu: GpuRow
    seq_tokens: int
    global_batch: int
    knee_gpus: int | None
    points: tuple[PointRow, ...]


def plan_document(answer: Answer, model_path: str | None = None) -> PlanDocument:
    """Return the answer as a document; `model_path` is where its model was read, None for one of the catalogue."""
    request = answer.request
    return PlanDocument.model_validate(
        {
            "summary": answer.summary,
            "model": request.shape,
            "model_path": model_path,
            "gpu": request.gpu,
            "gpus": request.gpus,
            "training": answer.training,
            "tune": TuneSpec(**tuned(request.settings), stage=request.stage),
            "state": answer,
            "price": request.price,
            "fits": answer.fits,
            "candidates": answer.layouts.candidates,
            "layouts": (*answer.fitting, *answer.rejected),
            "sure": answer.sure,
            "timeline": answer.nearest,
            "seen_bytes_nine_of_ten": answer.seen_interval_bytes,
            "remedies": answer.remedies,
            "survival": tuple(_survival(expected) for expected in answer.expectations),
            "storage_levels": answer.level_saves,
            "capture_bytes_per_node": answer.capture_bytes_per_node(held=False),
            "why": answer.why,
            "longest_contexts": answer.longest_contexts,
            "rollouts": answer.rollouts,
            "energy": answer.energy,
            "run_energy": answer.run_energy,
            "run": answer.run,
            "rent_or_buy": answer.rent_or_buy,
            "launch": answer.launch,
        }
    )


def curve_document(curve: Curve, shape: ModelShape, gpu: Gpu) -> CurveDocument:
    """Return the scaling curve as a document."""
    return CurveDocument.model_validate(
        {
            "model": shape,
            "gpu": gpu,
            "seq_tokens": curve.training.seq_tokens,
            "global_batch": curve.training.global_batch,
            "knee_gpus": None if curve.knee is None else curve.knee.gpus,
            "points": curve.points,
        }
    )


def _survival(expected: Expectation) -> SurvivalRow:
    price = expected.price
    return SurvivalRow(
        capacity=expected.capacity,
        usd_per_gpu_hour=None if price is None else price.usd_per_gpu_hour,
        price_source=None if price is None else str(price.source),
        mtbi_source=expected.mtbi_source,
        **asdict(expected.survival),
    )
