"""The state of a gateway: services with their queues, health of replicas, accounts and latencies."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cordee.serve.engines.known import DIALECTS
from cordee.serve.engines.port import Dialect
from cordee.serve.gateway.attention import TICK_S, Attention
from cordee.serve.gateway.desk import Desk
from cordee.serve.gateway.directory import Directory, Endpoint, Service
from cordee.serve.gateway.exchange import Exchange, Outcome, StreamExchange
from cordee.serve.gateway.health import Health
from cordee.serve.gateway.metrics import Metrics, Rate, Recent, labels
from cordee.serve.gateway.replies import ApiError
from cordee.serve.gateway.usage import UsageSpool
from cordee.serve.gateway.wire import Pool
from cordee.serve.policy.dispatch import Tenants
from cordee.serve.policy.limits import Prices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a gateway.

    Attributes:
        name: of the gateway; unique for a server.
        spool: folder of the usage that the server has not acknowledged.
        hold_s: time that a request waits for its first replica, such as of a service that starts from zero.
        resume_s: time without any replica after which a request whose replica failed is given up.
        report_s: time between two reports of usage.
        body_bytes: of the largest request.
        open_bytes: of the bodies of all open requests.
        idle_s: time after which a client's connection without a request is closed.
        client_connections: that one address may have; None: half of all that the system allows.
        log_requests: a line for each request, without its prompt.
        log_prompts: with its prompt.
    """

    name: str
    spool: Path
    hold_s: float = 600.0
    resume_s: float = 60.0
    report_s: float = 30.0
    body_bytes: int = 10_000_000
    open_bytes: int = 1_000_000_000
    idle_s: float = 120.0
    client_connections: int | None = None
    log_requests: bool = False
    log_prompts: bool = False


@dataclass(slots=True)
class Latency:
    """Latencies of the last requests of a service, in seconds, and the counts of lately ended ones."""

    ttft: Recent
    tpot: Recent
    rate: Rate


class Gateway:
    """All that requests have in common (`exchange.House`)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.attention = Attention(self.clock)
        self.pool = Pool(self.attention)
        self.directory = Directory()
        self.directory.on_change.append(self._changed)
        self.directory.on_leave.append(self._note_busy)
        self.health = Health(self.directory, self.pool, self.clock, self.attention, self._refresh)
        self.desks: dict[tuple[str, str], Desk] = {}
        self.tenants = Tenants()
        self.usage = UsageSpool(settings.spool)
        self.metrics = Metrics()
        self.latency: defaultdict[tuple[str, str], Latency] = defaultdict(lambda: Latency(Recent(), Recent(), Rate()))
        self.hold_s, self.resume_s = settings.hold_s, settings.resume_s
        self.open: set[Exchange] = set()
        self.unserved = asyncio.Event()
        """A request waits for a replica, or for a model, that the server has to start."""

    clock = staticmethod(time.monotonic)

    def dialect(self, engine: str) -> Dialect:
        """Return the dialect of an engine; one that is not known speaks the plain OpenAI API."""
        return DIALECTS.get(engine) or DIALECTS["command"]

    def desk(self, service: Service) -> Desk:
        """Return the queue of a service."""
        found = self.desks.get(service.key)
        if found is None or found.service is not service:
            found = self.desks[service.key] = Desk(service, self.tenants, self.clock, self.unserved.set)
            found.refresh(self._prices(service))
        return found

    def apply(self, routes: Mapping[str, Any]) -> None:
        """Take over the routes that the server announced."""
        self.directory.apply(routes)
        self.tenants.set_tenants(list(self.directory.tenants.values()), self.usage.unreported_pico_usd())
        for key in self.desks.keys() - self.directory.services.keys():
            text = f"the service {key[0]} has ended; hint: `cordee serve list` shows those that there are"
            self.desks.pop(key).refuse_waiting(ApiError(404, text, code="model_not_found", param="model"))

    def account(self, exchange: Exchange, outcome: Outcome) -> None:
        """Take down what a request used on one replica."""
        now, service, call = self.clock(), exchange.service, exchange.call
        job, epoch = outcome.endpoint.attempt
        at_us = time.time_ns() // 1_000
        self.usage.add(
            {
                "service": service.name, "job_id": job, "epoch": epoch, "tenant": exchange.key.tenant,
                "key": exchange.key.id, "model": call.model, "from_us": at_us - round((now - outcome.began_s) * 1e6),
                "until_us": at_us, "requests": outcome.requests, "failed": outcome.failed,
                "input_tokens": outcome.input_tokens, "cached_tokens": outcome.cached_tokens,
                "output_tokens": outcome.output_tokens,
            }
            | _times(outcome)
        )  # fmt: skip
        of = exchange.labels
        self.metrics.prompt.add(outcome.input_tokens, of)
        self.metrics.cached.add(outcome.cached_tokens, of)
        self.metrics.generated.add(outcome.output_tokens, of)

    def spent(self, exchange: Exchange, pico_usd: int) -> None:
        """Take down what a request cost."""
        self.usage.spent(exchange.key.tenant, pico_usd)

    def moved(self, exchange: Exchange, why: str) -> None:
        """Count a request that goes on elsewhere."""
        self.metrics.moved.add(1, labels(service=exchange.service.name, why=why))

    def ended(self, exchange: Exchange, status: int, output_tokens: int) -> None:
        """Take down the latencies of a request."""
        now, call, name = self.clock(), exchange.call, exchange.service.name
        self.metrics.requests.add(1, (("service", name), ("path", call.path), ("status", str(status))))
        latency = self.latency[exchange.service.key]
        latency.rate.add(now, output_tokens)
        if status != 200 or exchange.first_s is None:
            return
        of = exchange.labels
        self.metrics.duration.observe(now - exchange.began_s, of)
        if isinstance(exchange, StreamExchange):
            ttft = exchange.first_s - exchange.began_s
            self.metrics.ttft.observe(ttft, of)
            latency.ttft.add(ttft, now)
            if output_tokens > 1:
                tpot = (now - exchange.first_s) / (output_tokens - 1)
                self.metrics.tpot.observe(tpot, of)
                latency.tpot.add(tpot, now)

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each service for the server."""
        rows = []
        for service in self.directory.services.values():
            desk, latency = self.desk(service), self.latency[service.key]
            now = self.clock()
            ttft, tpot = latency.ttft.quantile(0.99, now), latency.tpot.quantile(0.99, now)
            requests_per_s, tokens_per_s = latency.rate.per_s(now)
            rows.append(
                {
                    "service": service.name,
                    "queued": desk.queued,
                    "oldest_wait_us": desk.oldest_wait_us(),
                    "running": desk.running,
                    "kv_used": desk.kv_used(),
                    "ttft_p99_us": None if ttft is None else round(ttft * 1e6),
                    "tpot_p99_us": None if tpot is None else round(tpot * 1e6),
                    "requests_per_s": requests_per_s,
                    "tokens_per_s": tokens_per_s,
                    "failing": [each.id for each in service.endpoints.values() if each.failing is not None],
                }
                | (_use(service, now) if service.model else {})
            )
        return rows

    def note_busy(self) -> None:
        """Take down the time in which each replica had open requests."""
        for service, endpoint in self.directory.endpoints():
            self._note_busy(service, endpoint)

    async def tick(self) -> None:
        """Look after what no event says, for ever: deadlines that pass, slow clients, idle connections."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self.clock()
            self.pool.expire()
            for desk in list(self.desks.values()):
                for ticket, refusal in desk.expire():
                    self.metrics.refused.add(1, labels(service=desk.service.name, why=refusal.code or ""))
                    assert isinstance(ticket.ask.item, Exchange), "it is a request of this gateway"
                    ticket.ask.item.refuse(refusal)
            for exchange in self.open:
                if isinstance(exchange, StreamExchange):
                    exchange.relay.look_at_client(now)

    def metrics_text(self) -> str:
        """Return the metrics as they are now."""
        metrics = self.metrics
        for gauge in (metrics.running, metrics.waiting, metrics.replicas):
            gauge.values.clear()
        for service in self.directory.services.values():
            desk, of = self.desk(service), labels(service=service.name)
            metrics.running.add(desk.running, of)
            metrics.waiting.add(desk.queued, of)
            for endpoint in service.endpoints.values():
                metrics.replicas.add(endpoint.usable, labels(service=service.name, replica=endpoint.id))
        return metrics.text()

    def _changed(self, service: Service) -> None:
        """Follow the announced replicas of a service."""
        self._refresh(service)
        for endpoint in list(service.endpoints.values()):
            if endpoint.state == "draining":
                for request in list(endpoint.open):
                    request.drain()

    def _refresh(self, service: Service) -> None:
        self.desk(service).refresh(self._prices(service))

    def _note_busy(self, service: Service, endpoint: Endpoint) -> None:
        busy_us = endpoint.take_busy_us(self.clock())
        if busy_us:
            (job, epoch), at_us = endpoint.attempt, time.time_ns() // 1_000
            self.usage.add(
                {
                    "service": service.name, "job_id": job, "epoch": epoch, "tenant": "", "key": "",
                    "model": service.model,
                    "from_us": at_us - busy_us, "until_us": at_us, "busy_us": busy_us,
                }
            )  # fmt: skip

    def _prices(self, service: Service) -> Prices:
        found = self.directory.prices.get(service.name) or {}
        default = Prices()
        return Prices(
            int(found.get("input", default.input_tokens)),
            int(found.get("cached", default.cached_tokens)),
            int(found.get("output", default.output_tokens)),
        )


def _times(outcome: Outcome) -> dict[str, int]:
    """Return the time that a knowledge base spent on a request, part by part; of other engines nothing."""
    times = {"retrieval_us": outcome.retrieval_us, "generation_us": outcome.generation_us}
    return times if any(times.values()) else {}


def _use(service: Service, now: float) -> dict[str, Any]:
    """Return what swaps of a service's models depend on: by replica the open requests, and the time without any."""
    endpoints = service.endpoints.values()
    idle_us = {each.id: round((now - each.heard_s) * 1e6) for each in endpoints if each.heard_s and not each.open}
    running = {each.id: len(each.open) for each in endpoints if each.open}
    return {"model": service.model, "open": running, "idle_us": idle_us}
