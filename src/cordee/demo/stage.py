"""A server for the live parts in a temporary home: its log as it grows, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cordee.agent.gpus import discover
from cordee.answers.view import HealthView
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.demo.lines import line, progress
from cordee.demo.narrator import Screen
from cordee.errors import ClaimError, CordeeError, ServerError
from cordee.events import Event, JobEnded, JobSubmitted
from cordee.ids import JobId
from cordee.units import US_PER_S
from cordee.workload.spec import JobSpec

_POLL_S = 0.25
_PATIENCE_S = 240.0
_END_S = 60.0


class Stage:
    """A running server, and its log so far."""

    def __init__(self, client: Client, screen: Screen, ranks: int) -> None:
        assert client.home is not None, "the demo starts a server on this machine"
        self.client, self.ranks = client, ranks
        self.home = client.home
        self.events: list[Event] = []
        self.names: dict[JobId, str] = {}
        self._screen = screen
        self._number = self._replicas = 0
        self._zero_us: int | None = None

    @property
    def out(self) -> Path:
        """Return the folder for what is compared afterwards."""
        return self.home / "out"

    def submit(self, spec: JobSpec) -> JobId:
        """Queue a job as `cordee run` does."""
        done = self.client.submit(spec.model_dump(mode="json"))
        job_id = JobId(done.job.job_id)
        self.names[job_id] = spec.name
        return job_id

    def declare(self, spec: JobSpec) -> None:
        """Declare a service as `cordee serve run` does."""
        self.client.declare(spec.model_dump(mode="json"))

    def follow(self, until: Callable[[Event], bool], waiting: str) -> None:
        """Show the log as it grows, until an awaited event.

        Raises:
            ClaimError: the event did not come, or a job failed.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with self._screen.waiting(waiting):
            while not any(until(event) for event in self._new_events()):
                _check_patience(deadline, waiting)

    def wait(self, holds: Callable[[], bool], waiting: str) -> None:
        """Show the log as it grows, until something holds.

        Raises:
            ClaimError: it did not come to hold, or a job failed.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with self._screen.waiting(waiting):
            while not holds():
                for _ in self._new_events():
                    pass
                _check_patience(deadline, waiting)

    def _new_events(self) -> Iterator[Event]:
        for number, event in self.client.events(after=self._number):
            self._number = number
            self.events.append(event)
            self._show(event)
            yield event

    def _show(self, event: Event) -> None:
        if isinstance(event, JobSubmitted) and event.job.service is not None:
            self._replicas += 1
            self.names[event.job.job_id] = f"replica {self._replicas}"
        text = line(event, self.names)
        if text is not None:
            self._zero_us = event.at_us if self._zero_us is None else self._zero_us
            self._screen.line((event.at_us - self._zero_us) / US_PER_S, text)
        newest = progress(event, self.names)
        if newest is not None:
            self._screen.progress(newest)
        if isinstance(event, JobEnded) and event.state not in ("done", "stopped"):
            raise ClaimError(f"{event.job_id} ended as {event.state}: {event.why}", hint=self._last_lines(event.job_id))

    def _last_lines(self, job_id: JobId) -> str:
        try:
            tail = list(self.client.logs(job_id, tail=12))
        except CordeeError:
            tail = []
        return "its last lines were:\n  " + "\n  ".join(tail) if tail else "it wrote no lines"


@contextmanager
def stage(screen: Screen, *, keep: bool, price_as: str, ranks: int, slots: int | None = None) -> Iterator[Stage]:
    """Start a server for gangs of `ranks` ranks in a new folder; end it and remove it.

    It has so many CPU slots; None: just what one gang needs, on GPUs if there are enough.

    Raises:
        CordeeError: the server could not start.
    """
    home = Path(tempfile.mkdtemp(prefix="cordee-demo-"))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        health = (
            _start(home, price_as, ranks) if slots is None else start_server(home, slots=str(slots), price_as=price_as)
        )
        try:
            with Client(home) as client:
                yield Stage(client, screen, ranks)
        finally:
            _end(home, health.pid)
    finally:
        signal.signal(signal.SIGTERM, before)
        if keep:
            screen.paragraph(f"Everything is kept in {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


def _start(home: Path, price_as: str, ranks: int) -> HealthView:
    """Start it on just the GPUs, or CPU slots, that one gang needs: the other one has to preempt it."""
    devices = discover(None)
    free = [index for index in range(devices.count) if index not in devices.unavailable(lambda pid: False)]
    if not devices.real or len(free) < ranks:
        return start_server(home, slots=str(ranks), price_as=price_as)
    devices.release()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, free[:ranks]))
    try:
        return start_server(home, slots="auto")
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def gateway(beside: Stage) -> Iterator[str]:
    """Run a gateway beside the server until the block ends, and yield its URL. It reports usage each second."""
    argv = [sys.executable, "-m", "cordee.serve.gateway", "--home", str(beside.home), "--listen", "127.0.0.1:0"]
    with (beside.home / "gateway.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv, "--report-every", "1"], stdout=subprocess.PIPE, stderr=log, text=True, env=_without_server()
        )
    assert process.stdout is not None, "it is a pipe"
    try:
        with process.stdout:
            url = process.stdout.readline().strip()
        if not url:
            raise ServerError("the gateway ended before it was ready", hint=f"see {beside.home / 'gateway.log'}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _without_server() -> dict[str, str]:
    """Return this environment without what would lead the gateway to another server."""
    return {name: value for name, value in os.environ.items() if name not in ("CORDEE_URL", "CORDEE_TOKEN")}


def _check_patience(deadline_s: float, waiting: str) -> None:
    """Wait a moment for more events, or raise ClaimError after the deadline."""
    if time.monotonic() > deadline_s:
        raise ClaimError(
            f"no more events for {_PATIENCE_S:.0f} s while {waiting}",
            hint="run `cordee demo --keep` and read the logs in the folder it prints",
        )
    time.sleep(_POLL_S)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that what was started is ended too


def _end(home: Path, pid: int) -> None:
    """Stop every job, then the agents and the server; kill a server that does not end."""
    deadline = time.monotonic() + _END_S
    with suppress(CordeeError), Client(home) as client:
        for job in client.jobs():
            if job.ended_us is None:
                client.stop(job.job_id, now=True)
    try:
        with Client(home) as client:
            client.down()
    except CordeeError:
        os.kill(pid, signal.SIGTERM)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
