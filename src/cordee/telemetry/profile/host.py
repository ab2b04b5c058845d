"""Launches of the host, causes of the device's idle time, and the self times of a host without a device.

The host causes a gap if it launched the next operation after the device had become idle. Otherwise that operation was
queued, and waited for an event of another stream or for the launch's latency.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordee.telemetry.profile.defects import Defects
from cordee.telemetry.profile.read import Longs, Ops, Profile
from cordee.telemetry.profile.sweep import US, Sweep

Cause = Literal["host", "queued", "unknown"]
NOT_LAUNCHED = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in which a device was idle; `host` is the longest call of the host in it, if that is known."""

    start_us: float
    length_us: float
    cause: Cause
    before: str
    host: str | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive operations, each launched after the one before it had started: launch-bound."""

    start_us: float
    length_us: float
    operations: int
    idle_us: float


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """The gaps of a device: their number, causes, the longest ones, and launch-bound stretches."""

    gaps: int
    host_us: float
    queued_us: float
    unknown_us: float
    longest: tuple[Gap, ...]
    stretches: tuple[Stretch, ...]
    launch_bound_us: float
    launched: int
    queue_us_median: float | None
    """From the end of the launch to the start of the operation."""


def launches_of(ops: Ops, launches: Ops) -> tuple[Longs, Longs]:
    """Return when each operation's launch started and ended, `NOT_LAUNCHED` where the profile has none."""
    begin = np.full(len(ops), NOT_LAUNCHED)
    end = begin.copy()
    known = np.flatnonzero(launches.correlation > 0)
    if not len(known) or not len(ops):
        return begin, end
    # Several calls may have one correlation: take the first, since `known` is ordered by start.
    number, first = np.unique(launches.correlation[known], return_index=True)
    at = np.minimum(np.searchsorted(number, ops.correlation), len(number) - 1)
    found = number[at] == ops.correlation
    call = known[first[at[found]]]
    begin[found], end[found] = launches.start_ns[call], launches.end_ns[call]
    return begin, end


def idle(profile: Profile, ops: Ops, swept: Sweep, most: int) -> IdleGaps:
    """Return the gaps of one device, the `most` longest in full."""
    origin = int(swept.edge_ns[0])
    begin, end = launches_of(ops, profile.launches)
    empty = np.flatnonzero(swept.state == 0)
    start, length = swept.edge_ns[empty], swept.length_ns[empty]
    # A span may reach beyond the operations, and no operation follows the last one.
    following = np.searchsorted(ops.start_ns, start + length)
    last = following == len(ops)
    following[last] = 0
    launched = np.where(last, NOT_LAUNCHED, begin[following])
    unknown = launched == NOT_LAUNCHED
    late = ~unknown & (launched >= start)
    longest = []
    for at in np.lexsort((start, -length))[:most].tolist():
        begins, lasts = int(start[at]), int(length[at])
        cause: Cause = "unknown" if unknown[at] else "host" if late[at] else "queued"
        before = "" if last[at] else profile.names[ops.name[following[at]]].text
        during = _host_in(profile, begins, begins + lasts)
        longest.append(Gap((begins - origin) / US, lasts / US, cause, before, during))
    stretches = _stretches(ops, begin, swept)
    known = begin != NOT_LAUNCHED
    ahead = float(np.median(ops.start_ns[known] - end[known])) / US if known.any() else None
    return IdleGaps(
        gaps=len(empty),
        host_us=float(length[late].sum()) / US,
        queued_us=float(length[~late & ~unknown].sum()) / US,
        unknown_us=float(length[unknown].sum()) / US,
        longest=tuple(longest),
        stretches=tuple(sorted(stretches, key=lambda each: (-each.idle_us, each.start_us))[:most]),
        launch_bound_us=sum(each.idle_us for each in stretches) if stretches else 0.0,
        launched=int(known.sum()),
        queue_us_median=ahead,
    )


def _stretches(ops: Ops, begin: Longs, swept: Sweep) -> list[Stretch]:
    """Return the launch-bound stretches in which the device was idle at times."""
    if len(ops) < 2:
        return []
    late = np.concatenate([[False], (begin[1:] != NOT_LAUNCHED) & (begin[1:] >= ops.start_ns[:-1])])
    turns = np.flatnonzero(np.diff(np.concatenate([[False], late, [False]]).astype(np.int8)))
    first, last = turns[::2], turns[1::2] - 1
    start = ops.start_ns[first - 1]
    reach = np.maximum.accumulate(ops.end_ns)[last]
    empty = swept.within(swept.state == 0, start, reach)
    return [
        Stretch(
            float(start[at] - swept.edge_ns[0]) / US,
            float(reach[at] - start[at]) / US,
            int(last[at] - first[at] + 1),
            float(empty[at]) / US,
        )
        for at in np.flatnonzero(empty > 0)
    ]


def _host_in(profile: Profile, start_ns: int, end_ns: int) -> str | None:
    """Return the name of the host's longest call in an interval: one of the runtime before the operator around it."""
    for table, least in ((profile.launches, 0.5), (profile.host, 0.0)):
        upto = int(np.searchsorted(table.start_ns, end_ns))
        within = np.minimum(table.end_ns[:upto], end_ns) - np.maximum(table.start_ns[:upto], start_ns)
        if not len(within) or within.max() <= least * (end_ns - start_ns):
            continue
        most = np.flatnonzero(within == within.max())
        inner = most[np.argmin(table.length_ns[most])]
        return str(profile.names[table.name[inner]].text)
    return None


def self_times(host: Ops, names: NDArray[np.object_], defects: Defects) -> Ops:
    """Cut nested operations of threads into pieces that do not overlap: each moment counts for the innermost."""
    pieces: list[tuple[int, int, int]] = []
    order = np.lexsort((-host.length_ns, host.start_ns, host.track))
    start, end, track = (column[order].tolist() for column in (host.start_ns, host.end_ns, host.track))
    open_: list[tuple[int, int]] = []  # Row and end of each open operation.
    cursor = 0

    def close(until: float) -> None:
        nonlocal cursor
        while open_ and open_[-1][1] <= until:
            row, ends = open_.pop()
            if ends > cursor:
                pieces.append((row, cursor, ends))
                cursor = ends

    for at, row in enumerate(order.tolist()):
        if at and track[at] != track[at - 1]:
            close(np.inf)
        close(start[at])
        ends = end[at]
        if open_:
            outer, outer_end = open_[-1]
            if start[at] > cursor:
                pieces.append((outer, cursor, start[at]))
            if ends > outer_end:
                name = names[host.name[row]]
                over_us = (ends - outer_end) / US
                defects.note("overlapping durations", f"{name!r} ends {over_us} us after its parent")
                ends = outer_end
        cursor = start[at]
        open_.append((row, ends))
    close(np.inf)
    rows, begins, stops = (np.array(column, np.int64) for column in zip(*pieces, strict=True)) if pieces else (
        np.zeros(0, np.int64),) * 3  # fmt: skip
    chosen = host.where(rows)
    cut = Ops(begins, stops - begins, chosen.name, chosen.track, chosen.correlation, chosen.group)
    return cut.where(np.lexsort((cut.track, cut.start_ns)))
