"""The model that each slot of a service holds when there are more models than slots: swaps that pay, and no thrash.

A model that has loaded stays at least `KEEP` times as long as it took to load, so loading takes at most
1 / (1 + KEEP) of a slot's time. Of the models that wait, the one with the longest wait goes first; of the slots, one
whose model nobody asks for gives way first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEEP = 4.0
"""Time that a model stays, in times of its load, while another one waits for its slot."""


@dataclass(frozen=True, slots=True)
class ModelSlot:
    """A place for one model.

    Attributes:
        model: that it holds or loads; empty: none.
        since_us: when the model was ready.
        loading: it is not ready yet.
        running: open requests of the model there.
        used_us: when the last request of the model began or ended there.
    """

    name: str
    model: str = ""
    since_us: int = 0
    loading: bool = False
    running: int = 0
    used_us: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests that wait for one model: their number, and since when the oldest waits."""

    waiting: int
    oldest_us: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Load `model` in `slot`, in place of `leaves` (empty: none) after its open requests have ended."""

    slot: str
    model: str
    leaves: str
    why: str


def swaps(
    now_us: int, slots: Sequence[ModelSlot], demand: Mapping[str, Demand], load_us: Mapping[str, int]
) -> list[Swap]:
    """Return the swaps to begin now."""
    decided: list[Swap] = []
    resident = {each.model for each in slots}
    free = {each.name: each for each in slots if not each.loading}
    absent = [model for model, each in demand.items() if each.waiting and model not in resident]
    for model in sorted(absent, key=lambda each: (demand[each].oldest_us, each)):
        slot = min(free.values(), key=lambda each: _order(each, demand), default=None)
        if slot is None:
            break
        wanted = (slot.model in demand and demand[slot.model].waiting > 0) or slot.running > 0
        stays_us = KEEP * max(load_us.get(model, 0), load_us.get(slot.model, 0))
        if slot.model and wanted and now_us - slot.since_us < stays_us:
            break
        del free[slot.name]
        waited_s = (now_us - demand[model].oldest_us) / 1e6
        decided.append(
            Swap(
                slot.name, model, slot.model, f"{demand[model].waiting} requests wait, the oldest for {waited_s:.1f} s"
            )
        )
    return decided


def _order(slot: ModelSlot, demand: Mapping[str, Demand]) -> tuple[bool, bool, int, str]:
    waits = slot.model in demand and demand[slot.model].waiting > 0
    return (bool(slot.model), waits or slot.running > 0, slot.since_us if waits else slot.used_us, slot.name)
