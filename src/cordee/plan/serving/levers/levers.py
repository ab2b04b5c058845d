"""The levers on the price of a token in one table: what each brings here, and its crossover.

Each is the same layout under full load with one thing changed, against the plan. A factor is tokens a second of a GPU
after over before; a lever that also changes the GPU is compared in dollars.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from cordee.errors import CatalogueError, LayoutError
from cordee.hardware.catalog import Gpu
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.curve import serving_curve
from cordee.plan.serving.formats import Format
from cordee.plan.serving.judge import ServingCandidate, judge, judge_all, rank, steady
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, ServingLayoutWanted, layouts
from cordee.plan.serving.levers.apart import apart_lever
from cordee.plan.serving.levers.draft import draft_cost
from cordee.plan.serving.levers.idle import idle_plan, leave_after_s, session_pauses_s
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.levers.offload import (
    KV_LEVELS,
    KvLevel,
    Offloading,
    best_levels,
    break_even_bytes_per_s,
    shortest_restore_tokens,
)
from cordee.plan.serving.levers.paged import paged_lever
from cordee.plan.serving.levers.phases import phase_costs, split_phases
from cordee.plan.serving.levers.quantise import borrowed_kernels, find_crossovers
from cordee.plan.serving.levers.renting import hours_lever
from cordee.plan.serving.levers.reuse import BlockReuse, block_reuse
from cordee.plan.serving.levers.speculate import (
    BATCHES,
    acceptance_needed,
    best_draft,
    no_draft_s,
    speculation_curve,
)
from cordee.plan.serving.levers.static import static_use
from cordee.plan.serving.memory.kv import kv_bytes, kv_bytes_per_token
from cordee.plan.serving.offered import smaller_kv, smaller_weights
from cordee.plan.serving.performance import mean_context, speed_of
from cordee.plan.serving.price.price import MTOK
from cordee.plan.serving.request import ServingRequest, Traffic
from cordee.plan.serving.speed.speculation import Speculation
from cordee.plan.serving.speed.throughput import saturated
from cordee.plan.serving.why import latencies
from cordee.units import format_bytes, format_duration, format_gb, format_latency, plural

GPUS_SHOWN = 3
ASSUMED = "assumed, not measured"


def levers(candidate: ServingCandidate) -> tuple[Lever, ...]:
    """Return the levers on this layout under full load."""
    base = _loaded(candidate.request, candidate)
    traced = [each for each in candidate.request.traffic.requests if each.blocks]
    reuse = None
    if traced:
        reuse = block_reuse(((each.arrival_s, each.blocks) for each in traced), traced[0].block_tokens)
    if base.performance is None:
        return ()
    found = _levers(base, reuse, candidate.request.traffic)
    return (*_priced(found, base.usd_per_mtok), *_priced(hours_lever(candidate), candidate.usd_per_mtok))


def _priced(found: Iterable[Lever], usd_per_mtok: float | None) -> Iterator[Lever]:
    """Yield levers with their dollars, where they do not have them yet: the price before them times their factor."""
    for each in found:
        if each.usd_per_mtok is not None or each.usd_factor is None or usd_per_mtok is None:
            yield each
        else:
            yield replace(each, usd_per_mtok=usd_per_mtok * each.usd_factor)


def _loaded(request: ServingRequest, like: ServingCandidate) -> ServingCandidate:
    """Return the candidate's layout and formats with as many requests as the latencies allow."""
    traffic = replace(request.traffic, rate_per_s=None, concurrency=None, requests=())
    return judge(replace(request, traffic=traffic), like.case.layout, like.case.weights, like.case.kv)


def _levers(base: ServingCandidate, reuse: BlockReuse | None, traffic: Traffic) -> Iterator[Lever]:
    request, case = base.request, base.case
    assert base.performance is not None, "under load"
    at_once = round(base.performance.sequences)
    knee = serving_curve(base).knee
    crossover = (
        "no knee yet" if knee is None else f"knee at {knee.sequences}: one more brings less than half of its best"
    )
    yield _lever(base, "batch", f"concurrency {at_once}, not 1", base, of=steady(base, 1), crossover=crossover)
    yield _dynamic(base, [each.output_tokens for each in traffic.requests])
    hits = request.assumed.prefix_fraction if reuse is None else min(0.99, reuse.hit_fraction(base.memory.kv_tokens))
    cached = _loaded(replace(request, traffic=replace(request.traffic, cached_fraction=hits)), base)
    crossover = (
        "pays from the first hit" if reuse is None else f"by the trace; {reuse.hit_fraction_max:.1%} if none is evicted"
    )
    yield _lever(base, "prefix cache", f"{hits:.0%} of prompts cached", cached, crossover=crossover)
    for form in smaller_weights(case.engine, case.gpu, case.weights):
        found = judge(base.request, case.layout, form, case.kv)
        yield _lever(base, "weights", form.name, found, crossover=_format_crossover(base, form))
    yield paged_lever(base, traffic)
    for form in smaller_kv(case.engine, case.kv)[:1]:
        found = judge(base.request, case.layout, case.weights, form)
        tokens = base.request.traffic.request_tokens
        crossover = f"room for {found.memory.sequences(tokens):,} requests, not {base.memory.sequences(tokens):,}"
        yield _lever(base, "KV cache", form.name, found, crossover=crossover)
    yield _speculation(base)
    yield from _parallel(base)
    yield from apart_lever(base)
    yield from _gpus(base)
    yield from _slices(base)
    yield _offload(base)
    yield _idle(base, reuse)
    yield from () if reuse is None else _levels(base, reuse)


def _lever(
    base: ServingCandidate,
    name: str,
    change: str,
    found: ServingCandidate,
    *,
    crossover: str,
    of: ServingCandidate | None = None,
) -> Lever:
    before = of or base
    if found.performance is None or before.performance is None:
        return Lever(name, change, None, None, "does not fit")
    mine, its = (each.performance.requests_per_s / each.gpus for each in (found, before) if each.performance)
    usd = None
    if found.usd_per_mtok is not None and before.usd_per_mtok is not None:
        usd = found.usd_per_mtok / before.usd_per_mtok
    return Lever(name, change, mine / its, usd, crossover, found.usd_per_mtok)


def _dynamic(base: ServingCandidate, lengths: Sequence[int]) -> Lever:
    """Return the lever of continuous batching against batches that wait for their longest answer."""
    assert base.performance is not None, "under load"
    at_once = max(1, round(base.performance.sequences))
    use = static_use(at_once, lengths)
    source = "by the trace's answers" if lengths else "for exponential answer lengths"
    crossover = f"static batches use {use:.0%} of their slots {source}; no gain for equal lengths"
    return Lever("dynamic batching", f"continuous, concurrency {at_once}", 1 / use, use, crossover, base.usd_per_mtok)


def _format_crossover(base: ServingCandidate, weights: Format) -> str:
    """Return the batches at which a format of the weights loses: as measured on this GPU, else by the step times."""
    request = base.request
    rows = find_crossovers(request.assumed.speedups, request.gpu.name, weights.name)
    named = [row for row in rows if request.engine.name in row.where] or list(rows)
    if named:
        row = named[-1]
        slower = f"slower {', '.join(map(str, row.losing))}" if row.losing else "never slower"
        borrowed = borrowed_kernels(request.assumed.speedups, request.gpu.name, request.engine.name, weights.name)
        return "; ".join(filter(None, (f"{slower} ({borrowed or f'products on {row.where}'})", row.remark)))
    plain, other = speed_of(base.case), speed_of(replace(base.case, weights=weights))
    context = mean_context(request.traffic)
    gains = [plain.decode_s(size, size * context) / other.decode_s(size, size * context) for size in BATCHES]
    slower_from = next((size for size, gain in zip(BATCHES, gains, strict=True) if gain < 1), None)
    end = f"slower from {slower_from}" if slower_from else f"{gains[-1]:.2f}x at {BATCHES[-1]:,}"
    return f"decoding {gains[0]:.2f}x as fast at batch 1, {end}"


def _speculation(base: ServingCandidate) -> Lever:
    """Return the lever of the request's draft model, or of a look-up in the prompt: the best draft at this batch."""
    speed, traffic, found = speed_of(base.case), base.request.traffic, base.performance
    acceptance, draft = base.request.assumed.acceptance, base.request.assumed.draft
    assert found is not None, "under load"
    plain_sequences, context = round(found.sequences), mean_context(traffic)
    sequences, draft_s, takes, by = plain_sequences, no_draft_s, "", ""

    def step_s(batch: int, each: int) -> float:
        return speed.decode_s(batch, batch * context, each=each)

    if draft is not None:
        cost, by = draft_cost(base.case, draft), f" by {draft.name}"
        draft_s = partial(cost.token_s, context_tokens=context)
        sequences = min(plain_sequences, cost.sequences(base.memory, traffic.request_tokens))
        takes = f"; it takes {format_gb(cost.weights_bytes)} of weights on each GPU"
        if not sequences:
            return Lever("speculation", f"draft{by}", None, None, f"does not fit{takes}")
        takes += f" and {format_latency(draft_s(sequences))} a token: {plural(sequences, 'request')} run"
    best = best_draft(step_s, sequences, acceptance, draft_s)
    drafted = Speculation(max(1, best.draft_tokens), acceptance, draft_s(sequences))
    rates = [
        saturated(speed, traffic.input_tokens, traffic.output_tokens, sequences=size, speculation=each)
        for each, size in ((None, plain_sequences), (drafted, sequences))
    ]
    factor = rates[1].output_tokens_per_s / rates[0].output_tokens_per_s
    change = f"draft of {drafted.draft_tokens}{by}, {acceptance:.0%} accepted"
    needed = acceptance_needed(step_s, sequences, drafted.draft_tokens, draft_s)
    least = f"pays from an acceptance rate of {needed:.0%}" if needed is not None else "slower even if all are accepted"
    crossover = f"{speculation_curve(step_s, acceptance, draft_s)}; at batch {sequences} {least}{takes}"
    return Lever("speculation", change, factor, 1 / factor, crossover)


def _parallel(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the next larger and smaller degree of tensor parallelism."""
    request, tp = base.request, base.case.layout.tp
    for degree in (tp * 2, tp // 2):
        wanted = ServingLayoutWanted(degree, base.case.layout.pp, base.case.layout.dp, base.case.layout.ep)
        try:
            (layout,) = layouts(request.shape, request.gpu, request.gpus, wanted, request.engine)
        except (LayoutError, ValueError):
            continue
        found = judge(request, layout, base.case.weights, base.case.kv)
        if found.performance is None or base.performance is None:
            yield Lever("parallelism", str(layout), None, None, "does not fit")
            continue
        speed, plain = speed_of(found.case), speed_of(base.case)
        context = mean_context(request.traffic)
        faster = plain.decode_s(1, context) / speed.decode_s(1, context)
        replicas = plural(found.replicas, "replica")
        yield _lever(
            base,
            "parallelism",
            f"{layout}, {replicas}",
            found,
            crossover=f"one request alone decodes {faster:.2f}x as fast",
        )


def _gpus(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the other GPUs on which a token costs least, and whether each phase wants its own.

    GPUs without measured kernels are ranked apart, after the measured ones: their assumed fractions of the roofline
    are no evidence against a measured GPU, so they take no part in the choice of a GPU for each phase either.
    """
    found = []
    pricing = base.request.pricing
    for gpu in (each for each in pricing.other_gpus if pricing.price(each) is not None):
        try:
            best = min(judge_all(replace(base.request, gpu=gpu, layout=ANY_SERVING_LAYOUT)), key=rank)
        except (LayoutError, CatalogueError):
            continue
        if best.keeps_slo and best.usd_per_mtok is not None:
            found.append(best)
    found.sort(key=lambda each: each.usd_per_mtok or 0.0)
    measured = [each for each in found if is_measured(each.case.gpu)]
    assumed = [each for each in found if not is_measured(each.case.gpu)]
    for each in (*measured[:GPUS_SHOWN], *assumed[:GPUS_SHOWN]):
        crossover = latencies(each) if is_measured(each.case.gpu) else f"{ASSUMED}; {latencies(each)}"
        yield _lever(base, "GPU", f"{each.case.gpu.name}, {each.case.layout}", each, crossover=crossover)
    if base.usd_per_mtok is not None and measured:
        yield _phases(base, measured)


def is_measured(gpu: Gpu) -> bool:
    """Return whether the planner has measured kernels of this GPU, or of another one with its chip."""
    return bool(gpu.kernels.grids)


def _phases(base: ServingCandidate, others: list[ServingCandidate]) -> Lever:
    """Return the lever of prompts and answers on GPUs of two kinds, without the price of the way between them."""
    every = {each.case.gpu.name: each for each in (*others, base)}
    rates = {name: each.performance.rates for name, each in every.items() if each.performance is not None}
    gpus = {name: each.case.layout.gpus for name, each in every.items()}
    hourly = {name: each.request.price.usd_per_gpu_hour for name, each in every.items() if each.request.price}
    assert base.performance is not None, "under load"
    mix, load = base.performance.mix, base.request.pricing.mean_load
    # Both ways without the hours in which GPUs wait.
    mixed = {name: (each.usd_per_mtok or math.inf) * load * mix.tokens / MTOK for name, each in every.items()}
    split = split_phases(phase_costs(rates, gpus, hourly), mix, mixed_usd=mixed)
    change = f"{split.together.gpu} for both"
    if split.pays:
        change = f"{split.prefill.gpu}, then {split.decode.gpu}"
    mark = "" if is_measured(base.case.gpu) else f"; {base.case.gpu.name} is {ASSUMED}"
    return Lever("GPU of a phase", change, None, split.usd / mixed[base.case.gpu.name], f"{split}{mark}")


def _slices(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the cheapest slice of this GPU, if the model fits one."""
    request, found = base.request, []
    for part, number in request.gpu.instances():
        price = request.price
        prices = (
            () if price is None else (replace(price, gpu=part.name, usd_per_gpu_hour=price.usd_per_gpu_hour / number),)
        )
        pricing = replace(request.pricing, prices=prices)
        # A slice keeps the grids of its GPU: parts of a roofline, so that both rest on one measurement.
        sliced = replace(
            request, gpu=part, gpus=number * request.gpus, pricing=pricing, layout=ServingLayoutWanted(tp=1, pp=1, dp=1)
        )
        best = min(judge_all(sliced), key=rank)
        if best.keeps_slo and best.performance is not None:
            found.append((best.performance.requests_per_s / request.gpus, number, best))
    if found:
        rate, number, best = max(found, key=lambda each: each[0])
        whole = base.performance.requests_per_s / base.gpus if base.performance else 1.0
        usd = None
        if best.usd_per_mtok is not None and base.usd_per_mtok is not None:
            usd = best.usd_per_mtok / base.usd_per_mtok
        yield Lever("MIG", f"{number} x {best.case.gpu.name}", rate / whole, usd, latencies(best))


def kv_levels(request: ServingRequest) -> tuple[KvLevel, ...]:
    """Return the levels for KV blocks, the host's memory at the bandwidth of the request."""
    host, *others = KV_LEVELS
    bytes_per_s = request.assumed.kv_bytes_per_s
    return KV_LEVELS if bytes_per_s is None else (replace(host, bytes_per_s=bytes_per_s), *others)


def sequence_gpus(layout: ServingLayout) -> int:
    """Return the GPUs that hold one sequence: a sequence lies on one data-parallel rank alone."""
    return layout.tp * layout.pp


def _offload(base: ServingCandidate) -> Lever:
    """Return the lever of a KV cache beyond the GPU: it pays where it is read faster than computed."""
    case, gpus, speed = base.case, sequence_gpus(base.case.layout), speed_of(base.case)
    chunk = case.max_batched_tokens

    def size(tokens: int) -> float:
        return float(kv_bytes(case, tokens, base.memory.stage) * gpus)

    def recompute_s(tokens: int) -> float:
        return sum(speed.prefill_s(min(chunk, tokens - past), past) for past in range(0, tokens, chunk))

    paying = []
    for level in kv_levels(base.request):  # each GPU has a link of its own
        linked = replace(level, bytes_per_s=level.bytes_per_s * gpus)
        shortest = shortest_restore_tokens(size, recompute_s, linked, case.max_context_tokens)
        if shortest is not None:
            paying.append(level.name if shortest == 1 else f"{level.name} from {shortest:,} tokens on")
    prompt = base.request.traffic.input_tokens
    needed = break_even_bytes_per_s(size(prompt), recompute_s(prompt))
    where = f"faster than computing: {', '.join(paying)}" if paying else "computing is faster than any level"
    return Lever("KV offload", f"{format_bytes(needed)}/s to break even", None, None, where)


def _idle(base: ServingCandidate, reuse: BlockReuse | None) -> Lever:
    """Return the pause after which a session that waits for its user should leave the GPU for the host's memory."""
    case, tokens = base.case, base.request.traffic.request_tokens
    size, pool, level = kv_bytes(case, tokens, base.memory.stage), base.memory.kv_bytes, kv_levels(base.request)[0]
    pauses_s = () if reuse is None else session_pauses_s(reuse)
    limit_s = leave_after_s(pool, size, level.restore_s(size))
    source = ""
    if pauses_s:
        limit_s, source = idle_plan(pauses_s, size / pool, level.restore_s(size)).limit_s, ", by the trace's pauses"
    if limit_s == math.inf:
        crossover = f"stays on the GPU{source}"
    else:
        crossover = f"moves to {level.name} {f'after {format_duration(limit_s)}' if limit_s else 'immediately'}{source}"
    return Lever("idle session", f"{tokens:,} tokens that wait", None, None, crossover)


def _levels(base: ServingCandidate, reuse: BlockReuse) -> Iterator[Lever]:
    """Yield the size of each level for KV blocks that saves most beyond its rent, by the reuse of a trace."""
    if base.performance is None or base.usd_per_hour is None:
        return
    prefix = base.request.traffic.input_tokens
    replica = Offloading(
        gpu_tokens=base.memory.kv_tokens,
        token_bytes=kv_bytes_per_token(base.case) * sequence_gpus(base.case.layout),
        prefix_tokens=prefix,
        recompute_s=prefix / base.performance.rates.prefill_tokens_per_s,
        usd_per_replica_hour=base.usd_per_hour / base.replicas,
    )
    plans = [plan for plan in best_levels(reuse, replica, kv_levels(base.request)) if plan.capacity_bytes]
    for plan in plans:
        yield Lever("KV offload", f"{plan.level.name}, by the trace", None, None, str(plan))
    if not plans:
        yield Lever(
            "KV offload", "by the trace", None, None, "no level saves more than its rent beyond the GPU's cache"
        )
