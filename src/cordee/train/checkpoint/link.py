"""The trainer's end of its drain: starts the process, hands captures over, and learns what became of them."""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from cordee.errors import CheckpointError, FencedError
from cordee.storage.generations import Commit
from cordee.storage.rescue import DRAIN
from cordee.train.checkpoint.drain import Setup

HAND_OVER_S_MAX = 2.0

logger = logging.getLogger("cordee.train")

_live: "weakref.WeakSet[DrainLink]" = weakref.WeakSet()


class DrainLink:
    """One drain process. Its events are handled in a thread of this process, one after the other."""

    def __init__(
        self,
        setup: Setup,
        on_commit: Callable[[int, Commit], None],
        on_failure: Callable[[int | None, CheckpointError], None],
    ) -> None:
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._outbox: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
        self._reading: dict[int, int] = {}  # saves whose captures the drain still reads, by buffer
        self._open: set[int] = set()  # saves without an outcome
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cordee.train.checkpoint.drain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(*setup.fds, setup.seals_fd),
            # Whoever ends what a trainer has left behind can tell it from the rest, and give it the time it needs.
            env=os.environ | {DRAIN: "1"},
        )
        _live.add(self)
        self._outbox.put(asdict(setup))
        self._thread = threading.Thread(target=self._listen, name="cordee-drain", daemon=True)
        self._thread.start()
        threading.Thread(target=self._talk, name="cordee-drain-pipe", daemon=True).start()

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
        self._outbox.put({"do": "layout", **layout})

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
        self._outbox.put({"do": "save", "save": number, **command})
        self._flush(HAND_OVER_S_MAX)

    def send_hold(self, number: int, command: dict[str, Any]) -> None:
        """Tell of a capture that stays in memory: committed only if the trainer dies, and all ranks have it."""
        self._outbox.put({"do": "hold", "save": number, **command})
        self._flush(HAND_OVER_S_MAX)

    def _flush(self, timeout_s: float) -> None:
        """Wait until all was said; not longer, since a drain that hangs must not hang its trainer."""
        said = threading.Event()
        self._outbox.put(said)
        said.wait(timeout_s)

    def close(self, timeout_s: float, *, in_order: bool = True) -> bool:
        """No more saves: let it finish and end; False if it still works, which it then goes on to do alone.

        Not `in_order`: as if the trainer had died, which the drains of the other ranks are told.
        """
        assert self._process.stdin is not None, "the drain was started with a pipe"
        if in_order:
            self._outbox.put({"do": "close"})  # Without this word the end of the pipe means that the trainer has died.
        self._outbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """In a forked child, such as a data loader's worker: the drain has to see when the trainer closes the pipe."""
        assert self._process.stdin is not None, "the drain was started with a pipe"
        if not self._process.stdin.closed:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._process.stdin.fileno(), inheritable=False)
            os.close(null)

    def _talk(self) -> None:
        """Write what there is to say, in a thread of its own: the pipe of a drain that hangs is full at some time."""
        assert self._process.stdin is not None, "the drain was started with a pipe"
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # The listener tells of its end.
            while (message := self._outbox.get()) is not None:
                if isinstance(message, threading.Event):
                    message.set()
                    continue
                pipe.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
                pipe.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None, "the drain was started with a pipe"
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self._handle(json.loads(line))
        self._process.stdout.close()
        self._outbox.put(None)
        code = self._process.wait()
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
