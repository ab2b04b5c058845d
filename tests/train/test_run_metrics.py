"""Metrics of a script: their newest values, what cannot be one, and a device that fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cordee.errors import InputError
from cordee.event_json import decode
from cordee.events import MetricsLogged
from cordee.train import metrics
from cordee.train.metrics import Metrics
from cordee.train.report import Reporter
from cordee.train.settings import settings


class Scene:
    """One rank's metrics, and what it reports."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        env = {"CORDEE_JOB": "test-abcdef", "CORDEE_EPOCH": "1", "CORDEE_SPOOL": str(folder)}
        self.reporter = Reporter(settings(env), rank)
        self.metrics, self.path = Metrics(self.reporter, rank), folder / f"rank{rank}.jsonl"

    def reported(self) -> list[tuple[int, dict[str, float | None]]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        events = [decode(json.loads(line)["event"]) for line in lines]
        return [(each.step, dict(zip(each.names, each.values))) for each in events if isinstance(each, MetricsLogged)]


def test_the_newest_value_of_each_is_reported_once_a_period_and_on_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    scene = Scene(tmp_path)
    for step in range(1, 30):
        scene.metrics.log({"loss": 1 / step, **({"val/acc": step} if step % 10 == 0 else {})})
        scene.metrics.stepped(step)
        clock[0] += 1.0
    scene.metrics.report(29)
    scene.metrics.report(29)
    assert [step for step, _ in scene.reported()] == [1, 6, 11, 16, 21, 26, 29]
    assert scene.reported()[2] == (11, {"loss": 1 / 11, "val/acc": 10.0})
    assert scene.reported()[-1] == (29, {"loss": 1 / 29})


def test_what_is_not_finite_is_said_to_be_so_and_other_ranks_report_nothing(tmp_path: Path) -> None:
    for rank in (0, 1):
        scene = Scene(tmp_path, rank)
        scene.metrics.log({"loss": math.nan, "norm": math.inf, "acc": 1})
        scene.metrics.report(3)
        assert scene.reported() == ([(3, {"loss": None, "norm": None, "acc": 1.0})] if rank == 0 else [])


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
        Scene(tmp_path).metrics.log(values)


def test_a_tensor_is_read_only_when_it_is_reported_and_a_failed_device_keeps_no_rank(tmp_path: Path) -> None:
    class Tensor:
        """One on a device that fails when it is read."""

        def __init__(self, size: int) -> None:
            self.size = size

        def detach(self) -> "Tensor":
            return self

        def numel(self) -> int:
            return self.size

        def __float__(self) -> float:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    scene = Scene(tmp_path)
    scene.metrics.log({"loss": Tensor(1)})
    scene.metrics.report(3)
    assert scene.reported() == []
    with pytest.raises(InputError, match="the metric 'loss' has 2 values"):
        scene.metrics.log({"loss": Tensor(2)})
