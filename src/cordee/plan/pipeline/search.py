"""The best order that can be found for a placement, its costs and a memory limit; `bound.py` says how good it can be.

A list scheduler runs the pipeline in time: a free rank takes what a rule prefers among what is ready. Each rule gives
a table, and the fastest that keeps within the limit is kept. No randomness and no clock: the rules are tried in one
order, and the search ends at once when a table meets the bound.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cordee.plan.pipeline.bound import makespan_bound_s, room_for
from cordee.plan.pipeline.table import Action, Cell, Costs, Placement, Table
from cordee.plan.pipeline.timeline import Timeline, cell_s, makespan_s, sizes_of, timeline

_EPSILON = 1e-9
NAME = "best found"
NEAR = 1.05


@dataclass(frozen=True, slots=True)
class Rule:
    """What a free rank prefers.

    Args:
        forward_first: a forward before a backward, when both are ready.
        deepest: of several forwards the one nearest to the end of its chain; else the oldest micro-batch.
        ahead: forwards without their backwards that a rank may have, for each stage still to come; None: what it holds.
        patience: it waits for a known arrival rather than begin weights of which less than this share would be done.
        interval: micro-batches enter the pipeline no sooner after one another than this many times a rank's work on
            one; 0: as soon as they can.
        pairs: a forward and a backward overlap when both are ready; one waits for the other at most so long, in
            lengths of a forward. None: they never overlap.
    """

    forward_first: bool
    deepest: bool
    ahead: float | None
    patience: float
    interval: float = 0.0
    pairs: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The best order found, and what no order can beat."""

    timeline: Timeline
    bound_s: float
    tried: int

    @property
    def gap(self) -> float:
        """How far it is from the bound, as a share of it; from the optimum it is no further."""
        return self.timeline.makespan_s / self.bound_s - 1

    @property
    def optimal(self) -> bool:
        """Whether it meets the bound."""
        return self.gap <= _EPSILON


def rules(placement: Placement, costs: Costs) -> Iterator[Rule]:
    """All rules, in the order in which they are tried."""
    pairs = (2.0, 0.0, None) if costs.both_s < costs.whole_s - _EPSILON else (None,)
    deepest = (True, False) if placement.chunks > 1 else (True,)
    for both, ahead, deep, first, patience in product(
        pairs, (None, 2.0, 1.5, 1.25, 1.0), deepest, (False, True), (0.0, 0.4, 1.0)
    ):
        yield Rule(first, deep, ahead, patience, pairs=both)
    for interval, deep, patience in product((1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7), deepest, (0.0, 0.4, 1.0)):
        yield Rule(False, deep, None, patience, interval, pairs[0])


def best_order(
    placement: Placement,
    micro_batches: int,
    costs: Costs,
    memory: float | None = None,
    *,
    known: Sequence[Table] = (),
) -> Found | None:
    """The fastest order found within the memory limit; None if the limit holds not one micro-batch.

    Args:
        placement: where the stages lie.
        micro_batches: of the step, those of both models.
        costs: of the passes.
        memory: the most activations a rank may hold, in micro-batches over 1/p of the depth.
        known: tables of this placement to start from; those over the limit are left out.
    """
    bound_s = makespan_bound_s(placement, micro_batches, costs, memory)
    if math.isinf(bound_s):
        return None
    best: Table | None = None
    best_s, tried = math.inf, 0
    for table in known:
        run = timeline(table, costs)
        if run.makespan_s < best_s - _EPSILON and (memory is None or run.peak <= memory + _EPSILON):
            best, best_s = table, run.makespan_s
    # With a little less than it may hold a rank is sometimes less in the way of the others.
    limits = (None,) if memory is None else (memory, memory - min(sizes_of(placement, costs)))
    for limit, rule in product(limits, rules(placement, costs)):
        if best_s <= bound_s * (1 + _EPSILON):
            break
        tried += 1
        went = _Run(placement, micro_batches, costs, limit, rule)
        order = went.table()
        if order is None or went.end_s > best_s * NEAR:
            continue
        # In the same order, but without the rule's own waiting, it is a little faster.
        end_s = makespan_s(order, costs)
        if end_s < best_s - _EPSILON:
            best, best_s = order, end_s
    return None if best is None else Found(timeline(best, costs), bound_s, tried)


class _Run:
    """One run of the pipeline under a rule: what is done, what has arrived where, what each rank holds."""

    def __init__(
        self, placement: Placement, micro_batches: int, costs: Costs, memory: float | None, rule: Rule
    ) -> None:
        self.place, self.costs, self.rule, self.micro_batches = placement, costs, rule, micro_batches
        self.count = micro_batches // placement.chains
        self.sizes = sizes_of(placement, costs)
        stages = range(placement.stages)
        self.lies = [placement.rank_of(stage) for stage in stages]
        self.held_by = [placement.held_by(rank) for rank in range(placement.ranks)]
        self.memory = math.inf if memory is None else memory + _EPSILON
        self.forwards, self.inners, self.weights = ([0] * placement.stages for _ in range(3))
        # When the input of each next pass is there; times in the future are known to come.
        every_s = rule.interval * max(
            costs.both_s * sum(self.sizes[stage] for stage in held) / placement.chains for held in self.held_by
        )
        enter = [every_s * each for each in range(self.count)]
        self.inputs = [list(enter) if placement.before(stage) is None else [] for stage in stages]
        self.gradients: list[list[float]] = [[] for _ in stages]
        self.waiting: list[deque[int]] = [deque() for _ in stages]
        self.held = [0.0] * placement.ranks
        self.cells: list[list[Cell]] = [[] for _ in range(placement.ranks)]
        self.free_s = [0.0] * placement.ranks
        self.wakes = sorted((at_s, rank) for rank in range(placement.ranks) for at_s in (enter if every_s else [0.0]))
        # Later stages of the same chain, and another chain that has nothing here yet, must find room.
        chain = [stage // placement.chain_stages for stage in stages]
        self.later = [[each for each in self.held_by[self.lies[stage]] if each > stage and chain[each] == chain[stage]]
                      for stage in stages]  # fmt: skip
        self.other = [[each for each in self.held_by[self.lies[stage]] if chain[each] != chain[stage]]
                      for stage in stages]  # fmt: skip
        self.most = [self._most(stage, memory) for stage in stages]

    def _most(self, stage: int, memory: float | None) -> int:
        room = room_for(self.place, stage, self.sizes, memory, self.count)
        if self.rule.ahead is None:
            return room
        left = self.place.chain_stages - stage % self.place.chain_stages
        return min(room, max(1, round(self.rule.ahead * left)))

    @property
    def end_s(self) -> float:
        """When the last rank is done."""
        return max(self.free_s)

    def table(self) -> Table | None:
        """The order that comes out, or None if it gets stuck for want of memory."""
        left = 3 * self.count * self.place.stages
        while self.wakes:
            at_s = self.wakes[0][0]
            ranks = set()
            while self.wakes and self.wakes[0][0] <= at_s + _EPSILON:
                ranks.add(heapq.heappop(self.wakes)[1])
            for rank in sorted(ranks):
                if self.free_s[rank] <= at_s + _EPSILON:
                    cell = self._choose(rank, at_s)
                    if cell:
                        left -= len(cell) if len(cell) == 1 else 3
                        self._begin(rank, cell, at_s)
        if left:
            return None
        return Table(NAME, self.place, self.micro_batches, tuple(tuple(row) for row in self.cells))

    def _begin(self, rank: int, cell: Cell, at_s: float) -> None:
        end_s = at_s + cell_s(cell, self.sizes, self.costs)
        self.cells[rank].append(cell)
        self.free_s[rank] = end_s
        heapq.heappush(self.wakes, (end_s, rank))
        for action in cell:
            stage, kind = action.stage, action.kind
            if kind == "F":
                self.forwards[stage] += 1
                self.held[rank] += self.sizes[stage]
                after = self.place.after(stage)
                if after is None:
                    self.gradients[stage].append(end_s)
                else:
                    self._send(self.inputs, stage, after, end_s)
                continue
            if kind in "IB":
                self.inners[stage] += 1
                before = self.place.before(stage)
                if before is not None:
                    self._send(self.gradients, stage, before, end_s)
            if kind == "I":
                self.waiting[stage].append(action.micro_batch)
            elif kind == "W":
                self.waiting[stage].popleft()
            if kind in "WB":
                self.weights[stage] += 1
                self.held[rank] -= self.sizes[stage]

    def _send(self, what: list[list[float]], stage: int, to: int, end_s: float) -> None:
        there_s = end_s + (self.costs.latency_s if self.lies[to] != self.lies[stage] else 0.0)
        what[to].append(there_s)
        heapq.heappush(self.wakes, (there_s, self.lies[to]))

    def _choose(self, rank: int, at_s: float) -> Cell | None:
        """What the rank begins now; None if it waits."""
        forwards, next_f_s = self._ready_forwards(rank, at_s)
        inners, next_i_s = self._ready_inners(rank, at_s)
        pairs = self.rule.pairs
        inner = min(inners)[1] if inners else None
        if forwards and inner and pairs is not None:
            return (min(forwards)[1], Action(inner.stage, "B", inner.micro_batch))
        # What may run beside a backward may be one too many to run alone.
        forward = min((each for each in forwards if self._alone(each[1].stage)), default=(None, None))[1]
        if forward and inner:
            return (forward if self.rule.forward_first else inner,)
        one = forward or inner
        if one:
            wait_s = (next_i_s if forward else next_f_s) - at_s
            if pairs is None or wait_s > pairs * self.costs.forward_s * self.sizes[one.stage]:
                return (one,)
        return self._weights(rank, min(next_f_s, next_i_s) - at_s)

    def _ready_forwards(self, rank: int, at_s: float) -> tuple[list[tuple[tuple[int, int], Action]], float]:
        """Forwards that can begin, the preferred one lowest, and when the next input is known to come."""
        ready, next_s = [], math.inf
        for stage in self.held_by[rank]:
            each = self.forwards[stage]
            if each < len(self.inputs[stage]) and self._fits(rank, stage):
                if self.inputs[stage][each] <= at_s + _EPSILON:
                    order = (-stage, each) if self.rule.deepest else (each, -stage)
                    ready.append((order, Action(stage, "F", each)))
                else:
                    next_s = min(next_s, self.inputs[stage][each])
        return ready, next_s

    def _ready_inners(self, rank: int, at_s: float) -> tuple[list[tuple[tuple[int, int], Action]], float]:
        """The same for backwards: the oldest micro-batch first."""
        ready, next_s = [], math.inf
        for stage in self.held_by[rank]:
            each = self.inners[stage]
            if each < len(self.gradients[stage]):
                if self.gradients[stage][each] <= at_s + _EPSILON:
                    ready.append(((each, -stage), Action(stage, "I", each)))
                else:
                    next_s = min(next_s, self.gradients[stage][each])
        return ready, next_s

    def _weights(self, rank: int, next_in_s: float) -> Cell | None:
        """The weights that have waited longest, unless something better comes too soon."""
        waiting = [stage for stage in self.held_by[rank] if self.waiting[stage]]
        if not waiting:
            return None
        stage = min(waiting, key=lambda each: (self.waiting[each][0], -each))
        if next_in_s < self.rule.patience * self.costs.weight_s * self.sizes[stage]:
            return None
        return (Action(stage, "W", self.waiting[stage][0]),)

    def _alone(self, stage: int) -> bool:
        """Whether the rule lets one more forward be in flight."""
        return self.forwards[stage] - self.inners[stage] < self.most[stage]

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether one more forward leaves room for those that must run before anything is released."""
        if self.rule.pairs is None and not self._alone(stage):
            return False
        need = self.sizes[stage] + sum(self.sizes[each] for each in self.later[stage])
        need += sum(
            self.sizes[each] for each in self.other[stage] if self.forwards[each] == self.weights[each] < self.count
        )
        return self.held[rank] + need <= self.memory
