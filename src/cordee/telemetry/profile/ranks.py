"""Stragglers: how long ranks waited for each other, by collective and by step.

Clocks of different hosts are not compared. A collective ends on all its ranks at about the same time, so the rank that
spent least time in it came last, and the extra time of every other rank is its wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.telemetry.profile.account import RankReport

WORST = 8


@dataclass(frozen=True, slots=True)
class RankWaits:
    """One rank: its waits for others, and the waits of all others that it caused; `last` counts its late arrivals."""

    label: str
    waited_us: float
    caused_us: float
    last: int


@dataclass(frozen=True, slots=True)
class Wait:
    """One collective: the last rank, the one that waited longest, and the sum of all waits."""

    what: str
    number: int
    step: int | None
    last: str
    longest: str
    longest_us: float
    total_us: float


@dataclass(frozen=True, slots=True)
class StepSkew:
    """One step: span, compute and wait of each rank, and the rank that caused most waits."""

    number: int
    span_us: tuple[float, ...]
    compute_us: tuple[float, ...]
    waited_us: tuple[float, ...]
    straggler: str | None


@dataclass(frozen=True, slots=True)
class Skew:
    """The waits of all ranks; `ranks` and the columns of `steps` are in the order of the reports."""

    matched: int
    unmatched: tuple[str, ...]
    ranks: tuple[RankWaits, ...]
    worst: tuple[Wait, ...]
    steps: tuple[StepSkew, ...]


def skew(reports: Sequence[RankReport]) -> Skew | None:
    """Return the waits of several ranks; None for a single one."""
    if len(reports) < 2:
        return None
    lengths, unmatched = _matched(reports)
    waited, caused, last = ([0.0] * len(reports) for _ in range(3))
    by_step: dict[int | None, list[list[float]]] = {}
    waits = []
    for (what, number), (step, taken) in lengths.items():
        shortest = min(taken, key=lambda rank: (taken[rank], rank))
        longest = max(taken, key=lambda rank: (taken[rank], -rank))
        total = 0.0
        in_step = by_step.setdefault(step, [[0.0] * len(reports), [0.0] * len(reports)])
        for rank, length_us in taken.items():
            over = length_us - taken[shortest]
            total += over
            waited[rank] += over
            in_step[0][rank] += over
        caused[shortest] += total
        in_step[1][shortest] += total
        last[shortest] += total > 0
        over = taken[longest] - taken[shortest]
        waits.append(Wait(what, number, step, reports[shortest].label, reports[longest].label, over, total))
    waits.sort(key=lambda wait: (-wait.total_us, wait.what, wait.number))
    return Skew(
        matched=len(lengths),
        unmatched=tuple(unmatched),
        ranks=tuple(
            RankWaits(report.label, waited[at], caused[at], int(last[at])) for at, report in enumerate(reports)
        ),
        worst=tuple(wait for wait in waits if wait.total_us > 0)[:WORST],
        steps=_steps(reports, by_step),
    )


Taken = dict[tuple[str, int], tuple[int | None, dict[int, float]]]


def _matched(reports: Sequence[RankReport]) -> tuple[Taken, list[str]]:
    """Return the time of each rank in each collective, and the collectives that cannot be matched."""
    counts: dict[str, dict[int, int]] = {}
    for rank, report in enumerate(reports):
        for what, number in report.collectives.key:
            counts.setdefault(what, {})[rank] = number + 1
    unmatched = []
    for what, by_rank in sorted(counts.items()):
        if len(by_rank) == 1:
            unmatched.append(f"{what}: only on {reports[next(iter(by_rank))].label}")
        elif len(set(by_rank.values())) > 1:
            counted = ", ".join(f"{count} on {reports[rank].label}" for rank, count in sorted(by_rank.items()))
            unmatched.append(f"{what}: {counted}")
    sound = {what for what, by_rank in counts.items() if len(by_rank) > 1 and len(set(by_rank.values())) == 1}
    lengths: Taken = {}
    for rank, report in enumerate(reports):
        own = report.collectives
        for key, length_us, step in zip(own.key, own.length_us, own.step, strict=True):
            if key[0] in sound:
                lengths.setdefault(key, (step, {}))[1][rank] = length_us
    return lengths, unmatched


def _steps(reports: Sequence[RankReport], by_step: dict[int | None, list[list[float]]]) -> tuple[StepSkew, ...]:
    """Return the steps that all ranks have."""
    own = [{step.number: step.time for step in report.steps} for report in reports]
    rows = []
    for number in sorted(set.intersection(*(set(each) for each in own))):
        times = [each[number] for each in own]
        waited, caused = by_step.get(number, [[0.0] * len(own), [0.0] * len(own)])
        most = max(range(len(own)), key=lambda rank: (caused[rank], -rank))
        rows.append(
            StepSkew(
                number, tuple(time.span_us for time in times),
                tuple(time.compute_us for time in times), tuple(waited),
                reports[most].label if caused[most] > 0 else None,
            )
        )  # fmt: skip
    return tuple(rows)
