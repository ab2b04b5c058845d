"""The messages about a job: which of its events are notified, and their text."""

from dataclasses import dataclass
from typing import NamedTuple

from cordee.answers.jobs import AttemptView, JobDetailView
from cordee.events import (
    AttemptEnded,
    Behind,
    BudgetReached,
    Event,
    JobEnded,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    RanksStarted,
)
from cordee.units import US_PER_HOUR, format_duration, format_micro_usd, format_month, plural
from cordee.workload.notify import NotifyKind

TAIL_LINES = 5  # last lines of a rank that failed
TEXT_CHARS_MAX = 2_000
BUDGET_PERCENT = 80

_AWAY = {
    NoticeReason.PREEMPT: "another job takes its GPUs",
    NoticeReason.TIME_SLICE: "its time slice is over",
    NoticeReason.QUOTA: "its queue gives borrowed GPUs back",
    NoticeReason.RECLAIM: "the cloud takes the machine back",
    NoticeReason.DRAIN: "an operator drains its node",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One notification.

    Attributes:
        id: the same whenever the message is sent again, so that a receiver can leave out repetitions.
        at_us: when its event happened.
    """

    id: str
    kind: NotifyKind
    at_us: int
    job_id: str
    name: str
    owner: str
    text: str


class Budget(NamedTuple):
    """Micro-dollars that a job has cost, and its limit."""

    micro_usd: int
    limit_micro_usd: int


def kind_of(event: Event) -> NotifyKind | None:
    """Return the kind of notification that an event may cause; None: none."""
    match event:
        case RanksStarted():
            return "start"
        case JobEnded(state=state):
            return "failure" if state == "failed" else "end"
        case AttemptEnded(outcome=Outcome.FAILED):
            return "failure"
        case NoticeGiven(reason=reason) if reason in _AWAY:
            return "preemption"
        case RankBehind(how=Behind.STUCK | Behind.SILENT):
            return "hang"
        case BudgetReached():
            return "budget"
    return None


def message_of(number: int, event: Event, job: JobDetailView, micro_usd: int) -> Message | None:
    """Return the message about an event of the log.

    Args:
        number: of the event.
        event: of the job.
        job: as it is now.
        micro_usd: that it has cost until now.
    """
    kind = kind_of(event)
    text = None if kind is None else _text(event, job, micro_usd)
    if kind is None or text is None:
        return None
    return _message(str(number), kind, event.at_us, job, text)


def budget_message(at_us: int, job: JobDetailView, spent: Budget) -> Message:
    """Return the message that a job has spent most of its limit."""
    percent = 100 * spent.micro_usd // spent.limit_micro_usd
    text = f"has cost {format_micro_usd(spent.micro_usd)}, {percent} % of its limit of "
    text += f"{format_micro_usd(spent.limit_micro_usd)}; at the limit it is stopped"
    return _message(f"budget/{job.job_id}", "budget", at_us, job, text)


def reached_message(number: int, event: BudgetReached) -> Message:
    """Return the message that a part of a budget of a queue or a user is spent."""
    budget = event.budget
    amounts = []
    if budget.micro_usd is not None:
        amounts.append(f"{format_micro_usd(event.micro_usd)} of {format_micro_usd(budget.micro_usd)}")
    if budget.gpu_us is not None:
        amounts.append(f"{event.gpu_us / US_PER_HOUR:.1f} of {budget.gpu_us / US_PER_HOUR:.1f} GPU-hours")
    span = f"of {format_month(event.from_us)}" if event.from_us else "in total"
    text = f"the budget of {budget.whose} {span}: {event.percent} % is spent, {' and '.join(amounts)}"
    if budget.hard:
        text += "; jobs over it wait" + (", and running ones leave before its end" if budget.stops else "")
    return Message(str(number), "budget", event.at_us, "", budget.whose, budget.user or "", text)


def _message(name: str, kind: NotifyKind, at_us: int, job: JobDetailView, text: str) -> Message:
    text = f"{job.job_id} {text}"
    if len(text) > TEXT_CHARS_MAX:
        text = text[: TEXT_CHARS_MAX - 1] + "…"
    return Message(name, kind, at_us, job.job_id, job.name, job.owner, text)


def _text(event: Event, job: JobDetailView, micro_usd: int) -> str | None:
    match event:
        case RanksStarted(epoch=epoch):
            attempt = _attempt(job, epoch)
            return None if attempt is None else _started(event, job, attempt)
        case JobEnded():
            return _ended(event, job, micro_usd)
        case AttemptEnded(epoch=epoch):
            if job.ended_us is not None and epoch == job.epoch:
                return None  # the job's own end says it
            return f"failed in attempt {epoch}, and starts again: {event.why}{_tail(_attempt(job, epoch))}"
        case NoticeGiven(reason=reason):
            after = _AWAY[reason]
            if event.for_job is not None and reason is NoticeReason.PREEMPT:
                after = f"{event.for_job} takes its GPUs"
            saved = "no checkpoint is known" if job.checkpoint_step is None else f"step {job.checkpoint_step} is saved"
            return f"has notice to leave: {after}; {saved}, and it is queued again"
        case RankBehind(rank=rank, step=step):
            since = format_duration(max(0, event.at_us - event.since_us) / 1e6)
            where = f", at {event.where}" if event.where else ""
            return f"hangs: rank {rank} has made no progress for {since} in step {step}{where}"
    return None


def _started(event: RanksStarted, job: JobDetailView, attempt: AttemptView) -> str | None:
    if attempt.leases and event.node != min(attempt.leases):
        return None  # one message for the gang
    gpus = plural(sum(len(held) for held in attempt.leases.values()), "GPU")
    nodes = f" of {plural(len(attempt.leases), 'node')}" if len(attempt.leases) > 1 else f" of {event.node}"
    if attempt.epoch == 1:
        waited = format_duration(max(0, event.at_us - job.submitted_us) / 1e6)
        return f"starts on {gpus}{nodes}, {waited} after its submission"
    return f"starts again on {gpus}{nodes}, attempt {attempt.epoch}"


def _ended(event: JobEnded, job: JobDetailView, micro_usd: int) -> str:
    took = format_duration(max(0, event.at_us - job.submitted_us) / 1e6)
    cost = f", {format_micro_usd(micro_usd)}" if micro_usd else ""
    step = "" if job.step is None else f", at step {job.step}"
    if event.state == "failed":
        newest = job.attempts[-1] if job.attempts else None
        return f"failed after {took}{step}{cost}: {event.why}{_tail(newest)}"
    word = "is done" if event.state == "done" else f"was stopped ({event.why})"
    return f"{word}, {took} after its submission{step}{cost}"


def _attempt(job: JobDetailView, epoch: int) -> AttemptView | None:
    return next((each for each in job.attempts if each.epoch == epoch), None)


def _tail(attempt: AttemptView | None) -> str:
    """Return the last lines of the rank that failed first; their secrets are masked already."""
    if attempt is None or attempt.failure is None or not attempt.failure.tail:
        return ""
    return "\n" + "\n".join(attempt.failure.tail[-TAIL_LINES:])
