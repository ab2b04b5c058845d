"""The KV pool of a replica: tokens of running requests, and blocks of prompts that stay for the next one.

Blocks that a running request uses are pinned; the others leave when room is needed, the least recently used first, and
of one prompt the last ones first, as in vLLM. A request wastes half of its last block on average.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """Tokens of KV, private to one request or shared by all whose prompts begin alike."""

    def __init__(self, tokens: float, *, block_tokens: int, caching: bool = False) -> None:
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.caching = caching
        self.private = 0.0
        self.shared_block_tokens = 0
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def waste(self) -> float:
        """Tokens of the last block that a request leaves empty, on average."""
        return (self.block_tokens - 1) / 2

    @property
    def free(self) -> float:
        """Tokens that a request can have; blocks that nobody uses count."""
        return self.tokens - self.private - (len(self._pins) - len(self._idle)) * self.shared_block_tokens

    def matched(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, are in the pool."""
        count = 0
        while count < len(blocks) and blocks[count] in self._pins:
            count += 1
        return count

    def take(self, tokens: float) -> None:
        """Make tokens private; idle blocks leave for them."""
        self.private += tokens
        self._shrink()

    def give(self, tokens: float) -> None:
        """Return private tokens."""
        self.private -= tokens

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep these shared blocks while a request uses them."""
        for block in blocks:
            self._idle.pop(block, None)
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let these blocks leave when room is needed."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            if not self._pins[block]:
                self._idle[block] = None
        self._shrink()

    def publish(self, blocks: Sequence[int], block_tokens: int) -> None:
        """Turn private tokens of a finished prompt into shared blocks, pinned for the request that made them."""
        self.shared_block_tokens = block_tokens
        self.private -= block_tokens * len(blocks)
        self.pin(blocks)
        self._shrink()

    def _shrink(self) -> None:
        room = self.tokens - self.private
        while self._idle and len(self._pins) * self.shared_block_tokens > room:
            del self._pins[self._idle.popitem(last=False)[0]]
