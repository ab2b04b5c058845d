"""Reports of the ranks of an attempt, which keep the times at which they happened."""

from dataclasses import dataclass

from cordee.events.attempt import AttemptEvent
from cordee.events.values import Behind, SpanClass
from cordee.frozen import quick_init


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(AttemptEvent):
    """The attempt starts at `step`: a checkpoint's, or 0 without one."""

    step: int
    generation: int | None


@quick_init
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
class MetricsLogged(AttemptEvent):
    """Points of the curves that the script logged under names of its own, such as a validation loss; the newest last.

    A name stands once for each of its points.
    """

    rank: int
    step: int  # the one that ran, or the next one to begin
    names: tuple[str, ...]
    values: tuple[float | None, ...]  # None: not finite
    steps: tuple[int, ...] = ()  # of each point; empty: `step` of all


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeFound(AttemptEvent):
    """The loss has left its usual range, or is not finite; `action` says what the job does about it."""

    rank: int
    step: int  # the first one whose loss was unusual
    seen_step: int  # the one whose loss confirmed it
    value: float | None  # None: not finite
    action: str  # warn, rollback, reorder or stop
    why: str  # one sentence with the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(AttemptEvent):
    """The ranks went back to the checkpoint before a spike: steps from `to_step` on are done again."""

    rank: int
    step: int  # the one that would have come next
    to_step: int
    generation: int
    batches: int  # global batches that are left out, or put off
    reordered: bool  # they are put off
    why: str


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(AttemptEvent):
    """A generation is durable and verified: steps below `step` will never be repeated."""

    step: int
    generation: int
    size_bytes: int
    stall_us: int
    upload_us: int


@quick_init
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRehearsed(AttemptEvent):
    """A rank of a rehearsal has run the steps that follow its checkpoint: on past the save, or after the resume."""

    rank: int
    first_step: int  # that of the checkpoint
    losses: tuple[float | None, ...]  # of each step, as it was logged; None: none was, or it is not finite
    weights: float | None  # the norm of its weights afterwards; None: not finite
    state: tuple[str, ...]  # afterwards: `data NAME DIGEST` of samplers and loaders, `own NAME DIGEST` of the rest
    to: str  # the destination of its checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReady(AttemptEvent):
    """The engine of a replica has answered a request: the gateway may send it others."""

    rank: int
    address: str  # http://HOST:PORT, as the gateway reaches it
    engine: str
    model: str
    kv_tokens: int | None = None  # that its cache holds; None: not known
    slots: int | None = None  # requests that it answers at a time; None: not known
    load_us: int | None = None  # from the start of the engine until it was ready; None: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUnready(AttemptEvent):
    """A replica gets no new requests: its engine does not answer, or it drains before it leaves."""

    rank: int
    why: str
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RagChanged(AttemptEvent):
    """A knowledge base changed what runs at once or what lies in memory, or found something damaged or slow."""

    rank: int
    what: str  # at_once, slots, engine, pinned, partitions, damaged, disk or limit
    before: int | None
    after: int | None
    why: str  # one sentence with the numbers


RankEvent = (
    Restored
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
)
"""Reports of ranks, which keep the times at which they happened."""
