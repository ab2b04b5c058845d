"""The reason against a layout, or against a concurrency: the rule, the bytes, the latency or the price."""

from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

from cordee.errors import SpecError
from cordee.plan.serving.judge import ServingCandidate, judge, rank, steady
from cordee.plan.serving.layouts import misfit, misfit_of_engine, parse_serving_layout
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.offered import smaller_kv, smaller_weights
from cordee.plan.serving.remedies import ServiceRemedy
from cordee.plan.serving.request import ServingRequest
from cordee.units import format_digits_usd, format_gb, plural

Ground = Literal[
    "does not divide",
    "does not fit",
    "misses the SLO",
    "does not keep up",
    "costs more",
    "costs as much",
    "the engine's limit",
    "possible",
    "the best",
]


class Ranked(Protocol):
    """The parts of an answer that its reasons are made from."""

    @property
    def request(self) -> ServingRequest: ...
    @property
    def candidates(self) -> tuple[ServingCandidate, ...]: ...
    @property
    def best(self) -> ServingCandidate | None: ...
    @property
    def nearest(self) -> ServingCandidate: ...
    @property
    def remedies(self) -> tuple[ServiceRemedy, ...]: ...


@dataclass(frozen=True)
class ServingWhy:
    """Why a layout is not the best, or why a concurrency is not reached; `hint` names what would work."""

    asked: str
    ground: Ground
    message: str
    hint: str
    candidate: ServingCandidate | None

    @property
    def heading(self) -> str:
        """The question that is answered."""
        return self.asked if self.ground in ("possible", "the best") else f"Why not {self.asked}"


def why_not(answer: Ranked, text: str) -> ServingWhy:
    """Return why the best layout is not this one (`tp=2`), or why a replica does not reach this concurrency (`128`).

    Axes that the text leaves out are 1.

    Raises:
        LayoutError: the text cannot be read.
        SpecError: no request at all.
    """
    return _sequences(answer, int(text)) if text.strip().isdecimal() else _layout(answer, text)


def _layout(answer: Ranked, text: str) -> ServingWhy:
    request, layout = answer.request, parse_serving_layout(text).plainest
    broken = misfit(layout, request.shape, request.gpu, request.gpus) or misfit_of_engine(layout, request.engine)
    if broken is not None:
        return ServingWhy(text, "does not divide", *broken, None)
    formats = product(request.weights, request.kv)
    found = min((judge(request, layout, weights, kv) for weights, kv in formats), key=rank)
    best = answer.best
    if not found.fits:
        return ServingWhy(text, "does not fit", f"{found.name} {_shortfall(found)}", _fits_instead(answer), found)
    if found.performance is None:
        most = f"answer at most {found.capacity_per_s:,.1f} of {request.traffic.offered_per_s:,.1f} requests/s"
        message = f"{plural(found.replicas, 'replica')} of {found.name} {most}"
        return ServingWhy(text, "does not keep up", message, _fits_instead(answer), found)
    if not found.keeps_slo:
        return ServingWhy(text, "misses the SLO", f"{found.name}: {latencies(found)}", _fits_instead(answer), found)
    if best is None or best.case == found.case:
        return ServingWhy(text, "the best", f"{found.name} is the best: {latencies(found)}", "", found)
    instead = f"{best.name}: {latencies(best)}"
    if rank(found)[:2] == rank(best)[:2]:
        sizes = f"a replica of {plural(found.case.layout.gpus, 'GPU')}, not {best.case.layout.gpus}"
        message = f"{found.name} meets the SLO ({latencies(found)}) at the price of {best.name}, in {sizes}"
        return ServingWhy(text, "costs as much", message, instead, found)
    return ServingWhy(text, "costs more", _dearer(found, best), instead, found)


def _dearer(found: ServingCandidate, best: ServingCandidate) -> str:
    assert found.performance is not None and best.performance is not None, "both meet the SLO"
    mine, its = (each.performance.requests_per_s / each.gpus for each in (found, best) if each.performance)
    price = ""
    if found.usd_per_mtok is not None and best.usd_per_mtok is not None:
        both = f"{format_digits_usd(found.usd_per_mtok)} against {format_digits_usd(best.usd_per_mtok)}"
        price = f" ({both} a million tokens)"
    return (
        f"{found.name} meets the SLO ({latencies(found)}) but answers {mine:,.2f} requests/s on each GPU, "
        f"{1 - mine / its:.0%} less than {best.name} with {its:,.2f}{price}"
    )


def latencies(found: ServingCandidate) -> str:
    """Return TTFT and TPOT in the request's statistic beside their limits."""
    slo, speed = found.request.slo, found.performance
    if speed is None:
        return "does not keep up"
    pairs = (("TTFT", speed.ttft, slo.ttft_s), ("TPOT", speed.tpot, slo.tpot_s))
    return ", ".join(
        f"{name} {1000 * getattr(seconds, slo.statistic):,.1f} ms" + (f" of {1000 * limit:,g}" if limit else "")
        for name, seconds, limit in pairs
    )


def _shortfall(found: ServingCandidate) -> str:
    return f"lacks {format_gb(found.shortfall_bytes)} on each GPU: {found.memory.refusal}"


def _fits_instead(answer: Ranked) -> str:
    best = answer.best
    if best is not None:
        return f"{best.name} {'meets it' if answer.request.slo.limits else 'fits'}: {latencies(best)}"
    return "; or ".join(str(each) for each in answer.remedies)


def _sequences(answer: Ranked, wanted: int) -> ServingWhy:
    """Return what keeps a replica of the nearest layout from this concurrency."""
    if wanted < 1:
        raise SpecError(f"--why {wanted} asks about no request", hint="give a number from 1, or a layout: tp=2")
    found, text = answer.nearest, str(wanted)
    tokens = answer.request.traffic.request_tokens
    name = f"a concurrency of {wanted:,} on {found.name}"
    if not found.fits:
        return ServingWhy(text, "does not fit", f"{found.name} {_shortfall(found)}", _fits_instead(answer), found)
    room = found.memory.sequences(tokens)
    if wanted > room:
        on_each = -(-wanted // found.case.layout.dp)
        needs, has = on_each * kv_bytes(found.case, tokens, found.memory.stage), found.memory.kv_bytes
        message = (
            f"{name} needs {format_gb(needs)} of KV cache on each GPU ({tokens:,} tokens each), but it has "
            f"{format_gb(has)}: room for {room}"
        )
        return ServingWhy(text, "does not fit", message, _room_hint(answer, found, wanted), found)
    if wanted > found.case.slots:
        message = f"{name}: the memory has room for {room}, but the engine runs {found.case.slots} at most"
        on_each = -(-wanted // found.case.layout.dp)
        return ServingWhy(text, "the engine's limit", message, f"give --max-sequences {on_each}", found)
    tried = steady(found, wanted)
    if tried.excess > 1:
        return ServingWhy(text, "misses the SLO", f"{name}: {latencies(tried)}", _slo_hint(found), tried)
    message = f"{name}: {latencies(tried)}; there is room for {room}"
    return ServingWhy(text, "possible", message, "", tried)


def _room_hint(answer: Ranked, found: ServingCandidate, wanted: int) -> str:
    request, tokens = answer.request, answer.request.traffic.request_tokens
    case, tries = found.case, list[tuple[str, ServingCandidate]]()
    for kv in smaller_kv(case.engine, case.kv)[:1]:
        tries.append((f"--kv {kv.name}", judge(request, case.layout, case.weights, kv)))
        for four in smaller_weights(case.engine, case.gpu, case.weights)[-1:]:
            tries.append((f"--kv {kv.name} --weights {four.name}", judge(request, case.layout, four, kv)))
    tries += [(str(each.case.layout), each) for each in answer.candidates if each.fits]
    for change, each in tries:
        if each.fits and each.memory.sequences(tokens) >= wanted:
            return f"{change} has room for {each.memory.sequences(tokens)}"
    return "shorter requests, or GPUs with more memory"


def _slo_hint(found: ServingCandidate) -> str:
    if found.performance is None:
        return ""
    return f"a concurrency of {found.performance.sequences:,.0f} meets it: {latencies(found)}"
