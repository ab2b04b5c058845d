"""One layout, judged: memory of its GPUs, the replicas that the traffic needs, their latencies, the price of a token.

A rate or a trace is played through a replica (`batching.py`). A concurrency, or no load at all, is the steady state of
a replica that always has so many requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.formats import Format
from cordee.plan.serving.layouts import check_formats, layouts
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.memory import ServingMemory, memory
from cordee.plan.serving.price.price import PhaseRates, TokenMix, TokenPrices, replica_s, token_prices
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.queueing.served import Percentiles
from cordee.plan.serving.request import ServingRequest, Slo, Traffic
from cordee.plan.serving.speed.speed import Speed
from cordee.plan.serving.speed.throughput import Throughput, saturated
from cordee.workload.requests import Request, poisson

PLAYED = 400
"""Requests that are drawn for a rate, at least: enough for a 99th percentile."""
ROUNDS = 10
"""A replica is filled so often: near its capacity the batch grows slowly, and fewer requests end before it has."""
SEED = 7
# Of what a replica could do at most: a queue beyond it grows for as long as the load lasts.
KEEPS_UP = 0.97
COMPUTED_TOKENS = 512
SLOTS_MAX = 256  # llama.cpp, LLAMA_MAX_SEQ


@dataclass(frozen=True, slots=True)
class Performance:
    """All replicas of one layout under the traffic.

    Attributes:
        sequences: requests at once in one replica.
        requests_per_s: answered by all replicas.
        mix: tokens of a mean request.
        rates: tokens a second of a replica that does only one thing.
        played: latencies come from playing requests; otherwise they are those of the steady state, all alike.
    """

    sequences: float
    requests_per_s: float
    mix: TokenMix
    rates: PhaseRates
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    played: bool

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of answers a second, of all replicas."""
        return self.requests_per_s * self.mix.output_tokens

    @property
    def input_tokens_per_s(self) -> float:
        """Tokens of prompts a second, of all replicas."""
        return self.requests_per_s * self.mix.input_tokens

    def excess(self, slo: Slo) -> float:
        """Return how many times the worst latency is its limit; at most 1 if all are kept."""
        pairs = ((slo.ttft_s, self.ttft), (slo.tpot_s, self.tpot))
        return max((getattr(found, slo.statistic) / limit for limit, found in pairs if limit), default=0.0)


@dataclass(frozen=True)
class ServingCandidate:
    """One layout in one pair of formats with its memory and, if it fits, its replicas under the traffic.

    `performance` is None where it does not fit, or where so many GPUs do not keep up with the arrivals.
    """

    request: ServingRequest
    case: ServingCase
    memory: ServingMemory
    replicas: int
    performance: Performance | None = None

    @property
    def name(self) -> str:
        """The layout, with its formats where the request leaves them open."""
        formats = [self.case.weights.name] if len(self.request.weights) > 1 else []
        formats += [f"kv-{self.case.kv.name}"] if len(self.request.kv) > 1 else []
        return " ".join([str(self.case.layout), *formats])

    @property
    def fits(self) -> bool:
        """Return whether its GPUs hold it, with a cache for at least one sequence."""
        return self.memory.fits

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.case.layout.gpus

    @cached_property
    def excess(self) -> float:
        """The worst latency over its limit; infinite if the replicas do not keep up."""
        return float("inf") if self.performance is None else self.performance.excess(self.request.slo)

    @property
    def keeps_slo(self) -> bool:
        """Return whether it serves the traffic within the latencies."""
        return self.performance is not None and self.excess <= 1

    @property
    def sequences(self) -> int:
        """Requests of the traffic's length that a replica runs at once, at most."""
        return min(self.case.max_sequences, self.memory.sequences(self.request.traffic.request_tokens))

    @cached_property
    def capacity_per_s(self) -> float:
        """Requests a second that all replicas answer when requests always wait."""
        found = steady(self, max(1, self.sequences)).performance
        return 0.0 if found is None else found.requests_per_s

    @property
    def shortfall_bytes(self) -> int:
        """Bytes on each GPU that the KV cache of one sequence of the longest context lacks; 0 if it fits."""
        needed = kv_bytes(self.case, self.case.max_context_tokens, self.memory.stage)
        return max(0, needed - self.memory.kv_bytes)

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars of all replicas in an hour; None without a price."""
        price = self.request.price
        return None if price is None else price.usd_per_gpu_hour * self.gpus

    @property
    def busy_fraction(self) -> float:
        """The part of the busiest hour in which a replica works; at most 1."""
        return min(1.0, self._work_s_per_s)

    @property
    def _work_s_per_s(self) -> float:
        """Seconds of prompts and answers, each alone, in a second: above 1 where a batch computes both in one pass."""
        found = self.performance
        return 1.0 if found is None else replica_s(found.rates, found.mix) * found.requests_per_s / self.replicas

    @cached_property
    def prices(self) -> TokenPrices | None:
        """Dollars of a million tokens of each kind, all hours of the day paid for."""
        if self.performance is None or self.usd_per_hour is None:
            return None
        hours = self.request.pricing.busy_fractions
        busy = self._work_s_per_s * sum(hours) / len(hours) / max(hours)
        return token_prices(self.performance.rates, self.usd_per_hour / self.replicas, busy)

    @property
    def usd_per_mtok(self) -> float | None:
        """Dollars of a million tokens of this mix, input and output together."""
        return (
            None if self.prices is None or self.performance is None else self.prices.blended_usd(self.performance.mix)
        )

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes of one GPU by part."""
        held = self.memory
        return {
            "weights": held.weights_bytes,
            "activations": held.activation_bytes,
            "graphs": held.graph_bytes,
            "context": held.context_bytes,
            "communication": held.communication_bytes,
            "kv": max(0, held.kv_bytes),
        }


def judge_all(request: ServingRequest) -> list[ServingCandidate]:
    """Return each layout that divides the model in each format.

    Raises:
        LayoutError: no layout that is asked for divides the model, or the engine lacks a layout or a format.
    """
    check_formats(request.engine, request.weights, request.kv)
    found = layouts(request.shape, request.gpu, request.gpus, request.layout, request.engine)
    return [judge(request, *each) for each in product(found, request.weights, request.kv)]


def rank(each: ServingCandidate) -> tuple[float, ...]:
    """Return the key of a ranking: GPUs for a request a second, then latency; else what is missed, or missing."""
    found = each.performance
    if not each.fits:
        return (3, each.shortfall_bytes, each.gpus)
    if found is None:
        return (2, each.gpus / max(each.capacity_per_s, 1e-9))
    price = each.gpus / found.requests_per_s
    # Of layouts with one price the smallest replica is first: it is the simplest, and what fails with it is the least.
    replica = each.case.layout.gpus
    return (0, round(price, 6), replica, each.excess, found.tpot.mean) if each.keeps_slo else (1, each.excess, price)


@lru_cache(maxsize=1024)
def speed_of(case: ServingCase) -> Speed:
    """Return the step times of a case; they remember the products that were computed."""
    return Speed(case)


def judge(request: ServingRequest, layout: ServingLayout, weights: Format, kv: Format) -> ServingCandidate:
    """Return this layout in these formats, with the fewest replicas that keep the latencies, or with all."""
    case = request.case(layout, weights, kv)
    held = memory(case)
    if request.limits.context_tokens is None and held.longest_context_tokens < case.max_context_tokens:
        # An engine refuses a context that the cache does not hold once; the plan names one that it does.
        case = replace(case, max_context_tokens=max(request.traffic.request_tokens, held.longest_context_tokens))
        held = memory(case)
    if request.limits.max_sequences is None and case.engine.memory.covers == "none":
        # The cache has a slot for each sequence, as many as the user asks for.
        case = replace(case, max_sequences=min(SLOTS_MAX, max(1, held.sequences(case.max_context_tokens))))
        held = memory(case)
    most = request.gpus // layout.gpus
    if not held.fits:
        return ServingCandidate(request, case, held, most)
    speed = speed_of(case)
    traffic = request.traffic
    if traffic.rate_per_s is None and not traffic.requests:
        return _steady(request, case, held, speed, most)
    return _played(request, case, held, speed, most)


def _steady(
    request: ServingRequest, case: ServingCase, held: ServingMemory, speed: Speed, most: int
) -> ServingCandidate:
    """Return the candidate under a fixed number of requests, or under as many as the latencies allow."""
    traffic = request.traffic
    fits = min(case.max_sequences, held.sequences(traffic.request_tokens))
    if traffic.concurrency is not None:
        tries = [(n, min(fits, -(-traffic.concurrency // n))) for n in range(1, most + 1)]
    else:
        return _largest(ServingCandidate(request, case, held, most), fits)
    found = [
        ServingCandidate(request, case, held, replicas, _steady_state(traffic, speed, replicas, sequences))
        for replicas, sequences in tries
        if sequences * replicas >= (traffic.concurrency or 0)
    ]
    if not found:
        return ServingCandidate(request, case, held, most)
    # The fewest replicas that keep the latencies; if none do, those that come nearest.
    return next((each for each in found if each.keeps_slo), min(found, key=lambda each: each.excess))


def _largest(candidate: ServingCandidate, fits: int) -> ServingCandidate:
    """Return the candidate with as many requests at once as keep the latencies; latency grows with their number."""
    best, low, high = steady(candidate, 1), 1, fits
    while low < high:
        middle = (low + high + 1) // 2
        tried = steady(candidate, middle)
        if tried.keeps_slo:
            best, low = tried, middle
        else:
            high = middle - 1
    return best


def _steady_state(traffic: Traffic, speed: Speed, replicas: int, sequences: int) -> Performance:
    computed = traffic.computed_tokens
    found: Throughput = saturated(speed, computed, traffic.output_tokens, sequences=sequences)
    first_s = _first_token_s(traffic, speed, sequences, found.step_s)
    return Performance(
        sequences=sequences,
        requests_per_s=replicas * found.output_tokens_per_s / traffic.output_tokens,
        mix=_mix(traffic),
        rates=_rates(speed, traffic, sequences),
        ttft=_same(first_s),
        tpot=_same(found.tpot_s),
        e2e=_same(first_s + found.tpot_s * (traffic.output_tokens - 1)),
        played=False,
    )


def _first_token_s(traffic: Traffic, speed: Speed, sequences: int, step_s: float) -> float:
    """Return the seconds from a free place to the first token: the rest of a step, then the steps of the prompt."""
    limit = max(1, speed.case.max_batched_tokens * speed.case.layout.dp - sequences)
    cached = round(traffic.input_tokens * traffic.cached_fraction)
    starts = range(cached, traffic.input_tokens, limit)
    chunks = [(min(limit, traffic.input_tokens - start), start) for start in starts]
    others, context = sequences - 1, (sequences - 1) * mean_context(traffic)
    return step_s / 2 + sum(speed.step_s([chunk], others, context) for chunk in chunks)


def _played(
    request: ServingRequest, case: ServingCase, held: ServingMemory, speed: Speed, most: int
) -> ServingCandidate:
    """Return the candidate with the fewest replicas that keep the latencies at the rate, or with all of them."""
    last = ServingCandidate(request, case, held, most)
    few, many = 1, most
    while few <= many:
        replicas = (few + many) // 2
        found = replace(last, replicas=replicas, performance=_performance(request.traffic, held, speed, replicas))
        if found.keeps_slo:
            last, many = found, replicas - 1
        else:
            last = found if last.performance is None and replicas == most else last
            few = replicas + 1
    return last


def _performance(traffic: Traffic, held: ServingMemory, speed: Speed, replicas: int) -> Performance | None:
    """Play a replica's part of the traffic; None if it does not keep up."""
    sequences = min(speed.case.max_sequences, held.sequences(traffic.request_tokens))
    steady = _steady_state(traffic, speed, 1, sequences)
    requests = _drawn(traffic, replicas, steady)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    rate = len(requests) / span_s if span_s > 0 else float(len(requests))
    if traffic.rate_per_s is not None:
        rate = traffic.rate_per_s / replicas
    if not traffic.requests and rate > KEEPS_UP * steady.requests_per_s:
        return None
    served = serve(requests, speed, _limits(held, prefix_caching=any(each.blocks for each in requests)))
    at_once = sum(each.e2e_s for each in served.outcomes) / max(served.end_s, span_s)
    return Performance(
        sequences=at_once,
        requests_per_s=rate * replicas,
        mix=_mix(traffic, served.cached_tokens / max(1, len(served.outcomes))),
        rates=_rates(speed, traffic, max(1, round(at_once))),
        ttft=served.ttft,
        tpot=served.tpot,
        e2e=served.e2e,
        played=True,
    )


def _drawn(traffic: Traffic, replicas: int, steady: Performance) -> tuple[Request, ...]:
    """Return one replica's requests: every n-th of the trace, or drawn at the rate from one seed.

    `steady` is a replica that is full: a load that comes near it takes more requests to settle.
    """
    if traffic.requests:
        return traffic.requests[::replicas]
    assert traffic.rate_per_s is not None, "a rate or a trace is played"
    lengths = [(traffic.computed_tokens, traffic.output_tokens)]
    rate = traffic.rate_per_s / replicas
    return poisson(_requests_to_play(steady, rate), rate, lengths, seed=SEED)


def _requests_to_play(steady: Performance, rate_per_s: float) -> int:
    """Return the requests at this rate after which a replica has settled; `steady` is one that is full."""
    fullness = min(1.0, rate_per_s / (steady.requests_per_s or 1.0))
    return max(PLAYED, round(ROUNDS * steady.sequences * fullness))


def _limits(held: ServingMemory, *, prefix_caching: bool) -> Limits:
    """Return the limits of one replica, of all its attention copies together."""
    case = held.case
    return Limits(
        max_sequences=case.max_sequences * case.layout.dp,
        max_batched_tokens=case.max_batched_tokens * case.layout.dp,
        kv_tokens=held.kv_tokens,
        block_tokens=case.engine.block_tokens,
        chunked_prefill=case.engine.chunked_prefill,
        prefix_caching=prefix_caching,
    )


def steady(candidate: ServingCandidate, sequences: int) -> ServingCandidate:
    """Return a layout that fits with so many requests at once in each replica."""
    speed = speed_of(candidate.case)
    found = _steady_state(candidate.request.traffic, speed, candidate.replicas, sequences)
    return replace(candidate, performance=found)


def _rates(speed: Speed, traffic: Traffic, sequences: int) -> PhaseRates:
    """Return tokens a second of a replica that only computes prompts, only reads cached ones, only answers."""
    chunk = max(1, min(traffic.input_tokens, speed.case.max_batched_tokens))
    context = sequences * mean_context(traffic)
    reading_s = speed.prefill_s(COMPUTED_TOKENS, chunk) - speed.prefill_s(COMPUTED_TOKENS)
    return PhaseRates(
        prefill_tokens_per_s=chunk / speed.prefill_s(chunk),
        decode_tokens_per_s=sequences / speed.decode_s(sequences, context),
        restore_tokens_per_s=chunk / reading_s if reading_s > 0 else float("inf"),
    )


def mean_context(traffic: Traffic) -> float:
    """Return the tokens that a running answer has in the cache, on average."""
    return traffic.input_tokens + traffic.output_tokens / 2


def _mix(traffic: Traffic, cached_tokens: float | None = None) -> TokenMix:
    cached = cached_tokens or traffic.input_tokens * traffic.cached_fraction
    return TokenMix(traffic.input_tokens, traffic.output_tokens, cached)


def _same(seconds: float) -> Percentiles:
    return Percentiles(seconds, seconds, seconds, seconds)


def sizes(most: int) -> list[int]:
    """Return the powers of two up to a number, and the number.

    >>> sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    return sorted({2**bits for bits in range(most.bit_length())} | {most})
