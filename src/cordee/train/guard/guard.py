"""One rank's guard of the loss: it reads the losses as they arrive, and tells what its detector finds.

All ranks act at one boundary: a rank that finds a spike asks for a round of the stop agreement, and there they compare.
"""

import logging
from collections import deque

from cordee.events import SpikeFound
from cordee.train.guard.detector import Spike, SpikeDetector
from cordee.train.reading import Reading
from cordee.train.report import Reporter
from cordee.workload.telemetry import OnSpike

log = logging.getLogger("cordee")

ROLLBACKS_MAX = 3

_READINGS_MAX = 1_000


class LossGuard:
    """The guard of one rank.

    Args:
        on_spike: what to do about a spike; the same on all ranks.
        rank: rank 0 judges finite losses, since those of others may be of their own data only; a loss that is not
            finite counts on every rank.
        reporter: of this rank.

    Attributes:
        found: the spike that the ranks have not acted on yet.
        asked: this rank has asked the others to meet.
        rollbacks: those of this attempt.
    """

    def __init__(self, on_spike: OnSpike, rank: int, reporter: Reporter) -> None:
        self.on_spike = on_spike
        self.found: Spike | None = None
        self.asked = False
        self.rollbacks = 0
        self._rank, self._reporter = rank, reporter
        self._detector = SpikeDetector(finite=rank == 0)
        self._before = self._detector.copy()  # as it was before the spike
        self._waiting: deque[tuple[int, Reading]] = deque(maxlen=_READINGS_MAX)

    @property
    def acts(self) -> bool:
        """Return whether a spike has consequences for the training."""
        return self.on_spike in ("rollback", "reorder", "stop")

    @property
    def is_suspicious(self) -> bool:
        """Return whether the loss is not as usual, so that a checkpoint had better wait."""
        return self.acts and (self.found is not None or self._detector.is_suspicious)

    def log(self, step: int, loss: Reading) -> None:
        """Take the loss of a step."""
        if self.on_spike != "off":
            self._waiting.append((step, loss))

    def look(self, *, wait: bool = False) -> None:
        """Judge the losses that have arrived; with `wait` all of them, after the device was synchronised."""
        while self._waiting and (wait or self._waiting[0][1].is_ready()):
            step, loss = self._waiting.popleft()
            if not self._detector.is_suspicious:
                self._before = self._detector.copy() if self.acts else self._before
            spike = self._detector.take(step, loss.number())
            if spike is not None:
                self._tell(spike)
                self.found = (self.found or spike) if self.acts else None

    def _tell(self, spike: Spike) -> None:
        log.warning("rank %d: %s", self._rank, spike.sentence())
        finite = spike.value == spike.value and abs(spike.value) != float("inf")
        self._reporter.append(
            SpikeFound,
            rank=self._rank,
            step=spike.step,
            seen_step=spike.seen,
            value=spike.value if finite else None,
            action=self.on_spike,
            why=spike.sentence(),
        )

    def back(self, step: int) -> None:
        """Go on at this step, as if the losses since had not been."""
        self._detector.back(self._before, step)
        self._before = self._detector.copy()
        self._waiting.clear()
        self.found, self.asked = None, False
        self.rollbacks += 1
