"""MIG instances: legal starts in random histories, packing, why a job waits, and moves of those in the way."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from cordee.events import AttemptPlaced, NoticeGiven, NoticeReason
from cordee.ids import JobId
from cordee.schedule import Reason, explain
from cordee.schedule.placement.defragment import Cut, fewest_moves
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.mig import geometry_of, spots, with_one
from cordee.schedule.placement.place import fits, lacks, place, pools
from world import S, World, brief, job, mig_table, node, ranks_ended

H100 = mig_table("H100")
RULES = {each.name: each.placed for each in H100.profiles}
HERE = geometry_of(H100.gpus((0,)), 0)


def part(name, profile, tier="standard", **more):
    return job(name, 1, tier, mig=profile, gpu_milli=125 * RULES[profile].size, **more)


def cut_node(name, gpus=1, **more):
    return node(name, gpus, mig=H100.gpus(tuple(range(gpus)), **more))


def placed(events):
    return [
        (str(event.job_id), lease.gpus[0], lease.instance.start)
        for event in events
        if isinstance(event, AttemptPlaced)
        for lease in event.leases
    ]


def legal(instances):
    """By rules written anew; instances are (start, size, profile)."""
    slices = [at for start, size, _ in instances for at in range(start, start + size)]
    return (
        len(set(slices)) == len(slices)
        and all(at < 8 for at in slices)
        and sum(RULES[name].compute for *_, name in instances) <= 7
        and all(start in RULES[name].starts and size == RULES[name].size for start, size, name in instances)
        and all(sum(other == name for *_, other in instances) <= RULES[name].instances for *_, name in instances)
    )


@pytest.mark.parametrize("seed", range(300))
def test_no_history_has_an_illegal_placement_or_a_refusal_in_spite_of_a_place(seed):
    dice = random.Random(seed)
    up = cut_node("n", dice.randint(1, 3)).node
    index, used, live, boards = FreeIndex(), Used(), [], {}
    index.put("n", entry_of(up, used))
    for number in range(30):
        if live and dice.random() < 0.4:
            lease, asked = live.pop(dice.randrange(len(live)))
            used = used.minus(lease, asked)
            boards[lease.gpus[0]].remove((lease.instance.start, lease.instance.size, asked.mig))
        else:
            name = dice.choice(list(RULES))
            asked = part(f"j{number}", name).job
            there = pools(asked, index.kinds)
            found = place(index, asked, there)
            assert (found is not None) == any(fits(index, asked, each) for each in there)
            if found is None:
                size = RULES[name].size
                more = [(start, size, name) for start in RULES[name].starts]
                assert not any(legal([*boards.get(gpu, []), each]) for gpu in up.mig.gpus for each in more)
                continue
            (lease,) = found
            board = boards.setdefault(lease.gpus[0], [])
            board.append((lease.instance.start, lease.instance.size, name))
            assert legal(board) and lease.milli == 125 * RULES[name].size
            used = used.plus(lease, asked)
            live.append((lease, asked))
        index.put("n", entry_of(up, used))
        assert used.milli == sum(125 * size for board in boards.values() for _, size, _ in board)


def test_small_instances_leave_room_for_large_ones():
    world = World(cut_node("n1", 2), *(part(name, "1g.10gb") for name in "abc"), part("x", "4g.40gb"))
    assert placed(world.cycle()) == [("a", 0, 6), ("b", 0, 5), ("c", 0, 4), ("x", 0, 0)]


def test_instances_count_as_their_memory_slices_in_quotas_and_bills():
    world = World(cut_node("n1"), part("a", "3g.40gb"), part("b", "1g.20gb"), work={"a": 10, "b": 10})
    world.play()
    rows = {row.job_id: row for row in world.ledger.rows(world.now_us)}
    for name, milli in (("a", 500), ("b", 250)):
        row = rows[name]
        assert row.gpu_us.held * 1000 == milli * (row.ended_us - row.placed_us)


def test_gpus_that_are_cut_are_leased_whole_only_where_mig_is_switched():
    assert brief(World(cut_node("n1"), job("a", 1)).cycle()) == []
    world = World(cut_node("n1", switched=True), job("a", 1))
    assert brief(world.cycle()) == ["place a n1:1"]
    world.tell(part("b", "1g.10gb", at_us=5 * S))
    assert brief(world.cycle()) == []
    world.tell(*ranks_ended(world, "a", "finished"))
    assert placed(world.cycle()) == [("b", 0, 6)]


def test_without_leave_to_cut_only_instances_that_are_there_are_leased():
    fixed = ((0, 0, 4, "4g.40gb"), (0, 5, 1, "1g.10gb"))
    up = node("n1", 1, mig=replace(H100.gpus((0,)), fixed=fixed))
    world = World(up, part("a", "1g.10gb"), part("b", "1g.10gb"), part("c", "3g.40gb"))
    assert placed(world.cycle()) == [("a", 0, 5)]
    assert explain(world.state, JobId("b"), 0).text == (
        "it needs 1 MIG instance 1g.10gb; the 1g.10gb that are there, on 1 GPU, are leased, and their agents "
        "may make no others"
    )
    answer = explain(world.state, JobId("c"), 0)
    assert answer.reason is Reason.TOO_LARGE and "no node that is up has this profile" in answer.text


def test_a_profile_counts_only_in_the_size_that_the_job_was_admitted_for():
    a100 = node("n1", 1, "A100", mig=mig_table("A100-40").gpus((0,)))
    world = World(a100, part("a", "1g.10gb"))
    assert placed(world.cycle()) == [], "it is one slice of an H100 and two of an A100-40"
    asked = world.state.jobs[JobId("a")].job
    (pool,) = pools(asked, world.state.nodes.free.kinds)
    assert lacks(world.state.nodes.free, asked, pool) is None


def fragmented(tier, **more):
    """A 1g stands at 1, and 7 of 8 slices are free."""
    names = [f"s{at}" for at in range(7)]
    world = World(
        cut_node("n1"), *(part(name, "1g.10gb", tier, **more) for name in names), work=dict.fromkeys(names, 9999)
    )
    at = {name: start for name, _, start in placed(world.cycle())}
    world.play(until_s=3)
    world.tell(*(end for name in names if at[name] != 1 for end in ranks_ended(world, name, "finished")))
    world.cycle()
    (left,) = world.state.attempts
    return world, left


def test_why_names_the_free_slices_what_is_in_the_way_and_the_move_that_makes_room():
    world, left = fragmented("standard")
    world.tell(part("big", "4g.40gb", at_us=5 * S))
    assert placed(world.cycle()) == []
    answer = explain(world.state, JobId("big"), world.now_us)
    assert answer.reason is Reason.FRAGMENTED and answer.blocking == (left,)
    assert answer.text == (
        "it needs 1 MIG instance 4g.40gb; 7 of 8 memory slices of GPU 0 of n1 are free, no 4g.40gb: "
        f"a 1g.10gb stands at 1, and it begins at 0 only; room is made by moving {left} to slice 6"
    )
    world.tell(part("all", "7g.80gb"))
    answer = explain(world.state, JobId("all"), world.now_us)
    assert answer.reason is Reason.NOT_ENOUGH_FREE
    assert "7 of 8 memory slices of GPU 0 of n1 are free, and it takes 8" in answer.text


def test_a_preemptible_instance_moves_out_of_the_way_through_its_checkpoint():
    world, left = fragmented("preemptible")
    world.tell(part("big", "4g.40gb", at_us=3600 * S)).at(3600 + 100)
    assert brief(world.cycle()) == [f"notice {left} move for big"]
    world.play(until_s=3800)
    where = {job_id: attempt.leases[0].instance.start for job_id, attempt in world.state.attempts.items()}
    assert where == {"big": 0, left: 6}
    notices = [event for event in world.log if isinstance(event, NoticeGiven)]
    assert [event.reason for event in notices] == [NoticeReason.MOVE], "it moves once"


@pytest.mark.parametrize(("tier", "protected"), [("standard", True), ("preemptible", False)])
def test_others_do_not_move(tier, protected):
    world, _ = fragmented(tier, protected=protected)
    world.tell(part("big", "4g.40gb", at_us=3600 * S)).at(3600 + 100)
    assert brief(world.cycle()) == []


def fewest_by_force(cuts, profile):
    """Lift every set of instances, the smallest first, and look for any arrangement of all that are lifted."""
    every = [(cut.gpu, each) for cut in cuts for each in cut.taken if each[0] not in cut.pinned]
    for count in range(len(every) + 1):
        for lifted in combinations(every, count):
            left = {cut.gpu: tuple(each for each in cut.taken if (cut.gpu, each) not in lifted) for cut in cuts}
            if arranged(left, [profile, *(each[2] for _, each in lifted)]):
                return count
    return None


def arranged(boards, names):
    if not names:
        return True
    return any(
        arranged(boards | {gpu: with_one(taken, spot, names[0])}, names[1:])
        for gpu, taken in boards.items()
        for spot in spots(HERE, taken, names[0])
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_fewer_moves_make_room(seed):
    dice, cuts = random.Random(seed), []
    for gpu in range(dice.randint(1, 2)):
        taken = ()
        for _ in range(dice.randint(1, 5)):
            name = dice.choice(["1g.10gb", "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"])
            there = spots(HERE, taken, name)
            taken = with_one(taken, dice.choice(there), name) if there else taken
        gone = {each for each in taken if dice.random() < 0.3}
        taken = tuple(each for each in taken if each not in gone)
        pinned = frozenset(each[0] for each in taken if dice.random() < 0.2)
        cuts.append(Cut(("n", gpu), HERE, taken, pinned))
    profile = dice.choice(["2g.20gb", "3g.40gb", "4g.40gb"])
    found, fewest = fewest_moves(cuts, profile), fewest_by_force(cuts, profile)
    if fewest is None or fewest > 3:
        assert found is None
        return
    assert found is not None and len(found.moved) == fewest
    after = {cut.gpu: list(cut.taken) for cut in cuts}
    for each in found.moved:
        after[each.gpu].remove((each.start, RULES[each.profile].size, each.profile))
    for each in found.moved:
        after[each.to].append((each.to_start, RULES[each.profile].size, each.profile))
    after[found.gpu].append((found.spot.start, found.spot.size, profile))
    assert all(legal(board) for board in after.values())
