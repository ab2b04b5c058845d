"""GPU time, dollars and energy by class and cause."""

from cordee.answers.jobs import ComparisonView
from cordee.answers.view import View


class SplitView(View):
    """GPU-microseconds or micro-dollars by class; the classes add up to `held` exactly."""

    held: int
    useful: int
    checkpoint: int
    restart: int
    stall: int
    loading: int
    serving: int
    idle_held: int
    draining: int
    lost: int
    unreported: int


class LostView(View):
    """The loss by one cause, such as `preempt` or `failure`."""

    cause: str
    gpu_us: int
    micro_usd: int
    energy_mj: int


class CostRowView(View):
    """The GPU time and cost of one job, user, queue, service or attempt. `charged` is the loss of others for its sake.

    `measured` is set only for a job (its newest attempt) and for an attempt.
    """

    key: str
    attempts: int
    gpu_us: SplitView
    micro_usd: SplitView
    lost_by_cause: list[LostView]
    charged_gpu_us: int
    charged_micro_usd: int
    steps: int
    steps_repeated: int
    tokens: int
    micro_usd_per_million_tokens: int | None
    price_sources: list[str]
    measured: list[ComparisonView]
    energy_mj: SplitView


class AmountView(View):
    """GPU time and money."""

    gpu_us: int
    micro_usd: int


class ChargeLineView(View):
    """A line of the chargeback of a month: what the jobs of a user, queue, project and model held, by class.

    `passed_on` is the part of what they lost that others pay, who gained by it (`passed_on_to`); `charged` is what
    others lost for their sake; `idle` is what nobody held, as far as this line pays it. `billed` is held, less passed
    on, plus charged and idle. The price is the mean of what was held.
    """

    month: str
    user: str
    queue: str
    project: str
    model: str
    jobs: int
    gpu_us: SplitView
    micro_usd: SplitView
    passed_on: AmountView
    passed_on_to: list[str]
    charged: AmountView
    idle: AmountView
    billed: AmountView
    micro_usd_per_gpu_hour: int | None
    price_sources: list[str]


class ChargebackView(View):
    """The chargeback until `at_us`, by month, user, queue, project and model; idle time is apart or divided."""

    at_us: int
    lines: list[ChargeLineView]


class ElectricityView(View):
    """Factors that turn joules of GPUs into a building's kilowatt-hours and emissions, with their sources.

    Without a known grid there are no emissions. Hosts are not in it: drivers count GPUs alone.
    """

    building_factor: float
    g_co2e_per_kwh: float | None
    sources: list[str]


class CostView(View):
    """The cost until `at_us`, by row and of the whole cluster: capacity = held + idle.

    `energy_mj` is what drivers counted, `integrated_mj` the part of it and of idle energy that is power over time.
    """

    by: str
    at_us: int
    rows: list[CostRowView]
    gpu_us: SplitView
    micro_usd: SplitView
    idle_gpu_us: int
    idle_micro_usd: int
    energy_mj: SplitView
    idle_energy_mj: int
    integrated_mj: int
    electricity: ElectricityView | None
