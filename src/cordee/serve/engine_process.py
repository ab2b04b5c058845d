"""An engine's process on this machine: started, asked over HTTP, watched by a thread, and ended.

Its output goes where the wrapper's goes; the last lines are kept for messages.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from cordee.serve.engines.openai import COMPLETIONS
from cordee.serve.engines.port import Engine, EngineCommand, EngineLoad
from cordee.units import plural

CHECK_S = 0.5
FAST_CHECK_S = 0.05  # While it loads.
ANSWER_S = 5.0
FIRST_PROBE_S = 120.0  # Of one token, for which an engine may have to compile.
PROBE_S = 10.0
PROBE_EVERY_S = 10.0  # Of an engine that has nothing to do.
LINES_KEPT = 20
_ESTABLISHED = "01"  # A state in /proc/net/tcp.


class EngineProcess:
    """One run of an engine, in a session of its own so that a notice to the wrapper does not reach it."""

    def __init__(self, command: EngineCommand, host: str, port: int, *, echo: bool = True) -> None:
        """Start it; `echo`: its output goes on to ours."""
        self.host, self.port, self._echo = host, port, echo
        self.lines = deque[str](maxlen=LINES_KEPT)
        self._popen = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """Return the URL that the gateway reaches."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None: it runs."""
        return self._popen.poll()

    def why_ended(self) -> str:
        """Return in a sentence how it ended, with its last lines."""
        self._reader.join(timeout=1.0)  # Until the last lines are here.
        code = self._popen.returncode
        how = f"exited with {code}" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as the kernel does to a process when memory runs out"
        elif any("out of memory" in line.lower() for line in self.lines):
            how += " after it ran out of memory"
        return how + "".join(f"\n  {line}" for line in self.lines)

    def ask(self, path: str, body: Mapping[str, object] | None = None, *, limit_s: float) -> tuple[int, bytes]:
        """Return status and body of an answer.

        Raises:
            OSError: it cannot be reached, or does not answer in time.
        """
        connection = HTTPConnection(self.host, self.port, timeout=limit_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except HTTPException as error:
            raise OSError(f"it does not answer as HTTP: {error!r}") from error
        finally:
            connection.close()

    def connections(self) -> int | None:
        """Return the number of open connections to its port; None: this system does not say."""
        found = 0
        try:
            for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
                if not table.exists():
                    continue
                rows = [line.split() for line in table.read_text().splitlines()[1:]]
                found += sum(row[1].endswith(f":{self.port:04X}") and row[3] == _ESTABLISHED for row in rows)
        except (OSError, IndexError):
            return None
        return found if Path("/proc/net/tcp").exists() else None

    def end(self, grace_s: float) -> None:
        """End it and its children: SIGTERM, and SIGKILL after `grace_s`."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(wait_s if self._popen.poll() is None else 0.0)
        self._reader.join(timeout=1.0)
        if self._popen.stdout is not None and not self._reader.is_alive():
            self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "its output is a pipe"
        for line in self._popen.stdout:
            if self._echo:
                with suppress(OSError):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
            self.lines.append(line.decode(errors="replace").rstrip())


class EngineWatch:
    """A thread that asks an engine whether it lives: its health, its metrics, and completions of one token.

    An engine is ready once it has answered a real request, and alive while it answers real requests or computes; an
    answer to a question for its health is no sign of life by itself.

    Attributes:
        ready: it has answered a real request.
        alive_s: the time of its last sign of life, on the monotonic clock.
        problem: what is wrong; "": nothing.
    """

    def __init__(self, engine: Engine, process: EngineProcess, model: str, health: str) -> None:
        self.ready, self.alive_s, self.problem = False, time.monotonic(), ""
        self._engine, self._process, self._model, self._health = engine, process, model, health
        self._load: EngineLoad | None = None
        self._probed_s, self._probes = 0.0, True
        self._stopped = threading.Event()
        self._interval_s = FAST_CHECK_S
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Return whether the engine said last that it has no request."""
        return self._load is not None and self._load.open == 0

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                problem = self._problem()
            except OSError as error:
                problem = f"it does not answer: {error}"
            if not problem:
                self.alive_s = time.monotonic()
                if not self.ready:
                    self.ready, self._interval_s = True, CHECK_S
            self.problem = problem or ""

    def _problem(self) -> str | None:
        """Return what is wrong; None: a sign of life.

        Raises:
            OSError: no answer.
        """
        status, _ = self._process.ask(self._health, limit_s=ANSWER_S)
        if status != 200:
            return f"{self._health} answers {status}"
        before, self._load = self._load, self.read_load()
        if self.ready and self._load is not None and before is not None and self._load.progress != before.progress:
            return None
        if not self.ready:
            return self._probe(FIRST_PROBE_S)
        if self._load is not None and self._load.open:
            # A probe would wait behind them, and say nothing.
            return f"it has {plural(self._load.open, 'open request')} and computes nothing"
        is_due = self._probes and time.monotonic() - self._probed_s >= PROBE_EVERY_S
        return self._probe(PROBE_S) if is_due else None

    def read_load(self, limit_s: float = ANSWER_S) -> EngineLoad | None:
        """Return the engine's open requests; None: it does not say.

        Raises:
            OSError: no answer.
        """
        path = self._engine.load_path
        if not path:
            return None
        status, answer = self._process.ask(path, limit_s=limit_s)
        return self._engine.load(answer) if status == 200 else None

    def _probe(self, limit_s: float) -> str | None:
        body = {"model": self._model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        status, answer = self._process.ask(COMPLETIONS, body, limit_s=limit_s)
        self._probed_s = time.monotonic()
        if self._engine.name == "command" and status in (400, 404, 405, 422):
            self._probes = False  # Another API than OpenAI's: its health is all there is.
        elif status != 200:
            text = answer[:300].decode(errors="replace")
            return f"{self._health} answers 200, but a completion of one token answers {status}: {text}"
        return None
