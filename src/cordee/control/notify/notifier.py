"""The notifier: for each destination a thread that reads the log and delivers what the destination wants, in order.

The log is the queue: what a destination has, its mark in the database says, so that nothing waits in memory, no job
waits for a receiver, and a server that takes over goes on. A message may arrive twice, with the same id, when the
server dies between its delivery and the mark.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog

from cordee.answers.jobs import JobDetailView
from cordee.control.notify.channels import deliver
from cordee.control.notify.destinations import Destination, Destinations, read_destinations
from cordee.control.notify.messages import (
    BUDGET_PERCENT,
    Budget,
    Message,
    budget_message,
    kind_of,
    message_of,
    reached_message,
)
from cordee.control.ports import Clock
from cordee.control.spans import OtelSpans
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.errors import CordeeError, InputError, StoreError
from cordee.events import BudgetReached, Event
from cordee.units import US_PER_S, plural
from cordee.workload.notify import URGENT, Notify, NotifyKind

RETRIES_S = (2.0, 10.0, 60.0, 300.0, 600.0)
"""Waiting times between tries of one message; after the last one it is given up, and the log of the server says so."""

STALE_S = 6 * 3600.0
"""Age from which a message is no news any more: those of a long outage are left out."""

HELD_MAX = 20  # messages of quiet hours that are sent when these end; the others are counted
_LOOK_S, _BUDGET_S, _JOIN_S = 0.5, 30.0, 1.0
_PAGE = 500  # events after which the mark moves


@dataclass(frozen=True, slots=True)
class Jobs:
    """The answers of the server to the notifier.

    Attributes:
        number: returns the log's last number.
        view: returns a job.
        micro_usd: returns the cost of every job until now.
        limited: returns the live jobs that have a limit of cost, with it in micro-dollars.
    """

    number: Callable[[], int]
    view: Callable[[str], JobDetailView]
    micro_usd: Callable[[], Mapping[str, int]]
    limited: Callable[[], Mapping[str, int]]


def jobs_of(control: Control, view: Callable[[str], JobDetailView], clock: Clock) -> Jobs:
    """Return the jobs of a server.

    Args:
        control: its state and ledger.
        view: returns a job by its id.
        clock: the time.
    """

    def micro_usd() -> dict[str, int]:
        with control.changed:
            accounts = control.ledger.at(clock.now_us())
        return {row.key: row.micro_usd.held for row in accounts.cost("job")}

    def limited() -> dict[str, int]:
        with control.changed:
            jobs = [record.job for record in control.state.jobs.values() if not record.phase.ended]
        return {job.job_id: job.cost_limit_micro_usd for job in jobs if job.cost_limit_micro_usd is not None}

    return Jobs(lambda: control.number, view, micro_usd, limited)


class Notifier:
    """The destinations of one server that leads."""

    def __init__(self, home: Path, store: SqlStore, jobs: Jobs, *, now: Callable[[], datetime] = datetime.now) -> None:
        self._home, self._store, self._jobs, self._now = home, store, jobs, now
        self._log = structlog.get_logger()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
        self._followers: dict[str, _Follower] = {}
        self._problem = ""
        self._spans = OtelSpans(store, jobs.number)  # it follows the log as well

    def start(self) -> None:
        """Begin to deliver, from the mark of each destination, and to trace submissions where somebody wants that."""
        self._thread.start()
        self._spans.start()

    def end(self) -> None:
        """End, and do not wait for a destination that does not answer."""
        self._ended.set()
        self._spans.end()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        stamp: object = None
        while not self._ended.wait(_LOOK_S):
            if (found := _stamp(self._home)) == stamp:
                continue
            stamp = found
            try:
                destinations = read_destinations(self._home)
            except InputError as error:
                self._log.error("notifications go on as before", why=error.message, hint=error.hint)
                continue
            self._follow(destinations)
        for each in self._followers.values():
            each.end()

    def _follow(self, destinations: Destinations) -> None:
        """End the threads of the destinations as they were, and start those of the destinations as they are."""
        for each in self._followers.values():
            each.end()
        self._followers = {
            each.name: _Follower(each, destinations, self._store, self._jobs, self._now)
            for each in destinations.by_name.values()
        }
        for each in self._followers.values():
            each.start()


def _stamp(home: Path) -> tuple[int, int] | None:
    try:
        stat = (home / "notify.toml").stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_mode


class _Follower:
    """The thread of one destination."""

    def __init__(
        self,
        destination: Destination,
        destinations: Destinations,
        store: SqlStore,
        jobs: Jobs,
        now: Callable[[], datetime],
    ) -> None:
        self._destination, self._destinations = destination, destinations
        self._store, self._jobs, self._now = store, jobs, now
        self._log = structlog.get_logger().bind(destination=destination.name)
        self._source = f"notify/{destination.name}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._source, daemon=True)
        self._number = 0
        self._held: list[Message] = []  # of quiet hours; the mark stays before them
        self._held_after = 0

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        budget_s = 0.0
        while not self._ended.is_set():
            try:
                if not self._number:
                    self._begin()
                if self._number < self._jobs.number():
                    self._read()
                self._release()
                if time.monotonic() >= budget_s:
                    self._check_budgets()
                    budget_s = time.monotonic() + _BUDGET_S
            except StoreError as error:
                self._log.warning("notifications wait for the database", why=error.message)
                self._ended.wait(RETRIES_S[0])
            self._ended.wait(_LOOK_S)

    def _begin(self) -> None:
        """Start behind what was delivered; a new destination starts with the events from now on."""
        self._number = self._store.marks([self._source])[self._source]
        if not self._number:
            self._number = self._jobs.number()
            self._mark()

    def _mark(self) -> None:
        if self._ended.is_set():
            return  # another thread or server may follow this destination now
        seen = self._held_after if self._held else self._number
        self._store.commit([], seen=[(self._source, seen)])

    def _read(self) -> None:
        began = self._number
        for number, event in self._store.events(self._number):
            message = self._message(number, event)
            if message is not None and not self._send_or_hold(message):
                return  # the server ends
            self._number = number
            if message is not None or number - began >= _PAGE:
                self._mark()
                began = number
        if began != self._number:
            self._mark()

    def _message(self, number: int, event: Event) -> Message | None:
        kind = kind_of(event)
        if kind is None:
            return None
        if isinstance(event, BudgetReached):  # of no job: where jobs go that say nothing
            wanted = self._destinations.wants(self._destination.name, kind, Notify())
            return reached_message(number, event) if wanted else None
        job = self._jobs.view(str(getattr(event, "job_id", "")))
        if not self._wants(kind, job):
            return None
        return message_of(number, event, job, self._jobs.micro_usd().get(job.job_id, 0))

    def _wants(self, kind: NotifyKind, job: JobDetailView) -> bool:
        notify = Notify.model_validate(job.spec.get("notify", {}))  # earlier versions had no such section
        return self._destinations.wants(self._destination.name, kind, notify)

    def _send_or_hold(self, message: Message) -> bool:
        """Send a message now, or keep it until quiet hours end; return False if this thread ends first."""
        quiet = self._destination.quiet
        if quiet is None or message.kind in URGENT or quiet.until(self._now()) is None:
            return self._send(message)
        if not self._held:
            self._held_after = self._number
        self._held.append(message)
        return True

    def _release(self) -> None:
        """Send what quiet hours held back, as one message."""
        quiet = self._destination.quiet
        if not self._held or (quiet is not None and quiet.until(self._now()) is not None):
            return
        held, first = self._held, self._held[0]
        lines = [each.text.partition("\n")[0] for each in held[:HELD_MAX]]
        if len(held) > HELD_MAX:
            lines.append(f"and {plural(len(held) - HELD_MAX, 'message')} more")
        text = "\n".join([f"{plural(len(held), 'message')} of the quiet hours", *lines])
        text = first.text if len(held) == 1 else text
        digest = Message(f"quiet/{first.id}", first.kind, first.at_us, first.job_id, first.name, first.owner, text)
        if self._send(digest, is_late=True):
            self._held = []
            self._mark()

    def _send(self, message: Message, *, is_late: bool = False) -> bool:
        """Deliver a message, or give it up after the last try; return False if this thread ends first."""
        age_s = self._now().timestamp() - message.at_us / US_PER_S
        if age_s > STALE_S and not is_late:
            self._log.warning("a notification is too old to be sent", id=message.id, age_s=round(age_s))
            return True
        for wait_s in (*RETRIES_S, None):
            if self._ended.is_set():
                return False
            try:
                deliver(self._destination, message)
            except CordeeError as error:
                if wait_s is None:
                    self._log.error("a notification is given up", id=message.id, why=error.message)
                else:
                    self._log.warning("a notification is tried again", id=message.id, why=error.message, in_s=wait_s)
                    self._ended.wait(wait_s)
            else:
                return True
        return True

    def _check_budgets(self) -> None:
        """Notify once that a live job has spent most of its limit of cost."""
        limits = self._jobs.limited()
        spent = self._jobs.micro_usd() if limits else {}
        over = [job for job, limit in limits.items() if 100 * spent.get(job, 0) >= BUDGET_PERCENT * limit]
        sent = self._store.marks([f"{self._source}/budget/{job}" for job in over])
        for job_id in over:
            source = f"{self._source}/budget/{job_id}"
            if sent[source]:
                continue
            job = self._jobs.view(job_id)
            if self._wants("budget", job):
                at_us = round(self._now().timestamp() * US_PER_S)
                if not self._send(budget_message(at_us, job, Budget(spent[job_id], limits[job_id]))):
                    return
            self._store.commit([], seen=[(source, 1)])
