"""Levels that are learnt: where jobs that received more end sooner, nobody is preempted for what it received."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import random_worlds
from hypothesis import given, settings
from test_saved_state import assert_equal, folded, read_back

from cordee.events import JobPrioritized
from cordee.ids import JobId
from cordee.schedule import Policy, State
from cordee.schedule.state import history
from cordee.schedule.state import state as state_module
from cordee.schedule.state.history import LADDER
from cordee.schedule.state.order import LEVEL_BITS
from world import HOUR, S, World, job, node

LONG = 20 * HOUR // S  # 160 GPU-hours on 8 GPUs: on the level from 16 to 256


def taught(count: int = 14) -> World:
    """A world in which all jobs ended after 160 GPU-hours, while one waits that received 48."""
    names = [f"j{each:02}" for each in range(count)]
    jobs = (job(each, 8, "production") for each in names)
    work = dict.fromkeys(names, LONG) | {"old": 10**7, "new": 10**6}
    world = World(node("n1"), job("old", 8), *jobs, work=work)
    return world.play(until_s=count * LONG + 3600)


@contextmanager
def ladder(bounds):
    """Have these bounds instead, and learn at each end."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (history, state_module):
            patch.setattr(module, "LADDER", bounds)
        patch.setattr(history, "_FIRST_ENDS", 0.001)
        yield


def test_a_level_on_which_no_job_ends_is_one_with_the_next_on_which_many_do():
    assert State().levels_gpu_us == LADDER
    assert taught().state.levels_gpu_us == (LADDER[0], *LADDER[2:])
    fixed = replace(Policy(), levels_gpu_us=LADDER)
    state = taught().state
    state.use(fixed)
    assert state.levels_gpu_us == LADDER


def test_what_was_learnt_is_read_back_with_the_order_that_follows():
    world = taught()
    whole, again = folded(world.log), read_back(folded(world.log))
    assert whole.state.levels_gpu_us == again.state.levels_gpu_us == (LADDER[0], *LADDER[2:])
    assert whole.state.running.levels == again.state.running.levels
    assert_equal(whole, again, world.now_us)
    for cut in range(0, len(world.log), 23):
        some = read_back(folded(world.log[:cut]))
        assert_equal(folded(world.log), folded(world.log[cut:], some), world.now_us)


@settings(max_examples=40)
@given(**random_worlds.WORLDS)
def test_every_world_keeps_its_promises_while_levels_change(**world):
    with ladder(tuple(each * S for each in (20, 80, 320, 1280, 5120, 20480))):
        random_worlds.comes_to_its_end_and_keeps_its_promises(**world)


def test_waiting_jobs_are_ordered_by_new_levels_and_a_place_that_people_gave_keeps_its_level():
    with ladder(tuple(each * S for each in (100, 1000, 10_000, 10**6, 10**7, 10**8))):
        names = [f"j{each:02}" for each in range(12)]
        later = [job(each, 1, "production", at_us=2000 * S) for each in names]
        work = dict.fromkeys(names, 5000) | {"old": 10**7, "new": 10**7, "last": 10**7}
        world = World(node("n1", 1), job("old", 1), work=work)
        world.later(*later, job("new", 1, at_us=2100 * S), job("last", 1, at_us=2200 * S)).play(until_s=2300)
        waiting = world.state.waiting
        level_of = lambda name: waiting.place(JobId(name)).standing >> LEVEL_BITS  # noqa: E731
        assert [level_of(each) for each in ("old", "new", "last")] == [2, 0, 0]
        exchange = {"job_id": JobId("new"), "place_of": JobId("old"), "by": "ann"}
        world.tell(JobPrioritized(at_us=world.now_us, **exchange))
        assert [level_of(each) for each in ("old", "new", "last")] == [0, 2, 0]
        world.play(until_s=40_000)
        assert world.state.levels_gpu_us[:2] == (100 * S, 10_000 * S)  # 2,000 s and 5,000 s are on one level now
        assert [level_of(each) for each in ("old", "new", "last")] == [0, 1, 0]
        assert waiting.standing(JobId("old")) >> LEVEL_BITS == 1
        column = world.state.running.rows.ints[f"lost_{10_000 * S}_us"]
        assert (world.state.running.lost_us(1) == column).all()
