"""The HTTP face of the gateway: paths, keys, errors."""

import asyncio
import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from cordee.serve.gateway.calls import PATHS, Call, read_call
from cordee.serve.gateway.connections import ClientConnection, ClientServer
from cordee.serve.gateway.exchange import REQUEST_ID, Exchange, StreamExchange, WholeExchange
from cordee.serve.gateway.gateway import Gateway
from cordee.serve.gateway.metrics import labels
from cordee.serve.gateway.replies import ApiError

HEADER_BYTES = 16 << 10
"""Of one header, and of the request line."""
HEADERS_MAX = 64
BODY_S = 30.0
"""Time within which a body has to come."""

log = logging.getLogger(__name__)


class App:
    """Answers requests."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limit_bytes = gateway.settings.body_bytes
        self._held_bytes = 0

    def server(self) -> ClientServer:
        """Return the protocol factory for `create_server`."""
        return ClientServer(
            self.handle,
            request_factory=self._request,
            idle_s=self._gateway.settings.idle_s,
            client_connections=self._gateway.settings.client_connections,
            access_log=None,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADERS_MAX,
        )

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: Any,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        if isinstance(protocol, ClientConnection):
            protocol.begun()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self._limit_bytes)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        request[REQUEST_ID] = request.headers.get("X-Request-Id", "")[:100] or uuid.uuid4().hex
        response = await self._answer(request)
        if not response.prepared:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if request.path in PATHS:
                if request.method != "POST":
                    raise ApiError(405, f"{request.path} takes POST, not {request.method}")
                with self._hold(request) as room:
                    return await self._call(request, room)
            return self._read(request)
        except ApiError as error:
            return _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(self._too_large("more"))
        except ConnectionError:
            raise
        except Exception as failure:
            return _refusal(_failed(failure))

    # The API's requests.

    @contextmanager
    def _hold(self, request: web.BaseRequest) -> Iterator["_Room"]:
        """Count a body while its request is open; one without a length counts as the largest until it is here."""
        most, length = self._gateway.settings.open_bytes, request.content_length
        room = _Room(self._limit_bytes if length is None else min(length, self._limit_bytes))
        if self._held_bytes + room.bytes_ > most:
            raise ApiError(
                503, f"the bodies of open requests have {self._held_bytes:,} bytes, and {most:,} are taken; hint: try "
                "again, or another gateway", code="overloaded", retry_s=1.0,
            )  # fmt: skip
        self._held_bytes += room.bytes_
        try:
            yield room
        finally:
            self._held_bytes -= room.bytes_

    async def _call(self, request: web.BaseRequest, room: "_Room") -> web.StreamResponse:
        gateway = self._gateway
        key = gateway.directory.keys.find(request.headers.get("Authorization"))
        raw = await self._body(request)
        self._held_bytes += len(raw) - room.bytes_
        room.bytes_ = len(raw)
        call = read_call(request.path, raw, request.headers)
        service = gateway.directory.find(call.model, key)
        gateway.directory.keys.check_model(key, call.model, service.name)
        kind = StreamExchange if call.stream and call.path != "/v1/embeddings" else WholeExchange
        exchange = kind(gateway, gateway.desk(service), call, key)
        gateway.open.add(exchange)
        status, used = 499, 0
        try:
            response = await exchange.run(request)
            status, used = 200, exchange.progress()
            return response
        except ConnectionError:
            raise
        except Exception as failure:
            error = failure if isinstance(failure, ApiError) else _failed(failure)
            status = error.status
            gateway.metrics.refused.add(1, labels(service=service.name, why=error.code or str(status)))
            if isinstance(exchange, StreamExchange) and exchange.response is not None:
                exchange.relay.write(error.frame())
                await exchange.response.write_eof()
                return exchange.response
            raise error from None
        finally:
            gateway.open.discard(exchange)
            gateway.ended(exchange, status, used)
            if gateway.settings.log_requests:
                self._log(exchange, call, status, used, request[REQUEST_ID])

    async def _body(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > self._limit_bytes:
            raise self._too_large(f"{request.content_length:,}")
        if request.content.is_eof():
            return await request.read()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s") from None

    def _too_large(self, bytes_: str) -> ApiError:
        return ApiError(413, f"the body has {bytes_} bytes than the {self._limit_bytes:,} that are taken"
                        if bytes_ == "more" else f"the body has {bytes_} bytes, and {self._limit_bytes:,} are taken",
                        code="request_too_large")  # fmt: skip

    # What is read.

    def _read(self, request: web.BaseRequest) -> web.StreamResponse:
        path, gateway = request.path.rstrip("/"), self._gateway
        if request.method not in ("GET", "HEAD"):
            raise ApiError(404, f"there is no POST {request.path}; there are {', '.join(PATHS)}")
        if path == "/health":
            return _json({"status": "ok" if gateway.directory.version is not None else "starting"},
                         200 if gateway.directory.version is not None else 503)  # fmt: skip
        if path == "/metrics":
            return web.Response(text=gateway.metrics_text(), content_type="text/plain", charset="utf-8")
        if path == "/v1/models" or path.startswith("/v1/models/"):
            key = gateway.directory.keys.find(request.headers.get("Authorization"))
            models = [
                {"id": name, "object": "model", "created": 0, "owned_by": service.name, "root": service.name}
                | ({"max_model_len": service.context} if service.context else {})
                | ({"resident": any(each.usable for each in service.endpoints.values())} if service.model else {})
                for name, service in gateway.directory.model_names()
                if key.is_good_for(name, service.name)
            ]
            if path == "/v1/models":
                return _json({"object": "list", "data": models})
            name = path.removeprefix("/v1/models/")
            gateway.directory.keys.check_model(key, name, gateway.directory.find(name, key).name)
            return _json(next((each for each in models if each["id"] == name), {}))
        raise ApiError(404, f"there is no {request.path}; there are {', '.join(PATHS)}, /v1/models, /health, /metrics")

    def _log(self, exchange: Exchange, call: Call, status: int, used: int, name: str) -> None:
        log.info(
            "%s %s %s tenant=%s key=%s status=%d output_tokens=%d%s", name, call.path, call.model, exchange.key.tenant,
            exchange.key.id or "-", status, used,
            f" prompt={call.prompt.decode(errors='replace')}" if self._gateway.settings.log_prompts else "",
        )  # fmt: skip


@dataclass(slots=True)
class _Room:
    """Bytes that a request's body takes, or may take."""

    bytes_: int


def _failed(failure: Exception) -> ApiError:
    """Return the answer to a request that met a fault of the gateway, and log the fault."""
    log.error("a request failed", exc_info=failure)
    return ApiError(500, "the gateway failed; its log says why", code="internal_error")


def _refusal(error: ApiError) -> web.Response:
    return web.Response(
        body=error.body(), status=error.status, content_type="application/json", headers=error.headers()
    )


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), status=status, content_type="application/json")
