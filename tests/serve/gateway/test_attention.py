"""Time in which the gateway stood still: it is no replica's silence, and uses up no time-out."""

import asyncio
import time

import pytest

from cordee.serve.gateway.attention import TICK_S, Attention


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_only_time_in_which_the_loop_turned_counts() -> None:
    clock = Clock()
    attention = Attention(clock)
    assert attention.since(90.0) == 10.0, "nobody has it measured"
    attention.look()
    for _ in range(20):
        clock.now_s += TICK_S
        attention.look()
    assert attention.since(100.0) == pytest.approx(2.0)
    clock.now_s += 5.0 + TICK_S  # The loop stands still, and has not noticed yet.
    assert attention.since(100.0) == pytest.approx(2.0 + TICK_S)
    assert attention.since(104.0) == pytest.approx(0.0)
    attention.look()
    clock.now_s += TICK_S
    assert attention.since(100.0) == pytest.approx(2.0 + 2 * TICK_S)
    assert attention.since(clock.now_s - 3.0) == pytest.approx(TICK_S), "a part of the pause"
    assert attention.since(clock.now_s) == 0.0


def test_a_time_out_leaves_a_pause_of_the_loop_out() -> None:
    """What came during the pause is read before a time-out is believed; a real silence still ends."""

    async def work() -> None:
        loop, attention = asyncio.get_running_loop(), Attention(time.monotonic)
        measuring = asyncio.create_task(attention.measure())
        await asyncio.sleep(0)
        answer = loop.create_future()

        def stand_still() -> None:
            time.sleep(15 * TICK_S)
            loop.call_soon(answer.set_result, None)

        async with attention.timeout(5 * TICK_S):
            loop.call_soon(stand_still)
            await answer
        with pytest.raises(TimeoutError):
            async with attention.timeout(5 * TICK_S):
                await asyncio.Event().wait()
        measuring.cancel()

    asyncio.run(work())
