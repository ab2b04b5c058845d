"""Questions that cost processor time: one at a time, in a thread of their own, and only while their clients wait.

The threads of all other requests stay free, so that health, submissions and agents are answered meanwhile.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from cordee.control.precedence import Precedence
from cordee.errors import OverloadedError

WAITING_MAX = 64
"""Questions that may wait for their turn."""

T = TypeVar("T")


class Asking:
    """A client that waits for an answer, as the thread that works for it sees it."""

    def __init__(self, precedence: Precedence | None = None) -> None:
        self.left = False
        self._precedence = precedence or Precedence()

    def cpu_s(self) -> float:
        """Return the processor time of this thread in seconds, after giving way; infinity once the client has left.

        Forecasts have a budget of processor time, so that this ends them.
        """
        self._precedence.give_way()
        return float("inf") if self.left else time.thread_time()

    def check(self) -> None:
        """Give way to decisions, and raise ClientDisconnect once the client has left."""
        self._precedence.give_way()
        if self.left:
            raise ClientDisconnect


class Questions:
    """The questions of one server."""

    def __init__(self, precedence: Precedence | None = None, *, most: int = WAITING_MAX) -> None:
        """Let as many as `most` wait."""
        self._precedence, self._most = precedence, most
        self._turn = asyncio.Lock()
        self.waiting = 0

    async def answer(self, request: Request | None, work: Callable[[Asking], T]) -> T:
        """Return what `work` returns, once those that came before are done; without a request nobody leaves.

        Raises:
            OverloadedError: too many wait.
            ClientDisconnect: the client has left; work that had begun has ended.
        """
        if self.waiting >= self._most:
            raise OverloadedError(f"{self.waiting} costly requests are waiting already", hint="ask again in a minute")
        asking = Asking(self._precedence)
        self.waiting += 1
        watch = None if request is None else asyncio.ensure_future(_leaves(request, asking))
        try:
            async with self._turn:
                asking.check()
                return await asyncio.to_thread(work, asking)
        finally:
            self.waiting -= 1
            if watch is not None:
                watch.cancel()


async def _leaves(request: Request, asking: Asking) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    asking.left = True


async def _questions(request: Request) -> Questions:
    questions = request.app.state.questions
    assert isinstance(questions, Questions), "create_app put it there"
    return questions


Costly = Annotated[Questions, Depends(_questions)]
