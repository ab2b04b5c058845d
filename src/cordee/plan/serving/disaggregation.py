"""Prefill and decode on replicas of their own as a plan: layouts, replicas of each, and the price of a token.

Each pair of layouts gets the fewest replicas that its load asks for. The cheapest pairs are played, with the transfer
of each prompt's KV cache between them, and get a replica more for the phase whose latency misses its limit.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from cordee.errors import LayoutError, SpecError
from cordee.hardware.collectives import island_link, near_gpus, network_link, send_s
from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.judge import ServingCandidate, unloaded
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, ServingLayoutWanted, parse_serving_layout
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.performance import KEEPS_UP, mean_context, replica_limits, speed_of
from cordee.plan.serving.price.price import MTOK
from cordee.plan.serving.queueing.disaggregated import Replicas, serve_apart
from cordee.plan.serving.queueing.served import Percentiles
from cordee.plan.serving.request import ServingRequest, Traffic
from cordee.units import format_digits_usd, format_gb, format_latency, plural
from cordee.workload.requests import Request, poisson

PLAYED = 400
"""Requests of a rate that are judged: enough for a 99th percentile."""
FILLED = 3
"""The answers that run together are played so often before them: until then the batches are smaller than they will be.
And once after them, since the batches of the last requests are smaller again."""
SEED = 7
PAIRS_PLAYED = 8
"""Pairs of layouts that are played, the cheapest by their rates first."""
FULLEST = 0.9
"""Part of its rate at which a pool is loaded at most: a queue grows without end at the whole of it."""
LOADS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Parts of the rate of the slower pool that are tried where the request names no load."""


@dataclass(frozen=True, slots=True)
class PoolWanted:
    """The replicas that are asked for one phase; None leaves their number to the search."""

    replicas: int | None = None
    layout: ServingLayoutWanted = ANY_SERVING_LAYOUT


@dataclass(frozen=True, slots=True)
class PhasesWanted:
    """The replicas that are asked for both phases."""

    prefill: PoolWanted = PoolWanted()
    decode: PoolWanted = PoolWanted()


def parse_phases(text: str) -> PhasesWanted:
    """Read `any`, or `prefill=2xtp4 decode=4xtp8,ep`; a number of replicas or a phase may be left out.

    >>> parse_phases("prefill=2xtp4 decode=tp8,ep").prefill.replicas, parse_phases("any").decode.replicas
    (2, None)

    Raises:
        LayoutError: another phase, or a layout that cannot be read.
    """
    pools = dict[str, PoolWanted]()
    for part in () if text.strip() == "any" else text.split():
        match = re.fullmatch(r"(prefill|decode)=(?:(\d+)x)?(\S+)", part)
        if match is None or match[2] == "0":
            raise LayoutError(
                f"{part!r} is no phase with its replicas",
                hint="write any, or prefill=2xtp4 decode=4xtp8,ep: replicas of a layout for each phase",
            )
        layout = ANY_SERVING_LAYOUT if match[3] == "any" else parse_serving_layout(match[3])
        pools[match[1]] = PoolWanted(int(match[2]) if match[2] else None, layout)
    return PhasesWanted(**pools)


@dataclass(frozen=True)
class PhasesPlan:
    """Replicas for prompts and replicas for answers under the traffic.

    Attributes:
        request: what was asked.
        prefill: the layout for prompts, with its replicas.
        decode: the layout for answers, with its replicas.
        requests_per_s: answered; what the slower phase can do where more arrive.
        sent_bytes: KV cache of a mean prompt, from all GPUs of a prefill replica.
        sent_s: seconds in which it travels.
        refused: requests longer than the context.
        keeps_up: no queue grows for as long as the load lasts.
    """

    request: ServingRequest
    prefill: ServingCandidate
    decode: ServingCandidate
    requests_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    sent_bytes: int
    sent_s: float
    refused: int = 0
    keeps_up: bool = True

    @property
    def gpus(self) -> int:
        """GPUs of both phases."""
        return self.prefill.gpus + self.decode.gpus

    @property
    def excess(self) -> float:
        """The worst latency over its limit; infinite if a queue grows."""
        slo = self.request.slo
        if not self.keeps_up:
            return float("inf")
        return slo.excess(getattr(self.ttft, slo.statistic), getattr(self.tpot, slo.statistic))

    @property
    def keeps_slo(self) -> bool:
        """Return whether all requests are answered within the latencies."""
        return self.excess <= 1 and not self.refused

    def _usd(self, gpus: int, tokens: float) -> float | None:
        """Return the dollars of a million of these tokens of a request on so many GPUs, all hours paid for."""
        price = self.request.price
        if price is None:
            return None
        per_s = self.requests_per_s * self.request.pricing.mean_load * tokens
        return price.usd_per_gpu_hour * gpus / 3600 / per_s * MTOK

    @property
    def input_usd(self) -> float | None:
        """Dollars of a million tokens of prompts: those of the prefill replicas."""
        return self._usd(self.prefill.gpus, self.request.traffic.input_tokens)

    @property
    def output_usd(self) -> float | None:
        """Dollars of a million tokens of answers: those of the decode replicas."""
        return self._usd(self.decode.gpus, self.request.traffic.output_tokens)

    @property
    def usd_per_mtok(self) -> float | None:
        """Dollars of a million tokens, input and output together."""
        return self._usd(self.gpus, self.request.traffic.request_tokens)

    @property
    def name(self) -> str:
        """Both phases with their replicas."""
        return f"prefill={_pool(self.prefill)} decode={_pool(self.decode)}"

    @property
    def transfer(self) -> str:
        """The transfer of a mean prompt's KV cache."""
        return (
            f"the KV cache of a prompt, {format_gb(self.sent_bytes)}, travels in {format_latency(self.sent_s)} "
            f"over {self.link}"
        )

    @property
    def link(self) -> str:
        """The link between both phases."""
        gpu = self.request.gpu
        return (
            gpu.link if self.gpus <= near_gpus(gpu) else f"the network ({gpu.network_bytes_per_s / 1e9:g} GB/s a GPU)"
        )

    def __str__(self) -> str:
        if not self.keeps_up:
            most = f"at most {self.requests_per_s:,.1f} requests/s"
            return f"{self.name} on {plural(self.gpus, 'GPU')} cannot keep up: {most}"
        at = self.request.slo.statistic
        ttft, tpot = (format_latency(getattr(each, at)) for each in (self.ttft, self.tpot))
        price = "" if self.usd_per_mtok is None else f", {format_digits_usd(self.usd_per_mtok)} a million tokens"
        verdict = f"; {self.excess:.2f} times the SLO" if self.excess > 1 else ""
        verdict += f"; {plural(self.refused, 'request')} refused" if self.refused else ""
        return (
            f"{self.name} on {plural(self.gpus, 'GPU')}: {self.requests_per_s:,.1f} requests/s, TTFT {ttft}, "
            f"TPOT {tpot}{price}{verdict}"
        )


def _pool(each: ServingCandidate) -> str:
    return f"{each.replicas}x{each.name.replace(' ', ',')}"


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that one replica runs together, and the seconds that they take in its phase."""

    requests: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds if self.requests else 0.0


@dataclass(frozen=True)
class _Pair:
    """A layout for each phase with the batch of one replica of it: of answers the largest that the latencies allow."""

    prefill: ServingCandidate
    decode: ServingCandidate
    prompts: _Batch
    answers: _Batch

    def replicas(self, rate_per_s: float, wanted: PhasesWanted) -> tuple[int, int]:
        """Return the fewest replicas of each phase for this rate, or those that are asked for."""
        fewest = [max(1, ceil(rate_per_s / (FULLEST * each.per_s))) for each in (self.prompts, self.answers)]
        return wanted.prefill.replicas or fewest[0], wanted.decode.replicas or fewest[1]

    def gpus(self, counts: tuple[int, int]) -> int:
        """Return the GPUs of so many replicas of each phase."""
        return counts[0] * self.prefill.case.layout.gpus + counts[1] * self.decode.case.layout.gpus

    def divisions(self, wanted: PhasesWanted, gpus: int) -> Iterator[tuple[float, tuple[int, int]]]:
        """Yield each division of these GPUs with the requests a second of the slower phase."""
        most = gpus // self.prefill.case.layout.gpus
        for prefill in (wanted.prefill.replicas,) if wanted.prefill.replicas else range(1, most + 1):
            left = gpus - prefill * self.prefill.case.layout.gpus
            decode = wanted.decode.replicas or left // self.decode.case.layout.gpus
            if decode >= 1 and self.gpus((prefill, decode)) <= gpus:
                yield min(prefill * self.prompts.per_s, decode * self.answers.per_s), (prefill, decode)

    def capacity_per_s(self, counts: tuple[int, int]) -> float:
        """Return the requests a second of the slower phase, at any latency."""
        return min(counts[0] * self.prompts.per_s, counts[1] * _answers(self.decode, None).per_s)

    def running(self, counts: tuple[int, int], rate_per_s: float) -> int:
        """Return the answers that run together at this rate: the smallest batches that keep up with it."""
        sizes = range(1, self.decode.sequences)
        found = bisect_left(sizes, rate_per_s / counts[1], key=lambda size: _batch(self.decode, size).per_s)
        return counts[1] * (found + 1)


def plan_phases(request: ServingRequest, wanted: PhasesWanted) -> PhasesPlan | None:
    """Return the cheapest replicas for both phases that meet the latencies, or the nearest; None: none fit the GPUs.

    Raises:
        SpecError: a fixed concurrency.
        LayoutError: no layout that is asked for divides the model.
    """
    check_phases(request)
    pairs = list(_pairs(request, wanted))
    found = list(_loaded(request, wanted, pairs) if request.traffic.offered_per_s else _fullest(request, wanted, pairs))
    return min(found, key=_rank, default=None)


def check_phases(request: ServingRequest) -> None:
    """Refuse a fixed concurrency, which two pools of replicas do not have.

    Raises:
        SpecError: it has one.
    """
    if request.traffic.concurrency is not None:
        raise SpecError(
            f"a concurrency of {request.traffic.concurrency} is not divided between prefill and decode",
            hint="give --rate, a trace, or no load: then both phases have as much as they can answer",
        )


def _rank(each: PhasesPlan) -> tuple[float, ...]:
    price = each.gpus / each.requests_per_s
    return (0, price, each.excess) if each.keeps_slo else (1, each.refused, each.excess, price)


def _pairs(request: ServingRequest, wanted: PhasesWanted) -> Iterator[_Pair]:
    """Yield the pairs of layouts with one format of the KV cache."""
    phases = (wanted.prefill, wanted.decode)
    prefill, decode = (
        [each for each in unloaded(replace(request, layout=pool.layout)) if each.fits] for pool in phases
    )
    prompts = {each: _prompts(each) for each in prefill}
    answers = {each: _answers(each, request.slo.tpot_s) for each in decode}
    for one, other in product(prefill, decode):
        if (one.case.kv, one.case.weights) == (other.case.kv, other.case.weights) and answers[other].requests:
            yield _Pair(one, other, prompts[one], answers[other])


def _prompts(each: ServingCandidate) -> _Batch:
    """Return the prompts of one replica that does nothing else, as many in a step as it holds."""
    traffic, case = each.request.traffic, each.case
    limit = case.max_batched_tokens * case.layout.dp
    many = max(1, min(limit // traffic.computed_tokens, case.slots))
    starts = range(traffic.cached_tokens, traffic.input_tokens, limit)
    chunks = [(min(limit, traffic.input_tokens - start), start) for start in starts]
    steps = [[chunks[0]] * many] if len(chunks) == 1 else [[chunk] for chunk in chunks]
    return _Batch(many, sum(speed_of(case).step_s(step) for step in steps))


def _answers(each: ServingCandidate, limit_s: float | None) -> _Batch:
    """Return the largest batch of answers of one replica within this limit of a token's time; of 0: none."""
    if limit_s is None:
        return _batch(each, each.sequences)
    speed, context = speed_of(each.case), mean_context(each.request.traffic)
    sizes = range(1, each.sequences + 1)
    return _batch(each, bisect_right(sizes, limit_s, key=lambda size: speed.decode_s(size, size * context)))


def _batch(each: ServingCandidate, size: int) -> _Batch:
    """Return so many answers on one replica that does nothing else."""
    traffic = each.request.traffic
    step_s = speed_of(each.case).decode_s(size, size * mean_context(traffic))
    return _Batch(size, max(1, traffic.output_tokens - 1) * step_s)


def _loaded(request: ServingRequest, wanted: PhasesWanted, pairs: Sequence[_Pair]) -> Iterator[PhasesPlan]:
    """Yield the plans of the cheapest pairs for the request's load, each with replicas added while they help."""
    rate = request.traffic.offered_per_s
    sized = [(pair, pair.replicas(rate, wanted)) for pair in pairs]
    fitting = sorted((pair.gpus(counts), at) for at, (pair, counts) in enumerate(sized))
    for _, at in fitting[:PAIRS_PLAYED]:
        pair, counts = sized[at]
        while pair.gpus(counts) <= request.gpus:
            found = _play(pair, counts, rate)
            yield found
            more = None if found.keeps_slo else _more(counts, found, wanted)
            if more is None:
                break
            counts = more


def _more(counts: tuple[int, int], found: PhasesPlan, wanted: PhasesWanted) -> tuple[int, int] | None:
    """Return one replica more of the phase whose latency misses its limit; None where none helps or may be added."""
    slo = found.request.slo
    if found.refused or not found.keeps_up:
        return None
    late = getattr(found.ttft, slo.statistic) > (slo.ttft_s or float("inf"))
    pool = wanted.prefill if late else wanted.decode
    return None if pool.replicas else (counts[0] + late, counts[1] + (not late))


def _fullest(request: ServingRequest, wanted: PhasesWanted, pairs: Sequence[_Pair]) -> Iterator[PhasesPlan]:
    """Yield the plans with the highest rate on all GPUs, each at the largest load within the latencies."""
    best = [(*max(found), pair) for pair in pairs if (found := list(pair.divisions(wanted, request.gpus)))]
    for rate, counts, pair in sorted(best, key=lambda each: -each[0] / each[2].gpus(each[1]))[:PAIRS_PLAYED]:
        tried = (_play(pair, counts, load * rate) for load in LOADS)
        plans = list(_until_kept(tried))
        yield plans[-1]


def _until_kept(plans: Iterator[PhasesPlan]) -> Iterator[PhasesPlan]:
    for each in plans:
        yield each
        if each.keeps_slo:
            return


def _play(pair: _Pair, counts: tuple[int, int], rate_per_s: float) -> PhasesPlan:
    """Return so many replicas of each phase under this rate, or under the request's trace."""
    request, gpus = pair.prefill.request, pair.gpus(counts)
    traffic = request.traffic
    prompts, answers = (
        Replicas(count, speed_of(each.case), replica_limits(each.memory, prefix_caching=traffic.has_prefixes))
        for count, each in zip(counts, (pair.prefill, pair.decode), strict=True)
    )
    most_per_s = KEEPS_UP * pair.capacity_per_s(counts)
    running = pair.running(counts, rate_per_s)
    served = serve_apart(
        _requests(traffic, rate_per_s, running), prompts, answers, lambda tokens: _sent(pair, gpus, tokens)[1]
    )
    judged, keeps_up = served, served.keeps_up(KEEPS_UP)
    if not traffic.requests:
        settled = served.outcomes[FILLED * running : FILLED * running + PLAYED]
        judged, keeps_up = replace(served, outcomes=settled), rate_per_s <= most_per_s
    sent_bytes, sent_s = _sent(pair, gpus, traffic.input_tokens)
    return PhasesPlan(
        request=request,
        prefill=replace(pair.prefill, replicas=counts[0]),
        decode=replace(pair.decode, replicas=counts[1]),
        requests_per_s=served.requests_per_s if traffic.requests else min(rate_per_s, most_per_s),
        ttft=judged.ttft,
        tpot=judged.tpot,
        e2e=judged.e2e,
        sent_bytes=sent_bytes,
        sent_s=sent_s,
        refused=served.refused,
        keeps_up=keeps_up,
    )


def _requests(traffic: Traffic, rate_per_s: float, running: int) -> Sequence[Request]:
    """Return the requests of a trace, or some drawn at a rate: until so many answers run together, then the judged."""
    if traffic.requests:
        return traffic.requests
    lengths = [(traffic.input_tokens, traffic.output_tokens)]
    drawn = poisson((FILLED + 1) * running + PLAYED, rate_per_s, lengths, seed=SEED)
    return [replace(each, cached_tokens=traffic.cached_tokens) for each in drawn]


def _sent(pair: _Pair, gpus: int, tokens: int) -> tuple[int, float]:
    """Return the bytes of KV of a prompt, and the seconds in which they reach the other phase.

    Each GPU that holds a part of a sequence sends or receives it over its own link; the phase with fewer is the slower.
    """
    case, other = pair.prefill.case, pair.decode.case
    senders, receivers = (_parts(each) for each in (case, other))
    whole = kv_bytes(case, tokens, pair.prefill.memory.stage) * senders
    link = island_link(case.gpu) if gpus <= near_gpus(case.gpu) else network_link(case.gpu)
    return whole, float(send_s(whole / min(senders, receivers), link))


def _parts(case: ServingCase) -> int:
    """Return the GPUs with different parts of a sequence: tensor parallelism beyond the KV heads has copies of them."""
    heads = 1 if case.shape.latent is not None else case.shape.kv_heads
    return case.layout.pp * min(case.layout.tp, heads)
