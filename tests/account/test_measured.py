"""Planned, measured, off by: what the fold compares, and that a value outside its estimate is said once."""

import pytest

from cordee.account.measured import Measurements, Quantity, StepsLeft
from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Estimate,
    EstimateMissed,
    Event,
    Job,
    JobSubmitted,
    Lease,
    Measured,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId

A = JobId("gpt-abcdef")
PLAN = Estimate(
    layout="tp2 fsdp2",
    gpus=4,
    peak_bytes=70_000_000_000,
    allocated_bytes=60_000_000_000,
    gpu_memory_bytes=80_000_000_000,
    step_us=4_000_000,
    step_us_low=3_000_000,
    step_us_high=5_000_000,
    mfu=0.4,
    save_us=4_000_000,
    restart_us=120_000_000,
)
JOB = Job(job_id=A, name="gpt", owner="ada", gpus=4, sizes=(2,), estimates=(PLAN,))


def placed(epoch: int = 1, gpus: int = 4) -> list[Event]:
    lease = Lease(node="n", gpus=tuple(range(gpus)))
    return [
        AttemptPlaced(at_us=10, job_id=A, epoch=epoch, leases=(lease,)),
        Restored(at_us=20, job_id=A, epoch=epoch, step=0, generation=None),
    ]


def measured(rank: int = 0, step: int = 20, *, epoch: int = 1, **values: int | float) -> Measured:
    return Measured(
        at_us=99,
        job_id=A,
        epoch=epoch,
        rank=rank,
        step=step,
        **{"peak_bytes": 58_000_000_000, **values},  # type: ignore[arg-type]
    )


def fold(*events: Event) -> Measurements:
    found = Measurements()
    for event in (JobSubmitted(at_us=1, job=JOB, spec="{}"), *events):
        found.apply(event)
    return found


def off_by(found: Measurements) -> dict[str, float | None]:
    attempt = found.of(A)
    assert attempt is not None
    return {row.quantity.value: row.off_by for row in attempt.comparisons()}


def test_each_quantity_is_compared_with_its_like() -> None:
    found = fold(
        *placed(),
        Reported(at_us=70_000_010, job_id=A, epoch=1, span=SpanClass.USEFUL, from_us=60_000_010, first_step=0, steps=9),
        measured(0, step=20, step_us=4_400_000, mfu=0.36, tokens_per_s=1e5, peak_bytes=57_000_000_000),
        measured(3, peak_bytes=63_000_000_000),
        CheckpointCommitted(
            at_us=80, job_id=A, epoch=1, step=9, generation=1, size_bytes=1, stall_us=500_000, upload_us=1_500_000
        ),
    )
    assert off_by(found) == pytest.approx(
        {"peak memory": 0.05, "step time": 0.1, "MFU": -0.1, "save": -0.5, "restart": -0.5}
    )
    assert not found.due()


@pytest.mark.parametrize(
    ("values", "quantity", "why"),
    [
        (
            {"peak_bytes": 69_000_000_000},
            Quantity.PEAK,
            "its peak memory is 69 GB, 15 % more than the planned 60 GB",
        ),
        ({"step_us": 6_000_000}, Quantity.STEP, "its step time is 6 s, outside the planned 3 s to 5 s"),
        ({"step_us": 2_000_000}, Quantity.STEP, "its step time is 2 s, outside the planned 3 s to 5 s"),
    ],
)
def test_a_value_outside_its_estimate_is_said_once(values: dict[str, int], quantity: Quantity, why: str) -> None:
    found = fold(*placed(), measured(**values), measured(**values))
    [missed] = found.due()
    assert (missed.quantity, missed.why) == (quantity.value, why)
    found.apply(missed)
    for event in (measured(**values), *placed(epoch=2), measured(epoch=2, **values)):
        found.apply(event)
    assert found.due() == ()
    assert found.missed(A) == (why,)


def test_the_first_steps_of_an_attempt_do_not_count() -> None:
    assert not fold(*placed(), measured(step=3, step_us=60_000_000)).due()


def test_slots_and_sizes_without_an_estimate_are_never_off() -> None:
    assert not fold(*placed(gpus=2), measured(peak_bytes=10**12, step_us=10**9)).due()


def test_late_values_of_an_older_attempt_change_nothing() -> None:
    found = fold(*placed(), *placed(epoch=2), measured(epoch=1, peak_bytes=79_000_000_000))
    assert not found.due()
    attempt = found.of(A)
    assert attempt is not None
    assert (attempt.epoch, attempt.peak_bytes) == (2, None)


def test_the_time_left_follows_from_the_jobs_own_pace() -> None:
    attempt = fold(*placed(), measured(step=54, steps_total=60, step_us=500_000)).of(A)
    assert attempt is not None
    assert attempt.left_us == 3_000_000


def saved(step: int, epoch: int = 1) -> CheckpointCommitted:
    return CheckpointCommitted(
        at_us=80, job_id=A, epoch=epoch, step=step, generation=1, size_bytes=1, stall_us=1, upload_us=1
    )


def test_the_steps_left_spread_as_the_measured_ones_once_the_first_are_over() -> None:
    found = fold(*placed(), measured(step=3, steps_total=100, step_us=4_400_000))
    assert found.steps_left(A, running=True) == StepsLeft(97, 4, 4_400_000, 3_300_000, 5_500_000, measured=True)
    for step, step_us in ((20, 4_000_000), (30, 4_600_000), (40, 4_200_000)):
        found.apply(measured(step=step, steps_total=100, step_us=step_us))
    assert found.steps_left(A, running=True) == StepsLeft(60, 4, 4_200_000, 4_000_000, 4_600_000, measured=True)


def test_a_job_that_waits_goes_on_from_its_checkpoint_at_the_pace_that_it_had() -> None:
    found = fold(*placed(gpus=2), measured(step=40, steps_total=100, step_us=8_000_000), saved(30))
    assert found.steps_left(A, running=False) == StepsLeft(70, 2, 8_000_000, 8_000_000, 8_000_000, measured=True)
    for event in placed(epoch=2)[:1]:
        found.apply(event)
    assert found.steps_left(A, running=True) == StepsLeft(70, 2, 8_000_000, 8_000_000, 8_000_000, measured=True)


def test_before_any_step_was_measured_the_plan_says_how_long_one_takes() -> None:
    found = fold(*placed(), measured(step=1, steps_total=11))
    assert found.steps_left(A, running=True) == StepsLeft(10, 4, 4_000_000, 3_000_000, 5_000_000, measured=False)
    assert fold(*placed()).steps_left(A, running=True) is None, "it never said how many steps there are"
    assert fold(*placed(gpus=2), measured(step=1, steps_total=11)).steps_left(A, running=True) is None, "no plan"


def test_replaying_the_log_says_nothing_again() -> None:
    events: list[Event] = [*placed(), measured(step_us=6_000_000)]
    [missed] = fold(*events).due()
    assert isinstance(missed, EstimateMissed)
    assert not fold(*events, missed).due()
