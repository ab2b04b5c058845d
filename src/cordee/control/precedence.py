"""Decisions before answers: threads that work for requests give way while something is decided or written.

The interpreter runs one thread at a time. A thread that writes gives its lock away with each statement, and gets it
back after a turn of every other one that computes. So those wait at their next statement to the database, and until
they have come to one their turns are short.
"""

import sys
import threading
from typing import Any

TURN_S = 0.001
"""The longest turn of a thread while others wait; Python's own is 5 ms."""

_SHORT_S = 0.0002
_WAIT_S = 0.02


class Precedence:
    """The thread that decides, and those that give way to it.

    Enter it with the state's lock held, so that one thread at a time is in it, and no thread that holds the lock waits.
    Only threads that work for requests give way: those of agents' links may hold what the decision needs.

    Attributes:
        waiting: a lock of each thread that gives way; with one for all of them they would wait for each other.
    """

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        """Let threads give way for this time at most, so that a request ends however much there is to decide."""
        self._decider: int | None = None
        self._depth = 0
        self._wait_s, self._turn_s = wait_s, sys.getswitchinterval()
        self.waiting: list[Any] = []

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._decider, self._turn_s = threading.get_ident(), sys.getswitchinterval()
        sys.setswitchinterval(min(self._turn_s, _SHORT_S))

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._decider = None
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.release()
        sys.setswitchinterval(self._turn_s)

    def give_way(self) -> None:
        """Wait while another thread decides."""
        if self._decider in (None, threading.get_ident()):
            return
        mine = threading.Lock()
        mine.acquire()
        self.waiting.append(mine)
        if self._decider is not None:  # else it may have ended before it could see this lock
            mine.acquire(timeout=self._wait_s)


class Undisputed(Precedence):
    """The precedence of a thread that is alone in its process, as in a simulation: no other one gives way to it."""

    def __enter__(self) -> None:
        """Enter: there is nobody to tell."""

    def __exit__(self, *_: object) -> None:
        """Leave."""
