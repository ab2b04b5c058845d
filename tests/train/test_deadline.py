"""What is still made durable before a deadline: a table, and what holds for all figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.train.stop.deadline import MARGIN, RESCUE_S, Choice, ExitPlan, LevelTiming, Situation, plan

NEAR, HOME = LevelTiming(name="/nvme", upload_s=2.0), LevelTiming(name="s3://b", upload_s=8.0)
# 41 is the next boundary, 1.5 s away; 30 is durable; a capture takes 0.1 s.
AT = Situation(
    left_s=18.0,
    step=41,
    boundary_s=1.5,
    step_s=2.1,
    stall_s=0.1,
    size_bytes=960_000_000,
    levels=(NEAR, HOME),
    durable_step=30,
)


UNKNOWN = (replace(NEAR, upload_s=None), replace(HOME, upload_s=None))
GOES = {"machine_stays": False}
LONG = {"boundary_s": 60.0, "step_s": 60.0}


@pytest.mark.parametrize(
    ("changes", "choice", "reach", "needs_s"),
    [
        ({}, Choice.SAVE, 2, 9.6),
        ({"durable_step": 41}, Choice.DURABLE, 2, 0.0),
        ({"near_step": 41}, Choice.SAVE, 2, 9.6),  # there is time to bring it to the store that lasts
        ({"near_step": 41, "left_s": 5.0}, Choice.DURABLE, 1, 0.0),
        ({"near_step": 41, "left_s": 5.0, **GOES}, Choice.TRY, 2, 9.6),
        ({"left_s": 11.7}, Choice.SAVE, 2, 9.6),  # 1.5 + 1.25 * 8.1 = 11.625
        ({"left_s": 11.6}, Choice.SAVE, 1, 3.6),  # the near disk is all there is time for
        ({"left_s": 11.6, **GOES}, Choice.TRY, 2, 9.6),  # and it goes with the machine
        ({"left_s": 4.0}, Choice.TRY, 1, 3.6),
        (LONG, Choice.TRY, 1, 62.1),  # and no capture
        ({**LONG, "uploading_step": 38, "busy_s": 5.0}, Choice.FINISH, 2, 5.0),
        ({**LONG, "memory_step": 38}, Choice.FINISH, 2, 8.0),
        ({**LONG, "memory_step": 38, "left_s": 5.0}, Choice.TRY, 1, 62.1),
        ({**LONG, "memory_step": 38, "uploading_step": 36, "busy_s": 5.0}, Choice.FINISH, 2, 13.0),
        ({**LONG, "memory_step": 38, "uploading_step": 36, "busy_s": 5.0, "left_s": 12.0}, Choice.FINISH, 2, 5.0),
        ({**LONG, "memory_step": 30}, Choice.TRY, 1, 62.1),  # no newer than what is durable
        ({"uploading_step": 38, "busy_s": 5.0}, Choice.SAVE, 2, 13.1),  # there is time for both, one after the other
        ({"uploading_step": 38, "busy_s": 9.0}, Choice.SAVE, 1, 11.1),
        ({"uploading_step": 38, "busy_s": 9.0, **GOES}, Choice.FINISH, 2, 9.0),
        ({"uploading_step": 38, "busy_s": 19.0}, Choice.TRY, 1, 21.1),
        ({"levels": UNKNOWN}, Choice.SAVE, 2, 1.6),  # nothing was measured: nothing speaks against it
        ({"levels": UNKNOWN, **LONG}, Choice.TRY, 1, 60.1),
        ({"levels": UNKNOWN, "planned_save_s": 8.0}, Choice.SAVE, 2, 9.6),  # the plan's figure, before the first save
        ({"levels": UNKNOWN, "planned_save_s": 48.0}, Choice.SAVE, 1, 1.6),  # it is of the store, not of the near disk
        ({"levels": UNKNOWN[1:], "planned_save_s": 48.0}, Choice.TRY, 1, 49.6),
        ({"levels": UNKNOWN[1:], "planned_save_s": 48.0, "uploading_step": 38, "busy_s": 5.0}, Choice.FINISH, 1, 5.0),
        ({"levels": (HOME,), "planned_save_s": 48.0}, Choice.SAVE, 1, 9.6),  # what was measured counts
        ({"levels": (UNKNOWN[0], HOME), "left_s": 9.0}, Choice.TRY, 1, 1.6),  # the near one may make it
        ({"levels": (HOME,), "left_s": 9.0}, Choice.TRY, 1, 9.6),
    ],
)
def test_the_table(changes: dict[str, object], choice: Choice, reach: int, needs_s: float) -> None:
    made = plan(replace(AT, **changes))  # type: ignore[arg-type]
    assert (made.choice, made.reach) == (choice, reach), made.text
    assert made.needs_s == pytest.approx(needs_s)


def test_it_says_what_decided_with_the_numbers() -> None:
    assert plan(AT).text == (
        "18.0 s left; step 2.1 s; capture 0.1 s, upload 960 MB at 120 MB/s = 8.0 s: saving at step 41"
    )
    assert plan(replace(AT, left_s=11.0)).text.endswith("= 2.0 s: saving at step 41, to /nvme only")
    assert plan(replace(AT, boundary_s=60.0, uploading_step=38, busy_s=5.0)).text == (
        "18.0 s left; step 2.1 s; the uploader is busy for 5.0 s; capture 0.1 s, upload 960 MB at 120 MB/s = 8.0 s: "
        "no new capture; that of step 38 needs 5.0 s"
    )
    assert (
        plan(replace(AT, levels=UNKNOWN, step_s=None)).text
        == "18.0 s left; no save was measured yet: saving at step 41"
    )
    assert plan(replace(AT, levels=UNKNOWN[1:], step_s=None, planned_save_s=48.0)).text == (
        "18.0 s left; no save was measured yet, its plan expects 48.0 s: "
        "saving at step 41 needs 49.6 s; trying, since nothing is lost by it"
    )


def test_deadline_plan_uploads_captures_in_memory_in_time() -> None:
    """The boundary may never come: from `turn_s` on it is not waited for."""
    held = replace(AT, memory_step=38)
    assert plan(held).turn_s == RESCUE_S + MARGIN * 8.0
    assert plan(replace(held, busy_s=3.0)).turn_s == 3.0 + RESCUE_S + MARGIN * 8.0
    assert plan(replace(AT, uploading_step=38, busy_s=3.0)).turn_s == 0.0, "the uploader has it already"
    assert plan(replace(held, near_step=38)).turn_s == 0.0, "it is no newer than what is durable"
    assert plan(replace(held, near_step=38, machine_stays=False)).turn_s == RESCUE_S + MARGIN * 8.0, "but that goes"


seconds = st.floats(0, 300)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    uploaders = sorted(draw(st.lists(seconds, min_size=1, max_size=3)))
    durable = draw(st.integers(0, 40))
    return Situation(
        left_s=draw(seconds),
        step=draw(st.integers(durable, durable + 5)),
        boundary_s=draw(seconds),
        step_s=draw(st.none() | seconds),
        stall_s=draw(st.floats(0, 5)),
        planned_save_s=draw(st.none() | seconds),
        size_bytes=draw(st.integers(0, 10**13)),
        levels=tuple(
            LevelTiming(name=f"store {i}", upload_s=None if draw(st.booleans()) else upload_s)
            for i, upload_s in enumerate(uploaders)
        ),
        busy_s=draw(seconds),
        uploading_step=draw(st.none() | st.integers(0, 50)),
        memory_step=draw(st.none() | st.integers(0, 50)),
        durable_step=durable,
        near_step=draw(st.integers(durable, durable + 3)),
        machine_stays=draw(st.booleans()),
    )


_ORDER = [Choice.TRY, Choice.FINISH, Choice.DURABLE]


def rank(made: ExitPlan) -> tuple[int, int]:
    """How good a plan is: fewer steps lost first, then how far it reaches."""
    whole = {Choice.SAVE: Choice.DURABLE}.get(made.choice, made.choice)  # no step is lost by either
    return _ORDER.index(whole), 0 if made.choice is Choice.TRY else made.reach


@given(situations(), seconds)
def test_more_time_never_makes_it_worse(now: Situation, more_s: float) -> None:
    assert rank(plan(replace(now, left_s=now.left_s + more_s))) >= rank(plan(now))


@given(situations())
def test_deadline_plan_fits_the_time_left(now: Situation) -> None:
    made = plan(now)
    if made.choice in (Choice.SAVE, Choice.FINISH):
        assert made.needs_s <= now.left_s
    if made.choice is Choice.FINISH:
        assert max(now.uploading_step or 0, now.memory_step or 0) > now.kept_step
    assert made.reach == len(now.levels) or now.machine_stays, "a disk that goes with its machine keeps nothing"
    assert f"{now.left_s:.1f} s left" in made.text


@given(situations(), seconds)
def test_a_slower_uploader_never_promises_more(now: Situation, slower_s: float) -> None:
    slow = tuple(
        replace(level, upload_s=None if level.upload_s is None else level.upload_s + slower_s) for level in now.levels
    )
    assert rank(plan(replace(now, levels=slow))) <= rank(plan(now))


@given(situations())
def test_a_capture_in_memory_is_never_worth_less_than_none(now: Situation) -> None:
    assert rank(plan(now)) >= rank(plan(replace(now, uploading_step=None, memory_step=None)))
