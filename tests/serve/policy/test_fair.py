"""The fair queue: counters by cost and weight, priorities, deadlines, no starvation."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.fair import PATIENCE_US, SKIPS_MAX, FairQueue, Waiting


def _any(waiting: Waiting, wait: bool) -> bool:
    return True


def _take(queue: FairQueue, place: Callable[[Waiting, bool], bool] = _any) -> Waiting:
    taken = queue.take(place)
    assert taken is not None
    return taken


costs = st.integers(1, 1000)


@settings(max_examples=40, deadline=None)
@given(st.lists(costs, min_size=5, max_size=40), st.lists(costs, min_size=5, max_size=40), st.integers(1, 5))
def test_tenants_that_keep_waiting_differ_by_one_request_at_most(a: list[int], b: list[int], weight: int) -> None:
    """The bound of the virtual token counter's paper, Theorem 4.4, where a request is charged when it starts."""
    queue = FairQueue()
    queue.set_weight("a", weight)
    for tenant, each in (("a", a), ("b", b)):
        for cost in each:
            queue.put(Waiting(tenant, cost, None))
    served = {"a": 0.0, "b": 0.0}
    bound = max(max(a) / weight, *b)
    while queue.waiting("a", 0) and queue.waiting("b", 0):
        taken = _take(queue)
        served[taken.tenant] += taken.cost / (weight if taken.tenant == "a" else 1)
        assert abs(served["a"] - served["b"]) <= bound


def test_a_light_tenant_goes_before_the_backlog_of_a_heavy_one() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.put(Waiting("heavy", 10, None))
    for _ in range(50):
        _take(queue)
    queue.put(Waiting("light", 10, None))
    assert _take(queue).tenant == "light"


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.put(Waiting("heavy", 10, None))
    for _ in range(100):
        _take(queue)
    for _ in range(50):
        queue.put(Waiting("back", 10, None))
    turns = [_take(queue).tenant for _ in range(20)]
    assert turns.count("back") == 10


def test_a_correction_moves_the_next_turn() -> None:
    queue = FairQueue()
    for tenant in ("a", "b"):
        for _ in range(5):
            queue.put(Waiting(tenant, 10, None))
    assert _take(queue).tenant == "a"
    queue.charge("a", 25)
    assert [_take(queue).tenant for _ in range(5)] == ["b", "b", "b", "b", "a"]


def test_a_higher_priority_goes_first_whatever_the_counters_say() -> None:
    queue = FairQueue()
    queue.put(Waiting("batch", 1, None, priority=0))
    for _ in range(3):
        queue.put(Waiting("chat", 1_000, None, priority=1))
    assert [_take(queue).tenant for _ in range(4)] == ["chat", "chat", "chat", "batch"]


def test_no_lower_priority_takes_the_room_that_a_higher_one_waits_for() -> None:
    queue = FairQueue()
    queue.put(Waiting("batch", 1, None, priority=0))
    queue.put(Waiting("chat", 1, None, priority=1))
    assert queue.take(lambda each, wait: each.tenant == "batch") is None


def test_the_earliest_deadline_of_a_tenant_goes_first_and_others_have_one_in_the_end() -> None:
    queue = FairQueue()
    queue.put(Waiting("t", 1, "patient", arrival_us=0))
    queue.put(Waiting("t", 1, "late", deadline_us=9_000))
    queue.put(Waiting("t", 1, "soon", deadline_us=5_000))
    queue.put(Waiting("t", 1, "much later", deadline_us=PATIENCE_US + 1))
    assert [_take(queue).item for _ in range(4)] == ["soon", "late", "patient", "much later"]


def test_small_requests_pass_a_large_one_only_so_often() -> None:
    queue = FairQueue()
    queue.put(Waiting("t", 1, "large"))
    for _ in range(100):
        queue.put(Waiting("t", 1, "small"))
    passed = 0
    while queue.take(lambda each, wait: each.item == "small"):
        passed += 1
    assert passed == SKIPS_MAX
    assert _take(queue, lambda each, wait: not wait).item == "large"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), costs, st.booleans(), st.integers(0, 2)), max_size=40))
def test_what_was_put_is_taken_or_removed_once(moves: list[tuple[str, int, bool, int]]) -> None:
    queue = FairQueue()
    put = [Waiting(tenant, cost, number, priority) for number, (tenant, cost, _, priority) in enumerate(moves)]
    for each in put:
        queue.put(each)
    removed = [each for each, move in zip(put, moves, strict=True) if move[2]]
    for each in removed:
        queue.remove(each)
        queue.remove(each)
    taken = []
    while (each := queue.take(_any)) is not None:
        taken.append(each)
    assert queue.size == 0 and not list(queue)
    assert sorted(each.item for each in (*taken, *removed)) == list(range(len(moves)))
    assert [each.priority for each in taken] == sorted((each.priority for each in taken), reverse=True)
