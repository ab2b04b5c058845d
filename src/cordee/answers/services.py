"""Requests and answers of the HTTP API about services, for people and for gateways."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cordee.answers.cost import SplitView
from cordee.answers.jobs import ComparisonView
from cordee.answers.view import View
from cordee.events import Estimate

EndpointState = Literal["ready", "standby", "unready", "draining"]
ReplicaState = Literal["waiting", "loading"] | EndpointState
ServiceState = Literal["starting", "ready", "degraded", "updating", "idle", "ended"]

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Word = Annotated[str, Field(max_length=300)]
Printable = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")]
TENANT = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$"


class ServiceSubmission(View):
    """A request to create a service or to update it. Sending the same spec again changes nothing.

    `secrets` are the values of the spec's secrets, which a client on another machine sends over TLS.
    """

    spec: dict[str, Any]
    secrets: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(default_factory=dict, repr=False)


class ScaleOrder(View):
    """The number of replicas that a service shall have: `2`, or between a fewest and a most `1..4`."""

    replicas: Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.\.[0-9]{1,6})?$")]


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


class ModelView(View):
    """One of the models of a service: the replicas that hold it now, and the requests that wait for it.

    `load_us` is the time that its last load took, null before one was measured; `why` says why it does not load.
    """

    name: str
    replicas: int
    queued: int
    load_us: int | None
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

    `wanted` replicas lie between `min` and `max`, and `why` is the reason for the last change of it. A replica costs
    `micro_usd_per_hour` on the most expensive GPUs that it may get; 0: no price is known. `estimate` is the plan's
    answer for one replica, and `compared` are its values beside those that were measured. `urls` are those of
    the gateways that serve it now. `models` is empty for a service of one model.
    """

    name: str
    owner: str
    revision: int
    state: ServiceState
    wanted: int
    min: int
    max: int
    standby: int
    micro_usd_per_hour: int = 0
    why: str
    replicas: list[ReplicaView]
    models: list[ModelView] = Field(default_factory=list)
    estimate: Estimate | None
    measured: ServedView
    compared: list[ComparisonView]
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
    state: EndpointState
    kv_tokens: int | None
    slots: int | None
    revision: int


class RouteView(View):
    """A service as a gateway sees it: the names of its model, the limits of its requests, and its endpoints.

    Of a service with several models there is one for each `model`, with the endpoints that hold it; else it is "".
    `wanted` is 0 while it is scaled to zero; a queued request in a gateway's report starts a replica.
    """

    name: str
    model: str = ""
    models: list[str]
    context: int | None
    ttft_us: int | None
    tpot_us: int | None
    drain_us: int
    wanted: int
    endpoints: list[EndpointView]


class TenantRules(View):
    """A tenant's weight against the others, its priority, and its limits; null: no limit.

    The budget is of a day or a month of UTC, and `rate_per_s` counts requests.
    """

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    rate_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    budget_micro_usd: Count | None = None
    per: Literal["day", "month"] = "month"


class TenantView(TenantRules):
    """A tenant of the gateways: its rules, and what it has spent in this day or month."""

    name: str
    spent_micro_usd: int = 0


class KeyRequest(View):
    """A request for a key of a tenant. It is good for the models that it names; none: for all."""

    tenant: Annotated[str, Field(pattern=TENANT)]
    name: Printable = ""
    models: Annotated[list[Printable], Field(max_length=100)] = Field(default_factory=list)


class KeyView(View):
    """A key without its secret; `revoked_us` is null while it is valid."""

    id: str
    tenant: str
    name: str
    models: list[str]
    created_us: int
    by: str
    revoked_us: int | None


class NewKeyView(KeyView):
    """A key that was just made. Its `secret` is shown in this answer only."""

    secret: Annotated[str, Field(repr=False)]


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
    """The requests of one service at a gateway now; of a service with several models those of one `model`.

    `kv_used` are tokens by endpoint; `failing` names the endpoints that do not answer it. Latencies and rates are of
    the last 30 seconds. `open` are the running requests by endpoint, and `idle_us` is the time since the last one ended
    there, both of services with several models only.
    """

    service: Word
    model: Annotated[str, Field(max_length=1000)] = ""
    queued: Count = 0
    oldest_wait_us: Count = 0
    running: Count = 0
    kv_used: dict[Word, Count] = Field(default_factory=dict)
    ttft_p99_us: Count | None = None
    tpot_p99_us: Count | None = None
    requests_per_s: Annotated[float, Field(ge=0)] | None = None
    tokens_per_s: Annotated[float, Field(ge=0)] | None = None
    failing: list[Word] = Field(default_factory=list)
    open: dict[Word, Count] = Field(default_factory=dict)
    idle_us: dict[Word, Count] = Field(default_factory=dict)


class UsageTimes(View):
    """Time within which requests were open, and what of it a knowledge base spent in retrieval and in generation."""

    busy_us: Count = 0
    retrieval_us: Count = 0
    generation_us: Count = 0


class UsageLine(UsageTimes):
    """The requests of one tenant, key and model that an attempt answered between `from_us` and `until_us`.

    The line with neither tenant nor key has the time in which the attempt had a request open, and no requests.
    """

    service: Printable
    job_id: Printable
    epoch: Annotated[int, Field(ge=1, le=2**31)]
    tenant: Printable = ""
    key: Printable = ""
    model: Printable = ""
    from_us: Count
    until_us: Count
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


class TokenCountsView(View):
    """Requests, and tokens by kind; `input` has the cached ones as well, `failed` are of the requests.

    `retrieval_us` and `generation_us` are times of requests to knowledge bases, which may overlap.
    """

    requests: int
    failed: int
    input: int
    cached: int
    output: int
    retrieval_us: int = 0
    generation_us: int = 0


class TokenCostView(View):
    """Micro-dollars by kind of token: computed input, cached input, output; `unused` is of days without a token."""

    total: int
    computed: int
    cached: int
    output: int
    unused: int


class TokenPrices(View):
    """Micro-dollars of a million tokens by kind; null without such tokens. `blended`: of input and output together."""

    computed: int | None
    cached: int | None
    output: int | None
    blended: int | None


class UsageRowView(View):
    """The tokens and cost of one service, tenant, key or model; `tenant` is that of a key.

    `gpu_us` and `micro_usd_by_class` are of a service only.
    """

    key: str
    tenant: str | None
    tokens: TokenCountsView
    micro_usd: TokenCostView
    micro_usd_per_million: TokenPrices
    gpu_us: SplitView | None
    micro_usd_by_class: SplitView | None


class UsageView(View):
    """Tokens and cost of all services by row, beside all other jobs (`training`); both sum to what was held."""

    by: Literal["service", "tenant", "key", "model"]
    at_us: int
    rows: list[UsageRowView]
    training_gpu_us: SplitView
    training_micro_usd: SplitView
    micro_usd: int


class CostLineView(View):
    """Tokens and micro-dollars of one key in one day, or in one month of UTC that is more than two months ago."""

    from_us: int
    to_us: int
    service: str
    tenant: str
    key: str
    model: str
    tokens: TokenCountsView
    micro_usd: TokenCostView


class CostLinesView(View):
    """The cost lines of services, oldest first; those of the day that is not over hold until `at_us`."""

    at_us: int
    lines: list[CostLineView]
