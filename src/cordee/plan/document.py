"""The answer as a JSON document: base units, the schema in `PlanDocument.model_json_schema()`.

Version 2. New keys may come; old ones keep their meaning until the version changes.
"""

from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cordee.hardware.catalog import Capacity, Gpu, Price
from cordee.plan.ask import Answer
from cordee.plan.candidates import Candidate, Remedy
from cordee.plan.cost import TrainingRun
from cordee.plan.curve import Curve
from cordee.plan.expect import Expectation
from cordee.plan.launch import Launch
from cordee.plan.layout import ContextKind, Offload, Recompute
from cordee.plan.rent_or_buy import Ownership, Swing
from cordee.plan.survive import LevelSave
from cordee.plan.training import Framework, Loss, Precision
from cordee.plan.why import Ground, Why
from cordee.workload.model import ModelShape, ParameterCount


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


class ModelRow(_Row):
    """The model and its parameters by part."""

    name: str
    parameters: int
    active_parameters: int
    parts: ParameterCount


class GpuRow(_Row):
    """The kind of GPU."""

    name: str
    memory_bytes: int
    source: str


class TrainingRow(_Row):
    """The training, every default filled in."""

    seq_tokens: int
    global_batch: int
    tokens_per_step: int
    optimizer: str
    precision: Precision
    framework: Framework
    loss: Loss
    expert_imbalance_by_ep: dict[int, float] | None


class StateRow(_Row):
    """Weights, gradients and optimizer states, and the GPUs that they need."""

    bytes_per_parameter: float
    state_bytes: int
    fewest_gpus: int
    fewest_gpus_to_train: int | None


class PriceRow(_Row):
    """The price that the dollars are counted with."""

    capacity: Capacity
    usd_per_gpu_hour: float
    source: str


class PartsRow(_Row):
    """Bytes of the fullest GPU, part by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int
    fragmentation: int
    context: int


class StepRow(_Row):
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


class LayoutRow(_Row):
    """One layout, its memory and, if it fits, its speed."""

    layout: str
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
    fullest_stage: int
    parts_bytes: PartsRow
    step_s: float | None
    step_s_nine_of_ten: tuple[float, float] | None
    step_parts_s: StepRow | None
    mfu: float | None
    tokens_per_s: float | None
    usd_per_billion_tokens: float | None


class MomentRow(_Row):
    """Bytes that are allocated at one event of the step."""

    event: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    loss_bytes: int
    buffers_bytes: int


class TimelineRow(_Row):
    """The events of the fullest stage of the best layout, in their order."""

    layout: str
    stage: int
    peak_event: str
    events: tuple[MomentRow, ...]


class RemedyRow(_Row):
    """A change after which a layout fits."""

    change: str
    because: str
    gpus: int
    seq_tokens: int
    optimizer: str
    layout: LayoutRow


class SurvivalRow(_Row):
    """Price, interruptions and losses on one kind of capacity."""

    capacity: Capacity
    usd_per_gpu_hour: float | None
    price_source: str | None
    mtbi_source: str
    checkpoint_bytes: int
    checkpoint_s: float
    restart_s: float
    mtbi_s: float
    period_s: float
    goodput: float
    usd_per_hour: float | None
    lost_usd_worst: float | None
    lost_usd_expected: float | None
    lost_usd_with_notice: float | None
    stall_s: float
    upload_s: float
    lost_s_expected: float
    reclaim_mtbi_s: float | None
    grace_s: float
    grace_is_enough: bool


class WhyRow(_Row):
    """Why the best layout is not another one."""

    asked: str
    ground: Ground
    message: str
    hint: str
    layout: LayoutRow | None
    more_s: dict[str, float]


class ContextRow(_Row):
    """The longest sequence of a layout."""

    layout: str
    seq_tokens: int
    peak_bytes: int


class RentOrBuyRow(_Row):
    """Rent against purchase, and the assumptions that move the answer most."""

    assumed: Ownership
    break_even_month: int | None
    rent_usd: float
    own_usd: float
    own_usd_per_gpu_hour: float
    break_even_busy_fraction: float | None
    swings: tuple[Swing, ...]
    verdict: str


class PlanDocument(_Row):
    """The whole answer."""

    version: Literal[2] = 2
    summary: str
    model: ModelRow
    model_path: str | None
    gpu: GpuRow
    gpus: int
    training: TrainingRow
    state: StateRow
    price: PriceRow | None
    fits: bool
    candidates: int
    layouts: tuple[LayoutRow, ...]
    timeline: TimelineRow
    remedies: tuple[RemedyRow, ...]
    survival: tuple[SurvivalRow, ...]
    storage_levels: tuple[LevelSave, ...]
    capture_bytes_per_node: int
    why: WhyRow | None
    longest_contexts: tuple[ContextRow, ...]
    run: TrainingRun | None
    rent_or_buy: RentOrBuyRow | None
    launch: Launch | None


class PointRow(_Row):
    """The best layout of one size; None where nothing fits or divides."""

    gpus: int
    layout: LayoutRow | None
    added_fraction: float | None


class CurveDocument(_Row):
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
    request, training = answer.request, answer.training
    fewest = answer.fewest_gpus_to_train
    price = request.price
    return PlanDocument(
        summary=answer.summary,
        model=_model(request.shape),
        model_path=model_path,
        gpu=_gpu(request.gpu),
        gpus=request.gpus,
        training=TrainingRow(
            seq_tokens=training.seq_tokens,
            global_batch=training.global_batch,
            tokens_per_step=training.tokens_per_step,
            optimizer=training.optimizer.name,
            precision=training.precision,
            framework=training.framework,
            loss=training.loss_kind,
            expert_imbalance_by_ep=dict(training.imbalance_by_ep) or None,
        ),
        state=StateRow(
            bytes_per_parameter=training.optimizer.bytes_per_parameter,
            state_bytes=answer.state_bytes,
            fewest_gpus=answer.fewest_gpus_to_hold,
            fewest_gpus_to_train=None if fewest is None else fewest[0],
        ),
        price=None if price is None else _price(price),
        fits=answer.fits,
        candidates=answer.layouts.candidates,
        layouts=tuple(_layout(candidate) for candidate in (*answer.fitting, *answer.rejected)),
        timeline=_timeline(answer.nearest),
        remedies=tuple(_remedy(remedy) for remedy in answer.remedies),
        survival=tuple(_survival(expected) for expected in answer.expectations),
        storage_levels=answer.level_saves,
        capture_bytes_per_node=answer.capture_bytes_per_node(held=False),
        why=None if answer.why is None else _why(answer.why),
        longest_contexts=tuple(
            ContextRow(layout=str(each.layout), seq_tokens=each.seq_tokens, peak_bytes=each.peak_bytes)
            for each in answer.longest_contexts
        ),
        run=answer.run,
        rent_or_buy=None if answer.rent_or_buy is None else RentOrBuyRow.model_validate(answer.rent_or_buy),
        launch=answer.launch,
    )


def curve_document(curve: Curve, shape: ModelShape, gpu: Gpu) -> CurveDocument:
    """Return the scaling curve as a document."""
    return CurveDocument(
        model=_model(shape),
        gpu=_gpu(gpu),
        seq_tokens=curve.training.seq_tokens,
        global_batch=curve.training.global_batch,
        knee_gpus=None if curve.knee is None else curve.knee.gpus,
        points=tuple(
            PointRow(
                gpus=point.gpus,
                layout=None if point.candidate is None else _layout(point.candidate),
                added_fraction=point.added_fraction,
            )
            for point in curve.points
        ),
    )


def _model(shape: ModelShape) -> ModelRow:
    return ModelRow(
        name=shape.name,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        parts=shape.parameter_count,
    )


def _gpu(gpu: Gpu) -> GpuRow:
    return GpuRow(name=gpu.name, memory_bytes=gpu.memory_bytes, source=str(gpu.source))


def _price(price: Price) -> PriceRow:
    return PriceRow(capacity=price.capacity, usd_per_gpu_hour=price.usd_per_gpu_hour, source=str(price.source))


def _layout(candidate: Candidate) -> LayoutRow:
    step = candidate.step
    return LayoutRow(
        layout=str(candidate.layout),
        **asdict(candidate.layout),
        fits=candidate.fits,
        peak_bytes=candidate.peak_bytes,
        gpu_memory_bytes=candidate.gpu_memory_bytes,
        shortfall_bytes=candidate.shortfall_bytes,
        fullest_stage=candidate.memory.worst_stage,
        parts_bytes=PartsRow(**candidate.memory.worst.parts()),
        step_s=candidate.step_s,
        step_s_nine_of_ten=candidate.step_interval_s,
        step_parts_s=None if step is None else StepRow.model_validate(step),
        mfu=candidate.mfu,
        tokens_per_s=candidate.tokens_per_s,
        usd_per_billion_tokens=candidate.usd_per_billion_tokens,
    )


def _timeline(candidate: Candidate) -> TimelineRow:
    memory = candidate.memory
    moments = memory.timelines[memory.worst_stage]
    return TimelineRow(
        layout=str(candidate.layout),
        stage=memory.worst_stage,
        peak_event=memory.peak_event,
        events=tuple(
            MomentRow(
                event=moment.event,
                **{name: round(float(value)) for name, value in asdict(moment).items() if name != "event"},
            )
            for moment in moments
        ),
    )


def _remedy(remedy: Remedy) -> RemedyRow:
    return RemedyRow(
        change=remedy.change,
        because=remedy.because,
        gpus=remedy.gpus,
        seq_tokens=remedy.training.seq_tokens,
        optimizer=remedy.training.optimizer.name,
        layout=_layout(remedy.candidate),
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


def _why(why: Why) -> WhyRow:
    return WhyRow(
        asked=why.asked,
        ground=why.ground,
        message=why.message,
        hint=why.hint,
        layout=None if why.candidate is None else _layout(why.candidate),
        more_s=dict(why.more_s),
    )
