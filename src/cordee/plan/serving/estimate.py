"""The part of a serving plan that travels with a replica: its cache, its latencies, the cost of a token."""

import math

from cordee.events import Estimate, TokenWeights
from cordee.plan.serving.ask import ServingAnswer
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.price.price import PhaseRates

_NS_PER_S = 1e9
_US_PER_S = 1e6


def whole_replica(answer: ServingAnswer) -> ServingCandidate | None:
    """Return one replica on all GPUs of the request; None if no layout of it fits them."""
    whole = (each for each in answer.candidates if each.fits and each.replicas == 1)
    return next((each for each in whole if each.case.layout.gpus == answer.request.gpus), None)


def replica_estimate(found: ServingCandidate) -> Estimate:
    """Return the estimate of a replica. Latencies are those of 99 of 100 requests at the load that was asked for."""
    keeps = found.keeps_slo and found.request.slo.limits
    memory, gpu, plays = found.memory, found.case.gpu, found.performance
    fixed_bytes = memory.weights_bytes + memory.activation_bytes + memory.graph_bytes + memory.context_bytes
    return Estimate(
        layout=found.name,
        peak_bytes=fixed_bytes + memory.communication_bytes + max(0, memory.kv_bytes),
        gpu_memory_bytes=gpu.visible_bytes,
        gpus=found.case.layout.gpus,
        kv_tokens=memory.kv_tokens,
        sequences=found.case.slots,
        within_slo=max(1, int(plays.sequences)) if plays is not None and keeps else None,
        ttft_us=None if plays is None else round(plays.ttft.p99 * _US_PER_S),
        tpot_us=None if plays is None else round(plays.tpot.p99 * _US_PER_S),
        token_weights=None if plays is None else token_weights(plays.rates),
    )


def token_weights(rates: PhaseRates) -> TokenWeights:
    """Return nanoseconds of a replica for a token of each kind.

    >>> token_weights(PhaseRates(20_000, 2_000))
    TokenWeights(input=50000, cached=0, output=500000)
    """
    speeds = (rates.prefill_tokens_per_s, rates.restore_tokens_per_s, rates.decode_tokens_per_s)
    computed, cached, output = (0 if math.isinf(speed) else round(_NS_PER_S / speed) for speed in speeds)
    return TokenWeights(input=computed, cached=cached, output=output)
