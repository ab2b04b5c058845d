"""Search for a gang's place in a view: one node, else the lowest domain that holds it, in the fewest parts.

The same step serves at every level of the tree: take the largest parts whole until one part holds the remaining units,
then the tightest such part. No other choice needs fewer parts, and the part that is broken up is the smallest possible.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np

from cordee.hardware.arrays import Floats, Ints, Mask
from cordee.schedule.placement.entry import Entry, gpus_of, mask_of
from cordee.schedule.placement.need import HIGHEST, Arrangement, Need, Pick
from cordee.schedule.placement.view import Class, View, holds


def missing(view: View, need: Need) -> int:
    """Return the number of units (the rest counts as one) without a place; 0 if the gang fits."""
    if need.within is not None:
        return _missing_within(view, need)
    units, rests = 0, False
    for cls, nodes in view.total.items():
        each, beside = holds(cls, need.unit, need.rest, need.in_island)
        units += each * nodes
        rests = rests or beside
        if units > need.units:
            return 0
    return lacking(need, units, rests)


def lacking(need: Need, units: int, rests: bool) -> int:
    """Return the number of units without a place, given the room for units and whether a rest fits beside them."""
    return max(0, need.units - units) + (need.rest > 0 and units <= need.units and not rests)


def search(view: View, need: Need) -> Arrangement | None:
    """Return the best arrangement; None if there is none."""
    if need not in view.found:
        view.found[need] = _search(view, need)
    return view.found[need]


def _search(view: View, need: Need) -> Arrangement | None:
    found = _in_one_node(view, need)
    if found is not None or need.within == "node" or need.units + (need.rest > 0) == 1 or missing(view, need):
        return found
    units, rests = _by_row(view, need)
    enough = _enough(units, rests, need)
    for height, rows in view.tree.levels().items():
        if height > HIGHEST[need.within]:
            break
        fitting = rows[enough[rows]]
        if len(fitting):
            row = _best_domain(view, fitting, need)
            filling = _Filling(view, need)
            filling.domain(row, need.units, need.rest)
            return Arrangement(height + 3, tuple(filling.picks), int(view.free[row]) - need.gpus)
    return None


def _missing_within(view: View, need: Need) -> int:
    least = min((_lacks_in_node(cls, need) for cls in view.total), default=need.units + (need.rest > 0))
    if not least or need.within == "node":
        return least
    units, rests = _by_row(view, need)
    short = np.maximum(0, need.units - units)
    if need.rest:
        short += (units <= need.units) & (rests == 0)
    for height, rows in view.tree.levels().items():
        if height <= HIGHEST[need.within] and len(rows):
            least = min(least, int(short[rows].min()))
    return least


def _lacks_in_node(cls: Class, need: Need) -> int:
    units, beside = holds(cls, need.unit, need.rest, need.in_island)
    lacks = lacking(need, units, beside)
    if lacks or need.within != "island" or _in_one_island(cls, need):
        return lacks
    return 1


def _in_one_island(cls: Class, need: Need) -> bool:
    return cls[0] >= need.gpus and cls[2][0] >= need.gpus


def _by_row(view: View, need: Need) -> tuple[Floats, Floats]:
    """Return for each row the units that its domain holds, and its nodes with room for a rest beside them."""
    units, rests = view.weights(need.unit, need.rest, need.in_island)
    rows = len(view.tree)
    return (view.counts @ units)[:rows], (view.counts @ rests)[:rows] if need.rest else np.zeros(rows)


def _enough(units: Floats, rests: Floats, need: Need) -> Mask:
    enough = units >= need.units
    return (units > need.units) | (enough & (rests > 0)) if need.rest else enough


# -- one node ------------------------------------------------------------------------------------------------


def _in_one_node(view: View, need: Need) -> Arrangement | None:
    """Choose a node: one island before several, then the fewest GPUs left over, then the fullest domain, then names."""
    best = min((found for cls in view.total if (found := _on_node(cls, need)) is not None), default=None)
    if best is None:
        return None
    spread, left_over, cls = best
    return Arrangement(int(spread), ((view.first(cls), need.units, need.rest),), left_over)


@lru_cache(maxsize=1 << 16)
def _on_node(cls: Class, need: Need) -> tuple[bool, int, Class] | None:
    """Rate a gang on a node of a class: (several islands or not, GPUs left over); None if it does not fit."""
    return None if _lacks_in_node(cls, need) else (not _in_one_island(cls, need), sum(cls[2]) - need.gpus, cls)


# -- a domain ------------------------------------------------------------------------------------------------


def _best_domain(view: View, rows: Ints, need: Need) -> int:
    """Return the domain in which the gang needs the fewest nodes, then leaves the fewest GPUs over."""
    if len(rows) == 1:
        return int(rows[0])
    weights, _ = view.weights(need.unit, need.rest, need.in_island)
    columns = np.flatnonzero(weights)
    columns = columns[np.argsort(-weights[columns], kind="stable")]
    nodes = view.counts[rows[:, None], columns[None, :]]
    before, units = np.cumsum(nodes, axis=1), np.cumsum(nodes * weights[columns], axis=1)
    at = np.argmax(units >= need.units, axis=1)
    here = np.arange(len(rows))
    held = np.where(at > 0, units[here, at - 1], 0)
    fewest = np.where(at > 0, before[here, at - 1], 0) + np.ceil((need.units - held) / weights[columns][at])
    free = view.free[rows]
    return int(rows[np.argmin(fewest * (1 + free.max()) + free)])


Tag = TypeVar("Tag")

Run = tuple[int, bool, tuple[float, int | Class], Tag, int]
"""Equal parts: units that each holds, whether a rest goes beside them, a sort key, a tag, the number of parts."""


@dataclass(slots=True)
class _Filling:
    """The picks of nodes for a gang, from a domain that holds it."""

    view: View
    need: Need
    picks: list[Pick] = field(default_factory=list)

    def domain(self, row: int, units: int, rest: int) -> None:
        """Pick nodes of a domain for units and a rest."""
        view, rows = self.view, self.view.tree.inside(row)
        if not len(rows):
            self.nodes(row, units, rest)
            return
        held, beside = _by_row(view, self.need)
        runs: list[Run[int | None]] = [
            (int(held[each]), bool(beside[each]), (view.free[each], number), int(each), 1)
            for number, each in enumerate(rows)
            if held[each] or beside[each]
        ]
        own = (int(held[row] - held[rows].sum()), bool(beside[row] > beside[rows].sum()))
        if any(own):
            runs.append((*own, (view.free[row] - view.free[rows].sum(), len(rows)), None, 1))
        for inner, taken, with_rest, _ in _parts(runs, units, rest):
            if inner is None:
                self.nodes(row, taken, with_rest)
            else:
                self.domain(inner, taken, with_rest)

    def nodes(self, row: int, units: int, rest: int) -> None:
        """Pick nodes directly in a domain for units and a rest."""
        view, need = self.view, self.need
        runs: list[Run[list[str]]] = []
        for cls in view.total:
            names = view.names.get((row, view.column(cls)))
            held, beside = holds(cls, need.unit, need.rest, need.in_island)
            if names and (held or beside):
                runs.append((held, beside, (sum(cls[2]), cls), names, len(names)))
        self.picks += [(names[at], taken, with_rest) for names, taken, with_rest, at in _parts(runs, units, rest)]


def _parts(runs: list[Run[Tag]], units: int, rest: int) -> Iterator[tuple[Tag, int, int, int]]:
    """Yield the parts that get something: (tag, units, rest, number within its run)."""
    runs = sorted(runs, key=lambda run: (-run[0], not run[1], run[2]))
    at = used = 0

    def too_small(run: Run[Tag]) -> bool:
        return run[0] < units or (run[0] == units and rest > 0 and not run[1])

    while units or rest:
        if used == runs[at][4]:
            at, used = at + 1, 0
        elif too_small(runs[at]):
            held, beside, _, tag, _ = runs[at]
            yield tag, held, rest if beside else 0, used
            units, rest, used = units - held, 0 if beside else rest, used + 1
        else:
            # Runs descend: those that hold the remainder come first, and the last of them are the tightest.
            tightest = bisect_left(runs, True, lo=at, key=too_small) - 1
            first = bisect_left(
                runs, (-runs[tightest][0], not runs[tightest][1]), lo=at, key=lambda run: (-run[0], not run[1])
            )
            yield runs[first][3], units, rest, used if first == at else 0
            return


# -- GPUs of a node ------------------------------------------------------------------------------------------


def choose(entry: Entry, need: Need, units: int, rest: int) -> tuple[int, ...]:
    """Choose free GPUs of a node, unit by unit and the rest last, in the order of the gang's ranks.

    >>> from cordee.events import Node
    >>> from cordee.schedule.placement.entry import Used, entry_of
    >>> node = Node(name="n", epoch=1, gpu_name="H100", gpus=8, island_gpus=4)
    >>> choose(entry_of(node, Used(whole=0b1000)), Need(4, 1, 1, True, None), 1, 1)
    (4, 5, 6, 7, 0)
    """
    island, gpus = entry.node.island_gpus, entry.node.gpus
    size = island if 0 < island < gpus else gpus
    if size == gpus and not (need.in_island and need.unit <= size):
        return gpus_of(entry.free)[: units * need.unit + rest]
    islands = [entry.free & ((1 << size) - 1) << first for first in range(0, gpus, size)]
    parts: list[tuple[int, ...]] = []
    if need.in_island and need.unit <= size:
        parts += sorted(_take(islands, need.unit) for _ in range(units))
    elif units:
        parts.append(_take(islands, units * need.unit + rest))
        return parts[0]
    if rest:
        parts.append(_take(islands, rest))
    return tuple(gpu for part in parts for gpu in part)


def _take(islands: list[int], count: int) -> tuple[int, ...]:
    """Take GPUs out of the island with the fewest free ones that suffice, else out of those with the most."""
    by_size = sorted(range(len(islands)), key=lambda each: (islands[each].bit_count(), each))
    enough = next((each for each in by_size if islands[each].bit_count() >= count), None)
    chosen: list[int] = []
    for each in reversed(by_size) if enough is None else [enough]:
        taken = gpus_of(islands[each])[: count - len(chosen)]
        chosen += taken
        islands[each] &= ~mask_of(taken)
    return tuple(sorted(chosen))
