"""Contiguous against paged allocation of the KV cache, on the lengths of the requests to serve."""

import numpy as np

from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.memory.paging import Allocator, Contiguous, Paged, pool_use
from cordee.plan.serving.request import Traffic
from cordee.workload.requests import Request

PLAYED = 600
SEQUENCES = 64
"""The pool that is filled holds so many requests of mean length, or fewer if the replica's does."""
SEED = 7


def paged_lever(base: ServingCandidate, traffic: Traffic) -> Lever:
    """Return the fraction of the pool that blocks use, against runs of known length and runs of the longest."""
    requests = _lengths(traffic, base.case.max_context_tokens)
    longest, block = max(each.tokens for each in requests), base.case.engine.block_tokens
    mean = sum(each.tokens for each in requests) / len(requests)
    pool = max(longest + block, min(base.memory.kv_tokens, round(SEQUENCES * mean)))
    pools: tuple[Allocator, ...] = (
        Paged(pool, block), Contiguous(pool, "exact", longest), Contiguous(pool, "maximum", longest)
    )  # fmt: skip
    blocks, exact, reserved = (pool_use(requests, each, pool, 1.0).used for each in pools)
    source = "by the trace's lengths" if traffic.requests else "if lengths are exponential"
    crossover = f"uses {blocks:.0%} of the pool; runs of a known length {exact:.0%}, of the longest {reserved:.0%}"
    return Lever("KV cache", f"blocks of {block}, not runs", None, None, f"{crossover}, {source}")


def _lengths(traffic: Traffic, longest: int) -> list[Request]:
    """Return requests that all wait from the start: of the trace's lengths, else drawn with the traffic's means."""
    if traffic.requests:
        pairs = [(each.input_tokens, each.output_tokens) for each in traffic.requests[:PLAYED]]
    else:
        random = np.random.default_rng(SEED)
        drawn = random.exponential((traffic.input_tokens, traffic.output_tokens), (PLAYED, 2))
        pairs = [(max(1, round(given)), max(1, round(answer))) for given, answer in drawn.tolist()]
    return [Request(0.0, given, answer) for given, answer in pairs if given + answer <= longest] or [
        Request(0.0, traffic.input_tokens, traffic.output_tokens)
    ]
