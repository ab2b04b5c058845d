"""The number of answers that an engine generates at once: what the arrivals need, no more than pays, with hysteresis.

The table of a profile says how long a request takes when so many run at once. Few at once are each faster, and leave
the processor to retrieval; many answer more a second, up to a knee beyond which they only slow each other down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

HEADROOM = 1.3
"""Requests a second that are aimed at, over those that come."""
HOLD_US = 2_000_000
"""Time for which fewer must be enough before fewer are allowed; more are allowed at once."""
GAIN = 1.05
"""What one more at once has to bring, in requests a second, to count as more."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    """The limit now, since when fewer would be enough (None: they would not), and why it changed last."""

    limit: int
    fewer_since_us: int | None = None
    why: str = ""


def rate_of(seconds: Mapping[int, float], at_once: int) -> float:
    """Return the requests a second of an engine with so many at once, from its table of seconds by number.

    >>> rate_of({1: 1.0, 4: 2.0}, 4), rate_of({1: 1.0, 4: 2.0}, 2)
    (2.0, 1.5)
    """
    return at_once / seconds_at(seconds, at_once)


def seconds_at(seconds: Mapping[int, float], at_once: float) -> float:
    """Return the seconds of one request when so many run at once: linear between the numbers that were measured."""
    known = sorted(seconds)
    below = max((each for each in known if each <= at_once), default=known[0])
    above = min((each for each in known if each >= at_once), default=known[-1])
    if below == above:
        # Beyond the last one, requests a second grow no more.
        return seconds[below] * (max(1.0, at_once / below) if at_once > known[-1] else 1.0)
    part = (at_once - below) / (above - below)
    return seconds[below] + part * (seconds[above] - seconds[below])


def knee(seconds: Mapping[int, float], most: int) -> int:
    """Return the number at once from which no more bring `GAIN` times the requests a second.

    >>> knee({1: 1.0, 2: 1.2, 4: 1.6, 8: 3.2}, 8)
    4
    """
    best = 1
    for number in [each for each in sorted(seconds) if each <= most]:
        if rate_of(seconds, number) > GAIN * rate_of(seconds, best):
            best = number
    return min(best, most)


def decide(
    now_us: int, before: AtOnce, seconds: Mapping[int, float], arrivals_per_s: float, backlog: int, most: int
) -> AtOnce:
    """Return the limit from now on.

    Args:
        now_us: the time.
        before: as this returned it last.
        seconds: of one request by the number at once, as profiled.
        arrivals_per_s: of the last seconds.
        backlog: requests that wait for the engine.
        most: slots of the engine.
    """
    top = knee(seconds, most)
    wanted = top
    if not backlog:
        needed = HEADROOM * arrivals_per_s
        enough = (each for each in sorted({1, *seconds}) if each <= top and rate_of(seconds, each) >= needed)
        wanted = next(enough, top)
    if wanted > before.limit:
        reason = f"{backlog} wait" if backlog else f"{arrivals_per_s:.2f} requests come each second"
        return AtOnce(wanted, None, f"{reason}: {wanted} at once answer {rate_of(seconds, wanted):.2f} a second")
    if wanted == before.limit or before.limit > most:
        return before if before.limit <= most else AtOnce(most, None, f"the engine has {most} slots")
    since_us = now_us if before.fewer_since_us is None else before.fewer_since_us
    if now_us - since_us < HOLD_US:
        return replace(before, fewer_since_us=since_us)
    why = f"{arrivals_per_s:.2f} requests came each second: {wanted} at once are enough, and each is faster"
    return AtOnce(wanted, None, why)
