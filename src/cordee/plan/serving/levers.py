"""The levers on the price of a token in one table: what each brings here, and from which batch on it turns.

Each is the same layout under full load with one thing changed, against the plan. A factor is tokens a second of a GPU
after over before; a lever that also changes the GPU is compared in dollars.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cordee.errors import CatalogueError, LayoutError
from cordee.plan.serving.curve import serving_curve
from cordee.plan.serving.formats import KV, WEIGHTS, Format
from cordee.plan.serving.judge import ServingCandidate, judge, judge_all, mean_context, rank, steady
from cordee.plan.serving.kv import kv_bytes_per_token
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, ServingLayoutWanted, layouts
from cordee.plan.serving.request import ServingRequest
from cordee.plan.serving.speculation import Speculation
from cordee.plan.serving.speed import Speed
from cordee.plan.serving.throughput import saturated
from cordee.plan.serving.why import latencies
from cordee.units import format_bytes, plural

CACHED_FRACTION = 0.5
DRAFT = Speculation(draft_tokens=3, acceptance=0.7)
BATCH_MAX = 1024
GPUS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Lever:
    """One change: tokens a second of a GPU after over before, dollars after over before, and where it turns."""

    name: str
    change: str
    factor: float
    usd_factor: float | None
    turns: str


def levers(candidate: ServingCandidate) -> tuple[Lever, ...]:
    """Return the levers on this layout under full load."""
    base = _loaded(candidate.request, candidate)
    return tuple(_levers(base)) if base.performance is not None else ()


def _loaded(request: ServingRequest, like: ServingCandidate) -> ServingCandidate:
    """Return the candidate's layout and formats with as many requests as the latencies allow."""
    traffic = replace(request.traffic, rate_per_s=None, concurrency=None, requests=())
    return judge(replace(request, traffic=traffic), like.case.layout, like.case.weights, like.case.kv)


def _levers(base: ServingCandidate) -> Iterator[Lever]:
    request, case = base.request, base.case
    assert base.performance is not None, "under load"
    at_once = round(base.performance.sequences)
    knee = serving_curve(base).knee
    turns = "more always bring more than half" if knee is None else f"from {knee.sequences} on, one more brings half"
    yield _lever(base, "batch", f"{at_once} at once, not 1", base, of=steady(base, 1), turns=turns)
    traffic = replace(request.traffic, cached_fraction=CACHED_FRACTION)
    cached = _loaded(replace(request, traffic=traffic), base)
    yield _lever(
        base, "prefix cache", f"{CACHED_FRACTION:.0%} of prompts cached", cached, turns="pays from the first hit"
    )
    for name in ("fp8", "int4"):
        if name != case.weights.name and WEIGHTS[name].products in case.gpu.flop_per_s:
            found = judge(base.request, case.layout, WEIGHTS[name], case.kv)
            yield _lever(base, "weights", name, found, turns=_turn(base, _format_gain(base, WEIGHTS[name])))
    if case.kv.name != "fp8":
        found = judge(base.request, case.layout, case.weights, KV["fp8"])
        turns = f"room for {found.sequences:,} at once, not {base.sequences:,}"
        yield _lever(base, "KV cache", "fp8", found, turns=turns)
    yield _speculation(base)
    yield from _parallel(base)
    yield from _gpus(base)
    yield _offload(base)


def _lever(
    base: ServingCandidate,
    name: str,
    change: str,
    found: ServingCandidate,
    *,
    turns: str,
    of: ServingCandidate | None = None,
) -> Lever:
    before = of or base
    if found.performance is None or before.performance is None:
        return Lever(name, change, 0.0, None, "does not fit")
    mine, its = (each.performance.requests_per_s / each.gpus for each in (found, before) if each.performance)
    usd = None
    if found.usd_per_mtok is not None and before.usd_per_mtok is not None:
        usd = found.usd_per_mtok / before.usd_per_mtok
    return Lever(name, change, mine / its, usd, turns)


def _turn(base: ServingCandidate, gain: Callable[[int], float]) -> str:
    """Return the batches at which a change of decoding pays: where its gain crosses 1."""
    sizes = [2**bits for bits in range(BATCH_MAX.bit_length())]
    gains = [gain(size) for size in sizes]
    paying = [size for size, each in zip(sizes, gains, strict=True) if each > 1]
    if not paying:
        return f"decoding is slower at every batch up to {BATCH_MAX}"
    if len(paying) == len(sizes):
        return f"decoding {gains[0]:.2f} times as fast at 1, {gains[-1]:.2f} at {BATCH_MAX}"
    if paying[0] == 1:
        last = next(size for size in sizes if size not in paying)
        return f"decoding {gains[0]:.2f} times as fast at 1, slower from {last}"
    return f"decoding is faster from {paying[0]} on"


def _format_gain(base: ServingCandidate, weights: Format) -> Callable[[int], float]:
    plain, other = Speed(base.case), Speed(replace(base.case, weights=weights))
    context = mean_context(base.request.traffic)
    return lambda size: plain.decode_s(size, size * context) / other.decode_s(size, size * context)


def _speculation(base: ServingCandidate) -> Lever:
    """Return the lever of a draft that costs nothing (a look-up in the prompt)."""
    speed, context = Speed(base.case), mean_context(base.request.traffic)

    def gain(size: int) -> float:
        drafted = speed.decode_s(size, size * context, each=DRAFT.draft_tokens + 1)
        return DRAFT.tokens_per_step * speed.decode_s(size, size * context) / drafted

    traffic, found = base.request.traffic, base.performance
    assert found is not None, "under load"
    sequences = round(found.sequences)
    lengths = (traffic.input_tokens, traffic.output_tokens)
    rates = [
        saturated(speed, *lengths, sequences=sequences, speculation=each).output_tokens_per_s for each in (None, DRAFT)
    ]
    change = f"{DRAFT.draft_tokens} drafted, {DRAFT.acceptance:.0%} accepted"
    factor = rates[1] / rates[0]
    return Lever("speculation", change, factor, 1 / factor, _turn(base, gain))


def _parallel(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the next larger and smaller degree of tensor parallelism."""
    request, tp = base.request, base.case.layout.tp
    for degree in (tp * 2, tp // 2):
        wanted = ServingLayoutWanted(degree, base.case.layout.pp, base.case.layout.dp, base.case.layout.ep)
        try:
            (layout,) = layouts(request.shape, request.gpu, request.gpus, wanted)
        except (LayoutError, ValueError):
            continue
        found = judge(request, layout, base.case.weights, base.case.kv)
        if found.performance is None or base.performance is None:
            yield Lever("parallelism", str(layout), 0.0, None, "does not fit")
            continue
        speed, plain = Speed(found.case), Speed(base.case)
        context = mean_context(request.traffic)
        faster = plain.decode_s(1, context) / speed.decode_s(1, context)
        replicas = plural(found.replicas, "replica")
        yield _lever(base, "parallelism", f"{layout}, {replicas}", found, turns=f"one user {faster:.2f} times as fast")


def _gpus(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the other GPUs on which a token costs least, as many as here, each in its best layout."""
    found: list[tuple[float, Lever]] = []
    for gpu in base.request.pricing.other_gpus:
        request = replace(base.request, gpu=gpu, layout=ANY_SERVING_LAYOUT)
        if request.price is None:
            continue
        try:
            best = min(judge_all(request), key=rank)
        except (LayoutError, CatalogueError):
            continue
        if best.performance is None or best.usd_per_mtok is None or not best.keeps_slo:
            continue
        lever = _lever(base, "GPU", f"{gpu.name}, {best.case.layout}", best, turns=f"{latencies(best)}")
        found.append((best.usd_per_mtok, lever))
    yield from (lever for _, lever in sorted(found, key=lambda pair: pair[0])[:GPUS_SHOWN])


def _offload(base: ServingCandidate) -> Lever:
    """Return the lever of a KV cache on the host: it pays where it is read faster than computed."""
    assert base.performance is not None, "under load"
    per_token = kv_bytes_per_token(base.case) * base.case.layout.gpus
    bytes_per_s = per_token * base.performance.rates.prefill_tokens_per_s
    return Lever(
        "KV offload", f"{format_bytes(per_token)} a token", 1.0, None,
        f"pays if restored faster than {format_bytes(bytes_per_s)}/s",
    )  # fmt: skip
