"""Measure a rank under the names of the plan's estimate: peak memory, step time, tokens, MFU; and keep its metrics.

Values go to the spool like every other report: after the first steps, then at most four times a minute, and at the end.
Nothing here waits for a device or another rank.
"""

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import torch

from cordee.events import Measured
from cordee.train.data.sampler import ElasticBatchSampler
from cordee.train.guard.guard import LossGuard
from cordee.train.metrics import Metrics
from cordee.train.report import Reporter
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.trackers import Trackers, run_id

FIRST_STEPS = 3  # after them, gradients, optimizer state and the allocator's blocks exist
PERIOD_S = 15.0
GROWTH = 1.01  # a rank other than 0 reports again if its peak has grown by more


class Meter:
    """The measured values of one rank, reported through its `Reporter`.

    Attributes:
        steps_total: steps of the whole job; None: not known.
        guard: of the loss.
        goes_back: the loop can go back.
    """

    def __init__(self, reporter: Reporter, pace: StepTimer, rank: int, settings: Settings) -> None:
        self._reporter, self._pace, self._rank = reporter, pace, rank
        self._estimate = settings.planned.estimate
        self.guard = LossGuard(settings.telemetry.on_spike, rank, reporter)
        self.goes_back = False
        self.steps_total: int | None = None
        self._steps = self._reported_steps = 0
        self._tokens = self._tokens_steps = 0
        self._next_s = 0.0
        self._peak_bytes = 0
        trackers = Trackers(settings.telemetry.track if rank == 0 else (), run_id(settings))
        self._metrics = Metrics(reporter, rank, trackers)
        self._epoch: int | None = None

    def log(self, tokens: int, metrics: Mapping[str, object]) -> None:
        """Count the tokens of the whole gang in the step that runs, and take its metrics."""
        self._tokens += tokens
        self._metrics.log(metrics, self._pace.step + self._pace.inside)

    def close(self, most_s: float) -> None:
        """Let the trackers write what waits, for so many seconds: one that hangs must not outlast a notice."""
        self._metrics.close(most_s)

    def epoch_of(self, state: Mapping[str, object]) -> None:
        """Log the epoch of the data when a sampler in the state has reached the next one."""
        sampler = next((each for each in state.values() if isinstance(each, ElasticBatchSampler)), None)
        if sampler is not None and sampler.trained_epoch != self._epoch:
            self._epoch = sampler.trained_epoch
            self._metrics.log({"epoch": self._epoch}, self._pace.step + self._pace.inside)

    def stepped(self) -> None:
        """Count a step, and report if a report is due."""
        self._metrics.stepped(self._pace.step)
        self._steps += 1
        self._tokens_steps += 1
        if self._steps == FIRST_STEPS or (self._steps > FIRST_STEPS and time.monotonic() >= self._next_s):
            self.report()

    def report(self) -> None:
        """Report the newest metrics, and the values measured since the attempt started, unless nothing is new."""
        self._metrics.report(self._pace.step)
        if self._steps == self._reported_steps:
            return
        self._reported_steps, self._next_s = self._steps, time.monotonic() + PERIOD_S
        peak_bytes, reserved_bytes = peak_memory()
        if self._rank != 0 and peak_bytes <= GROWTH * self._peak_bytes:
            return
        self._peak_bytes = peak_bytes
        step_s = self._pace.step_s()
        tokens_per_s = self._tokens / self._tokens_steps / step_s if self._tokens and step_s else None
        self._tokens = self._tokens_steps = 0
        self._reporter.append(
            Measured,
            rank=self._rank,
            step=self._pace.step,
            steps_total=self.steps_total,
            peak_bytes=peak_bytes,
            reserved_bytes=reserved_bytes,
            step_us=None if step_s is None else round(step_s * 1e6),
            tokens_per_s=tokens_per_s,
            mfu=self._estimate.mfu_at(tokens_per_s) if self._estimate and tokens_per_s else None,
        )


def peak_memory() -> tuple[int, int | None]:
    """Return the peak bytes that CUDA's allocator handed out and reserved; without a GPU, the peak resident bytes."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        allocated_bytes = max(torch.cuda.max_memory_allocated(device) for device in devices)
        return allocated_bytes, max(torch.cuda.max_memory_reserved(device) for device in devices)
    return resident_peak_bytes(), None


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    # getrusage includes the time before exec, so a small script would inherit its parent's peak.
    with suppress(OSError, StopIteration, ValueError, IndexError):
        with open("/proc/self/status", encoding="utf-8") as status:  # noqa: PTH123 - a kernel file
            peak = next(line for line in status if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
