"""Events in words, for a reader who sees Cordee for the first time."""

from collections.abc import Mapping

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Lease,
    NoticeGiven,
    NoticeReason,
    RankLeft,
    RanksEnded,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_bytes, format_duration

Names = Mapping[JobId, str]


def line(event: Event, names: Names) -> str | None:
    """Return an event in words; None for one that needs none."""
    name = names.get(getattr(event, "job_id", JobId("")), "")
    if isinstance(event, JobSubmitted):
        return f"{event.job.name} is queued: {event.job.tier} tier, a gang of {event.job.gpus}"
    if isinstance(event, AttemptPlaced):
        return f"{name} attempt {event.epoch} is placed on {_places(event.leases)}"
    if isinstance(event, NoticeGiven):
        return _notice(event, name, names)
    if isinstance(event, Restored):
        return f"{name} {_restored(event)}"
    if isinstance(event, CheckpointCommitted):
        return f"{name} checkpoint: steps below {event.step} are durable ({format_bytes(event.size_bytes)})"
    if isinstance(event, RankLeft) and event.how != "finished":
        return f"{name} rank {event.rank} leaves at step {event.step}: {event.how}"
    if isinstance(event, KillOrdered):
        return f"{name} is killed: {event.why}"
    if isinstance(event, RanksEnded):
        return f"{name} releases its slots on {event.node}"
    if isinstance(event, AttemptEnded):
        return f"{name} attempt {event.epoch} ended: {event.outcome}"
    if isinstance(event, JobEnded):
        return f"{name} is {event.state}"
    return None


def progress(event: Event, names: Names) -> str | None:
    """Return the newest step and its loss, which is shown between two lines."""
    if not isinstance(event, Reported) or event.span is not SpanClass.USEFUL or not event.steps:
        return None
    loss = "" if event.loss is None else f", loss {event.loss:.3f}"
    return f"{names.get(event.job_id, '')} step {event.first_step + event.steps}{loss}"


def _notice(event: NoticeGiven, name: str, names: Names) -> str:
    seconds = format_duration((event.deadline_us - event.at_us) / US_PER_S)
    if event.reason is NoticeReason.PREEMPT and event.for_job is not None:
        return f"{name} gets notice: {names.get(event.for_job, event.for_job)} needs its slots, {seconds} to leave"
    return f"{name} gets notice ({event.reason}): {seconds} to leave"


def _restored(event: Restored) -> str:
    if event.generation is None:
        return "starts at step 0"
    return f"resumes at step {event.step}, from its checkpoint"


def _places(leases: tuple[Lease, ...]) -> str:
    return "; ".join(f"{lease.node}: {', '.join(map(str, lease.gpus))}" for lease in leases)
