"""Search for a fast order, for one placement, pass times and a memory limit; `bound.py` has the lower bound.

A list scheduler simulates the pipeline: a free rank takes the pass that a rule prefers among those that are ready. Each
rule gives a table, and the fastest within the limit is kept. There is no randomness and no clock: rules are tried in a
fixed order, and the search ends when a table meets the bound.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from cordee.plan.pipeline.bound import makespan_bound_s, room_for
from cordee.plan.pipeline.table import Action, Cell, PassTimes, ScheduleTable, StagePlacement
from cordee.plan.pipeline.timeline import ScheduleTimeline, cell_s, makespan_s, sizes_of, timeline

_EPSILON = 1e-9
NAME = "best found"
NEAR = 1.05


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """The preferences of a free rank.

    Args:
        forward_first: a forward before a backward if both are ready.
        deepest: of several forwards the one nearest to the last stage; else the oldest micro-batch.
        ahead: most forwards without their backwards, for each later stage; None: limited by memory alone.
        patience: wait for a known arrival rather than start a weight pass of which less than this fraction would end.
        interval: least time between micro-batches that enter the pipeline, in multiples of a rank's work on one.
        pairs: overlap a forward and a backward; one waits for the other at most this many forward passes. None:
            never overlap.
    """

    forward_first: bool
    deepest: bool
    ahead: float | None
    patience: float
    interval: float = 0.0
    pairs: float | None = None


@dataclass(frozen=True, slots=True)
class SearchedOrder:
    """The best order found, and the lower bound."""

    timeline: ScheduleTimeline
    bound_s: float
    tried: int

    @property
    def gap(self) -> float:
        """The relative gap to the lower bound; the gap to the optimum is no larger."""
        return self.timeline.makespan_s / self.bound_s - 1

    @property
    def optimal(self) -> bool:
        """Return whether it meets the bound."""
        return self.gap <= _EPSILON


def rules(placement: StagePlacement, costs: PassTimes) -> Iterator[DispatchRule]:
    """Yield all rules in the order in which they are tried."""
    pairs = (2.0, 0.0, None) if costs.both_s < costs.whole_s - _EPSILON else (None,)
    deepest = (True, False) if placement.chunks > 1 else (True,)
    for both, ahead, deep, first, patience in product(
        pairs, (None, 2.0, 1.5, 1.25, 1.0), deepest, (False, True), (0.0, 0.4, 1.0)
    ):
        yield DispatchRule(first, deep, ahead, patience, pairs=both)
    for interval, deep, patience in product((1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7), deepest, (0.0, 0.4, 1.0)):
        yield DispatchRule(False, deep, None, patience, interval, pairs[0])


def best_order(
    placement: StagePlacement,
    micro_batches: int,
    costs: PassTimes,
    memory: float | None = None,
    *,
    known: Sequence[ScheduleTable] = (),
) -> SearchedOrder | None:
    """Return the fastest order found within the memory limit; None if the limit does not hold one micro-batch.

    Args:
        placement: of the stages.
        micro_batches: of the step, of both models together.
        costs: times of the passes.
        memory: the most activations a rank may hold, in micro-batches over 1/p of the depth.
        known: tables of this placement to start from; those over the limit are left out.
    """
    bound_s = makespan_bound_s(placement, micro_batches, costs, memory)
    if math.isinf(bound_s):
        return None
    best: ScheduleTable | None = None
    best_s, tried = math.inf, 0
    for table in known:
        run = timeline(table, costs)
        if run.makespan_s < best_s - _EPSILON and (memory is None or run.peak <= memory + _EPSILON):
            best, best_s = table, run.makespan_s
    # With a little less memory than allowed a rank sometimes blocks the others less.
    limits = (None,) if memory is None else (memory, memory - min(sizes_of(placement, costs)))
    for limit, rule in product(limits, rules(placement, costs)):
        if best_s <= bound_s * (1 + _EPSILON):
            break
        tried += 1
        went = _Run(_Case(placement, micro_batches, costs, limit, rule))
        order = went.table()
        if order is None or went.end_s > best_s * NEAR:
            continue
        # The same order without the waits of the rule is a little faster.
        end_s = makespan_s(order, costs)
        if end_s < best_s - _EPSILON:
            best, best_s = order, end_s
    return None if best is None else SearchedOrder(timeline(best, costs), bound_s, tried)


class _Case:
    """One search problem under one rule: the placement, the times, and the limits of each stage."""

    def __init__(
        self, placement: StagePlacement, micro_batches: int, costs: PassTimes, memory: float | None, rule: DispatchRule
    ) -> None:
        self.place, self.costs, self.rule, self.micro_batches = placement, costs, rule, micro_batches
        self.count = micro_batches // placement.copies
        self.sizes = sizes_of(placement, costs)
        stages = range(placement.stages)
        self.ranks_of = [placement.rank_of(stage) for stage in stages]
        self.stages_of = [placement.stages_of(rank) for rank in range(placement.ranks)]
        self.memory = math.inf if memory is None else memory + _EPSILON
        # Later stages of the same model, and another model without activations here, need memory too.
        copy = [stage // placement.model_stages for stage in stages]
        beside = [self.stages_of[self.ranks_of[stage]] for stage in stages]
        self.later = [[each for each in beside[at] if each > at and copy[each] == copy[at]] for at in stages]
        self.other = [[each for each in beside[at] if copy[each] != copy[at]] for at in stages]
        self.most = [self._most(stage, memory) for stage in stages]

    def _most(self, stage: int, memory: float | None) -> int:
        room = room_for(self.place, stage, self.sizes, memory, self.count)
        if self.rule.ahead is None:
            return room
        left = self.place.model_stages - stage % self.place.model_stages
        return min(room, max(1, round(self.rule.ahead * left)))


class _Run:
    """One simulation of the pipeline under a rule: passes done, arrivals, and activations held on each rank."""

    def __init__(self, case: _Case) -> None:
        self.case, place = case, case.place
        self.forwards, self.inners, self.weights = ([0] * place.stages for _ in range(3))
        # Arrivals of the inputs of the next passes, future ones included.
        every_s = case.rule.interval * max(
            case.costs.both_s * sum(case.sizes[stage] for stage in held) / place.copies for held in case.stages_of
        )
        enter = [every_s * each for each in range(case.count)]
        stages = range(place.stages)
        self.inputs = [list(enter) if place.previous(stage) is None else [] for stage in stages]
        self.gradients: list[list[float]] = [[] for _ in stages]
        self.waiting: list[deque[int]] = [deque() for _ in stages]
        self.held = [0.0] * place.ranks
        self.cells: list[list[Cell]] = [[] for _ in range(place.ranks)]
        self.free_s = [0.0] * place.ranks
        self.wakes = sorted((at_s, rank) for rank in range(place.ranks) for at_s in (enter if every_s else [0.0]))

    @property
    def end_s(self) -> float:
        """The end of the last rank."""
        return max(self.free_s)

    def table(self) -> ScheduleTable | None:
        """Return the order, or None if it runs out of memory."""
        left = 3 * self.case.count * self.case.place.stages
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
        return ScheduleTable(NAME, self.case.place, self.case.micro_batches, tuple(tuple(row) for row in self.cells))

    def _begin(self, rank: int, cell: Cell, at_s: float) -> None:
        end_s = at_s + cell_s(cell, self.case.sizes, self.case.costs)
        self.cells[rank].append(cell)
        self.free_s[rank] = end_s
        heapq.heappush(self.wakes, (end_s, rank))
        for action in cell:
            stage, kind = action.stage, action.kind
            if kind == "F":
                self.forwards[stage] += 1
                self.held[rank] += self.case.sizes[stage]
                after = self.case.place.next(stage)
                if after is None:
                    self.gradients[stage].append(end_s)
                else:
                    self._send(self.inputs, stage, after, end_s)
                continue
            if kind in "IB":
                self.inners[stage] += 1
                before = self.case.place.previous(stage)
                if before is not None:
                    self._send(self.gradients, stage, before, end_s)
            if kind == "I":
                self.waiting[stage].append(action.micro_batch)
            elif kind == "W":
                self.waiting[stage].popleft()
            if kind in "WB":
                self.weights[stage] += 1
                self.held[rank] -= self.case.sizes[stage]

    def _send(self, what: list[list[float]], stage: int, to: int, end_s: float) -> None:
        there_s = end_s + (self.case.costs.latency_s if self.case.ranks_of[to] != self.case.ranks_of[stage] else 0.0)
        what[to].append(there_s)
        heapq.heappush(self.wakes, (there_s, self.case.ranks_of[to]))

    def _choose(self, rank: int, at_s: float) -> Cell | None:
        """Return the cell that the rank starts now; None if it waits."""
        forwards, next_f_s = self._ready_forwards(rank, at_s)
        inners, next_i_s = self._ready_inners(rank, at_s)
        pairs = self.case.rule.pairs
        inner = min(inners)[1] if inners else None
        if forwards and inner and pairs is not None:
            return (min(forwards)[1], Action(inner.stage, "B", inner.micro_batch))
        # A forward that may overlap a backward may exceed the rule's limit alone.
        forward = min((each for each in forwards if self._alone(each[1].stage)), default=(None, None))[1]
        if forward and inner:
            return (forward if self.case.rule.forward_first else inner,)
        one = forward or inner
        if one:
            wait_s = (next_i_s if forward else next_f_s) - at_s
            if pairs is None or wait_s > pairs * self.case.costs.forward_s * self.case.sizes[one.stage]:
                return (one,)
        return self._weights(rank, min(next_f_s, next_i_s) - at_s)

    def _ready_forwards(self, rank: int, at_s: float) -> tuple[list[tuple[tuple[int, int], Action]], float]:
        """Return the forwards that can start, the preferred one lowest, and the arrival of the next input."""
        ready, next_s = [], math.inf
        for stage in self.case.stages_of[rank]:
            each = self.forwards[stage]
            if each < len(self.inputs[stage]) and self._fits(rank, stage):
                if self.inputs[stage][each] <= at_s + _EPSILON:
                    order = (-stage, each) if self.case.rule.deepest else (each, -stage)
                    ready.append((order, Action(stage, "F", each)))
                else:
                    next_s = min(next_s, self.inputs[stage][each])
        return ready, next_s

    def _ready_inners(self, rank: int, at_s: float) -> tuple[list[tuple[tuple[int, int], Action]], float]:
        """Return the backwards that can start, the oldest micro-batch lowest, and the arrival of the next gradient."""
        ready, next_s = [], math.inf
        for stage in self.case.stages_of[rank]:
            each = self.inners[stage]
            if each < len(self.gradients[stage]):
                if self.gradients[stage][each] <= at_s + _EPSILON:
                    ready.append(((each, -stage), Action(stage, "I", each)))
                else:
                    next_s = min(next_s, self.gradients[stage][each])
        return ready, next_s

    def _weights(self, rank: int, next_in_s: float) -> Cell | None:
        """Return the weight pass that has waited longest, unless another input arrives too soon."""
        waiting = [stage for stage in self.case.stages_of[rank] if self.waiting[stage]]
        if not waiting:
            return None
        stage = min(waiting, key=lambda each: (self.waiting[each][0], -each))
        if next_in_s < self.case.rule.patience * self.case.costs.weight_s * self.case.sizes[stage]:
            return None
        return (Action(stage, "W", self.waiting[stage][0]),)

    def _alone(self, stage: int) -> bool:
        """Return whether the rule allows one more forward in flight."""
        return self.forwards[stage] - self.inners[stage] < self.case.most[stage]

    def _fits(self, rank: int, stage: int) -> bool:
        """Return whether one more forward leaves memory for those that must run before any release."""
        if self.case.rule.pairs is None and not self._alone(stage):
            return False
        need = self.case.sizes[stage] + sum(self.case.sizes[each] for each in self.case.later[stage])
        need += sum(
            self.case.sizes[each]
            for each in self.case.other[stage]
            if self.forwards[each] == self.weights[each] < self.case.count
        )
        return self.held[rank] + need <= self.case.memory
