"""Trackers: one run over all attempts, and none that hangs or fails holds the training up.

W&B and MLflow are played by modules of this test (both were tried by hand, W&B offline and MLflow on SQLite);
TensorBoard's own reader checks its files where it is installed.
"""

import logging
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import cordee
from cordee.errors import InputError
from cordee.train import trackers
from cordee.train.settings import settings
from cordee.train.trackers import Trackers, TrackerThread, run_id


class Run:
    """A run of the played W&B."""

    def __init__(self, **asked: Any) -> None:
        self.asked, self.logged, self.finished = asked, list[dict[str, float]](), False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    runs: list[Run] = []
    played = types.ModuleType("wandb")

    def init(**asked: Any) -> Run:
        runs.append(Run(**asked))
        return runs[-1]

    played.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", played)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name == "wandb" or None)
    return runs


def train(to: Path, until: int) -> None:
    with cordee.job({"n": torch.zeros(1)}, to=to, every=1000, track="wandb") as job:
        for step in job.steps(until):
            job.log(loss=10.0 - step, lr=0.5)


def test_all_attempts_are_one_run_with_every_step(wandb: list[Run], tmp_path: Path) -> None:
    train(tmp_path, 3)
    train(tmp_path, 5)
    first, second = wandb
    assert first.asked["id"] == second.asked["id"] and first.asked["resume"] == "allow"
    assert [each["step"] for each in first.logged + second.logged] == [1, 2, 3, 4, 5]
    assert second.logged[-1] == {"step": 5, "loss": 6.0, "lr": 0.5} and second.finished
    of_job = settings({"CORDEE_JOB": "gpt-abcdef", "CORDEE_EPOCH": "2"})
    assert run_id(of_job) == "gpt-abcdef" and run_id(settings({}, to="a")) != run_id(settings({}, to="b"))


class Stuck:
    """A tracker that hangs from its first points on."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def open(self) -> None:
        pass

    def log(self, points: Any) -> None:
        self.end.wait()

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_loses_points_and_the_end_does_not_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    thread = TrackerThread("stuck", stuck)
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING, "cordee"):
        for step in range(trackers.QUEUE_MAX + 50):
            thread.put([(step, "loss", 1.0)])
        thread.end()
        thread.close(0.0)
    assert time.monotonic() - began_s < 60
    assert caplog.text.count("does not keep up") == 1 and "going on without it" in caplog.text
    stuck.end.set()


def test_a_tracker_that_fails_or_is_missing_is_left_out_with_a_warning(
    wandb: list[Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(**asked: Any) -> Run:
        raise SystemExit("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with caplog.at_level(logging.WARNING, "cordee"):
        train(tmp_path, 3)
        Trackers(["mlflow"], "a").put([])
    assert "wandb gets no more metrics: SystemExit: no API key" in caplog.text
    assert "mlflow is not installed" in caplog.text
    with pytest.raises(InputError, match="track='wandbb' is no tracker"):
        cordee.job({}, track=["wandbb"])


def test_tensorboard_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("CORDEE_TENSORBOARD", str(tmp_path))
    found = Trackers(["tensorboard"], "gpt")
    found.put([(step, "loss", float(step)) for step in range(5)])
    found.close()
    read = EventAccumulator(str(tmp_path / "gpt"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(step, float(step)) for step in range(5)]
