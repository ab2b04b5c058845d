"""Requests and answers of the HTTP API about services, for people and for gateways."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cordee.answers import View
from cordee.events import Estimate

ReplicaState = Literal["waiting", "loading", "ready", "standby", "unready", "draining"]
ServiceState = Literal["starting", "ready", "degraded", "updating", "idle", "ended"]

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Word = Annotated[str, Field(max_length=300)]


class ServiceSubmission(View):
    """A request to create a service or to update it. Sending the same spec again changes nothing."""

    spec: dict[str, Any]


class ScaleOrder(View):
    """The number of replicas that a service shall have: `2`, or between a fewest and a most `1..4`."""

    replicas: Annotated[str, Field(max_length=40)]


class ReplicaView(View):
    """One replica: a job, and its newest attempt.

    `state` is waiting (for GPUs), loading, ready, standby (ready, in reserve), unready (its engine does not answer) or
    draining; `why` says why it is not ready, and `since_us` since when.
    """

    job_id: str
    epoch: int
    revision: int
    state: ReplicaState
    address: str | None
    node: str | None
    engine: str | None
    model: str | None
    kv_tokens: int | None
    slots: int | None
    since_us: int
    why: str = ""


class ServedView(View):
    """The requests of a service as its gateways reported them last; null: none did."""

    queued: int = 0
    running: int = 0
    ttft_p99_us: int | None = None
    tpot_p99_us: int | None = None
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    kv_fraction: float | None = None


class ServiceView(View):
    """A service with its replicas.

    `wanted` replicas lie between `min` and `max`, and `why` is the reason for the last change of it. `estimate` is the
    plan's answer for one replica. `urls` are those of the gateways that serve it now.
    """

    name: str
    owner: str
    revision: int
    state: ServiceState
    wanted: int
    min: int
    max: int
    standby: int
    why: str
    replicas: list[ReplicaView]
    estimate: Estimate | None
    measured: ServedView
    urls: list[str]
    spec: dict[str, Any]
    declared_us: int
    notes: list[str] = Field(default_factory=list)


class EndpointView(View):
    """A replica as a gateway sees it; `id` is JOB.EPOCH. Only a ready one gets new requests."""

    id: str
    address: str
    engine: str
    model: str
    state: Literal["ready", "standby", "unready", "draining"]
    kv_tokens: int | None
    slots: int | None
    revision: int


class RouteView(View):
    """A service as a gateway sees it: the names of its models, the limits of its requests, and its endpoints.

    `wanted` is 0 while it is scaled to zero; a queued request in a gateway's report starts a replica.
    """

    name: str
    models: list[str]
    context: int | None
    ttft_us: int | None
    tpot_us: int | None
    drain_us: int
    wanted: int
    endpoints: list[EndpointView]


class TenantView(View):
    """A tenant of the gateways: its weight, priority and limits, and what it has spent; null: no limit."""

    name: str
    weight: float = 1.0
    priority: int = 0
    rate_per_s: float | None = None
    budget_micro_usd: int | None = None
    spent_micro_usd: int = 0


class KeyHashView(View):
    """A key by its hash (SHA-256 in hex), with its tenant and the models that it may name; none: all of them."""

    hash: str
    id: str
    tenant: str
    models: list[str] = Field(default_factory=list)


class TokenPricesView(View):
    """Micro-dollars of a million tokens of a service."""

    input: int
    cached: int
    output: int


class RoutesView(View):
    """All that a gateway needs to know; `version` grows with each change. Prices are by service."""

    version: int
    services: list[RouteView]
    tenants: list[TenantView]
    keys: list[KeyHashView]
    prices: dict[str, TokenPricesView]


class GatewayStatus(View):
    """The requests of one service at a gateway now.

    `kv_used` are tokens by endpoint; `failing` names the endpoints that do not answer it. Latencies and rates are of
    the last 30 seconds.
    """

    service: Word
    queued: Count = 0
    oldest_wait_us: Count = 0
    running: Count = 0
    kv_used: dict[Word, Count] = Field(default_factory=dict)
    ttft_p99_us: Count | None = None
    tpot_p99_us: Count | None = None
    requests_per_s: Annotated[float, Field(ge=0)] | None = None
    tokens_per_s: Annotated[float, Field(ge=0)] | None = None
    failing: list[Word] = Field(default_factory=list)


class UsageLine(View):
    """The requests of one tenant, key and model that an attempt answered between `from_us` and `until_us`.

    The line with neither tenant nor key has the time in which the attempt had a request open, and no requests.
    """

    service: Word
    job_id: Word
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    tenant: Word = ""
    key: Word = ""
    model: Word = ""
    from_us: Count
    until_us: Count
    busy_us: Count = 0
    requests: Count = 0
    failed: Count = 0
    input_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0


class GatewayReport(View):
    """A gateway's report. `seq` is the number of its usage lines' batch: one that is acknowledged counts once.

    A report without usage keeps the seq of the last one. `url` is where clients reach the gateway.
    """

    seq: Count
    at_us: Count
    url: Word = ""
    status: list[GatewayStatus] = Field(default_factory=list, max_length=10_000)
    usage: list[UsageLine] = Field(default_factory=list, max_length=10_000)


class GatewayAcknowledged(View):
    """The highest seq of this gateway whose usage is in the log."""

    seq: int
