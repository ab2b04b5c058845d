"""Reports of a rank: events for its agent's spool, and log lines for people.

Rank 0 reports the gang's time in spans without gaps, from the start of its process until it leaves; every rank
reports how it leaves. Nothing here waits: a spool is a file.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from cordee.events import (
    Behind,
    CheckpointCommitted,
    Event,
    RankBehind,
    RankLeft,
    Reported,
    Restored,
    SpanClass,
)
from cordee.storage.generations import Commit
from cordee.telemetry.stream import StreamWriter
from cordee.train.reading import Reading
from cordee.train.settings import Settings
from cordee.units import format_bytes, format_duration

log = logging.getLogger("cordee")

FLUSH_S = 1.0
PROGRESS_S = 10.0
_IMPORTED_S = time.time()


class Reporter:
    """The reports of one rank. Safe to call from the loop, the listener and the thread that ends the process."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._writer = StreamWriter(settings.spool / f"rank{rank}.jsonl") if settings.spool else None
        self._lock = threading.RLock()
        # One clock for all spans: it starts at the time of day and never goes back.
        self._epoch_offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self._class = SpanClass.RESTART
        self._from_us = process_start_us()
        self._first_step = self._steps = self._tokens = 0
        self._loss: Reading | None = None  # the newest that was logged
        self._read_loss: float | None = None  # the newest that its device has computed
        self.progress = ProgressLine()

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch, by a clock that never goes back."""
        return time.monotonic_ns() // 1000 + self._epoch_offset_us

    def restored(self, step: int, generation: int | None) -> None:
        """Report that the attempt starts at this step."""
        self._first_step = step
        self.progress.begin()
        if self._rank == 0:
            self.append(Restored, step=step, generation=generation)

    def switch(self, span: SpanClass, step: int) -> None:
        """Count the gang's time to this class from now on; `step` is the next one to begin."""
        with self._lock:
            if span is not self._class:
                self._flush()
                self._class, self._first_step = span, step

    def rolled_back(self, step: int) -> None:
        """Count the next steps from this one on."""
        with self._lock:
            self._flush()
            self._first_step, self._loss, self._read_loss = step, None, None
        self.progress.begin()

    def stalled(self, still_s: float) -> None:
        """Count the time since the loop went on as stall, until it goes on again."""
        with self._lock:
            if self._class is SpanClass.USEFUL:
                self._loss = self._read_loss = None  # reading it may wait for a device that hangs
                step = self._first_step + self._steps
                self._flush(self.now_us() - round(still_s * 1e6))
                self._class, self._first_step = SpanClass.STALL, step

    def behind(
        self,
        rank: int,
        how: Behind,
        step: int,
        still_s: float,
        *,
        waited: float = 0.0,
        where: str = "",
        stack: tuple[str, ...] = (),
    ) -> None:
        """Report that a rank, not necessarily this one, holds the others up, or no longer does."""
        since_us = self.now_us() - round(still_s * 1e6)
        self.append(
            RankBehind, rank=rank, how=how, step=step, since_us=since_us, waited=waited, where=where, stack=stack
        )

    def stepped(self, step: int) -> None:
        """Count a step that was run."""
        with self._lock:
            if self._class is SpanClass.STALL:
                self.switch(SpanClass.USEFUL, step)
            self._steps += 1
            if self.now_us() - self._from_us >= FLUSH_S * 1e6:
                self._flush()
                self._first_step = step + 1
        if self._rank == 0:
            self.progress.stepped(step + 1, self._newest_loss)

    def _newest_loss(self) -> float | None:
        """Return the newest loss that is known; a device that still computes one is not waited for."""
        if self._loss is not None and self._loss.is_ready():
            self._read_loss, self._loss = self._loss.number(), None
        return self._read_loss

    def log(self, loss: Reading | None, tokens: int) -> None:
        """Take loss and tokens of the step that runs."""
        with self._lock:
            self._newest_loss()
            self._loss = self._loss if loss is None else loss
            self._tokens += tokens
            self.progress.tokens += tokens

    def committed(self, commit: Commit) -> None:
        """Report that a generation is durable; on rank 0, though every rank's uploader knows."""
        if self._rank != 0:
            return
        # The first one shows that it works and what it costs; the line of progress shows the step of the newest.
        log.log(
            logging.DEBUG if self.progress.saved_step is not None else logging.INFO,
            "checkpoint %d of step %d: %s, stopped training for %s, durable after %s",
            commit.generation,
            commit.step,
            format_bytes(commit.bytes),
            format_duration(commit.stall_us / 1e6),
            format_duration(commit.uploaded_us / 1e6),
        )
        self.progress.saved_step = commit.step
        self.append(
            CheckpointCommitted,
            step=commit.step,
            generation=commit.generation,
            size_bytes=commit.bytes,
            stall_us=commit.stall_us,
            upload_us=commit.uploaded_us,
        )

    def left(self, how: str, step: int) -> None:
        """Report how this rank leaves; its last record."""
        # The thread that ends a hung process must not wait for the loop's thread.
        locked = self._lock.acquire(timeout=1.0)
        try:
            if locked and how not in ("aborted", "hung"):
                self._loss = self._read_loss = None  # as in `stalled`; a failed device raises
                self._flush()
            self.append(RankLeft, rank=self._rank, how=how, step=step)
        finally:
            if locked:
                self._lock.release()

    def close(self) -> None:
        """Close the spool."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def _flush(self, until_us: int | None = None) -> None:
        now_us = self.now_us() if until_us is None else max(until_us, self._from_us)
        if self._rank == 0 and now_us > self._from_us:
            loss = self._newest_loss() if self._class is SpanClass.USEFUL else None
            self.append(
                Reported,
                at_us=now_us,
                span=self._class,
                from_us=self._from_us,
                first_step=self._first_step,
                steps=self._steps,
                tokens=self._tokens,
                loss=loss,
            )
        self._from_us = now_us
        self._steps = self._tokens = 0

    def append(self, kind: Callable[..., Event], **fields: object) -> None:
        """Write an event of this attempt; `fields` are those besides its time, job and epoch."""
        if self._writer is None:
            return
        common = {"at_us": self.now_us(), "job_id": self._settings.job_id, "epoch": self._settings.epoch, **fields}
        try:
            self._writer.append(kind(**common))
        except OSError as error:  # A full disk must not end the training.
            log.error("the spool cannot be written: %s", error)


class ProgressLine:
    """The line about the training that rank 0 prints every few seconds.

    Attributes:
        steps_total: steps of the whole job; None: not known.
        saved_step: step of this attempt's newest checkpoint; None: it has made none.
        tokens: of the whole gang since the line before.
    """

    def __init__(self) -> None:
        self.steps_total: int | None = None
        self.saved_step: int | None = None
        self.tokens = self._steps = 0
        self._since_s = time.monotonic()

    def begin(self) -> None:
        """Start counting time."""
        self._since_s, self._steps, self.tokens = time.monotonic(), 0, 0

    def stepped(self, done: int, loss: Callable[[], float | None]) -> None:
        """Count a step, after which `done` are done, and print the line if it is due."""
        self._steps += 1
        if (seconds := time.monotonic() - self._since_s) >= PROGRESS_S:
            log.info("%s", self.text(done, loss(), seconds))
            self.begin()

    def text(self, done: int, loss: float | None, seconds: float) -> str:
        """Return the line for the steps and tokens counted in this time."""
        step_s = seconds / self._steps
        parts = [f"step {done:,}" + (f" of {self.steps_total:,}" if self.steps_total else "")]
        parts += [] if loss is None else [f"loss {loss:.4f}"]
        parts += [f"{1 / step_s:.2f} steps/s" if step_s < 1 else f"{step_s:.1f} s a step"]
        parts += [f"{self.tokens / seconds:,.0f} tokens/s"] if self.tokens else []
        parts += [f"{format_duration(step_s * (self.steps_total - done))} left"] if self.steps_total else []
        parts += [] if self.saved_step is None else [f"saved {self.saved_step:,}"]
        return "  ".join(parts)


def process_start_us() -> int:
    """Return when this process started, so that its imports count; else when this module was imported."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="utf-8") as stat:  # noqa: PTH123 - a kernel file
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return round((time.time() - age_s) * 1e6)
    return round(_IMPORTED_S * 1e6)


def set_up_logging(level: int) -> None:
    """Print the SDK's lines of this level, if the script has not set up logging itself."""
    if level >= logging.WARNING:
        log.setLevel(level)
    elif not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("cordee: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
