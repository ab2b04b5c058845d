"""A job's way to its fetcher, which is started when it is first needed, and again if it was killed."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cordee.errors import DataError, from_body

_SOCKET, _LOCK = "fetcher", "lock"
_TRIES = 5


class Channel:
    """Requests to the fetcher of this process, of the processes that it forks, and of those that get it pickled.

    Args:
        root: the folder of the cache.
        limit_bytes: its limit; None: the disk's.
    """

    def __init__(self, root: Path, limit_bytes: int | None) -> None:
        self._root, self._limit_bytes = root, limit_bytes
        self._folder = tempfile.mkdtemp(prefix="cordee-data-")
        self._local = threading.local()
        self._owner = weakref.finalize(self, _leave, self._folder, os.getpid(), [])
        self._hint: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to find the same fetcher."""
        return {"_root": self._root, "_limit_bytes": self._limit_bytes, "_folder": self._folder, "_hint": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the same fetcher; the process that made the channel removes its folder."""
        self.__dict__.update(state)
        self._local = threading.local()
        self._owner = weakref.finalize(self, _leave, self._folder, -1, [])

    def ask(self, op: str, **request: Any) -> Any:
        """Send a request and return its answer, whichever fetcher gives it.

        Raises:
            CacheFullError: the cache has no room for it.
            DataError: as the fetcher says.
        """
        line = json.dumps({"op": op, **request}).encode() + b"\n"
        for _ in range(_TRIES):
            try:
                connection = self._connected()
                connection.sendall(line)
                return _answer(connection.makefile("rb"))
            except (OSError, EOFError):  # it was killed
                self._hang_up()
        raise DataError(f"the fetcher of this job has died {_TRIES} times in a row", hint="its standard error says why")

    def hint(self, **hint: Any) -> None:
        """Say which objects are read next; a new fetcher is told so as well."""
        self._hint = hint
        self.ask("hint", **hint)

    def close(self) -> None:
        """End the fetcher, if this process has started it."""
        self._hang_up()
        self._owner()

    def _hang_up(self) -> None:
        self._local.line = None

    def _connected(self) -> socket.socket:
        line: _Line | None = getattr(self._local, "line", None)
        if line is None or line.pid != os.getpid():
            self._local.line = line = _Line(self._dial() or self._start())
        return line.connection

    def _dial(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(os.path.join(self._folder, _SOCKET))  # noqa: PTH118
        except OSError:
            connection.close()
            return None
        return connection

    def _start(self) -> socket.socket:
        """Start a fetcher, unless another process has; its socket takes connections before it runs."""
        Path(self._folder).mkdir(exist_ok=True)
        with Path(self._folder, _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._dial()
            if found is not None:
                return found
            path = Path(self._folder, _SOCKET)
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen(128)
                command = [sys.executable, "-m", "cordee.storage.cache.fetcher"]
                command += ["--root", str(self._root), "--listener", str(listener.fileno())]
                if self._limit_bytes is not None:
                    command += ["--limit-bytes", str(self._limit_bytes)]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                    env=_environment(os.environ),
                )
            _processes(self._owner).append((os.getpid(), process))
            found = self._dial()
        if found is None:
            raise ConnectionError("the fetcher does not listen")
        if self._hint is not None:
            found.sendall(json.dumps({"op": "hint", **self._hint}).encode() + b"\n")
            _answer(found.makefile("rb"))
        return found


class _Line:
    """The connection of one thread, which is closed with it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.pid = connection, os.getpid()

    def __del__(self) -> None:
        self.connection.close()


def _processes(owner: "weakref.finalize[Any, Any]") -> list[tuple[int, "subprocess.Popen[bytes]"]]:
    alive = owner.peek()
    assert alive is not None, "a closed channel asks for nothing"
    found: list[tuple[int, subprocess.Popen[bytes]]] = alive[2][2]
    return found


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the fetcher finds this package, whatever the job puts before it."""
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]
    return {**own, "PYTHONPATH": os.pathsep.join(paths)}


def _answer(lines: Any) -> Any:
    with lines:
        line = lines.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        head = json.loads(line)
        body = lines.read(head.get("bytes", 0))
        if len(body) < head.get("bytes", 0):
            raise EOFError
        return result(head, body)


def result(head: Mapping[str, Any], body: bytes) -> Any:
    """Return what an answer says.

    Raises:
        CordeeError: the error in it.
    """
    error = from_body(head)
    if error is not None:
        raise error
    return body if "bytes" in head else head["found"]


def _leave(folder: str, pid: int, processes: list[tuple[int, "subprocess.Popen[bytes]"]]) -> None:
    """Close the input of the fetchers that this process has started, and remove the folder that it has made."""
    for starter, process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if starter == os.getpid():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        else:
            process.returncode = 0  # of a parent: it is not this process' child
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
