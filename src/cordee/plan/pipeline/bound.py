"""A lower bound on the step time of any order of the passes, for one placement, pass times and a memory limit.

Each rank is a single machine whose jobs have heads (earliest starts) and tails (time that must follow). Heads and tails
come from the sequence of stages and from memory: with c micro-batches in flight the next forward waits for a release,
and symmetrically from the end of the step. Jackson's preemptive schedule of such a machine is its optimum with
preemption (J. Carlier, "The one-machine sequencing problem", EJOR 11, 1982), so it bounds every order. A
second bound is the sum of the lifetimes of all activations over the memory limit.
"""

import heapq
import math
from dataclasses import dataclass

from cordee.plan.pipeline.table import PassTimes, StagePlacement
from cordee.plan.pipeline.timeline import sizes_of

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class _Stage:
    """The passes of a stage, with heads and tails from the other stages."""

    size: float
    forward_s: float
    inner_s: float
    weight_s: float
    head_s: float
    loop_s: float
    tail_f_s: float
    tail_i_s: float

    @property
    def life_s(self) -> float:
        """The least time from the start of a forward pass to the end of its weight pass."""
        return self.loop_s + self.inner_s + self.weight_s


def makespan_bound_s(
    placement: StagePlacement, micro_batches: int, costs: PassTimes, memory: float | None = None
) -> float:
    """Return the least seconds of a step over all orders of the passes.

    Args:
        placement: of the stages.
        micro_batches: of the step, of both models together.
        costs: times of the passes.
        memory: the most activations a rank may hold, in micro-batches over 1/p of the depth.

    >>> line = StagePlacement("line", 8)
    >>> makespan_bound_s(line, 20, PassTimes(1, 1, 1)), makespan_bound_s(line, 20, PassTimes(1, 1.5, 1), memory=8)
    (67.0, 80.5)
    """
    stages = _stages(placement, costs)
    count = micro_batches // placement.copies
    return max(
        _rank_bound_s(placement, rank, stages, count=count, costs=costs, memory=memory)
        for rank in range(placement.ranks)
    )


def room_for(placement: StagePlacement, stage: int, sizes: list[float], memory: float | None, count: int) -> int:
    """Return the activations of a stage that its rank can hold at once.

    A later stage of the same model on the same rank needs memory too, or none of them is ever released.
    """
    if memory is None:
        return count
    chain = stage // placement.model_stages
    later = [
        sizes[other] for other in placement.stages_of(placement.rank_of(stage))
        if other > stage and other // placement.model_stages == chain
    ]  # fmt: skip
    return min(count, math.floor((memory - max(later, default=0.0)) / sizes[stage] + _EPSILON))


def _stages(placement: StagePlacement, costs: PassTimes) -> list[_Stage]:
    """Return heads and tails from the sequence of stages alone, as for a single micro-batch."""
    sizes = sizes_of(placement, costs)
    heads, backs = [0.0] * placement.stages, [0.0] * placement.stages
    tails_f, tails_i = [0.0] * placement.stages, [0.0] * placement.stages

    def away_s(one: int, other: int) -> float:
        return costs.latency_s if placement.rank_of(one) != placement.rank_of(other) else 0.0

    for stage in range(placement.stages):
        before, size = placement.previous(stage), sizes[stage]
        tails_i[stage] = costs.weight_s * size
        if before is not None:
            heads[stage] = heads[before] + costs.forward_s * sizes[before] + away_s(before, stage)
            after_s = away_s(before, stage) + costs.inner_s * sizes[before] + tails_i[before]
            tails_i[stage] = max(tails_i[stage], after_s)
    for stage in reversed(range(placement.stages)):
        after, size = placement.next(stage), sizes[stage]
        if after is None:
            backs[stage] = heads[stage] + costs.forward_s * size
            tails_f[stage] = costs.inner_s * size + tails_i[stage]
        else:
            backs[stage] = backs[after] + costs.inner_s * sizes[after] + away_s(stage, after)
            tails_f[stage] = away_s(stage, after) + costs.forward_s * sizes[after] + tails_f[after]
    return [
        _Stage(
            size, costs.forward_s * size, costs.inner_s * size, costs.weight_s * size,
            heads[stage], backs[stage] - heads[stage], tails_f[stage], tails_i[stage],
        )
        for stage, size in enumerate(sizes)
    ]  # fmt: skip


def _rank_bound_s(
    placement: StagePlacement, rank: int, stages: list[_Stage], *, count: int, costs: PassTimes, memory: float | None
) -> float:
    sizes = [stage.size for stage in stages]
    # An overlapped cell gains this much of a pass over 1/p; half is taken from the forward, half from the backward.
    gain = (costs.whole_s - costs.both_s) / 2
    jobs: list[tuple[float, float, float]] = []
    area_s = 0.0
    for index in placement.stages_of(rank):
        stage, room = stages[index], room_for(placement, index, sizes, memory, count)
        if room < 1:
            return math.inf
        jobs += _jobs(stage, count, room, gain * stage.size, costs)
        area_s += count * stage.size * stage.life_s
    bound_s = _jackson_s(jobs)
    if memory is not None:
        bound_s = max(bound_s, min(stages[index].head_s for index in placement.stages_of(rank)) + area_s / memory)
    return bound_s


def _jobs(stage: _Stage, count: int, room: int, gain_s: float, costs: PassTimes) -> list[tuple[float, float, float]]:
    """Return (head, length, tail) of each pass of a stage; the k-th is the k-th to run, of any micro-batch.

    At most `room` are in flight: when forward k + room starts, k + 1 were released, the last of them no earlier than a
    lifetime after forward k started. From the end: when release j + room (counted from the last) ends, j + 1 forwards
    have not started, and the first of those starts no later than forward j from the last.
    """
    backward_s = stage.inner_s + stage.weight_s
    forward_s, keep = stage.forward_s - gain_s, (backward_s - gain_s) / backward_s
    starts, after_w, after_f, after_i = ([0.0] * count for _ in range(4))
    for each in range(count):
        starts[each] = stage.head_s + each * forward_s
        if each >= room:
            starts[each] = max(starts[each], starts[each - room] + stage.life_s)
            after_w[each] = after_f[each - room] + stage.forward_s
        after_f[each] = max(stage.tail_f_s, after_w[each] + stage.life_s - stage.forward_s)
        after_i[each] = max(stage.tail_i_s, after_w[each] + stage.weight_s)
    jobs = []
    for each in range(count):
        last, start_s = count - 1 - each, starts[each]
        jobs.append((start_s, forward_s, after_f[last]))
        jobs.append((start_s + stage.loop_s, stage.inner_s * keep, after_i[last]))
        jobs.append((start_s + stage.loop_s + stage.inner_s, stage.weight_s * keep, after_w[last]))
    return jobs


def _jackson_s(jobs: list[tuple[float, float, float]]) -> float:
    """Run the ready job with the longest tail first, preempted by any with a longer one; return the end.

    >>> _jackson_s([(0.0, 2.0, 0.0), (1.0, 1.0, 5.0)])
    7.0
    """
    waiting: list[tuple[float, float]] = []
    ordered = sorted(jobs)
    at_s = end_s = 0.0
    index = 0
    while index < len(ordered) or waiting:
        if not waiting:
            at_s = max(at_s, ordered[index][0])
        while index < len(ordered) and ordered[index][0] <= at_s + _EPSILON:
            heapq.heappush(waiting, (-ordered[index][2], ordered[index][1]))
            index += 1
        tail, left_s = heapq.heappop(waiting)
        until_s = min(at_s + left_s, ordered[index][0] if index < len(ordered) else math.inf)
        left_s -= until_s - at_s
        at_s = until_s
        if left_s > _EPSILON:
            heapq.heappush(waiting, (tail, left_s))
        else:
            end_s = max(end_s, at_s - tail)
    return end_s
