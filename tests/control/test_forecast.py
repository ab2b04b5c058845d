"""Forecasts by the steps that a job has left, at its own pace or at the planned one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.account.measured import StepsLeft
from cordee.answers.jobs import ForecastView
from cordee.cli.dry_run import forecast_line
from cordee.control.forecast import Forecast, _steps_us, forecast
from cordee.events import Job, JobSubmitted, Node, NodeUp, Tier
from cordee.ids import JobId
from cordee.schedule import decide
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

S = 1_000_000
A, B = JobId("a-aaaaaa"), JobId("b-bbbbbb")
NODE = Node(name="n", epoch=1, gpu_name="H100", gpus=8)


def job(job_id: JobId) -> Job:
    return Job(job_id=job_id, name="x", owner="ada", gpus=8, tier=Tier.STANDARD, restart_us=0)


def submit(state: State, one: Job, at_us: int) -> None:
    apply(state, JobSubmitted(at_us=at_us, job=one, spec=""))
    for decided in decide(state, at_us).events:
        apply(state, decided)


@pytest.fixture
def state() -> State:
    """Return a node on which such jobs ran for 20 to 29 minutes; A runs since a minute, and B waits for it."""
    state = State()
    apply(state, NodeUp(at_us=0, node=NODE))
    for minutes in range(20, 30):
        state.history.add(job(A), minutes * 60 * S)
    for each in (A, B):
        submit(state, job(each), 0)
    return state


def ahead(state: State, steps_left: dict[JobId, StepsLeft]) -> tuple[Forecast, Forecast]:
    found = forecast(Snapshot(state), NOW_US, [A, B], steps_left, arrivals=False, budget_s=None)
    return found[A], found[B]


NOW_US = 60 * S
OWN = StepsLeft(steps=6, gpus=8, step_us=500_000, low_us=480_000, high_us=550_000, measured=True)


def test_a_job_ends_by_its_own_steps_and_not_by_the_run_times_of_others(state: State) -> None:
    by_history, _ = ahead(state, {})
    assert by_history.end.p50_us is not None and by_history.end.p50_us - NOW_US > 15 * 60 * S
    assert by_history.source == "other jobs"
    own, waits = ahead(state, {A: OWN})
    assert own.end.p10_us is not None and own.end.p50_us is not None and own.end.p90_us is not None
    assert own.end.p50_us - NOW_US == pytest.approx(3 * S, rel=0.05)
    assert NOW_US + 2.8 * S < own.end.p10_us < own.end.p50_us < own.end.p90_us < NOW_US + 3.4 * S
    assert waits.start.p50_us == own.end.p50_us, "the one that waits for it starts sooner, too"
    assert forecast_line(ForecastView.of(own)).startswith("ends in 3 s")
    assert forecast_line(ForecastView.of(own)).endswith("run time from its own steps)")


def test_a_job_that_waits_runs_by_its_plan(state: State) -> None:
    plan = StepsLeft(steps=100, gpus=8, step_us=S, low_us=S * 8 // 10, high_us=S * 13 // 10, measured=False)
    own, waits = ahead(state, {A: OWN, B: plan})
    assert own.end.p50_us is not None and waits.end.p50_us is not None
    assert waits.end.p50_us - own.end.p50_us == pytest.approx(100 * S, rel=0.1)
    assert forecast_line(ForecastView.of(waits)).endswith("run time from its plan)")


def test_steps_measured_on_fewer_gpus_take_less_on_all() -> None:
    half = StepsLeft(steps=10, gpus=4, step_us=2 * S, low_us=2 * S, high_us=2 * S, measured=True)
    assert _steps_us(half, 8, 0.5) == _steps_us(half, 8, 0.0) == 10 * S


def test_nine_of_ten_draws_lie_within_the_interval() -> None:
    drawn = [_steps_us(OWN, 8, (k + 0.5) / 1000) for k in range(1000)]
    assert sum(6 * OWN.low_us <= each <= 6 * OWN.high_us for each in drawn) == 900
    assert drawn == sorted(drawn)


@given(u=st.floats(0, 1, exclude_max=True), steps=st.integers(0, 2**53), step_us=st.integers(1, 2**53))
def test_forecast_gives_a_time_for_any_report_of_ranks(u: float, steps: int, step_us: int) -> None:
    left = StepsLeft(steps, 8, step_us, low_us=0, high_us=2**53, measured=True)
    assert 1 <= _steps_us(left, 8, u) < 2**60
