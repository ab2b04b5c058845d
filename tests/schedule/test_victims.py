"""The victims of a gang in its shape, against all sets of running jobs, in small clusters."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.events import CheckpointCommitted, NoticeGiven, NoticeReason
from cordee.ids import JobId
from cordee.schedule import Policy
from cordee.schedule.placement.place import fits, need_of
from cordee.schedule.preemption.loss import charge
from cordee.schedule.preemption.victims import VictimSearch
from cordee.schedule.state.failed_searches import Scope
from cordee.schedule.state.order import level
from cordee.schedule.state.transitions import apply
from world import S, World, brief, job, node

POOL = (("H100", "on-demand"),)

running = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 8, 12, 16]), st.sampled_from(["standard", "preemptible"]), st.integers(0, 3)
    ),
    min_size=1,
    max_size=8,
)
shapes = st.sampled_from(
    [{"gpus": 1}, {"gpus": 3}, {"gpus": 8}, {"gpus": 12}, {"gpus": 16}, {"gpus": 8, "unit_gpus": 4},
     {"gpus": 6, "unit_gpus": 2}, {"gpus": 16, "within": "rack"}, {"gpus": 4, "within": "node"}]
)  # fmt: skip


def full_world(drawn) -> World:
    """Return four nodes in two racks with jobs of these sizes and tiers, and newest checkpoints of these ages."""
    world = World(*(node(f"n{each}", domain=(f"r{each // 2}",)) for each in range(4)), policy=Policy(order="fifo"))
    for number, (gpus, tier, _) in enumerate(drawn):
        world.tell(job(f"v{number}", gpus, tier, grace_us=0))
    world.play(until_s=65)
    for number, (_, _, ago) in enumerate(drawn):
        if JobId(f"v{number}") in world.state.attempts:
            checkpoint = {"step": 1, "generation": 1, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
            world.tell(CheckpointCommitted(at_us=(65 + 7 * ago) * S, job_id=JobId(f"v{number}"), epoch=1, **checkpoint))
    return world.at(95)


def frees(world: World, chosen, asking) -> bool:
    """Whether the gang fits where these leave."""
    with world.state.journal.what_if():
        for job_id in chosen:
            attempt = world.state.attempts[job_id]
            leaves = {"reason": NoticeReason.PREEMPT, "deadline_us": world.now_us}
            apply(world.state, NoticeGiven(at_us=world.now_us, job_id=job_id, epoch=attempt.epoch, **leaves))
        return fits(world.state.nodes.soon, asking, tuple(world.state.nodes.free.kinds))


@settings(max_examples=150)
@given(drawn=running, shape=shapes)
def test_the_cheapest_set_that_frees_the_shape_is_found_without_a_needless_victim(drawn, shape):
    world = full_world(drawn)
    asking = job("p", shape["gpus"], "production", **{k: v for k, v in shape.items() if k != "gpus"}).job
    pool = tuple(world.state.nodes.free.kinds)
    if not pool or frees(world, (), asking):
        return
    need = need_of(world.state.nodes.free, asking, pool)
    assert need is not None
    chosen = VictimSearch(world.state, world.now_us).find(need, pool, Scope(0, 0, None))
    there = sorted(world.state.attempts)
    sets = [each for size in range(1, len(there) + 1) for each in combinations(there, size)]
    enough = [each for each in sets if frees(world, each, asking)]
    assert (chosen is None) == (not enough)
    if chosen is None:
        return

    def cost(which):
        attempts = [world.state.attempts[each] for each in which]
        return sum(charge(each, world.now_us).micro_usd * (3 - level(each.job.tier)) for each in attempts)

    assert frees(world, chosen, asking)
    assert cost(chosen) == min(map(cost, enough))
    for each in chosen:
        assert not frees(world, [other for other in chosen if other != each], asking)


@pytest.mark.parametrize(("victims", "victim"), [("newest", "late"), ("lowest", "low"), ("dollars", "saved")])
def test_other_policies_choose_other_victims(victims, victim):
    world = World(*(node(f"n{each}") for each in range(3)), policy=Policy(order="fifo", victims=victims))
    world.tell(job("saved", 8, grace_us=0), job("low", 8, "preemptible", grace_us=0))
    world.later(job("late", 8, grace_us=0, at_us=9 * S)).play(until_s=80)
    checkpoint = {"step": 1, "generation": 1, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
    world.tell(CheckpointCommitted(at_us=80 * S, job_id=JobId("saved"), epoch=1, **checkpoint))
    assert brief(world.tell(job("p", 8, "production")).cycle()) == [f"notice {victim} preempt for p"]
