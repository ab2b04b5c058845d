"""Replicas of one case under the traffic: a steady state of equal requests, or requests played one by one.

A rate is played through one replica, which gets its fraction of the arrivals; a trace through all of them, each request
on the replica that a router would select (`routing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.memory import ServingMemory
from cordee.plan.serving.price.price import PhaseRates, TokenMix
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.queueing.routing import route
from cordee.plan.serving.queueing.served import Percentiles, merged
from cordee.plan.serving.request import Slo, Traffic
from cordee.plan.serving.speed.speed import Speed
from cordee.plan.serving.speed.throughput import saturated
from cordee.workload.requests import Request, poisson

PLAYED = 400
"""Requests that are drawn for a rate, at least: enough for a 99th percentile."""
ROUNDS = 10
"""A replica is filled so often: near its capacity the batch grows slowly, and fewer requests end before it has."""
SEED = 7
# Of what a replica could do at most: a queue beyond it grows for as long as the load lasts.
KEEPS_UP = 0.97
COMPUTED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Performance:
    """All replicas of one layout under the traffic.

    Attributes:
        sequences: requests that run at the same time in one replica; those that wait are not among them.
        requests_per_s: answered by all replicas.
        mix: tokens of a mean request.
        rates: tokens a second of a replica that does only one thing.
        played: latencies come from playing requests; otherwise they are those of the steady state, all alike.
        requests: requests that were played; 0 in the steady state.
        refused: those of them that are longer than the context.
        keeps_up: no queue grows for as long as the load lasts.
    """

    sequences: float
    requests_per_s: float
    mix: TokenMix
    rates: PhaseRates
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    played: bool
    requests: int = 0
    refused: int = 0
    keeps_up: bool = True

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
        return slo.excess(getattr(self.ttft, slo.statistic), getattr(self.tpot, slo.statistic))


@dataclass(frozen=True, slots=True)
class Floor:
    """Latencies of the shortest request alone in a replica: no load and no number of replicas has lower ones."""

    ttft_s: float
    tpot_s: float


def speed_of(case: ServingCase) -> Speed:
    """Return the step times of a case; they remember the products that were computed."""
    # Equal GPUs may have different kernels, which their comparison leaves out.
    return _speed_of(case, id(case.gpu.kernels))


@lru_cache(maxsize=1024)
def _speed_of(case: ServingCase, kernels_id: int) -> Speed:
    return Speed(case)


def floor(traffic: Traffic, speed: Speed) -> Floor:
    """Return the lower bounds of TTFT and TPOT in this layout."""
    if traffic.requests:
        shortest = min(each.input_tokens for each in traffic.requests)
        prompt_s = speed.prefill_s(1 if traffic.has_prefixes else min(shortest, speed.case.max_batched_tokens))
        answers = any(each.output_tokens > 1 for each in traffic.requests)
        return Floor(prompt_s, speed.decode_s(1, shortest) if answers else 0.0)
    answer_s = speed.decode_s(1, mean_context(traffic)) if traffic.output_tokens > 1 else 0.0
    return Floor(_prompt_s(traffic, speed, 0), answer_s)


def steady_state(
    traffic: Traffic, speed: Speed, replicas: int, sequences: int, concurrency: int | None = None
) -> Performance:
    """Return replicas that always run so many requests each.

    Args:
        traffic: the lengths of requests.
        speed: step times of a replica.
        replicas: their number.
        sequences: requests that run in each.
        concurrency: requests that are open in each; those that do not run wait for a slot. None: as many as run.
    """
    found = saturated(
        speed, traffic.input_tokens, traffic.output_tokens, sequences=sequences, cached_tokens=traffic.cached_tokens
    )
    per_s = found.output_tokens_per_s / traffic.output_tokens
    first_s = found.step_s / 2 + _prompt_s(traffic, speed, sequences - 1)
    answer_s = found.tpot_s * (traffic.output_tokens - 1)
    if concurrency is not None and concurrency > sequences:
        # Little's law: open requests over answered ones a second is the time of each, with its wait.
        first_s = max(first_s, concurrency / per_s - answer_s)
    return Performance(
        sequences=sequences,
        requests_per_s=replicas * per_s,
        mix=_mix(traffic, traffic.cached_tokens),
        rates=_rates(speed, traffic, sequences),
        ttft=_same(first_s),
        tpot=_same(found.tpot_s),
        e2e=_same(first_s + answer_s),
        played=False,
    )


def _prompt_s(traffic: Traffic, speed: Speed, others: int) -> float:
    """Return the seconds of a prompt's steps beside so many answers."""
    limit = max(1, speed.case.max_batched_tokens * speed.case.layout.dp - others)
    starts = range(traffic.cached_tokens, traffic.input_tokens, limit)
    chunks = [(min(limit, traffic.input_tokens - start), start) for start in starts]
    return sum(speed.step_s([chunk], others, others * mean_context(traffic)) for chunk in chunks)


def play(traffic: Traffic, held: ServingMemory, speed: Speed, replicas: int) -> Performance | None:
    """Play the traffic through replicas; None if it is more than they can answer, or they refuse every request."""
    sequences = max(1, min(speed.case.slots, held.sequences(traffic.request_tokens)))
    steady = steady_state(traffic, speed, 1, sequences)
    overloaded = traffic.offered_per_s / replicas > KEEPS_UP * steady.requests_per_s
    # Requests that all have a slot never wait; what shared prefixes save in compute and memory only the play shows.
    if overloaded and not traffic.has_prefixes and not 0 < len(traffic.requests) <= sequences * replicas:
        return None
    if traffic.requests:
        parts: Sequence[Sequence[Request]] = route(traffic.requests, replicas)
    else:
        parts = [_drawn(traffic, speed, traffic.offered_per_s / replicas, sequences)]
    limits = replica_limits(held, prefix_caching=traffic.has_prefixes)
    served = merged([serve(part, speed, limits) for part in parts])
    if not served.outcomes:
        return None
    running = served.running / len(parts)
    return Performance(
        sequences=running,
        requests_per_s=traffic.rate_per_s or served.requests_per_s,
        mix=_mix(traffic, served.cached_tokens / len(served.outcomes)),
        rates=_rates(speed, traffic, max(1, round(running))),
        ttft=served.ttft,
        tpot=served.tpot,
        e2e=served.e2e,
        played=True,
        requests=sum(map(len, parts)),
        refused=served.refused,
        keeps_up=not traffic.requests or served.keeps_up(KEEPS_UP),
    )


def _drawn(traffic: Traffic, speed: Speed, rate_per_s: float, sequences: int) -> list[Request]:
    """Return one replica's requests, drawn at the rate from one seed; it runs so many `sequences` at most."""
    lengths = [(traffic.input_tokens, traffic.output_tokens)]
    batch = _batch_that_keeps_up(traffic, speed, rate_per_s, sequences)
    drawn = poisson(max(PLAYED, ROUNDS * batch), rate_per_s, lengths, seed=SEED)
    return [replace(each, cached_tokens=traffic.cached_tokens) for each in drawn]


def _batch_that_keeps_up(traffic: Traffic, speed: Speed, rate_per_s: float, most: int) -> int:
    """Return the fewest concurrent requests at which a replica answers this rate, `most` if none does.

    The batch settles there: a load far from a replica's capacity needs no more requests to fill it.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if steady_state(traffic, speed, 1, middle).requests_per_s >= rate_per_s:
            high = middle
        else:
            low = middle + 1
    return low


def replica_limits(held: ServingMemory, *, prefix_caching: bool) -> Limits:
    """Return the limits of one replica, of all its attention copies together."""
    case = held.case
    return Limits(
        max_sequences=case.slots,
        max_batched_tokens=case.max_batched_tokens * case.layout.dp,
        kv_tokens=held.kv_tokens,
        block_tokens=case.engine.block_tokens,
        max_context_tokens=case.max_context_tokens,
        chunked_prefill=case.engine.chunked_prefill,
        prefix_caching=prefix_caching,
    )


def _rates(speed: Speed, traffic: Traffic, sequences: int) -> PhaseRates:
    """Return tokens a second of a replica that only computes prompts, only reads cached ones, only answers.

    Each data-parallel rank has a prompt of its own.
    """
    case = speed.case
    ranks, chunk = case.layout.dp, max(1, min(traffic.input_tokens, case.max_batched_tokens))
    context = sequences * mean_context(traffic)
    reading_s = speed.step_s([(COMPUTED_TOKENS, chunk)] * ranks) - speed.step_s([(COMPUTED_TOKENS, 0)] * ranks)
    # Longer kernels reach more of the roofline, which may hide what they read; they read it all the same.
    reading_s = max(reading_s, kv_bytes(case, chunk) / case.gpu.memory_bytes_per_s)
    return PhaseRates(
        prefill_tokens_per_s=ranks * chunk / speed.step_s([(chunk, 0)] * ranks),
        decode_tokens_per_s=sequences / speed.decode_s(sequences, context),
        restore_tokens_per_s=ranks * chunk / reading_s,
    )


def mean_context(traffic: Traffic) -> float:
    """Return the tokens that a running answer has in the cache, on average."""
    return traffic.input_tokens + traffic.output_tokens / 2


def _mix(traffic: Traffic, cached_tokens: float) -> TokenMix:
    return TokenMix(traffic.input_tokens, traffic.output_tokens, cached_tokens)


def _same(seconds: float) -> Percentiles:
    return Percentiles(seconds, seconds, seconds, seconds)
