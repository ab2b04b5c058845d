"""Changes of a running engine's settings that lower the price of its tokens, each with what the plan expects of it.

One change is one lever, by the engine's own names. Gains are those at the load that is measured: the same replica with
the same open requests, tokens a second after over before.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cordee.plan.serving.formats import KV, WEIGHTS, Format
from cordee.plan.serving.judge import SLOTS_MAX, ServingCandidate, judge
from cordee.plan.serving.levers.speculate import best_draft
from cordee.plan.serving.performance import mean_context, speed_of
from cordee.plan.serving.request import Traffic
from cordee.workload.service import Flag

DRAFT_TOKENS = 4
"""Drafted tokens where no plan says how many are best."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an engine's settings.

    Attributes:
        name: the change, for people.
        flags: settings over those of the service; False takes one out.
        lossless: greedy answers must stay as they are.
        gain: planned tokens a second after over before; None: it is not planned.
        refused: why it is not worth a try; "": it is.
    """

    name: str
    flags: Mapping[str, Flag]
    lossless: bool
    gain: float | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class TuningBase:
    """The replica that is tuned, and its load.

    Attributes:
        engine: its name.
        flags: settings that the service gives it, by their names in the engine's command.
        load: lengths of the requests, and how many are open at a time.
        slots, kv_tokens: as the engine reports them; None: it does not.
        plan: the plan of one replica; None: there is none.
        draft: a draft model; None: none was given.
        real_prompts: the load has prompts of users, so that guesses are as often right as for them.
    """

    engine: str
    flags: Mapping[str, Flag]
    load: Traffic
    slots: int | None = None
    kv_tokens: int | None = None
    plan: ServingCandidate | None = None
    draft: str | None = None
    real_prompts: bool = False

    @property
    def open_requests(self) -> int:
        """Requests that are open at a time."""
        return self.load.concurrency or 1


def changes(base: TuningBase) -> list[Change]:
    """Return the changes that this engine has, the largest planned gain first; those without a plan follow."""
    found = _ENGINES[base.engine](base) if base.engine in _ENGINES else ()
    return sorted(found, key=lambda each: (bool(each.refused), -(each.gain or 0.0)))


def _llama_cpp(base: TuningBase) -> Iterator[Change]:
    flags = base.flags
    if flags.get("--no-cache-prompt"):
        yield _prefix(base, {"--no-cache-prompt": False})
    for slots in _more_slots(base, base.slots):
        context = (base.kv_tokens or 0) // (base.slots or 1)
        sizes = {"--ctx-size": slots * context} if context else {}
        yield _slots(base, slots, {"--parallel": slots, **sizes})
    if "--spec-type" not in flags:
        yield _speculation(base, "n-gram look-up", lambda _: {"--spec-type": "ngram-simple"})
        if base.draft is not None:
            named = {"--spec-type": "draft-simple", "--model-draft": base.draft}
            yield _speculation(base, "draft model", lambda tokens: {**named, "--spec-draft-n-max": tokens}, free=False)
    if flags.get("--cache-type-k") == "f32":
        yield _format(base, KV["fp16"], {"--cache-type-k": "f16", "--cache-type-v": "f16"}, of_kv=True)
    if flags.get("--cache-type-k") not in ("q8_0", "q4_0"):
        # A quantised cache of values needs flash attention.
        attention: dict[str, Flag] = {"--flash-attn": "on"} if flags.get("--flash-attn") == "off" else {}
        yield _format(base, KV["q8_0"], {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", **attention}, of_kv=True)


def _vllm(base: TuningBase) -> Iterator[Change]:
    flags, case = base.flags, None if base.plan is None else base.plan.case
    if flags.get("--no-enable-prefix-caching"):
        yield _prefix(base, {"--no-enable-prefix-caching": False, "--enable-prefix-caching": True})
    if "--speculative-config" not in flags:

        def config(**keys: Flag) -> Callable[[int], dict[str, Flag]]:
            return lambda tokens: {"--speculative-config": json.dumps({**keys, "num_speculative_tokens": tokens})}

        yield _speculation(base, "n-gram look-up", config(method="ngram", prompt_lookup_max=4))
        if base.draft is not None:
            yield _speculation(base, "draft model", config(model=base.draft), free=False)
    slots = flags.get("--max-num-seqs") or (case.max_sequences if case else None)
    for number in _more_slots(base, None if slots is None else int(slots)):
        yield _slots(base, number, {"--max-num-seqs": number})
    chunk = flags.get("--max-num-batched-tokens") or (case.max_batched_tokens if case else None)
    for tokens in () if chunk is None else (int(chunk) // 2, int(chunk) * 2):
        yield Change(f"chunk of {tokens:,} tokens", {"--max-num-batched-tokens": tokens}, lossless=True)
    if not str(flags.get("--kv-cache-dtype", "")).startswith("fp8"):
        yield _format(base, KV["fp8"], {"--kv-cache-dtype": "fp8"}, of_kv=True)
    if "--quantization" not in flags and (case is None or case.weights.bits >= 16):
        yield _format(base, WEIGHTS["fp8"], {"--quantization": "fp8"}, of_kv=False)


def _transformers(base: TuningBase) -> Iterator[Change]:
    for slots in _more_slots(base, base.slots):
        yield Change(f"{slots} slots", {"--slots": slots}, lossless=True)


_ENGINES: Mapping[str, Callable[[TuningBase], Iterator[Change]]] = {
    "llama.cpp": _llama_cpp,
    "vllm": _vllm,
    "transformers": _transformers,
}


def _more_slots(base: TuningBase, slots: int | None) -> list[int]:
    """Return larger batches of which the load fills more than half."""
    found = [] if slots is None else [2 * slots, 4 * slots]
    return [each for each in found if each <= SLOTS_MAX and each < 2 * base.open_requests]


def _prefix(base: TuningBase, flags: Mapping[str, Flag]) -> Change:
    cached = base.load.cached_fraction
    without = None if base.plan is None else _requests_per_s(base, replace(base.load, cached_fraction=0.0))
    with_cache = None if base.plan is None else _requests_per_s(base, base.load)
    name = f"prefix cache, {cached:.0%} of prompts" if cached else "prefix cache"
    return _planned(name, flags, without, with_cache, lossless=True)


def _slots(base: TuningBase, slots: int, flags: Mapping[str, Flag]) -> Change:
    name = f"{slots} slots"
    if base.plan is None:
        return Change(name, flags, lossless=True)
    before, after = _requests_per_s(base, base.load), _requests_per_s(base, base.load, slots=slots)
    return _planned(name, flags, before, after, lossless=True)


def _format(base: TuningBase, form: Format, flags: Mapping[str, Flag], *, of_kv: bool) -> Change:
    name = f"{'KV cache' if of_kv else 'weights'} in {form.name}"
    if base.plan is None:
        return Change(name, flags, lossless=False)
    if form.name not in (base.plan.case.engine.kv if of_kv else base.plan.case.engine.weights):
        return Change(name, flags, lossless=False, refused="the plan's version of the engine has no such format")
    before = _requests_per_s(base, base.load)
    after = _requests_per_s(base, base.load, kv=form if of_kv else None, weights=None if of_kv else form)
    return _planned(name, flags, before, after, lossless=False)


def _speculation(
    base: TuningBase, name: str, flags: Callable[[int], Mapping[str, Flag]], *, free: bool = True
) -> Change:
    """Return a speculation with as many drafted tokens as the plan says are best at this load.

    `free`: a draft costs nothing; the gain of one that does is measured only.
    """
    tokens, gain = DRAFT_TOKENS, None
    if base.plan is not None:
        speed, context = speed_of(base.plan.case), mean_context(base.load)
        sequences = max(1, min(base.open_requests, base.plan.sequences))
        acceptance = base.plan.request.assumed.acceptance
        best = best_draft(lambda batch, each: speed.decode_s(batch, batch * context, each=each), sequences, acceptance)
        tokens, gain = best.draft_tokens or 1, best.gain if free else None
    made = Change(name, flags(tokens), lossless=True, gain=gain)
    if not base.real_prompts:
        return replace(made, refused="guesses are as often right as the prompts are real: give --prompts")
    return made if gain is None or gain > 1 else replace(made, refused="the plan expects no gain at this load")


def _requests_per_s(
    base: TuningBase,
    load: Traffic,
    *,
    slots: int | None = None,
    kv: Format | None = None,
    weights: Format | None = None,
) -> float | None:
    """Return the requests a second of the planned replica with one thing changed; None: it does not fit."""
    assert base.plan is not None, "only what is planned has a plan"
    request, case = replace(base.plan.request, traffic=load), base.plan.case
    if slots is not None:
        request = replace(request, limits=replace(request.limits, max_sequences=slots))
    found = judge(request, case.layout, weights or case.weights, kv or case.kv).performance
    return None if found is None else found.requests_per_s


def _planned(
    name: str, flags: Mapping[str, Flag], before: float | None, after: float | None, *, lossless: bool
) -> Change:
    made = Change(name, flags, lossless)
    if before is None:
        return made
    if after is None:
        return replace(made, refused="the plan says that it does not fit")
    gain = after / before
    return replace(made, gain=gain, refused="" if gain > 1 else "the plan expects no gain at this load")
