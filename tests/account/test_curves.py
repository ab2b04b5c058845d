"""Curves of a job: bounded, the newest attempt's, and what an epoch of the data cost."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cordee.account.attempt import AttemptRow
from cordee.account.curves import CURVES_MAX, POINTS_MAX, Curve, CurvePoint, Curves
from cordee.account.epochs import epoch_costs
from cordee.account.split import Split
from cordee.control.codec import codec
from cordee.control.fold import SavedFold
from cordee.events import GpusSampled, Job, JobSubmitted, Measured, MetricsLogged, Restored
from cordee.ids import JobId

A = JobId("gpt-abcdef")
JOB = Job(job_id=A, name="gpt", owner="ada", gpus=4)


def curve(steps: int, value: Any = float) -> Curve:
    made = Curve()
    for step in range(steps):
        made.add(CurvePoint(step, 10 * step, value(step)))
    return made


@pytest.mark.parametrize("steps", [1, 2, POINTS_MAX, POINTS_MAX + 1, 3 * POINTS_MAX + 1, 100_003])
def test_a_curve_is_bounded_and_keeps_its_beginning_and_its_end(steps: int) -> None:
    points = list(curve(steps).points())
    assert len(points) <= POINTS_MAX + 1
    assert len(points) >= min(steps, POINTS_MAX // 2)
    assert (points[0].step, points[-1].step) == (0, steps - 1)
    gaps = {after.step - before.step for before, after in pairwise(points[:-1])}
    assert len(gaps) <= 1, "equal distances"


def test_a_value_that_is_not_finite_outlives_the_thinning() -> None:
    points = list(curve(20_000, lambda step: math.nan if step == 7_001 else 1.0).points())
    assert sum(math.isnan(point.value) for point in points) == 1


def test_repeated_steps_replace_what_was_there() -> None:
    made = curve(3_000)
    made.add(CurvePoint(1_000, 5, -1.0))
    points = list(made.points())
    assert points[-1] == (1_000, 5, -1.0) and points[-2].step < 1_000
    made.cut(0)
    assert list(made.points()) == [] and made.last is None


class Log:
    """Curves, and the events that they are made of."""

    def __init__(self) -> None:
        self.curves = Curves()
        self.curves.apply(JobSubmitted(at_us=1, job=JOB, spec="{}"))
        self.apply(Restored, step=0, generation=None)

    def apply(self, kind: Any, epoch: int = 1, **fields: Any) -> None:
        self.curves.apply(kind(at_us=5, job_id=A, epoch=epoch, **fields))

    def log(self, steps: tuple[int, ...], epoch: int = 1, **values: float | None) -> None:
        names = tuple(name for name in values for _ in steps)
        every = tuple(value for value in values.values() for _ in steps)
        self.apply(MetricsLogged, epoch, rank=0, step=steps[-1], names=names, values=every, steps=steps * len(values))

    def points(self, name: str) -> list[tuple[int, float]]:
        job = self.curves.of(A)
        assert job is not None
        return [(point.step, point.value) for point in job.curves[name].points()]


def test_a_new_attempt_goes_on_from_its_checkpoint_and_late_reports_of_the_old_one_change_nothing() -> None:
    log = Log()
    log.log((1, 2, 3, 4), loss=1.0)
    log.apply(Restored, 2, step=2, generation=1)
    log.log((3, 4), epoch=2, loss=2.0)
    log.log((3, 4, 5), epoch=1, loss=9.0)
    assert log.points("loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_what_is_measured_has_curves_too_and_nodes_are_summed() -> None:
    log = Log()
    log.apply(Measured, rank=1, step=3, peak_bytes=5)
    log.apply(Measured, rank=0, step=3, peak_bytes=7, step_us=500_000, tokens_per_s=9.0, mfu=0.25)
    for node, busy in (("a", 1.0), ("b", 0.5)):
        log.apply(
            GpusSampled, node=node, gpus=2, from_us=1, busy=busy, memory_bytes=10, power_mw=600_000, energy_mj=4_000
        )
    assert log.points("measured/tokens_per_s") == [(3, 9.0)] and log.points("measured/mfu") == [(3, 0.25)]
    assert log.points("measured/step_s") == [(3, 0.5)] and log.points("measured/peak_bytes") == [(3, 7.0)]
    assert log.points("gpu/busy") == [(3, 0.75)] and log.points("gpu/power_w") == [(3, 1200.0)]
    job = log.curves.of(A)
    assert job is not None and job.energy_mj == 8_000


def test_names_are_bounded_and_other_jobs_unknown() -> None:
    log = Log()
    for at in range(CURVES_MAX + 5):
        log.log((1,), **{f"m{at}": 1.0})
    job = log.curves.of(A)
    assert job is not None and len(job.curves) == CURVES_MAX
    log.curves.apply(Restored(at_us=1, job_id=JobId("other-abcdef"), epoch=1, step=0, generation=None))
    assert log.curves.of(JobId("other-abcdef")) is None
    log.curves.retire([A])
    assert log.curves.of(A) is None


def test_curves_survive_their_saved_form() -> None:
    log = Log()
    log.log(tuple(range(700)), loss=None, acc=0.5)
    log.apply(GpusSampled, node="a", gpus=2, from_us=1, busy=0.5, memory_bytes=10, power_mw=6, energy_mj=4)
    kind = codec(SavedFold.__annotations__["curves"])
    again = Curves.restored(kind.decode(kind.encode(log.curves.saved())))
    for each in (log.curves, again):
        each.apply(MetricsLogged(at_us=9, job_id=A, epoch=1, rank=0, step=701, names=("acc",), values=(0.7,)))
    assert repr(again.saved()) == repr(log.curves.saved())


ROW = AttemptRow(
    job_id=A, epoch=1, owner="ada", queue="default", service="", gpus=4, placed_us=0, ended_us=100, outcome=None,
    gpu_us=Split(), micro_usd=Split(useful=1_001), cause=None, charged=None, steps=0, steps_repeated=0, tokens=0,
    price_sources=(),
)  # fmt: skip


def test_the_cost_of_the_epochs_sums_to_what_was_held() -> None:
    points = [CurvePoint(0, 10, 0.0), CurvePoint(5, 30, 0.9), CurvePoint(9, 50, 1.0), CurvePoint(20, 150, 2.0)]
    rows = [ROW, replace(ROW, epoch=2, placed_us=120, ended_us=None, micro_usd=Split(useful=999))]
    found = epoch_costs(points, rows, now_us=180)
    assert [(each.epoch, each.first_step) for each in found] == [(0, 0), (1, 9), (2, 20)]
    assert [each.micro_usd for each in found] == [500, 501 + 499, 500]
    assert sum(each.micro_usd for each in found) == 2_000
    assert epoch_costs([], rows, 180) == [] and epoch_costs([CurvePoint(1, 1, math.nan)], rows, 180) == []
