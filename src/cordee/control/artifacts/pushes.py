"""Pushes that are open, so that no collection removes what one of them counts on.

They are not in the log: a server that starts may have lost some, so for one lease it takes each as open.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cordee.errors import BusyError, NotFoundError

LEASE_S = 300.0


class Pushes:
    """The open pushes of one server, by id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends_s: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._collecting = False

    def open(self) -> str:
        """Return the id of a new push.

        Raises:
            BusyError: a collection goes on.
        """
        with self._lock:
            if self._collecting:
                raise BusyError("chunks are being collected", hint="push again in a moment")
            push = secrets.token_hex(8)
            self._ends_s[push] = time.monotonic() + LEASE_S
        return push

    def renew(self, push: str) -> None:
        """Keep a push open for another lease.

        Raises:
            NotFoundError: it is not open: its lease has run out, or the server is another one by now.
        """
        with self._lock:
            if push not in self._ends_s:
                raise NotFoundError(f"the push {push} is not open any more", hint="push again: what was sent counts")
            self._ends_s[push] = time.monotonic() + LEASE_S

    def close(self, push: str) -> None:
        """End a push; no error if it is not open."""
        with self._lock:
            self._ends_s.pop(push, None)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let no push open meanwhile.

        Raises:
            BusyError: one is open, or one may be that an earlier server knew.
        """
        with self._lock:
            now_s = time.monotonic()
            self._ends_s = {push: end_s for push, end_s in self._ends_s.items() if end_s > now_s}
            wait_s = max([*self._ends_s.values(), self._started_s + LEASE_S]) - now_s
            if self._collecting or self._ends_s or wait_s > 0:
                reason = f"{len(self._ends_s)} are open" if self._ends_s else "the server has just started"
                raise BusyError(
                    f"a push may still count on chunks that no version needs: {reason}",
                    hint=f"collect again in {max(1, round(wait_s))} s",
                )
            self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
