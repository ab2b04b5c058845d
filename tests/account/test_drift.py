"""Weeks of step times by kind of GPU: what counts, and when machines have changed."""

from dataclasses import replace

import pytest

from cordee.account.drift import WEEK_US, weeks_of_steps
from cordee.events import AttemptPlaced, Estimate, Event, Job, JobSubmitted, Lease, Measured, Node, NodeUp
from cordee.ids import JobId

MONDAY_US = 4 * 24 * 3600 * 1_000_000
NODES = [
    NodeUp(at_us=1, node=Node(name=name, epoch=1, gpu_name=kind, gpus=8))
    for name, kind in (("a", "H100"), ("b", "A10"))
]
PLAN = Estimate(layout="fsdp8", peak_bytes=1, gpu_memory_bytes=1, gpus=8, step_us=1_000_000)


def attempt(number: int, week: int, step_us: int, *, nodes: str = "a", step: int = 50) -> list[Event]:
    """A job on 8 GPUs of these nodes, placed on a Tuesday."""
    job = JobId(f"job-{number:06}")
    at_us = MONDAY_US + week * WEEK_US + WEEK_US // 7
    each = 8 // len(nodes)
    leases = tuple(Lease(node=node, gpus=tuple(range(each))) for node in nodes)
    return [
        JobSubmitted(at_us=at_us, job=Job(job_id=job, name="j", owner="ada", gpus=8, estimates=(PLAN,)), spec="{}"),
        AttemptPlaced(at_us=at_us, job_id=job, epoch=1, leases=leases),
        Measured(at_us=at_us, job_id=job, epoch=1, rank=0, step=step, peak_bytes=1, step_us=step_us),
    ]


def many(week: int, *steps_us: int, nodes: str = "a") -> list[Event]:
    return [
        event for at, step_us in enumerate(steps_us) for event in attempt(100 * week + at, week, step_us, nodes=nodes)
    ]


def test_a_week_has_the_median_of_its_attempts_and_how_far_it_left_those_before() -> None:
    log = [*NODES, *many(0, 900_000, 1_000_000, 1_100_000), *many(1, 1_010_000, 1_000_000, 990_000)]
    log += many(3, 1_300_000, 1_250_000, 1_200_000)
    first, second, third = weeks_of_steps(log)
    assert (first.gpu_name, first.from_us, first.attempts, first.changed_by) == ("H100", MONDAY_US, 3, None)
    assert second.over_plan == 1.0 and second.changed_by == 0.0 and not second.is_change
    assert third.from_us == MONDAY_US + 3 * WEEK_US
    assert third.changed_by == pytest.approx(0.25) and third.is_change


def test_a_constant_error_is_no_change_and_few_attempts_tell_of_none() -> None:
    slow = [*NODES, *many(0, 2_000_000, 2_000_000, 2_000_000), *many(1, 2_000_000, 2_000_000, 2_000_000)]
    assert [week.is_change for week in weeks_of_steps(slow)] == [False, False]
    assert weeks_of_steps([*NODES, *many(0, 1, 1, 1), *many(1, 9_000_000)])[1].changed_by is None


def test_kinds_are_apart_and_what_cannot_be_compared_is_left_out() -> None:
    log = [*NODES, *attempt(1, 0, 500_000), *attempt(2, 0, 3_000_000, nodes="b"), *attempt(3, 0, 9, nodes="ab")]
    log += attempt(4, 0, 9, step=3)  # of its first steps
    log += [replace(event, at_us=event.at_us) for event in attempt(5, 0, 9)[1:]]  # without a plan
    assert [(week.gpu_name, week.attempts, week.over_plan) for week in weeks_of_steps(log)] == [
        ("A10", 1, 3.0), ("H100", 1, 0.5),
    ]  # fmt: skip
