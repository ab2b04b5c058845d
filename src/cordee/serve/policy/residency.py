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
        decided.append(Swap(slot.name, model, slot.model, _reason(now_us, model, demand[model])))
    return decided


def copies(
    now_us: int, slots: Sequence[ModelSlot], demand: Mapping[str, Demand], load_us: Mapping[str, int]
) -> list[Swap]:
    """Return the idle slots that begin to load a model which others hold, because it has more requests than room.

    All its slots have open requests, and its oldest one has waited there for as long as a load takes: what they do not
    start until then pays for one more.
    """
    decided: list[Swap] = []
    loading = {each.model for each in slots if each.loading}
    crowded = [model for model, each in demand.items() if each.waiting and model not in loading]
    for model in sorted(crowded, key=lambda each: (demand[each].oldest_us, each)):
        others = [each for each in slots if each.model not in ("", model) and not each.loading]
        idle = [each for each in others if _is_idle(now_us, each, model, demand, load_us)]
        holders = [each for each in slots if each.model == model]
        if not holders or not all(each.running for each in holders):
            continue  # The gateway has not learned of them yet.
        if now_us - max(demand[model].oldest_us, *(each.since_us for each in holders)) < load_us.get(model, 0):
            continue
        slot = min(idle, key=lambda each: (each.used_us, each.name), default=None)
        if slot is not None and all(slot.name != each.slot for each in decided):
            decided.append(Swap(slot.name, model, slot.model, _reason(now_us, model, demand[model])))
    return decided


def first_model(models: Sequence[str], slots: Sequence[ModelSlot], requests: Mapping[str, int]) -> str:
    """Return the model for one more slot: the one with the most whole requests a slot, then with the fewest slots.

    Args:
        models: of equal ones the first is taken; "" is returned without any.
        slots: those that hold one.
        requests: by model, those that wait or run.
    """

    def rank(model: str) -> tuple[int, int]:
        holders = sum(each.model == model for each in slots)
        return -(requests.get(model, 0) // (holders + 1)), holders

    return min(models, key=rank, default="")


def _reason(now_us: int, model: str, demand: Demand) -> str:
    wait = "request waits" if demand.waiting == 1 else "requests wait"
    return f"{demand.waiting} {wait} for {model}, the oldest for {(now_us - demand.oldest_us) / 1e6:.1f} s"


def _gives_way(
    now_us: int, slot: ModelSlot, model: str, demand: Mapping[str, Demand], load_us: Mapping[str, int]
) -> bool:
    """Return whether the model of a slot has stayed long enough for another one."""
    if not slot.model:
        return True
    load = max(load_us.get(model, 0), load_us.get(slot.model, 0))
    return _is_idle(now_us, slot, model, demand, load_us) or now_us - slot.since_us >= KEEP * load


def _is_idle(
    now_us: int, slot: ModelSlot, model: str, demand: Mapping[str, Demand], load_us: Mapping[str, int]
) -> bool:
    """Return whether no request of a slot's model was open or waited for as long as a load takes."""
    load = max(load_us.get(model, 0), load_us.get(slot.model, 0))
    return not _wanted(slot, demand) and now_us - max(slot.used_us, slot.since_us) >= load


def _wanted(slot: ModelSlot, demand: Mapping[str, Demand]) -> bool:
    return slot.running > 0 or (slot.model in demand and demand[slot.model].waiting > 0)
