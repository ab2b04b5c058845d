"""The search for victims: the cheapest attempts whose GPUs, with those that are free, hold a whole gang in its shape.

One node is searched exactly. Several are searched exactly if there are few candidates, else greedily by the cost of a
unit, and superfluous victims are left out afterwards. No answer depends on the numbers of rows: ties go to the fewest
jobs, lower tiers, worse standing, the newest placement, and names.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from cordee.hardware.arrays import Floats, Ints, Mask
from cordee.ids import JobId
from cordee.schedule.placement.need import DOMAIN_HEIGHTS, Need
from cordee.schedule.placement.view import Pool
from cordee.schedule.preemption.candidates import Candidates, Field, Weight
from cordee.schedule.preemption.counts import Counts
from cordee.schedule.preemption.knapsack import Victim, choose
from cordee.schedule.preemption.loss import Cost
from cordee.schedule.state.failed_searches import Scope
from cordee.schedule.state.state import State

_EXACT = 10
"""The largest number of attempts searched in all combinations when a gang needs several nodes."""

_ROUNDED = 64
"""The difference below which two costs may be equal after each victim's cost is rounded."""

_NODES_MAX = 64
"""The number of nodes searched for a set of several victims, in the order of their lower bounds."""


class VictimSearch:
    """The search at one moment; the state may change between two questions."""

    def __init__(self, state: State, now_us: int) -> None:
        self._state = state
        self.candidates = Candidates(state, now_us)

    def find(
        self, need: Need, pool: Pool, scope: Scope, *, closed: Iterable[str] = (), shielded: Iterable[str] = ()
    ) -> tuple[JobId, ...] | None:
        """Return the victims; None if all of them together are not enough, or too many would have to be moved.

        Args:
            need: the shape that has to become free.
            pool: the kinds of nodes to search.
            scope: the attempts that may be victims.
            closed: nodes to leave out.
            shielded: queues whose attempts stay.
        """
        if scope.moves is not None and not self._could_move(need, pool, scope.moves):
            return None
        field = self.candidates.field(scope, pool, frozenset(shielded))
        nodes, numbers = field.nodes, self._state.nodes.columns.numbers
        shut = [numbers[name] for name in closed]
        if shut:
            nodes = nodes.copy()
            nodes[shut] = False
        if need.within in ("island", "node") or need.units + (need.rest > 0) == 1:
            need = Need(need.gpus, 1, 0, need.in_island, None) if need.within else need
            groups: Iterable[Mask] = [nodes]
        else:
            groups = self._domains(need, nodes, field)
        found = (self._in_group(group, need, field) for group in groups)
        best = min(
            ((self.candidates.weigh(rows, field), rows) for rows in found if rows is not None),
            key=lambda each: each[0],
            default=None,
        )
        return None if best is None else tuple(sorted(self._state.running.jobs[row] for row in best[1]))

    def _domains(self, need: Need, nodes: Mask, field: Field) -> Iterator[Mask]:
        """Yield masks of nodes over which the gang may spread, each large enough."""
        if need.within is None:
            yield nodes
            return
        names, records = self._state.nodes.columns.names, self._state.nodes.records
        up = DOMAIN_HEIGHTS[need.within]
        found: dict[tuple[str, ...], list[int]] = {}
        for number in np.flatnonzero(nodes & (field.available >= min(need.unit, need.rest or need.unit))):
            domain = records[names[number]].node.domain
            found.setdefault(domain[: len(domain) - up], []).append(int(number))
        for _, numbers in sorted(found.items()):
            if int((field.available[numbers] // need.unit).sum()) >= need.units:
                mask = np.zeros_like(nodes)
                mask[numbers] = True
                yield mask

    def _in_group(self, nodes: Mask, need: Need, field: Field) -> list[int] | None:
        if self._state.policy.victims in ("newest", "lowest"):
            return self._in_order(nodes, need, field)
        if need.units + (need.rest > 0) == 1:
            return self._on_one_node(nodes, need.gpus, field)
        return self._on_several(nodes, need, field)

    def _could_move(self, need: Need, pool: Pool, most: int) -> bool:
        """Return whether the missing units need at most the GPUs that may be moved; else every set is too large."""
        columns = self._state.nodes.columns
        unit, units = (need.gpus, 1) if need.within in ("island", "node") else (need.unit, need.units)
        unit, units = (unit, units) if units else (need.rest, 1)
        free = columns.free[columns.of_pool(pool) & (columns.usable >= unit)]
        short = units - int((free // unit).sum())
        lacks = np.sort(unit - free % unit)[: max(0, short)]
        return int(lacks.sum()) + unit * max(0, short - len(lacks)) <= most

    # -- one node --------------------------------------------------------------------------------------------

    def _on_one_node(self, nodes: Mask, gpus: int, field: Field) -> list[int] | None:
        """Visit nodes in the order of their lower bounds, until no other can be cheaper."""
        there = nodes & (field.available >= gpus)
        if not there.any():
            return None
        lacks = np.maximum(1, gpus - field.free)  # If enough GPUs are free, a victim must leave for CPU or memory.
        at = ((field.gain > 0) & there[field.node]).nonzero()[0]
        row, node, gain = field.row[at], field.node[at], field.gain[at]
        costs = field.cost
        cost = costs[row]
        alone = (gain >= lacks[node]).nonzero()[0]
        best = None if not len(alone) else [int(row[alone[self._first(row[alone], cost[alone])]])]
        bound = float(cost[alone].min()) if len(alone) else np.inf
        if best is not None and float((cost / gain * lacks[node]).min()) >= bound:
            return best  # Each node costs at least as much, by the price of a GPU of its cheapest victim.
        lacks = np.where(there, lacks, 0)
        least = _at_least(node, cost, gain, lacks)
        # On nodes where every victim is needed, the cost is that of all.
        smallest = np.full(len(lacks), 1 << 40)
        np.minimum.at(smallest, node, gain)
        whole = np.bincount(node, weights=cost, minlength=len(lacks))
        takes_all = field.available - field.free - smallest < lacks
        promising = (there & (field.available > field.free) & (least < bound * (1 - 1e-9))).nonzero()[0]
        ranks = self._state.nodes.columns.ranks()
        order = promising[np.lexsort((ranks[promising], least[promising]))][:_NODES_MAX]
        weigh = self.candidates.weigh
        best_weight = None if best is None else weigh(best, field)
        for number in order:
            if best_weight is not None and least[number] >= bound:
                break
            if takes_all[number] and whole[number] > bound + _ROUNDED:
                continue
            on_it = (node == number).nonzero()[0]
            chosen: list[int] = row[on_it].tolist()
            if not takes_all[number]:
                chosen = self._cheapest(field, row[on_it], gain[on_it], int(lacks[number]))
            weight = weigh(chosen, field)
            if best_weight is None or weight < best_weight:
                best, best_weight, bound = chosen, weight, float(costs[chosen].sum())
        return best

    def _first(self, row: Ints, cost: Floats) -> int:
        """Return the first of equally cheap rows: lowest tier, worst standing, newest placement, name."""
        rows = self._state.running.rows.ints
        left = (cost <= cost.min() * (1 + 1e-12)).nonzero()[0]
        for column in (rows["tier"], self.candidates.standing(), rows["placed_us"]):
            if len(left) > 1:
                value = column[row[left]]
                left = left[value == value.max()]
        jobs = self._state.running.jobs
        return int(min(left, key=lambda each: jobs[int(row[each])]))

    def _cheapest(self, field: Field, row: Ints, gain: Ints, lacks: int) -> list[int]:
        """Return the cheapest rows of one node that free `lacks` of its GPUs."""
        running = self._state.running
        tier, cost = running.rows.ints["tier"], field.cost
        victims = [
            Victim(running.jobs[each], gpus, Cost(round(float(cost[each])), 0), int(tier[each]))
            for each, gpus in zip(row.tolist(), gain.tolist(), strict=True)
        ]
        chosen = choose(victims, lacks)
        assert chosen is not None, "the caller has counted"
        return [running.row_of[victim.job_id] for victim in chosen]

    # -- several nodes ---------------------------------------------------------------------------------------

    def _on_several(self, nodes: Mask, need: Need, field: Field) -> list[int] | None:
        smallest = min(need.unit, need.rest or need.unit)
        at = np.flatnonzero(nodes & (field.available >= smallest))
        counts = Counts(need, field, at)
        if not counts.are_enough(field.available):
            return None
        leases = field.on(at)
        rows = np.unique(field.row[leases])
        if len(rows) <= _EXACT:
            return self._of_few(rows.tolist(), counts, field)
        return self._without_needless(self._greedily(at, counts, field, leases), counts, field)

    def _of_few(self, rows: list[int], counts: Counts, field: Field) -> list[int] | None:
        """Try all combinations, the cheapest first, and cut those that cost more than the best."""
        cost, jobs = field.cost, self._state.running.jobs
        rows = sorted(rows, key=lambda row: (cost[row], jobs[row]))
        best: tuple[Weight, list[int]] | None = None
        bound = 0.0
        ahead: list[tuple[int, list[int], float]] = [(0, [], 0.0)]  # A stack.
        while ahead:
            start, taken, total = ahead.pop()
            if best is not None and total > bound * (1 + 1e-12):
                continue
            if taken and counts.are_enough(counts.without(taken)):
                weight = self.candidates.weigh(taken, field)
                if best is None or weight < best[0]:
                    best, bound = (weight, taken), total
                continue
            for number in range(len(rows) - 1, start - 1, -1):
                ahead.append((number + 1, [*taken, rows[number]], total + float(cost[rows[number]])))
        return None if best is None else best[1]

    def _greedily(self, at: Ints, counts: Counts, field: Field, leases: Ints) -> list[int]:
        """Clear node by node in the order of the cost of a further unit, with a gang's cost spread over its GPUs."""
        need, ranks = counts.need, self._state.nodes.columns.ranks()
        price = field.cost / np.maximum(1, self._state.running.rows.ints["gpus"])
        row, node, gain = field.row[leases], field.node[leases], field.gain[leases]
        per_node = np.bincount(node, weights=gain * price[row], minlength=len(field.free))
        freed = np.maximum(1, field.available - field.free)
        chosen: list[int] = []
        for size in (need.unit, need.rest):
            if not size:
                continue
            estimate = per_node / freed * (size - field.free % size)
            useful = at[field.available[at] // size > field.free[at] // size]
            for number in useful[np.lexsort((ranks[useful], estimate[useful]))].tolist():
                free = counts.without(chosen)
                if counts.are_enough(free) or (size == need.unit and counts.units(free) >= need.units):
                    break
                while free[number] // size < field.available[number] // size and not counts.are_enough(free):
                    on_it = np.flatnonzero(node == number)
                    on_it = on_it[~np.isin(row[on_it], chosen)]
                    chosen += self._cheapest(field, row[on_it], gain[on_it], int(size - free[number] % size))
                    free = counts.without(chosen)
        return chosen

    def _without_needless(self, chosen: list[int], counts: Counts, field: Field) -> list[int] | None:
        """Drop the victims that may stay, the dearest first."""
        if not counts.are_enough(counts.without(chosen)):
            return None
        cost, jobs = field.cost, self._state.running.jobs
        return counts.needed(chosen, sorted(chosen, key=lambda each: (-cost[each], jobs[each])))

    def _in_order(self, nodes: Mask, need: Need, field: Field) -> list[int] | None:
        """Take the newest first, or the lowest tier and priority first, until they suffice (other policies)."""
        at = np.flatnonzero(nodes & (field.available >= min(need.unit, need.rest or need.unit)))
        counts = Counts(need, field, at)
        if not counts.are_enough(field.available):
            return None
        rows = self._state.running.rows.ints
        order = np.unique(field.row[field.on(at)])
        keys = [-rows["tier"][order], -rows["placed_us"][order]]
        if self._state.policy.victims == "lowest":
            keys = [-rows["placed_us"][order], rows["priority"][order], -rows["tier"][order]]
        ranked: list[int] = order[np.lexsort(keys)].tolist()
        low, high = 0, len(ranked)
        while low < high:  # find the shortest prefix that suffices
            middle = (low + high) // 2
            if counts.are_enough(counts.without(ranked[:middle])):
                high = middle
            else:
                low = middle + 1
        return counts.needed(ranked[:low], reversed(ranked[: max(0, low - 1)]))


def _at_least(node: Ints, cost: Floats, gain: Ints, lacks: Ints) -> Floats:
    """Return a lower bound of the cost of freeing `lacks` GPUs of each node, the last attempt in part."""
    order = np.lexsort((cost / gain, node))
    node, cost, gain = node[order], cost[order], gain[order]
    total = gain.cumsum()
    ahead = total - gain
    first = np.ones(len(node), np.bool_)
    first[1:] = node[1:] != node[:-1]
    before = ahead - np.maximum.accumulate(np.where(first, ahead, 0))
    taken = np.minimum(np.maximum(lacks[node] - before, 0), gain)
    return np.bincount(node, weights=cost / gain * taken, minlength=len(lacks)).astype(np.float64, copy=False)
