"""A synthetic trace of conversations with the published statistics of Mooncake's, which is not shipped here.

Aimed at (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl): 12,031 requests in 59 minutes, a mean of
12,035 tokens in and 343 out, timestamps in ticks of 3 s, one block that all prompts begin with, and of all prompt
blocks of 512 tokens that a least-recently-used cache finds 6.5 % with 1.5 M tokens, 16.9 % with 3.8 M, 21 % with 5.1 M,
33 % with 15.4 M, 35.5 % with 25.6 M and 36.6 % without a limit.

A session is a first prompt and follow-ups: each has the whole prompt before it, without its last part of a block, and
new tokens. Sessions begin before the trace does, as in a window cut out of a day.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from cordee.workload.requests import Request

BLOCK_TOKENS = 512
REQUESTS = 12_031
SPAN_S = 3_537.0
TICK_S = 3.0
FIRST_MEDIAN_TOKENS, FIRST_SIGMA = 4_570.0, 1.2
NEW_MEDIAN_TOKENS, NEW_SIGMA = 1_180.0, 1.6
FOLLOWS = 0.39
"""Probability that a request is followed by another one of its session."""
GAP_MEDIAN_S, GAP_SIGMA = 150.0, 1.25
OUTPUT_MEDIAN_TOKENS, OUTPUT_SIGMA = 198.0, 1.1
LONGEST_TOKENS = 123_000
WARM_S = 3_600.0


def conversations(*, seed: int = 0, requests: int = REQUESTS) -> tuple[Request, ...]:
    """Return a trace of so many requests at the published rate."""
    rng = np.random.default_rng(seed)
    span_s = SPAN_S * requests / REQUESTS
    # Twice as many as needed; the middle of them is cut out.
    sessions = int(2.4 * requests * (1 - FOLLOWS) * (WARM_S + span_s) / span_s)
    begins = rng.uniform(-WARM_S, span_s, sessions)
    drawn: list[tuple[float, int, int, int]] = []
    for session in range(sessions):
        at_s, tokens = float(begins[session]), 0
        while True:
            tokens += int(
                _lognormal(rng, NEW_MEDIAN_TOKENS, NEW_SIGMA)
                if tokens
                else 512 + _lognormal(rng, FIRST_MEDIAN_TOKENS, FIRST_SIGMA)
            )
            if tokens > LONGEST_TOKENS:
                break
            output = max(1, min(2_000, int(_lognormal(rng, OUTPUT_MEDIAN_TOKENS, OUTPUT_SIGMA))))
            drawn.append((at_s, session, tokens, output))
            if rng.random() >= FOLLOWS:
                break
            tokens += output
            at_s += 5.0 + _lognormal(rng, GAP_MEDIAN_S, GAP_SIGMA)
    inside = [each for each in drawn if 0 <= each[0] < span_s]
    keep = np.zeros(len(inside), dtype=bool)
    # Whole sessions are dropped until the number is met, so that the others keep their follow-ups.
    order = rng.permutation(sorted({each[1] for each in inside}))
    sizes: dict[int, list[int]] = {}
    for index, each in enumerate(inside):
        sizes.setdefault(each[1], []).append(index)
    left = requests
    for session in order:
        for index in sizes[int(session)][:left]:
            keep[index] = True
        left -= min(left, len(sizes[int(session)]))
        if not left:
            break
    chosen = sorted(each for index, each in enumerate(inside) if keep[index])
    return _with_blocks(chosen)


def _lognormal(rng: np.random.Generator, median: float, sigma: float) -> float:
    return float(median * np.exp(sigma * rng.standard_normal()))


def _with_blocks(chosen: Sequence[tuple[float, int, int, int]]) -> tuple[Request, ...]:
    known: dict[int, list[int]] = {}
    fresh = 1
    made = []
    for at_s, session, tokens, output in chosen:
        blocks = known.setdefault(session, [0])
        whole, last = divmod(tokens, BLOCK_TOKENS)
        while len(blocks) < whole:
            blocks.append(fresh)
            fresh += 1
        ids = tuple(blocks[:whole])
        if last:  # the rest of a prompt is no block that another one can share
            ids += (fresh,)
            fresh += 1
        made.append(Request(at_s // TICK_S * TICK_S, tokens, output, ids, BLOCK_TOKENS))
    return tuple(made)


def hit_rate(requests: Iterable[Request], blocks: int | None) -> float:
    """Return the fraction of all prompt blocks that one least-recently-used cache of so many blocks finds."""
    held: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for each in requests:
        total += len(each.blocks)
        matched = 0
        while matched < len(each.blocks) and each.blocks[matched] in held:
            matched += 1
        found += matched
        for block in reversed(each.blocks):
            held[block] = None
            held.move_to_end(block)
        while blocks is not None and len(held) > blocks:
            held.popitem(last=False)
    return found / total
