"""Rebalance a placement by a limited number of moves, if they pay for their transfers.

A GPU receives the weights of an expert for each moved slot. The search improves each layer step by step (`improve.py`);
one price for a moved slot decides where each layer stops: the time to send it, or more where moves are limited.
"""

from dataclasses import dataclass, replace

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.plan.experts.bound import least_max
from cordee.plan.experts.improve import PlacementSearch, SearchSteps
from cordee.plan.experts.noise import beyond_noise
from cordee.plan.experts.shape import ExpertPlacement
from cordee.units import format_bytes, format_duration

STEPS = 40
"""Most steps of a layer."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """The cost of a moved expert, and the value of balance.

    `expert_fraction` of the time is spent in the experts of these layers, so it shrinks with the load of the fullest
    GPU; the loads are expected to hold for `horizon_s`. The defaults: an expert of DeepSeek-V3 in FP8
    (3 x 7168 x 2048), a 400 Gbps port for each GPU; assumed are a third of the time and ten minutes.
    """

    expert_bytes: int = 3 * 7168 * 2048
    gpu_bytes_per_s: float = 50e9
    expert_fraction: float = 1 / 3
    horizon_s: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Rebalance:
    """The better placement that was found, and whether it pays.

    `after` is the present placement if it does not. Of `found`: balance of each layer, slots that differ, seconds
    during which the busiest GPU receives, seconds saved within the horizon.
    """

    before: ExpertPlacement
    found: ExpertPlacement
    balance_before: Floats
    balance_found: Floats
    layers_beyond_noise: int
    moved_slots: int
    moved_bytes: int
    transfer_s: float
    saved_s: float
    pays: bool
    sentence: str

    @property
    def moved_fraction(self) -> float:
        """The fraction of all slots that differ."""
        return self.moved_slots / self.before.slots.size

    @property
    def after(self) -> ExpertPlacement:
        """The placement to serve with."""
        return self.found if self.pays else self.before


def rebalance(
    loads: Floats,
    present: ExpertPlacement,
    costs: MoveCosts | None = None,
    *,
    moved_fraction_max: float = 0.13,
    variance: Floats | None = None,
    trust: bool = False,
) -> Rebalance:
    """Improve the present placement for these loads with few moves.

    Args:
        loads: layers x experts, tokens.
        present: the placement in use.
        costs: of moves; None: the defaults.
        moved_fraction_max: slots that may change, as a fraction of all slots of all layers.
        variance: of the loads; None: they are counts of tokens.
        trust: take the loads as exact; else layers whose imbalance may be noise are left alone.
    """
    costs = costs or MoveCosts()
    real = np.ones(len(loads), dtype=bool)
    if not trust:
        real = beyond_noise(loads, loads if variance is None else variance, present) > 1
    budget = int(moved_fraction_max * present.slots.size)
    # One layer may use more than its part of the budget, and another less.
    most = np.where(real, min(present.fleet.replicas, 2 * -(-budget // len(loads))), 0)
    search = PlacementSearch(loads, present.slots, present.fleet.domains)
    steps = search.run(least_max(loads, present.fleet), STEPS, most)
    second = costs.horizon_s * costs.expert_fraction / steps.max_load[0].sum()
    stop = _stops(steps, second, costs.expert_bytes / costs.gpu_bytes_per_s / present.fleet.gpus, budget)
    found = replace(present, slots=aligned(present.slots, steps.placed(present.slots, stop)))
    return _answer(loads, present, found, costs, int(real.sum()))


def _stops(steps: SearchSteps, second: float, price_s: float, budget: int) -> Ints:
    """Return the step at which each layer stops: the most seconds saved net of its moves, within the budget."""
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


def _answer(loads: Floats, before: ExpertPlacement, found: ExpertPlacement, costs: MoveCosts, real: int) -> Rebalance:
    old, new = (placement.gpu_loads(loads).max(axis=1) for placement in (before, found))
    changed = before.slots != found.slots
    moved = int(changed.sum())
    busiest = int(changed.sum(axis=(0, 2)).max())
    transfer_s = busiest * costs.expert_bytes / costs.gpu_bytes_per_s
    saved_s = costs.horizon_s * costs.expert_fraction * float(1 - new.sum() / old.sum())
    pays = moved > 0 and saved_s > transfer_s
    if not real:
        sentence = "do not rebalance: no layer's imbalance is more than the noise of its counts"
    elif not moved:
        sentence = "do not rebalance: no move pays for its bytes"
    else:
        gain = f"{moved:,} slots ({format_bytes(moved * costs.expert_bytes)}) take {format_duration(transfer_s)} "
        gain += f"and save {format_duration(saved_s)} in {format_duration(costs.horizon_s)}"
        sentence = f"rebalance: {gain}" if pays else f"do not rebalance: {gain}"
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
        sentence=sentence,
    )


def aligned(before: Ints, after: Ints) -> Ints:
    """Return the same experts on the same GPUs, each in its present slot if its GPU has it already."""
    slots = after.copy()
    changed = before != after
    layers, gpus = np.nonzero(changed.any(axis=2))
    # An expert that changed its slot within a GPU.
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
