"""The answer as a JSON document: microseconds, fractions from 0 to 1; schema in `ProfileDocument.model_json_schema()`.

Version 2. New keys may come; old ones keep their meaning until the version changes.
"""

from types import SimpleNamespace

from pydantic import AliasGenerator, AliasPath, ConfigDict, Field

from cordee.document import Row, read_from
from cordee.telemetry.profile.account import Side
from cordee.telemetry.profile.answer import ProfileAnswer
from cordee.telemetry.profile.compare import Efficiency
from cordee.telemetry.profile.host import IdleGaps
from cordee.telemetry.profile.kernels import Kind
from cordee.telemetry.profile.ranks import Skew


class BreakdownRow(Row):
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


class ClassDocument(Row):
    """Kernels of one class."""

    name: str = read_from("kernel_class", "name")
    kind: Kind = read_from("kernel_class", "kind")
    count: int
    total_us: float
    exposed_us: float


class KernelDocument(Row):
    """Kernels of one name."""

    name: str
    kernel_class: str = Field(validation_alias=AliasPath("kernel_class", "name"), serialization_alias="class")
    kind: Kind = read_from("kernel_class", "kind")
    count: int
    total_us: float
    longest_us: float
    exposed_us: float


class StreamDocument(Row):
    """One stream or thread."""

    name: str
    count: int
    busy_us: float
    kinds_us: dict[Kind, float]


class StepDocument(Row):
    """One step of the profiler."""

    number: int
    start_us: float
    time: BreakdownRow


class DefectDocument(Row):
    """One kind of defect of the file."""

    kind: str
    count: int
    example: str


class RankDocument(Row):
    """One rank."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=lambda name: AliasPath("report", name)))

    rank: int
    label: str
    file: str = read_from("report", "source")
    side: Side
    gpu: str | None
    time: BreakdownRow
    kernels_us: float
    communication_kernels_us: float
    waiting_kernels_us: float
    classes: tuple[ClassDocument, ...]
    kernels: tuple[KernelDocument, ...]
    streams: tuple[StreamDocument, ...]
    idle: IdleGaps
    steps: tuple[StepDocument, ...]
    efficiency: Efficiency = read_from("efficiency")
    defects: tuple[DefectDocument, ...]


class DeltaDocument(Row):
    """One figure before and after, or planned and profiled."""

    name: str
    before_us: float
    after_us: float
    change_us: float


class BaseDocument(Row):
    """The comparison with an earlier profile."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=lambda name: AliasPath("compared", name)))

    files: tuple[str, ...] = read_from("files")
    per: str
    times: tuple[DeltaDocument, ...]
    classes: tuple[DeltaDocument, ...]
    kernels: tuple[DeltaDocument, ...]


class PlanComparisonDocument(Row):
    """The comparison with the plan; `job` null: the plan comes from flags."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=lambda name: AliasPath("planned", name)))

    job: str | None
    model: str
    gpus: int
    gpu: str
    layout: str
    mfu: float | None
    steps: int = read_from("against", "steps")
    times: tuple[DeltaDocument, ...] = read_from("against", "rows")


class ProfileDocument(Row):
    """The whole answer."""

    version: int = 2
    ranks: tuple[RankDocument, ...]
    skew: Skew | None
    base: BaseDocument | None
    plan: PlanComparisonDocument | None


def profile_document(answer: ProfileAnswer) -> ProfileDocument:
    """Return the document of an answer."""
    compared, against, planned = answer.compared, answer.against, answer.planned
    return ProfileDocument.model_validate(
        {
            "ranks": [
                SimpleNamespace(report=report, efficiency=efficient)
                for report, efficient in zip(answer.reports, answer.efficiency, strict=True)
            ],
            "skew": answer.skew,
            "base": compared and SimpleNamespace(files=answer.base, compared=compared),
            "plan": against and SimpleNamespace(planned=planned, against=against),
        }
    )
