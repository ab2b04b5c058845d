"""Notices: the request to an attempt to save and leave by a deadline."""

from cordee.events import NoticeGiven, NoticeReason
from cordee.ids import JobId
from cordee.schedule.preemption.loss import expected_loss
from cordee.schedule.state.records import Attempt


def notice(
    attempt: Attempt,
    reason: NoticeReason,
    now_us: int,
    *,
    for_job: JobId | None = None,
    gpus: int | None = None,
    gone_us: int | None = None,
) -> NoticeGiven:
    """Return a notice to leave within the grace period, and before the cloud takes a node at `gone_us`.

    With `gpus` the attempt starts again at once on that number of GPUs.
    """
    deadline_us = now_us + attempt.job.grace_us
    return NoticeGiven(
        at_us=now_us,
        job_id=attempt.job.job_id,
        epoch=attempt.epoch,
        reason=reason,
        deadline_us=deadline_us if gone_us is None else min(deadline_us, max(now_us, gone_us)),
        for_job=for_job,
        gpus=gpus,
        expected_loss_micro_usd=expected_loss(attempt, now_us).micro_usd,
    )
