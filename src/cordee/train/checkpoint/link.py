"""The trainer's end of its drain: starts the process, hands captures over, and learns what became of them."""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from cordee.errors import CheckpointError, FencedError
from cordee.storage.generations import Commit
from cordee.storage.rescue import UPLOADER_MARKS
from cordee.train.checkpoint.uploader import UploaderSetup

HAND_OVER_S_MAX = 2.0  # A drain that hangs must not hang its trainer.

logger = logging.getLogger("cordee.train")

_live: "weakref.WeakSet[UploaderLink]" = weakref.WeakSet()


class UploaderLink:
    """One drain process. Its events are handled in a thread of this process, one after the other."""

    def __init__(
        self,
        setup: UploaderSetup,
        on_commit: Callable[[int, Commit], None],
        on_failure: Callable[[int | None, CheckpointError], None],
    ) -> None:
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._saying = threading.RLock()
        self._unsaid = bytearray()  # what did not go into the pipe yet
        self._said_all = False  # no more will be said
        self._pusher: threading.Thread | None = None
        self._reading: dict[int, int] = {}  # saves whose captures the drain still reads, by buffer
        self._open: set[int] = set()  # saves without an outcome
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cordee.train.checkpoint.uploader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(*setup.fds, setup.marks_fd),
            # Whoever ends what a trainer has left behind can tell it from the rest, and give it the time it needs.
            env=os.environ | dict.fromkeys(UPLOADER_MARKS, "1"),
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        _live.add(self)
        self._say(asdict(setup))
        self._thread = threading.Thread(target=self._listen, name="cordee-drain", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The drain's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Can it take another save?"""
        with self._changed:
            return not self._ended

    @property
    def reading(self) -> set[int]:
        """The buffers that the drain still reads."""
        with self._changed:
            return set() if self._ended else set(self._reading)

    def wait_until_read(self, timeout_s: float, slots: Collection[int] = (0,)) -> bool:
        """Wait until one of these buffers may be written again; False if none may yet."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or any(s not in self._reading for s in slots), timeout_s)

    def send_layout(self, layout: dict[str, Any]) -> None:
        """What stays the same from save to save."""
        self._say({"do": "layout", **layout})

    def send_save(self, number: int, command: dict[str, Any]) -> None:
        """Hand a capture over: from now on it is committed even if the trainer dies."""
        with self._changed:
            ended = self._ended
            if not ended:
                self._reading[command["slot"]] = number
                self._open.add(number)
        if ended:
            self._on_failure(number, CheckpointError(f"the drain ended before save {number} was handed over"))
            return
        self._say({"do": "save", "save": number, **command}, HAND_OVER_S_MAX)

    def send_hold(self, number: int, command: dict[str, Any]) -> None:
        """Tell of a capture that stays in memory: committed only if the trainer dies, and all ranks have it."""
        self._say({"do": "hold", "save": number, **command}, HAND_OVER_S_MAX)

    def close(self, timeout_s: float, *, in_order: bool = True) -> bool:
        """No more saves: let it finish and end; False if it still works, which it then goes on to do alone.

        Not `in_order`: as if the trainer had died, which the drains of the other ranks are told.
        """
        if in_order:
            self._say({"do": "close"})  # Without this word the end of the pipe means that the trainer has died.
        with self._saying:
            self._said_all = True
            self._push_on()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """In a forked child, such as a data loader's worker: the drain has to see when the trainer closes the pipe."""
        if not self._stdin.closed:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stdin.fileno(), inheritable=False)
            os.close(null)

    def _say(self, message: dict[str, Any], patience_s: float = 0.0) -> None:
        """Into the pipe, by the caller itself; what does not fit in this time goes on beside.

        Not by a thread that always runs: the garbage collector may run foreign finalizers in any thread, and that of a
        data loader of an epoch before waits for its workers for 5 s each.
        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        deadline_s = time.monotonic() + patience_s
        with self._saying:
            if self._said_all:
                return
            self._unsaid += line
        while not self._push():  # Also if another thread pushes already: that one may be held up.
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._push_on()
                return
            self._await_room(left_s)

    def _push_on(self) -> None:
        """Have the rest written by a thread of its own, until there is none."""
        with self._saying:
            if not self._push() and self._pusher is None:
                self._pusher = threading.Thread(target=self._push_rest, name="cordee-drain-pipe", daemon=True)
                self._pusher.start()

    def _push_rest(self) -> None:
        while True:
            with self._saying:
                if self._push():
                    self._pusher = None
                    return
            self._await_room(1.0)

    def _push(self) -> bool:
        """Write what the pipe takes; whether nothing is left. After the last word the pipe is closed."""
        with self._saying:
            try:
                while self._unsaid:
                    del self._unsaid[: os.write(self._stdin.fileno(), self._unsaid)]
            except BlockingIOError:
                return False
            except BrokenPipeError:  # The listener tells of its end.
                self._said_all = True
                self._unsaid.clear()
            if self._said_all:
                self._stdin.close()
            return True

    def _await_room(self, timeout_s: float) -> None:
        room = select.poll()  # not select(), which knows no descriptors from 1,024 on
        with contextlib.suppress(ValueError):  # It was closed meanwhile: nothing is left to say.
            room.register(self._stdin, select.POLLOUT)
            room.poll(timeout_s * 1000)

    def _listen(self) -> None:
        for line in self._stdout:
            if line.endswith(b"\n"):
                self._handle(json.loads(line))
        self._stdout.close()
        code = self._process.wait()
        with self._saying:
            self._said_all = True
            self._unsaid.clear()
            self._push()
        with self._changed:
            self._ended = True
            lost, self._open = sorted(self._open), set()
            self._changed.notify_all()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        for number in lost:
            error = CheckpointError(f"the drain ended by {how} before save {number} was committed")
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
            logger.info("retired checkpoint generations %s", event["retired"])


def _after_fork_in_child() -> None:
    for link in list(_live):
        link.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
