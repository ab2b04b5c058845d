"""torch's caching allocator, as rules: what a sequence of allocations makes it reserve from the driver.

Source: c10/cuda/CUDACachingAllocator.cpp with its default settings. Sizes are rounded up to 512 bytes. Those up to
1 MiB come from segments of 2 MiB; others below 10 MiB from segments of 20 MiB; larger ones have a segment of their own,
rounded up to 2 MiB. The smallest free block of the stream that is large enough is taken, and what is left of it stays
a free block (in the large pool if more than 1 MiB is left). A freed block joins its free neighbours. Segments stay
reserved; those that are wholly free go back only when the driver has no more.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from cordee.units import MiB

ROUND_BYTES = 512
SMALL_BYTES = MiB
SMALL_SEGMENT_BYTES = 2 * MiB
LARGE_SEGMENT_BYTES = 20 * MiB
MIN_OWN_SEGMENT_BYTES = 10 * MiB
ROUND_SEGMENT_BYTES = 2 * MiB


# The fewest segments with which a sequence goes through are found within this.
NEEDED_WITHIN_BYTES = 64 * MiB


class OutOfMemoryError(Exception):
    """The driver has no more, even after all free segments went back."""


@dataclass(slots=True)
class _Block:
    pool: tuple[bool, int]
    size_bytes: int
    address: int
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True)
class CachingAllocator:
    """Allocates and frees by number; counts what is allocated (rounded) and what is reserved.

    `limit_bytes` is what the driver has; None is no limit.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate(1, 3 * MiB), allocator.allocate(2, 3 * MiB), allocator.reserved_bytes == 20 * MiB
    (None, None, True)
    """

    limit_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    allocated_bytes_peak: int = 0
    reserved_bytes_peak: int = 0
    _held: dict[int, _Block] = field(default_factory=dict)
    _free: dict[tuple[bool, int], list[tuple[int, int]]] = field(default_factory=dict)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, number: int, size_bytes: int, stream: int = 0) -> None:
        """Allocate so many bytes under this number.

        Raises:
            OutOfMemoryError: the limit does not hold it.
        """
        size = max(ROUND_BYTES, -(-size_bytes // ROUND_BYTES) * ROUND_BYTES)
        pool = (size <= SMALL_BYTES, stream)
        block = self._take(pool, size) or self._reserve(pool, size)
        left = block.size_bytes - size
        if left >= ROUND_BYTES if pool[0] else left > SMALL_BYTES:
            rest = _Block(pool, left, block.address + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size_bytes = rest, size
            self._give(rest)
        self._held[number] = block
        self.allocated_bytes += block.size_bytes
        self.allocated_bytes_peak = max(self.allocated_bytes_peak, self.allocated_bytes)

    def free(self, number: int) -> None:
        """Free what was allocated under this number."""
        block = self._held.pop(number)
        self.allocated_bytes -= block.size_bytes
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._withdraw(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size_bytes += second.size_bytes
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._give(block)

    def _take(self, pool: tuple[bool, int], size: int) -> _Block | None:
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._blocks[free[at][1]]
        self._withdraw(block)
        return block

    def _reserve(self, pool: tuple[bool, int], size: int) -> _Block:
        if pool[0]:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_OWN_SEGMENT_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            self.return_segments()
            if self.reserved_bytes + segment > self.limit_bytes:
                raise OutOfMemoryError
        self.reserved_bytes += segment
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        self._next_address += segment
        return _Block(pool, segment, self._next_address - segment)

    def return_segments(self) -> int:
        """Give the segments back that are wholly free, as `torch.cuda.empty_cache` does; return their bytes."""
        whole = [block for block in self._blocks.values() if block.before is None and block.after is None]
        for block in whole:
            self._withdraw(block)
            self.reserved_bytes -= block.size_bytes
        return sum(block.size_bytes for block in whole)

    def _give(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free.setdefault(block.pool, []), (block.size_bytes, block.address))

    def _withdraw(self, block: _Block) -> None:
        block.free = False
        del self._blocks[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size_bytes, block.address))]


def needed_bytes(run: Callable[[int | None], CachingAllocator]) -> tuple[CachingAllocator, int]:
    """Return the allocator of a run without a limit, and the fewest bytes with which the run goes through.

    Where the driver has less, free segments go back to it before an allocation fails: the fewest are found by halving
    the difference to what is allocated.
    """
    free = run(None)
    low, high = free.allocated_bytes_peak, free.reserved_bytes_peak
    while high - low > NEEDED_WITHIN_BYTES:
        middle = (low + high) // 2
        try:
            run(middle)
        except OutOfMemoryError:
            low = middle
        else:
            high = middle
    return free, high
