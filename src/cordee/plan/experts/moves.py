"""From the present placement to a better one: bounded moves, what they cost, and whether they pay.

Each moved slot is an expert's weights that some GPU has to receive. The search improves each layer step by step
(`improve.py`); here is decided where each layer stops, by one price for a moved slot: the time to send it, or more if
the bound on moves asks for it.
"""

from dataclasses import dataclass, replace

import numpy as np

from cordee.plan.experts.bound import least_max
from cordee.plan.experts.drift import beyond_noise
from cordee.plan.experts.improve import Search, Steps
from cordee.plan.experts.shape import Floats, Ints, Placement
from cordee.units import format_bytes, format_duration

STEPS = 40
"""Steps of a layer at most."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a moved expert costs, and what balance brings.

    `expert_fraction` of the time is in the experts of these layers, so it shrinks with their fullest GPU; the loads are
    expected to stay like this for `horizon_s`. The defaults: an expert of DeepSeek-V3 in FP8 (3 x 7168 x 2048), one
    400 Gbps port for each GPU, and assumed: a third of the time, ten minutes.
    """

    expert_bytes: int = 3 * 7168 * 2048
    gpu_bytes_per_s: float = 50e9
    expert_fraction: float = 1 / 3
    horizon_s: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Rebalance:
    """What was found, and the answer. `after` is the present placement where the answer is no.

    `found` is the better placement in either case; its numbers are here: balance of each layer under the loads, slots
    that differ, seconds that the busiest GPU receives, seconds that the horizon is shorter by.
    """

    before: Placement
    found: Placement
    balance_before: Floats
    balance_found: Floats
    layers_beyond_noise: int
    moved_slots: int
    moved_bytes: int
    transfer_s: float
    saved_s: float
    pays: bool
    says: str

    @property
    def after(self) -> Placement:
        """The placement to serve with."""
        return self.found if self.pays else self.before


def rebalance(
    loads: Floats,
    present: Placement,
    costs: Costs | None = None,
    *,
    moved_share_max: float = 0.13,
    variance: Floats | None = None,
    trust: bool = False,
) -> Rebalance:
    """Improve the present placement for these loads with few moves.

    Args:
        loads: layers x experts, tokens.
        present: what serves now.
        costs: of a move; None: the defaults.
        moved_share_max: slots that may change, as a share of all slots of all layers.
        variance: of the loads; None: they are counts of tokens.
        trust: take the loads as they are; otherwise layers whose imbalance may be noise stay as they are.
    """
    costs = costs or Costs()
    real = np.ones(len(loads), dtype=bool)
    if not trust:
        real = beyond_noise(loads, loads if variance is None else variance, present) > 1
    budget = int(moved_share_max * present.slots.size)
    # One layer may use more than its part of the budget, and another less.
    most = np.where(real, min(present.fleet.replicas, 2 * -(-budget // len(loads))), 0)
    search = Search(loads, present.slots, present.fleet.domains)
    steps = search.run(least_max(loads, present.fleet), STEPS, most)
    second = costs.horizon_s * costs.expert_fraction / steps.max_load[0].sum()
    stop = _stops(steps, second, costs.expert_bytes / costs.gpu_bytes_per_s / present.fleet.gpus, budget)
    found = replace(present, slots=aligned(present.slots, steps.placed(present.slots, stop)))
    return _answer(loads, present, found, costs, int(real.sum()))


def _stops(steps: Steps, second: float, price_s: float, budget: int) -> Ints:
    """The step at which each layer stops: the most seconds saved less the price of its moves, within the budget."""
    saved_s = (steps.max_load[0] - steps.max_load) * second

    def at(price_s: float) -> tuple[Ints, int]:
        stop: Ints = (saved_s - price_s * steps.moved).argmax(axis=0)
        return stop, int(np.take_along_axis(steps.moved, stop[None], axis=0).sum())

    stop, moved = at(price_s)
    if moved <= budget:
        return stop
    low, high = price_s, max(price_s, float(saved_s.max())) + 1.0
    for _ in range(40):
        middle = (low + high) / 2
        _, moved = at(middle)
        low, high = (middle, high) if moved > budget else (low, middle)
    return at(high)[0]


def _answer(loads: Floats, before: Placement, found: Placement, costs: Costs, real: int) -> Rebalance:
    old, new = (placement.gpu_loads(loads).max(axis=1) for placement in (before, found))
    changed = before.slots != found.slots
    moved = int(changed.sum())
    busiest = int(changed.sum(axis=(0, 2)).max())
    transfer_s = busiest * costs.expert_bytes / costs.gpu_bytes_per_s
    saved_s = costs.horizon_s * costs.expert_fraction * float(1 - new.sum() / old.sum())
    pays = moved > 0 and saved_s > transfer_s
    if not real:
        says = "do not rebalance: no layer's imbalance is more than the noise of its counts"
    elif not moved:
        says = "do not rebalance: no move pays for its bytes"
    else:
        gain = f"{moved:,} slots ({format_bytes(moved * costs.expert_bytes)}) take {format_duration(transfer_s)} "
        gain += f"and save {format_duration(saved_s)} in {format_duration(costs.horizon_s)}"
        says = f"rebalance: {gain}" if pays else f"do not rebalance: {gain}"
    return Rebalance(
        before=before,
        found=found,
        balance_before=before.balance(loads),
        balance_found=found.balance(loads),
        layers_beyond_noise=real,
        moved_slots=moved,
        moved_bytes=moved * costs.expert_bytes,
        transfer_s=transfer_s,
        saved_s=saved_s,
        pays=pays,
        says=says,
    )


def aligned(before: Ints, after: Ints) -> Ints:
    """The same experts on the same GPUs, each in the slot it has now if its GPU has it now."""
    slots = after.copy()
    changed = before != after
    layers, gpus = np.nonzero(changed.any(axis=2))
    # An expert that left one slot of a GPU and came to another one.
    left = np.where(changed[layers, gpus], before[layers, gpus], -1)
    came = np.where(changed[layers, gpus], after[layers, gpus], -2)
    stays = (left[:, :, None] == came[:, None, :]).any(axis=(1, 2))
    for layer, gpu in zip(layers[stays], gpus[stays], strict=True):
        free = after[layer, gpu].tolist()
        kept: list[int | None] = []
        for expert in before[layer, gpu].tolist():
            kept.append(expert if expert in free else None)
            if expert in free:
                free.remove(expert)
        slots[layer, gpu] = [free.pop(0) if expert is None else expert for expert in kept]
    return slots
