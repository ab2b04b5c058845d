"""The trainer's end of its uploader: start the process, hand captures over, and handle its events."""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from typing import Any

from cordee.errors import CheckpointError, FencedError
from cordee.storage.generations import Commit
from cordee.storage.rescue import UPLOADER_IGNORES, UPLOADER_MARKS
from cordee.train.checkpoint.upload import UploaderSetup

HAND_OVER_S_MAX = 2.0  # An uploader that hangs must not hang its trainer.

logger = logging.getLogger("cordee.train")

_live: "weakref.WeakSet[UploaderLink]" = weakref.WeakSet()


class UploaderLink:
    """One uploader process, with a thread of this process that handles its events one by one."""

    def __init__(
        self,
        setup: UploaderSetup,
        on_commit: Callable[[int, Commit], None],
        on_failure: Callable[[int | None, CheckpointError], None],
    ) -> None:
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._reading: dict[int, int] = {}  # by buffer: the save whose capture the uploader still reads
        self._open: set[int] = set()  # saves without an outcome
        self._ended = False
        with _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cordee.train.checkpoint.uploader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(*setup.fds, setup.marks_fd),
                # An agent that ends a trainer's remaining processes recognises the uploader, and gives it time.
                env=os.environ | dict.fromkeys(UPLOADER_MARKS, "1"),
            )
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._stdout = self._process.stdout
        self._pipe = _CommandPipe(self._process.stdin)
        _live.add(self)
        self._pipe.send(asdict(setup))
        self._thread = threading.Thread(target=self._listen, name="cordee-uploader", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the uploader's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the uploader can take another save."""
        with self._changed:
            return not self._ended

    @property
    def reading(self) -> set[int]:
        """Return the buffers that the uploader still reads."""
        with self._changed:
            return set() if self._ended else set(self._reading)

    def wait_until_read(self, timeout_s: float, slots: Collection[int] = (0,)) -> bool:
        """Wait until the uploader no longer reads one of these buffers; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or any(s not in self._reading for s in slots), timeout_s)

    def send_layout(self, layout: dict[str, object]) -> None:
        """Send the layout of the state, which is the same from save to save."""
        self._pipe.send({"do": "layout", **layout})

    def send_save(self, number: int, command: dict[str, Any]) -> None:
        """Hand a capture over; it is then committed even if the trainer dies."""
        with self._changed:
            ended = self._ended
            if not ended:
                self._reading[command["slot"]] = number
                self._open.add(number)
        if ended:
            self._on_failure(number, CheckpointError(f"the uploader ended before save {number} was handed over"))
            return
        self._pipe.send({"do": "save", "save": number, **command}, HAND_OVER_S_MAX)

    def send_in_memory(self, number: int, command: dict[str, Any]) -> None:
        """Announce a capture that stays in memory; it is committed only if the trainer dies and all ranks have it."""
        self._pipe.send({"do": "keep", "save": number, **command}, HAND_OVER_S_MAX)

    def close(self, timeout_s: float, *, in_order: bool = True) -> bool:
        """Let the uploader finish, and return whether it has ended; if not, it goes on alone.

        If not `in_order`, it acts as if the trainer had died, and the other ranks' uploaders learn of it.
        """
        if in_order:
            self._pipe.send({"do": "close"})  # Without it, the end of the pipe means that the trainer died.
        self._pipe.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """Close the pipe in a forked child, such as a data loader's worker: the uploader must see the trainer's end."""
        self._pipe.let_go()

    def _listen(self) -> None:
        for line in self._stdout:
            if line.endswith(b"\n"):
                self._handle(json.loads(line))
        self._stdout.close()
        code = self._process.wait()
        self._pipe.drop()
        with self._changed:
            self._ended = True
            lost, self._open = sorted(self._open), set()
            self._changed.notify_all()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        for number in lost:
            error = CheckpointError(f"the uploader ended by {how} before save {number} was committed")
            self._on_failure(number, error)

    def _handle(self, event: dict[str, Any]) -> None:
        kind, number = event.pop("event"), event.pop("save")
        known = number in self._open
        with self._changed:
            self._reading = {slot: save for slot, save in self._reading.items() if number not in (save, None)}
            if kind != "written":
                self._open.discard(number)
            self._changed.notify_all()
        if kind == "committed":
            self._on_commit(number, Commit(**event))
        elif kind in ("failed", "fenced"):
            error = (FencedError if kind == "fenced" else CheckpointError)(event["message"], hint=event["hint"])
            self._on_failure(number if known else None, error)
        elif kind == "collected" and event["retired"]:
            logger.debug("retired checkpoint generations %s", event["retired"])


class _CommandPipe:
    """The uploader's standard input: JSON lines that the caller writes itself while the pipe has room.

    No permanent thread writes them: the garbage collector may run finalizers in any thread, and that of an old data
    loader waits 5 s for each of its workers.
    """

    def __init__(self, stdin: Any) -> None:
        self._stdin = stdin
        os.set_blocking(stdin.fileno(), False)
        self._lock = threading.RLock()
        self._unsent = bytearray()
        self._closing = False  # no message is added any more
        self._sender: threading.Thread | None = None

    def send(self, message: dict[str, Any], patience_s: float = 0.0) -> None:
        """Send a message; a thread sends the rest if the pipe does not take all of it in time."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        deadline_s = time.monotonic() + patience_s
        with self._lock:
            if self._closing:
                return
            self._unsent += line
        while not self._try_send():  # Also if another thread sends already, since it may be blocked.
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._send_beside()
                return
            self._await_room(left_s)

    def close(self) -> None:
        """Close the pipe once all is sent."""
        with self._lock:
            self._closing = True
            self._send_beside()

    def drop(self) -> None:
        """Close the pipe now and drop the rest: the process has ended."""
        with self._lock:
            self._closing = True
            self._unsent.clear()
            self._try_send()

    def let_go(self) -> None:
        """Close this process's copy of the pipe, which a fork has made."""
        if not self._stdin.closed:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stdin.fileno(), inheritable=False)
            os.close(null)

    def _send_beside(self) -> None:
        """Start a thread that sends the rest."""
        with self._lock:
            if not self._try_send() and self._sender is None:
                self._sender = threading.Thread(target=self._send_rest, name="cordee-uploader-pipe", daemon=True)
                self._sender.start()

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if self._try_send():
                    self._sender = None
                    return
            self._await_room(1.0)

    def _try_send(self) -> bool:
        """Write what the pipe takes; return whether nothing is left. Close the pipe at the end."""
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: os.write(self._stdin.fileno(), self._unsent)]
            except BlockingIOError:
                return False
            except BrokenPipeError:  # The listener reports the end of the process.
                self._closing = True
                self._unsent.clear()
            if self._closing:
                self._stdin.close()
            return True

    def _await_room(self, timeout_s: float) -> None:
        room = select.poll()  # not select(), which is limited to descriptors below 1,024
        with contextlib.suppress(ValueError):  # It was closed meanwhile: nothing is left to send.
            room.register(self._stdin, select.POLLOUT)
            room.poll(timeout_s * 1000)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that the uploader ignores; it inherits that, since one would end it while Python starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UPLOADER_IGNORES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    for link in list(_live):
        link.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
