"""A wrapper as its agent starts it: settings and limits in its environment, reports in a spool."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from engines_world import RunningEngine, until

from cordee.event_json import decode
from cordee.events import Event, ReplicaReady, ReplicaUnready
from cordee.telemetry.stream import StreamReader
from cordee.workload.service import SETTINGS_ENV, ReplicaSettings


@dataclass
class Wrapper:
    """A running wrapper and what it has reported."""

    process: subprocess.Popen[bytes]
    log: Path
    reader: StreamReader
    reports: list[Event] = field(default_factory=list)

    def read(self) -> list[Event]:
        """Return all reports so far."""
        self.reports += [decode(dict(record.event)) for record in self.reader.read(100)]
        return self.reports

    def ready(self, times: int = 1) -> RunningEngine:
        """Wait until it has reported itself ready so often, and return its engine."""

        def found() -> list[ReplicaReady]:
            if self.process.poll() is not None:
                raise AssertionError(f"the wrapper exited with {self.process.returncode}:\n{self.output}")
            return [each for each in self.read() if isinstance(each, ReplicaReady)]

        until(lambda: len(found()) >= times, f"ready {times} times")
        port = urlsplit(found()[times - 1].address).port
        assert port is not None
        return RunningEngine(self.process, port)

    def unready(self, times: int = 1) -> ReplicaUnready:
        """Wait until it has reported itself unready so often, and return the last of these reports."""

        def found() -> list[ReplicaUnready]:
            return [each for each in self.read() if isinstance(each, ReplicaUnready)]

        until(lambda: len(found()) >= times, f"unready {times} times")
        return found()[times - 1]

    def notice(self) -> None:
        """Give it notice, as its agent does."""
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Return the exit code once it has left."""
        return self.process.wait(60)

    @property
    def output(self) -> str:
        """Return what it and its engine have printed."""
        return self.log.read_text(errors="replace")

    def engine_pid(self) -> int:
        """Return the process of its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[-1])


@contextmanager
def wrapped(tmp: Path, settings: Mapping[str, object], env: Mapping[str, str] | None = None) -> Iterator[Wrapper]:
    """Run a wrapper until the block ends."""
    given = ReplicaSettings.model_validate({"service": "chat", "revision": 1, **settings})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CORDEE_")}
    environ = {
        **inherited,
        SETTINGS_ENV: given.model_dump_json(),
        "CORDEE_JOB": "chat-abcdef",
        "CORDEE_EPOCH": "1",
        "CORDEE_SPOOL": str(tmp / "spool"),
        "CORDEE_GRACE_S": "30",
        "CORDEE_MODELS": str(tmp / "models"),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    log = tmp / "rank0.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cordee.serve.replica"], env=environ, cwd=tmp, stdout=output, stderr=output
        )
    try:
        yield Wrapper(process, log, StreamReader(tmp / "spool" / "rank0.jsonl"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def plain_flags(flags: Mapping[str, object]) -> dict[str, object]:
    """Return settings of an engine as a job file has them: a switch is `true`."""
    return {name: True if value == "" else value for name, value in flags.items()}


def bodies(text: str) -> list[dict[str, object]]:
    """Return the JSON objects among lines."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
