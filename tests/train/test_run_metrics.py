"""Metrics of a script: the points of their curves, what cannot be one, and a device that fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cordee.errors import InputError
from cordee.event_json import decode
from cordee.events import MetricsLogged
from cordee.train import metrics
from cordee.train.metrics import Metrics
from cordee.train.reading import Reading
from cordee.train.report import Reporter
from cordee.train.settings import settings


class Scene:
    """One rank's metrics, and what it reports."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        env = {"CORDEE_JOB": "test-abcdef", "CORDEE_EPOCH": "1", "CORDEE_SPOOL": str(folder)}
        self.reporter = Reporter(settings(env), rank)
        self.metrics, self.path = Metrics(self.reporter, rank), folder / f"rank{rank}.jsonl"

    def reported(self) -> list[MetricsLogged]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        events = [decode(json.loads(line)["event"]) for line in lines]
        return [each for each in events if isinstance(each, MetricsLogged)]

    def curve(self, name: str) -> list[tuple[int, float | None]]:
        found = [zip(each.steps, each.names, each.values, strict=True) for each in self.reported()]
        return [(step, value) for points in found for step, of, value in points if of == name]


def test_the_points_of_each_curve_are_reported_once_a_period_and_on_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    scene = Scene(tmp_path)
    for step in range(1, 30):
        scene.metrics.log({"loss": 1 / step, **({"val/acc": step} if step % 10 == 0 else {})}, step)
        scene.metrics.stepped(step)
        clock[0] += 1.0
    scene.metrics.report(29)
    scene.metrics.report(29)
    assert [each.step for each in scene.reported()] == [1, 6, 11, 16, 21, 26, 29]
    assert scene.curve("loss") == [(step, 1 / step) for step in range(1, 30)]
    assert scene.curve("val/acc") == [(10, 10.0), (20, 20.0)]
    assert scene.reported()[2].names[-1] == "loss", "the newest point is the last one"


def test_of_many_steps_in_a_period_some_are_reported_and_always_the_newest(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in range(1_000_000 // 400):
        scene.metrics.log({"loss": step, "lr": 0.1}, step)
    scene.metrics.report(2_500)
    steps = [step for step, _ in scene.curve("loss")]
    assert len(steps) <= 20 and steps[-1] == 2_499 and steps[0] < 500
    assert len(scene.reported()) == 1


def test_a_step_that_is_logged_again_replaces_what_it_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5)):
        scene.metrics.log({"loss": value}, step)
    scene.metrics.report(3)
    assert scene.curve("loss") == [(1, 1.0), (2, 2.5)]


def test_what_is_not_finite_is_said_to_be_so_and_other_ranks_report_nothing(tmp_path: Path) -> None:
    for rank in (0, 1):
        scene = Scene(tmp_path, rank)
        scene.metrics.log({"loss": math.nan, "norm": math.inf, "acc": 1}, 3)
        scene.metrics.report(3)
        found = [(each.step, dict(zip(each.names, each.values, strict=True))) for each in scene.reported()]
        assert found == ([(3, {"loss": None, "norm": None, "acc": 1.0})] if rank == 0 else [])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a b": 1}, "'a b' cannot name a metric"),
        ({"loss": "low"}, "the metric 'loss' is 'low', not a number"),
        ({"loss": None}, "the metric 'loss' is None, not a number"),
        ({f"m{at}": at for at in range(65)}, "'m64' is one more than 64 metrics"),
    ],
)
def test_what_is_no_metric_is_refused_at_once(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Scene(tmp_path).metrics.log(values, 1)


class Late(Reading):
    """A value on a GPU, as `Reading` sees it: no GPU is at hand, so its arrival is played."""

    arrived, fails = False, False

    def is_ready(self) -> bool:
        return self.arrived

    def number(self) -> float:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().number()


def test_a_value_that_its_device_still_computes_is_not_waited_for_but_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PERIOD_S", 0.0)
    scene, late = Scene(tmp_path), [Late("loss", step) for step in range(4)]
    for step, reading in enumerate(late):
        scene.metrics.log({"loss": reading}, step)
    scene.metrics.stepped(4)
    assert scene.reported() == []
    late[0].arrived = late[1].arrived = late[3].arrived = True
    scene.metrics.stepped(5)
    assert scene.curve("loss") == [(0, 0.0), (1, 1.0)], "in the order of the steps"
    scene.metrics.report(6)
    assert scene.curve("loss") == [(step, float(step)) for step in range(4)]


def test_a_tensor_of_the_cpu_may_change_after_it_was_logged(tmp_path: Path) -> None:
    scene, loss = Scene(tmp_path), torch.tensor([2.5])
    scene.metrics.log({"loss": loss}, 1)
    loss.zero_()
    scene.metrics.report(1)
    assert scene.curve("loss") == [(1, 2.5)]
    with pytest.raises(InputError, match="the metric 'loss' has 2 values"):
        scene.metrics.log({"loss": torch.zeros(2)}, 2)


def test_a_failed_device_keeps_no_rank(tmp_path: Path) -> None:
    scene, lost = Scene(tmp_path), Late("loss", 1.0)
    lost.fails = True
    scene.metrics.log({"loss": lost}, 3)
    scene.metrics.report(3)
    assert scene.reported() == []
