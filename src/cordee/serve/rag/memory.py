"""The partitions in memory: loaded, searched and given up by the decisions of `policy/retrieval.py`, within a limit.

The limit is on bytes of mapped files, counted here: a partition is whole in memory or not at all, since it is read
before it is mapped, and its pages are given back to the system when it leaves.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from math import inf

from cordee.serve.policy.retrieval import WaitingQuery, to_release
from cordee.serve.rag.catalog import Partition
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.partition import BLOCK_BYTES, MappedPartition, read_checked
from cordee.storage.sealed import Damaged
from cordee.units import format_bytes

AGAIN_S = 30.0
"""Time after which a damaged partition is looked at again: it may have been repaired."""
_RECENT = 0.3  # weight of the newest load in the average rate


class Throttle:
    """A limit of bytes a second: `take` waits as long as a store of that speed would need."""

    def __init__(self, bytes_per_s: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._bytes_per_s, self._sleep, self._free_s = bytes_per_s, sleep, 0.0
        self._lock = threading.Lock()

    def take(self, size: int, since_s: float) -> None:
        """Wait for so many bytes of a read that began at `since_s`; time that it spent otherwise is not lost to it."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            self._free_s = free_s = max(self._free_s, since_s) + size / self._bytes_per_s
        if (wait_s := free_s - time.monotonic()) > 1e-3:
            self._sleep(wait_s)


class Memory:
    """The partitions of one index in memory. Its owner holds a lock around all but `load`.

    Attributes:
        limit_bytes: of all partitions that are mapped or being loaded.
        partitions: those of the index, by id.
        mapped: those in memory.
        used_us: by id, when it was searched last.
        damaged: by id, why it cannot be loaded, and when that was found.
        in_use: the partition that is being searched.
        loading: the one that is being loaded.
        loads, load_bytes: counts since the start.
        bytes_per_s: of the last loads.
    """

    def __init__(self, index: RagIndex, limit_bytes: int, throttle: Throttle) -> None:
        self.limit_bytes = limit_bytes
        self.partitions: dict[int, Partition] = {}
        self.mapped: dict[int, MappedPartition] = {}
        self.used_us: dict[int, int] = {}
        self.damaged: dict[int, tuple[str, float]] = {}
        self.in_use: int | None = None
        self.loading: int | None = None
        self.loads = self.load_bytes = 0
        self.bytes_per_s: float | None = None
        self._index, self._throttle = index, throttle
        self.follow()

    def follow(self) -> None:
        """Take over the partitions as the catalogue has them now."""
        before, self.partitions = self.partitions, {each.id: each for each in self._index.catalog.partitions()}
        self.damaged = {id_: each for id_, each in self.damaged.items() if id_ in self.partitions}
        for id_, each in self.partitions.items():
            if each.size_bytes > self.limit_bytes:
                why = f"it has {format_bytes(each.size_bytes)}, and partitions have {format_bytes(self.limit_bytes)}"
                self.damaged[id_] = why, inf
        for id_ in [each for each in self.mapped if each not in self.partitions and each != self.in_use]:
            self._close(id_)
        for id_, mapped in self.mapped.items():
            now = self.partitions.get(id_)
            if now is not None and now.removed != before[id_].removed:
                mapped.leave_out(now)

    @property
    def sizes(self) -> dict[int, int]:
        """Return the bytes of each partition."""
        return {id_: each.size_bytes for id_, each in self.partitions.items()}

    @property
    def held_bytes(self) -> int:
        """Return the bytes of what is mapped or being loaded."""
        coming = self.partitions.get(self.loading) if self.loading is not None else None
        return sum(each.partition.size_bytes for each in self.mapped.values()) + (coming.size_bytes if coming else 0)

    def make_room(self, partition: int, waiting: Collection[WaitingQuery], pinned: Collection[int]) -> bool:
        """Give up what nobody wants until a partition fits; False: it does not fit now."""
        size = self.partitions[partition].size_bytes
        while self.held_bytes + size > self.limit_bytes:
            idle = {id_: self.used_us.get(id_, 0) for id_ in self.mapped if id_ != self.in_use}
            leaves = to_release(waiting, idle, pinned)
            if leaves is None:
                return False
            self._close(leaves)
        return True

    def load(self, partition: Partition) -> MappedPartition:
        """Read a partition, check it and map it; without the owner's lock.

        Raises:
            Damaged: it is missing or was altered.
        """
        began_s, path = time.monotonic(), self._index.path_of(partition)
        read_checked(path, partition, lambda size: self._throttle.take(size, began_s))
        try:
            mapped = MappedPartition(path, partition)
        except RuntimeError as error:  # faiss's own, of a file that vanished meanwhile.
            raise Damaged(f"faiss cannot map it: {error}") from error
        took_s = max(1e-6, time.monotonic() - began_s)
        if partition.size_bytes >= BLOCK_BYTES:
            rate = partition.size_bytes / took_s
            known = self.bytes_per_s
            self.bytes_per_s = rate if known is None else known + _RECENT * (rate - known)
        self.loads, self.load_bytes = self.loads + 1, self.load_bytes + partition.size_bytes
        return mapped

    def arrived(self, mapped: MappedPartition) -> None:
        """Count a loaded partition as in memory; one that the index no longer has is closed."""
        self.loading, id_ = None, mapped.partition.id
        now = self.partitions.get(id_)
        if now is None:
            mapped.close()
            return
        mapped.leave_out(now)
        self.mapped[id_] = mapped
        self.used_us[id_] = time.monotonic_ns() // 1000

    def failed(self, id_: int, why: str) -> None:
        """Count a partition as damaged."""
        self.loading = None
        if id_ in self.partitions:
            self.damaged[id_] = (why, time.monotonic())

    def forgive(self) -> None:
        """Let damaged partitions be tried again after a while."""
        now = time.monotonic()
        for id_ in [id_ for id_, (_, at) in self.damaged.items() if now - at > AGAIN_S]:
            del self.damaged[id_]

    def close(self, ids: Iterable[int] | None = None) -> None:
        """Give up these, or all."""
        for id_ in list(self.mapped if ids is None else ids):
            self._close(id_)

    def _close(self, id_: int) -> None:
        self.mapped.pop(id_).close()
        self.used_us.pop(id_, None)
