"""World before -> events, for the cycle: order, reservation, backfill, waiting for victims, errors."""

from dataclasses import replace

import pytest

from cordee.events import Capacity, NodeDown, Queue, QueuesSet, ServerUp
from cordee.ids import JobId
from cordee.schedule import NAMED, Policy, State, decide, enact
from cordee.schedule.cycle import claims as claims_module
from cordee.schedule.cycle import settle as settle_module
from cordee.schedule.state.transitions import apply
from world import S, World, brief, job, node, ranks_ended

FIRST_COME = Policy(order="fifo")  # a reservation for the first that waits, however short it has waited


def end(world: World, name: str, outcome: str, on: str | None = None) -> list[str]:
    world.tell(*ranks_ended(world, name, outcome, on))
    return brief(world.cycle())


def test_the_order_is_tier_then_priority_then_submission_then_name():
    jobs = [
        job("late", 1, at_us=2), job("b", 1, at_us=1), job("a", 1, at_us=1), job("low", 1, "preemptible"),
        job("prod", 1, "production", at_us=3), job("first", 1, priority=5, at_us=9),
    ]  # fmt: skip
    names = [event.job_id for event in World(node("n1"), *jobs).cycle()]
    assert names == ["prod", "first", "a", "b", "late", "low"]


def test_a_preempted_job_keeps_its_turn():
    world = World(node("n1"), job("a", 8), job("b", 8, at_us=5 * S), policy=FIRST_COME)
    world.play(until_s=6)
    world.tell(job("p", 8, "production", at_us=10 * S)).cycle()
    assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed", "place p n1:8"]
    assert end(world, "p", "finished") == ["attempt p.1 finished", "job p done", "place a n1:8"]


def test_a_preemptor_gets_the_gpus_of_its_victims_as_a_whole():
    """One victim leaves before the other: no job behind the preemptor takes what is free meanwhile."""
    world = World(node("n1"), node("n2"), job("a", 8, "preemptible"), job("b", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 16, "production", at_us=5 * S), job("s", 8, "standard"), job("small", 1, "preemptible"))
    assert brief(world.cycle()) == ["notice a preempt for p", "notice b preempt for p"]
    assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed"]
    assert end(world, "b", "checkpointed") == ["attempt b.1 checkpointed", "place p n1:8+n2:8"]


def test_no_second_notice_while_victims_leave():
    world = World(node("n1"), node("n2"), job("a", 8, "preemptible"), job("b", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", at_us=5 * S))
    assert brief(world.cycle()) == ["notice a preempt for p"]
    assert brief(world.cycle()) == brief(world.at(20).cycle()) == []


def test_gpus_vacated_beyond_the_need_are_open_to_others():
    world = World(node("n1"), job("a", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 6, "production", at_us=5 * S), job("q", 2), job("r", 1))
    assert brief(world.cycle()) == ["notice a preempt for p"]
    assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed", "place p n1:6", "place q n1:2"]


def test_a_higher_job_that_comes_later_takes_the_vacated_gpus_and_the_first_preempts_again():
    world = World(node("n1"), node("n2"), job("a", 8, "preemptible"), job("b", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 8, "standard", at_us=5 * S)).cycle()
    world.tell(job("top", 8, "production"))
    assert brief(world.cycle()) == ["notice b preempt for p"]
    assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed", "place top n1:8"]
    assert end(world, "b", "checkpointed") == ["attempt b.1 checkpointed", "place p n2:8"]


def big_gang_waits(*more, **limits) -> World:
    """Of two nodes one is taken by `a`; `gang` needs both."""
    world = World(node("n1"), node("n2"), job("a", 8, "production", **limits), policy=FIRST_COME)
    world.play(until_s=2)
    return world.tell(job("gang", 16, at_us=5 * S), *more)


def test_free_gpus_are_kept_for_the_first_gang_that_waits():
    world = big_gang_waits(job("b", 8, at_us=6 * S))
    assert brief(world.cycle()) == []
    assert end(world, "a", "finished")[-1] == "place gang n1:8+n2:8"


def test_a_job_that_can_be_preempted_at_once_is_backfilled():
    world = big_gang_waits(job("b", 8, "preemptible"), job("c", 8, "preemptible", min_run_us=S))
    assert brief(world.cycle()) == ["place b n2:8"]
    assert end(world, "a", "finished")[-1] == "notice b preempt for gang"


def test_a_job_that_may_insist_on_its_second_attempt_is_backfilled_with_its_first_only():
    world = big_gang_waits(job("c", 8, "preemptible", min_run_us=S))
    assert brief(world.cycle()) == ["place c n2:8"]
    assert end(world, "c", "lost") == ["attempt c.1 lost"]


# `a` has its notice at 90 s and is gone by 120 s.
@pytest.mark.parametrize(("limit_s", "placed"), [(50, ["place b n2:8"]), (110, ["place b n2:8"]), (200, [])])
def test_a_job_whose_limit_ends_it_before_the_gang_can_start_is_backfilled(limit_s, placed):
    world = big_gang_waits(job("b", 8, at_us=6 * S, time_limit_us=limit_s * S), time_limit_us=120 * S)
    assert brief(world.cycle()) == placed


def test_a_job_is_backfilled_on_gpus_that_the_gang_will_not_need():
    world = World(node("n1"), node("n2"), job("a", 8, "production", time_limit_us=120 * S), policy=FIRST_COME)
    world.play(until_s=2)
    world.tell(job("gang", 12, at_us=5 * S), job("b", 4, at_us=6 * S), job("c", 4, at_us=6 * S))
    assert brief(world.cycle()) == ["place b n2:4"]


def test_no_attempt_is_preempted_for_a_job_behind_the_reservation():
    world = World(node("n1"), node("n2"), job("a", 8, "production"), job("v", 4, "preemptible"), policy=FIRST_COME)
    world.play(until_s=2)
    world.tell(job("gang", 16, at_us=5 * S), job("s", 8, at_us=6 * S))
    assert brief(world.cycle()) == []


def test_two_gangs_preempt_in_one_cycle_each_its_own_victims():
    world = World(*(node(f"n{each}") for each in range(3)), *(job(name, 8, "preemptible") for name in ("a", "b", "c")))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", at_us=5 * S), job("q", 6, "production", at_us=6 * S))
    world.tell(job("r", 2, "production", at_us=7 * S))  # gets what `b` vacates beyond the need of `q`
    assert brief(world.cycle()) == ["notice a preempt for p", "notice b preempt for q"]
    assert brief(world.cycle()) == []


def test_gpus_of_a_node_that_is_down_are_not_waited_for():
    world = World(node("n1"), node("n2"), job("a", 8, "preemptible"), job("b", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", at_us=5 * S)).cycle()
    world.tell(NodeDown(at_us=6 * S, node="n1", epoch=1, why="silent"))
    assert brief(world.cycle()) == ["notice b preempt for p"]


def test_a_gang_of_both_capacities_takes_no_gpus_reserved_of_one():
    spot = node("n3", 4, capacity=Capacity.SPOT)
    world = World(node("n1"), node("n2"), spot, job("a", 8, "production", capacity="on-demand"), policy=FIRST_COME)
    world.play(until_s=2)
    world.tell(job("gang", 16, capacity="on-demand", at_us=5 * S), job("both", 12, at_us=6 * S))
    assert brief(world.cycle()) == []


def test_a_gang_larger_than_the_cluster_blocks_no_job():
    assert brief(World(node("n1"), job("gang", 16), job("b", 8)).cycle()) == ["place b n1:8"]


def test_a_gang_that_waits_for_one_kind_blocks_no_other():
    world = World(node("n1"), node("n2", gpu="A100"), job("x", 1, "production", gpu_name="H100"))
    world.cycle()
    world.tell(job("gang", 8, gpu_name="H100"), job("b", 8))
    assert brief(world.cycle()) == ["place b n2:8"]


def test_kept_gpus_of_one_capacity_are_not_taken_by_a_gang_of_both():
    spot = node("n2", capacity=Capacity.SPOT)
    world = World(node("n1"), spot, job("a", 4, "preemptible", capacity="on-demand"))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", capacity="on-demand"), job("both", 12))
    assert brief(world.cycle()) == ["notice a preempt for p"]
    assert brief(world.cycle()) == []


def test_an_error_on_one_job_leaves_no_trace_and_does_not_stop_the_cycle(monkeypatch):
    world = World(node("n1"), job("bad", 3), job("good", 2))
    place = claims_module.place

    def broken(index, asking, candidates, **more):
        if asking.job_id == "bad":
            apply(world.state, NodeDown(at_us=0, node="n1", epoch=1, why="a trace"))
            raise ZeroDivisionError
        return place(index, asking, candidates, **more)

    monkeypatch.setattr(claims_module, "place", broken)
    before = world.state.snapshot()
    decision = decide(world.state, 0)
    assert brief(decision.events) == ["place good n1:2"]
    assert [(name, type(error)) for name, error in decision.errors] == [("bad", ZeroDivisionError)]
    assert world.state.snapshot() == before


def test_enact_equals_decide_and_apply_and_a_refused_write_changes_nothing():
    """With a claim, which counts to its queue, before and behind placements."""
    queues = QueuesSet(at_us=0, queues=(Queue(name="default", quota_gpus=4), Queue(name="b", quota_gpus=4)))
    log = [node("n1"), node("n2"), node("n3", 3), queues, job("a", 8, "preemptible"), job("c", 4, "preemptible")]
    more = [job("p", 8, "production"), job("q", 1), job("r", 2, queue="b"), job("s", 8, "preemptible")]
    world = World(*log).play(until_s=2).tell(*more)
    asked, enacted = State(), State()
    for event in world.log:
        apply(asked, event)
        apply(enacted, event)
    decision = decide(asked, world.now_us)
    assert brief(decision.events)[0].startswith("notice") and len(decision.events) > 2, brief(decision.events)
    before = enacted.snapshot()

    def refuse(events):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enact(enacted, world.now_us, None, refuse)
    assert enacted.snapshot() == before == asked.snapshot()
    written = []
    assert enact(enacted, world.now_us, None, lambda events: written.extend(events) or events) == decision
    for event in decision.events:
        apply(asked, event)
    assert tuple(written) == decision.events and enacted.snapshot() == asked.snapshot()


def test_events_written_with_another_time_replace_the_decided_ones():
    world, at_us = World(node("n1"), job("a", 8)), 7
    enact(world.state, 9, None, lambda events: [replace(each, at_us=at_us) for each in events])
    again = World(node("n1"), job("a", 8)).state
    apply(again, replace(decide(again, 9).events[0], at_us=at_us))
    assert world.state.snapshot() == again.snapshot() and world.state.attempts["a"].placed_us == at_us


def test_enact_inside_a_what_if_is_refused():
    world = World(node("n1"), job("a", 8))
    with world.state.journal.what_if(), pytest.raises(AssertionError):
        enact(world.state, 0, None, list)


def test_a_job_that_fails_to_settle_does_not_keep_the_cycle_awake(monkeypatch):
    world = World(node("n1"), job("a", 4, time_limit_us=100 * S))
    world.play(until_s=2)

    def broken(*asked):
        raise ZeroDivisionError

    monkeypatch.setattr(settle_module, "settle_job", broken)
    decision = decide(world.at(80).state, world.now_us)
    assert [name for name, _ in decision.errors] == ["a"]
    assert decision.wake_at_us is None


def test_the_earliest_deadline_wakes():
    world = World(node("n1"), job("a", 4, time_limit_us=100 * S), job("b", 4, grace_us=20 * S))
    world.play(until_s=2)
    assert decide(world.state, world.now_us).wake_at_us == 70 * S
    world.tell(job("p", 4, "production", at_us=5 * S)).cycle()
    assert decide(world.state, world.now_us).wake_at_us == 25 * S
    assert decide(World(ServerUp(at_us=0)).state, 0).wake_at_us is None


def test_a_job_waits_for_gpus_that_are_being_vacated_rather_than_preempting_others():
    world = World(node("n1"), node("n2"), job("a", 8, "preemptible"), job("b", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", at_us=5 * S)).cycle()
    world.tell(job("q", 8, "production", at_us=6 * S))
    assert brief(world.cycle()) == ["notice b preempt for q"]
    assert JobId("q") in world.state.jobs


def test_without_backfill_a_gang_that_can_never_fit_holds_no_job_up():
    world = World(node("n1"), job("huge", 16), job("a", 4), policy=NAMED["fifo"])
    assert brief(world.cycle()) == ["place a n1:4"]


def test_a_line_that_starts_whole_around_one_reservation_is_not_asked_around_the_next():
    """The fault simulation found this (--seed 50590): the line was empty by then, and the cycle fell over it."""
    kinds = ({"gpu_name": "H100"}, {"gpu_name": "A100"})
    held = [job(f"a{each}", 4, estimate_us=1000 * S, **kind) for each, kind in enumerate(kinds)]
    world = World(node("n1"), node("n2", gpu="A100"), *held, policy=NAMED["easy"])
    world.cycle()
    gangs = [job(f"g{each}", 8, **kind) for each, kind in enumerate(kinds)]
    world.tell(*gangs, job("s", 2, estimate_us=100 * S))
    assert brief(world.cycle()) == ["place s n1:2"]


def test_a_question_leaves_no_trace_in_the_answer_to_the_next():
    """The GPUs of a decision that is not written are free again, for the next question and the next cycle."""
    world = World(node("n1"), job("a", 8), job("b", 8))
    asked = [brief(decide(world.state, at_us).events) for at_us in (S, S, 2 * S)]
    assert asked == [["place a n1:8"]] * 3
    assert brief(enact(world.state, 60 * S, None, lambda events: events).events) == ["place a n1:8"]
