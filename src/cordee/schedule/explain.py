"""Explanations: the one reason that holds a job where it is, with numbers, computed on demand.

For a waiting job the cycle itself is run, so the answer cannot disagree with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cordee.events import AttemptPlaced, Behind, Capacity, Job, Lease, NoticeGiven, RankBehind
from cordee.ids import JobId, attempt_name
from cordee.schedule.cycle.cycle import run
from cordee.schedule.cycle.draft import Draft
from cordee.schedule.cycle.heads import turn_of, turns
from cordee.schedule.cycle.settle import ATTEMPTS_WITHOUT_COMMIT
from cordee.schedule.host_room import lacks_host, most_of_host, needs_of_host
from cordee.schedule.instances import in_the_way
from cordee.schedule.placement.entry import Entry, mask_of
from cordee.schedule.placement.place import fits, lacks, pools
from cordee.schedule.placement.view import Pool
from cordee.schedule.quota.bounds import Bound, Refusal
from cordee.schedule.reserved import barred, barred_by
from cordee.schedule.state.chains import deferral, waits_for
from cordee.schedule.state.failed_searches import FailedSearches
from cordee.schedule.state.order import is_below
from cordee.schedule.state.records import NEVER, Attempt, JobRecord, Phase
from cordee.schedule.state.reservations import barring
from cordee.schedule.state.running import min_run_us
from cordee.schedule.state.state import State
from cordee.units import US_PER_S, format_duration, plural

OVERDUE_CHECKPOINTS = 3  # intervals without a checkpoint after which an explanation mentions it


class Reason(StrEnum):
    """The main reason that holds a job where it is."""

    UNKNOWN_JOB = "unknown-job"
    ENDED = "ended"
    RUNNING = "running"
    HELD_UP = "held-up"  # it runs, and one of its ranks makes no progress or is slower than the others
    STARTING = "starting"  # placed; its ranks have not started
    LEAVING = "leaving"  # has notice, or is being killed
    PAUSED = "paused"  # holds no GPU until it is resumed
    HELD = "held"  # a person holds it
    WAITS_FOR_JOBS = "waits-for-jobs"  # it starts after others
    WAITS_FOR_TIME = "waits-for-time"  # between two tries
    SERVER_SHUTTING_DOWN = "server-shutting-down"
    STARTS_NOW = "starts-now"  # the next cycle places it
    NO_NODES = "no-nodes"
    NO_SUCH_GPU = "no-such-gpu"
    TOO_LARGE = "too-large"  # for the nodes that are up
    WAITS_FOR_VICTIMS = "waits-for-victims"  # victims leave GPUs on which it is assumed
    WAITS_FOR_CHECKPOINT = "waits-for-checkpoint"  # its victims keep their places until they have saved
    WAITS_FOR_MINIMUM_RUN = "waits-for-minimum-run"  # its victims may run for a minimum time first
    RESERVED_FOR_OTHER = "reserved-for-other"  # enough are free, and kept for a gang that goes first
    SPLIT = "split"  # enough are free, but not of one kind
    FRAGMENTED = "fragmented"  # enough are free, but not in its shape
    NOT_ENOUGH_FREE = "not-enough-free"
    NOT_ENOUGH_HOST = "not-enough-host"  # CPU cores or host memory
    QUEUE_LIMIT = "queue-limit"  # its queue holds its limit
    USER_LIMIT = "user-limit"  # its owner holds the limit of a user in its queue
    DAY_GPU_TIME = "day-gpu-time"  # its queue used its GPU time of a day
    DAY_COST = "day-cost"  # its queue used its money of a day
    BUDGET = "budget"  # the rest of a budget does not last it
    KEPT = "kept"  # what is free is the quota of queues that do not lend
    NODES_RESERVED = "nodes-reserved"  # for other jobs, for a time
    ERROR = "error"  # the scheduler fails on it; the other jobs go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reason why a job is where it is.

    Attributes:
        text: one sentence with the numbers.
        blocking: the jobs that hold what it waits for, those that leave soonest first.
        until_us: when the reason ends at the latest, where that is known.
    """

    job_id: JobId
    phase: Phase | None
    reason: Reason
    text: str
    gpus_needed: int = 0
    gpus_free: int = 0
    blocking: tuple[JobId, ...] = ()
    until_us: int | None = None


def explain(state: State, job_id: JobId, now_us: int) -> Explanation:
    """Return the main reason; the state is left as it was."""
    record = state.jobs.get(job_id)
    if record is None:
        return Explanation(job_id=job_id, phase=None, reason=Reason.UNKNOWN_JOB, text=f"no job {job_id} is known")
    if record.phase.ended:
        why = record.ended.why if record.ended else ""
        return _why(record, Reason.ENDED, f"{record.phase.value}: {why}")
    attempt = state.attempts.get(job_id)
    if attempt is not None:
        return _live(record, attempt, now_us)
    if record.phase.deferred:
        return _deferred(state, record, now_us)
    if state.shutting_down:
        return _why(
            record,
            Reason.SERVER_SHUTTING_DOWN,
            "the server is shutting down; the job continues after the next `cordee up`",
        )
    return _waiting(state, record, now_us)


def _why(record: JobRecord, reason: Reason, text: str, **more: object) -> Explanation:
    return Explanation(
        job_id=record.job.job_id,
        phase=record.phase,
        reason=reason,
        text=text,
        gpus_needed=record.job.gpus,
        **more,  # type: ignore[arg-type]
    )


def _deferred(state: State, record: JobRecord, now_us: int) -> Explanation:
    """Explain a job that is in no line: it is paused or held, or waits for other jobs."""
    event = record.gate.deferred
    if event is None and record.phase is Phase.PAUSED:
        return _why(record, Reason.PAUSED, "it left with a checkpoint, and holds no GPU until it is resumed")
    found = event or deferral(state, record, now_us)
    if found is None:
        return _why(record, Reason.STARTS_NOW, "nothing keeps it from starting: the next cycle queues it")
    ago = format_duration(max(0, now_us - record.waits_since_us) / US_PER_S)
    text, blocking = found.why, waits_for(state, record)
    if record.gate.held is not None:
        text += f", {ago} ago: `cordee resume {record.job.job_id}` lets it start again"
        reason = Reason.PAUSED if record.phase is Phase.PAUSED else Reason.HELD
        return _why(record, reason, text, blocking=blocking)
    reason = Reason.WAITS_FOR_JOBS if blocking else Reason.WAITS_FOR_TIME
    return _why(record, reason, text, blocking=blocking, until_us=found.until_us)


def _live(record: JobRecord, attempt: Attempt, now_us: int) -> Explanation:
    name = attempt_name(record.job.job_id, attempt.epoch)
    where = ", ".join(lease.node for lease in attempt.leases)
    where = f"{plural(attempt.gpus, 'GPU')} on {where}" if attempt.gpus else where
    held = ", ".join(lease.node for lease in attempt.held)
    if attempt.kill is not None:
        return _why(record, Reason.LEAVING, f"{name} is being killed: {attempt.kill.why}; it still holds {held}")
    if attempt.notice is not None:
        return _leaving(record, attempt.notice, now_us)
    if attempt.started_us is None:
        return _why(record, Reason.STARTING, f"{name} was placed on {where}; its ranks have not started yet")
    ran = format_duration(max(0, now_us - attempt.started_us) / US_PER_S)
    if attempt.behind is not None:
        return _why(record, Reason.HELD_UP, f"{name} has run on {where} for {ran}; {held_up(attempt.behind, now_us)}")
    return _why(record, Reason.RUNNING, f"{name} has run on {where} for {ran}{_unsaved(attempt, now_us)}")


def _unsaved(attempt: Attempt, now_us: int) -> str:
    """Return a clause about a job whose checkpoints fail, as far as their absence shows it."""
    since_us = attempt.captured_us or attempt.started_us or now_us
    every_us = attempt.job.checkpoint_every_us
    if not attempt.job.protected or now_us - since_us < OVERDUE_CHECKPOINTS * every_us:
        return ""
    ago, every = (format_duration(us / US_PER_S) for us in (now_us - since_us, every_us))
    return f"; its work of the last {ago} is in no checkpoint, and one is due each {every}: see `cordee logs`"


def held_up(event: RankBehind, now_us: int | None = None) -> str:
    """Describe the rank that holds a job up; with a time, for how long.

    >>> held_up(RankBehind(at_us=9, job_id=JobId("a"), epoch=1, rank=3, how=Behind.SILENT, step=7, since_us=4))
    'rank 3 has not answered, in step 7'
    """
    time = "" if now_us is None else f" for {format_duration(max(0, now_us - event.since_us) / US_PER_S)}"
    where = f", {event.where}" if event.where else ""
    if event.how is Behind.SLOW:
        return f"rank {event.rank} has been slow{time}: the others wait for it {event.waited:.0%} of the time"
    does = "has not answered" if event.how is Behind.SILENT else "has stood still"
    return f"rank {event.rank} {does}{time}, in step {event.step}{where}"


def _leaving(record: JobRecord, notice: NoticeGiven, now_us: int) -> Explanation:
    gain = f" for {notice.for_job}" if notice.for_job else ""
    left = format_duration(max(0, notice.deadline_us - now_us) / US_PER_S)
    name = attempt_name(notice.job_id, notice.epoch)
    text = f"{name} got notice ({notice.reason.value}{gain}); its ranks have {left} left"
    blocking = (notice.for_job,) if notice.for_job else ()
    return _why(record, Reason.LEAVING, text, blocking=blocking, until_us=notice.deadline_us)


def _waiting(state: State, record: JobRecord, now_us: int) -> Explanation:
    job = record.job
    candidates = pools(job, state.nodes.free.kinds)
    if not candidates:
        return _for_reserved(state, record, 0) or _nowhere(state, record, now_us)
    usable = max(sum(state.nodes.free.usable(kind) for kind in pool) for pool in candidates)
    if all(lacks(state.nodes.free, job, pool) is None for pool in candidates):
        text = f"it needs {job.gpus} {_asked(job)}{_shape(job)}; the nodes that are up have {usable}"
        if job.gpus <= usable and (job.cpu_milli or job.memory_bytes):
            most = most_of_host(_entries(state, candidates), job, free=False)
            text = f"it needs {needs_of_host(job)}{_shape(job)}; {most}"
        if job.mig is not None:
            text = f"it needs {job.gpus} {_asked(job)}; no node that is up has this profile"
        reserved = _for_reserved(state, record, usable)
        return reserved or _why(record, Reason.TOO_LARGE, text + _out_of_use(state, now_us))
    refusal = state.quotas.admits(job, now_us)
    with state.journal.what_if():
        draft = run(state, now_us)
        for failed, error in draft.errors:
            if failed == job.job_id:
                return _why(record, Reason.ERROR, f"the scheduler failed on it: {type(error).__name__}: {error}")
        if any(isinstance(event, AttemptPlaced) and event.job_id == job.job_id for event in draft.events):
            where = f"{job.gpus} {_asked(job)}" if job.gpus else "the CPU cores of a node"
            return _why(record, Reason.STARTS_NOW, f"the next cycle places it on {where}")
        leaving = _leaving_of(state, draft.assumed.get(job.job_id, ()))
    if leaving:
        return _for_victims(state, record, leaving, now_us)
    kept = _kept_from(state, job, now_us)
    if kept:
        return _for_checkpoint(state, record, kept, now_us)
    if refusal is not None:
        return _refused(state, record, refusal)
    if lacks_host(state.nodes.free, job, candidates):
        return _for_host(state, record, candidates)
    if job.mig is not None:
        return _for_instance(state, record, candidates, draft)
    return _for_gpus(state, record, candidates, draft, now_us)


def _for_reserved(state: State, record: JobRecord, usable: int) -> Explanation | None:
    """Explain the wait of a job for nodes that are reserved for others; None if they are too small as well."""
    job, nodes = record.job, barred(state, record.job)
    if not nodes or usable + sum(each.node.gpus - len(each.node.unavailable) for each in nodes) < job.gpus:
        return None
    until_us = min(each.until_us for node in nodes for each in barring(node, job))
    text = f"it needs {job.gpus} {_asked(job)}; the nodes that it may use have {usable}; {barred_by(nodes, job)}"
    return _why(record, Reason.NODES_RESERVED, text, until_us=until_us)


def _refused(state: State, record: JobRecord, refusal: Refusal) -> Explanation:
    """Explain a queue's refusal; the jobs that hold what the queue, or in it the user, may hold block it."""
    held_by_queue = refusal.bound in (Bound.QUEUE_LIMIT, Bound.USER_LIMIT)
    blocking = _oldest_first(
        attempt
        for attempt in (state.attempts.values() if held_by_queue else ())
        if (refusal.bound is not Bound.USER_LIMIT or attempt.job.owner == record.job.owner)
        and any(each.queue.name == refusal.queue for each in state.quotas.leaf(attempt.job.queue).path)
    )[:10]
    text, failed = refusal.text, record.attempts_without_commit
    if failed and record.last is not None and refusal.bound in (Bound.DAY_GPU_TIME, Bound.DAY_COST):
        text += f"; {attempt_name(record.job.job_id, record.last.epoch)} {record.last.why}"
        text += f" ({failed} in a row without a checkpoint; {ATTEMPTS_WITHOUT_COMMIT} end the job)"
    return _why(record, Reason(refusal.bound.value), text, blocking=blocking, until_us=refusal.until_us)


def _nowhere(state: State, record: JobRecord, now_us: int) -> Explanation:
    asked = _asked(record.job)
    up = sum(node.up for node in state.nodes.records.values())
    if not up:
        return _why(record, Reason.NO_NODES, f"no node is up; {_are(len(state.nodes.records))} known")
    if not state.nodes.free.kinds:
        return _why(
            record,
            Reason.NO_NODES,
            f"{plural(up, 'node')} {'is' if up == 1 else 'are'} up, but none may be used{_out_of_use(state, now_us)}",
        )
    kinds = ", ".join(f"{name} ({capacity.value})" for name, capacity, _ in sorted(state.nodes.free.kinds))
    text = f"it needs {record.job.gpus} {asked}; no node that is up has them, only {kinds}"
    return _why(record, Reason.NO_SUCH_GPU, text)


def _leaving_of(state: State, place: tuple[Lease, ...]) -> list[Attempt]:
    """Return the attempts that leave GPUs of a place."""
    wanted = {lease.node: mask_of(lease.gpus) for lease in place}
    return [
        attempt
        for attempt in state.attempts.values()
        if attempt.leaving and any(wanted.get(lease.node, 0) & mask_of(lease.gpus) for lease in attempt.held)
    ]


def _for_victims(state: State, record: JobRecord, leaving: list[Attempt], now_us: int) -> Explanation:
    ends = {attempt.job.job_id: attempt.notice.deadline_us for attempt in leaving if attempt.notice is not None}
    blocking = tuple(sorted((attempt.job.job_id for attempt in leaving), key=lambda each: (ends.get(each, 0), each)))
    until_us = max(ends.values(), default=None)
    free = _most_free(state, record.job)
    text = f"it needs {record.job.gpus} {_asked(record.job)}; {_are(free)} free, and "
    text += f"{_and(blocking)} {'makes' if len(blocking) == 1 else 'make'} room"
    if until_us is not None and until_us > now_us:
        text += f" within {format_duration((until_us - now_us) / US_PER_S)}"
    elif until_us is not None:
        text += f" now: {'its' if len(blocking) == 1 else 'their'} time to save is over"
    return _why(record, Reason.WAITS_FOR_VICTIMS, text, gpus_free=free, blocking=blocking, until_us=until_us)


def _kept_from(state: State, job: Job, now_us: int) -> list[tuple[int, JobId]]:
    """Return the attempts that would be preempted for a job if none were kept for a checkpoint, and until when."""
    kept_us = state.running.kept_until_us(now_us, state.policy)
    kept = {job_id: int(kept_us[row]) for job_id, row in state.running.row_of.items() if kept_us[row] > now_us}
    if not kept:
        return []
    with state.journal.what_if():
        without_waiting = replace(state.policy, awaits_checkpoint=False)
        for name, value in (("policy", without_waiting), ("failed_searches", FailedSearches())):
            state.journal.note(setattr, state, name, getattr(state, name))
            setattr(state, name, value)
        draft = run(state, now_us)
    preempted = {
        event.job_id for event in draft.events if isinstance(event, NoticeGiven) and event.for_job == job.job_id
    }
    return sorted((until_us, job_id) for job_id, until_us in kept.items() if job_id in preempted)


def _for_checkpoint(state: State, record: JobRecord, kept: list[tuple[int, JobId]], now_us: int) -> Explanation:
    blocking, until_us = tuple(job_id for _, job_id in kept), kept[-1][0]
    free = _most_free(state, record.job)
    text = f"it needs {record.job.gpus} {_asked(record.job)}; {_are(free)} free, and {_and(blocking)} "
    one, several = "keeps its GPUs until its next checkpoint is", "keep their GPUs until their next checkpoints are"
    text += one if len(kept) == 1 else several
    text += f" durable, for at most {format_duration((until_us - now_us) / US_PER_S)} more"
    more = {"gpus_free": free, "blocking": blocking, "until_us": until_us}
    return _why(record, Reason.WAITS_FOR_CHECKPOINT, text, **more)


def _for_host(state: State, record: JobRecord, candidates: tuple[Pool, ...]) -> Explanation:
    """Explain the wait of a job for CPU cores or host memory; jobs that hold some of them block it."""
    job, kinds = record.job, {kind for pool in candidates for kind in pool}
    holders = _oldest_first(
        attempt
        for attempt in state.attempts.values()
        if (attempt.job.cpu_milli or attempt.job.memory_bytes)
        and any(_is_of(state, lease.node, tuple(kinds)) for lease in attempt.held)
    )
    text = f"it needs {needs_of_host(job)}; {most_of_host(_entries(state, candidates), job, free=True)}"
    text += f", and {_jobs(len(holders), 'holds', 'hold')} the rest" if holders else ""
    more = {"gpus_free": _most_free(state, job), "blocking": holders[:10]}
    return _why(record, Reason.NOT_ENOUGH_HOST, text, **more)


def _entries(state: State, candidates: tuple[Pool, ...]) -> list[Entry]:
    kinds = {kind for pool in candidates for kind in pool}
    return [entry for entry in state.nodes.free.entries.values() if entry.kind in kinds]


def _for_gpus(state: State, record: JobRecord, candidates: tuple[Pool, ...], draft: Draft, now_us: int) -> Explanation:
    job = record.job
    pool = max(candidates, key=lambda each: sum(state.nodes.free.free(kind) for kind in each))
    free = sum(state.nodes.free.free(kind) for kind in pool)
    needs = f"it needs {job.gpus} {_asked(job)}"
    numbers = f"{needs}; {_are(free)} free"
    if any(fits(state.nodes.free, job, each) for each in candidates):
        before = {each.job.job_id for kind in pool if (each := draft.reservations.get(kind)) and each.job != job}
        first = tuple(sorted(before) or sorted(draft.assumed))
        text = f"{numbers}, but reserved for {_and(first)}, ahead of it in the order"
        return _why(record, Reason.RESERVED_FOR_OTHER, text, gpus_free=free, blocking=first)
    everywhere = sum(state.nodes.free.free(kind) for kind in {kind for each in candidates for kind in each})
    if free < job.gpus <= everywhere:
        text = f"{needs}; {free} of one type and {everywhere} of all types are free, and a gang never mixes types"
        return _why(record, Reason.SPLIT, text, gpus_free=free)
    protected = _in_min_run(state, job, pool, now_us)
    if protected:
        until_us, soonest = protected[0]
        left = format_duration((until_us - now_us) / US_PER_S)
        text = f"{numbers}, and {soonest}, which was preempted before, may not be preempted again for {left}"
        blocking = tuple(job_id for _, job_id in protected)
        more = {"gpus_free": free, "blocking": blocking, "until_us": until_us}
        return _why(record, Reason.WAITS_FOR_MINIMUM_RUN, text, **more)
    holders = _oldest_first(
        attempt for attempt in state.attempts.values() if any(_is_of(state, lease.node, pool) for lease in attempt.held)
    )
    blocking = holders[:10]
    held = _held(len(holders), sum(state.nodes.free.usable(kind) for kind in pool) - free)
    if free >= job.gpus:
        text = f"{numbers}, but not together{_shape(job)}; {held}{_reserved(state, job)}"
        return _why(record, Reason.FRAGMENTED, text, gpus_free=free, blocking=blocking)
    ahead = sum(turn < turn_of(state, draft, record) for turn in turns(state, draft) if turn.job_id != job.job_id)
    text = numbers + (f", {_jobs(ahead, 'waits', 'wait')} before it" if ahead else "")
    text += f", and {held}{_out_of_use(state, now_us)}{_reserved(state, job)}"
    return _why(record, Reason.NOT_ENOUGH_FREE, text, gpus_free=free, blocking=blocking)


def _for_instance(state: State, record: JobRecord, candidates: tuple[Pool, ...], draft: Draft) -> Explanation:
    """Explain the wait of a job for a MIG instance: the slices that are free, and the instances in its way."""
    needs = f"it needs {record.job.gpus} {_asked(record.job)}"
    if any(fits(state.nodes.free, record.job, each) for each in candidates):
        first = tuple(sorted(draft.assumed))
        text = f"{needs}; one has room, but is kept for {_and(first)}, ahead of it in the order"
        return _why(record, Reason.RESERVED_FOR_OTHER, text, blocking=first)
    found = in_the_way(state, record.job, candidates)
    reason = Reason.FRAGMENTED if found.free else Reason.NOT_ENOUGH_FREE
    return _why(record, reason, f"{needs}; {found.text}", blocking=found.blocking)


def _oldest_first(attempts: Iterable[Attempt]) -> tuple[JobId, ...]:
    """Return the jobs of attempts, those that were placed first before the others."""
    return tuple(job_id for _, job_id in sorted((each.placed_us, each.job.job_id) for each in attempts))


def _most_free(state: State, job: Job) -> int:
    """Return the free GPUs of the pool for a job that has most."""
    free = state.nodes.free
    return max(sum(free.free(kind) for kind in pool) for pool in pools(job, free.kinds))


def _in_min_run(state: State, job: Job, pool: Pool, now_us: int) -> list[tuple[int, JobId]]:
    """Return the attempts that a job may preempt once they have run for their minimum time, and when that is."""
    found = []
    for job_id, row in state.running.row_of.items():
        until_us = int(state.running.rows.ints["min_run_ends_us"][row])
        if until_us == NEVER:  # its ranks have not started
            until_us = now_us + min_run_us(state.attempts[job_id].job, state.attempts[job_id].epoch)
        if until_us <= now_us or not is_below(state.attempts[job_id].job.tier, job.tier):
            continue
        if any(_is_of(state, lease.node, pool) for lease in state.attempts[job_id].held):
            found.append((until_us, job_id))
    return sorted(found)


def _shape(job: Job) -> str:
    """Describe which GPUs must lie together."""
    parts = [f"units of {job.unit_gpus} in one island"] if job.unit_gpus else []
    parts += [f"all within one {job.within}"] if job.within else []
    return f" ({', '.join(parts)})" if parts else ""


def _out_of_use(state: State, now_us: int) -> str:
    """Name the nodes that are out of use: they are unreachable, quarantined or cordoned."""
    records = sorted(state.nodes.records.items())
    silent = [name for name, node in records if node.unreachable]
    names = [name for name, node in records if node.quarantined_until_us > now_us]
    cordoned = [name for name, node in records if node.up and node.cordoned_by is not None]
    failed = "is quarantined because it" if len(names) == 1 else "are quarantined because they"
    text = f"; {_and(names)} {failed} went down too often" if names else ""
    text += f"; {_and(cordoned)} {'is' if len(cordoned) == 1 else 'are'} cordoned" if cordoned else ""
    return text + (f"; {_and(silent)} cannot be reached now" if silent else "")


def _reserved(state: State, job: Job) -> str:
    """Name the reservations that keep nodes from a job."""
    text = barred_by(barred(state, job), job)
    return f"; {text}" if text else ""


def _are(count: int) -> str:
    """Return the subject and verb of a sentence about so many GPUs or nodes.

    >>> _are(0), _are(1), _are(2)
    ('none is', '1 is', '2 are')
    """
    return "none is" if count == 0 else f"{count} {'is' if count == 1 else 'are'}"


def _held(jobs: int, gpus: int) -> str:
    """Return the jobs that hold the GPUs that are not free.

    >>> _held(1, 1), _held(2, 8)
    ('1 job holds the other', '2 jobs hold the others')
    """
    return f"{_jobs(jobs, 'holds', 'hold')} the {'other' if gpus == 1 else 'others'}"


def _jobs(count: int, one: str, several: str) -> str:
    return f"{plural(count, 'job')} {one if count == 1 else several}"


def _asked(job: Job) -> str:
    capacity = "" if job.capacity is Capacity.ANY else f" on {job.capacity.value} capacity"
    if job.mig is not None:
        return f"MIG instance {job.mig}" + (f" of {job.gpu_name}" if job.gpu_name else "") + capacity
    gpus = "GPU" if job.gpus == 1 else "GPUs"
    of_one_type = "" if job.gpus == 1 else " of one type"
    return (f"{job.gpu_name} {gpus}" if job.gpu_name else gpus + of_one_type) + capacity


def _and(jobs: Sequence[str]) -> str:
    named = [*jobs] if len(jobs) <= 3 else [*jobs[:3], f"{len(jobs) - 3} more"]
    return " and ".join(part for part in (", ".join(named[:-1]), named[-1]) if part)


def _is_of(state: State, name: str, pool: Pool) -> bool:
    record = state.nodes.records[name]
    return (record.node.gpu_name, record.node.capacity, record.reserved_for) in pool
