"""The question: a model, GPUs, an engine, the traffic, and the latencies that it must meet."""

from dataclasses import dataclass, field
from typing import Literal

from cordee.errors import LayoutError, SpecError
from cordee.hardware.catalog import Capacity, Gpu, Price, price_of
from cordee.hardware.speedups import Speedups
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import Engine
from cordee.plan.serving.formats import KV, WEIGHTS, Format
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, ServingLayoutWanted
from cordee.plan.serving.price.price import TokenPrices
from cordee.workload.model import ModelShape
from cordee.workload.requests import Request as TracedRequest

Statistic = Literal["p50", "p99", "mean"]
STATISTICS: tuple[Statistic, ...] = ("p50", "p99", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests to serve: how long they are, and how many come or stay open.

    With neither a rate nor a concurrency nor a trace, as many as the latencies allow.

    Attributes:
        input_tokens: tokens of a prompt, on average.
        output_tokens: tokens of an answer, on average.
        rate_per_s: requests that arrive in a second, at random times.
        concurrency: requests that are open at any time; the next one is sent when one ends.
        cached_fraction: the fraction of the prompts that is found in the prefix cache.
        requests: a trace of requests; lengths, rate and reuse are then its own.
        imbalance: tokens of the fullest expert-parallel GPU over the mean, as its tokens select experts; None: as
            routing dumps of other models have it (`speed/grouped.py`).
    """

    input_tokens: int = 1000
    output_tokens: int = 200
    rate_per_s: float | None = None
    concurrency: int | None = None
    cached_fraction: float = 0.0
    requests: tuple[TracedRequest, ...] = ()
    imbalance: float | None = None

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            lengths = f"{self.input_tokens} input and {self.output_tokens} output tokens"
            raise SpecError(f"a request of {lengths} is empty", hint="give at least 1 of each")
        if self.rate_per_s is not None and self.concurrency is not None:
            raise SpecError(
                f"{self.rate_per_s:g} requests a second and a concurrency of {self.concurrency} are two kinds of load",
                hint="give one: a rate for users who do not wait for each other, a concurrency for a fixed number",
            )
        for load in (self.rate_per_s, self.concurrency):
            if load is not None and load <= 0:
                raise SpecError(f"a load of {load:g} asks for nothing", hint="give a rate above 0, or leave it out")
        if self.imbalance is not None and self.imbalance < 1:
            raise SpecError(
                f"an imbalance of {self.imbalance:g}: the fullest GPU has no fewer tokens than the mean",
                hint="give the fullest GPU's tokens over the mean: 1 with a perfect balancer, 1.5 for half more",
            )
        if not 0 <= self.cached_fraction < 1:
            raise SpecError(
                f"a cached fraction of {self.cached_fraction:g} is not from 0 to below 1",
                hint="give the fraction of the prompts that earlier requests have computed: 0.3",
            )

    @property
    def computed_tokens(self) -> int:
        """Tokens of a prompt that are not found in the prefix cache."""
        return max(1, round(self.input_tokens * (1 - self.cached_fraction)))

    @property
    def cached_tokens(self) -> int:
        """Tokens of a prompt whose KV is in the cache before it runs; its answer reads them like the others."""
        return self.input_tokens - self.computed_tokens

    @property
    def request_tokens(self) -> int:
        """Tokens that one request has at its end."""
        return self.input_tokens + self.output_tokens

    @property
    def offered_per_s(self) -> float:
        """Requests that arrive in a second, on average; 0 where no rate and no trace says so."""
        if not self.requests:
            return self.rate_per_s or 0.0
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return len(self.requests) / span_s if span_s > 0 else float("inf")

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request at its end."""
        return max((each.tokens for each in self.requests), default=self.request_tokens)

    @property
    def has_prefixes(self) -> bool:
        """Return whether a trace names the blocks of its prompts."""
        return any(each.blocks for each in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The latencies to keep, in seconds, and the statistic that must keep them; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    statistic: Statistic = "p99"

    @property
    def limits(self) -> bool:
        """Return whether there is any latency to keep."""
        return self.ttft_s is not None or self.tpot_s is not None

    def excess(self, ttft_s: float, tpot_s: float) -> float:
        """Return how many times the worse of these latencies is its limit; 0 without a limit."""
        pairs = ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s))
        return max((seconds / limit for seconds, limit in pairs if limit), default=0.0)

    def __str__(self) -> str:
        limits = [f"{name} {1000 * s:g} ms" for name, s in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)) if s]
        return f"{self.statistic} of {' and '.join(limits)}" if limits else "any latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits that the user sets in place of the engine's defaults; None leaves a default.

    Attributes:
        context_tokens: longest prompt with its answer; None: the model's positions, or what the cache holds once.
        max_sequences: concurrent sequences, at most.
        memory_fraction: fraction of a GPU's memory that the engine may use.
    """

    context_tokens: int | None = None
    max_sequences: int | None = None
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.max_sequences is not None and self.max_sequences < 1:
            raise SpecError(
                f"a limit of {self.max_sequences} concurrent sequences serves no request", hint="give at least 1"
            )
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            fraction = f"a memory fraction of {self.memory_fraction:g}"
            raise SpecError(f"{fraction} is not between 0 and 1", hint="give the part that the engine may use: 0.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Dollars of GPUs.

    Attributes:
        prices: the price list; `capacity` (on-demand, spot or reserved) selects the rows that count.
        busy_fractions: load of each hour of a day over that of the busiest.
        other_gpus: kinds of GPU to compare with.
        api: the price list of an API to compare with.
    """

    prices: tuple[Price, ...] = ()
    capacity: Capacity = "on-demand"
    busy_fractions: tuple[float, ...] = (1.0,)
    other_gpus: tuple[Gpu, ...] = ()
    api: TokenPrices | None = None

    @property
    def mean_load(self) -> float:
        """The load of a mean hour over that of the busiest."""
        return sum(self.busy_fractions) / len(self.busy_fractions) / max(self.busy_fractions)

    def price(self, gpu: Gpu) -> Price | None:
        """Return the price of this GPU in the chosen capacity; None: unknown."""
        return self.find(gpu, self.capacity)

    def find(self, gpu: Gpu, capacity: Capacity) -> Price | None:
        """Return the price of this GPU in this capacity; None: unknown."""
        return price_of(self.prices, gpu, capacity)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model for speculation.

    Attributes:
        name: as it was given.
        shape: the model; None where only its size is known.
        fraction: its fraction of the large model's parameters where the shape is not known: of weights, KV and time.
    """

    name: str
    shape: ModelShape | None = None
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.shape is None and not 0 < self.fraction < 1:
            raise SpecError(
                f"a draft with {self.fraction:g} of the parameters is not between 0 and 1",
                hint="give a model's name, or its fraction of the parameters: 0.02",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverAssumptions:
    """Figures on which the levers depend and which no model or GPU gives.

    Attributes:
        acceptance: probability that a drafted token is right.
        draft: the draft model; None: a look-up in the prompt, which costs nothing.
        prefix_fraction: fraction of the prompts that a prefix cache would have; a trace has its own.
        kv_bytes_per_s: what a GPU reads of KV blocks from the host; None: 25 GB/s, over PCIe 4 x16.
        speedups: measured products in formats against bf16.
    """

    acceptance: float = 0.7
    draft: Draft | None = None
    prefix_fraction: float = 0.5
    kv_bytes_per_s: float | None = None
    speedups: tuple[Speedups, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.acceptance <= 1:
            raise SpecError(f"an acceptance rate of {self.acceptance:g} is not above 0 and up to 1", hint="give 0.7")
        if not 0 < self.prefix_fraction < 1:
            fraction = f"a prefix fraction of {self.prefix_fraction:g}"
            raise SpecError(f"{fraction} is not between 0 and 1", hint="give the fraction of the prompts: 0.5")
        if self.kv_bytes_per_s is not None and self.kv_bytes_per_s <= 0:
            raise SpecError("a KV bandwidth of 0 reads nothing", hint="give bytes a second: 25GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """All that a serving answer depends on.

    Attributes:
        model: the checkpoint's name or path, for an engine's command.
        gpus: GPUs for all replicas together.
        weights: formats of the weights to try, the first one as default.
        kv: formats of the KV cache to try.
        layout: the axes that are asked for; the others are searched.
        assumed: figures for the levers.
        why: a layout (`tp=2`), or a number of sequences (`128`): explain why not.
        launcher: an engine: write the settings that reproduce the plan.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: int
    engine: Engine
    model: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    slo: Slo = field(default_factory=Slo)
    weights: tuple[Format, ...] = (WEIGHTS["bf16"],)
    kv: tuple[Format, ...] = (KV["bf16"],)
    layout: ServingLayoutWanted = ANY_SERVING_LAYOUT
    limits: EngineLimits = EngineLimits()
    pricing: Pricing = Pricing()
    assumed: LeverAssumptions = LeverAssumptions()
    why: str | None = None
    launcher: str | None = None

    def __post_init__(self) -> None:
        asked = self.limits.context_tokens
        if asked is not None and asked > self.shape.positions:
            raise LayoutError(
                f"a context of {asked:,} tokens, but {self.shape.name} has {self.shape.positions:,} positions",
                hint=f"give at most --context {self.shape.positions}, or a config.json with a longer RoPE scaling",
            )
        longest = self.context_limit
        shortest = min((each.tokens for each in self.traffic.requests), default=self.traffic.request_tokens)
        if shortest > longest and self.traffic.requests:
            raise SpecError(
                f"the shortest request of the trace has {shortest:,} tokens with its answer, the context {longest:,}",
                hint="give a longer --context, or a model with more positions",
            )
        if shortest > longest:
            raise SpecError(
                f"requests of {self.traffic.input_tokens:,} + {self.traffic.output_tokens:,} tokens do not go into a "
                f"context of {longest:,}",
                hint="give shorter requests, or a longer --context",
            )

    @property
    def context_limit(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.limits.context_tokens or self.shape.positions

    @property
    def price(self) -> Price | None:
        """The price of this GPU in this kind of capacity."""
        return self.pricing.price(self.gpu)

    def case(self, layout: ServingLayout, weights: Format, kv: Format) -> ServingCase:
        """Return one replica in this layout and these formats."""
        sequences, tokens = self.engine.limits(self.gpu.name, self.gpu.visible_bytes, self.context_limit)
        return ServingCase(
            shape=self.shape,
            gpu=self.gpu,
            layout=layout,
            weights=weights,
            kv=kv,
            engine=self.engine,
            max_sequences=self.limits.max_sequences or sequences,
            max_batched_tokens=tokens,
            max_context_tokens=self.context_limit,
            memory_fraction=self.limits.memory_fraction or self.engine.memory_fraction,
            imbalance=self.traffic.imbalance,
        )
