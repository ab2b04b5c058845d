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
    ReplicaReady,
    ReplicaUnready,
    Reported,
    Restored,
    ServiceDeclared,
    ServiceScaled,
    SpanClass,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_bytes, format_duration, plural

Names = Mapping[JobId, str]


def line(event: Event, names: Names) -> str | None:
    """Return an event in words; None for one that needs none."""
    job_id = event.job.job_id if isinstance(event, JobSubmitted) else getattr(event, "job_id", JobId(""))
    name = names.get(job_id, "")
    if isinstance(event, JobSubmitted):
        gang = f"a gang of {event.job.gpus}" if event.job.service is None else "one slot"
        return f"{name or event.job.name} is queued: {event.job.tier} tier, {gang}"
    if isinstance(event, ServiceDeclared | ServiceScaled | ReplicaReady | ReplicaUnready):
        return _of_service(event, name)
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


def _of_service(event: ServiceDeclared | ServiceScaled | ReplicaReady | ReplicaUnready, name: str) -> str:
    if isinstance(event, ServiceDeclared):
        return f"{event.service} is declared: {event.min_replicas} to {event.max_replicas} replicas"
    if isinstance(event, ServiceScaled):
        return f"{event.service} wants {plural(event.replicas, 'replica')}: {event.why}"
    if isinstance(event, ReplicaReady):
        return f"{name} has answered a first token ({event.engine}) and gets requests"
    return f"{name} gets no new requests: {event.why}"


def _notice(event: NoticeGiven, name: str, names: Names) -> str:
    seconds = format_duration((event.deadline_us - event.at_us) / US_PER_S)
    if event.reason is NoticeReason.RESIZE:
        why = (
            "there is room again" if event.for_job is None else f"{names.get(event.for_job, event.for_job)} needs slots"
        )
        return f"{name} gets notice: {why}, go on with {plural(event.gpus or 0, 'rank')}"
    if event.reason is NoticeReason.PREEMPT and event.for_job is not None:
        return f"{name} gets notice: {names.get(event.for_job, event.for_job)} needs its slots, {seconds} to leave"
    return f"{name} gets notice ({event.reason}): {seconds} to leave"


def _restored(event: Restored) -> str:
    if event.generation is None:
        return "starts at step 0"
    return f"resumes at step {event.step}, from its checkpoint"


def _places(leases: tuple[Lease, ...]) -> str:
    return "; ".join(f"{lease.node}: {', '.join(map(str, lease.gpus))}" for lease in leases)
