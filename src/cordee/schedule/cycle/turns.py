"""Changes of turns: the times at which a waiting job may preempt an attempt that it may not preempt now."""

from bisect import bisect_right
from operator import itemgetter

from cordee.schedule.state.order import counts_service
from cordee.schedule.state.overdue import due_in
from cordee.schedule.state.records import NEVER
from cordee.schedule.state.state import State
from cordee.units import US_PER_S

EVERY_US = 60 * US_PER_S
"""Turns within a tier change without an event only at whole multiples of this, so that they cost few cycles."""


def next_turn_us(state: State, now_us: int) -> int | None:
    """Return the next time at which turns change without an event; None if there is none, or no job waits."""
    policy, waiting = state.policy, state.waiting
    if not waiting.count or policy.victims == "none":
        return None
    times: list[int] = []
    if policy.guards:
        allowances = state.allowances()
        # A job that becomes overdue gains nothing where the allowance of its tier is used up.
        lines = [line for line in waiting.lines.values() if allowances.held_gpus < allowances.gpus(line.tier)]
        times += [next_us for line in lines if (next_us := due_in(line, allowances, now_us).next_us) < NEVER]
    min_run_us = _min_run_ends_us(state, now_us)
    times += [] if min_run_us is None else [min_run_us]
    if policy.takes_turns or policy.move_fraction:
        turn_us = _own_tier_us(state, now_us)
        if turn_us is not None:
            times.append(-(-turn_us // EVERY_US) * EVERY_US)
    return min(times, default=None)


def _min_run_ends_us(state: State, now_us: int) -> int | None:
    """Return when an attempt has run long enough for higher tiers, or for a queue that takes back its quota."""
    lowest = int(state.running.rows.ints["tier"].max(initial=0))
    if not state.quotas.queues and lowest <= min(line.tier for line in state.waiting.lines.values()):
        return None
    return state.running.next_us("min_run_ends_us", now_us)


def _own_tier_us(state: State, now_us: int) -> int | None:
    """Return when a job has waited long enough to preempt, or an attempt's time slice, level or wait is over.

    The search stops at the first time that is not after the next multiple of `EVERY_US`: no earlier one is needed.
    """
    soonest, soon_us = None, (now_us // EVERY_US + 1) * EVERY_US
    for find in (_preempts_us, _slice_ends_us, _level_changes_us, _wait_ends_us):
        at_us = find(state, now_us)
        if at_us is not None and at_us <= soon_us:
            return at_us
        if at_us is not None and (soonest is None or at_us < soonest):
            soonest = at_us
    return soonest


def _preempts_us(state: State, now_us: int) -> int | None:
    since, after_us = state.waiting.since, state.policy.preempt_after_us
    first = bisect_right(since, now_us - after_us, key=itemgetter(0))
    return since[first][0] + after_us if first < len(since) else None


def _slice_ends_us(state: State, now_us: int) -> int | None:
    return state.running.next_us("slice_ends_us", now_us)


def _level_changes_us(state: State, now_us: int) -> int | None:
    policy = state.policy
    return state.running.level_changes_us(now_us, policy.levels_gpu_us) if counts_service(policy) else None


def _wait_ends_us(state: State, now_us: int) -> int | None:
    kept_us = state.running.kept_until_us(now_us, state.policy)
    kept_us = kept_us[kept_us > now_us]
    return int(kept_us.min()) if kept_us.size else None
