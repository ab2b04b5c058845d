"""Why a replica does not start, and the single changes that would let it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.kv import kv_bytes
from cordee.plan.serving.memory import ServingMemory, memory
from cordee.units import GiB

LARGEST_FRACTION = 0.95
FEWEST_BATCHED_TOKENS = 512
LARGEST_TP = 8


@dataclass(frozen=True, slots=True)
class ServingRemedy:
    """One change with which the replica starts."""

    change: str
    memory: ServingMemory


def refusal(found: ServingMemory) -> str | None:
    """Return why the engine will not start, with the numbers; None if it starts."""
    if found.fits:
        return None
    case = found.case
    if not found.starts:
        return (
            f"no room for the KV cache: {found.weights_bytes / GiB:.2f} GiB of weights and "
            f"{found.activation_bytes / GiB:.2f} GiB of the trial run leave {found.kv_bytes / GiB:.2f} GiB"
        )
    one = kv_bytes(case, case.max_context_tokens, found.stage)
    return (
        f"a sequence of {case.max_context_tokens:,} tokens takes {one / GiB:.2f} GiB of KV cache, but "
        f"{found.kv_bytes / GiB:.2f} GiB are left: {found.longest_context_tokens:,} tokens"
    )


def remedies(case: ServingCase) -> tuple[ServingRemedy, ...]:
    """Return each single change with which one sequence of the longest context has room, the cheapest kinds first."""
    tried = ((change, memory(changed)) for change, changed in _changes(case))
    return tuple(ServingRemedy(change, found) for change, found in tried if found.fits)


def _changes(case: ServingCase) -> Iterator[tuple[str, ServingCase]]:
    context = memory(case).longest_context_tokens
    if 0 < context < case.max_context_tokens:
        yield f"a longest context of {context:,} tokens", replace(case, max_context_tokens=context)
    if case.memory_fraction < LARGEST_FRACTION:
        yield f"a memory fraction of {LARGEST_FRACTION}", replace(case, memory_fraction=LARGEST_FRACTION)
    yield from _first_fitting(case, "max_sequences", 1)
    if case.engine.chunked_prefill:
        yield from _first_fitting(case, "max_batched_tokens", FEWEST_BATCHED_TOKENS)
    if not case.eager and case.engine.memory.graphs == "before":
        yield "no CUDA graphs", replace(case, eager=True)
    if case.kv.bits >= 16:
        yield "an fp8 KV cache", replace(case, kv=KV["fp8"])
    for name in ("fp8", "int4"):
        if case.weights.bits > WEIGHTS[name].bits:
            yield f"{name} weights", replace(case, weights=WEIGHTS[name])
    tp = case.layout.tp * 2
    while tp <= LARGEST_TP and case.shape.heads % tp == 0:
        yield f"tp={tp}", replace(case, layout=replace(case.layout, tp=tp))
        tp *= 2


def _first_fitting(case: ServingCase, field: str, least: int) -> Iterator[tuple[str, ServingCase]]:
    """Yield the largest halving of a limit with which the replica starts."""
    limit: int = getattr(case, field)
    while limit > least:
        limit = max(least, limit // 2)
        changed = replace(case, **{field: limit})  # type: ignore[arg-type]
        if memory(changed).fits:
            yield f"{field.replace('_', ' ')} of {limit:,}", changed
            return
