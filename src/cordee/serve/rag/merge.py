"""The best chunks of a query over several partitions, from the best of each: exactly those of one search over all."""

import heapq
from collections.abc import Iterable


class BestChunks:
    """The `k` best chunks so far; among equal scores the lower id goes first."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._heap: list[tuple[float, int]] = []  # score and negative id, the worst first

    def add(self, scores: Iterable[float], ids: Iterable[int]) -> None:
        """Take the best chunks of one more partition; ids of -1 are none."""
        for score, id_ in zip(scores, ids, strict=True):
            if id_ < 0:
                continue
            each = (float(score), -int(id_))
            if len(self._heap) < self._k:
                heapq.heappush(self._heap, each)
            elif each > self._heap[0]:
                heapq.heapreplace(self._heap, each)

    def ranked(self) -> list[tuple[int, float]]:
        """Return ids and scores, the best first."""
        return [(-id_, score) for score, id_ in sorted(self._heap, reverse=True)]
