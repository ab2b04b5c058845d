"""Random trees of queues with jobs that come, preempt and go: limits, lenders, recounts and undo."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from quota_trees import HOUR, a_job, gpus, quotas

from cordee.events import Job, Queue
from cordee.ids import JobId
from cordee.schedule.quota.queues import check


@st.composite
def trees(draw) -> list[Queue]:
    """Up to three levels; every quota is covered by its parent's, the outermost by 32 GPUs."""
    queues: list[Queue] = []

    def grow(parent: Queue | None, gpus: int, depth: int) -> None:
        for number in range(draw(st.integers(0 if depth else 1, 3))):
            quota = draw(st.integers(0, gpus))
            gpus -= quota
            name = f"{parent.name}-{number}" if parent else f"q{number}"
            limit = draw(st.one_of(st.none(), st.integers(quota, 32)))
            queue = Queue(
                name=name,
                parent=parent.name if parent else None,
                quota_gpus=quota,
                limit_gpus=limit,
                lend=draw(st.booleans()),
                weight=draw(st.integers(1, 3)),
                user_gpus=draw(st.sampled_from([None, None, 4, 8])),
                gpu_us_per_day=draw(st.sampled_from([None, None, 40 * HOUR])),
            )
            queues.append(queue)
            if depth < 2:
                grow(queue, quota, depth + 1)

    grow(None, 32, 0)
    return queues


class Crowd:
    """Jobs that come, run where the tree admits them, preempt others, and go; all by one random stream."""

    def __init__(self, queues: list[Queue], seed: int) -> None:
        check(queues, 32)
        self.queues, self.random, self.now_us = queues, Random(seed), 0
        self.tree = quotas(*queues)
        self.running: dict[JobId, Job] = {}
        self.names = [queue.name for queue in queues] + ["default"]

    def step(self, number: int) -> None:
        self.now_us += self.random.randrange(HOUR)
        if self.running and self.random.random() < 0.4:
            self.end(self.random.choice(sorted(self.running)))
            return
        owner, size = self.random.choice(["ann", "bob"]), self.random.choice([1, 2, 4, 8])
        job = a_job(self.random.choice(self.names), size, owner=owner, name=f"j{number}")
        refusal = self.tree.admits(job, self.now_us)
        free = 32 - sum(each.gpus for each in self.running.values())
        if refusal is not None or free < size:
            need = max(size - free, (refusal.short_milli or 0) // 1000 if refusal else 0)
            victims = self.tree.victims(job, refusal)
            preempted = [each for each in self.running.values() if victims.allows(each, each.gpus * 1000, below=False)]
            if sum(each.gpus for each in preempted) < need or (refusal and refusal.short_milli is None):
                return
            for each in preempted:
                self.end(each.job_id)
        if self.tree.admits(job, self.now_us) is None:
            self.tree.put(job, gpus(size), self.now_us)
            self.running[job.job_id] = job

    def end(self, job_id: JobId) -> None:
        job = self.running.pop(job_id)
        self.tree.take(job, gpus(job.gpus), self.now_us)

    def held(self, queue: str) -> int:
        """Return the GPUs that a queue and those inside it hold, by a recount."""
        inside = {queue}
        for _ in self.queues:
            inside |= {each.name for each in self.queues if each.parent in inside}
        return sum(job.gpus for job in self.running.values() if job.queue in inside)


@settings(max_examples=60)
@given(trees(), st.integers(0, 2**32))
def test_limits_hold_and_no_quota_is_exceeded_without_a_lender(queues, seed):
    crowd = Crowd(queues, seed)
    for number in range(60):
        crowd.step(number)
        for queue in queues:
            held = crowd.held(queue.name)
            assert queue.limit_gpus is None or held <= queue.limit_gpus
            if queue.user_gpus is not None:
                inside = {each for each in crowd.names if each.startswith(queue.name)}
                by_user = dict.fromkeys(("ann", "bob"), 0)
                for job in crowd.running.values():
                    by_user[job.owner] += job.gpus if job.queue in inside else 0
                assert max(by_user.values()) <= queue.user_gpus
        # Queues that do not lend could have the rest of their quotas now, with all that is held.
        assert occupied(crowd, None) <= 32


def occupied(crowd: Crowd, queue: Queue | None) -> int:
    """Return the GPUs that a queue holds or keeps, counted anew."""
    name = queue.name if queue else None
    own = sum(job.gpus for job in crowd.running.values() if job.queue == (name or "default"))
    inner = own + sum(occupied(crowd, each) for each in crowd.queues if each.parent == name)
    return inner if queue is None or queue.lend else max(inner, queue.quota_gpus)


@settings(max_examples=40)
@given(trees(), st.integers(0, 2**32))
def test_counts_are_those_of_a_recount_and_undo_leaves_no_trace(queues, seed):
    crowd = Crowd(queues, seed)
    for number in range(30):
        crowd.step(number)
    tree, now_us = crowd.tree, crowd.now_us
    before = tree.value()
    for number, job in enumerate(sorted(crowd.running.values(), key=lambda each: each.job_id)):
        tree.leave(job, 1000)
        tree.put(job, gpus(2), now_us + number)
        tree.take(job, gpus(1), now_us + number)
        tree.put(job, gpus(1), now_us + number)
        tree.take(job, gpus(2), now_us + number)
        tree.stay(job, 1000)
    assert tree.value() == before
    again = tree.regrouped(queues, now_us)
    assert tree.value() == before
    for name in crowd.names:
        assert again.leaf(name).held == tree.leaf(name).held
        assert again.share(name, now_us) == tree.share(name, now_us)
        for size in (1, 8):
            assert again.admits(a_job(name, size), now_us) == tree.admits(a_job(name, size), now_us)


@settings(max_examples=60)
@given(trees(), st.integers(0, 2**32), st.integers(0, 20), st.sampled_from([1, 2, 4]))
def test_a_queue_that_is_inside_its_quota_can_always_take_back_enough(queues, seed, which, size):
    """In any world that came about by the rules: an entitled job starts at once, or preemption makes room for it."""
    unlimited = [Queue(name=q.name, parent=q.parent, quota_gpus=q.quota_gpus, lend=q.lend) for q in queues]
    crowd = Crowd(unlimited, seed)
    for number in range(60):
        crowd.step(number)
    queue = unlimited[which % len(unlimited)]
    job = a_job(queue.name, size, name="claimant")
    path = crowd.tree.leaf(queue.name).path[:-1]
    if not all(holder.held + size * 1000 <= holder.quota for holder in path):
        return
    for _ in range(len(crowd.running) + 1):
        free = 32 - sum(each.gpus for each in crowd.running.values())
        if free >= size and crowd.tree.admits(job, crowd.now_us) is None:
            return
        victims = crowd.tree.victims(job)
        taken = [each for each in crowd.running.values() if victims.allows(each, each.gpus * 1000, below=False)]
        assert taken, f"{free} of 32 are free, and no queue gives back"
        crowd.end(taken[0].job_id)
    raise AssertionError("all attempts left, and it still may not start")
