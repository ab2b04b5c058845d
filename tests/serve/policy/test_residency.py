"""Models on slots: who loads, who leaves, and no thrash."""

import random
from collections import deque
from dataclasses import replace

from cordee.serve.policy.residency import KEEP, Demand, ModelSlot, copies, first_model, swaps

S = 1_000_000
LOAD = {"a": 5 * S, "b": 5 * S, "c": 5 * S}


def test_an_empty_slot_takes_the_model_that_waited_longest() -> None:
    slots = [ModelSlot("x", "a", running=1, since_us=9 * S), ModelSlot("y")]
    (swap,) = swaps(10 * S, slots, {"b": Demand(1, 9 * S), "c": Demand(3, 2 * S)}, LOAD)
    assert (swap.slot, swap.model, swap.leaves) == ("y", "c", "")
    assert swap.why == "3 requests wait for c, the oldest for 8.0 s"


def test_a_resident_or_loading_model_is_not_loaded_again() -> None:
    slots = [ModelSlot("x", "a"), ModelSlot("y", "b", loading=True), ModelSlot("z")]
    assert swaps(10 * S, slots, {"a": Demand(5, 0), "b": Demand(5, 0)}, LOAD) == []


def test_the_model_that_was_idle_longest_leaves() -> None:
    slots = [ModelSlot("x", "a", used_us=90 * S), ModelSlot("y", "b", used_us=50 * S)]
    (swap,) = swaps(100 * S, slots, {"c": Demand(1, 99 * S)}, LOAD)
    assert (swap.slot, swap.leaves) == ("y", "b")


def test_a_busy_model_stays_four_loads_and_an_idle_one_one() -> None:
    busy = ModelSlot("x", "a", since_us=100 * S, running=3, used_us=100 * S)
    demand = {"b": Demand(1, 100 * S)}
    assert swaps(119 * S, [busy], demand, LOAD) == []
    assert len(swaps(120 * S, [busy], demand, LOAD)) == 1
    idle = replace(busy, running=0, used_us=103 * S)
    assert swaps(107 * S, [idle], demand, LOAD) == []
    assert len(swaps(108 * S, [idle], demand, LOAD)) == 1


def test_a_crowded_model_gets_an_idle_slot_once_it_has_waited_for_a_load() -> None:
    slots = [ModelSlot("x", "a", running=4, used_us=100 * S), ModelSlot("y", "b", used_us=90 * S)]
    demand = {"a": Demand(7, 96 * S)}
    assert copies(100 * S, slots, demand, LOAD) == []
    (swap,) = copies(101 * S, slots, demand, LOAD)
    assert (swap.slot, swap.model, swap.leaves) == ("y", "a", "b")
    assert copies(101 * S, [replace(slots[0], running=0), slots[1]], demand, LOAD) == [], "its slot has nothing to do"
    new = [replace(slots[0], since_us=97 * S), slots[1]]
    assert copies(101 * S, new, demand, LOAD) == [], "its slot has not been ready for as long as a load"
    assert copies(101 * S, slots, demand | {"b": Demand(1, 100 * S)}, LOAD) == [], "b is wanted"
    assert copies(101 * S, [slots[0], replace(slots[1], used_us=97 * S)], demand, LOAD) == [], "b was just used"
    loading = ModelSlot("z", "a", loading=True)
    assert copies(101 * S, [*slots, loading], demand, LOAD) == [], "one copy at a time"
    assert copies(101 * S, slots, {"c": Demand(7, 0)}, LOAD) == [], "a model that no slot holds is not crowded"


def test_an_empty_slot_takes_what_is_wanted_most_for_its_slots() -> None:
    slots = [ModelSlot("x", "a"), ModelSlot("y", "a"), ModelSlot("z", "b")]
    assert first_model(("a", "b", "c"), slots, {}) == "c"
    assert first_model(("a", "b", "c"), slots, {"a": 8, "b": 3}) == "a"
    assert first_model(("a", "b", "c"), slots, {"a": 8, "b": 6}) == "b"
    assert first_model(("a", "b"), [slots[0], slots[2]], {"b": 1}) == "a", "one slot is enough for one request"
    assert first_model((), slots, {}) == ""


def test_three_models_on_two_slots_without_thrash() -> None:
    """All three are wanted all the time: each gets its turn, and loading takes a fifth of the time at most."""
    rng = random.Random(0)
    slots = {name: ModelSlot(name) for name in ("x", "y")}
    ready_us: dict[str, int] = {}
    queues: dict[str, deque[int]] = {model: deque() for model in LOAD}
    loads, longest_us, served, sent = 0, 0, 0, 0
    step, end = S // 10, 600 * S
    for now_us in range(0, end, step):
        for model in LOAD:
            if rng.random() < 0.3:
                queues[model].append(now_us)
                sent += 1
        for name, loading in slots.items():
            is_ready = loading.loading and now_us >= ready_us[name]
            slot = replace(loading, loading=False, since_us=now_us, used_us=now_us) if is_ready else loading
            slots[name] = slot
            if slot.model and not slot.loading and queues[slot.model]:
                slots[name] = replace(slot, used_us=now_us)
                for _ in range(min(2, len(queues[slot.model]))):
                    longest_us = max(longest_us, now_us - queues[slot.model].popleft())
                    served += 1
        demand = {model: Demand(len(queue), queue[0]) for model, queue in queues.items() if queue}
        for swap in swaps(now_us, list(slots.values()), demand, LOAD):
            slots[swap.slot] = ModelSlot(swap.slot, swap.model, loading=True)
            ready_us[swap.slot] = now_us + LOAD[swap.model]
            loads += 1
    # A slot stays a model for KEEP loads: 25 s with its load, so 24 times each in 600 s.
    assert loads <= 2 * (end // (5 * S * (1 + KEEP)) + 1)
    assert served >= 0.9 * sent
    assert longest_us <= 5 * S * (2 * KEEP + 2)
