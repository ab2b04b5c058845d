"""Whom to push aside: the cheapest attempts whose GPUs, with those that are free, hold a whole gang in its shape.

One node is searched exactly; several are searched exactly while few could be pushed, else greedily by what a unit
costs, and then nobody stays in the set who could be left out. Nothing here depends on the numbers of rows: ties go to
the fewest jobs, lower tiers, worse standing, those placed last, and names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cordee.ids import JobId
from cordee.schedule.failed_searches import Scope
from cordee.schedule.loss import Cost, Victim, choose
from cordee.schedule.order import TIERS, counts_service
from cordee.schedule.placement.fill import Need
from cordee.schedule.placement.view import Pool
from cordee.schedule.records import NEVER, Attempt
from cordee.schedule.state import State
from cordee.units import US_PER_HOUR

_EXACT = 10
"""So many attempts are searched in all their combinations when a gang needs several nodes."""

_ROUNDED = 64
"""Costs that differ by less may be equal once each victim's is rounded."""

_NODES_MAX = 64
"""So many nodes are searched for a set of several victims, those first that could be cheapest."""


@dataclass(slots=True)
class _Reach:
    """Whom a scope reaches; it holds while nobody is placed and nobody leaves."""

    gain: Any  # of each lease: GPUs, 0 if it may not be pushed
    pushed: Any  # of each node: all of that
    price: Callable[[], Any]
    _cost: Any = None

    @property
    def cost(self) -> Any:
        """Of each attempt's row; most searches end before anybody asks."""
        if self._cost is None:
            self._cost = self.price()
        return self._cost


@dataclass(slots=True)
class _Field:
    """What one search looks at: nodes and leases of attempts that may be pushed there."""

    nodes: Any  # mask of nodes
    free: Any  # of each node
    avail: Any  # with all that could be pushed
    gain: Any  # of each lease: GPUs, 0 if it may not be pushed
    row: Any  # of each lease
    node: Any
    reach: _Reach

    @property
    def cost(self) -> Any:
        """Of each attempt's row."""
        return self.reach.cost

    def on(self, nodes: Any) -> Any:
        """Leases on these nodes that may be pushed."""
        there = np.zeros(len(self.nodes), bool)
        there[nodes] = True
        return np.flatnonzero((self.gain > 0) & there[self.node])


class _Prices:
    """What pushes weigh at one moment. It does not know who asks: a cycle leaves no circles to collect."""

    def __init__(self, state: State, now_us: int) -> None:
        self._state, self._now_us = state, now_us
        self._seen = -1  # changes of rows
        self._cost: Any = None

    def to(self, scope: Scope) -> Any:
        """Of each row. Who is pushed pushes in its turn who is below it, so a higher tier counts for those as well.

        Of nearly equal ones of its own tier a job pushes who had more.
        """
        policy, tier = self._state.policy, self._state.running.rows.ints["tier"]
        cost = self._each() * (1 + policy.cascade * (len(TIERS) - 1 - tier))
        if scope.standing is None or not policy.favour or policy.order != "service":
            return cost
        hours = self._state.running.served(self._now_us) / US_PER_HOUR
        favoured = cost * np.maximum(0.1, 1 - policy.favour * np.log2(1 + hours))
        return np.where(tier == scope.tier, favoured, cost)

    def _each(self) -> Any:
        """What each row's push weighs: `preempt.charge` for all of them, as floats."""
        rows = self._state.running.rows
        if self._seen != rows.changes:
            work = np.minimum(self._state.running.at_risk_us(self._now_us), rows.ints["every_us"])
            lost = np.where(rows.flags["saves"], rows.ints["save_us"], work) + rows.ints["restart_us"]
            usd = rows.floats["rate"] * lost / US_PER_HOUR
            self._cost = usd if rows.floats["rate"].any() else (rows.ints["gpus"] * lost).astype(np.float64)
            self._seen = rows.changes
        return self._cost


class Victims:
    """The search at one moment; `State` may change between two questions."""

    def __init__(self, state: State, now_us: int) -> None:
        self._state, self._now_us = state, now_us
        self._seen = self._seen_nodes = -1  # changes of rows, and of nodes
        self._prices = _Prices(state, now_us)
        self._standing: Any = None
        self._turn_over: Any = None
        self._worsts: dict[tuple[int, bool], int] = {}
        self._reaches: dict[tuple[Scope, frozenset[str]], _Reach] = {}
        self._fields: dict[tuple[Scope, Pool, frozenset[str]], _Field] = {}

    def find(
        self, need: Need, pool: Pool, scope: Scope, *, closed: Iterable[str] = (), shielded: Iterable[str] = ()
    ) -> tuple[JobId, ...] | None:
        """The set to push; None if nobody's leaving would be enough, or too many would have to be moved.

        Args:
            need: the shape that has to become free.
            pool: where.
            scope: who asks.
            closed: nodes that are not looked at.
            shielded: queues whose attempts stay.
        """
        if scope.moves is not None and not self._could_move(need, pool, scope.moves):
            return None
        field = self._field(scope, pool, frozenset(shielded))
        nodes = field.nodes
        numbers = self._state.nodes.columns.numbers
        shut = [numbers[name] for name in closed]
        if shut:
            nodes = nodes.copy()
            nodes[shut] = False
        if need.within in ("island", "node") or need.units + (need.rest > 0) == 1:
            need = Need(need.gpus, 1, 0, need.in_island, None) if need.within else need
            groups = [nodes]
        else:
            groups = list(self._domains(need, nodes, field))
        best: tuple[Any, list[int]] | None = None
        for group in groups:
            rows = self._in(group, need, field)
            if rows is not None:
                key = self._weigh(rows, field)
                if best is None or key < best[0]:
                    best = (key, rows)
        return None if best is None else tuple(sorted(self._state.running.jobs[row] for row in best[1]))

    def is_empty(self, scope: Scope) -> bool:
        """Whether a look at tiers and standings tells that this scope reaches nobody, as it does of most."""
        if scope.borrowers or scope.moves is not None:
            return False
        if int(self._state.running.rows.ints["tier"].max(initial=0)) > scope.tier:
            return False
        return scope.standing is None or self._worst(scope.tier, scope.standing) <= scope.standing

    def _worst(self, tier: int, standing: int) -> int:
        """The worst standing in a tier of those whose turn is over for somebody of this standing."""
        self._refresh()
        key = (tier, standing < 0)
        if key not in self._worsts:
            rows = self._state.running.rows
            over = rows.flags["live"] & (rows.ints["tier"] == tier) & self.turn_over(standing)
            self._worsts[key] = int(self.standing().max(where=over, initial=-NEVER))
        return self._worsts[key]

    def reached(self, scope: Scope) -> list[Attempt]:
        """Everybody whom this scope reaches, in no order."""
        state = self._state
        return [state.attempts[state.running.jobs[row]] for row in np.flatnonzero(self.may_push(scope)).tolist()]

    # -- what it looks at ------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        running = self._state.running
        if self._seen != running.rows.changes:
            self._seen, self._standing = running.rows.changes, None
            self._turn_over = None
            self._worsts.clear()
            self._reaches.clear()
            self._fields.clear()
        if self._seen_nodes != self._state.nodes.columns.changes:
            self._seen_nodes = self._state.nodes.columns.changes
            self._fields.clear()

    def standing(self) -> Any:
        """Of each row, now."""
        self._refresh()
        if self._standing is None:
            policy = self._state.policy
            levels = policy.levels_gpu_us if counts_service(policy) else None
            self._standing = self._state.running.standings(self._now_us, levels)
        return self._standing

    def turn_over(self, standing: int) -> Any:
        """Of each row, whether its own tier may push it now if it stands worse; who waited too long waits no longer."""
        self._refresh()
        if standing < 0:
            return self._state.running.rows.ints["slice_ends_us"] <= self._now_us
        if self._turn_over is None:
            running, now_us = self._state.running, self._now_us
            over = running.rows.ints["slice_ends_us"] <= now_us
            self._turn_over = over & (running.kept_until_us(now_us, self._state.policy) <= now_us)
        return self._turn_over

    def may_push(self, scope: Scope) -> Any:
        """Of each row, whether this scope reaches it now."""
        rows, now_us = self._state.running.rows, self._now_us
        if scope.moves is not None:
            allowed = (rows.ints["tier"] >= scope.tier) & (rows.ints["gpus"] <= scope.moves) & rows.flags["saves"]
            return allowed & (rows.ints["slice_ends_us"] <= now_us) & rows.flags["live"]
        rested = rows.ints["min_run_ends_us"] <= now_us
        allowed = (rows.ints["tier"] > scope.tier) & rested
        if scope.standing is not None:
            turn = (rows.ints["tier"] == scope.tier) & self.turn_over(scope.standing)
            allowed |= turn & (rows.ints["priority"] <= scope.priority) & (self.standing() > scope.standing)
        if scope.borrowers:
            allowed |= self._state.running.of_queues(scope.borrowers) & rested
        return allowed & rows.flags["live"]

    def _field(self, scope: Scope, pool: Pool, shielded: frozenset[str] = frozenset()) -> _Field:
        self._refresh()
        key = (scope, pool, shielded)
        found = self._fields.get(key)
        if found is None:
            running, reach = self._state.running, self._reach(scope, shielded)
            free = self._state.nodes.columns.free
            leases = running.leases
            found = self._fields[key] = _Field(
                self._state.nodes.columns.of_pool(pool),
                free,
                free + reach.pushed,
                reach.gain,
                leases.ints["row"],
                leases.ints["node"],
                reach,
            )
        return found

    def _reach(self, scope: Scope, shielded: frozenset[str]) -> _Reach:
        key = (scope, shielded)
        found = self._reaches.get(key)
        if found is None:
            running = self._state.running
            count, row, node = (
                len(self._state.nodes.columns.names),
                running.leases.ints["row"],
                running.leases.ints["node"],
            )
            allowed = self.may_push(scope)
            if shielded:
                allowed &= ~self._state.running.of_queues(shielded)
            gain = running.leases.ints["gpus"] * allowed[row]
            pushed = (
                np.bincount(node, weights=gain, minlength=count).astype(np.int64)
                if len(row)
                else np.zeros(count, np.int64)
            )
            found = self._reaches[key] = _Reach(gain, pushed, partial(self._prices.to, scope))
        return found

    def _domains(self, need: Need, nodes: Any, field: _Field) -> Iterable[Any]:
        """Masks of nodes that the gang may lie in together, each with enough of them."""
        if need.within is None:
            yield nodes
            return
        up = {"rack": 0, "block": 1}[need.within]
        found: dict[tuple[str, ...], list[int]] = {}
        for number in np.flatnonzero(nodes & (field.avail >= min(need.unit, need.rest or need.unit))):
            domain = self._state.nodes.records[self._state.nodes.columns.names[number]].node.domain
            found.setdefault(domain[: len(domain) - up], []).append(int(number))
        for _, numbers in sorted(found.items()):
            if int((field.avail[numbers] // need.unit).sum()) >= need.units:
                mask = np.zeros_like(nodes)
                mask[numbers] = True
                yield mask

    def _weigh(self, rows: Sequence[int], field: _Field) -> Any:
        """The order of sets: what they cost, how many they are, how low, their names."""
        jobs, tiers = self._state.running.jobs, self._state.running.rows.ints["tier"]
        named = sorted((jobs[row], row) for row in rows)
        total = sum(round(float(field.cost[row])) for _, row in named)
        return total, len(rows), -sum(int(tiers[row]) for row in rows), [job_id for job_id, _ in named]

    # -- the search ------------------------------------------------------------------------------------------

    def _in(self, nodes: Any, need: Need, field: _Field) -> list[int] | None:
        if self._state.policy.victims in ("newest", "lowest"):
            return self._in_turn(nodes, need, field)
        if need.units + (need.rest > 0) == 1:
            return self._on_one_node(nodes, need.gpus, field)
        return self._on_several(nodes, need, field)

    def _could_move(self, need: Need, pool: Pool, most: int) -> bool:
        """Whether the units that lack lack no more GPUs than may be moved; else every set is too large."""
        columns = self._state.nodes.columns
        unit, units = (need.gpus, 1) if need.within in ("island", "node") else (need.unit, need.units)
        unit, units = (unit, units) if units else (need.rest, 1)
        nodes = columns.of_pool(pool) & (columns.usable >= unit)
        free = columns.free[nodes]
        short = units - int((free // unit).sum())
        lacks = np.sort(unit - free % unit)[: max(0, short)]
        return int(lacks.sum()) + unit * max(0, short - len(lacks)) <= most

    def _on_one_node(self, nodes: Any, gpus: int, field: _Field) -> list[int] | None:
        there = nodes & (field.avail >= gpus)
        if not there.any():
            return None
        lacks = np.maximum(1, gpus - field.free)  # where GPUs are free, it is CPU or memory that somebody has to leave
        at = ((field.gain > 0) & there[field.node]).nonzero()[0]
        row, node, gain = field.row[at], field.node[at], field.gain[at]
        costs = field.cost
        cost = costs[row]
        alone = np.flatnonzero(gain >= lacks[node])
        best = None if not len(alone) else [int(row[alone[self._first(row[alone], cost[alone])]])]
        bound = cost[alone].min() if len(alone) else np.inf
        lacks = np.where(there, lacks, 0)
        least = self._at_least(node, cost, gain, lacks)
        # Where nobody can be left out it costs all of them.
        smallest = np.full(len(lacks), 1 << 40)
        np.minimum.at(smallest, node, gain)
        whole = np.bincount(node, weights=cost, minlength=len(lacks))
        all_go = field.avail - field.free - smallest < lacks
        promising = np.flatnonzero(there & (field.avail > field.free) & (least < bound * (1 - 1e-9)))
        names = self._state.nodes.columns.ranks()
        order = promising[np.lexsort((names[promising], least[promising]))][:_NODES_MAX]
        key = None if best is None else self._weigh(best, field)
        for number in order:
            if key is not None and least[number] >= bound:
                break
            if all_go[number] and whole[number] > bound + _ROUNDED:
                continue
            on_it = (node == number).nonzero()[0]
            if all_go[number]:
                chosen = row[on_it].tolist()
            else:
                chosen = self._cheapest(field, row[on_it], gain[on_it], int(lacks[number]))
            found = self._weigh(chosen, field)
            if key is None or found < key:
                best, key, bound = chosen, found, float(costs[chosen].sum())
        return best

    def _at_least(self, node: Any, cost: Any, gain: Any, lacks: Any) -> Any:
        """Of each node what freeing so many GPUs costs at least: the cheapest per GPU first, the last in part."""
        order = np.lexsort((cost / gain, node))
        node, cost, gain = node[order], cost[order], gain[order]
        total = gain.cumsum()
        first = np.r_[True, node[1:] != node[:-1]] if len(node) else np.empty(0, bool)
        before = total - gain - np.maximum.accumulate(np.where(first, total - gain, 0))
        taken = np.clip(lacks[node] - before, 0, gain)
        return np.bincount(node, weights=cost / gain * taken, minlength=len(lacks))

    def _first(self, row: Any, cost: Any) -> int:
        """Of equally cheap ones the one of the lowest tier, the worst standing, placed last, then by name."""
        rows = self._state.running.rows
        left = np.flatnonzero(cost <= cost.min() * (1 + 1e-12))
        for column in (rows.ints["tier"], self.standing(), rows.ints["placed_us"]):
            if len(left) > 1:
                value = column[row[left]]
                left = left[value == value.max()]
        jobs = self._state.running.jobs
        return int(min(left, key=lambda each: jobs[int(row[each])]))

    def _cheapest(self, field: _Field, row: Any, gain: Any, lacks: int) -> list[int]:
        """The cheapest rows of one node that free so many of its GPUs."""
        running = self._state.running
        candidates = [
            Victim(
                job_id=running.jobs[each],
                gpus=gpus,
                cost=Cost(round(float(field.cost[each])), 0),
                level=int(running.rows.ints["tier"][each]),
            )
            for each, gpus in zip(row.tolist(), gain.tolist(), strict=True)
        ]
        chosen = choose(candidates, lacks)
        assert chosen is not None, "who asks has counted"
        return [running.row_of[victim.job_id] for victim in chosen]

    def _on_several(self, nodes: Any, need: Need, field: _Field) -> list[int] | None:
        smallest = min(need.unit, need.rest or need.unit)
        at = np.flatnonzero(nodes & (field.avail >= smallest))
        count = _Count(need, field, at)
        if not count.enough(field.avail):
            return None
        leases = field.on(at)
        rows = np.unique(field.row[leases])
        if len(rows) <= _EXACT:
            return self._of_few(rows.tolist(), count, field, leases)
        chosen = self._greedily(at, count, field, leases)
        return self._needed(chosen, count, field)

    def _of_few(self, rows: list[int], count: "_Count", field: _Field, leases: Any) -> list[int] | None:
        """All combinations, cheapest first, cut off where they are dearer than the best."""
        cost = field.cost
        rows = sorted(rows, key=lambda row: (cost[row], self._state.running.jobs[row]))
        best: tuple[Any, list[int]] | None = None
        bound = 0.0
        ahead: list[tuple[int, list[int], float]] = [(0, [], 0.0)]  # the next is the last
        while ahead:
            start, taken, weight = ahead.pop()
            if best is not None and weight > bound * (1 + 1e-12):
                continue
            if taken and count.enough(count.with_rows(taken)):
                key = self._weigh(taken, field)
                if best is None or key < best[0]:
                    best, bound = (key, taken), weight
                continue
            for number in range(len(rows) - 1, start - 1, -1):
                ahead.append((number + 1, [*taken, rows[number]], weight + float(cost[rows[number]])))
        return None if best is None else best[1]

    def _greedily(self, at: Any, count: "_Count", field: _Field, leases: Any) -> list[int]:
        """Node by node in the order of what a further unit costs there, the cost of a gang shared by all its GPUs."""
        need, running = count.need, self._state.running
        gpus = np.maximum(1, running.rows.ints["gpus"])
        price = field.cost / gpus
        row, node, gain = field.row[leases], field.node[leases], field.gain[leases]
        per_node = np.bincount(node, weights=gain * price[row], minlength=len(field.free))
        pushed = np.maximum(1, field.avail - field.free)
        chosen: list[int] = []
        for size in (need.unit, need.rest):
            if not size:
                continue
            lacks = size - field.free % size
            estimate = per_node / pushed * lacks
            useful = at[field.avail[at] // size > field.free[at] // size]
            ranks = self._state.nodes.columns.ranks()
            for number in useful[np.lexsort((ranks[useful], estimate[useful]))].tolist():
                free = count.with_rows(chosen)
                if count.enough(free) or (size == need.unit and count.units(free) >= need.units):
                    break
                while free[number] // size < field.avail[number] // size and not count.enough(free):
                    on_it = np.flatnonzero(node == number)
                    on_it = on_it[~np.isin(row[on_it], chosen)]
                    lack = int(size - free[number] % size)
                    chosen += self._cheapest(field, row[on_it], gain[on_it], lack)
                    free = count.with_rows(chosen)
        return chosen

    def _needed(self, chosen: list[int], count: "_Count", field: _Field) -> list[int] | None:
        """Without those that could be left out, the dearest first."""
        if not count.enough(count.with_rows(chosen)):
            return None
        cost, jobs = field.cost, self._state.running.jobs
        for row in sorted(chosen, key=lambda each: (-cost[each], jobs[each])):
            rest = [each for each in chosen if each != row]
            if count.enough(count.with_rows(rest)):
                chosen = rest
        return chosen

    def _in_turn(self, nodes: Any, need: Need, field: _Field) -> list[int] | None:
        """For comparison: the newest first, or the lowest tier and priority first, until it is enough."""
        at = np.flatnonzero(nodes & (field.avail >= min(need.unit, need.rest or need.unit)))
        count = _Count(need, field, at)
        if not count.enough(field.avail):
            return None
        leases = field.on(at)
        rows = self._state.running.rows
        order = np.unique(field.row[leases])
        if self._state.policy.victims == "lowest":
            keys = [-rows.ints["placed_us"][order], rows.ints["priority"][order], -rows.ints["tier"][order]]
        else:
            keys = [-rows.ints["tier"][order], -rows.ints["placed_us"][order]]
        ranked = order[np.lexsort(keys)].tolist()
        low, high = 0, len(ranked)
        while low < high:  # the fewest of them in that order that are enough
            middle = (low + high) // 2
            if count.enough(count.with_rows(ranked[:middle])):
                high = middle
            else:
                low = middle + 1
        chosen: list[int] = ranked[:low]
        for row in reversed(chosen[:-1]):
            rest = [each for each in chosen if each != row]
            if count.enough(count.with_rows(rest)):
                chosen = rest
        return chosen


class _Count:
    """Units that nodes hold."""

    def __init__(self, need: Need, field: _Field, at: Any) -> None:
        self.need, self._field, self._at = need, field, at

    def with_rows(self, rows: list[int]) -> Any:
        """Free GPUs of each node if these attempts had left."""
        field = self._field
        free = field.free.copy()
        if rows:
            chosen = np.zeros(len(field.cost), bool)
            chosen[rows] = True
            leases = np.flatnonzero(chosen[field.row] & (field.gain > 0))
            np.add.at(free, field.node[leases], field.gain[leases])
        return free

    def units(self, free: Any) -> int:
        """How many units so many free GPUs hold."""
        return int((free[self._at] // self.need.unit).sum())

    def enough(self, free: Any) -> bool:
        """Whether the gang lies in so many free GPUs of each node."""
        here, need = free[self._at], self.need
        each = here // need.unit
        units = int(each.sum())
        if units < need.units or not need.rest:
            return units >= need.units
        fits = here >= need.rest
        kept = (here[fits] - need.rest) // need.unit - each[fits]
        return bool(len(kept)) and units + int(kept.max()) >= need.units
