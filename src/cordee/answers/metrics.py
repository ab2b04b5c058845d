"""Answers of the API about the metrics of jobs, as pydantic models."""

from cordee.answers.cost import CostRowView, ElectricityView
from cordee.answers.view import View


class CurveView(View):
    """The points of one metric by growing steps; a value that is not finite is null."""

    name: str
    steps: list[int]
    at_us: list[int]
    values: list[float | None]


class MetricsView(View):
    """The curves of a job: what it logs, and, as `measured/...` and `gpu/...`, what was measured of it.

    A curve has 513 points at most: of a longer one each second, fourth, ... is kept, and the newest. `gpu/busy` is
    NVML's "utilisation": the fraction of the time in which any kernel ran. `energy_j` is that of its GPUs, null if
    no driver counts it.
    """

    job_id: str
    step: int
    curves: list[CurveView]
    energy_j: float | None


class LiveJobView(View):
    """The present state of a job that runs or waits; null: not known, or not finite.

    `mfu` is the model's FLOPs over the peak of the GPUs, by the plan; `busy` is NVML's "utilisation".
    `lost_loss` says that the newest loss is not finite.
    """

    job_id: str
    name: str
    owner: str
    state: str
    why: str
    gpus: int
    gpu_name: str | None
    step: int | None
    steps_total: int | None
    left_us: int | None
    loss: float | None
    lost_loss: bool
    tokens_per_s: float | None
    mfu: float | None
    busy: float | None
    memory_bytes: int | None
    power_w: float | None
    micro_usd_per_hour: int
    micro_usd: int


class LiveNodeView(View):
    """The GPUs of a node now: `held` by jobs, of those that can be leased."""

    name: str
    up: bool
    gpu_name: str
    gpus: int
    held: int
    unavailable: int
    busy: float | None
    memory_bytes: int | None
    power_w: float | None


class LiveView(View):
    """The cluster at `at_us`: its nodes, and the jobs that have not ended, those that run first."""

    at_us: int
    nodes: list[LiveNodeView]
    jobs: list[LiveJobView]
    micro_usd_per_hour: int


class EpochCostView(View):
    """The money paid from the first step of an epoch of the data until that of the next one."""

    epoch: int
    first_step: int
    micro_usd: int


class JobCostView(View):
    """The cost of one job: in all, by epoch of its data, and of a million tokens; the epochs sum to what was held.

    `epochs` is empty if the job logs no metric `epoch`, which a job with a sampler of Cordee's logs by itself.
    """

    job_id: str
    at_us: int
    row: CostRowView
    epochs: list[EpochCostView]
    energy_j: float | None
    electricity: ElectricityView
