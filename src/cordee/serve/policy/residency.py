"""The model that each slot of a service holds when there are more models than slots: swaps that pay, and no thrash.

A model that has loaded stays `KEEP` times as long as a load takes, or until it was idle for one: loading takes at most
1 / (1 + KEEP) of the time of a busy slot, and half of that of an idle one. Of the models that wait, the one with the
longest wait goes first; of the slots, the one whose model was not used for the longest time gives way.
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
    free = [each for each in slots if not each.loading]
    absent = [model for model, each in demand.items() if each.waiting and model not in resident]
    for model in sorted(absent, key=lambda each: (demand[each].oldest_us, each)):
        ready = [each for each in free if _gives_way(now_us, each, model, demand, load_us)]
        if not ready:
            continue
        slot = min(ready, key=lambda each: (bool(each.model), _wanted(each, demand), each.used_us, each.name))
        free.remove(slot)
        waited_s = (now_us - demand[model].oldest_us) / 1e6
        why = f"{demand[model].waiting} requests wait for {model}, the oldest for {waited_s:.1f} s"
        decided.append(Swap(slot.name, model, slot.model, why))
    return decided


def _gives_way(
    now_us: int, slot: ModelSlot, model: str, demand: Mapping[str, Demand], load_us: Mapping[str, int]
) -> bool:
    """Return whether the model of a slot has stayed long enough for another one."""
    if not slot.model:
        return True
    load = max(load_us.get(model, 0), load_us.get(slot.model, 0))
    is_idle = not _wanted(slot, demand) and now_us - max(slot.used_us, slot.since_us) >= load
    return is_idle or now_us - slot.since_us >= KEEP * load


def _wanted(slot: ModelSlot, demand: Mapping[str, Demand]) -> bool:
    return slot.running > 0 or (slot.model in demand and demand[slot.model].waiting > 0)
