"""One client's request, from admission to its last byte, over as many replicas as it takes."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from cordee.serve.engines.port import Dialect, Stream, Upstream, Usage
from cordee.serve.gateway.attention import Attention
from cordee.serve.gateway.calls import Call
from cordee.serve.gateway.desk import Desk
from cordee.serve.gateway.directory import Endpoint, Service
from cordee.serve.gateway.documents import read_usage
from cordee.serve.gateway.health import Health
from cordee.serve.gateway.keys import Key
from cordee.serve.gateway.metrics import Labels
from cordee.serve.gateway.relay import Relay, count
from cordee.serve.gateway.replies import COMMENT, ApiError, engine_error
from cordee.serve.gateway.wire import Answer, Collector, Pool, UpstreamError
from cordee.serve.policy.dispatch import Ask, Ticket
from cordee.serve.policy.route import prefix_blocks

FRUITLESS_MAX = 4
"""Replicas that may fail in a row without another token: the request itself may be what kills them."""
STEP_S = 20.0
"""For each request before a continuation, such as the tokens of the prompt."""
COMMENT_S = 5.0
"""Between two comments in a stream that waits for another replica."""
ANSWER_S = 3_600.0
REQUEST_ID = "id"
"""The key of a request's name, which clients know as the header X-Request-Id."""
PASSED_ON = frozenset((400, 401, 403, 404, 405, 413, 415, 422))
"""Answers of an engine that another replica would give as well."""


class Moved(UpstreamError):
    """A stream goes on with another replica by the gateway's own choice."""


@dataclass(slots=True)
class Outcome:
    """The use that a request made of one replica, for the account."""

    endpoint: Endpoint
    began_s: float
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    failed: int = 0
    retrieval_us: int = 0
    generation_us: int = 0


class House(Protocol):
    """The gateway, as its requests see it."""

    pool: Pool
    attention: Attention
    health: Health
    hold_s: float
    resume_s: float

    def clock(self) -> float:
        """Return monotonic seconds."""

    def dialect(self, engine: str) -> Dialect:
        """Return the dialect of an engine."""

    def account(self, exchange: "Exchange", outcome: Outcome) -> None:
        """Take down what a request used on one replica."""

    def spent(self, exchange: "Exchange", pico_usd: int) -> None:
        """Take down what a request cost."""

    def moved(self, exchange: "Exchange", why: str) -> None:
        """Count a request that goes on elsewhere."""


class Exchange(ABC):
    """A request on its way."""

    patience = 1.0

    def __init__(self, house: House, desk: Desk, call: Call, key: Key) -> None:
        self.house, self.desk, self.call, self.key = house, desk, call, key
        self.began_s = house.clock()
        self.first_s: float | None = None
        self.ticket: Ticket | None = None
        self.endpoint: Endpoint | None = None
        self.draining = False
        self._choice: asyncio.Future[None] | None = None
        self._outcome: Outcome | None = None
        self._fruitless: list[tuple[Endpoint, bool]] = []  # Replicas since the last token, and whether they hung.
        self._reached = 0

    @property
    def service(self) -> Service:
        """Return the service that the request is for."""
        return self.desk.service

    @property
    def labels(self) -> Labels:
        """Return the labels of its metrics."""
        return (("service", self.service.name), ("model", self.call.model))

    async def run(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the request.

        Raises:
            ApiError: it is refused, or failed before the client got a byte.
        """
        try:
            self.ticket = self.desk.submit(self._ask())
            await self._wait_for_choice(self.house.hold_s)
            while True:
                endpoint = await self._enter()
                try:
                    response = await self._once(endpoint, request)
                    self.house.health.succeeded(endpoint)
                    break
                except UpstreamError as error:
                    self._leave_endpoint()
                    await self._move(endpoint, error, request)
            self._finish()  # Before the client sees the end: what it has got is accounted for, also by kill -9.
            await self._end(response)
            return response
        finally:
            self._close()

    # What kinds of requests do differently.

    @abstractmethod
    async def _once(self, endpoint: Endpoint, request: web.BaseRequest) -> web.StreamResponse:
        """Get the answer, or the rest of it, from one replica.

        Raises:
            UpstreamError: another replica has to go on.
        """

    async def _end(self, response: web.StreamResponse) -> None:
        """Let the client see the end of its answer."""
        return

    @abstractmethod
    def _used(self) -> Usage | None:
        """Return what the client is charged for so far."""

    @abstractmethod
    def progress(self) -> int:
        """Return the tokens that the client has got."""

    @abstractmethod
    async def _idle(self, request: web.BaseRequest) -> None:
        """Keep the client's connection open while the request waits for another replica."""

    @abstractmethod
    def leave(self, why: str, *, hung: bool = False) -> None:
        """Cut the connection to the replica, and go on elsewhere."""

    @abstractmethod
    def silent_since(self) -> float:
        """Return when the last byte came, or now if none is due."""

    @abstractmethod
    def drain(self) -> None:
        """Go on elsewhere as soon as there is room, if that loses no work."""

    # Admission.

    def _ask(self) -> Ask:
        call, context = self.call, self.desk.context_tokens
        # The tokens of the prompt are an estimate, so the engine and not the gateway refuses one that is too long.
        prompt = min(call.expected_tokens(self.desk.bytes_per_token), context - 1)
        most = call.limit_tokens if call.path != "/v1/embeddings" else 1
        limit = None if most is None else max(1, min(most * call.choices, context - prompt))
        deadline = None if call.deadline_s is None else round((self.began_s + call.deadline_s) * 1e6)
        priority = self.desk.priority(self.key.tenant, call.priority)
        return Ask(self.key.tenant, prompt, limit, prefix_blocks(call.prompt), call.session, deadline, priority, self)

    def placed(self) -> None:
        """Take the choice that the ticket has now."""
        if self._choice is not None and not self._choice.done():
            self._choice.set_result(None)
        elif self.draining:
            self.leave("drains")

    def refuse(self, error: ApiError) -> None:
        """End the wait for a replica."""
        if self._choice is not None and not self._choice.done():
            self._choice.set_exception(error)

    async def _wait_for_choice(self, deadline_s: float) -> None:
        assert self.ticket is not None, "it is admitted"
        if self.ticket.choice is not None:
            return
        self._choice = asyncio.get_running_loop().create_future()
        try:
            async with self.house.attention.timeout(deadline_s):
                await self._choice
        except TimeoutError:
            raise ApiError(
                503, f"no replica of {self.service.name} took the request within {deadline_s:g} s; hint: "
                f"`cordee serve show {self.service.name}` says why", code="no_replica", retry_s=1.0,
            ) from None  # fmt: skip
        finally:
            self._choice = None

    async def _wait_for_another(self) -> None:
        """Wait for a replica in the place of one that failed, as long as there are any that take requests.

        Raises:
            ApiError: there was none for `resume_s`, or none had room for `hold_s`.
        """
        house, began_s = self.house, self.house.clock()
        while True:
            alone_s = house.attention.since(max(began_s, self.service.usable_s))
            left_s = min(house.resume_s - alone_s, house.hold_s - house.attention.since(began_s))
            try:
                await self._wait_for_choice(max(left_s, 0.0))
                return
            except ApiError:
                waited_s = house.attention.since(began_s)
                alone_s = house.attention.since(max(began_s, self.service.usable_s))
                if alone_s >= house.resume_s or waited_s >= house.hold_s:
                    raise

    async def _enter(self) -> Endpoint:
        assert self.ticket is not None and self.ticket.choice is not None, "it has a choice"
        while (endpoint := self.service.endpoints.get(self.ticket.choice.replica)) is None or not endpoint.usable:
            self.desk.again(self.ticket, self.progress())  # It left between the choice and now.
            await self._wait_for_another()
        self.endpoint = endpoint
        now = self.house.clock()
        endpoint.enter(self, now)
        self._outcome = Outcome(endpoint, now)
        return endpoint

    def _first_token(self) -> None:
        assert self.ticket is not None, "it is admitted"
        if self.first_s is None:
            self.first_s = self.house.clock()
        self.desk.first_token(self.ticket)

    # Failures.

    async def _move(self, endpoint: Endpoint, error: UpstreamError, request: web.BaseRequest) -> None:
        """Get another replica after a failure, or the next one that was found before this one was left."""
        assert self.ticket is not None, "it is admitted"
        chosen = isinstance(error, Moved)
        if not chosen:
            self.house.health.failed(self.service, endpoint, str(error))
            if self.progress() != self._reached:
                self._reached, self._fruitless = self.progress(), []
            elif error.answered:
                self._fruitless.append((endpoint, error.hung))
            # One that hung and is back was only slow.
            failures = sum(not hung or each.failing is not None for each, hung in self._fruitless)
            if failures >= FRUITLESS_MAX:
                raise self._broken(f"{failures} replicas failed with it in a row, at last {error.for_client}")
        self.house.moved(self, "drain" if chosen else "failure")
        if self.ticket.choice is None or self.ticket.choice.replica == endpoint.id:
            if self.ticket.choice is not None:
                self.desk.again(self.ticket, self.progress())
            waiting = asyncio.create_task(self._idle(request))
            try:
                await self._wait_for_another()
            except ApiError as refusal:
                raise self._broken(f"{error.for_client}, and {refusal}") from None
            finally:
                waiting.cancel()

    def _broken(self, why: str) -> ApiError:
        return ApiError(502, f"the answer broke off: {why}", kind="server_error", code="upstream_failed", retry_s=1.0)

    # The account.

    def _leave_endpoint(self) -> None:
        endpoint, self.endpoint, self.draining = self.endpoint, None, False
        if endpoint is not None:
            endpoint.exit(self, self.house.clock())
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            outcome.output_tokens = self.progress() - self._accounted
            self._accounted += outcome.output_tokens
            if outcome.output_tokens or outcome.requests or outcome.failed:
                self.house.account(self, outcome)

    _accounted = 0

    def _finish(self) -> None:
        """Account for a whole answer."""
        used = self._used()
        assert self.ticket is not None and self._outcome is not None, "it has an answer"
        if used is None:
            used = Usage(self.ticket.ask.prompt_tokens, 0, self.progress())
        elif used.input_tokens:
            self.desk.learn(len(self.call.prompt), used.input_tokens)
        outcome = self._outcome
        outcome.requests, outcome.input_tokens, outcome.cached_tokens = 1, used.input_tokens, used.cached_tokens
        outcome.retrieval_us, outcome.generation_us = used.retrieval_us, used.generation_us
        self._total = used.output_tokens
        self._leave_endpoint()
        cost = self.desk.finish(self.ticket, used.input_tokens, used.cached_tokens, used.output_tokens)
        self.house.spent(self, cost)
        self.ticket = None

    _total: int | None = None

    def _close(self) -> None:
        """End a request that has no whole answer; after `_finish` this does nothing."""
        if self.ticket is None:
            return
        ticket, self.ticket = self.ticket, None
        prompt = ticket.ask.prompt_tokens if self.first_s is not None else 0
        if self._outcome is not None:
            self._outcome.requests, self._outcome.failed, self._outcome.input_tokens = 1, 1, prompt
        self._leave_endpoint()
        self.house.spent(self, self.desk.cancel(ticket, prompt, 0, self.progress()))


class StreamExchange(Exchange):
    """A request whose answer is a stream."""

    def __init__(self, house: House, desk: Desk, call: Call, key: Key) -> None:
        super().__init__(house, desk, call, key)
        self.relay = Relay(house.clock, self._first_token)
        self.stream: Stream | None = None
        self.response: web.StreamResponse | None = None
        self._model: tuple[str, str, int] = ("", "", 0)
        self._resending: asyncio.Task[None] | None = None
        self._step: asyncio.Task[Answer] | None = None

    async def _once(self, endpoint: Endpoint, request: web.BaseRequest) -> web.StreamResponse:
        relay = self.relay
        upstream = await self._upstream(endpoint)
        try:
            if upstream is None:
                raise UpstreamError("all of the text has come")
            await self._send(endpoint, upstream)
            await relay.wait()
            if self.response is None:
                self.response = await self._begin(request)
            await relay.wait()
        except UpstreamError as error:
            if self.stream is not None and self.stream.diverged:
                raise self._broken(str(error)) from None
            rest = self._salvage(error)
            if rest is None:
                raise
            if self.response is None:
                self.response = await self._begin(request)
            relay.write(rest)
        finally:
            relay.let_go()
        return self.response

    async def _end(self, response: web.StreamResponse) -> None:
        await response.write_eof()

    async def _upstream(self, endpoint: Endpoint) -> Upstream | None:
        """Return the request for the answer, or for what the client still lacks; None: that needs no replica."""
        before, stream = self._model, self.stream
        self._model = endpoint.identity
        if stream is None:
            stream = self.house.dialect(endpoint.engine).open(
                self.call.path, {**self.call.body, "model": endpoint.model or self.call.model}
            )
            self.stream = stream
            self.relay.begin(stream, endpoint)
            return stream.first
        self.relay.begin(stream, endpoint)
        steps = stream.resume()
        if steps is None:
            raise self._broken(
                "its replica is gone, and another one would draw another answer; hint: a request with `seed` or "
                "`temperature: 0` goes on"
            )
        if stream.tokens and not endpoint.same_model(before):
            raise self._broken(f"no replica with {before[1] or 'the same model'} is left")
        return await self._steps(endpoint, steps)

    async def _steps(self, endpoint: Endpoint, steps: Generator[Upstream, bytes, None]) -> Upstream | None:
        """Carry out the requests before a continuation, and return that of the continuation; None: none is needed."""
        upstream = next(steps, None)
        while upstream is not None and not upstream.stream:
            body = b"" if upstream.body is None else msgspec.json.encode(upstream.body)
            method = "POST" if upstream.body is not None else "GET"
            fetch = self.house.pool.fetch(endpoint.address, method, upstream.path, body, deadline_s=STEP_S)
            self._step = asyncio.create_task(fetch)
            try:
                answer = await self._step
            except asyncio.CancelledError:
                if self.relay.failure is None:
                    raise
                raise self.relay.failure from None  # It was left.
            finally:
                self._step = None
            if answer.status != 200:
                raise UpstreamError(f"{endpoint.address}{upstream.path} answered with status {answer.status}")
            try:
                upstream = steps.send(answer.body)
            except StopIteration:
                return None
        return upstream

    async def _send(self, endpoint: Endpoint, upstream: Upstream) -> None:
        """Send the request, once more on a fresh connection if an idle one had closed meanwhile."""
        relay, pool = self.relay, self.house.pool
        body = msgspec.json.encode(upstream.body)
        connection = await pool.connect(endpoint.address)
        relay.connection = connection
        connection.send("POST", upstream.path, body, relay)
        if connection.reused:
            relay.on_stale = lambda: self._resend(endpoint, upstream.path, body)

    def _resend(self, endpoint: Endpoint, path: str, body: bytes) -> None:
        async def work() -> None:
            try:
                connection = await self.house.pool.connect(endpoint.address, fresh=True)
            except UpstreamError as error:
                self.relay.lost(error)
                return
            if self.relay.over or self.endpoint is not endpoint:
                connection.close()
                return
            self.relay.connection = connection
            connection.send("POST", path, body, self.relay)

        self._resending = asyncio.create_task(work())

    async def _begin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the head of the answer."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers | {"X-Request-Id": request[REQUEST_ID]})
        chunked = request.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(request)
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        self.relay.attach(request.transport, chunked=chunked)
        return response

    def _salvage(self, error: UpstreamError) -> bytes | None:
        """Return the events that end the answer without the replica; None: another one has to go on."""
        relay, stream = self.relay, self.stream
        if relay.status in PASSED_ON and not count(stream) and self.response is None:
            raise engine_error(relay.status, relay.error_body) from None
        if isinstance(error, Moved) or stream is None:
            return None
        return stream.closing()

    async def _idle(self, request: web.BaseRequest) -> None:
        while True:
            await asyncio.sleep(COMMENT_S)
            if self.response is not None:
                self.relay.write(COMMENT)

    def _used(self) -> Usage | None:
        return self.stream.usage if self.stream is not None else None

    def progress(self) -> int:
        return self._total if self._total is not None else count(self.stream)

    def leave(self, why: str, *, hung: bool = False) -> None:
        """Cut the connection to the replica, and go on elsewhere."""
        if self.endpoint is None:
            return
        kind = Moved if self.draining else UpstreamError
        if not self.draining:
            self.patience *= 2
        self.relay.fail(kind(f"{self.endpoint.address} {why}", answered=True, hung=hung))
        if self._step is not None:
            self._step.cancel()

    def drain(self) -> None:
        """Look for another replica while this one goes on."""
        if self.draining or self.ticket is None or self.ticket.choice is None or self.relay.over:
            return
        others = {name for name, each in self.service.endpoints.items() if each.identity != self._model}
        if not any(each.usable for name, each in self.service.endpoints.items() if name not in others):
            return  # Another revision would go on with another text; the replica has the time of its drain.
        if self.stream is not None and self.stream.tokens and not self.stream.can_continue:
            return  # The answer would be computed again from its start.
        self.draining = True
        self.desk.again(self.ticket, self.progress(), frozenset(others))

    def silent_since(self) -> float:
        """Return when the last byte came, or now if none is due."""
        return self.relay.silent_since()


class WholeExchange(Exchange):
    """A request whose answer is one JSON document."""

    def __init__(self, house: House, desk: Desk, call: Call, key: Key) -> None:
        super().__init__(house, desk, call, key)
        self._usage: Usage | None = None
        self._sink: Collector | None = None

    async def _once(self, endpoint: Endpoint, request: web.BaseRequest) -> web.StreamResponse:
        answer = await self._fetch(endpoint, self.call.bytes_for(endpoint.model))
        if answer.status in PASSED_ON:
            raise engine_error(answer.status, answer.body)
        if answer.status != 200:
            raise UpstreamError(f"{endpoint.address} answered with status {answer.status}", answered=True)
        try:
            self._usage = read_usage(answer.body)
        except msgspec.MsgspecError as error:
            raise UpstreamError(f"{endpoint.address} answered with no document: {error}", answered=True) from None
        self._first_token()
        return web.Response(body=answer.body, content_type="application/json")

    async def _fetch(self, endpoint: Endpoint, body: bytes) -> Answer:
        for fresh in (False, True):
            connection = await self.house.pool.connect(endpoint.address, fresh=fresh)
            self._sink = sink = Collector()
            try:
                connection.send("POST", self.call.path, body, sink)
                return await sink.done
            except UpstreamError as error:
                if error.answered or not connection.reused:
                    raise
            finally:
                connection.cut(sink)
        raise AssertionError("a fresh connection is not reused")

    def _used(self) -> Usage | None:
        return self._usage

    def progress(self) -> int:
        return self._usage.output_tokens if self._usage is not None else 0

    async def _idle(self, request: web.BaseRequest) -> None:
        return

    def leave(self, why: str, *, hung: bool = False) -> None:
        """Cut the connection to the replica, and start again elsewhere."""
        if self._sink is not None and self.endpoint is not None:
            self._sink.lost(UpstreamError(f"{self.endpoint.address} {why}", answered=True, hung=hung))

    def drain(self) -> None:
        """Stay: the answer would be computed again from its start."""

    def silent_since(self) -> float:
        """Return now: no byte is due before the whole answer."""
        return self.house.clock()
