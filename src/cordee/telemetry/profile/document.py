"""The answer as a JSON document: microseconds, fractions from 0 to 1; schema in `ProfileDocument.model_json_schema()`.

Version 2. New keys may come; old ones keep their meaning until the version changes.
"""

from pydantic import BaseModel, ConfigDict, Field

from cordee.telemetry.profile.account import RankReport, Side
from cordee.telemetry.profile.answer import ProfileAnswer
from cordee.telemetry.profile.compare import Efficiency
from cordee.telemetry.profile.host import Idle
from cordee.telemetry.profile.kernels import Kind
from cordee.telemetry.profile.ranks import Skew


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True, populate_by_name=True)


class BreakdownRow(_Row):
    """The time of a step or of a file, by what it was spent on."""

    span_us: float
    busy_us: float
    memory_us: float
    transfer_us: float
    waiting_us: float
    communication_us: float
    hidden_us: float
    exposed_transfer_us: float
    exposed_waiting_us: float
    compute_us: float
    idle_us: float
    exposed_us: float
    alone_us: float
    hidden_fraction: float | None
    busy_fraction: float
    idle_fraction: float
    compute_fraction: float
    communication_fraction: float
    exposed_fraction: float


class ClassDocument(_Row):
    """Kernels of one class."""

    name: str
    kind: Kind
    count: int
    total_us: float
    exposed_us: float


class KernelDocument(_Row):
    """Kernels of one name."""

    name: str
    kernel_class: str = Field(serialization_alias="class")
    kind: Kind
    count: int
    total_us: float
    longest_us: float
    exposed_us: float


class StreamDocument(_Row):
    """One stream or thread."""

    name: str
    count: int
    busy_us: float
    kinds_us: dict[Kind, float]


class StepDocument(_Row):
    """One step of the profiler."""

    number: int
    start_us: float
    time: BreakdownRow


class DefectDocument(_Row):
    """One kind of defect of the file."""

    kind: str
    count: int
    example: str


class RankDocument(_Row):
    """One rank."""

    rank: int
    label: str
    file: str
    side: Side
    gpu: str | None
    time: BreakdownRow
    kernels_us: float
    communication_kernels_us: float
    waiting_kernels_us: float
    classes: tuple[ClassDocument, ...]
    kernels: tuple[KernelDocument, ...]
    streams: tuple[StreamDocument, ...]
    idle: Idle
    steps: tuple[StepDocument, ...]
    efficiency: Efficiency
    defects: tuple[DefectDocument, ...]


class DeltaDocument(_Row):
    """One figure before and after, or planned and profiled."""

    name: str
    before_us: float
    after_us: float
    change_us: float


class BaseDocument(_Row):
    """The comparison with an earlier profile."""

    files: tuple[str, ...]
    per: str
    times: tuple[DeltaDocument, ...]
    classes: tuple[DeltaDocument, ...]
    kernels: tuple[DeltaDocument, ...]


class PlanDocument(_Row):
    """The comparison with the plan; `job` null: the plan comes from flags."""

    job: str | None
    model: str
    gpus: int
    gpu: str
    layout: str
    mfu: float | None
    steps: int
    times: tuple[DeltaDocument, ...]


class ProfileDocument(_Row):
    """The whole answer."""

    version: int = 2
    ranks: tuple[RankDocument, ...]
    skew: Skew | None
    base: BaseDocument | None
    plan: PlanDocument | None


def profile_document(answer: ProfileAnswer) -> ProfileDocument:
    """Return the document of an answer."""
    compared, against, planned = answer.compared, answer.against, answer.planned
    deltas = [DeltaDocument.model_validate(row) for row in against.rows] if against else []
    return ProfileDocument(
        ranks=tuple(_rank(*each) for each in zip(answer.reports, answer.efficiency, strict=True)),
        skew=answer.skew,
        base=None if compared is None else BaseDocument.model_validate({
            "files": tuple(answer.base), "per": compared.per, "times": compared.times, "classes": compared.classes,
            "kernels": compared.kernels,
        }),
        plan=None if against is None or planned is None else PlanDocument(
            job=planned.job, model=planned.model, gpus=planned.gpus, gpu=planned.gpu, layout=planned.layout,
            mfu=planned.mfu, steps=against.steps, times=tuple(deltas),
        ),
    )  # fmt: skip


def _rank(report: RankReport, efficient: Efficiency) -> RankDocument:
    return RankDocument(
        rank=report.rank,
        label=report.label,
        file=report.source,
        side=report.side,
        gpu=report.gpu,
        time=BreakdownRow.model_validate(report.time),
        kernels_us=report.kernels_us,
        communication_kernels_us=report.communication_kernels_us,
        waiting_kernels_us=report.waiting_kernels_us,
        classes=tuple(
            ClassDocument(
                name=row.kernel_class.name, kind=row.kernel_class.kind, count=row.count, total_us=row.total_us,
                exposed_us=row.exposed_us,
            ) for row in report.classes
        ),
        kernels=tuple(
            KernelDocument(
                name=row.name, kernel_class=row.kernel_class.name, kind=row.kernel_class.kind, count=row.count,
                total_us=row.total_us, longest_us=row.longest_us, exposed_us=row.exposed_us,
            ) for row in report.kernels
        ),
        streams=tuple(StreamDocument.model_validate(row) for row in report.streams),
        idle=report.idle,
        steps=tuple(StepDocument.model_validate(step) for step in report.steps),
        efficiency=efficient,
        defects=tuple(DefectDocument.model_validate(defect) for defect in report.defects),
    )  # fmt: skip
