"""Packing: among the nodes that hold a job, choose the one that leaves the most useful free GPUs for other jobs.

    tight   least free GPU left on the GPU that is shared, then on the node (best fit)
    fgd     least growth of fragmentation (mix.py)
    mix     the same, with a preference for full nodes: roomy nodes stay roomy

It serves jobs that one node holds. Scores are kept for each shape and renewed for nodes that changed, so the cost of a
search is that of the changes since the last job of its shape, and of a few passes over arrays as long as the cluster.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.schedule.placement.entry import Entry, Kind
from cordee.schedule.placement.mix import Ask, Learnt, Mix, Table
from cordee.schedule.placement.view import Feed
from cordee.schedule.policy import Packing

_BENT = 0.05  # of the square of a node's free GPUs; from 0.01 to 0.2 the benchmark gives the same within noise
_SAME = 1e-6
_FEW = 16  # nodes that changed; of more, results are computed together and not kept
_KEPT = 1 << 16
_sums = np.add.reduce  # without the function in Python behind an array's `sum`

_Left = tuple[bytes, float, float]
"""What is left of a node: thousandths of each GPU, CPU, memory. On it alone depend worth and scores under one mix."""


@dataclass(slots=True)
class _Row:
    """The scores of one shape on all nodes."""

    seen: int  # changes up to which the scores are valid
    score: Floats  # infinite where the shape does not fit
    gpu: Ints  # the GPU to use, for a shape that takes a part of one


@dataclass(slots=True)
class _Nodes:
    """The free resources of all nodes, as arrays over nodes."""

    cpu: Floats = field(default_factory=lambda: np.zeros(0))
    memory: Floats = field(default_factory=lambda: np.zeros(0))
    left: Floats = field(default_factory=lambda: np.zeros((0, 1)))  # thousandths of each GPU
    price: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    kind: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # -1: not there
    island: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # GPUs
    changed: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: list[_Left | None] = field(default_factory=list)  # what is left; None: not asked for since the node changed


@dataclass(slots=True)
class _Worth:
    """The present worth of all nodes: GPUs and thousandths that each group of the mix could use (nodes, groups)."""

    usable_gpus: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    usable_milli: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    potential: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(slots=True)
class _Known:
    """Results by what is left of a node, under one mix: nodes come back to what they had left before."""

    worth: dict[_Left, tuple[Floats, Floats, float]] = field(default_factory=dict)
    scores: dict[tuple[Ask, _Left], tuple[float, int]] = field(default_factory=dict)


class Packer:
    """Scores of nodes for shapes, kept up to date with the entries of an index."""

    def __init__(self, feed: Feed, mix: Mix, packing: Packing) -> None:
        self._feed, self._mix, self._packing = feed, mix, packing
        self._seen, self._changes = -1, 0
        self._slot: dict[str, int] = {}
        self._names: list[str] = []
        self._order: Ints = np.zeros(0, np.int64)  # the rank of each node by name
        self._kind: dict[Kind, int] = {}
        self._nodes = _Nodes()
        self._rows: dict[Ask, _Row] = {}
        self._learnt: Learnt | None = None
        self._table: Table | None = None
        self._worth = _Worth()
        self._known = _Known()

    def pick(self, ask: Ask, kinds: Iterable[Kind]) -> tuple[str, int] | None:
        """Return the best node for a shape and, if the shape takes a part of a GPU, the GPU; None if no node has room.

        One island goes before several, then a lower price, then the score, then fewer free GPUs, then names.
        """
        self._follow()
        row, nodes = self._row(ask), self._nodes
        allowed = np.zeros(len(self._kind) + 1, bool)
        allowed[[self._kind[kind] for kind in kinds if kind in self._kind]] = True
        found = (np.isfinite(row.score) & allowed[nodes.kind]).nonzero()[0]
        if not len(found):
            return None
        if ask[2] > 1:
            found = self._least(found, self._spread(found, ask[2]))
        if len(found) > 1:
            found = self._least(found, nodes.price[found])
            found = self._least(found, row.score[found], _SAME)
            found = self._least(found, _sums(nodes.left[found], axis=1))
        slot = int(found[self._order[found].argmin()])
        return self._names[slot], int(row.gpu[slot])

    @staticmethod
    def _least(found: Ints, by: Ints | Floats, same: float = 0.0) -> Ints:
        return found[by <= by.min() + same] if len(found) > 1 else found

    def _spread(self, slots: Ints, gpus: int) -> Ints:
        """Return 0 for each node where one island has that many whole GPUs, else 1."""
        nodes = self._nodes
        split = (nodes.island[slots] > 0) & (nodes.island[slots] < nodes.left.shape[1])
        spread = np.zeros(len(slots), np.int64)
        for at in np.flatnonzero(split):
            whole, size = nodes.left[slots[at]] >= 1000, int(nodes.island[slots[at]])
            spread[at] = all(whole[first : first + size].sum() < gpus for first in range(0, len(whole), size))
        return spread

    # -- following the entries -------------------------------------------------------------------------------

    def _follow(self) -> None:
        changed, self._seen = self._feed.since(self._seen)
        if changed is None:
            changed = sorted(self._feed.entries.keys() | self._slot.keys())
        names = sorted(set(changed))
        new = [name for name in names if name not in self._slot and name in self._feed.entries]
        if new:
            self._add(new)
        slots = [self._slot[name] for name in names if name in self._slot]
        self._changes += bool(slots)
        for slot in slots:
            self._set(slot, self._feed.entries.get(self._names[slot]))
        if self._learnt is not self._mix.learnt or new:
            # A new mix, or nodes that may be larger than those before: all scores are stale.
            self._learnt = self._mix.learnt
            asked = self._packing != "tight" and self._learnt
            self._table = Table(self._learnt, self._nodes.left.shape[1]) if asked else None
            self._rows.clear()
            self._known = _Known()
            slots = list(range(len(self._names)))
        if slots:
            self._renew_worth(slots)

    def _add(self, names: list[str]) -> None:
        old, nodes = len(self._names), self._nodes
        more = len(names)
        for name in names:
            self._slot[name] = len(self._names)
            self._names.append(name)
        width = max([nodes.left.shape[1], *(self._feed.entries[name].node.gpus for name in names)])
        nodes.left = np.pad(nodes.left, ((0, more), (0, width - nodes.left.shape[1])))
        nodes.keys = [None] * len(self._names)
        for column in ("cpu", "memory", "price", "kind", "island", "changed"):
            setattr(nodes, column, np.pad(getattr(nodes, column), (0, more)))
        nodes.kind[old:] = -1
        self._order = np.empty(len(self._names), np.int64)
        self._order[sorted(range(len(self._names)), key=self._names.__getitem__)] = np.arange(len(self._names))

    def _set(self, slot: int, entry: Entry | None) -> None:
        nodes = self._nodes
        nodes.changed[slot], nodes.keys[slot] = self._changes, None
        nodes.left[slot] = 0
        if entry is None:
            nodes.kind[slot] = -1
            return
        nodes.cpu[slot] = np.inf if entry.cpu_milli is None else entry.cpu_milli
        nodes.memory[slot] = np.inf if entry.memory_bytes is None else entry.memory_bytes
        nodes.price[slot], nodes.island[slot] = entry.node.micro_usd_per_gpu_hour, entry.node.island_gpus
        nodes.kind[slot] = self._kind.setdefault(entry.kind, len(self._kind))
        mask, gpu = entry.free, 0
        while mask >> gpu:
            if mask >> gpu & 1:
                nodes.left[slot, gpu] = 1000
            gpu += 1
        for gpu, milli in entry.shared:
            nodes.left[slot, gpu] = milli

    def _left(self, slot: int) -> _Left:
        nodes = self._nodes
        left = nodes.keys[slot]
        if left is None:
            left = nodes.left[slot].tobytes(), float(nodes.cpu[slot]), float(nodes.memory[slot])
            nodes.keys[slot] = left
        return left

    def _renew_worth(self, slots: list[int]) -> None:
        """Compute the worth of nodes that changed, or take it from what is known."""
        count, groups = len(self._names), 0 if self._table is None else len(self._table.milli)
        if self._worth.usable_milli.shape != (count, groups):
            self._worth = _Worth(np.zeros((count, groups)), np.zeros((count, groups)), np.zeros(count))
        if len(slots) > _FEW:
            self._measure(np.array(slots))
            return
        worth, known = self._worth, self._known.worth
        for slot in slots:
            left = self._left(slot)
            found = known.get(left)
            if found is not None:
                worth.usable_gpus[slot], worth.usable_milli[slot], worth.potential[slot] = found
                continue
            self._measure(np.array([slot]))
            if len(known) >= _KEPT:
                known.clear()
            of_slot = worth.usable_gpus[slot].copy(), worth.usable_milli[slot].copy(), float(worth.potential[slot])
            known[left] = of_slot

    def _measure(self, slots: Ints) -> None:
        """Compute the worth of these nodes as they are."""
        left, table, worth = self._nodes.left[slots], self._table, self._worth
        if table is not None:
            worth.usable_gpus[slots], worth.usable_milli[slots] = table.usable(left)
        total = _sums(left, axis=1)
        host = self._nodes.cpu[slots], self._nodes.memory[slots]
        worth.potential[slots] = self._potential(*host, total, worth.usable_gpus[slots], worth.usable_milli[slots])

    def _potential(self, cpu: Floats, memory: Floats, total: Floats, count: Floats, usable: Floats) -> Floats:
        """Return the thousandths of GPUs that the mix cannot use, less a bonus for roomy nodes."""
        value = total
        if self._table is not None:
            fraction = self._table.enough(cpu, memory)
            value = total - _sums(fraction * (count >= self._table.gpus) * usable, axis=1)
        if self._packing == "mix":
            value = value - _BENT * total**2 / (1000 * self._nodes.left.shape[1])
        return value

    # -- scores ----------------------------------------------------------------------------------------------

    def _row(self, ask: Ask) -> _Row:
        row, count = self._rows.get(ask), len(self._names)
        if row is None:
            row = self._rows[ask] = _Row(-1, np.full(count, np.inf), np.full(count, -1))
        slots = (self._nodes.changed > row.seen).nonzero()[0]
        row.seen = self._changes
        if len(slots) > _FEW:
            row.score[slots] = np.inf
            self._score(ask, row, slots)
        else:
            for slot in slots.tolist():
                self._renew_score(ask, row, slot)
        return row

    def _renew_score(self, ask: Ask, row: _Row, slot: int) -> None:
        """Compute the score of a node that changed, or take it from what is known."""
        if self._nodes.kind[slot] < 0:
            row.score[slot] = np.inf
            return
        key, known = (ask, self._left(slot)), self._known.scores
        found = known.get(key)
        if found is not None:
            row.score[slot], row.gpu[slot] = found
            return
        row.score[slot] = np.inf
        self._score(ask, row, np.array([slot]))
        if len(known) >= _KEPT:
            known.clear()
        known[key] = float(row.score[slot]), int(row.gpu[slot])

    def _score(self, ask: Ask, row: _Row, slots: Ints) -> None:
        cpu_milli, memory_bytes, gpus, milli = ask
        nodes, whole = self._nodes, milli >= 1000
        cpu, memory = nodes.cpu[slots] - cpu_milli * max(1, gpus), nodes.memory[slots] - memory_bytes * max(1, gpus)
        room = (cpu >= 0) & (memory >= 0) & (nodes.kind[slots] >= 0)
        if whole and gpus:
            room &= _sums(nodes.left[slots] >= 1000, axis=1) >= gpus
        slots, cpu, memory = slots[room], cpu[room], memory[room]
        total = _sums(nodes.left[slots], axis=1)
        count, usable = self._worth.usable_gpus[slots], self._worth.usable_milli[slots]
        if whole:
            after = self._potential(cpu, memory, total - 1000 * gpus, count - gpus, usable - 1000 * gpus)
            tight = self._packing == "tight"
            row.score[slots] = total if tight else after - self._worth.potential[slots]
            return
        of_gpus = nodes.left[slots]
        # A GPU with as much left as one before it on the same node scores as that one does.
        new = ~np.tril(of_gpus[:, :, None] == of_gpus[:, None, :], -1).any(axis=2) & (of_gpus >= milli)
        for gpu in new.any(axis=0).nonzero()[0].tolist():
            fits = new[:, gpu].nonzero()[0]
            here, left = slots[fits], of_gpus[fits, gpu]
            if self._packing == "tight":
                score = (left - milli) * 1e6 + total[fits]
            else:
                was, now = self._of(left), self._of(left - milli)
                after = self._potential(
                    cpu[fits],
                    memory[fits],
                    total[fits] - milli,
                    count[fits] - (was > 0) + (now > 0),
                    usable[fits] - was + now,
                )
                score = after - self._worth.potential[here]
            better = score < row.score[here] - _SAME
            better |= (score < row.score[here] + _SAME) & (left < nodes.left[here, row.gpu[here]])
            row.score[here[better]], row.gpu[here[better]] = score[better], gpu

    def _of(self, left: Floats) -> Floats:
        """Return the thousandths that each group could use of a GPU with `left` thousandths free."""
        if self._table is None:
            return np.zeros((len(left), 0))
        return np.where(left[:, None] >= self._table.milli, left[:, None], 0.0)
