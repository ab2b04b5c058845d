"""Decisions of retrieval and generation, and the forecast that plays them."""

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.rag_forecast import (
    RagProfile,
    RagSetup,
    even_arrivals,
    fair_speeds,
    forecast,
    plan_memory,
)
from cordee.serve.policy.retrieval import (
    PATIENCE_US,
    RetrievalRules,
    WaitingQuery,
    batch_of,
    next_load,
    next_search,
    to_pin,
    to_release,
)

MB = 10**6
SIZES = dict.fromkeys(range(1, 17), 16 * MB)
PROFILE = RagProfile(
    256 * MB, (0.005, 0.001), {1: 0.10, 2: 0.14, 4: 0.22, 8: 0.43}, 0.002,
    engine_bytes=100 * MB, slot_bytes=20 * MB, process_bytes=80 * MB,
)  # fmt: skip


def waits(since_us: int, *wants: int) -> WaitingQuery:
    return WaitingQuery(since_us, frozenset(wants))


def test_what_ends_most_waits_is_loaded_first_until_the_oldest_has_waited_long() -> None:
    waiting = [waits(0, 1, 2, 3), waits(5, 4), waits(6, 4, 5)]
    assert next_load(10, waiting, ()) == 4 and next_load(10, waiting, (4,)) == 5
    assert next_load(PATIENCE_US + 1, waiting, ()) == 1
    assert next_load(10, waiting, (), RetrievalRules(together=False)) == 1
    assert next_load(10, waiting, {1, 2, 3, 4, 5}) is None and next_load(10, [waits(0)], ()) is None


def test_passing_partitions_are_searched_first_and_nothing_wanted_is_given_up() -> None:
    waiting = [waits(0, 1, 2), waits(1, 2)]
    assert next_search(waiting, {1, 2}, ()) == 2 and next_search(waiting, {1, 2}, {2}) == 1
    assert next_search(waiting, {3}, ()) is None
    assert to_release(waiting, {1: 5, 2: 1}, ()) is None
    assert to_release(waiting, {3: 5, 4: 1, 5: 0}, {5}) == 4
    assert batch_of({7: waits(3, 1), 8: waits(1, 1), 9: waits(0, 2)}, 1) == [8, 7]


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 20), st.floats(0, 100)), st.integers(0, 400), st.sets(st.integers(1, 16)))
def test_pins_leave_room_for_two_buffers(popularity: dict[int, float], budget_mb: int, now: set[int]) -> None:
    pinned = to_pin(SIZES, popularity, budget_mb * MB, now)
    held = sum(SIZES[each] for each in pinned)
    assert held <= max(0, budget_mb * MB - 2 * 16 * MB) or pinned == SIZES.keys()
    assert to_pin(SIZES, popularity, budget_mb * MB, pinned) == pinned  # No flapping.


def test_a_scan_that_is_shared_serves_any_rate_and_serial_does_not() -> None:
    setup = RagSetup(SIZES, 80 * MB, 4)
    calm, busy = (
        mean(each.retrieval_s for each in forecast(PROFILE, setup, even_arrivals(rate, 60))) for rate in (0.5, 8)
    )
    assert 0.6 < calm < 1.1 and busy < 1.3 * calm
    alone = forecast(PROFILE, setup, [0.0])[0]
    # All 16 are loaded once, one after the other, and the last one is searched: 16 x 62.5 ms + 5 ms.
    assert abs(alone.retrieval_s - (16 * 0.0625 + 0.005 + 0.002)) < 0.002
    assert abs(alone.generation_s - 0.10) < 1e-9 and alone.wait_s == 0


def test_both_stages_divide_the_processor() -> None:
    # Two queries 1 s apart; the second one is searched while the first one's answer is generated.
    setup, arrivals = RagSetup({1: 16 * MB}, 16 * MB, 1), [0.0, 1.0]
    busy = replace(PROFILE, generation_s={1: 1.0}, engine_cores=1.0, search_s=(0.2, 0.0), load_cores=0.5)
    first, second = forecast(busy, setup, arrivals)
    # The partition is there: 2 ms to embed, 0.2 s to search; then the answer, alone until 1.002 s.
    assert abs(first.retrieval_s - 0.202) < 1e-6
    # The search takes twice its time, and the answer gives as much.
    assert abs(second.retrieval_s - (0.002 + 2 * 0.2)) < 1e-6 and abs(first.generation_s - (1.0 + 0.2)) < 1e-6
    enough = replace(busy, cores=2.0)
    first, second = forecast(enough, setup, arrivals)
    assert abs(second.retrieval_s - 0.202) < 1e-6 and abs(first.generation_s - 1.0) < 1e-6


@given(st.floats(0.1, 16), st.lists(st.floats(0.0, 8), max_size=6))
def test_a_processor_is_used_as_far_as_it_is_wanted(cores: float, wanted: list[float]) -> None:
    got = [speed * each for speed, each in zip(fair_speeds(cores, wanted), wanted, strict=True)]
    assert sum(got) == pytest.approx(min(cores, sum(wanted)))
    # Who gets less than it wants gets no less than any other.
    assert all(each >= max(got) - 1e-9 for each, want in zip(got, wanted, strict=True) if each < want - 1e-9)


def test_each_request_of_a_forecast_has_its_time() -> None:
    arrivals = even_arrivals(3.0, 50)
    for rules in (RetrievalRules(), RetrievalRules(False, False, False, False, False)):
        found = forecast(PROFILE, RagSetup(SIZES, 40 * MB, 2, rules), arrivals)
        assert len(found) == 50 and all(each.wait_s >= -1e-6 and each.retrieval_s > 0 for each in found)
        assert all(each.generation_s > 0.099 for each in found)


def test_memory_goes_where_it_saves_most() -> None:
    arrivals = even_arrivals(2.0, 40)
    assert plan_memory(PROFILE, SIZES, 150 * MB, arrivals) is None
    small = plan_memory(PROFILE, SIZES, 300 * MB, arrivals)
    large = plan_memory(PROFILE, SIZES, 600 * MB, arrivals)
    assert small is not None and large is not None and large.latency_s < small.latency_s
    for plan, budget in ((small, 300 * MB), (large, 600 * MB)):
        assert plan.engine_bytes + plan.process_bytes + plan.partition_bytes <= budget
        assert min(latency for _, latency in plan.tried) == plan.latency_s
    assert large.partition_bytes == sum(SIZES.values())  # All partitions fit beside a slot or more.
    empty = plan_memory(PROFILE, {}, 300 * MB, arrivals)
    assert empty is not None and empty.partition_bytes == 0, "an index that has no document yet"
    given = plan_memory(PROFILE, SIZES, 600 * MB, arrivals, slots=(8,))
    assert given is not None and given.slots == 8
