"""Local search: small moves on the fullest GPU, all layers at once.

Two moves: two slots of two GPUs swap their experts, or one slot gives up a replica of one expert for another expert.
A move counts if each GPU it makes fuller stays below the fullest one, so the sorted loads fall in every step and the
search ends. Experts stay in their domain (their node, or the whole fleet). Every step is kept, so a caller can stop
each layer where more moves no longer pay.
"""

from dataclasses import dataclass

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.plan.experts.shape import counted, gpu_loads

GIVERS = 6
"""Candidates: replicas to give up, and experts to place instead."""
OWN = 3
"""Candidates: the heaviest slots of the fullest GPU, to replicate or replace."""

EMPTIEST = 12
"""Candidates: the emptiest GPUs for a swap where moves are limited."""

BETTER = 1 - 1e-9
"""A move must lessen the load by more than rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchSteps:
    """The load of the fullest GPU and the slots that differ from the start, after each step; step 0 is the start."""

    max_load: Floats
    moved: Ints
    changes: tuple[tuple[Ints, Ints, Ints, Ints], ...]

    def placed(self, start: Ints, stop: Ints) -> Ints:
        """Return the placement after `stop` steps of each layer."""
        slots = start.copy()
        for at, (layer, gpu, slot, expert) in enumerate(self.changes):
            kept = stop[layer] > at
            slots[layer[kept], gpu[kept], slot[kept]] = expert[kept]
        return slots


class PlacementSearch:
    """The state of the search: slots, replica counts and loads."""

    def __init__(self, loads: Floats, start: Ints, domains: int) -> None:
        layers, gpus, slots = start.shape
        experts = loads.shape[1]
        self.loads, self.start, self.slots, self.domains = loads, start, start.copy(), domains
        self.width = gpus // domains
        self.counts = counted(start, experts)
        self.per_replica = loads / self.counts
        self.load = gpu_loads(loads, start)
        # Copies of each expert on each GPU, and the domain's experts.
        where = start.reshape(layers, -1)
        gpu = np.repeat(np.arange(gpus), slots)[None, :]
        self.copies = np.zeros((layers, experts, gpus), dtype=np.float32)
        np.add.at(self.copies, (np.arange(layers)[:, None], where, gpu), 1)
        self.moved = np.zeros(layers, dtype=np.int64)

    def run(self, least: Floats, steps: int, moved_max: Ints | None = None) -> SearchSteps:
        """Improve every layer until no move helps, it is within 1e-4 of `least`, or its moves are used up.

        Args:
            least: what the fullest GPU cannot go below.
            steps: at most so many.
            moved_max: slots of each layer that may differ from the start; None: all. Where moves are counted, trades
                are looked at in every third step, not only when no swap helps, and swaps with the emptiest GPUs only.
        """
        alive = np.arange(len(self.slots))
        maxima, moves, changes = [self.load.max(axis=1)], [self.moved.copy()], []
        for step in range(steps):
            open_ = self.load[alive].max(axis=1) > least[alive] * (1 + 1e-4)
            if moved_max is not None:
                open_ &= self.moved[alive] + 2 <= moved_max[alive]
            alive = alive[open_]
            if not len(alive):
                break
            change, alive = self._step(
                alive, trades=moved_max is not None and step % 3 == 0, near=moved_max is not None
            )
            changes.append(change)
            maxima.append(self.load.max(axis=1))
            moves.append(self.moved.copy())
        return SearchSteps(np.array(maxima), np.array(moves), tuple(changes))

    def _step(self, layers: Ints, *, trades: bool, near: bool) -> tuple[tuple[Ints, Ints, Ints, Ints], Ints]:
        """Make the best move of each layer; return the changed slots and the layers that had a move."""
        hot = self.load[layers].argmax(axis=1)
        top = self.load[layers, hot]
        swap, gain = self._best_swap(layers, hot, top, near)
        # A replica given up changes one slot, a swap two.
        searched = np.arange(len(layers)) if trades else np.flatnonzero(gain <= 0)
        trade, trade_gain = np.zeros((len(layers), 3), dtype=np.int64), np.full(len(layers), -np.inf)
        if len(searched):
            trade[searched], trade_gain[searched] = self._best_trade(layers[searched], hot[searched], top[searched])
        takes = (trade_gain > 0) & (trade_gain > gain / 2)
        swaps = ~takes & (gain > 0)
        self._trade(layers[takes], trade[takes])
        changed = [(layers[takes], *trade[takes].T)]
        changed += self._swap(layers[swaps], swap[swaps])
        gathered = tuple(np.concatenate(parts) for parts in zip(*changed, strict=True))
        return (gathered[0], gathered[1], gathered[2], gathered[3]), layers[takes | swaps]

    def _domain(self, layers: Ints, hot: Ints) -> tuple[Ints, Ints]:
        """Return the GPUs in the domain of the fullest one, and the experts in their slots."""
        first = hot // self.width * self.width
        gpus = first[:, None] + np.arange(self.width)
        return gpus, self.slots[layers[:, None], gpus].reshape(len(layers), -1)

    def _best_swap(self, layers: Ints, hot: Ints, top: Floats, near: bool) -> tuple[Ints, Floats]:
        """Return (own slot, GPU, its slot, fullest GPU) of each layer's best swap, and how far the maximum falls."""
        each = self.slots.shape[2]
        gpus = (hot // self.width * self.width)[:, None] + np.arange(self.width)
        at = layers[:, None]
        if near and self.width > EMPTIEST:
            gpus = np.take_along_axis(gpus, _smallest(self.load[at, gpus], EMPTIEST), axis=1)
        own = self.per_replica[at, self.slots[layers, hot]]
        others = self.per_replica[at, self.slots[at, gpus].reshape(len(layers), -1)]
        less = own[:, :, None] - others[:, None, :]
        fuller = less + np.repeat(self.load[at, gpus], each, axis=1)[:, None, :]
        np.maximum(fuller, np.subtract(top[:, None, None], less, out=less), out=fuller)
        fuller = fuller.reshape(len(layers), -1)
        best = fuller.argmin(axis=1)
        rows = np.arange(len(layers))
        value = fuller[rows, best]
        slot, other = np.divmod(best, others.shape[1])
        gpu, other_slot = np.divmod(other, each)
        gain = np.where(value < top * BETTER, top - value, -np.inf)
        return np.stack([slot, gpus[rows, gpu], other_slot, hot], axis=1), gain

    def _best_trade(self, layers: Ints, hot: Ints, top: Floats) -> tuple[Ints, Floats]:
        """Return (GPU, slot, new expert) of each layer's best trade, and how far the maximum falls."""
        rows = np.arange(len(layers))[:, None]
        gpus, held = self._domain(layers, hot)
        each = self.slots.shape[2]
        at = layers[:, None]
        heavy = _smallest(-self.per_replica[at, self.slots[layers, hot]], OWN)
        own = self.slots[at, hot[:, None], heavy]
        giver, taker = self._cheapest_to_lose(layers, held), self._cheapest_to_gain(layers, gpus)
        n_give, n_take = giver.shape[1], taker.shape[1]
        # Another replica of one of its experts elsewhere; or another expert in one of its slots.
        own_flat = (hot % self.width)[:, None] * each + heavy
        place = np.concatenate([np.tile(giver, heavy.shape[1]), np.repeat(own_flat, n_take, axis=1)], axis=1)
        comes = np.concatenate([np.repeat(own, n_give, axis=1), np.tile(taker, heavy.shape[1])], axis=1)
        goes = held[rows, place]
        counts_go, counts_come = self.counts[at, goes], self.counts[at, comes]
        load_go, load_come = self.loads[at, goes], self.loads[at, comes]
        fine = (counts_go > 1) & (goes != comes)
        after_go = load_go / np.maximum(counts_go - 1, 1)
        after_come = load_come / (counts_come + 1)
        first = gpus[:, :1]
        # Both experts are in this domain only, so other GPUs are not touched.
        copies_go, copies_come = self.copies[at, goes], self.copies[at, comes]
        delta = copies_go * (after_go - self.per_replica[at, goes])[:, :, None]
        delta += copies_come * (after_come - self.per_replica[at, comes])[:, :, None]
        delta[rows, np.arange(place.shape[1]), first + place // each] += after_come - after_go
        delta += self.load[layers][:, None, :]
        worst = delta.max(axis=2, where=(copies_go > 0) | (copies_come > 0), initial=-np.inf)
        worst = np.where(fine, worst, np.inf)
        best = worst.argmin(axis=1)
        value = worst[rows[:, 0], best]
        chosen = place[rows[:, 0], best]
        gain = np.where(value < top * BETTER, top - value, -np.inf)
        return np.stack([first[:, 0] + chosen // each, chosen % each, comes[rows[:, 0], best]], axis=1), gain

    def _cheapest_to_lose(self, layers: Ints, held: Ints) -> Ints:
        """Return the slots of the domain whose replicas the others can take over with the least added load."""
        at = layers[:, None]
        counts = self.counts[at, held]
        added = np.where(counts > 1, self.per_replica[at, held] / np.maximum(counts - 1, 1), np.inf)
        return _smallest(added, GIVERS)

    def _cheapest_to_gain(self, layers: Ints, gpus: Ints) -> Ints:
        """Return the experts of the domain whose next replica would be lightest."""
        replica_load = self.loads[layers] / (self.counts[layers] + 1)
        if self.domains > 1:
            here = self.copies[layers[:, None], :, gpus].sum(axis=1) > 0
            replica_load = np.where(here, replica_load, np.inf)
        return _smallest(replica_load, min(GIVERS, len(replica_load[0]) // self.domains))

    def _swap(self, layers: Ints, swap: Ints) -> list[tuple[Ints, Ints, Ints, Ints]]:
        slot, gpu, other_slot, hot = swap.T
        own, others = self.slots[layers, hot, slot], self.slots[layers, gpu, other_slot]
        self._put(layers, hot, slot, others)
        self._put(layers, gpu, other_slot, own)
        less = self.per_replica[layers, own] - self.per_replica[layers, others]
        self.load[layers, hot] -= less
        self.load[layers, gpu] += less
        return [(layers, hot, slot, others), (layers, gpu, other_slot, own)]

    def _trade(self, layers: Ints, trade: Ints) -> None:
        gpu, slot, comes = trade.T
        goes = self.slots[layers, gpu, slot]
        for expert, by in ((goes, -1), (comes, 1)):
            before = self.per_replica[layers, expert]
            self.counts[layers, expert] += by
            self.per_replica[layers, expert] = self.loads[layers, expert] / self.counts[layers, expert]
            self.load[layers] += self.copies[layers, expert] * (self.per_replica[layers, expert] - before)[:, None]
        self._put(layers, gpu, slot, comes)
        self.load[layers, gpu] += self.per_replica[layers, comes] - self.per_replica[layers, goes]

    def _put(self, layers: Ints, gpu: Ints, slot: Ints, expert: Ints) -> None:
        """Write one slot of each layer; the caller updates the loads."""
        before, home = self.slots[layers, gpu, slot], self.start[layers, gpu, slot]
        self.copies[layers, before, gpu] -= 1
        self.copies[layers, expert, gpu] += 1
        self.slots[layers, gpu, slot] = expert
        self.moved[layers] += (expert != home).astype(np.int64) - (before != home)


def _smallest(values: Floats, number: int) -> Ints:
    """Return the columns of the smallest values of each row, in order."""
    number = min(number, values.shape[1])
    if number == values.shape[1]:
        return np.argsort(values, axis=1, kind="stable")
    found = np.argpartition(values, number - 1, axis=1)[:, :number]
    return np.sort(found, axis=1)
