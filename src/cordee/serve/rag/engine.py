"""The generator: an engine behind an OpenAI URL, somebody's or one that is started here, and its lost answers.

A stream that breaks off goes on by the dialect's own continuation, as in the gateway; an engine that ran out of memory
is started again with half its slots. So an answer takes longer, and is not lost.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from cordee.errors import ReplicaError
from cordee.serve.engine_process import EngineProcess
from cordee.serve.engines.known import DIALECTS
from cordee.serve.engines.llama_cpp import LlamaCpp
from cordee.serve.engines.openai import Steps
from cordee.serve.engines.port import EngineLaunch, Upstream
from cordee.serve.rag.enforce import process_cpu_s
from cordee.serve.rag.retrieval import Say
from cordee.telemetry.host import free_port

TRIES = 5
"""Times that one answer is begun or continued before it is given up."""
START_S, LOOK_S, AGAIN_S = 120.0, 0.1, 0.2
ANSWER_S = 3_600.0
_NO_MEMORY = ("out of memory", "failed to allocate", "cannot allocate", "memory slot", "kv cache is full", "bad_alloc")


class EngineFailed(Exception):
    """The engine broke an answer off; `memory`: for lack of it."""

    def __init__(self, why: str, *, memory: bool = False) -> None:
        super().__init__(why)
        self.memory = memory


class EngineRefused(Exception):
    """The engine answered that the request itself is wrong."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the engine answers {status}: {body[:300].decode(errors='replace')}")
        self.status, self.body = status, body


class Turnstile:
    """A limit of answers at once, which may change; those that wait enter in their order."""

    def __init__(self, limit: int) -> None:
        self.limit, self.running = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Return the number that wait."""
        return len(self._waiting)

    def allow(self, limit: int) -> None:
        """Change the limit."""
        self.limit = max(1, limit)
        self._let_in()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it for the block."""
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.running -= 1
                    self._let_in()
                raise
        try:
            yield
        finally:
            self.running -= 1
            self._let_in()

    async def give_way(self) -> None:
        """Leave if more are inside than the limit, and wait for a turn before all others; call it inside a turn."""
        if self.running <= self.limit:
            return
        turn = asyncio.get_running_loop().create_future()
        self.running -= 1
        self._waiting.appendleft(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.done() or turn.cancelled():
                self.running += 1  # The end of the turn takes it away again.
            raise

    def _let_in(self) -> None:
        while self._waiting and self.running < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine: its URL without `/v1`, the name of its model, and its dialect."""

    url: str
    model: str
    dialect: str = "command"


class OwnEngine:
    """llama.cpp as a child process, with a limit of memory; it is started again when it ends."""

    def __init__(self, launch: EngineLaunch, slots: int, limit_bytes: int | None, say: Say) -> None:
        self.slots = slots
        self._launch, self._limit_bytes, self._say = launch, limit_bytes, say
        self._process: EngineProcess | None = None
        self._starting, self._mending = asyncio.Lock(), asyncio.Lock()

    @property
    def address(self) -> EngineAddress:
        """Return where it listens."""
        assert self._process is not None, "it was started"
        return EngineAddress(self._process.address, self._launch.served_names[0], "llama.cpp")

    @property
    def pid(self) -> int:
        """Return the id of its process."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self) -> None:
        """Start it, and return when it is ready.

        Raises:
            ReplicaError: it does not start, not even with one slot.
        """
        async with self._starting:
            if self._process is not None and self._process.exit_code() is None:
                return
            while (why := await self._start_once()) is not None:
                if self.slots == 1:
                    raise ReplicaError(f"the engine does not start: {why}", hint="give it more memory: --memory")
                self._fewer(why)

    async def mend(self, *, memory: bool) -> None:
        """Start it again if it has ended: with half the slots if it ran out of memory."""
        await asyncio.sleep(AGAIN_S)  # Its connections break before it is seen to have ended.
        async with self._mending:
            if self._process is None or self._process.exit_code() is None:
                return
            why = self._process.why_ended()
            if memory or "memory" in why.splitlines()[0]:
                self._fewer(why.splitlines()[0])
            else:
                self._say("engine", None, None, f"the engine {why.splitlines()[0]}, and is started again")
            await asyncio.to_thread(self._process.end, 0.0)
            await self.start()

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end(2.0)

    def _fewer(self, why: str) -> None:
        before, self.slots = self.slots, max(1, self.slots // 2)
        self._say("slots", before, self.slots, f"the engine {why.splitlines()[0]}: half the slots need half the cache")

    async def _start_once(self) -> str | None:
        """Start it; return why it is not ready, None: it is."""
        launch = self._launch.at(free_port(self._launch.host))
        flags = {**launch.flags, "--parallel": self.slots}
        command = LlamaCpp().command(replace(launch, flags=flags))
        words = (sys.executable, "-m", "cordee.serve.rag.limited", str(self._limit_bytes or 0))
        command = replace(command, argv=(*words, *command.argv))
        process = self._process = await asyncio.to_thread(EngineProcess, command, launch.host, launch.port, echo=False)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if process.exit_code() is not None:
                why = await asyncio.to_thread(process.why_ended)
                await asyncio.to_thread(process.end, 0.0)
                return why
            try:
                status, _ = await asyncio.to_thread(process.ask, "/health", limit_s=5.0)
                if status == 200:
                    return None
            except OSError:
                pass
            await asyncio.sleep(LOOK_S)
        process.end(1.0)
        return f"was not ready within {START_S:.0f} s"


class Generator:
    """Answers of an engine, `turnstile.limit` at once."""

    def __init__(self, find: Callable[[], EngineAddress], own: OwnEngine | None, at_once: int, say: Say) -> None:
        self.turnstile = Turnstile(at_once)
        self._find, self._own, self._say = find, own, say
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the connections."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=10.0)
        # Engines close idle connections without a word, so none is kept.
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def cpu_s(self) -> float:
        """Return the processor's seconds of this process and of our own engine so far."""
        return time.process_time() + (0.0 if self._own is None else process_cpu_s(self._own.pid))

    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncIterator[bytes]:
        """Yield the events of an answer as its client gets them, over as many tries as it takes.

        Raises:
            EngineRefused: the request is wrong.
            EngineFailed: it broke off `TRIES` times without another token.
        """
        address = self._find()
        stream = DIALECTS[address.dialect].open(path, {**body, "model": address.model, "stream": True})
        upstream: Upstream | None = stream.first
        failures, tokens = 0, 0
        while True:
            try:
                if upstream is not None:
                    async for data in self._events(address, upstream):
                        if out := stream.feed(data):
                            yield out
                        if stream.done:
                            return
                    raise EngineFailed(stream.error or "it ended its answer early", memory=_is_memory(stream.error))
            except EngineFailed as error:
                failures = 1 if stream.tokens > tokens else failures + 1
                tokens = stream.tokens
                if failures >= TRIES:
                    raise
                await self._recover(error)
            if (rest := stream.closing()) is not None:
                if rest:
                    yield rest
                return
            address, steps = self._find(), stream.resume()
            if steps is None:
                raise EngineFailed("the engine failed in the middle of an answer that cannot go on")
            try:
                upstream = await self._steps(address, steps)
            except EngineFailed as error:
                failures += 1
                if failures >= TRIES:
                    raise
                await self._recover(error)
                upstream = None

    async def whole(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Return an answer that is one document.

        Raises:
            EngineRefused: the request is wrong.
            EngineFailed: it broke off `TRIES` times.
        """
        for left in reversed(range(TRIES)):
            address = self._find()
            try:
                raw = await self._fetch(address, Upstream(path, {**body, "model": address.model, "stream": False}))
                found = json.loads(raw)
                assert isinstance(found, dict), "an answer is an object"
                return found
            except EngineFailed as error:
                if not left:
                    raise
                await self._recover(error)
        raise AssertionError("the last try returns or raises")

    async def _steps(self, address: EngineAddress, steps: Steps) -> Upstream | None:
        upstream = next(steps, None)
        while upstream is not None and not upstream.stream:
            answer = await self._fetch(address, upstream)
            try:
                upstream = steps.send(answer)
            except StopIteration:
                return None
        return upstream

    async def _recover(self, error: EngineFailed) -> None:
        """Let fewer answers run at once if memory ran out, and start our own engine again if it has ended."""
        if error.memory and self.turnstile.limit > 1:
            before = self.turnstile.limit
            self.turnstile.allow(before // 2)
            self._say("at_once", before, self.turnstile.limit, f"the engine ran out of memory: {error}")
        if error.memory:
            await self.turnstile.give_way()
        if self._own is None:
            await asyncio.sleep(AGAIN_S)
            return
        await self._own.mend(memory=error.memory)
        if self.turnstile.limit > self._own.slots:
            self.turnstile.allow(self._own.slots)

    async def _fetch(self, address: EngineAddress, upstream: Upstream) -> bytes:
        return b"".join([data async for data in self._events(address, upstream)])

    async def _events(self, address: EngineAddress, upstream: Upstream) -> AsyncIterator[bytes]:
        assert self._session is not None, "it is open"
        method, url = ("GET" if upstream.body is None else "POST"), address.url + upstream.path
        try:
            async with self._session.request(method, url, json=upstream.body) as answer:
                if answer.status != 200:
                    text = await answer.read()
                    if answer.status < 500 and answer.status != 429:
                        raise EngineRefused(answer.status, text)
                    said = text[:300].decode(errors="replace")
                    raise EngineFailed(f"it answers {answer.status}: {said}", memory=_is_memory(said))
                async for data in answer.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"it cannot be reached: {error or type(error).__name__}") from error


def _is_memory(text: str) -> bool:
    return any(each in text.lower() for each in _NO_MEMORY)
