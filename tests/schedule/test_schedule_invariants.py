"""What holds in every world: random nodes, jobs and faults, played by an ideal executor to the end.

A failing example is printed with the line that replays it (`@reproduce_failure`), and is found again by Hypothesis.
"""

import gc
from itertools import permutations

import random_worlds
from hypothesis import given, settings

from cordee.events import AttemptPlaced, NoticeGiven, Outcome, RanksEnded
from cordee.ids import JobId
from world import S, World, job, node


@settings(max_examples=150)
@given(**random_worlds.WORLDS)
def test_every_world_comes_to_its_end_and_keeps_its_promises(**world):
    random_worlds.comes_to_its_end_and_keeps_its_promises(**world)


@settings(max_examples=60)
@given(**random_worlds.ORDERS)
def test_decide_does_not_depend_on_the_order_of_reports(**drawn):
    random_worlds.does_not_depend_on_the_order_of_reports(**drawn)


def test_a_production_gang_starts_whole_after_its_victims_left_in_any_order():
    names = ("a", "b", "c")
    for order in permutations(names):
        world = World(*(node(f"n{each}", 4) for each in names), *(job(each, 4, "preemptible") for each in names))
        world.play(until_s=2)
        world.tell(job("p", 12, "production", at_us=5 * S), job("q", 4, "preemptible"))
        world.cycle()
        for number, name in enumerate(order):
            attempt = world.state.attempts[JobId(name)]
            ids = {"job_id": JobId(name), "epoch": 1, "node": attempt.held[0].node}
            world.tell(RanksEnded(at_us=world.now_us, outcome=Outcome.CHECKPOINTED, **ids))
            placed = [event for event in world.cycle() if isinstance(event, AttemptPlaced)]
            assert [event.job_id for event in placed] == (["p"] if number == 2 else [])


def test_cycles_leave_no_garbage_in_circles():
    # The service looks for such garbage in idle moments only, and a simulation never (control/collector.py).
    up = (node(f"n{number}", 4) for number in range(6))
    world = World(*up, *(job(f"s{number}", 2 + number % 3, "preemptible") for number in range(8)))
    world.play(until_s=2)
    world.tell(job("p", 12, "production", at_us=5 * S), job("q", 2, "production"))
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        notices = [event for event in world.cycle() if isinstance(event, NoticeGiven)]
        assert len(notices) > 1  # chosen among all combinations
        world.play()
        assert gc.collect() == 0
    finally:
        if before:
            gc.enable()
