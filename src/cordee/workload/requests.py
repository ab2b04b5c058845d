"""A request to a service, and arrivals at random: what a trace of requests is made of. Readers: `request_files.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the length of its answer.

    Attributes:
        arrival_s: seconds since the trace began.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer, at least 1.
        blocks: the prompt's blocks of `block_tokens` as ids: two prompts that begin with the same ids share a prefix.
        block_tokens: tokens of one of these blocks.
        cached_tokens: tokens of the prompt whose KV is in the prefix cache in any case.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache at its end."""
        return self.input_tokens + self.output_tokens


def poisson(requests: int, per_s: float, lengths: Sequence[tuple[int, int]], *, seed: int) -> tuple[Request, ...]:
    """Return so many requests at a Poisson rate; input and output tokens are drawn from `lengths`.

    Args:
        requests: their number.
        per_s: requests a second, on average.
        lengths: pairs of input and output tokens, each as probable as the others.
        seed: of the generator of random numbers: the same seed gives the same requests.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / per_s, requests))
    drawn = random.integers(0, len(lengths), requests)
    return tuple(Request(float(arrival), *lengths[int(index)]) for arrival, index in zip(arrivals, drawn, strict=True))
