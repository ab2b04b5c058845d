"""Virtual time: what is due first happens first, and nothing happens in the past."""

import random

import pytest

from cordee.simulate.engine import Engine


def test_time_then_priority_then_the_order_of_asking() -> None:
    engine, done = Engine(), []
    asked = [
        (30, 0, "last"),
        (10, 1, "after its peers"),
        (10, 0, "first"),
        (10, 0, "second"),
        (20, -1, "before"),
        (20, 0, "then"),
    ]
    for at_us, priority, name in asked:
        engine.at(at_us, lambda name=name: done.append((engine.now_us(), name)), priority=priority)
    engine.advance(25)
    assert done == [(10, "first"), (10, "second"), (10, "after its peers"), (20, "before"), (20, "then")]
    assert engine.now_us() == 25
    assert engine.next_us() == 30


def test_actions_scheduled_for_now_run_in_the_same_advance() -> None:
    engine, done = Engine(100), []
    engine.at(110, lambda: engine.at(110, lambda: done.append(engine.now_us())))
    engine.advance(110)
    assert done == [110]
    assert engine.next_us() is None


def test_the_past_is_closed() -> None:
    engine = Engine(100)
    with pytest.raises(AssertionError, match="before now"):
        engine.at(99, lambda: None)
    with pytest.raises(AssertionError, match="backwards"):
        engine.advance(99)


def test_order_does_not_depend_on_how_the_heap_was_filled() -> None:
    rng = random.Random(7)
    moments = [(rng.randrange(50), rng.randrange(3)) for _ in range(300)]
    engine, done = Engine(), []
    for number, (at_us, priority) in enumerate(moments):
        engine.at(at_us, lambda key=(at_us, priority, number): done.append(key), priority=priority)
    engine.advance(50)
    assert done == sorted((at_us, priority, number) for number, (at_us, priority) in enumerate(moments))
