"""Prefill and decode on replicas of their own, against the same replicas doing both."""

from collections.abc import Iterator

from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.performance import replica_limits, speed_of
from cordee.plan.serving.queueing.batching import serve
from cordee.plan.serving.queueing.disaggregated import Replicas, serve_apart, transfer_s
from cordee.units import format_latency
from cordee.workload.requests import poisson

LOAD = 0.5
"""Latencies are compared at this fraction of the lower of both throughputs: at full load only queues differ."""
REPLICAS_PLAYED = 4
PLAYED = 200
SEED = 7


def apart_lever(base: ServingCandidate) -> Iterator[Lever]:
    """Yield the lever of replicas for prompts and replicas for answers; nothing for a replica alone.

    Throughput is that of the slower phase in the best division of the replicas. Latencies are played, with the transfer
    of each prompt's KV cache over the network, on at most `REPLICAS_PLAYED` replicas.
    """
    found, replicas = base.performance, base.replicas
    if found is None or replicas < 2:
        return
    prompts_per_s = found.rates.prefill_tokens_per_s / max(1.0, found.mix.computed_tokens)
    answers_per_s = found.rates.decode_tokens_per_s / found.mix.output_tokens
    played = min(replicas, REPLICAS_PLAYED)
    prefill, _ = _division(prompts_per_s, answers_per_s, replicas)
    few, few_per_s = _division(prompts_per_s, answers_per_s, played)
    _, per_s = _division(prompts_per_s, answers_per_s, replicas)
    case, traffic = base.case, base.request.traffic
    speed, limits, gpus = speed_of(case), replica_limits(base.memory, prefix_caching=False), case.layout.gpus
    rate = LOAD * min(few_per_s, found.requests_per_s * played / replicas)
    drawn = poisson(PLAYED * played, rate, [(traffic.computed_tokens, traffic.output_tokens)], seed=SEED)
    together = serve(drawn[::played], speed, limits)
    apart = serve_apart(
        drawn,
        Replicas(few, speed, limits),
        Replicas(played - few, speed, limits),
        lambda tokens: transfer_s(case.gpu, kv_bytes(case, tokens, base.memory.stage) * gpus, gpus),
    )
    latencies = [
        f"p99 {name} {format_latency(mine.p99)}, not {format_latency(its.p99)}"
        for name, mine, its in (("TTFT", apart.ttft, together.ttft), ("TPOT", apart.tpot, together.tpot))
    ]
    factor = per_s / found.requests_per_s
    change = f"{prefill} for prompts, {replicas - prefill} for answers"
    yield Lever("phases apart", change, factor, 1 / factor, f"at {LOAD:.0%} load {' and '.join(latencies)}")


def _division(prompts_per_s: float, answers_per_s: float, replicas: int) -> tuple[int, float]:
    """Return the replicas for prompts with the most requests a second, and these.

    >>> _division(prompts_per_s=30.0, answers_per_s=10.0, replicas=4)
    (1, 30.0)
    """
    rates = [min(count * prompts_per_s, (replicas - count) * answers_per_s) for count in range(1, replicas)]
    return rates.index(max(rates)) + 1, max(rates)
