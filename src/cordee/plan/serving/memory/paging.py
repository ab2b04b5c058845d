"""A cache pool under real request lengths: one run of tokens for each sequence against blocks anywhere in the pool.

A contiguous allocator must know or guess a length before it starts, and what is free lies in holes (PagedAttention,
arXiv:2309.06180, section 3.1). First come, first served; a sequence holds its memory while it decodes.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from cordee.workload.requests import Request

Reservation = Literal["maximum", "power of two", "exact"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A pool over one run. Means are over the time in which a request waited.

    Attributes:
        used: tokens of sequences over tokens of the pool.
        at_once: sequences that decode.
        waits: attempts to start that found no room; in `fragmented` of them enough was free, in holes too small.
        too_long: requests that the empty pool cannot hold.
    """

    used: float
    at_once: float
    waits: int
    fragmented: int
    too_long: int
    makespan_s: float


class Allocator(Protocol):
    """A pool: `allocate` returns a handle for `free`, or None where there is no room."""

    def reserve_tokens(self, tokens: int) -> int:
        """Return the tokens that a sequence of this length takes from the pool."""

    def allocate(self, tokens: int) -> int | None:
        """Take room for a sequence of this length."""

    def free(self, handle: int) -> None:
        """Give the room back."""

    @property
    def free_tokens(self) -> int:
        """Tokens that no sequence has, wherever they lie."""


class Contiguous:
    """First fit: each sequence takes one run of tokens from the first hole that is large enough."""

    def __init__(self, pool_tokens: int, reservation: Reservation, max_tokens: int) -> None:
        self.reservation = reservation
        self.max_tokens = max_tokens
        self.holes: list[tuple[int, int]] = [(0, pool_tokens)]
        self.sizes: dict[int, int] = {}

    @property
    def free_tokens(self) -> int:
        return sum(size for _, size in self.holes)

    def reserve_tokens(self, tokens: int) -> int:
        if self.reservation == "maximum":
            return max(tokens, self.max_tokens)
        return 1 << (tokens - 1).bit_length() if self.reservation == "power of two" else tokens

    def allocate(self, tokens: int) -> int | None:
        wanted = self.reserve_tokens(tokens)
        for index, (start, size) in enumerate(self.holes):
            if size >= wanted:
                self.holes[index : index + 1] = [(start + wanted, size - wanted)] if size > wanted else []
                self.sizes[start] = wanted
                return start
        return None

    def free(self, handle: int) -> None:
        end = handle + self.sizes[handle]
        start = handle
        del self.sizes[handle]
        index = next((i for i, (at, _) in enumerate(self.holes) if at > handle), len(self.holes))
        first = index
        if index and sum(self.holes[index - 1]) == start:
            first, start = index - 1, self.holes[index - 1][0]
        if index < len(self.holes) and self.holes[index][0] == end:
            end = sum(self.holes[index])
            index += 1
        self.holes[first:index] = [(start, end - start)]


class Paged:
    """Blocks anywhere: each sequence takes its length in whole blocks."""

    def __init__(self, pool_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.free_blocks = pool_tokens // block_tokens

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self.block_tokens

    def reserve_tokens(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_tokens) * self.block_tokens

    def allocate(self, tokens: int) -> int | None:
        blocks = math.ceil(tokens / self.block_tokens)
        if blocks > self.free_blocks:
            return None
        self.free_blocks -= blocks
        return blocks

    def free(self, handle: int) -> None:
        self.free_blocks += handle


def pool_use(
    requests: Iterable[Request], pool: Allocator, pool_tokens: int, decode_s: float, *, prefill_s: float = 0.0
) -> PoolUse:
    """Return how full the pool was, serving these requests at `decode_s` for each token of an answer.

    `prefill_s` is for each token of a prompt. A request that the empty pool cannot hold is left out.
    """
    run = _Run(pool, decode_s, prefill_s)
    too_long = 0
    for request in sorted(requests, key=lambda each: each.arrival_s):
        if pool.reserve_tokens(request.tokens) > pool_tokens:
            too_long += 1
            continue
        run.until(request.arrival_s)
        run.waiting.append(request)
        run.start()
    run.until(math.inf)
    waited_s = run.waited_s or 1.0
    used, at_once = run.token_seconds / waited_s / pool_tokens, run.sequence_seconds / waited_s
    return PoolUse(used, at_once, run.waits, run.fragmented, too_long, run.now_s)


class _Run:
    """The state of one simulation; integrals grow while a request waits."""

    def __init__(self, pool: Allocator, decode_s: float, prefill_s: float) -> None:
        self.pool = pool
        self.decode_s, self.prefill_s = decode_s, prefill_s
        self.now_s = self.waited_s = self.token_seconds = self.sequence_seconds = 0.0
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[float, int, int, int]] = []
        self.started = self.tokens = self.waits = self.fragmented = 0

    def until(self, time_s: float) -> None:
        """Let the sequences that end by then end, each in turn."""
        while self.running and self.running[0][0] <= time_s:
            end_s, _, handle, tokens = heapq.heappop(self.running)
            self._advance(end_s)
            self.tokens -= tokens
            self.pool.free(handle)
            self.start()
        if math.isfinite(time_s):
            self._advance(time_s)

    def _advance(self, time_s: float) -> None:
        if self.waiting:
            passed_s = time_s - self.now_s
            self.waited_s += passed_s
            self.token_seconds += passed_s * self.tokens
            self.sequence_seconds += passed_s * len(self.running)
        self.now_s = max(self.now_s, time_s)

    def start(self) -> None:
        """Start waiting requests in their order while there is room for the first."""
        while self.waiting:
            head = self.waiting[0]
            handle = self.pool.allocate(head.tokens)
            if handle is None:
                self.waits += 1
                self.fragmented += self.pool.free_tokens >= self.pool.reserve_tokens(head.tokens)
                return
            self.waiting.popleft()
            self.tokens += head.tokens
            self.started += 1
            busy_s = head.output_tokens * self.decode_s + head.input_tokens * self.prefill_s
            heapq.heappush(self.running, (self.now_s + busy_s, self.started, handle, head.tokens))
