"""The fold of rehearsals: what those that go on have shown so far, and the newest result for each code. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Failure,
    JobEnded,
    JobSubmitted,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RehearsalEnded,
    Restored,
    StepsRehearsed,
)
from cordee.ids import JobId

RESULTS_MAX = 2_000


@dataclass(slots=True)
class AttemptSeen:
    """One attempt of a rehearsal.

    Attributes:
        entered: whether its script has entered `cordee.job`.
        notice_us: when it got the rehearsal's notice; None: it did not.
        saved_step: the step of its newest durable checkpoint; None: it made none.
        saved_us: when that was durable.
        ranks: what each rank has reported, by rank.
        outcome: None until it has ended.
    """

    entered: bool = False
    notice_us: int | None = None
    saved_step: int | None = None
    saved_us: int | None = None
    ranks: dict[int, StepsRehearsed] = field(default_factory=dict)
    outcome: Outcome | None = None
    why: str = ""
    failure: Failure | None = None


@dataclass(slots=True)
class Rehearsing:
    """A rehearsal without a result yet.

    Attributes:
        code: digest of its files and its command.
        steps: before its notice.
        node: one of those that it ran on; empty: it has not started.
        attempts: by epoch.
        ended: the state in which its job ended; None: it goes on.
    """

    job_id: JobId
    code: str
    steps: int
    gpus: int
    node: str = ""
    attempts: dict[int, AttemptSeen] = field(default_factory=dict)
    ended: str | None = None
    why: str = ""

    @property
    def newest(self) -> AttemptSeen | None:
        """Return the newest attempt; None before the first."""
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def noticed(self) -> AttemptSeen | None:
        """Return the attempt that got the notice; None: none did."""
        return next((each for each in self.attempts.values() if each.notice_us is not None), None)


class SavedRehearsals(NamedTuple):
    """The saved form of all rehearsals."""

    going: dict[JobId, Rehearsing]
    results: list[RehearsalEnded]


class Rehearsals:
    """All rehearsals of the log; hold the control's `changed` while reading them.

    Attributes:
        going: those without a result, by job.
        results: the newest of each code and number of GPUs, the newest last.
        kinds: of events that may change something.
    """

    def __init__(self) -> None:
        self.going: dict[JobId, Rehearsing] = {}
        self.results: dict[tuple[str, int], RehearsalEnded] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            RehearsalEnded: self._concluded,
        }
        self._of_going: dict[type[Any], Callable[[Rehearsing, Any], None]] = {
            AttemptPlaced: _placed,
            Restored: _restored,
            NoticeGiven: _noticed,
            CheckpointCommitted: _committed,
            StepsRehearsed: _rehearsed,
            AttemptEnded: _attempt_ended,
            JobEnded: _job_ended,
        }
        self.kinds = frozenset((*self._handlers, *self._of_going))

    def saved(self) -> SavedRehearsals:
        """Return the saved form; it shares this object's values."""
        return SavedRehearsals(self.going, list(self.results.values()))

    @classmethod
    def restored(cls, saved: SavedRehearsals) -> "Rehearsals":
        """Return the rehearsals that were saved."""
        new = cls()
        new.going = saved.going
        new.results = {(each.code, each.gpus): each for each in saved.results}
        return new

    def apply(self, event: Event) -> None:
        """Fold an event of the log; most are of no rehearsal."""
        kind = type(event)
        if (handler := self._handlers.get(kind)) is not None:
            handler(event)
        elif self.going and (change := self._of_going.get(kind)) is not None:
            found = self.going.get(event.job_id)  # type: ignore[union-attr]  # All of these kinds are of one job.
            if found is not None:
                change(found, event)

    def of(self, code: str, gpus: int) -> RehearsalEnded | None:
        """Return the newest result for this code: on as many GPUs, else on any number; None: it was not rehearsed."""
        if (same := self.results.get((code, gpus))) is not None:
            return same
        return next((each for each in reversed(self.results.values()) if code and each.code == code), None)

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        if job.rehearsed_steps:
            made = Rehearsing(job.job_id, job.code, job.rehearsed_steps, job.gpus)
            self.going.setdefault(job.job_id, made)

    def _concluded(self, event: RehearsalEnded) -> None:
        self.going.pop(event.job_id, None)
        key = event.code or event.job_id, event.gpus
        self.results.pop(key, None)
        self.results[key] = event
        while len(self.results) > RESULTS_MAX:
            del self.results[next(iter(self.results))]


def _placed(found: Rehearsing, event: AttemptPlaced) -> None:
    found.attempts[event.epoch], found.node = AttemptSeen(), event.leases[0].node


def _restored(found: Rehearsing, event: Restored) -> None:
    if event.epoch in found.attempts:
        found.attempts[event.epoch].entered = True


def _noticed(found: Rehearsing, event: NoticeGiven) -> None:
    if event.reason is NoticeReason.REHEARSAL:
        found.attempts[event.epoch].notice_us = event.at_us


def _committed(found: Rehearsing, event: CheckpointCommitted) -> None:
    if event.epoch in found.attempts:
        attempt = found.attempts[event.epoch]
        attempt.saved_step, attempt.saved_us = event.step, event.at_us


def _rehearsed(found: Rehearsing, event: StepsRehearsed) -> None:
    if event.epoch in found.attempts:
        found.attempts[event.epoch].ranks[event.rank] = event


def _attempt_ended(found: Rehearsing, event: AttemptEnded) -> None:
    attempt = found.attempts[event.epoch]
    attempt.outcome, attempt.why, attempt.failure = event.outcome, event.why, event.failure


def _job_ended(found: Rehearsing, event: JobEnded) -> None:
    found.ended, found.why = event.state, event.why
