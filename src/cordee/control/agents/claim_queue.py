"""The claims that wait to be judged: a thread takes all that have arrived at once, so that they share one query."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from cordee.agent.messages import Claim, Refused
from cordee.control.agents.claims import Session

_log = logging.getLogger("cordee.control")


class ArrivedClaim(NamedTuple):
    """A claim of a node, and the connection over which it came."""

    node: str
    claim: Claim
    session: Session


class ClaimQueue:
    """Claims in the order of their arrival; usable from any thread.

    Args:
        judge: answers claims, in their order: None for one that is welcomed.
    """

    def __init__(self, judge: Callable[[Sequence[ArrivedClaim]], Sequence[Refused | None]]) -> None:
        self._judge = judge
        self._waiting: deque[tuple[ArrivedClaim | None, Future[Refused | None]]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="cordee-claims", daemon=True)

    def start(self) -> None:
        """Begin to judge."""
        self._thread.start()

    def stop(self) -> None:
        """Judge no more; who waits is cancelled."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        while self._waiting:
            self._waiting.popleft()[1].cancel()

    def put(self, claim: ArrivedClaim) -> "Future[Refused | None]":
        """Return the future answer to a claim."""
        return self._put(claim)

    def reached(self) -> "Future[Refused | None]":
        """Return a future that is done when every claim that has arrived by now is judged."""
        return self._put(None)

    def _put(self, claim: ArrivedClaim | None) -> "Future[Refused | None]":
        answer: Future[Refused | None] = Future()
        with self._changed:
            if self._stopped:
                answer.cancel()
            else:
                self._waiting.append((claim, answer))
                self._changed.notify()
        return answer

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                taken = list(self._waiting)
                self._waiting.clear()
            claims = [claim for claim, _ in taken if claim is not None]
            try:
                answers = iter(self._judge(claims) if claims else ())
            except Exception:  # the next claims must find a judge
                _log.exception("%d claims of nodes could not be judged; their agents dial again", len(claims))
                for _, answer in taken:
                    answer.cancel()
            else:
                for claim, answer in taken:
                    if answer.set_running_or_notify_cancel():  # else its connection has ended meanwhile
                        answer.set_result(None if claim is None else next(answers))
                    elif claim is not None:
                        next(answers)
