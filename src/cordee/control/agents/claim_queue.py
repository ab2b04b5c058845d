"""Claims that wait to be judged: a thread takes all that have arrived, so that they share queries and wake-ups."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cordee.agent.messages import Claim, Refused
from cordee.control.agents.claims import Session

_log = logging.getLogger("cordee.control")


class ArrivedToken(NamedTuple):
    """The token with which an agent opens the connection of a node; no claim is read before it is checked."""

    node: str
    token: str


class ArrivedClaim(NamedTuple):
    """A claim of a node, and the connection over which it came."""

    node: str
    claim: Claim
    session: Session


Arrived = ArrivedToken | ArrivedClaim
Answer = asyncio.Future[Refused | None]


class ClaimQueue:
    """Tokens and claims in the order of their arrival, from the web server's loop.

    Args:
        judge: answers them, in their order: None for one that is accepted.
    """

    def __init__(self, judge: Callable[[Sequence[Arrived]], Sequence[Refused | None]]) -> None:
        self._judge = judge
        self._waiting: deque[tuple[Arrived | None, Answer]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="cordee-claims", daemon=True)

    def start(self) -> None:
        """Begin to judge."""
        self._thread.start()

    def stop(self) -> None:
        """Judge no more; who waits is cancelled. Callable from any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        _deliver([(answer, None) for _, answer in self._waiting], cancel=True)
        self._waiting.clear()

    def put(self, arrived: Arrived) -> Answer:
        """Return the future answer to a token or a claim."""
        return self._put(arrived)

    def reached(self) -> Answer:
        """Return a future that is done when all that has arrived by now is judged."""
        return self._put(None)

    def _put(self, arrived: Arrived | None) -> Answer:
        answer: Answer = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._stopped:
                answer.cancel()
            else:
                self._waiting.append((arrived, answer))
                if len(self._waiting) == 1:
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
            arrived = [each for each, _ in taken if each is not None]
            try:
                judged = iter(self._judge(arrived) if arrived else ())
            except Exception:  # the next claims must find a judge
                _log.exception("%d claims of nodes could not be judged; their agents dial again", len(arrived))
                _deliver([(answer, None) for _, answer in taken], cancel=True)
            else:
                _deliver([(answer, None if each is None else next(judged)) for each, answer in taken])


def _deliver(answers: Sequence[tuple[Answer, Refused | None]], *, cancel: bool = False) -> None:
    """Pass answers on to the loop that waits for them, which is woken once for all of them."""

    def deliver() -> None:
        for future, answer in answers:
            if future.done():  # its connection has ended meanwhile
                continue
            if cancel:
                future.cancel()
            else:
                future.set_result(answer)

    if answers:
        with contextlib.suppress(RuntimeError):  # the web server has ended
            answers[0][0].get_loop().call_soon_threadsafe(deliver)
