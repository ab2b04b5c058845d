"""The values that events carry: nodes, jobs with their estimates, leases, queues, and the reasons for what happens."""

from dataclasses import dataclass
from enum import StrEnum

from cordee.events.mig import MigGpus, MigInstance
from cordee.frozen import quick_init
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
    DRAIN = "drain"  # an operator drains the node, or it is reserved for others
    WINDOW = "window"  # its window closes
    PAUSE = "pause"  # its owner or an operator pauses the job
    REQUEUE = "requeue"  # its owner or an operator sends the job to the end of its queue
    REHEARSAL = "rehearsal"  # the job is a rehearsal, which shows that it survives this


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
class HeldSet:
    """A dataset that jobs have named, in the cache of a node as its last prefetch left it."""

    url: str
    held_bytes: int
    size_bytes: int  # of the whole dataset
    bytes_per_s: int = 0  # of the last prefetch that had to fetch; 0: none had
    found_bytes: int = 0  # that prefetches of all attempts found there, since the agent's folder was made
    fetched_bytes: int = 0  # that they fetched from its store
    given_bytes: int = 0  # that the caches of other nodes gave them


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
    mig: MigGpus | None = None  # GPUs that are leased by MIG instances; None: none
    data: tuple[HeldSet, ...] = ()  # by URL
    gives_at: str = ""  # where its cache gives pieces to other nodes, `HOST:PORT/FINGERPRINT`; "": it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """The cost of a token of each kind on a replica, in any one unit such as nanoseconds."""

    input: int  # computed
    cached: int  # input whose keys and values are found in the prefix cache
    output: int


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
    kv_tokens: int | None = None  # of a service: the tokens that the KV cache of one replica holds
    sequences: int | None = None  # of a service: the sequences in one replica's batch
    within_slo: int | None = None  # of a service: requests at a time for which one replica meets its SLO
    ttft_us: int | None = None  # of a service: time to first token
    tpot_us: int | None = None  # of a service: time per output token
    token_weights: TokenWeights | None = None  # of a service: by which its dollars are divided over its tokens

    def mfu_at(self, tokens_per_s: float) -> float | None:
        """Return the MFU of the whole gang at `tokens_per_s`; None if FLOPs or peak are not known.

        >>> Estimate(
        ...     layout="fsdp4", peak_bytes=1, gpu_memory_bytes=1, gpus=4, flop_per_token=6e9, gpu_flop_per_s=1e15
        ... ).mfu_at(200_000)
        0.3
        """
        peak_flop_per_s = self.gpus * self.gpu_flop_per_s
        return tokens_per_s * self.flop_per_token / peak_flop_per_s if peak_flop_per_s and self.flop_per_token else None


class AfterEnd(StrEnum):
    """The end of a job that another one waits for."""

    OK = "ok"  # done; of a sweep: at least one trial is done
    ANY = "any"
    FAILED = "failed"  # failed or stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A dependency of a job: it starts after this job, or sweep, has ended so."""

    of: str  # the id
    end: AfterEnd = AfterEnd.OK


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The part of a job that the scheduler reads."""

    job_id: JobId
    name: str
    owner: str
    gpus: int  # the total of the job; 0: it needs CPU and host memory only
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
    mig: str | None = None  # the profile of the MIG instance that it runs on; None: it needs none
    cpu_milli: int = 0  # of the whole job, spread over its nodes like its GPUs
    micro_usd_per_cpu_hour: int = 0  # the price of a core when it was submitted; only a job without GPUs pays it
    memory_bytes: int = 0  # of host memory, of the whole job, spread like its GPUs
    unit_gpus: int | None = None  # GPUs that lie in one island, else node; None: as much of the gang as a node holds
    within: str | None = None  # the whole gang lies in one island, node, rack or block; None: as close as possible
    sizes: tuple[int, ...] = ()  # fewer GPUs that it can run on, largest first; empty: not elastic
    grow_after_us: int | None = None  # least time from a smaller start until it grows; None: when that pays
    estimate_us: int | None = None  # its run time on `gpus`, if its user gave one
    preemptions_max: int | None = None  # times it may be preempted; None: no such limit
    retries: tuple[tuple[str, int], ...] = ()  # most of them by cause: infrastructure, script, `exit 17`
    estimates: tuple[Estimate, ...] = ()  # the plan's answers for `gpus` and `sizes`, if the job names its model
    service: str | None = None  # the service of which it is a replica; None: it is no replica
    revision: int = 0  # of the service's declaration that it was made from
    sweep: str | None = None  # the id of the sweep of which it is a trial; None: it is no trial
    trial: int = 0  # its number in the sweep, counted from 1
    code: str = ""  # digest of its files and its command; "": not known
    rehearsed_steps: int = 0  # of a rehearsal: the steps that it runs before its notice; 0: it is none
    pauses: bool = False  # once an attempt left with a checkpoint by itself, until a JobResumed
    after: tuple[After, ...] = ()  # it starts after all of these
    not_before_us: int | None = None  # it starts then at the earliest
    window: tuple[int, ...] = ()  # it starts between these times of day: begin, end, offset from UTC; empty: at any
    window_stops: bool = False  # it gets notice in time to have left when its window closes
    data: tuple[str, ...] = ()  # URLs of the datasets that it will read

    @property
    def has_part(self) -> bool:
        """Return whether it has a part of one GPU: thousandths of it, or a MIG instance."""
        return self.gpu_milli < 1000 or self.mig is not None

    def estimate_on(self, gpus: int) -> Estimate | None:
        """Return the estimate for this number of GPUs; None if there is none."""
        return next((each for each in self.estimates if each.gpus == gpus), None)

    def nano_usd_per_hour(self, lease: "Lease", micro_usd_per_gpu_hour: int) -> int:
        """Return the price of one of its leases: of the GPUs, or of the CPU cores if it has none.

        >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=0, cpu_milli=500, micro_usd_per_cpu_hour=40_000)
        >>> job.nano_usd_per_hour(Lease(node="n", gpus=()), 2_000_000)
        20000000
        """
        gpus = lease.gpu_milli * micro_usd_per_gpu_hour
        return gpus if lease.gpus else self.cpu_milli * self.micro_usd_per_cpu_hour


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """GPUs of one node, by index; none: only CPU and host memory of it."""

    node: str
    gpus: tuple[int, ...]
    milli: int = 1000  # of each GPU
    instance: MigInstance | None = None  # of its one GPU; None: the GPUs whole, or thousandths of one

    @property
    def has_part(self) -> bool:
        """Return whether others may lease the rest of its GPU."""
        return self.milli < 1000 or self.instance is not None

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
