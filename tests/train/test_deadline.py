"""What is still made durable before a deadline: a table, and what holds for all figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.train.deadline import ROOM, Choice, Plan, Reach, Situation, plan

NEAR, HOME = Reach(name="/nvme", drain_s=2.0), Reach(name="s3://b", drain_s=8.0)
# 41 is the next boundary, 1.5 s away; 30 is durable; a capture takes 0.1 s.
AT = Situation(
    left_s=18.0,
    step=41,
    boundary_s=1.5,
    step_s=2.1,
    stall_s=0.1,
    size_bytes=960_000_000,
    reaches=(NEAR, HOME),
    durable_step=30,
)


@pytest.mark.parametrize(
    ("changes", "choice", "lacks", "needs_s"),
    [
        ({}, Choice.SAVE, 0, 9.6),
        ({"durable_step": 41}, Choice.DURABLE, 0, 0.0),
        ({"left_s": 11.7}, Choice.SAVE, 0, 9.6),  # 1.5 + 1.25 * 8.1 = 11.625
        ({"left_s": 11.6}, Choice.SAVE, 1, 3.6),  # the near disk is all there is time for
        ({"left_s": 11.6, "machine_stays": False}, Choice.TRY, 0, 9.6),  # and it goes with the machine
        ({"left_s": 4.0}, Choice.TRY, 1, 3.6),
        ({"boundary_s": 60.0, "step_s": 60.0}, Choice.TRY, 1, 62.1),  # a long step, and no capture
        ({"boundary_s": 60.0, "captured_step": 38, "busy_s": 5.0}, Choice.FINISH, 0, 5.0),  # it is being drained
        ({"boundary_s": 60.0, "captured_step": 38, "held": True}, Choice.FINISH, 0, 8.0),  # it lies in memory
        ({"boundary_s": 60.0, "captured_step": 38, "held": True, "left_s": 5.0}, Choice.FINISH, 1, 2.0),
        ({"boundary_s": 60.0, "captured_step": 38, "held": True, "left_s": 1.0}, Choice.TRY, 1, 62.1),
        ({"captured_step": 38, "busy_s": 5.0}, Choice.SAVE, 0, 13.1),  # there is time for both, one after the other
        ({"captured_step": 38, "busy_s": 9.0}, Choice.SAVE, 1, 11.1),
        ({"captured_step": 38, "busy_s": 9.0, "machine_stays": False}, Choice.FINISH, 0, 9.0),
        ({"captured_step": 38, "busy_s": 19.0}, Choice.TRY, 1, 21.1),
        (
            {"captured_step": 30, "busy_s": 9.0, "machine_stays": False},
            Choice.TRY,
            0,
            17.1,
        ),  # no newer than what is durable
        ({"reaches": ()}, Choice.SAVE, 0, 1.6),  # nothing was measured: nothing speaks against it
        ({"reaches": (), "boundary_s": 60.0}, Choice.TRY, 0, 60.1),
    ],
)
def test_the_table(changes: dict[str, object], choice: Choice, lacks: int, needs_s: float) -> None:
    made = plan(replace(AT, **changes))  # type: ignore[arg-type]
    assert (made.choice, made.lacks) == (choice, lacks), made.says
    assert made.needs_s == pytest.approx(needs_s)


def test_it_says_what_decided_with_the_numbers() -> None:
    assert plan(AT).says == (
        "18.0 s left; step 2.1 s; capture 0.1 s, drain 960 MB at 120 MB/s = 8.0 s: saving at step 41"
    )
    assert plan(replace(AT, left_s=11.0)).says.endswith("= 2.0 s: saving at step 41, to /nvme only")
    assert plan(replace(AT, boundary_s=60.0, captured_step=38, busy_s=5.0)).says == (
        "18.0 s left; step 2.1 s; the drain is busy for 5.0 s; capture 0.1 s, drain 960 MB at 120 MB/s = 8.0 s: "
        "no new capture; the one of step 38 needs 5.0 s"
    )
    assert plan(replace(AT, reaches=(), step_s=None)).says == "18.0 s left; no save was measured yet: saving at step 41"


def test_what_is_held_goes_before_it_is_too_late() -> None:
    """The boundary may never come: from `turn_s` on it is not waited for."""
    held = replace(AT, captured_step=38, held=True, machine_stays=False)
    assert plan(held).turn_s == ROOM * HOME.drain_s
    assert plan(replace(held, machine_stays=True)).turn_s == ROOM * NEAR.drain_s
    assert plan(replace(held, busy_s=3.0)).turn_s == 3.0 + ROOM * HOME.drain_s
    assert plan(replace(held, held=False, busy_s=3.0)).turn_s == 0.0, "the drain has it already"
    assert plan(replace(held, captured_step=30)).turn_s == 0.0, "it is no newer than what is durable"


seconds = st.floats(0, 300)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    drains = sorted(draw(st.lists(seconds, max_size=3)))
    durable = draw(st.integers(0, 40))
    return Situation(
        left_s=draw(seconds),
        step=draw(st.integers(durable, 50)),
        boundary_s=draw(seconds),
        step_s=draw(st.none() | seconds),
        stall_s=draw(st.floats(0, 5)),
        size_bytes=draw(st.integers(0, 10**13)),
        reaches=tuple(Reach(name=f"tier {i}", drain_s=drain_s) for i, drain_s in enumerate(drains)),
        busy_s=draw(seconds),
        captured_step=draw(st.none() | st.integers(0, 50)),
        held=draw(st.booleans()),
        durable_step=durable,
        machine_stays=draw(st.booleans()),
    )


_ORDER = [Choice.TRY, Choice.FINISH, Choice.SAVE, Choice.DURABLE]


def rank(made: Plan) -> tuple[int, int]:
    """How good a plan is: fewer steps lost first, then how far it reaches."""
    return _ORDER.index(made.choice), -made.lacks if made.choice is not Choice.TRY else 0


@given(situations(), seconds)
def test_more_time_never_makes_it_worse(now: Situation, more_s: float) -> None:
    assert rank(plan(replace(now, left_s=now.left_s + more_s))) >= rank(plan(now))


@given(situations())
def test_what_is_chosen_fits(now: Situation) -> None:
    made = plan(now)
    if made.choice in (Choice.SAVE, Choice.FINISH):
        assert made.needs_s <= now.left_s
    if made.choice is Choice.FINISH:
        assert now.captured_step is not None and now.durable_step < now.captured_step
    assert 0 <= made.lacks < max(1, len(now.reaches))
    assert made.lacks == 0 or now.machine_stays, "a disk that goes with its machine keeps nothing"
    assert f"{now.left_s:.1f} s left" in made.says


@given(situations(), seconds)
def test_a_slower_drain_never_promises_more(now: Situation, slower_s: float) -> None:
    slow = tuple(replace(reach, drain_s=reach.drain_s + slower_s) for reach in now.reaches)
    assert rank(plan(replace(now, reaches=slow))) <= rank(plan(now))


@given(situations())
def test_a_capture_in_memory_is_never_worth_less_than_none(now: Situation) -> None:
    assert rank(plan(now)) >= rank(plan(replace(now, captured_step=None, held=False)))
