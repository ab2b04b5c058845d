"""The tree of queues: declarations, holdings, admission, and the jobs that a job may preempt."""

from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import QueuesError
from cordee.events import Job, Queue, Tier
from cordee.ids import JobId
from cordee.schedule.quota.bounds import MOST_OF_DAY, Bound
from cordee.schedule.quota.day import DAY_US, Day
from cordee.schedule.quota.decay import Decay
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.queues import check
from cordee.schedule.quota.quotas import HALF_LIFE_US, SHARE, Quotas
from cordee.units import US_PER_HOUR

ROOT = Path(__file__).parent.parent.parent

HOUR = US_PER_HOUR
NANO = 2_000_000_000  # per GPU-hour: two dollars


def a_job(queue: str, gpus: int, *, owner: str = "ann", name: str = "a", tier: str = "standard", **more) -> Job:
    return Job(job_id=JobId(name), name=name, owner=owner, gpus=gpus, queue=queue, tier=Tier(tier), **more)


def gpus(count: float, **more) -> Held:
    return Held(gpu_milli=round(count * 1000), nano_usd_per_hour=round(count * NANO), **more)


def quotas(*queues: Queue, cluster: int = 32, **more) -> Quotas:
    check(queues, cluster)
    made = Quotas(queues, **more)
    made.resize(gpus(cluster), 0)
    return made


def hold(tree: Quotas, queue: str, count: int, at_us: int = 0, owner: str = "ann", **more) -> Job:
    job = a_job(queue, count, owner=owner, **more)
    tree.put(job, gpus(count), at_us)
    return job


# -- what may be declared ------------------------------------------------------------------------------------

BAD = {
    "two of one name": ([Queue(name="a"), Queue(name="a")], "two queues are named a"),
    "unknown parent": ([Queue(name="team"), Queue(name="a", parent="taem")], "a is inside taem, which is no queue"),
    "a circle": (
        [Queue(name="a", parent="b"), Queue(name="b", parent="c"), Queue(name="c", parent="b")],
        "the queues go in a circle: b inside c inside b",
    ),
    "inside itself": ([Queue(name="a", parent="a")], "the queues go in a circle: a inside a"),
    "children above the parent": (
        [
            Queue(name="team", quota_gpus=8),
            Queue(name="a", parent="team", quota_gpus=6),
            Queue(name="b", parent="team", quota_gpus=4),
        ],
        "the quotas inside team come to 10 GPUs (a 6 + b 4), but its own is 8",
    ),
    "more than there is": (
        [Queue(name="a", quota_gpus=24), Queue(name="b", quota_gpus=16)],
        "40 GPUs are guaranteed (a 24 + b 16), but the cluster has 32",
    ),
    "limit below quota": (
        [Queue(name="a", quota_gpus=8, limit_gpus=4)],
        "a has a quota of 8 GPUs, but may hold 4 at most",
    ),
    "negative": ([Queue(name="a", quota_gpus=-1)], "a: quota_gpus is -1"),
    "weightless": ([Queue(name="a", weight=0)], "a: weight is 0"),
    "bad name": ([Queue(name="a b")], "'a b' cannot name a queue"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_tree_that_cannot_be_is_refused_with_the_numbers(case):
    queues, message = BAD[case]
    with pytest.raises(QueuesError) as caught:
        check(queues, 32)
    assert caught.value.message == message and caught.value.hint


def test_the_hint_says_what_was_meant():
    with pytest.raises(QueuesError) as caught:
        check(BAD["unknown parent"][0])
    assert caught.value.hint == "did you mean team? the queues are a, team"


def test_guaranteed_is_not_compared_while_no_node_is_known():
    check([Queue(name="a", quota_gpus=1000)], None)


# -- the clock and the day -----------------------------------------------------------------------------------


@given(st.integers(1, 10**13), st.lists(st.integers(0, 10**14), min_size=2, max_size=5))
def test_the_clock_is_an_exponential_within_the_error_that_it_promises(half_life_us, times):
    clock = Decay(half_life_us, 0)
    base = clock.at(0)
    for at_us in (at_us for at_us in times if at_us < 500 * half_life_us):
        halves, rest = divmod(at_us, half_life_us)
        exact = 2.0 ** (rest / half_life_us)
        assert clock.at(at_us) / (base << halves) == pytest.approx(exact, rel=4e-4)
    readings = [clock.at(at_us) for at_us in sorted(set(times)) if at_us < 500 * half_life_us]
    assert readings == sorted(readings)


moves = st.lists(st.tuples(st.integers(0, 3 * DAY_US), st.integers(0, 8), st.integers(0, 5)), max_size=12)


@given(moves, st.integers(0, 5 * DAY_US))
def test_use_within_a_day_is_the_integral_of_what_was_held(drawn, now_us):
    day, changes = Day(), sorted((at_us, (milli, nano)) for at_us, milli, nano in drawn if at_us <= now_us)
    for at_us, change in changes:
        day.add(at_us, change)
    # Each change holds from its time until now, cut to the last day.
    expected = [sum(change[n] * (now_us - max(at_us, now_us - DAY_US)) for at_us, change in changes) for n in (0, 1)]
    assert list(day.used(now_us)) == expected
    before = day.value()
    day.add(now_us, (3, 4))
    day.add(now_us, (-3, -4))
    assert day.value() == before
    day.forget(now_us)
    assert list(day.used(now_us)) == expected


@given(moves, st.integers(0, 8), st.booleans())
def test_a_day_knows_when_its_use_crosses_a_mark(drawn, quarter, falling):
    day, now_us = Day(), 3 * DAY_US
    for at_us, milli, nano in sorted(drawn):
        day.add(at_us, (milli, nano))
    if drawn and falling:
        day.add(now_us, (-sum(milli for _, milli, _ in drawn), 0))  # nothing is held from now on
    mark = day.used(now_us)[0] * quarter // 4
    at_us = day.crosses_us(0, mark, now_us, falling=falling)
    beyond = (lambda used: used <= mark) if falling else (lambda used: used >= mark)
    if at_us is None:
        assert not any(beyond(day.used(now_us + hour * HOUR)[0]) for hour in range(25))
    else:
        assert beyond(day.used(at_us)[0])
        assert at_us == now_us or not beyond(day.used(at_us - 1)[0])


# -- admission -----------------------------------------------------------------------------------------------


def test_limits_count_for_all_above_and_say_how_much_has_to_leave():
    tree = quotas(Queue(name="team", limit_gpus=16), Queue(name="a", parent="team"), Queue(name="b", parent="team"))
    hold(tree, "a", 12)
    refusal = tree.admits(a_job("b", 8), 0)
    assert refusal and refusal.bound is Bound.QUEUE_LIMIT and refusal.queue == "team" and refusal.short_milli == 4000
    assert refusal.text == "it needs 8 GPUs; queue team holds 12 of the 16 that it may hold"
    assert tree.admits(a_job("b", 4), 0) is None
    assert tree.admits(a_job("b", 8), 0, gpus=4) is None
    assert tree.never(a_job("b", 16)) is None
    assert tree.never(a_job("b", 17)) == "it needs 17 GPUs, and queue team may hold 16 at most"


def test_a_user_has_a_limit_of_his_own():
    tree = quotas(Queue(name="a", user_gpus=4))
    hold(tree, "a", 3, owner="ann")
    assert tree.admits(a_job("a", 4, owner="bob"), 0) is None
    refusal = tree.admits(a_job("a", 2, owner="ann"), 0)
    assert refusal and refusal.bound is Bound.USER_LIMIT and refusal.short_milli == 1000
    assert refusal.text == "it needs 2 GPUs; ann holds 3 of the 4 that a user may hold in queue a"


def test_parts_of_gpus_count_as_parts():
    tree = quotas(Queue(name="a", limit_gpus=1))
    job = a_job("a", 1, gpu_milli=500)
    assert tree.admits(job, 0) is None
    tree.put(job, gpus(0.5), 0)
    assert tree.admits(job, 0) is None
    tree.put(job, gpus(0.5), 0)
    refusal = tree.admits(job, 0)
    assert refusal and refusal.text == "it needs 0.5 GPUs; queue a holds 1 of the 1 that it may hold"


def test_a_day_refuses_what_it_cannot_carry_and_says_when_it_can():
    tree = quotas(Queue(name="a", gpu_us_per_day=48 * HOUR))
    job = hold(tree, "a", 8)
    assert not tree.spent(job, 6 * HOUR - job.grace_us - 1) and tree.spent(job, 6 * HOUR - job.grace_us)
    assert tree.wake_us(HOUR) == 6 * HOUR - job.grace_us
    tree.take(job, gpus(8), 5 * HOUR)
    refusal = tree.admits(a_job("a", 16), 5 * HOUR)
    assert refusal and refusal.bound is Bound.DAY_GPU_TIME and refusal.short_milli is None
    assert refusal.text.startswith(
        "queue a used 40 GPU-h of the 48 GPU-h that it may use within a day; with it, the next 1h"
    )
    # One hour of the eight GPUs has to leave the window first.
    assert refusal.until_us == DAY_US + HOUR
    assert tree.admits(a_job("a", 16), DAY_US + HOUR) is None
    # A short job needs no whole hour.
    assert tree.admits(a_job("a", 16, time_limit_us=HOUR // 2), 5 * HOUR) is None
    text = "its first 1h takes 64 GPU-h, and queue a may use 48 GPU-h a day"
    assert tree.never(a_job("a", 64)) == text


def test_a_day_has_money_too():
    tree = quotas(Queue(name="a", micro_usd_per_day=100_000_000))
    hold(tree, "a", 10)
    refusal = tree.admits(a_job("a", 8), 4 * HOUR)  # used 80, and 36 for the next hour
    assert refusal and refusal.bound is Bound.DAY_COST and refusal.until_us is None
    assert refusal.text.endswith("would take $36.00")


def test_a_queue_that_does_not_lend_keeps_its_quota():
    tree = quotas(Queue(name="product", quota_gpus=16, lend=False), Queue(name="research", quota_gpus=8))
    job = hold(tree, "research", 12)
    assert not tree.entitled(a_job("research", 8))
    refusal = tree.admits(a_job("research", 8), 0)
    assert refusal and refusal.bound is Bound.KEPT and refusal.short_milli == 4000
    assert refusal.text == "it needs 8 GPUs; 12 of 32 are held, and 16 are kept by queues that do not lend"
    assert tree.admits(a_job("research", 4), 0) is None
    assert tree.admits(a_job("product", 16), 0) is None
    tree.leave(job, 12_000)
    refusal = tree.admits(a_job("research", 8), 0)
    assert refusal and refusal.short_milli == -8000  # leaving jobs make room enough


# -- victims by quota ----------------------------------------------------------------------------------------

TREE = (
    Queue(name="x", quota_gpus=16),
    Queue(name="x1", parent="x", quota_gpus=8),
    Queue(name="x2", parent="x", quota_gpus=4),
    Queue(name="y", quota_gpus=16),
    Queue(name="y1", parent="y", quota_gpus=8),
    Queue(name="y2", parent="y", quota_gpus=8),
)


def test_borrowed_is_taken_back_from_the_nearest_first_and_only_what_is_over():
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


def test_most_of_a_day_is_one_number_in_the_code_and_in_the_docs():
    tree = Quotas([Queue(name="a", gpu_us_per_day=8 * HOUR)])
    most = 7 * HOUR * 1000
    assert tree.most_of_day(a_job("a", 8), (most, 0)) == "7 GPU-h of the 8 GPU-h that queue a may use"
    assert tree.most_of_day(a_job("a", 8), (most - 1, 0)) is None
    assert Fraction(7, 8) == MOST_OF_DAY
    for page in ("docs/design/queues.md", "docs/how-to/queues.md"):
        assert "seven eighths of a day's limit" in " ".join((ROOT / page).read_text().split()), page


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


def test_jobs_of_a_queue_that_is_gone_wait_in_default():
    tree = quotas(Queue(name="a", quota_gpus=8), Queue(name="default", limit_gpus=8))
    hold(tree, "a", 6)
    regrouped = tree.regrouped([Queue(name="default", limit_gpus=8)], HOUR)
    refusal = regrouped.admits(a_job("a", 4), HOUR)
    assert refusal and refusal.queue == "default"
    assert tree.admits(a_job("a", 4), HOUR) is None
    back = regrouped.regrouped(tree.queues, HOUR)
    assert back.admits(a_job("a", 4), HOUR) is None


def test_a_day_limit_that_comes_later_counts_the_whole_day():
    tree = quotas(Queue(name="team"), Queue(name="a", parent="team"))
    job = hold(tree, "a", 8)
    tree.take(job, gpus(8), HOUR)
    hold(tree, "a", 4, at_us=HOUR)
    limited = [Queue(name="team", gpu_us_per_day=100 * HOUR), Queue(name="a", parent="team")]
    later = tree.regrouped(limited, 2 * HOUR)
    refusal = later.admits(a_job("team", 200), 2 * HOUR)
    assert refusal and refusal.text.startswith("queue team used 12 GPU-h of the 100 GPU-h")


def test_what_is_forgotten_changes_no_answer():
    """The fault simulation found this (--seed 52805): a state that forgot sooner was another one than its log's."""
    trees = [quotas(Queue(name="a", gpu_us_per_day=1000 * HOUR)) for _ in range(2)]
    for tree in trees:
        hold(tree, "a", 2)  # it holds on for days, and nothing that is remembered says since when
    for number in (*range(1, 81), 120):
        for tree in trees:
            job = hold(tree, "a", 8, at_us=number * HOUR)
            tree.take(job, gpus(8), number * HOUR + HOUR // 2)
    trees[0].forget()
    (forgot, knows), now_us = trees, 121 * HOUR
    assert len(forgot._moves) == 2 < len(knows._moves)
    assert forgot.value() == knows.value()
    limited, job = [Queue(name="a", gpu_us_per_day=200 * HOUR)], a_job("a", 200)
    refusals = [tree.regrouped(limited, now_us).admits(job, now_us) for tree in trees]
    assert refusals[0] == refusals[1] and refusals[0].text.startswith("queue a used 52 GPU-h of the 200 GPU-h")


# -- order of queues -----------------------------------------------------------------------------------------


def test_a_queue_that_is_inside_its_quota_goes_first_then_the_one_that_borrowed_least_by_weight():
    tree = quotas(Queue(name="a", quota_gpus=8), Queue(name="b", weight=2), Queue(name="c"))
    for queue, count in (("a", 6), ("b", 8), ("c", 5)):
        hold(tree, queue, count)
    assert sorted("cba", key=lambda queue: tree.share(queue, 0)) == ["a", "b", "c"]
    hold(tree, "a", 2)
    # Now a is at its quota: it has borrowed nothing, so of those that would borrow it is still the first.
    assert tree.share("a", 0) == (1, 0)
    assert tree.share("c", 0) == (1, 5 * SHARE // 32)
    assert tree.share("b", 0) == (1, 8 * SHARE // 32 // 2)


def test_a_fair_share_counts_the_resource_that_the_queue_borrows_most():
    tree = quotas(Queue(name="a"), Queue(name="b"))
    tree.resize(Held(cpu_milli=100_000, memory_bytes=1000), 0)
    tree.put(a_job("a", 1), Held(gpu_milli=1000, cpu_milli=50_000), 0)
    tree.put(a_job("b", 1), Held(gpu_milli=8000, memory_bytes=100), 0)
    assert tree.share("a", 0)[1] == SHARE // 2 and tree.share("b", 0)[1] == SHARE * 8 // 32


def test_what_was_used_fades_with_the_half_life():
    tree = quotas(Queue(name="a"), half_life_us=HOUR)
    job = hold(tree, "a", 32)
    tree.take(job, gpus(32), 10 * HOUR)
    now, later = tree.share("a", 10 * HOUR)[1], tree.share("a", 13 * HOUR)[1]
    assert now == pytest.approx(SHARE * 4 / 5, rel=2e-3)  # it held everything for long, and holds nothing
    assert later == pytest.approx(now / 8, rel=2e-3)


def test_the_order_of_the_file_does_not_matter():
    one, other = quotas(*TREE), quotas(*reversed(TREE))
    for tree in (one, other):
        hold(tree, "x1", 4)
        hold(tree, "y", 3)
    assert one.value() == other.value()


# -- random trees --------------------------------------------------------------------------------------------


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
        """By a recount."""
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
        # Whoever does not lend could have the rest of its quota now, with all that is held.
        assert claim(crowd, None) <= 32


def claim(crowd: Crowd, queue: Queue | None) -> int:
    """What a queue holds or keeps, counted from nothing."""
    name = queue.name if queue else None
    own = sum(job.gpus for job in crowd.running.values() if job.queue == (name or "default"))
    inner = own + sum(claim(crowd, each) for each in crowd.queues if each.parent == name)
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
    raise AssertionError("everybody left, and it still may not start")


# -- fair shares over time -----------------------------------------------------------------------------------


def saturate(weights: dict[str, int], cluster: int, hours: int, seed: int, half_life_us: int) -> dict[str, int]:
    """Return the GPU time of queues that always have more to run; each start goes to the first in their order."""
    random, tree = (
        Random(seed),
        quotas(
            *(Queue(name=name, weight=weight) for name, weight in weights.items()),
            cluster=cluster,
            half_life_us=half_life_us,
        ),
    )
    got, now_us, free, live = dict.fromkeys(weights, 0), 0, cluster, list[tuple[int, int, str, int]]()
    number = 0
    while now_us < hours * HOUR:
        while free:
            queue = min(sorted(weights), key=lambda each: tree.share(each, now_us))
            size = min(free, random.choice([1, 1, 2, 4, 8]))
            number += 1
            live.append((now_us + random.randrange(HOUR // 10, 3 * HOUR), number, queue, size))
            tree.put(a_job(queue, size), gpus(size), now_us)
            free -= size
        live.sort(reverse=True)
        ends_us, _, queue, size = live.pop()
        for _, _, each, held in [*live, (0, 0, queue, size)]:
            got[each] += held * (ends_us - now_us)
        now_us = ends_us
        tree.take(a_job(queue, size), gpus(size), now_us)
        free += size
    return got


@pytest.mark.parametrize("half_life_us", [HOUR, HALF_LIFE_US])
def test_queues_that_always_want_more_get_gpu_time_by_their_weights(half_life_us):
    for seed in range(3):
        got = saturate({"a": 2, "b": 1}, 32, 24 * 10, seed, half_life_us)
        assert got["a"] / sum(got.values()) == pytest.approx(2 / 3, rel=0.005), f"seed {seed}"


def test_before_there_is_a_node_no_queue_has_borrowed():
    tree = Quotas([Queue(name="a", quota_gpus=8), Queue(name="b")])
    assert tree.share("a", HOUR) == (0, 0) and tree.share("b", HOUR) == (1, 0)
    assert [each.queue.name for each in tree.standings(HOUR)] == ["a", "b", "default"]


def test_beside_a_queue_that_keeps_its_quota_the_rest_is_borrowed_from_outside():
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
