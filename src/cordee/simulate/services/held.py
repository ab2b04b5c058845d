"""GPUs held by a service and by other jobs, and the GPUs for which jobs wait: a fold over the log."""

from dataclasses import dataclass, field

from cordee.events import AttemptEnded, AttemptPlaced, Event, JobEnded, JobSubmitted, NoticeGiven, RanksEnded
from cordee.ids import JobId
from cordee.simulate.metrics import CHOSEN


@dataclass(slots=True)
class _Known:
    milli: int
    serves: bool
    waits: bool = False
    leases: dict[str, int] = field(default_factory=dict)


class HeldGpus:
    """The fold. Jobs that are no replica count as training.

    Attributes:
        serving, training: thousandths of GPUs that are held now.
        waiting: thousandths of GPUs that waiting jobs ask for now; replicas are not among them.
        waiting_us: their integral over time.
        ended: training jobs that ran to their end.
        preemptions: notices to training jobs because another job was chosen.
    """

    def __init__(self) -> None:
        self.serving = self.training = self.waiting = self.waiting_us = 0
        self.ended = self.preemptions = 0
        self._since_us = 0
        self._jobs: dict[JobId, _Known] = {}

    def advance(self, now_us: int) -> None:
        """Integrate until now."""
        if now_us > self._since_us:
            self.waiting_us += self.waiting * (now_us - self._since_us)
            self._since_us = now_us

    def apply(self, event: Event) -> None:
        """Fold one event."""
        kind = type(event)
        if kind is JobSubmitted:
            self._submitted(event)  # type: ignore[arg-type]
        elif kind in _OF_A_JOB:
            known = self._jobs.get(event.job_id)  # type: ignore[union-attr]
            if known is not None:
                self.advance(event.at_us)
                self._fold(event, known)

    def _submitted(self, event: JobSubmitted) -> None:
        self.advance(event.at_us)
        job = event.job
        known = self._jobs[job.job_id] = _Known(job.gpus * job.gpu_milli, job.service is not None)
        self._wait(known, waits=True)

    def _fold(self, event: Event, known: _Known) -> None:
        match event:
            case AttemptPlaced():
                self._wait(known, waits=False)
                for lease in event.leases:
                    known.leases[lease.node] = lease.gpu_milli
                self._hold(known, sum(known.leases.values()))
            case RanksEnded():
                self._hold(known, -known.leases.pop(event.node, 0))
            case AttemptEnded():
                self._wait(known, waits=True)
            case NoticeGiven():
                self.preemptions += not known.serves and event.reason in CHOSEN
            case JobEnded():
                self._wait(known, waits=False)
                self.ended += not known.serves and event.state == "done"
                del self._jobs[event.job_id]

    def _hold(self, known: _Known, milli: int) -> None:
        if known.serves:
            self.serving += milli
        else:
            self.training += milli

    def _wait(self, known: _Known, *, waits: bool) -> None:
        """Note that a job waits from now on, or does not."""
        if not known.serves:
            self.waiting += known.milli * (waits - known.waits)
        known.waits = waits


_OF_A_JOB = frozenset((AttemptPlaced, RanksEnded, AttemptEnded, NoticeGiven, JobEnded))
