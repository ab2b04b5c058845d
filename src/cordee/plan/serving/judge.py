"""One layout, judged: memory of its GPUs, the replicas that the traffic needs, their latencies, the token price."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.formats import Format
from cordee.plan.serving.layouts import check_formats, layouts
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.memory import ServingMemory, memory
from cordee.plan.serving.performance import Floor, Performance, floor, play, speed_of, steady_state
from cordee.plan.serving.price.price import TokenPrices, replica_s, token_prices
from cordee.plan.serving.request import ServingRequest

SLOTS_MAX = 256  # llama.cpp, LLAMA_MAX_SEQ


@dataclass(frozen=True)
class ServingCandidate:
    """One layout in one pair of formats with its memory and, if it fits, its replicas under the traffic.

    `performance` is None where it does not fit, or where so many GPUs do not keep up with the arrivals: of a trace they
    have then answered `overload_per_s` requests a second.
    """

    request: ServingRequest
    case: ServingCase
    memory: ServingMemory
    replicas: int
    performance: Performance | None = None
    overload_per_s: float | None = None

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
        """Return whether it serves all of the traffic within the latencies."""
        return self.performance is not None and self.excess <= 1 and not self.performance.refused

    @cached_property
    def floor(self) -> Floor:
        """The lower bounds of its latencies."""
        return floor(self.request.traffic, speed_of(self.case))

    @property
    def can_keep_slo(self) -> bool:
        """Return whether it fits and the latencies allow at least a request alone."""
        return self.fits and self.request.slo.excess(self.floor.ttft_s, self.floor.tpot_s) <= 1

    @property
    def sequences(self) -> int:
        """Requests of the traffic's length that a replica runs concurrently, at most."""
        return min(self.case.slots, self.memory.sequences(self.request.traffic.request_tokens))

    @cached_property
    def capacity_per_s(self) -> float:
        """Requests a second that all replicas answer when requests always wait."""
        if self.overload_per_s is not None:
            return self.overload_per_s
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
        """The fraction of the busiest hour in which a replica works; at most 1."""
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
    return [under_traffic(each) for each in unloaded(request)]


def unloaded(request: ServingRequest) -> list[ServingCandidate]:
    """Return the same candidates with their memory alone, which takes no time.

    Raises:
        LayoutError: no layout that is asked for divides the model, or the engine lacks a layout or a format.
    """
    check_formats(request.engine, request.weights, request.kv)
    found = layouts(request.shape, request.gpu, request.gpus, request.layout, request.engine)
    return [_unloaded(request, *each) for each in product(found, request.weights, request.kv)]


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
    return (
        (0, round(price, 6), replica, each.excess, found.tpot.mean)
        if each.keeps_slo
        else (1, found.refused, each.excess, price)
    )


def judge(request: ServingRequest, layout: ServingLayout, weights: Format, kv: Format) -> ServingCandidate:
    """Return this layout in these formats, with the fewest replicas that meet the latencies, or with all."""
    return under_traffic(_unloaded(request, layout, weights, kv))


def _unloaded(request: ServingRequest, layout: ServingLayout, weights: Format, kv: Format) -> ServingCandidate:
    """Return this layout in these formats on all GPUs, before any request comes."""
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
    return ServingCandidate(request, case, held, request.gpus // layout.gpus)


def under_traffic(candidate: ServingCandidate) -> ServingCandidate:
    """Return the candidate with the fewest replicas that meet the latencies, or with all."""
    traffic = candidate.request.traffic
    if not candidate.fits:
        return candidate
    if traffic.rate_per_s is not None or traffic.requests:
        return _played(candidate)
    return _largest(candidate) if traffic.concurrency is None else _concurrent(candidate, traffic.concurrency)


def _concurrent(candidate: ServingCandidate, concurrency: int) -> ServingCandidate:
    """Return the candidate under a fixed number of open requests; what has no slot on all GPUs waits for one."""
    traffic, speed = candidate.request.traffic, speed_of(candidate.case)
    slots, most = max(1, candidate.sequences), candidate.replicas
    found = []
    for replicas in range(min(most, -(-concurrency // slots)), most + 1):
        open_requests = -(-concurrency // replicas)
        state = steady_state(traffic, speed, replicas, min(slots, open_requests), open_requests)
        found.append(replace(candidate, replicas=replicas, performance=state))
    # The fewest replicas that meet the latencies; if none do, those that come nearest.
    return next((each for each in found if each.keeps_slo), min(found, key=lambda each: each.excess))


def _largest(candidate: ServingCandidate) -> ServingCandidate:
    """Return the candidate with as many concurrent requests as meet the latencies; latency grows with their number."""
    best, low, high = steady(candidate, 1), 1, candidate.sequences
    if not candidate.can_keep_slo:
        return best
    while low < high:
        middle = (low + high + 1) // 2
        tried = steady(candidate, middle)
        if tried.keeps_slo:
            best, low = tried, middle
        else:
            high = middle - 1
    return best


def _played(candidate: ServingCandidate) -> ServingCandidate:
    """Return the candidate with the fewest replicas that meet the latencies of what they answer, or with all of them.

    Where a request alone misses its latencies, only all replicas are played.
    """
    found, most = candidate, candidate.replicas
    few, many = (1 if candidate.can_keep_slo else most), most
    while few <= many:
        replicas = (few + many) // 2
        tried = _with_replicas(candidate, replicas)
        if tried.excess <= 1:
            found, many = tried, replicas - 1
        else:
            found = tried if replicas == most else found
            few = replicas + 1
    return found


def _with_replicas(candidate: ServingCandidate, replicas: int) -> ServingCandidate:
    played = play(candidate.request.traffic, candidate.memory, speed_of(candidate.case), replicas)
    if played is None or played.keeps_up:
        return replace(candidate, replicas=replicas, performance=played)
    return replace(candidate, replicas=replicas, overload_per_s=played.requests_per_s)


def steady(candidate: ServingCandidate, sequences: int) -> ServingCandidate:
    """Return a layout that fits with so many concurrent requests in each replica."""
    speed = speed_of(candidate.case)
    found = steady_state(candidate.request.traffic, speed, candidate.replicas, sequences)
    return replace(candidate, performance=found)


def sizes(most: int) -> list[int]:
    """Return the powers of two up to a number, and the number.

    >>> sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    return sorted({2**bits for bits in range(most.bit_length())} | {most})
