"""Changes after which a model fits or meets its SLO: other formats, a shorter context, more or larger GPUs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from typing import TypeAlias

from cordee.errors import LayoutError
from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import near_gpus
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.judge import ServingCandidate, rank, under_traffic, unloaded
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT
from cordee.plan.serving.offered import smaller_kv, smaller_weights
from cordee.plan.serving.request import ServingRequest
from cordee.units import format_digits_usd

SHOWN = 4
PAIRS_SHOWN = 2
GPUS_TRIED = 3  # of each choice of GPUs
FEW_SEQUENCES = 64
LARGEST_FRACTION = 0.95
CONTEXTS = (32_768, 16_384, 8_192, 4_096, 2_048)

Change: TypeAlias = tuple[str, Callable[[ServingRequest], ServingRequest]]
"""What to write on the command line, and the request with it."""
Changed: TypeAlias = tuple[str, ServingRequest]


@dataclass(frozen=True)
class ServiceRemedy:
    """One change, and the layout that meets the SLO after it."""

    change: str
    candidate: ServingCandidate

    def __str__(self) -> str:
        found = self.candidate
        price = "" if found.usd_per_mtok is None else f", {format_digits_usd(found.usd_per_mtok)} a million tokens"
        return f"{self.change}: {found.replicas} x {found.name}{price}"


def remedies(request: ServingRequest) -> tuple[ServiceRemedy, ...]:
    """Return changes that help: each alone, or two together where none does, and then other GPUs or more of them."""
    alone = list(_changes(request))
    found = _working(((text, apply(request)) for text, apply in alone), SHOWN)
    found = found or _working(_pairs(request, alone), PAIRS_SHOWN)
    for choice in (_by_price(request), _of_this_number(request), _more(request)):
        texts = {each.change for each in found}
        found += _working((each for each in islice(choice, GPUS_TRIED) if each[0] not in texts), 1)
    return tuple(found)


def _working(changes: Iterable[Changed], most: int) -> list[ServiceRemedy]:
    """Return the first changes after which a layout meets the latencies."""
    tried = ((text, cheapest(changed)) for text, changed in changes)
    return list(islice((ServiceRemedy(text, best) for text, best in tried if best is not None), most))


def _pairs(request: ServingRequest, alone: Sequence[Change]) -> Iterator[Changed]:
    """Yield two changes together where a request alone then meets the latencies."""
    for (text, apply), (other_text, other) in combinations(alone, 2):
        if text.split()[0] != other_text.split()[0] and _can_meet(changed := other(apply(request))):
            yield f"{text} {other_text}", changed


def _can_meet(request: ServingRequest) -> bool:
    """Return whether some layout fits and meets the latencies for a request alone, which is quick to know."""
    try:
        return any(each.can_keep_slo for each in unloaded(request))
    except LayoutError:
        return False


def _fewest(request: ServingRequest, gpu: Gpu) -> ServingRequest | None:
    """Return the request on the fewest GPUs of this kind that hold the model, up to a node; None if they do not."""
    counts = [count for count in (1, 2, 4, 8) if count <= max(near_gpus(gpu), gpu.gpus_per_node)]
    asked = (replace(request, gpu=gpu, gpus=count) for count in counts)
    return next((each for each in asked if _can_meet(each)), None)


def _by_price(request: ServingRequest) -> Iterator[Changed]:
    """Yield the fewest GPUs of each other kind, the cheapest first; those without a price last."""
    fewest = [each for gpu in request.pricing.other_gpus if (each := _fewest(request, gpu)) is not None]

    def usd_per_hour(each: ServingRequest) -> tuple[float, int]:
        price = each.price
        return (float("inf") if price is None else price.usd_per_gpu_hour * each.gpus, each.gpu.memory_bytes)

    for each in sorted(fewest, key=usd_per_hour):
        yield f"--gpus {each.gpus}x{each.gpu.name}", each


def _of_this_number(request: ServingRequest) -> Iterator[Changed]:
    """Yield as many GPUs of other kinds, the smallest first."""
    for gpu in sorted(request.pricing.other_gpus, key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes > request.gpu.memory_bytes and _can_meet(changed := replace(request, gpu=gpu)):
            yield f"--gpus {request.gpus}x{gpu.name}", changed


def _more(request: ServingRequest) -> Iterator[Changed]:
    """Yield more GPUs of the same kind; for a MIG instance larger ones, and then whole GPUs."""
    whole = request.gpu.whole
    if whole is not None:
        for part, _ in whole.instances():
            if part.memory_bytes > request.gpu.memory_bytes and _can_meet(changed := replace(request, gpu=part)):
                yield f"--gpus {':'.join(part.name.rsplit(' ', 1))}", changed
        request = replace(request, gpu=whole)
        if _can_meet(request):
            yield f"--gpus 1x{whole.name}", request
    for factor in (2, 4, 8, 16, 32):
        if _can_meet(changed := replace(request, gpus=factor * request.gpus)):
            yield f"--gpus {changed.gpus}x{request.gpu.name}", changed


def cheapest(request: ServingRequest) -> ServingCandidate | None:
    """Return the first candidate of the ranking; None if it does not meet the SLO, or nothing divides.

    A layout in which a request alone misses them is left out before any traffic is played.
    """
    try:
        possible = [each for each in unloaded(request) if each.can_keep_slo]
    except LayoutError:
        return None
    best = min(map(under_traffic, possible), key=rank, default=None)
    return best if best is not None and best.keeps_slo else None


def _changes(request: ServingRequest) -> Iterator[Change]:
    """Yield single changes that keep the GPUs, the cheapest first."""
    engine = request.engine
    if request.layout != ANY_SERVING_LAYOUT:
        yield "without --layout", lambda asked: replace(asked, layout=ANY_SERVING_LAYOUT)
    case = request.case(ServingLayout(), request.weights[0], request.kv[0])
    if case.memory_fraction < LARGEST_FRACTION and engine.memory.covers == "all":
        yield f"--memory-fraction {LARGEST_FRACTION}", partial(_limited, memory_fraction=LARGEST_FRACTION)
    if case.max_sequences > FEW_SEQUENCES:
        # The trial run of the sampler takes memory for each of them.
        yield f"--max-sequences {FEW_SEQUENCES}", partial(_limited, max_sequences=FEW_SEQUENCES)
    for form in smaller_kv(engine, request.kv[0]):
        yield f"--kv {form.name}", partial(replace, kv=(form,))
    for form in smaller_weights(engine, request.gpu, request.weights[0]):
        yield f"--weights {form.name}", partial(replace, weights=(form,))
    asked, longest = request.limits.context_tokens, request.traffic.longest_tokens
    if asked is not None and asked < longest:
        yield f"--context {longest}", partial(_limited, context_tokens=longest)
    shorter = [tokens for tokens in CONTEXTS if longest <= tokens < (asked or 0)]
    for context in shorter[:1]:
        yield f"--context {context}", partial(_limited, context_tokens=context)


def _limited(request: ServingRequest, **limits: float) -> ServingRequest:
    return replace(request, limits=replace(request.limits, **limits))  # type: ignore[arg-type]
