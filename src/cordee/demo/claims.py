"""The claims of the demo, as checks of the plan, the log, the recorded steps and the ledger.

A check returns the claim with what was measured, or raises. It knows nothing but its arguments, so that each can be
given a false result.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from cordee.errors import ClaimError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobEnded,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    Restored,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_bytes, format_duration, plural
from cordee.view.report import Claim

Steps = Mapping[int, Sequence[int]]
"""By rank: the steps that it ran, in order, over all attempts."""


def check(holds: bool, says: str, measured: str) -> Claim:
    """Return the claim, if it holds.

    Raises:
        ClaimError: it does not.
    """
    if not holds:
        raise ClaimError(
            f"the demo's claim does not hold: {says}; measured: {measured}",
            hint="run `cordee demo --keep` and read the server's log in the folder it prints",
        )
    return Claim(says, measured)


def parameters(says: str, counted: int, expected: int) -> Claim:
    """Check that a shape has exactly this many parameters."""
    return check(counted == expected, says, f"{counted:,} parameters counted from the shape")


def weight(says: str, state_bytes: int, expected: str) -> Claim:
    """Check the size of a model's state, to the digits that are shown."""
    return check(format_bytes(state_bytes) == expected, says, f"{state_bytes:,} bytes")


def holds_the_state(held_bytes: Mapping[str, int], state_bytes: int) -> Claim:
    """Check that no layout gains room by leaving a part of the state out; those with copies hold more."""
    least, most = min(held_bytes, key=held_bytes.__getitem__), max(held_bytes, key=held_bytes.__getitem__)
    measured = (
        f"at least {format_bytes(held_bytes[least])} ({least}), at most {format_bytes(held_bytes[most])} ({most}), "
        f"against {format_bytes(state_bytes)}"
    )
    says = f"In each of the {len(held_bytes)} layouts the GPUs together hold the whole state, those that copy it more"
    # The part of each GPU is rounded to whole bytes, on some hundreds of GPUs.
    return check(held_bytes[least] > state_bytes - 10_000, says, measured)


def whole_gang(events: Iterable[Event], job_id: JobId, gpus: int, started: Mapping[int, int]) -> Claim:
    """Check that every attempt of the job had all its GPUs at once, and that all its ranks ran.

    Args:
        events: the log.
        job_id: the job.
        gpus: the size of the gang.
        started: by epoch, the number of ranks that reached their first step.
    """
    placed = {
        event.epoch: sum(len(lease.gpus) for lease in event.leases)
        for event in events
        if isinstance(event, AttemptPlaced) and event.job_id == job_id
    }
    whole = bool(placed) and all(n == gpus and started.get(epoch) == gpus for epoch, n in placed.items())
    measured = ", ".join(
        f"attempt {epoch}: {n} leased at once, {started.get(epoch, 0)} of {gpus} ranks trained"
        for epoch, n in placed.items()
    )
    return check(whole, f"{job_id} only ever ran as a whole gang of {gpus}", measured or "it was never placed")


def preempted_for(events: Iterable[Event], job_id: JobId, for_job: JobId) -> Claim:
    """Check that the scheduler gave the job notice for the other one, once."""
    notices = [event for event in events if isinstance(event, NoticeGiven) and event.job_id == job_id]
    right = len(notices) == 1 and notices[0].reason is NoticeReason.PREEMPT and notices[0].for_job == for_job
    measured = "; ".join(f"{notice.reason} for {notice.for_job}" for notice in notices) or "no notice"
    return check(right, f"The scheduler preempted {job_id} for {for_job}, once", measured)


def left_together(events: Sequence[Event], job_id: JobId, ranks: int) -> Claim:
    """Check that all ranks left at one step after the notice, with a checkpoint, before the deadline."""
    notice = next(event for event in events if isinstance(event, NoticeGiven) and event.job_id == job_id)
    of_attempt = [event for event in events if getattr(event, "epoch", None) == notice.epoch]
    left = [event for event in of_attempt if isinstance(event, RankLeft) and event.job_id == job_id]
    ended = next((event for event in of_attempt if isinstance(event, AttemptEnded) and event.job_id == job_id), None)
    steps = {event.step for event in left}
    together = (
        {event.rank for event in left} == set(range(ranks))
        and len(steps) == 1
        and all(event.how == "checkpointed" for event in left)
        and ended is not None
        and ended.outcome is Outcome.CHECKPOINTED
        and ended.at_us <= notice.deadline_us
    )
    took = "never" if ended is None else format_duration((ended.at_us - notice.at_us) / US_PER_S)
    grace = format_duration((notice.deadline_us - notice.at_us) / US_PER_S)
    at_step = ", ".join(map(str, sorted(steps))) or "none"
    measured = f"{plural(len(left), 'rank')} at step {at_step}; gone {took} after the notice"
    return check(together, f"All {ranks} ranks left at one step, checkpointed, within the {grace} of grace", measured)


def none_overlapped(events: Iterable[Event], first: JobId, second: JobId) -> Claim:
    """Check that two gangs that need the same GPUs were never placed at the same time."""
    held: set[JobId] = set()
    together = 0
    for event in events:
        if isinstance(event, AttemptPlaced) and event.job_id in (first, second):
            held.add(event.job_id)
            together += len(held) > 1
        elif isinstance(event, AttemptEnded):
            held.discard(event.job_id)
    return check(
        together == 0, "No slot was ever leased to both gangs", f"{together} placements on slots that were held"
    )


def resumed_by_itself(events: Iterable[Event], job_id: JobId) -> Claim:
    """Check that a second attempt continued at the step where the first one left, and that the job is done."""
    left, restored, state = None, None, "unfinished"
    for event in events:
        if getattr(event, "job_id", None) != job_id:
            continue
        if isinstance(event, RankLeft) and event.epoch == 1:
            left = event.step
        elif isinstance(event, Restored) and event.epoch == 2:
            restored = event.step
        elif isinstance(event, JobEnded):
            state = event.state
    measured = f"left at step {left}, restored at step {restored}; {state}"
    holds = left is not None and left == restored and state == "done"
    return check(holds, f"{job_id} was queued again by itself, resumed at the step it had left, and finished", measured)


def no_step_repeated(ran: Steps, ranks: int, steps: int) -> Claim:
    """Check that each rank ran each step once, in order."""
    repeated = sum(len(seen) - len(set(seen)) for seen in ran.values())
    missing = sum(len(set(range(steps)) - set(seen)) for seen in ran.values()) + steps * (ranks - len(ran))
    in_order = all(before < after for seen in ran.values() for before, after in pairwise(seen))
    measured = f"{repeated} repeated, {missing} missing of {steps} steps on each of {len(ran)} ranks"
    holds = len(ran) == ranks and repeated == 0 and missing == 0 and in_order
    return check(holds, "0 steps were repeated, and none was left out", measured)


def same_bits(interrupted: Mapping[str, str], uninterrupted: Mapping[str, str]) -> Claim:
    """Check that the final weights are equal bit by bit. Both map the name of a tensor or shard to a digest."""
    differ = sorted(name for name in {*interrupted, *uninterrupted} if interrupted.get(name) != uninterrupted.get(name))
    measured = f"{len(differ)} of {len(uninterrupted)} SHA-256 digests differ" + (
        f": {', '.join(differ[:3])}" if differ else ""
    )
    holds = bool(uninterrupted) and not differ
    return check(holds, "The final weights are bitwise equal to those of an uninterrupted run", measured)


def adds_up(classes_gpu_us: Mapping[str, int], held_gpu_us: int, leased_gpu_us: int) -> Claim:
    """Check that the classes of the ledger sum to the held time, and this to the log's leases, to the microsecond."""
    total = sum(classes_gpu_us.values())
    measured = f"classes {total:,} = held {held_gpu_us:,} = leased {leased_gpu_us:,} GPU-microseconds"
    holds = total == held_gpu_us == leased_gpu_us > 0
    return check(holds, "Every GPU-microsecond that was held is in exactly one class", measured)
