"""Requests and answers of the HTTP API as pydantic models: the API's schema, and the JSON of every verb."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from cordee.events import Estimate


class View(BaseModel):
    """An answer of the API. Times are microseconds since the Unix epoch, money is integer micro-dollars."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)

    @classmethod
    def of(cls, record: object, **others: object) -> Self:
        """Return the view of a record: the fields that `others` does not name are its attributes of the same name."""
        names = cls.model_fields.keys() - others.keys()
        return cls.model_validate({name: getattr(record, name) for name in names} | others)


class HealthView(View):
    """The server itself.

    `problem` is the error that keeps it from working, such as a full disk; `listens` is the URL for other machines, and
    `fingerprint` that of its certificate unless an authority signed it. `servers` are the URLs of all servers of its
    database, the leader's first; empty if it is the only one.
    """

    version: str
    pid: int
    home: str
    shutting_down: bool
    live_attempts: int
    log_number: int
    problem: str | None = None
    role: Literal["leader", "standby"] = "leader"
    servers: list[str] = []
    listens: str | None = None
    fingerprint: str | None = None


class FailureView(View):
    """The rank that failed first, and its last lines."""

    rank: int | None
    exit_code: int | None
    signal: int | None
    tail: list[str]


class ComparisonView(View):
    """A planned and a measured value of a job, in `unit`.

    Nine of ten values are expected between `low` and `high`. `off_by` is the fraction by which the measured value
    exceeds the planned one. `missed` says whether it lies outside the interval.
    """

    quantity: str
    unit: str
    planned: float | None
    low: float | None
    high: float | None
    measured: float | None
    off_by: float | None
    missed: bool


class AttemptView(View):
    """One execution of a job. `leases` are the GPUs held, by node.

    `refused` counts impossible records of the ranks' spools; `refused_why` is the reason for the last one.
    """

    epoch: int
    state: str
    leases: dict[str, list[int]]
    placed_us: int
    notice_reason: str | None
    ended_us: int | None
    outcome: str | None
    why: str
    failure: FailureView | None
    refused: int = 0
    refused_why: str = ""


class JobView(View):
    """A job in a list; `sweep` is the id of the sweep of which it is a trial.

    While it runs, `steps_total` are its steps as its script reported them, and `left_us` is the time until the last one
    at its own pace.
    """

    job_id: str
    name: str
    owner: str
    queue: str
    tier: str
    gpus: int
    gpu_name: str | None
    state: str
    why: str
    epoch: int
    step: int | None
    checkpoint_step: int | None
    submitted_us: int
    ended_us: int | None
    sweep: str | None = None
    steps_total: int | None = None
    left_us: int | None = None


class FilesView(View):
    """The code that was captured when a job was submitted.

    Attributes:
        files: their number.
        commit, branch: of git, which were checked out; null: none.
        changed: whether the files are others than those of the commit.
        files_changed: number of these.
        folder: the submitter's.
        links: what lay in that folder beside the files, and is linked into copies on a node that has it.
        copy_folder: of the newest attempt, if it is on the server's machine and still there.
        written: the first files that the job has written there.
    """

    files: int
    size_bytes: int
    commit: str | None
    changed: bool
    files_changed: int = 0
    branch: str | None = None
    folder: str = ""
    links: list[str] = []
    copy_folder: str | None = None
    written: list[str] = []


class JobDetailView(JobView):
    """A job with its attempts, its admitted spec, and the measured values of its newest attempt beside the estimate.

    `estimate` is the plan's answer for the GPUs of that attempt; `estimate_missed` has a sentence for each value
    outside it.
    """

    attempts: list[AttemptView]
    spec: dict[str, Any]
    estimate: Estimate | None
    measured: list[ComparisonView]
    estimate_missed: list[str]
    files: FilesView | None = None


class SpreadView(View):
    """Percentiles of a time over the draws: one in ten is earlier than p10. null: later than `seen_us`."""

    p10_us: int | None
    p50_us: int | None
    p90_us: int | None


class ForecastView(View):
    """A forecast of a job's next start and of its end, from `draws` runs of the scheduler forward from `at_us`.

    Every run went to `seen_us` or to the job's end; run times come from `learnt_from` jobs that have ended, and
    `source` names where that of this job comes from; `preemptions` is the mean number of notices to the job.
    """

    at_us: int
    draws: int
    seen_us: int
    learnt_from: int
    source: Literal["its own steps", "its plan", "other jobs"] = "other jobs"
    start: SpreadView
    end: SpreadView
    preemptions: float


class WhyView(View):
    """The reason for a job's state: `text` explains it, and it ends by `until_us`.

    `forecast` is set on request if the job has not ended. `left_us` is the time until its last step at its measured
    pace, if the script reported the number of steps. `failure` is that of its last attempt.
    """

    job_id: str
    state: str
    reason: str
    text: str
    gpus_needed: int
    gpus_free: int
    blocking: list[str]
    until_us: int | None
    left_us: int | None
    measured: list[ComparisonView]
    estimate_missed: list[str]
    failure: FailureView | None
    forecast: ForecastView | None = None


class NodeView(View):
    """A node.

    `used` names the attempt that holds each GPU; `unavailable` are GPUs that cannot be leased, each with its reason in
    `unavailable_why`. `domain` is block, rack and an island that spans nodes, outermost first, where they are known;
    `island_gpus` is 0 where an island is the whole node. `down_why` says why the node is down.
    `reachable` is false while its agent is silent; `refused` counts its reports that were refused; `clock_off_us`
    is its clock minus the server's. `cordoned_by` is the operator who took the node out of use; with `drains` its
    attempts got notice too. `reserved` has its reservations in words.
    """

    name: str
    up: bool
    epoch: int
    gpu_name: str
    gpus: int
    used: dict[int, str]
    unavailable: list[int]
    micro_usd_per_gpu_hour: int
    price_source: str
    cordoned_by: str | None = None
    cordon_why: str = ""
    drains: bool = False
    down_why: str = ""
    reachable: bool = True
    refused: int = 0
    clock_off_us: int = 0
    unavailable_why: list[str] = []
    domain: list[str] = []
    island_gpus: int = 0
    capacity: str = "on-demand"
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    software: list[str] = []
    reserved: list[str] = []


class NodeOrder(View):
    """An operator's reason to cordon, drain or uncordon a node."""

    why: Annotated[str, Field(max_length=1000)] = ""


class MaintenanceOrder(NodeOrder):
    """A request to book a node for maintenance: its attempts have left by `from_us`."""

    from_us: Annotated[int, Field(ge=0, le=2**62)]
    until_us: Annotated[int, Field(ge=0, le=2**62)]


class MaintenanceView(View):
    """A node's maintenance, to come or under way; `began` says whether nothing starts there any more."""

    booking: str
    node: str
    from_us: int
    until_us: int
    by: str
    why: str
    began: bool


class ReservationOrder(NodeOrder):
    """A request to reserve `nodes`, or whole nodes with at least `gpus` GPUs, for the jobs of a queue or of a user.

    Without either it is for the user who asks.
    """

    nodes: Annotated[list[str], Field(max_length=10_000)] = []
    gpus: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    from_us: Annotated[int, Field(ge=0, le=2**62)]
    until_us: Annotated[int, Field(ge=0, le=2**62)]
    queue: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    user: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class ReservationView(View):
    """A reservation of nodes, to come or under way; `began`: no job of others starts there any more."""

    reservation: str
    nodes: list[str]
    from_us: int
    until_us: int
    queue: str | None
    user: str | None
    by: str
    why: str
    began: bool


class JoinTokenRequest(View):
    """A request for a join token: good for `uses` nodes and `for_s` seconds."""

    uses: Annotated[int, Field(ge=1, le=100_000)] = 1
    for_s: Annotated[int, Field(ge=1, le=366 * 86_400)] = 3600


class JoinTokenView(View):
    """A join token, and the URL at which a machine presents it."""

    token: str
    url: str
    uses: int
    expires_us: int


class JoinRequest(View):
    """A machine's request to become a node; `machine` identifies it, so that it may join again under its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    machine: Annotated[str, Field(min_length=1, max_length=300)]


class Joined(View):
    """A node's own token, and the URLs of the servers that accept it."""

    node: str
    token: str
    servers: list[str]


class Leaving(View):
    """A node that leaves; it has left when no attempt holds it."""

    node: str
    attempts: int


class WebTicketView(View):
    """The address at which a browser logs in as a user, once and within two minutes."""

    url: str


class QueueRules(View):
    """The rules of a queue. `gpu_us_per_day` and `micro_usd_per_day` limit a sliding window of 24 hours."""

    name: str
    parent: str | None = None
    quota_gpus: int = 0
    limit_gpus: int | None = None
    lend: bool = True
    weight: int = 1
    user_gpus: int | None = None
    gpu_us_per_day: int | None = None
    micro_usd_per_day: int | None = None


class QueueView(QueueRules):
    """The current state of a queue, including the queues below it.

    GPUs are in thousandths. `lends` is the part of its quota left to others. `fair_share_ppb` is its present and past
    borrowing, divided by its weight, in billionths of the cluster: the lowest goes first.
    """

    depth: int
    held_gpu_milli: int
    borrowed_gpu_milli: int
    lends_gpu_milli: int
    fair_share_ppb: int
    users_gpu_milli: dict[str, int]
    day_gpu_us: int | None
    day_micro_usd: int | None
    running_jobs: int
    waiting_jobs: int
    waiting_gpu_milli: int


class QueuesView(View):
    """The tree of queues, parents first; `gpu_milli` counts the GPUs of all nodes in use."""

    at_us: int
    gpu_milli: int
    queues: list[QueueView]


class QueuesSubmission(View):
    """The complete new tree of queues."""

    queues: list[QueueRules]


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


class Submission(View):
    """A client's request to queue a job. The client makes the id, so that sending it again changes nothing.

    `secrets` are the values of the spec's secrets, which a client on another machine sends over TLS.
    """

    job_id: str
    spec: dict[str, Any]
    unprotected: bool = False
    secrets: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(default_factory=dict, repr=False)


class FileDigests(View):
    """Contents of submitted files, by digest: the ones that a client has, or those of them that the server lacks."""

    digests: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]], Field(max_length=100_000)]


class FilesWanted(FileDigests):
    """The contents that a node asks for, of an attempt that holds GPUs there."""

    job_id: str
    epoch: Annotated[int, Field(ge=1)]


class FilesReceived(View):
    """The number of contents in a pack that were stored."""

    received: int


class LogReceived(View):
    """The size of a log on the server, where the next part begins."""

    size_bytes: int


class VictimView(View):
    """A job that would be preempted, the reason, and its expected loss."""

    job_id: str
    owner: str
    reason: str
    expected_loss_micro_usd: int


class DryRunView(View):
    """The consequences of submitting a job now; nothing was submitted.

    Attributes:
        starts_now: whether it would be placed at once.
        reason, text, blocking, until_us: as in `WhyView`.
        nodes: the nodes on which it starts now, else those of the median draw; empty: not known.
        racks: number of domains in which these nodes lie; null if the nodes name none.
        victims: the jobs that it would preempt at once.
        micro_usd_per_hour: on those nodes, else on the most expensive GPUs that it may get.
        micro_usd_to_limit: the cost if it runs until its limit of time or cost; null without a limit.
        micro_usd_to_estimate: the cost if it runs as long as its owner expects; null if no time was given.
        estimate: the plan's answer for its model; null if it names none.
        notes: the assumptions made.
    """

    gpus: int
    gpu_name: str | None
    tier: str
    queue: str
    starts_now: bool
    reason: str
    text: str
    blocking: list[str]
    until_us: int | None
    nodes: dict[str, list[int]]
    racks: int | None
    victims: list[VictimView]
    micro_usd_per_hour: int
    micro_usd_to_limit: int | None
    micro_usd_to_estimate: int | None
    estimate: Estimate | None
    notes: list[str]
    forecast: ForecastView | None


class RehearsalView(View):
    """The result of a rehearsal.

    Attributes:
        job_id: of the rehearsal.
        code: digest of the files and the command that it ran.
        ended_us: when it was over.
        why: one sentence with the numbers.
        gpus, gpu_name: on which it ran.
        steps: that it ran before its notice.
        peak_bytes, step_us, save_us, restart_us: measured; null: not measured.
        grace_s: the grace period that a job of this code gets by default; null if the rehearsal failed.
    """

    job_id: str
    code: str
    ended_us: int
    passed: bool
    why: str
    notes: list[str]
    gpus: int
    gpu_name: str
    steps: int
    peak_bytes: int | None
    step_us: int | None
    save_us: int | None
    restart_us: int | None
    grace_s: float | None


class Submitted(View):
    """A queued job. `notes` are the assumptions made; the price is that of the most expensive GPUs that it may get.

    `rehearsed` is the newest result for its code, on as many GPUs if there is one; null: it was not rehearsed.
    """

    job: JobView
    notes: list[str]
    micro_usd_per_hour: int
    rehearsed: RehearsalView | None = None


class ErrorFacts(View):
    """An error: the name of its class in `cordee.errors`, its message, and a hint; a standby names the leader's URL."""

    kind: str
    message: str
    hint: str | None
    leader: str | None = None


class ErrorView(View):
    """The API's answer to a request that it refuses or fails."""

    error: ErrorFacts
