"""Defragmentation of GPUs that are cut: the fewest instances to move so that one more of a profile has a place.

Each place of the profile names the instances in its way. They move to places that are free, or by moving others, so
the search tries zero moves, then one, and so on: the first that succeeds has the fewest. GPUs with the same instances
are interchangeable, so one of each kind is tried. Nothing here knows CPU, memory or jobs: `place` checks the outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cordee.schedule.placement.entry import Taken
from cordee.schedule.placement.mig import Geometry, Spot, best, spots, with_one

_MOVES_MAX = 3
_TRIES_MAX = 20_000
"""The most places looked at; beyond them the answer is that none was found."""

Gpu = tuple[str, int]
"""Node and index."""


class Cut(NamedTuple):
    """A GPU with its instances; those that begin at `pinned` slices stay where they are."""

    gpu: Gpu
    geometry: Geometry
    taken: Taken
    pinned: frozenset[int] = frozenset()


class Moved(NamedTuple):
    """An instance that moves."""

    gpu: Gpu
    start: int
    profile: str
    to: Gpu
    to_start: int


@dataclass(frozen=True, slots=True)
class Moves:
    """The place that becomes free, and the instances that move for it."""

    gpu: Gpu
    spot: Spot
    moved: tuple[Moved, ...]


class _Item(NamedTuple):
    """An instance without a place: of a profile, and where it comes from (None: the one that is wanted)."""

    size: int
    profile: str
    from_gpu: Gpu | None
    from_start: int


_Placed = tuple[_Item, Gpu, Spot]


def fewest_moves(cuts: Sequence[Cut], profile: str, moves_max: int = _MOVES_MAX) -> Moves | None:
    """Return the fewest moves after which an instance of a profile has a place; None if it has none by so many.

    Args:
        cuts: the GPUs, in the order in which equal ones are taken.
        profile: of the instance that is wanted.
        moves_max: the most moves.
    """
    wanted = _Item(0, profile, None, -1)
    tries = [_TRIES_MAX]
    for budget in range(moves_max + 1):
        found = _search({each.gpu: each for each in cuts}, (wanted,), budget, tries)
        if found is not None:
            (_, gpu, spot), *others = found
            moved = tuple(
                Moved(item.from_gpu, item.from_start, item.profile, to, there.start)
                for item, to, there in others
                if item.from_gpu is not None
            )
            return Moves(gpu, spot, moved)
    return None


def _search(cuts: dict[Gpu, Cut], items: tuple[_Item, ...], budget: int, tries: list[int]) -> list[_Placed] | None:
    """Place all items with at most `budget` further moves; the first item is placed first."""
    if not items:
        return []
    item, *rest = items
    for cut, spot, away in _ways(list(cuts.values()), item, budget):
        tries[0] -= 1
        if tries[0] < 0:
            return None
        left = tuple(each for each in cut.taken if each not in away)
        taken = with_one(left, spot, item.profile)
        after = {**cuts, cut.gpu: cut._replace(taken=taken, pinned=cut.pinned | {spot.start})}
        lifted = [_Item(size, name, cut.gpu, start) for start, size, name in away]
        # The largest first: it has the fewest places.
        others = tuple(sorted((*rest, *lifted), key=lambda each: (-each.size, each.profile)))
        found = _search(after, others, budget - len(away), tries)
        if found is not None:
            return [(item, cut.gpu, spot), *found]
    return None


def _ways(cuts: Sequence[Cut], item: _Item, budget: int) -> list[tuple[Cut, Spot, Taken]]:
    """Return the places of an item with the instances in its way, the fewest of them first; equal GPUs once."""
    seen: set[tuple[Geometry, Taken, frozenset[int]]] = set()
    found: list[tuple[int, bool, int, int, Cut, Spot, Taken]] = []
    for cut in cuts:
        board = (cut.geometry, cut.taken, cut.pinned)
        if board in seen:
            continue
        seen.add(board)
        free = best(cut.geometry, cut.taken, item.profile)
        there = spots(cut.geometry, (), item.profile)
        for spot in there:
            end = spot.start + spot.size
            away = tuple(each for each in cut.taken if each[0] < end and spot.start < each[0] + each[1])
            if len(away) > budget or any(each[0] in cut.pinned for each in away):
                continue
            left = tuple(each for each in cut.taken if each not in away)
            if spot in spots(cut.geometry, left, item.profile):
                cost = free[0] if free is not None and free[1] == spot else 1 << 20
                found.append((len(away), not cut.taken, cost, len(found), cut, spot, away))
    found.sort(key=lambda each: each[:4])
    return [(cut, spot, away) for *_, cut, spot, away in found]
