"""The decisions about one request, from its arrival to its end."""

from cordee.serve.policy.admit import Capacity
from cordee.serve.policy.dispatch import Ask, Dispatcher, Ticket


def test_a_request_holds_room_until_it_ends() -> None:
    dispatcher = Dispatcher({"a": Capacity(10_000, 4), "b": Capacity(10_000, 4)})
    ticket = dispatcher.submit(Ask("t", 1000, 500), 0)
    assert isinstance(ticket, Ticket)
    assert [each.ask.prompt_tokens for each in dispatcher.dispatch(0)] == [1000]
    assert ticket.choice is not None and dispatcher.loads[ticket.choice.replica].kv_free == 10_000 - 1516
    dispatcher.first_token(ticket)
    dispatcher.finish(ticket, input_tokens=1000, cached_tokens=0, output_tokens=100)
    assert [each.kv_free for each in dispatcher.loads.values()] == [10_000, 10_000]
