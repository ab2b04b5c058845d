"""The costs of a reclaim come from the ledgers of simulated runs."""

from statistics import fmean

import pytest

from cordee.demo.reclaim import GPUS, ReclaimLosses, play_reclaims
from cordee.plan.survive import Saving, survival
from cordee.plan.training import Training
from cordee.units import US_PER_HOUR, format_micro_usd
from cordee.workload.load import load_shape

STEP_S = 59.6


@pytest.fixture(scope="module")
def story() -> ReclaimLosses:
    shape, training = load_shape("llama-3-70b"), Training(8192, 512)
    expected = survival(shape, training, GPUS, Saving(16e9), mtbi_s=24 * 3600)
    return play_reclaims(expected, step_s=STEP_S, usd_per_gpu_hour=2.99)


def test_47_hours_without_checkpoints(story: ReclaimLosses) -> None:
    assert story.plain.lost_gpu_us == 3_008 * US_PER_HOUR
    assert format_micro_usd(story.plain.lost_micro_usd) == "$8,994"
    assert story.plain.checkpoint_micro_usd == 0


def test_with_the_interval_at_worst_a_whole_period_and_a_step_are_done_again(story: ReclaimLosses) -> None:
    hourly_micro_usd = GPUS * 2_990_000
    period_micro_usd = hourly_micro_usd * story.period_s / 3600
    step_micro_usd = hourly_micro_usd * STEP_S / 3600
    worst = story.interval_worst
    assert abs(worst.lost_micro_usd - period_micro_usd) <= step_micro_usd
    assert all(loss.lost_micro_usd <= worst.lost_micro_usd for loss in story.interval)
    assert 0 < story.interval_micro_usd < worst.micro_usd
    assert len({loss.lost_micro_usd for loss in story.interval}) > 10, "the moments differ"


def test_with_a_notice_that_is_handled_only_the_restart_is_paid(story: ReclaimLosses) -> None:
    assert [loss.lost_micro_usd for loss in story.noticed] == [0] * len(story.noticed)
    assert story.noticed_worst.restart_micro_usd > 0
    noticed_micro_usd = fmean(loss.micro_usd for loss in story.noticed)
    assert noticed_micro_usd < story.interval_micro_usd < story.plain.lost_micro_usd / 50


def test_the_cost_of_a_reclaim_beside_the_job_is_reported_too(story: ReclaimLosses) -> None:
    """By hand: 7 nodes of 8 wait 10 minutes, and a checkpoint stalls 64 GPUs while it is written."""
    hourly_micro_usd = GPUS * 2_990_000
    least, most = story.idle_micro_usd
    assert least == story.plain.idle_micro_usd == 56 * 2_990_000 * 600 // 3600
    # A job that leaves early leaves its GPUs idle for the rest of the notice.
    assert least < most <= least + hourly_micro_usd * story.notice_s / 3600
    assert 0 < story.last_save_micro_usd <= hourly_micro_usd * story.save_s / 3600 + 1


def test_a_notice_shorter_than_the_save_does_not_help() -> None:
    shape, training = load_shape("llama-3-70b"), Training(8192, 512)
    expected = survival(shape, training, GPUS, Saving(16e9), mtbi_s=24 * 3600)
    short = play_reclaims(expected, step_s=STEP_S, usd_per_gpu_hour=2.99, notice_s=30, moments=4)
    assert all(loss.lost_micro_usd > 0 for loss in short.noticed)


def test_the_seed_alone_decides(story: ReclaimLosses) -> None:
    shape, training = load_shape("llama-3-70b"), Training(8192, 512)
    expected = survival(shape, training, GPUS, Saving(16e9), mtbi_s=24 * 3600)
    assert play_reclaims(expected, step_s=STEP_S, usd_per_gpu_hour=2.99) == story
    assert play_reclaims(expected, step_s=STEP_S, usd_per_gpu_hour=2.99, seed=1).interval != story.interval
