"""Reuse of prompts' blocks: the hit fraction of a prefix cache by its capacity, from requests' own block ids.

The stack distance of a block is the number of different blocks that were used since it was used last (Mattson et al.
1970): an LRU cache of C blocks has it if its distance is below C. One pass thus answers for all capacities.
"""

import bisect
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from cordee.errors import SpecError


@dataclass(frozen=True, slots=True)
class BlockReuse:
    """Distances and times between the uses of blocks.

    Attributes:
        block_tokens: tokens of a block.
        distances: blocks used between two uses of one, ascending, one for each reuse.
        gaps_s: seconds between the two uses, in the order of `distances`.
        uses: blocks asked for, reused or not.
        seconds: time from the first request to the last.
    """

    block_tokens: int
    distances: Sequence[int]
    gaps_s: Sequence[float]
    uses: int
    seconds: float

    def hits(self, capacity_tokens: float) -> int:
        """Return the blocks found in an LRU cache of so many tokens."""
        return bisect.bisect_left(self.distances, capacity_tokens // self.block_tokens)

    def hit_fraction(self, capacity_tokens: float) -> float:
        """Return the fraction of all blocks asked for that such a cache has."""
        return self.hits(capacity_tokens) / self.uses

    @property
    def hit_fraction_max(self) -> float:
        """The hit fraction of a cache that never evicts."""
        return len(self.distances) / self.uses

    def capacity_tokens(self, hit_fraction: float) -> int | None:
        """Return the smallest capacity with at least this hit fraction; None: no cache has it."""
        needed = -int(-hit_fraction * self.uses // 1)
        if needed > len(self.distances):
            return None
        return 0 if needed <= 0 else (self.distances[needed - 1] + 1) * self.block_tokens

    def hit_tokens_per_s(self, low_tokens: float, high_tokens: float) -> float:
        """Return tokens a second that a cache of `high_tokens` has and one of `low_tokens` lacks."""
        return (self.hits(high_tokens) - self.hits(low_tokens)) * self.block_tokens / max(self.seconds, 1e-9)


def block_reuse(requests: Iterable[tuple[float, Sequence[Hashable]]], block_tokens: int) -> BlockReuse:
    """Return the reuse of (arrival in seconds, ids of the prompt's blocks from its first on), in order of arrival.

    The blocks of a prompt count as used from its last to its first, as engines free them: a prefix then counts
    as used after what follows it, so that a hit never lacks the blocks before it.

    >>> reuse = block_reuse([(0, "ab"), (1, "cd"), (2, "abe")], block_tokens=16)
    >>> list(reuse.distances), reuse.hits(2 * 16), reuse.hits(3 * 16), reuse.hits(4 * 16)
    ([2, 3], 0, 1, 2)

    Raises:
        SpecError: no blocks.
    """
    ordered = [(float(arrival_s), list(dict.fromkeys(blocks))) for arrival_s, blocks in requests]
    uses = sum(len(blocks) for _, blocks in ordered)
    if not uses:
        raise SpecError("no request has blocks", hint="give requests with the ids of their prompts' blocks")
    marks = _Marks(uses)
    last: dict[Hashable, tuple[int, float]] = {}
    found: list[tuple[int, float]] = []
    clock = 0
    for arrival_s, blocks in ordered:
        for block in blocks:
            if block in last:
                position, used_s = last[block]
                found.append((len(last) - marks.up_to(position), arrival_s - used_s))
        for block in reversed(blocks):
            if block in last:
                marks.add(last[block][0], -1)
            clock += 1
            marks.add(clock, 1)
            last[block] = (clock, arrival_s)
    found.sort()
    seconds = ordered[-1][0] - ordered[0][0]
    distances, gaps_s = array("q", (each[0] for each in found)), array("d", (each[1] for each in found))
    return BlockReuse(block_tokens, distances, gaps_s, uses, seconds)


class _Marks:
    """Marks at positions from 1, counted up to a position in logarithmic time (Fenwick 1994)."""

    def __init__(self, size: int) -> None:
        self._sums = array("q", bytes(8 * (size + 1)))

    def add(self, position: int, count: int) -> None:
        while position < len(self._sums):
            self._sums[position] += count
            position += position & -position

    def up_to(self, position: int) -> int:
        total = 0
        while position:
            total += self._sums[position]
            position &= position - 1
        return total
