"""Admission: the limits of queues, users and days, and the quota that a queue keeps."""

from quota_trees import HOUR, a_job, gpus, hold, quotas

from cordee.events import Queue
from cordee.schedule.quota.bounds import Bound
from cordee.schedule.quota.day import DAY_US


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


def test_each_user_has_a_limit():
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


def test_a_day_limit_refuses_a_job_until_its_first_hour_fits():
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


def test_jobs_of_a_queue_that_is_gone_wait_in_default():
    tree = quotas(Queue(name="a", quota_gpus=8), Queue(name="default", limit_gpus=8))
    hold(tree, "a", 6)
    regrouped = tree.regrouped([Queue(name="default", limit_gpus=8)], HOUR)
    refusal = regrouped.admits(a_job("a", 4), HOUR)
    assert refusal and refusal.queue == "default"
    assert tree.admits(a_job("a", 4), HOUR) is None
    back = regrouped.regrouped(tree.queues, HOUR)
    assert back.admits(a_job("a", 4), HOUR) is None
