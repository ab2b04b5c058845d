"""One dominant reason, with its numbers."""

import re

import pytest

from cordee.events import (
    Behind,
    NodeDown,
    NodeReachable,
    NodeUnreachable,
    RankBehind,
    RanksStarted,
    ServerShuttingDown,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule import Policy, explain
from world import S, World, job, node, ranks_ended


def world_of(*events) -> World:
    """Told in order; a cycle runs before the last one."""
    world = World(*events[:-1], policy=Policy(order="fifo"))
    world.play(until_s=2)
    return world.tell(events[-1])


N1 = node("n1")
PRODUCTION = job("x", 8, "production")

CASES = {
    "unknown-job": ([N1, job("b", 1)], "no job a is known"),
    "running": ([N1, job("a", 8), job("b", 1, at_us=3 * S)], "a.1 has run on 8 GPUs on n1 for 2 s"),
    "leaving": ([N1, job("a", 8), StopRequested(at_us=2 * S, job_id=JobId("a"), by="ann")], None),
    "server-shutting-down": ([N1, PRODUCTION, job("a", 8), ServerShuttingDown(at_us=2 * S)], "next `cordee up`"),
    "starts-now": ([N1, job("b", 1), job("a", 2)], "the next cycle places it on 2 GPUs"),
    "no-nodes": ([N1, NodeDown(at_us=0, node="n1", epoch=1, why=""), job("a", 1)], "no node is up; 1 is known"),
    "no-such-gpu": ([N1, job("a", 1, gpu_name="B200")], "1 B200 GPU; no node that is up has them, only H100"),
    "too-large": ([N1, node("n2", gpus=4, gpu="A100"), job("a", 9)], "needs 9 GPUs of one type; the nodes that are up"),
    "waits-for-victims": (
        [N1, job("v", 6, "preemptible"), job("a", 8, "production")],
        "it needs 8 GPUs of one type; 2 are free, and v makes room within 30 s",
    ),
    "reserved-for-other": (
        [N1, job("x", 2, "production"), job("gang", 8), job("a", 4, at_us=3 * S)],
        "it needs 4 GPUs of one type; 6 are free, but reserved for gang, ahead of it",
    ),
    "not-enough-free": (
        [N1, PRODUCTION, job("a", 2)],
        "it needs 2 GPUs of one type; none is free, and 1 job holds the others",
    ),
}


@pytest.mark.parametrize("reason", [each for each in CASES if each != "leaving"])
def test_explain(reason):
    events, text = CASES[reason]
    world = world_of(*events)
    before = world.state.snapshot()
    why = explain(world.state, JobId("a"), world.now_us)
    assert why.reason == reason
    assert text in why.text
    assert world.state.snapshot() == before


def test_victims_whose_notice_is_over():
    for victims, text in (("v",), "v makes room now: its"), (("v", "w"), "v and w make room now: their"):
        each = [job(name, 6 // len(victims), "preemptible") for name in victims]
        world = world_of(N1, *each, job("a", 8, "production"))
        world.cycle()
        until_us = explain(world.state, JobId("a"), world.now_us).until_us
        assert until_us is not None and until_us > world.now_us
        over = explain(world.state, JobId("a"), until_us)
        assert over.text == f"it needs 8 GPUs of one type; 2 are free, and {text} time to save is over"


def test_a_job_through_its_life():
    world = World(N1, job("a", 8))
    world.cycle()
    assert explain(world.state, JobId("a"), 0).reason == "starting"
    world.tell(RanksStarted(at_us=S, job_id=JobId("a"), epoch=1, node="n1"), CASES["leaving"][0][-1])
    world.cycle()
    why = explain(world.state, JobId("a"), 12 * S)
    assert (why.reason, why.until_us) == ("leaving", 32 * S)
    assert why.text == "a.1 got notice (stop); its ranks have 20 s left"
    world.at(32).cycle()
    assert "did not leave within 30 s" in explain(world.state, JobId("a"), world.now_us).text
    world.tell(*ranks_ended(world, "a", "killed"))
    world.cycle()
    assert explain(world.state, JobId("a"), 0).text == "stopped: stopped by ann"


def test_the_rank_that_holds_a_running_job_up():
    world = World(N1, job("a", 8))
    world.cycle()
    world.tell(RanksStarted(at_us=S, job_id=JobId("a"), epoch=1, node="n1"))

    def behind(how, **more):
        world.tell(RankBehind(at_us=9 * S, job_id=JobId("a"), epoch=1, rank=3, how=how, step=7, since_us=4 * S, **more))
        why = explain(world.state, JobId("a"), 12 * S)
        return why.reason, why.text.partition("; ")[2]

    stuck = "rank 3 has stood still for 8 s, in step 7, train.py:5 in load"
    assert behind(Behind.STUCK, where="train.py:5 in load") == ("held-up", stuck)
    assert behind(Behind.SILENT) == ("held-up", "rank 3 has not answered for 8 s, in step 7")
    slow = "rank 3 has been slow for 8 s: the others wait for it 31% of the time"
    assert behind(Behind.SLOW, waited=0.31) == ("held-up", slow)
    assert behind(Behind.OVER) == ("running", "")
    stale = RankBehind(at_us=S, job_id=JobId("a"), epoch=9, rank=0, how=Behind.STUCK, step=1, since_us=S)
    world.tell(stale)
    assert explain(world.state, JobId("a"), 12 * S).reason == "running"


def test_gpus_of_two_types_are_not_enough_together():
    world = World(node("n1", 8), node("n2", 8, "A100"), job("x", 4, gpu_name="H100"), job("y", 4, gpu_name="A100"))
    world.cycle()
    world.tell(job("a", 8))
    why = explain(world.state, JobId("a"), 0)
    assert why.reason == "split"
    assert "4 of one type and 8 of all types are free" in why.text


def test_an_unreachable_node_gets_nothing_new_and_is_named():
    silent = NodeUnreachable(at_us=0, node="n1", epoch=1)
    world = World(N1, node("n2"), silent, job("x", 8), job("a", 8))
    world.cycle()
    assert len(world.state.attempts) == 1
    waits = explain(world.state, JobId("x"), world.now_us)
    assert "n1 cannot be reached now" in waits.text
    world.tell(NodeReachable(at_us=world.now_us, node="n1", epoch=1))
    world.cycle()
    assert len(world.state.attempts) == 2


def test_a_running_job_whose_checkpoints_fail_shows_it():
    every = 10 * 60 * S
    world = World(node("n1"), job("a", 4, protected=True, checkpoint_every_us=every), job("b", 4)).play(until_s=60)
    assert "checkpoint" not in explain(world.state, JobId("a"), 29 * 60 * S).text
    text = explain(world.state, JobId("a"), 40 * 60 * S).text
    assert re.search(
        r"its work of the last 39m\S* is in no checkpoint, and one is due each 10m: see `cordee logs`", text
    )
    assert "checkpoint" not in explain(world.state, JobId("b"), 40 * 60 * S).text, "it is unprotected"
