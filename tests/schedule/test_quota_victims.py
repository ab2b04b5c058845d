"""Victims by quota: the jobs that a job may preempt to take quota back, or to lift a refusal."""

from quota_trees import TREE, a_job, gpus, hold, quotas

from cordee.events import Queue
from cordee.schedule.quota.bounds import Bound


def test_quota_is_taken_back_from_the_nearest_borrower_down_to_its_quota():
    tree = quotas(*TREE)
    near, far = hold(tree, "x2", 10), hold(tree, "y1", 12)
    shielded, own = hold(tree, "y2", 6), hold(tree, "x", 4)
    job = a_job("x1", 8)
    assert tree.entitled(job)
    # y as a whole is over its quota by 2; of x, x2 is over by 6, and jobs of x itself are inside what it leaves (4).
    # With x at 14, x1's 8 make 22 of 16: beyond x nothing may be taken.
    assert [(each.queue, each.over_milli, each.distance) for each in tree.borrowers(job)] == [("x2", 6000, 1)]
    victims = tree.victims(job)
    assert not victims.allows(far, 12_000, below=False) and not victims.allows(shielded, 6000, below=False)
    assert not victims.allows(own, 4000, below=False)
    assert victims.allows(near, 6000, below=False)
    assert not victims.allows(near, 4000, below=False)  # what is left is its quota
    tree.leave(near, 6000)
    # What has notice is gone, and x would hold 16: now it is inside its quota, and may take from y what is over there.
    assert [(each.queue, each.over_milli, each.distance) for each in tree.borrowers(job)] == [("y1", 4000, 2)]
    assert tree.victims(job).allows(far, 12_000, below=False)


def test_a_queue_above_may_take_back_for_one_that_is_over():
    tree = quotas(*TREE)
    hold(tree, "x1", 8)
    borrower = hold(tree, "y1", 20)
    job = a_job("x1", 8)  # over its own 8, inside x's 16
    assert tree.entitled(job) and [each.queue for each in tree.borrowers(job)] == ["y1"]
    assert tree.victims(job).allows(borrower, 20_000, below=False)
    tree.take(borrower, gpus(20), 0)
    assert tree.borrowers(job) == ()


def test_tiers_preempt_inside_a_queue_and_borrowers_but_not_shielded_jobs():
    tree = quotas(*TREE)
    same, inside, over = hold(tree, "x1", 8), hold(tree, "y2", 8), hold(tree, "y1", 12)
    tree.put(a_job("x2", 4), gpus(4), 0)
    job = a_job("x1", 8, tier="production")
    victims = tree.victims(job)
    assert not tree.entitled(job)
    assert victims.allows(same, 8000, below=True) and not victims.allows(same, 8000, below=False)
    assert not victims.allows(inside, 8000, below=True)
    assert victims.allows(over, 4000, below=True) and not victims.allows(over, 4000, below=True)
    # Inside its own quota a tier preempts every job below.
    entitled = tree.victims(a_job("x1", 4, tier="production", name="b"), gpus=0)
    assert entitled.allows(inside, 8000, below=True) and not entitled.allows(inside, 8000, below=False)


def test_a_limit_is_made_room_for_inside_its_queue():
    tree = quotas(Queue(name="a", limit_gpus=8, user_gpus=6), Queue(name="b"))
    anns, bobs, other = hold(tree, "a", 4), hold(tree, "a", 4, owner="bob"), hold(tree, "b", 8)
    refusal = tree.admits(a_job("a", 2), 0)
    assert refusal and refusal.bound is Bound.QUEUE_LIMIT
    victims = tree.victims(a_job("a", 2), refusal)
    assert victims.allows(bobs, 4000, below=True) and not victims.allows(other, 8000, below=True)
    refusal = tree.admits(a_job("a", 4), 0)
    tree.take(bobs, gpus(4), 0)
    refusal = tree.admits(a_job("a", 4), 0)
    assert refusal and refusal.bound is Bound.USER_LIMIT
    victims = tree.victims(a_job("a", 4), refusal)
    assert not victims.allows(bobs, 4000, below=True) and victims.allows(anns, 4000, below=True)


def test_a_queue_beside_one_that_keeps_its_quota_borrows_from_outside():
    tree = quotas(
        Queue(name="team", quota_gpus=10),
        Queue(name="kept", parent="team", quota_gpus=6, lend=False),
        Queue(name="rest", parent="team", quota_gpus=4),
        Queue(name="other", quota_gpus=22),
    )
    rest, other = a_job("rest", 10, name="rest"), a_job("other", 8, name="other")
    tree.put(rest, gpus(10), 0)  # team holds its 10, and 6 more are kept inside it
    tree.put(a_job("other", 16), gpus(16), 0)
    wanted = a_job("other", 6, name="wanted")
    refusal = tree.admits(wanted, 0)
    assert refusal is not None and refusal.bound is Bound.KEPT and refusal.short_milli == 6000
    assert tree.entitled(wanted) and [each.queue for each in tree.borrowers(wanted)] == ["rest"]
    assert tree.victims(wanted, refusal).allows(rest, 6000, below=False)
    assert not tree.victims(wanted, refusal).allows(other, 6000, below=False)
    victims = tree.victims(wanted)
    assert [victims.allows(rest, 2000, below=False) for _ in range(4)] == [True, True, True, False]
    tree.leave(rest, 6000)
    assert not tree.victims(wanted).allows(rest, 1000, below=False)  # what has notice is not borrowed any more
