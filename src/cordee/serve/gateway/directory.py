"""Services and their replicas as the server announced them last, with what the gateway itself sees of each replica."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cordee.serve.gateway.keys import ANYBODY, Key, KeyRing
from cordee.serve.gateway.replies import ApiError
from cordee.serve.policy.dispatch import Tenant

SERVING = ("ready",)
"""States of a replica in which it gets requests."""
RESERVE = ("ready", "standby")
"""The same while no other replica gets any."""


class Open(Protocol):
    """An open request, as its replica's record knows it."""

    patience: float
    """Times the usual silence that it bears."""

    def leave(self, why: str, *, hung: bool = False) -> None:
        """Cut the connection, and go on elsewhere; `hung`: the replica was silent, and answered no probe."""

    def drain(self) -> None:
        """Go on elsewhere as soon as there is room, if that loses no work."""

    def silent_since(self) -> float:
        """Return when the last byte came, or now if none is due."""


@dataclass(slots=True)
class Pace:
    """The times at which a replica sends.

    Attributes:
        interval_s: moving average of the time between two events of a stream.
        paused_s: end of its last pause.
    """

    interval_s: float = 0.02
    paused_s: float = 0.0

    def add(self, gap_s: float, now_s: float) -> None:
        """Take the time between two events of a stream into the average.

        A pause of the whole replica counts once: as that of each of its streams it would make the next one look usual.
        """
        if gap_s <= 2 * self.interval_s:
            self.interval_s += 0.02 * (gap_s - self.interval_s)
        elif now_s - gap_s >= self.paused_s:
            self.interval_s += 0.1 * (gap_s - self.interval_s)
            self.paused_s = now_s


@dataclass(eq=False, slots=True)
class Endpoint:
    """A replica.

    Attributes:
        id: "job.epoch".
        address: http://HOST:PORT.
        engine: names its dialect.
        model: that it serves, as the engine calls it; "" is not known.
        state: as announced: ready, standby (ready, in reserve), unready or draining.
        kv_tokens: of its cache.
        slots: requests that it answers at a time.
        revision: of its service.
        failing: the reason why it gets no requests; None: it answers.
        strikes: failures in a row, without an answer between them.
        open: requests that it works on.
        heard_s: when the last byte came from it, its last request ended, or one was sent to it while it had none.
        pace: of its streams.
        busy_us: time with at least one open request, since it was taken last.
        busy_since_s: start of the present such time.
    """

    id: str
    address: str
    engine: str
    model: str = ""
    state: str = "ready"
    kv_tokens: int | None = None
    slots: int | None = None
    revision: int = 0
    failing: str | None = None
    strikes: int = 0
    open: set[Open] = field(default_factory=set)
    heard_s: float = 0.0
    pace: Pace = field(default_factory=Pace)
    busy_us: int = 0
    busy_since_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Return whether requests may go there."""
        return self.in_rotation(RESERVE)

    def in_rotation(self, states: tuple[str, ...]) -> bool:
        """Return whether it answers, and was announced in one of these states."""
        return self.failing is None and self.state in states

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what another replica has to be like to go on with the same text: engine, model, revision."""
        return self.engine, self.model, self.revision

    def same_model(self, identity: tuple[str, str, int]) -> bool:
        """Return whether it has this engine and model, perhaps of another revision of the service."""
        return (self.engine, self.model) == identity[:2]

    @property
    def attempt(self) -> tuple[str, int]:
        """Return job and epoch."""
        job, _, epoch = self.id.rpartition(".")
        return (job, int(epoch)) if job and epoch.isdigit() else (self.id, 1)

    def enter(self, request: Open, now_s: float) -> None:
        """Count a request as open."""
        if not self.open:
            self.heard_s = self.busy_since_s = now_s
        self.open.add(request)

    def exit(self, request: Open, now_s: float) -> None:
        """Count a request as ended; a second call does nothing."""
        if request in self.open:
            self.open.remove(request)
            if not self.open:
                self.heard_s = now_s
                self.busy_us += round((now_s - self.busy_since_s) * 1e6)

    def take_busy_us(self, now_s: float) -> int:
        """Return the time with open requests since the last call."""
        if self.open:
            self.busy_us += round((now_s - self.busy_since_s) * 1e6)
            self.busy_since_s = now_s
        found, self.busy_us = self.busy_us, 0
        return found


@dataclass(eq=False, slots=True)
class Service:
    """A service: its name, the names of its model, and its replicas.

    Of a service whose replicas swap models each `model` is one, with the replicas that hold it; else it is "".
    `usable_s` is when a replica was last seen that takes requests.
    """

    name: str
    model: str = ""
    models: tuple[str, ...] = ()
    context: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    drain_s: float = 30.0
    usable_s: float = 0.0
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[str, str]:
        """Return name and model, which no two services have."""
        return self.name, self.model

    def wake(self) -> None:
        """Let requests that wait for a replica look again."""
        self.changed.set()
        self.changed = asyncio.Event()


class Directory:
    """All services. `on_change` is called for one whose replicas changed, `on_leave` for each replica that is gone."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.services: dict[tuple[str, str], Service] = {}
        self.tenants: dict[str, Tenant] = {}
        self.prices: Mapping[str, Any] = {}
        self.keys = KeyRing()
        self.on_change: list[Callable[[Service], None]] = []
        self.on_leave: list[Callable[[Service, Endpoint], None]] = []
        self._names: dict[str, Service] = {}

    def endpoints(self) -> Iterator[tuple[Service, Endpoint]]:
        """Yield all replicas."""
        for service in list(self.services.values()):
            for endpoint in list(service.endpoints.values()):
                yield service, endpoint

    def find(self, model: str, key: Key = ANYBODY) -> Service:
        """Return the service of a model.

        Raises:
            ApiError: there is none; the answer names those that the key is good for.
        """
        found = self._names.get(model)
        if found is None:
            services = [each for each in self.services.values() if key.is_good_for(each.name, *each.models)]
            names = ", ".join(sorted(each.models[0] if each.model else each.name for each in services))
            nothing = "none of this key" if self.services else "none yet"
            raise ApiError(
                404,
                f"there is no model {model[:200]!r}; services: {names or nothing}",
                code="model_not_found",
                param="model",
            )
        return found

    def model_names(self) -> list[tuple[str, Service]]:
        """Return each name that a request may use."""
        return sorted(self._names.items(), key=lambda each: each[0])

    def apply(self, routes: Mapping[str, Any]) -> None:
        """Take over the routes that the server announced; what the gateway saw of a replica that stays is kept."""
        announced = {(str(each["name"]), str(each.get("model") or "")): each for each in routes.get("services", ())}
        for key in self.services.keys() - announced.keys():
            service = self.services.pop(key)
            self._leave(service, service.endpoints, "its service has ended")
            service.endpoints = {}
            self._tell(service)
        for key, each in announced.items():
            self._apply_service(self.services.setdefault(key, Service(*key)), each)
        self._names = {}
        for service in self.services.values():
            for model in service.models:
                self._names.setdefault(model, service)
        own = (each for each in self.services.values() if not each.model or each.name in each.models)
        self._names.update({each.name: each for each in own})
        self.tenants = {str(each["name"]): _tenant(each) for each in routes.get("tenants", ())}
        self.keys = KeyRing(
            Key(str(each["hash"]), str(each["id"]), str(each["tenant"]), tuple(map(str, each.get("models") or ())))
            for each in routes.get("keys", ())
        )
        self.prices = routes.get("prices") or {}
        self.version = routes.get("version")

    def _apply_service(self, service: Service, announced: Mapping[str, Any]) -> None:
        service.models = tuple(map(str, announced.get("models") or ()))
        service.context = announced.get("context")
        service.ttft_s, service.tpot_s = _seconds(announced.get("ttft_us")), _seconds(announced.get("tpot_us"))
        service.drain_s = _seconds(announced.get("drain_us")) or 30.0
        before, now = service.endpoints, {str(each["id"]): each for each in announced.get("endpoints", ())}
        gone = {name: before[name] for name in before.keys() - now.keys()}
        service.endpoints = {
            name: _endpoint(before.get(name) or Endpoint(name, "", ""), each) for name, each in now.items()
        }
        self._leave(service, gone, "its replica has ended")
        self._tell(service)

    def _leave(self, service: Service, gone: Mapping[str, Endpoint], why: str) -> None:
        for endpoint in gone.values():
            endpoint.state = "ended"
            for each in self.on_leave:
                each(service, endpoint)
            for request in list(endpoint.open):
                request.leave(why)

    def _tell(self, service: Service) -> None:
        for each in self.on_change:
            each(service)
        service.wake()


def _endpoint(endpoint: Endpoint, announced: Mapping[str, Any]) -> Endpoint:
    endpoint.address = str(announced["address"]).rstrip("/")
    endpoint.engine = str(announced.get("engine") or "llama.cpp")
    endpoint.model = str(announced.get("model") or "")
    endpoint.state = str(announced.get("state") or "ready")
    endpoint.kv_tokens, endpoint.slots = announced.get("kv_tokens"), announced.get("slots")
    endpoint.revision = int(announced.get("revision") or 0)
    return endpoint


def _tenant(announced: Mapping[str, Any]) -> Tenant:
    return Tenant(
        str(announced["name"]),
        float(announced.get("weight") or 1.0),
        int(announced.get("priority") or 0),
        announced.get("rate_per_s"),
        announced.get("budget_micro_usd"),
        int(announced.get("spent_micro_usd") or 0),
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6
