"""The rules of a queue that keep a job from starting although GPUs may be free, each with its numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from cordee.events import Job
from cordee.schedule.quota.day import Pair
from cordee.schedule.quota.held import MILLI, Holder
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, format_micro_usd

RUNWAY_US = US_PER_HOUR
"""The time for which the rest of a day must last a job that starts, unless its run time is shorter."""

MOST_OF_DAY = Fraction(7, 8)
"""An attempt that saved nothing counts as failed if it used this fraction of a day's limit: its job would do the same
again each day. If it used less, other jobs used the rest."""


class Bound(StrEnum):
    """A rule that keeps a job from starting although GPUs may be free."""

    QUEUE_LIMIT = "queue-limit"
    USER_LIMIT = "user-limit"
    DAY_GPU_TIME = "day-gpu-time"
    DAY_COST = "day-cost"
    BUDGET = "budget"  # of its queue, its owner, or both
    KEPT = "kept"  # free GPUs are the quota of queues that do not lend


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The rule that keeps a job from starting now.

    Attributes:
        queue: the queue that has the rule; for `KEPT` the job's own.
        text: one sentence with the numbers, for `explain`.
        short_milli: GPUs that must leave `queue` (`USER_LIMIT`: this user's; `KEPT`: borrowers') before it may start,
            beyond those that have notice; None if no preemption helps (a day's limit, a budget, a
            job larger than the limit).
        until_us: the time at which it ends by itself if no holding changes; None: there is none.
    """

    bound: Bound
    queue: str
    text: str
    short_milli: int | None = None
    until_us: int | None = None


def milli(job: Job, gpus: int | None = None) -> int:
    """Return the thousandths of GPUs that the job holds on `gpus` GPUs (None: on those it asks for)."""
    return (job.gpus if gpus is None else gpus) * job.gpu_milli


def show_gpus(gpu_milli: int) -> str:
    """Return GPUs as text.

    >>> show_gpus(16_000), show_gpus(500)
    ('16', '0.5')
    """
    return f"{gpu_milli / MILLI:g}"


def limit(holder: Holder, more: int) -> Refusal | None:
    """Return a refusal if the queue would hold more than its limit."""
    most = holder.queue.limit_gpus
    if most is None or holder.held + more <= most * MILLI:
        return None
    text = f"it needs {show_gpus(more)} GPUs; queue {holder.queue.name} holds {show_gpus(holder.held)}"
    text += f" of the {most} that it may hold"
    short = holder.staying + more - most * MILLI
    return _refusal(Bound.QUEUE_LIMIT, holder, text, short if more <= most * MILLI else None)


def user_limit(holder: Holder, owner: str, more: int) -> Refusal | None:
    """Return a refusal if one user would hold more in the queue than a user may."""
    most, held = holder.queue.user_gpus, holder.users.get(owner, 0)
    if most is None or held + more <= most * MILLI:
        return None
    text = f"it needs {show_gpus(more)} GPUs; {owner} holds {show_gpus(held)} of the {most}"
    text += f" that a user may hold in queue {holder.queue.name}"
    short = held + more - most * MILLI
    return _refusal(Bound.USER_LIMIT, holder, text, short if more <= most * MILLI else None)


@dataclass(frozen=True, slots=True)
class DayLimit:
    """A limit of a queue's day; `most` in thousandths of a GPU, or nano-dollars per hour, times microseconds."""

    which: int  # of `day.Pair`
    bound: Bound
    most: int
    show: Callable[[int], str]


def day_limits(holder: Holder) -> Iterator[DayLimit]:
    """Yield the limits of a day that the queue has."""
    time_us, cost = holder.queue.gpu_us_per_day, holder.queue.micro_usd_per_day
    if time_us is not None:
        yield DayLimit(0, Bound.DAY_GPU_TIME, time_us * MILLI, show_gpu_time)
    if cost is not None:
        yield DayLimit(1, Bound.DAY_COST, cost * MILLI * US_PER_HOUR, show_cost)


def show_gpu_time(milli_us: int) -> str:
    """Return GPU time as text."""
    return f"{milli_us / (MILLI * US_PER_HOUR):.3g} GPU-h"


def show_cost(nano_usd_us_per_hour: int) -> str:
    """Return money as text."""
    return format_micro_usd(nano_usd_us_per_hour // (MILLI * US_PER_HOUR))


def pace(holder: Holder, which: int) -> int:
    """Return the use of the queue's holdings in a microsecond."""
    return holder.nano if which else holder.held


def first(which: int, job: Job, more: int, average_nano: int) -> int:
    """Return the use of a job within its runway; its GPUs are assumed to cost the average of all."""
    return (more * average_nano if which else more) * runway_us(job)


def runway_us(job: Job) -> int:
    """Return the time for which the rest of a day must last the job."""
    known = (each for each in (job.time_limit_us, job.estimate_us) if each is not None)
    return min((RUNWAY_US, *known))


def day(holder: Holder, job: Job, more: int, average_nano: int, now_us: int) -> Refusal | None:
    """Return a refusal if the job and the running jobs would use more than the queue may within 24 hours."""
    for rule in day_limits(holder):
        assert holder.day is not None, "it has a limit"
        used = holder.day.used(now_us)[rule.which]
        wanted = first(rule.which, job, more, average_nano) + pace(holder, rule.which) * runway_us(job)
        if used + wanted <= rule.most:
            continue
        until_us = holder.day.crosses_us(rule.which, rule.most - wanted, now_us, falling=True)
        text = f"queue {holder.queue.name} used {rule.show(used)} of the {rule.show(rule.most)}"
        text += " that it may use within a day"
        span = format_duration(runway_us(job) / US_PER_S)
        text += f"; with it, the next {span} would take {rule.show(wanted)}"
        return Refusal(bound=rule.bound, queue=holder.queue.name, text=text, until_us=until_us)
    return None


def most_of_day(holder: Holder, used: Pair) -> str | None:
    """Return the amount and the limit as text if it is most of a day's limit; None otherwise."""
    for rule in day_limits(holder):
        if used[rule.which] >= MOST_OF_DAY * rule.most:
            return f"{rule.show(used[rule.which])} of the {rule.show(rule.most)} that queue {holder.queue.name} may use"
    return None


def never(holder: Holder, job: Job, more: int, average_nano: int) -> str | None:
    """Return the rule of this queue by which the job can never start; None if there is none."""
    name = holder.queue.name
    for allows, most in (("may hold", holder.queue.limit_gpus), ("lets a user hold", holder.queue.user_gpus)):
        if most is not None and more > most * MILLI:
            return f"it needs {show_gpus(more)} GPUs, and queue {name} {allows} {most} at most"
    for rule in day_limits(holder):
        wanted = first(rule.which, job, more, average_nano)
        if wanted > rule.most:
            span = format_duration(runway_us(job) / US_PER_S)
            return f"its first {span} takes {rule.show(wanted)}, and queue {name} may use {rule.show(rule.most)} a day"
    return None


def _refusal(bound: Bound, holder: Holder, text: str, short: int | None) -> Refusal:
    return Refusal(bound=bound, queue=holder.queue.name, text=text, short_milli=short)
