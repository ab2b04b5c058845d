"""When time alone lets somebody who waits push somebody whom it may not push now."""

from bisect import bisect_right
from operator import itemgetter

from cordee.schedule.running import NEVER
from cordee.schedule.share import counts_service
from cordee.schedule.state import State
from cordee.units import US_PER_S

EVERY_US = 60 * US_PER_S
"""Turns within a tier change by time alone at whole multiples of this, so that they cost few cycles."""


def next_turn_us(state: State, now_us: int) -> int | None:
    """The next such time, if anybody waits; None if there is none."""
    policy, waiting = state.policy, state.waiting
    if not waiting.count or policy.victims == "none":
        return None
    times: list[int] = []
    for line in waiting.lines.values():
        later = bisect_right(line.ages, now_us, key=itemgetter(0))
        if later < len(line.ages) and line.ages[later][0] < NEVER:
            times.append(line.ages[later][0])
    rests_us = state.running.next_us("rests_until_us", now_us)
    times += [] if rests_us is None else [rests_us]
    if policy.takes_turns or policy.move_share:
        turn_us = _own_tier_us(state, now_us)
        if turn_us is not None:
            times.append(-(-turn_us // EVERY_US) * EVERY_US)
    return min(times, default=None)


def _own_tier_us(state: State, now_us: int) -> int | None:
    """When somebody has waited long enough to push, or an attempt has run long enough, or goes down a level."""
    policy, waiting = state.policy, state.waiting
    times: list[int] = []
    young = bisect_right(waiting.since, now_us - policy.push_after_us, key=itemgetter(0))
    if young < len(waiting.since):
        times.append(waiting.since[young][0] + policy.push_after_us)
    shares_us = state.running.next_us("shares_from_us", now_us)
    times += [] if shares_us is None else [shares_us]
    if counts_service(policy):
        crosses_us = state.running.crosses_us(now_us, policy.levels_gpu_us)
        times += [] if crosses_us is None else [crosses_us]
    return min(times, default=None)
