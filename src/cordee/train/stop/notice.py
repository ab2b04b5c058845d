"""Signals and timers of a rank, on a thread of their own.

A Python signal handler waits for the main thread, which may sit in a collective; `signal.set_wakeup_fd` does not.
`rank_exit.py` acts on a notice.
"""

import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

log = logging.getLogger("cordee")

_live: "weakref.WeakSet[Notices]" = weakref.WeakSet()
_masks = threading.local()


class Notices:
    """A thread that calls `on_signal(number)` for the given signals, and timers at their time.

    Earlier Python handlers of these signals still run, and bytes for an earlier wakeup file descriptor (asyncio's) are
    passed on to it. A forked child, such as a data loader's worker, gets the earlier handlers back,
    since its signals are not the rank's.

    Attributes:
        first_s: the time of `time.monotonic()` at which each signal first came.
    """

    def __init__(self, signals: Iterable[int], on_signal: Callable[[int], None]) -> None:
        self.first_s: dict[int, float] = {}
        self._on_signal = on_signal
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._earlier: dict[int, Any] = {}
        self._earlier_fd = -1
        self._installed = False
        self._signals = frozenset(signals)
        self._install()
        _live.add(self)
        self._thread = threading.Thread(target=self._run, name="cordee-notice", daemon=True)
        self._thread.start()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning("cordee.job was not entered in the main thread: a signal cannot give this rank notice")
            return
        for number in self._signals:
            self._earlier[number] = signal.signal(number, self._handle)
        self._earlier_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(number)
        # Python's own handler of SIGINT would end the loop at once, with nothing saved.
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def at(self, name: str, when_s: float, call: Callable[[], None]) -> None:
        """Call at a time of `time.monotonic()`; a timer replaces the one of the same name. Once closed, do nothing."""
        with self._lock:
            if not self._closed:
                self._timers[name] = (when_s, call)
                self._poke()  # Under the lock: the number of a closed descriptor may be reused.

    def close(self) -> None:
        """Restore the earlier handlers and end the thread."""
        with self._lock:
            self._closed = True
        _live.discard(self)
        self._give_back()
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            os.close(self._read_fd)
            os.close(self._write_fd)

    def _give_back(self) -> None:
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._earlier_fd)
            self._installed = False
            for number, handler in self._earlier.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._earlier = {}

    def _poke(self) -> None:
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            pass  # the pipe is full, so the thread wakes up anyway

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                next_s = min((when for when, _ in self._timers.values()), default=None)
            timeout_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            if select.select([self._read_fd], [], [], timeout_s)[0]:
                self._pass_on(os.read(self._read_fd, 4096))
            for call in self._due():
                self._guarded(call)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call it and log what it raises: the thread must go on, since the next timer may be the deadline."""
        try:
            call()
        except Exception:
            log.exception("a timer or a signal of this rank failed")

    def _due(self) -> list[Callable[[], None]]:
        now = time.monotonic()
        with self._lock:
            due = sorted((when, name) for name, (when, _) in self._timers.items() if when <= now)
            return [self._timers.pop(name)[1] for _, name in due]

    def _pass_on(self, numbers: bytes) -> None:
        raised = bytes(number for number in numbers if number)
        if raised and self._earlier_fd >= 0:
            try:
                os.write(self._earlier_fd, raised)
            except OSError as error:
                log.debug("an earlier wakeup file descriptor did not take a signal: %s", error)
        for number in raised:
            if number in self._signals:
                self.first_s.setdefault(number, time.monotonic())
                self._guarded(partial(self._on_signal, number))


# A signal between the fork and the child's first line would be taken for the rank's: it is blocked meanwhile.
def _before_fork() -> None:
    ours = frozenset().union(*(notices._signals for notices in list(_live)))
    _masks.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier)


def _after_fork_in_child() -> None:
    for notices in list(_live):
        notices._give_back()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.earlier)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
