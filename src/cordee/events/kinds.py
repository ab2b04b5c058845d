"""The kinds of events, one record each. A log is a sequence of them."""

from dataclasses import dataclass

from cordee.events.artifact import ArtifactPushed, ArtifactRemoved, ArtifactStaged, ArtifactTagged, ArtifactUsed
from cordee.events.attempt import AttemptEvent
from cordee.events.budget import BudgetReached, BudgetRemoved, BudgetSet
from cordee.events.rank_reports import (
    CheckpointCommitted,
    Measured,
    MetricsLogged,
    RagChanged,
    RankBehind,
    RankLeft,
    ReplicaReady,
    ReplicaUnready,
    Reported,
    Restored,
    RolledBack,
    SpikeFound,
    StepsRehearsed,
)
from cordee.events.rehearsal import RehearsalEnded
from cordee.events.requests import (
    HoldReleased,
    JobDeferred,
    JobHeld,
    JobPrioritized,
    JobReleased,
    MaintenanceBooked,
    MaintenanceCancelled,
    RequeueRequested,
    ReservationBegan,
    ReservationCancelled,
    ReservationMade,
)
from cordee.events.values import (
    Failure,
    Job,
    Lease,
    Node,
    NoticeReason,
    Outcome,
    Queue,
)
from cordee.frozen import quick_init
from cordee.ids import JobId

# -- the server ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUp:
    """The server started and takes jobs. `patience` is its policy's from now on; None: the default one."""

    at_us: int
    patience: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShuttingDown:
    """The server shuts down: every attempt gets notice, and nothing new starts."""

    at_us: int


# -- jobs ------------------------------------------------------------------------------------------------


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job was admitted. `spec` is its JobSpec as JSON, opaque to the scheduler; it holds no secret's value."""

    at_us: int
    job: Job
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The owner or an operator stops a job; with `now` without waiting for a checkpoint."""

    at_us: int
    job_id: JobId
    by: str
    now: bool = False


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """The job will not run again."""

    at_us: int
    job_id: JobId
    state: str  # done, failed or stopped
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused:
    """The job left with a checkpoint by itself (`Job.pauses`): it holds no GPU and waits for a `JobResumed`."""

    at_us: int
    job_id: JobId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A paused job is queued again, and goes on from its checkpoint."""

    at_us: int
    job_id: JobId
    by: str
    why: str


# -- sweeps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDeclared:
    """A sweep was submitted: its trials follow as jobs. `spec` is its JobSpec as JSON; it holds no secret's value."""

    at_us: int
    sweep: str  # its id
    by: str
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepHeld:
    """A sweep is paused, or with `over` resumed: its trials are held, and none starts or is promoted meanwhile."""

    at_us: int
    sweep: str
    by: str
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEnded:
    """A sweep starts no trials any more; those that have not ended are stopped."""

    at_us: int
    sweep: str
    by: str
    why: str


# -- nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp:
    """An agent claims a node, with an epoch above every earlier claim; or it reports a change of its GPUs."""

    at_us: int
    node: Node


NODE_LEFT = "it has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown:
    """The node's agent is gone. Nothing is placed there until a NodeUp; its rank groups end with their RanksEnded."""

    at_us: int
    node: str
    epoch: int
    why: str

    @property
    def left(self) -> bool:
        """Return whether the agent ended as it was told to."""
        return self.why == NODE_LEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable:
    """The node's agent is silent: nothing new is placed there until it is heard again; its ranks go on."""

    at_us: int
    node: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReachable:
    """The node's agent is heard again."""

    at_us: int
    node: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReclaimed:
    """The cloud takes the node back at the deadline: its attempts get notice, and nothing new is placed there."""

    at_us: int
    node: str
    epoch: int
    deadline_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCordoned:
    """An operator takes the node out of use: nothing new is placed there; with `drain` its attempts get notice."""

    at_us: int
    node: str
    by: str
    why: str = ""
    drain: bool = False
    leave_us: int | None = None  # its attempts get notice in time to have left by then; None: no such time


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUncordoned:
    """An operator puts the node back into use."""

    at_us: int
    node: str
    by: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesSet:
    """These queues replace all others; jobs of other queues wait in `default`."""

    at_us: int
    queues: tuple[Queue, ...]


# -- services --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDeclared:
    """A service was created, or updated with the next revision. `spec` is its JobSpec as JSON; it holds no secret."""

    at_us: int
    service: str
    revision: int  # counted from 1, and on after the service has ended
    by: str
    spec: str
    min_replicas: int
    max_replicas: int
    standby: int = 0  # replicas in reserve beyond those wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceScaled:
    """The number of replicas that a service wants from now on."""

    at_us: int
    service: str
    replicas: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEnded:
    """A service wants no replicas any more; those that run get notice."""

    at_us: int
    service: str
    by: str
    why: str


# -- tenants of the gateways -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSet:
    """A tenant was added, or its rules were replaced."""

    at_us: int
    tenant: str
    by: str
    weight: float
    priority: int
    rate_per_s: float | None
    budget_micro_usd: int | None
    per: str  # the budget's period: day or month


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCreated:
    """A tenant has a new key. Neither the key nor its hash is in the log."""

    at_us: int
    key: str  # its id
    tenant: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRevoked:
    """A key is void from now on."""

    at_us: int
    key: str  # its id
    tenant: str
    by: str


# -- attempts: decisions ---------------------------------------------------------------------------------


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlaced(AttemptEvent):
    """The scheduler leased a whole gang's GPUs. The command `start` follows from it."""

    leases: tuple[Lease, ...]


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGiven(AttemptEvent):
    """An attempt is asked to leave by the deadline. The command `notify` follows from it."""

    reason: NoticeReason
    deadline_us: int
    for_job: JobId | None = None  # the job that gets the GPUs and is charged for the loss
    gpus: int | None = None  # the number on which a resized attempt starts again
    expected_loss_micro_usd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOrdered(AttemptEvent):
    """Every process of the attempt must end at once. The command `kill` follows from it."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrdered(AttemptEvent):
    """A replica of a service with several models shall hold this one. The command `hold` follows from it."""

    model: str
    why: str


# -- attempts: observations of the agents ----------------------------------------------------------------


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted(AttemptEvent):
    """The agent of one node started its rank group."""

    node: str
    launch: str = ""  # one sentence: one process per GPU, or one for the node, and why


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded(AttemptEvent):
    """Every process of the attempt on this node is gone, and its GPUs are free."""

    node: str
    outcome: Outcome
    failure: Failure | None = None
    why: str = ""
    node_fault: bool = False  # no rank started, and the node offers what failed there no more


# -- attempts: reports of the agents, the server and the gateways -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusSampled(AttemptEvent):
    """A sample by the driver of the GPUs that an attempt holds on one node, for the time since `from_us`.

    `busy` is NVML's "utilisation": the fraction of the time in which any kernel ran, however small. `busy_each` and
    `memory_bytes_each` are those of the single GPUs in the order of the lease, None where the driver did not answer;
    agents of earlier versions report none.
    """

    node: str
    gpus: int
    from_us: int
    busy: float  # mean over the GPUs
    memory_bytes: int  # in use on the fullest of them
    power_mw: int  # of all of them, at the end
    energy_mj: int  # of all of them; of a GPU that is shared, the attempt's part of it
    integrated_mj: int = 0  # that part of `energy_mj` which is power over time, where the driver's counter was missing
    busy_each: tuple[float | None, ...] = ()
    memory_bytes_each: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGpusSampled:
    """The energy that the driver counted for GPUs of a node since `from_us`, while no attempt held them."""

    at_us: int
    node: str
    from_us: int
    energy_mj: int
    integrated_mj: int = 0  # as in `GpusSampled`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsRefused(AttemptEvent):
    """Impossible records of a rank's spool were left out; `why` is the reason for the last one."""

    rank: int  # the rank that wrote the spool
    count: int  # since the last such event of the spool
    why: str


# -- attempts: reports of the gateways -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensServed(AttemptEvent):
    """The requests of one tenant, key and model that an attempt of a service answered in a stretch of time.

    The row with neither tenant nor key has the time in which the attempt had a request open at all, and no requests.
    """

    gateway: str
    service: str
    tenant: str
    key: str  # its id
    model: str
    from_us: int
    busy_us: int  # within the stretch, time with at least one request open
    requests: int
    failed: int  # of these, requests without a whole answer
    input_tokens: int  # the cached ones as well
    cached_tokens: int
    output_tokens: int
    retrieval_us: int = 0  # time that a knowledge base searched for these requests; they may overlap
    generation_us: int = 0  # time that its engine answered them


# -- attempts: conclusions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateMissed(AttemptEvent):
    """An attempt measured a value outside its estimate; reported once per job and quantity."""

    quantity: str  # a value of `account.measured.Quantity`
    why: str  # one sentence with the numbers


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(AttemptEvent):
    """The ranks of the attempt have ended on every node; the job is queued again or a JobEnded follows."""

    outcome: Outcome
    why: str
    failure: Failure | None = None
    counted: str = ""  # the cause under which it counts as a try: infrastructure, script, `exit 17`; "": as none
    node_fault: bool = False  # no rank started for a fault of a node that has been taken out of use: it is no try


Event = (
    ServerUp
    | ServerShuttingDown
    | JobSubmitted
    | StopRequested
    | JobEnded
    | JobPaused
    | JobResumed
    | RehearsalEnded
    | JobHeld
    | HoldReleased
    | RequeueRequested
    | JobPrioritized
    | JobDeferred
    | JobReleased
    | ArtifactPushed
    | ArtifactTagged
    | ArtifactStaged
    | ArtifactUsed
    | ArtifactRemoved
    | SweepDeclared
    | SweepHeld
    | SweepEnded
    | NodeUp
    | NodeDown
    | NodeUnreachable
    | NodeReachable
    | NodeReclaimed
    | NodeCordoned
    | NodeUncordoned
    | MaintenanceBooked
    | MaintenanceCancelled
    | ReservationMade
    | ReservationBegan
    | ReservationCancelled
    | QueuesSet
    | BudgetSet
    | BudgetRemoved
    | BudgetReached
    | ServiceDeclared
    | ServiceScaled
    | ServiceEnded
    | TenantSet
    | KeyCreated
    | KeyRevoked
    | AttemptPlaced
    | NoticeGiven
    | KillOrdered
    | ModelOrdered
    | RanksStarted
    | RanksEnded
    | Restored
    | Reported
    | Measured
    | MetricsLogged
    | SpikeFound
    | RolledBack
    | CheckpointCommitted
    | RankLeft
    | RankBehind
    | StepsRehearsed
    | ReplicaReady
    | ReplicaUnready
    | RagChanged
    | TokensServed
    | EstimateMissed
    | GpusSampled
    | IdleGpusSampled
    | ReportsRefused
    | AttemptEnded
)
