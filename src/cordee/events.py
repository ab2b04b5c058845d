"""The closed union of events, and the values they carry.

Every decision and every observation is one of these; the log is a sequence of them, and applying it in
order gives the state. Times are integer microseconds since the Unix epoch, money is integer micro-dollars.
"""

from dataclasses import dataclass
from enum import StrEnum

from cordee.ids import JobId


class Tier(StrEnum):
    """The tier of a job, which preempts jobs of lower tiers. Within its tier it may take the place of a job that has
    received more service, once that job's time slice is over (`NoticeReason.TIME_SLICE`)."""

    PRODUCTION = "production"
    STANDARD = "standard"
    PREEMPTIBLE = "preemptible"


class Capacity(StrEnum):
    """A way in which the cloud sells a node; only a job may say `any`."""

    ANY = "any"
    ON_DEMAND = "on-demand"
    SPOT = "spot"


class NoticeReason(StrEnum):
    """The reason for which a running attempt is asked to leave."""

    PREEMPT = "preempt"  # the scheduler chose another job for its GPUs
    RECLAIM = "reclaim"  # the cloud takes the node back
    STOP = "stop"  # the owner stops the job
    DOWN = "down"  # the server shuts down; the job goes on after the next `up`
    LIMIT = "limit"  # the job has reached its limit of time or cost
    TIME_SLICE = "time-slice"  # its time slice is over: a job of its tier with less service goes first
    QUOTA = "quota"  # `for_job` takes borrowed GPUs back, or the queue has reached a daily limit
    RESIZE = "resize"  # it starts again at once on fewer or more GPUs
    MOVE = "move"  # it starts again at once elsewhere, so that a shape becomes free for `for_job`
    DRAIN = "drain"  # an operator drains the node


class Outcome(StrEnum):
    """The end of an attempt."""

    FINISHED = "finished"  # the script came to its end
    CHECKPOINTED = "checkpointed"  # left at the agreed step, with a commit
    FAILED = "failed"  # the script failed by itself
    LOST = "lost"  # infrastructure: the node, the agent, or a rank killed from outside
    KILLED = "killed"  # by Cordee, after the grace period, or at once on request


class SpanClass(StrEnum):
    """Classes of time that ranks report. `lost` and `unreported` are the ledger's conclusions, never reported."""

    USEFUL = "useful"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    STALL = "stall"


class Behind(StrEnum):
    """The way in which a rank holds the others up."""

    STUCK = "stuck"  # it makes no progress in a step, but its watcher answers
    SILENT = "silent"  # its watcher does not answer: the process is frozen, or the node is gone
    SLOW = "slow"  # the others wait for it in every step
    OVER = "over"  # it no longer holds them up


NO_PRICE = "no price is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with GPUs (or CPU slots, then `gpu_name` is `slot`) under one agent."""

    name: str
    epoch: int  # of its agent: an older agent is refused
    gpu_name: str
    gpus: int
    capacity: Capacity = Capacity.ON_DEMAND
    micro_usd_per_gpu_hour: int = 0
    price_source: str = NO_PRICE
    domain: tuple[str, ...] = ()  # outermost first: block, rack, and an island that spans nodes
    island_gpus: int = 0  # GPUs in one NVLink island; 0 is the whole node
    unavailable: tuple[int, ...] = ()  # GPUs that cannot be leased
    unavailable_why: tuple[str, ...] = ()  # the reason of each; () if none is known
    software: tuple[str, ...] = ()  # names and versions, such as "cordee 0.1.0"
    cpu_milli: int | None = None  # thousandths of a CPU core; None: not counted
    memory_bytes: int | None = None  # of the host; None: not counted
    machine: str = ""  # id of the machine behind the name, `HOST/...`; "": an agent of an earlier version


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The plan's answer for a job. It travels with the job; ranks report what they measured under the same names."""

    layout: str  # of `plan.layout`, such as "tp8 pp2 fsdp4"
    peak_bytes: int  # on the fullest GPU, with the driver's context; 0: not known, as on CPU slots
    gpu_memory_bytes: int  # of one GPU; 0: CPU slots have none
    gpus: int = 0  # on which the estimate holds
    allocated_bytes: int = 0  # of the peak, the part that torch's allocator hands out; 0: not known
    step_us: int | None = None  # None: no time is known for this GPU
    step_us_low: int | None = None  # nine of ten such steps are expected between low and high
    step_us_high: int | None = None
    tokens_per_step: int = 0
    flop_per_token: float = 0.0  # of the model, forward and backward; 0: not known
    gpu_flop_per_s: float = 0.0  # the dense peak of one GPU; 0: not known
    mfu: float | None = None
    save_us: int = 0  # from notice to durable
    restart_us: int = 0  # from placed to first new step

    def mfu_at(self, tokens_per_s: float) -> float | None:
        """Return the MFU of the whole gang at `tokens_per_s`; None if FLOPs or peak are not known.

        >>> Estimate(
        ...     layout="fsdp4", peak_bytes=1, gpu_memory_bytes=1, gpus=4, flop_per_token=6e9, gpu_flop_per_s=1e15
        ... ).mfu_at(200_000)
        0.3
        """
        peak_flop_per_s = self.gpus * self.gpu_flop_per_s
        return tokens_per_s * self.flop_per_token / peak_flop_per_s if peak_flop_per_s and self.flop_per_token else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The part of a job that the scheduler reads."""

    job_id: JobId
    name: str
    owner: str
    gpus: int  # the total of the job
    queue: str = "default"
    tier: Tier = Tier.STANDARD
    priority: int = 0
    gpu_name: str | None = None
    capacity: Capacity = Capacity.ANY
    time_limit_us: int | None = None
    cost_limit_micro_usd: int | None = None
    grace_us: int = 30_000_000
    requeue: bool = True  # after a preemption: queue again, or end
    protected: bool = False  # has a checkpoint destination
    checkpoint_every_us: int = 1_800_000_000  # assumed of a job that reports no checkpoint
    save_us: int = 30_000_000  # expected: from notice to durable
    restart_us: int = 60_000_000  # expected: from placed to first new step
    min_run_us: int = 0  # it is not preempted before it has run this long
    gpu_milli: int = 1000  # of each GPU; below 1000 the job has a part of one GPU
    cpu_milli: int = 0  # of the whole job, spread over its nodes like its GPUs
    memory_bytes: int = 0  # of host memory, of the whole job, spread like its GPUs
    unit_gpus: int | None = None  # GPUs that lie in one island, else node; None: as much of the gang as a node holds
    within: str | None = None  # the whole gang lies in one island, node, rack or block; None: as close as possible
    sizes: tuple[int, ...] = ()  # fewer GPUs that it can run on, largest first; empty: not elastic
    estimate_us: int | None = None  # its run time on `gpus`, if its user gave one
    preemptions_max: int | None = None  # times it may be preempted; None: no such limit
    estimates: tuple[Estimate, ...] = ()  # the plan's answers for `gpus` and `sizes`, if the job names its model

    def estimate_on(self, gpus: int) -> Estimate | None:
        """Return the estimate for this number of GPUs; None if there is none."""
        return next((each for each in self.estimates if each.gpus == gpus), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """GPUs of one node, by index."""

    node: str
    gpus: tuple[int, ...]
    milli: int = 1000  # of each GPU

    @property
    def gpu_milli(self) -> int:
        """Return the whole lease in thousandths of a GPU.

        >>> Lease(node="n", gpus=(0, 1)).gpu_milli, Lease(node="n", gpus=(3,), milli=250).gpu_milli
        (2000, 250)
        """
        return len(self.gpus) * self.milli


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A node of the tree of queues. Jobs wait in any of them; GPUs that a queue holds count for all queues above it.

    Attributes:
        quota_gpus: GPUs that it holds without borrowing, and may take back; a part of its parent's quota.
        limit_gpus: the most GPUs that it may hold, quota and borrowed together; None: the whole cluster.
        lend: whether others may use the unused part of its quota.
        weight: its fair share of lent GPUs, against its siblings.
        user_gpus: the most GPUs that one user may hold in it.
        gpu_us_per_day: GPU time that it may use within the last 24 hours.
        micro_usd_per_day: money that it may use within the last 24 hours.
    """

    name: str
    parent: str | None = None
    quota_gpus: int = 0
    limit_gpus: int | None = None
    lend: bool = True
    weight: int = 1
    user_gpus: int | None = None
    gpu_us_per_day: int | None = None
    micro_usd_per_day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The rank that failed first on a node."""

    rank: int | None
    exit_code: int | None  # None if a signal ended it
    signal: int | None
    tail: tuple[str, ...] = ()  # its last lines, 40 at most, secrets masked


# -- the server ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUp:
    """The server started and takes jobs."""

    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShuttingDown:
    """The server shuts down: every attempt gets notice, and nothing new starts."""

    at_us: int


# -- jobs ------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """The job will not run again."""

    at_us: int
    job_id: JobId
    state: str  # done, failed or stopped
    why: str


# -- nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp:
    """An agent claims a node, with an epoch above every earlier claim; or it reports a change of its GPUs."""

    at_us: int
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown:
    """The node's agent is gone. Nothing is placed there until a NodeUp; its rank groups end with their RanksEnded."""

    at_us: int
    node: str
    epoch: int
    why: str


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


# -- attempts: decisions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent:
    """The fields of every event of one attempt: `epoch` counts the attempts of a job from 1."""

    at_us: int
    job_id: JobId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlaced(AttemptEvent):
    """The scheduler leased a whole gang's GPUs. The command `start` follows from it."""

    leases: tuple[Lease, ...]


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


# -- attempts: observations of the agents ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted(AttemptEvent):
    """The agent of one node started its rank group."""

    node: str
    launch: str = ""  # one sentence: one process per GPU, or one for the node, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded(AttemptEvent):
    """Every process of the attempt on this node is gone, and its GPUs are free."""

    node: str
    outcome: Outcome
    failure: Failure | None = None
    why: str = ""


# -- attempts: reports of the ranks ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(AttemptEvent):
    """The attempt starts at `step`: a checkpoint's, or 0 without one."""

    step: int
    generation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(AttemptEvent):
    """A span of the gang's time until `at_us`, reported by one rank; spans of an attempt do not overlap.

    Its steps are first_step up to, not including, first_step + steps.
    """

    span: SpanClass
    from_us: int
    first_step: int = 0
    steps: int = 0
    tokens: int = 0  # of the whole gang
    loss: float | None = None  # of the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(AttemptEvent):
    """Values that a rank measured since the attempt started, under the names of the `Estimate`."""

    rank: int
    step: int  # the next one to begin
    peak_bytes: int  # the most that CUDA's allocator handed out; without a GPU, the process's resident memory
    reserved_bytes: int | None = None  # the most that CUDA's allocator held; None: no GPU
    steps_total: int | None = None  # total number of steps of the job; None: not reported
    step_us: int | None = None  # median of its last steps; None: none has ended
    tokens_per_s: float | None = None  # of the whole gang
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(AttemptEvent):
    """A generation is durable and verified: steps below `step` will never be repeated."""

    step: int
    generation: int
    size_bytes: int
    stall_us: int
    upload_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeft(AttemptEvent):
    """A rank leaves: `how` is `finished`, `checkpointed` or `aborted` (stopped without a save at that step)."""

    rank: int
    how: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBehind(AttemptEvent):
    """A rank holds the others up, or no longer does; the lowest rank that answers reports it."""

    rank: int
    how: Behind
    step: int  # the step that it is in
    since_us: int
    waited: float = 0.0  # for a slow rank: fraction of the time in which others wait for it
    where: str = ""  # the innermost line of its script, or the state of its process
    stack: tuple[str, ...] = ()  # of its main thread, the outermost call first


RankEvent = Restored | Reported | Measured | CheckpointCommitted | RankLeft | RankBehind
"""Reports of ranks, which keep the times at which they happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportsRefused(AttemptEvent):
    """Impossible records of a rank's spool were left out; `why` is the reason for the last one."""

    rank: int  # the rank that wrote the spool
    count: int  # since the last such event of the spool
    why: str


# -- attempts: conclusions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateMissed(AttemptEvent):
    """An attempt measured a value outside its estimate; reported once per job and quantity."""

    quantity: str  # a value of `account.measured.Quantity`
    why: str  # one sentence with the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(AttemptEvent):
    """The ranks of the attempt have ended on every node; the job is queued again or a JobEnded follows."""

    outcome: Outcome
    why: str
    failure: Failure | None = None


Event = (
    ServerUp
    | ServerShuttingDown
    | JobSubmitted
    | StopRequested
    | JobEnded
    | NodeUp
    | NodeDown
    | NodeUnreachable
    | NodeReachable
    | NodeReclaimed
    | NodeCordoned
    | NodeUncordoned
    | QueuesSet
    | AttemptPlaced
    | NoticeGiven
    | KillOrdered
    | RanksStarted
    | RanksEnded
    | Restored
    | Reported
    | Measured
    | CheckpointCommitted
    | RankLeft
    | RankBehind
    | EstimateMissed
    | ReportsRefused
    | AttemptEnded
)
