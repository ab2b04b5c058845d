"""The traces of jobs, from the log: how long each waited, started, and took until its first step.

A thread reads the log and adds to the trace that the client began, wherever one is in a job's environment. There is no
thread where nobody wants traces.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from cordee import tracing
from cordee.control.store.sql import SqlStore
from cordee.errors import CordeeError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobEnded,
    JobSubmitted,
    RanksStarted,
    Reported,
    SpanClass,
)

_LOOK_S, _JOIN_S = 0.5, 1.0


@dataclass(slots=True)
class _Traced:
    """A job with a trace, and the times of its present attempt that are not in it yet."""

    parent: str
    queued_us: int
    placed_us: int = 0
    started_us: dict[str, int] = field(default_factory=dict)
    steps: bool = False


class OtelSpans:
    """The traces of one server's jobs."""

    def __init__(self, store: SqlStore, number: Callable[[], int]) -> None:
        """Follow the log of a store; `number` returns its last number."""
        self._store, self._last = store, number
        self._jobs: dict[str, _Traced] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        """Follow the log from now on, if somebody wants traces."""
        if tracing.is_wanted():
            self._thread.start()

    def end(self) -> None:
        """End."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        after = self._last()
        while not self._ended.wait(_LOOK_S):
            try:
                after = self.read(after) if self._last() > after else after
            except CordeeError as error:
                structlog.get_logger().warning("traces wait for the log", error=error.message)

    def read(self, after: int) -> int:
        """Add what the log says after a number to the traces; return its last number."""
        for number, event in self._store.events(after):
            self._apply(event)
            after = number
        return after

    def _apply(self, event: Event) -> None:
        match event:
            case JobSubmitted(job=job, spec=spec):
                parent = json.loads(spec).get("env", {}).get(tracing.VARIABLE)
                if parent is not None:
                    self._jobs[job.job_id] = _Traced(parent, event.at_us)
                    tracing.note("submitted", parent, event.at_us, event.at_us, job=job.job_id, owner=job.owner)
                    said = {"job_id": job.job_id, "owner": job.owner, "trace_id": tracing.id_of(parent)}
                    structlog.get_logger().info("a job was submitted", **said)
            case AttemptPlaced() | RanksStarted() | Reported() | AttemptEnded() | JobEnded():
                traced = self._jobs.get(event.job_id)
                if traced is not None:
                    self._of_job(traced, event)

    def _of_job(
        self, traced: _Traced, event: AttemptPlaced | RanksStarted | Reported | AttemptEnded | JobEnded
    ) -> None:
        about = {"job": str(event.job_id)} | ({} if isinstance(event, JobEnded) else {"epoch": str(event.epoch)})
        match event:
            case AttemptPlaced(leases=leases):
                nodes = ",".join(lease.node for lease in leases)
                tracing.note("queued", traced.parent, traced.queued_us, event.at_us, **about, nodes=nodes)
                traced.placed_us, traced.steps = event.at_us, False
                traced.started_us.clear()
            case RanksStarted(node=node):
                traced.started_us[node] = event.at_us
                tracing.note("start of ranks", traced.parent, traced.placed_us, event.at_us, **about, node=node)
            case Reported(span=SpanClass.USEFUL) if not traced.steps and traced.started_us:
                traced.steps, since_us = True, max(traced.started_us.values())
                tracing.note("until the first step", traced.parent, since_us, event.from_us, **about)
            case AttemptEnded():
                about["outcome"] = event.outcome.value
                tracing.note("attempt", traced.parent, traced.placed_us, event.at_us, **about)
                traced.queued_us = event.at_us
            case JobEnded():
                del self._jobs[event.job_id]
