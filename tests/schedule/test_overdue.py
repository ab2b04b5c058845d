"""Overdue jobs that are larger than their allowance: they take turns, get through, and hold no small cluster."""

import pytest

from cordee.events import AttemptPlaced, NoticeGiven
from cordee.ids import JobId
from cordee.schedule import Policy
from cordee.schedule.state.records import NEVER
from world import S, World, job, node

STANDARD = 1


def test_a_gang_larger_than_the_allowance_takes_turns_by_what_the_allowance_would_have_given_it():
    policy = Policy(patience_us=1000 * S, patience_fraction=0.5)
    nodes = (node(f"n{each}") for each in range(8))
    world = World(*nodes, job("runs", 48), job("large", 40, at_us=20 * S), policy=policy, work={"runs": 10**6})
    world.play(until_s=30)
    allowances = world.state.allowances()
    assert allowances.gpus(STANDARD) == 0.5 * 64 * 64 / (48 + 40)  # 23: no room for a gang of 48 beside them
    assert allowances.counted_gpus(STANDARD, 1) == 64
    assert allowances.wait_us(allowances.ratio(STANDARD, 0)) == 1000 * S  # without GPUs it keeps none from starting
    assert allowances.wait_us(allowances.ratio(STANDARD, 1)) == allowances.wait_us(allowances.ratio(STANDARD, 64))
    world = World(*(node(f"n{each}") for each in range(8)), job("a", 32), policy=policy, work={"a": 10**6})
    world.play(until_s=10).later(*(job(f"j{each}", 32, at_us=20 * S) for each in range(4))).play(until_s=30)
    allowances = world.state.allowances()
    allowance = allowances.gpus(STANDARD)
    assert allowance < 16 and allowances.counted_gpus(STANDARD, 1) == 1  # a gang of 32 fits beside what they hold
    assert allowances.wait_us(allowances.ratio(STANDARD, 1), used_us=500 * S) == 1000 * S
    assert allowances.turn_us(STANDARD, 1, 1000 * S, 500 * S) == NEVER
    used_us = 5000 * S
    wait_us = allowances.wait_us(allowances.ratio(STANDARD, 32), used_us)
    assert allowance * (wait_us + used_us) == pytest.approx(32 * (used_us + 1000 * S), rel=0.001)
    turn_us = allowances.turn_us(STANDARD, 32, wait_us, used_us)
    assert allowance * (wait_us + used_us + turn_us) == pytest.approx(32 * (used_us + turn_us), rel=0.001)
    assert turn_us > 1000 * S


def test_an_overdue_gang_keeps_a_small_cluster_for_its_turn_and_not_until_it_ends():
    policy = Policy(patience_us=5000 * S, levels_gpu_us=(8 * 1000 * S,))
    names = [f"j{each:02}" for each in range(60)]
    world = World(node("n1"), job("gang", 8), policy=policy, work=dict.fromkeys(names, 700) | {"gang": 50_000})
    world.later(*(job(name, 8, at_us=(500 + each * 1000) * S) for each, name in enumerate(names)))
    world.play(until_s=40_000)
    gang = [event for event in world.log if getattr(event, "job_id", "") == "gang"]
    turns = [event.at_us for event in gang if isinstance(event, AttemptPlaced)]
    left = [event.at_us for event in gang if isinstance(event, NoticeGiven)]
    ran_us = [end - begin for begin, end in zip(turns, left, strict=True)]
    assert max(ran_us[:-1]) < 2000 * S  # its ordinary turns end with their time slice
    assert 5000 * S < ran_us[-1] < 20_000 * S  # of 50,000 s
    assert all(world.state.jobs[JobId(name)].ended for name in names[:15])  # they waited for that turn, and no longer
    assert world.play(until_s=100_000).phase("gang") == "done"
