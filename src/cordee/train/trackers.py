"""Metrics for W&B, MLflow and TensorBoard, where they are installed: one run over all attempts of a job.

Each has a thread and a bounded queue of its own. One that fails is left out with a warning, one that hangs loses
points, and neither delays the training nor its end by more than `CLOSE_S`.
"""

import hashlib
import importlib.util
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cordee.train.settings import Settings

log = logging.getLogger("cordee")

QUEUE_MAX = 1_000
"""Reports of metrics that wait for one tracker."""

CLOSE_S = 30.0
"""The time that all trackers together may take at the end of the training."""

Point = tuple[int, str, float]
"""Step, name and value."""


class Tracker(Protocol):
    """One library; its methods run on one thread of their own."""

    def open(self) -> None:
        """Begin the run, or go on with it."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Take points, by growing steps."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def run_id(settings: Settings) -> str:
    """Return what all attempts of a job have in common: its id, or without a server a hash of its destination."""
    if settings.job_id is not None:
        return settings.job_id
    digest = hashlib.blake2b(f"{settings.to}".encode(), digest_size=6).hexdigest()
    return f"cordee-{digest if settings.to else time.time_ns()}"


class WandbTracker:
    """Weights & Biases; WANDB_PROJECT and WANDB_MODE=offline are its own."""

    def __init__(self, run: str) -> None:
        self._id = run
        self._run: Any = None

    def open(self) -> None:
        """Begin the run, or go on with it."""
        import wandb

        project = os.environ.get("WANDB_PROJECT", "cordee")
        self._run = wandb.init(id=self._id, name=self._id, project=project, resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[Point]) -> None:
        """Take points; a step is a metric, since W&B's own count cannot go back."""
        for step, values in _by_step(points).items():
            self._run.log({"step": step, **values})

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MlflowTracker:
    """MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are its own."""

    def __init__(self, run: str) -> None:
        self._id = run
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        """Begin the run, or go on with the one that has this job's tag."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cordee")
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        runs = client.search_runs([experiment], filter_string=f"tags.`cordee.job` = '{self._id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            made = client.create_run(experiment, run_name=self._id, tags={"cordee.job": self._id})
            self._run_id = made.info.run_id

    def log(self, points: Sequence[Point]) -> None:
        """Take points."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        for first in range(0, len(points), 500):  # a batch has 1,000 at most
            page = points[first : first + 500]
            self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for step, name, value in page])

    def close(self) -> None:
        """End the run; the next attempt opens it again."""
        self._client.set_terminated(self._run_id)


class TensorBoardTracker:
    """TensorBoard's event files, in CORDEE_TENSORBOARD or `runs/<job>`."""

    def __init__(self, run: str) -> None:
        self._folder = Path(os.environ.get("CORDEE_TENSORBOARD", "runs")) / run
        self._writer: Any = None

    def open(self) -> None:
        """Begin a file beside those of earlier attempts."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self._folder))

    def log(self, points: Sequence[Point]) -> None:
        """Take points."""
        for step, name, value in points:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


_KNOWN: Mapping[str, tuple[str, Callable[[str], Tracker]]] = {
    "wandb": ("wandb", WandbTracker),
    "mlflow": ("mlflow", MlflowTracker),
    "tensorboard": ("tensorboard", TensorBoardTracker),
}


class TrackerThread:
    """One tracker behind its queue."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: queue.Queue[list[Point] | None] = queue.Queue(QUEUE_MAX)
        self._dropped = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"cordee-{name}", daemon=True)
        self._thread.start()

    def put(self, points: Iterable[Point]) -> None:
        """Hand points over; never wait."""
        if self._failed:
            return
        try:
            self._queue.put_nowait(list(points))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("%s does not keep up: points of metrics are left out there", self._name)

    def end(self) -> None:
        """Tell the tracker that nothing more comes."""
        with suppress(queue.Full):  # it hangs
            self._queue.put_nowait(None)

    def close(self, timeout_s: float) -> None:
        """Let the tracker write what waits, for so long."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s has not taken all metrics in time; going on without it", self._name)

    def _run(self) -> None:
        try:
            self._tracker.open()
            while (points := self._queue.get()) is not None:
                self._tracker.log(points)
            self._tracker.close()
        except BaseException as error:  # Its libraries may raise anything, SystemExit too: the training goes on.
            self._failed = True
            log.warning("%s gets no more metrics: %s: %s", self._name, type(error).__name__, error)


class Trackers:
    """The trackers of a job, on rank 0.

    Args:
        names: those that are wanted; one that is not installed is left out with a warning.
        run: the name that all attempts share.
    """

    def __init__(self, names: Iterable[str], run: str) -> None:
        self._threads = []
        for name in names:
            module, make = _KNOWN[name]
            if importlib.util.find_spec(module) is None:
                log.warning("%s is not installed, so it gets no metrics: pip install %s", name, module)
            else:
                self._threads.append(TrackerThread(name, make(run)))

    def put(self, points: Iterable[Point]) -> None:
        """Hand points of curves over; never wait."""
        found = list(points)
        for each in self._threads:
            each.put(found)

    def close(self, most_s: float = CLOSE_S) -> None:
        """Let all trackers write what waits, together for at most `CLOSE_S`, and for at most so many seconds."""
        until_s = time.monotonic() + min(CLOSE_S, most_s)
        for each in self._threads:
            each.end()
        for each in self._threads:
            each.close(max(0.0, until_s - time.monotonic()))


def _by_step(points: Sequence[Point]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for step, name, value in points:
        found.setdefault(step, {})[name] = value if not math.isinf(value) else math.nan
    return found
