"""Changes of turns: the times at which a waiting job may preempt or move an attempt that it may not preempt now.

A time at which nothing changes for any waiting job is none: the end of the time slice of an attempt that is on no worse
level than every waiting job, say, or the move of an attempt from a level on which no job waits to the next one.
"""

from bisect import bisect_left
from typing import NamedTuple

from cordee.ids import JobId
from cordee.schedule.state.failed_searches import Scope
from cordee.schedule.state.order import LEVEL_BITS, compared_standing, counts_service
from cordee.schedule.state.overdue import due_in
from cordee.schedule.state.records import NEVER
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import Waiting
from cordee.units import US_PER_S

EVERY_US = 60 * US_PER_S
"""Turns within a tier change without an event only at whole multiples of this, so that they cost few cycles."""

_OVERDUE = -1
"""The level of an overdue job: every attempt of its tier is on a worse one."""


class NextTurn(NamedTuple):
    """The next change of turns.

    Attributes:
        at_us: when turns change without an event; None: at no time.
        shapes: the tiers and shapes of jobs that wait.
        levels: the levels of jobs that wait; -1: that of overdue ones. Empty in orders that do not count service.
    """

    at_us: int | None = None
    shapes: frozenset[tuple[int, object]] = frozenset()
    levels: tuple[int, ...] = ()

    def is_behind(self, shape: object, scope: Scope) -> bool:
        """Return whether a failed search for this shape fails until then: a job for which it was made still waits."""
        waits = scope.standing is None or not self.levels or scope.standing in self.levels
        return waits and (scope.tier, shape) in self.shapes


def next_turn(state: State, now_us: int) -> NextTurn:
    """Return the next change of turns for the jobs that wait now."""
    policy, waiting = state.policy, state.waiting
    if not waiting.count or policy.victims == "none":
        return NextTurn()
    lines = waiting.lines.values()
    times: list[int] = []
    levels = _levels(waiting) if counts_service(policy) else []
    if policy.guards:
        allowances, overdue = state.allowances(), False
        for line in lines:
            # A job that becomes overdue gains nothing where the allowance of its tier is used up.
            if allowances.held_gpus < allowances.gpus(line.tier):
                due = due_in(line, allowances, now_us)
                times.append(due.next_us)
                overdue = overdue or bool(due.ages)
        levels += [_OVERDUE] if overdue else []
    min_run_us = _min_run_ends_us(state, now_us)
    times += [] if min_run_us is None else [min_run_us]
    if policy.takes_turns or policy.move_fraction:
        turn_us = _own_tier_us(state, now_us, levels)
        if turn_us < NEVER:
            times.append(-(-turn_us // EVERY_US) * EVERY_US)
    first = min(times, default=NEVER)
    shapes = frozenset([(line.tier, line.shape) for line in lines])
    return NextTurn(first if first < NEVER else None, shapes, tuple(levels))


def _levels(waiting: Waiting) -> list[int]:
    """Return the levels on which jobs wait, the best first."""
    standings, at = waiting.standings, 0
    levels = list[int]()
    while at < len(standings):
        levels.append(standings[at][0] >> LEVEL_BITS)
        at = bisect_left(standings, ((levels[-1] + 1) << LEVEL_BITS,))
    return levels


def _min_run_ends_us(state: State, now_us: int) -> int | None:
    """Return when an attempt has run long enough for higher tiers, or for a queue that takes back its quota."""
    if not state.heeds_min_runs(state.running.lowest_tier):
        return None
    return state.running.next_us("min_run_ends_us", now_us)


def _own_tier_us(state: State, now_us: int, levels: list[int]) -> int:
    """Return when a job has waited long enough to preempt, or an attempt's turn or wait is over; NEVER: at no time.

    The search stops at the first time that is not after the next multiple of `EVERY_US`: no earlier one is needed.
    `levels` are those of jobs that wait.
    """
    running, free_gpus = state.running, _free_gpus(state)
    soon_us = (now_us // EVERY_US + 1) * EVERY_US
    first_us = _preempts_us(state, now_us, levels, free_gpus)
    if first_us <= soon_us:
        return first_us
    if counts_service(state.policy):
        first_us = min(first_us, running.next_lost_us(now_us, levels))
        heads = [line.places[0].job_id for line in state.waiting.lines.values()]
        movable_gpus = max([_movable_gpus(state, job_id, free_gpus) for job_id in heads])
        if movable_gpus:
            first_us = min(first_us, running.next_movable_us(now_us, movable_gpus))
    else:
        first_us = min(first_us, running.next_us("slice_ends_us", now_us) or NEVER)
    return first_us if first_us <= soon_us else min(first_us, _wait_ends_us(state, now_us))


def _preempts_us(state: State, now_us: int, levels: list[int], free_gpus: int) -> int:
    """Return when the next job has waited long enough that may preempt an attempt then, or for which one may move."""
    waiting, policy, running = state.waiting, state.policy, state.running
    after_us, first = policy.preempt_after_us, (now_us - policy.preempt_after_us + 1,)
    preempts_all, preempts = not levels or _OVERDUE in levels, dict[int, bool]()  # by standing
    for since_us, job_id in waiting.since[bisect_left(waiting.since, first) :]:
        standing = compared_standing(policy, waiting.standing(job_id))
        if not preempts_all and standing not in preempts:
            preempts[standing] = running.has_lost(standing, now_us)
        if preempts_all or preempts[standing] or _movable_gpus(state, job_id, free_gpus):
            return since_us + after_us
    return NEVER


def _free_gpus(state: State) -> int:
    """Return the number of free GPUs, those included that this cycle keeps for jobs."""
    nodes = state.nodes
    kept = sum(each.mask.bit_count() for each in nodes.claimed.values())
    return kept + sum(tally.free for tally in nodes.free.kinds.values())


def _movable_gpus(state: State, job_id: JobId, free_gpus: int) -> int:
    """Return the largest attempt that may move for a waiting job: none, where too few GPUs are free."""
    job = state.jobs[job_id].job
    if job.mig is not None:
        return 1
    return int(state.policy.move_fraction * job.gpus) if job.gpus <= free_gpus else 0


def _wait_ends_us(state: State, now_us: int) -> int:
    if not state.running.awaited:
        return NEVER
    kept_us = state.running.kept_until_us(now_us, state.policy)
    return int(kept_us.min(where=kept_us > now_us, initial=NEVER))
