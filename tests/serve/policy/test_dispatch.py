"""The decisions about one request, from its arrival to its end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.admit import Capacity
from cordee.serve.policy.dispatch import TENANT_WAITING_MAX, Ask, Dispatcher, Tenant, Tenants, Ticket
from cordee.serve.policy.limits import Prices
from cordee.serve.policy.refusal import Refusal


def test_a_request_holds_room_until_it_ends() -> None:
    dispatcher = Dispatcher({"a": Capacity(10_000, 4), "b": Capacity(10_000, 4)})
    ticket = dispatcher.submit(Ask("t", 1000, 500), 0)
    assert isinstance(ticket, Ticket)
    assert [each.ask.prompt_tokens for each in dispatcher.dispatch(0)] == [1000]
    assert ticket.choice is not None and dispatcher.loads[ticket.choice.replica].kv_free == 10_000 - 1516
    dispatcher.first_token(ticket)
    dispatcher.finish(ticket, input_tokens=1000, cached_tokens=0, output_tokens=100)
    assert [each.kv_free for each in dispatcher.loads.values()] == [10_000, 10_000]


def _submitted(dispatcher: Dispatcher, ask: Ask, now_us: int = 0) -> Ticket:
    ticket = dispatcher.submit(ask, now_us)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def test_a_request_beyond_the_context_is_refused_with_the_numbers() -> None:
    dispatcher = Dispatcher({"a": Capacity()}, context_tokens=4096)
    refusal = dispatcher.submit(Ask("t", 4000, 200), 0)
    assert isinstance(refusal, Refusal) and refusal.status == 400
    assert refusal.message == (
        "the context is 4096 tokens, and the request has 4000 in its prompt and up to 200 in its answer"
    )


def test_what_waits_starts_when_another_one_ends() -> None:
    dispatcher = Dispatcher({"a": Capacity(4000, 1)})
    first, second = (_submitted(dispatcher, Ask("t", 100, 50)) for _ in range(2))
    assert list(dispatcher.dispatch(0)) == [first] and list(dispatcher.dispatch(0)) == []
    dispatcher.finish(first, input_tokens=100, cached_tokens=0, output_tokens=50)
    assert list(dispatcher.dispatch(1)) == [second]


def test_a_request_whose_replica_failed_goes_first_and_elsewhere() -> None:
    dispatcher = Dispatcher({"a": Capacity(10_000, 2), "b": Capacity(10_000, 2)})
    ticket = _submitted(dispatcher, Ask("t", 1000, 100))
    assert list(dispatcher.dispatch(0)) == [ticket] and ticket.choice is not None
    failed = ticket.choice.replica
    dispatcher.first_token(ticket)
    _submitted(dispatcher, Ask("t", 10, 10), 5)
    dispatcher.retry(ticket, 40, 10)
    assert dispatcher.loads[failed].kv_free == 10_000
    again = next(dispatcher.dispatch(10))
    assert again is ticket and again.choice is not None and again.choice.replica != failed
    assert 10_000 - dispatcher.loads[again.choice.replica].kv_free == 1040 + 60 + 16
    dispatcher.finish(ticket, input_tokens=1000, cached_tokens=0, output_tokens=100)
    cost = dispatcher.prices.cost_pico_usd(1000, 0, 100)
    assert dispatcher.queue.counters["t"] == cost  # charged once, though it started twice


def test_a_request_that_cannot_start_in_time_is_refused_early() -> None:
    dispatcher = Dispatcher({"a": Capacity(100_000, 1)})
    for _ in range(60):
        _submitted(dispatcher, Ask("t", 1000, 100))
    for second in range(20):  # one request a second
        (running,) = dispatcher.dispatch(second * 1_000_000)
        dispatcher.finish(running, input_tokens=1000, cached_tokens=0, output_tokens=100)
    now_us = 20_000_000
    refusal = dispatcher.submit(Ask("t", 1000, 100, deadline_us=now_us + 10_000_000), now_us)
    assert isinstance(refusal, Refusal) and refusal.code == "deadline_exceeded"
    assert refusal.message == (
        "40 requests of tenant t wait before this one; it would start in 40.0 s, and its deadline is in 10.0 s"
    )
    _submitted(dispatcher, Ask("t", 1000, 100, deadline_us=now_us + 60_000_000), now_us)
    _submitted(dispatcher, Ask("other", 1000, 100, deadline_us=now_us + 10_000_000), now_us)


def test_a_deadline_that_passes_closes_what_waits() -> None:
    dispatcher = Dispatcher({})
    ticket = _submitted(dispatcher, Ask("t", 10, 10, deadline_us=2_000_000))
    assert dispatcher.expired(1_000_000) == []
    ((over, refusal),) = dispatcher.expired(2_500_000)
    assert over is ticket and refusal.message == "the request waited 2.500 s, and its deadline is over"
    assert dispatcher.queue.size == 0


def test_a_queue_is_bounded_for_all_and_for_each() -> None:
    dispatcher = Dispatcher({})
    for _ in range(TENANT_WAITING_MAX):
        _submitted(dispatcher, Ask("t", 10, 10))
    refusal = dispatcher.submit(Ask("t", 10, 10), 0)
    assert isinstance(refusal, Refusal) and refusal.status == 503
    assert refusal.message == "2000 requests wait, 2000 of them of tenant t; the queue holds 10000, 2000 of one tenant"
    _submitted(dispatcher, Ask("other", 10, 10))


def test_a_budget_is_held_by_open_requests_and_settled_by_their_end() -> None:
    tenants = Tenants([Tenant("t", budget_micro_usd=2_000)])
    dispatcher = Dispatcher({"a": Capacity()}, tenants, prices=Prices(1_000_000, 100_000, 2_000_000))
    ticket = _submitted(dispatcher, Ask("t", 1000, 500))  # at most 1,000 + 2 * 500 micro-dollars
    assert isinstance(dispatcher.submit(Ask("t", 1, 1), 0), Refusal)
    list(dispatcher.dispatch(0))
    assert dispatcher.finish(ticket, input_tokens=1000, cached_tokens=1000, output_tokens=100) == 300 * 10**6
    _submitted(dispatcher, Ask("t", 700, 500))
    tenants.set_tenants([Tenant("t", budget_micro_usd=2_000, spent_micro_usd=1_900)])
    assert isinstance(dispatcher.submit(Ask("t", 1, 1), 0), Refusal)


def test_a_light_tenant_finds_room_that_a_heavy_one_leaves() -> None:
    dispatcher = Dispatcher({"a": Capacity(320_000, 32)})
    first = _submitted(dispatcher, Ask("light", 10, 10))
    list(dispatcher.dispatch(0))
    for _ in range(100):
        _submitted(dispatcher, Ask("heavy", 10, 10))
    assert len(list(dispatcher.dispatch(0))) == 29  # two of 32 slots are kept
    second = _submitted(dispatcher, Ask("light", 10, 10))
    assert list(dispatcher.dispatch(1)) == [second]
    dispatcher.finish(first, input_tokens=10, cached_tokens=0, output_tokens=10)


def test_a_tenant_alone_uses_all_room() -> None:
    dispatcher = Dispatcher({"a": Capacity(320_000, 32)})
    for _ in range(100):
        _submitted(dispatcher, Ask("t", 10, 10))
    assert len(list(dispatcher.dispatch(0))) == 32


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("submit", "dispatch", "finish", "cancel", "retry", "lose", "return")),
            st.integers(0, 3),
            st.integers(1, 3000),
        ),
        max_size=80,
    )
)
def test_nothing_is_lost_and_no_replica_holds_more_than_its_kv(moves: list[tuple[str, int, int]]) -> None:
    replicas = {"a": Capacity(4000, 3), "b": Capacity(6000, 8)}
    dispatcher = Dispatcher(replicas)
    tickets: list[Ticket] = []
    for now_us, (move, which, tokens) in enumerate(moves):
        started = [each for each in tickets if each.open and each.choice is not None]
        if move == "submit":
            tickets.append(_submitted(dispatcher, Ask(f"t{which}", tokens, 1 + tokens // 4, (1, which)), now_us))
        elif move == "lose":
            dispatcher.set_replicas({"b": replicas["b"]})
        elif move == "return":
            dispatcher.set_replicas(replicas)
        elif move == "cancel" and tickets:
            dispatcher.cancel(tickets[which % len(tickets)])
        elif started and move in ("finish", "retry"):
            ticket = started[which % len(started)]
            if move == "retry":
                dispatcher.retry(ticket, 1, now_us)
            else:
                dispatcher.finish(ticket, input_tokens=10, cached_tokens=0, output_tokens=tokens)
        for ticket in dispatcher.dispatch(now_us):
            dispatcher.first_token(ticket)
        waiting = [each for each in tickets if each.open and each.choice is None]
        assert dispatcher.queue.size == len(waiting)
        assert all(0 <= each.kv_free <= each.kv_tokens and each.slots_free >= 0 for each in dispatcher.loads.values())
    for ticket in tickets:
        dispatcher.cancel(ticket)
    assert dispatcher.queue.size == 0
    dispatcher.set_replicas(replicas)
    for name, load in dispatcher.loads.items():
        assert (load.kv_free, load.slots_free, load.running) == (replicas[name].kv_tokens, replicas[name].slots, 0)
