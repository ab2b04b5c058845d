"""Changes after which a model fits or meets its SLO: other formats, a shorter context, more or larger GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cordee.errors import LayoutError
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.judge import ServingCandidate, rank, under_traffic, unloaded
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT
from cordee.plan.serving.request import ServingRequest
from cordee.units import format_digits_usd

SHOWN = 4
GPUS_TRIED = 3
FEW_SEQUENCES = 64
LARGEST_FRACTION = 0.95
CONTEXTS = (32_768, 16_384, 8_192, 4_096, 2_048)


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
    """Return changes that help, each alone, the first few."""
    found: list[ServiceRemedy] = []
    if request.traffic.longest_tokens > request.shape.positions:
        return ()  # No change lets an engine accept a request beyond the model's positions.
    for change, changed in _changes(request):
        more_gpus = change.startswith("--gpus") and any(each.change.startswith("--gpus") for each in found)
        best = None if more_gpus and len(found) > 1 else cheapest(changed)
        if best is not None:
            found.append(ServiceRemedy(change, best))
        if len(found) == SHOWN:
            break
    return tuple(found)


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


def _changes(request: ServingRequest) -> Iterator[tuple[str, ServingRequest]]:
    """Yield requests with one change each, the cheapest first."""
    if request.layout != ANY_SERVING_LAYOUT:
        yield "without --layout", replace(request, layout=ANY_SERVING_LAYOUT)
    case = request.case(ServingLayout(), request.weights[0], request.kv[0])
    if case.memory_fraction < LARGEST_FRACTION and case.engine.memory.covers == "all":
        yield f"--memory-fraction {LARGEST_FRACTION}", _limited(request, memory_fraction=LARGEST_FRACTION)
    if case.max_sequences > FEW_SEQUENCES:
        # The trial run of the sampler takes memory for each of them.
        yield f"--max-sequences {FEW_SEQUENCES}", _limited(request, max_sequences=FEW_SEQUENCES)
    if request.kv[0].name != "fp8":
        yield "--kv fp8", replace(request, kv=(KV["fp8"],))
    for name in ("fp8", "int8", "int4"):
        if WEIGHTS[name].bits < request.weights[0].bits and _computes(request, name):
            yield f"--weights {name}", replace(request, weights=(WEIGHTS[name],))
    asked, longest = request.limits.context_tokens, request.traffic.longest_tokens
    if asked is not None and asked < longest:
        yield f"--context {longest}", _limited(request, context_tokens=longest)
    shorter = [tokens for tokens in CONTEXTS if longest <= tokens < (asked or 0)]
    for context in shorter[:1]:
        yield f"--context {context}", _limited(request, context_tokens=context)
    larger = [gpu for gpu in request.pricing.other_gpus if gpu.memory_bytes > request.gpu.memory_bytes]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes)[:GPUS_TRIED]:
        yield f"--gpus {request.gpus}x{gpu.name}", replace(request, gpu=gpu)
    for factor in (2, 4, 8, 16, 32):
        yield f"--gpus {factor * request.gpus}x{request.gpu.name}", replace(request, gpus=factor * request.gpus)


def _limited(request: ServingRequest, **limits: float) -> ServingRequest:
    return replace(request, limits=replace(request.limits, **limits))  # type: ignore[arg-type]


def _computes(request: ServingRequest, name: str) -> bool:
    """Return whether the GPU has units for the products of this format."""
    return WEIGHTS[name].products in request.gpu.flop_per_s
