"""The rules of torch's caching allocator, each on the smallest sequence that shows it."""

import random

import pytest

from cordee.plan.allocator import CachingAllocator, OutOfMemoryError
from cordee.units import MiB


def _after(*sizes: float, limit_mib: float | None = None) -> CachingAllocator:
    """Allocate sizes in MiB, each under its index; a negative one frees the index before it."""
    allocator = CachingAllocator(None if limit_mib is None else round(limit_mib * MiB))
    for index, size in enumerate(sizes):
        if size < 0:
            allocator.free(round(-size) - 1)
        else:
            allocator.allocate(index, round(size * MiB))
    return allocator


@pytest.mark.parametrize(
    ("sizes", "reserved_mib"),
    [
        ((0.1,), 2),
        ((1,), 2),
        ((1, 1), 2),
        ((1, 1, 1), 4),
        ((1.1,), 20),
        ((9, 9), 20),
        ((9, 9, 9), 40),
        ((10,), 10),
        ((11,), 12),
        ((64, 64), 128),
        ((64, -1, 30), 64),  # what is left of a block can be taken
        ((64, -1, 30, 33), 64),
        ((64, -1, 30, 35), 64 + 36),
        ((64, -1, 63.5, 0.4), 64 + 2),  # 0.5 MiB are not split off, and small ones have a pool of their own
        ((30, 30, -1, -2, 60), 120),  # segments do not join
        ((60, -1, 30, 30, -3, -4, 60), 60),  # blocks of one do
        ((8, 40, -1, -2, 12), 20 + 40),  # the smallest that is large enough
    ],
)
def test_what_is_reserved(sizes: tuple[float, ...], reserved_mib: float) -> None:
    assert _after(*sizes).reserved_bytes == reserved_mib * MiB


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 1)
    allocator.allocate(2, 513)
    assert allocator.allocated_bytes == 512 + 1024
    allocator.free(1)
    assert (allocator.allocated_bytes, allocator.allocated_bytes_peak) == (1024, 1536)


def test_streams_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 64 * MiB, stream=0)
    allocator.free(1)
    allocator.allocate(2, 64 * MiB, stream=7)
    assert allocator.reserved_bytes == 128 * MiB


def test_free_segments_go_back_before_an_allocation_fails() -> None:
    assert _after(64, -1, 80, limit_mib=100).reserved_bytes == 80 * MiB
    with pytest.raises(OutOfMemoryError):
        _after(64, 80, limit_mib=100)
    with pytest.raises(OutOfMemoryError):
        _after(64, -1, 30, 80, limit_mib=100)  # half of the segment is in use


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_given_twice(seed: int) -> None:
    rng, allocator, held = random.Random(seed), CachingAllocator(), {}
    for number in range(400):
        if held and rng.random() < 0.45:
            allocator.free(held.pop(rng.choice(sorted(held))))
            continue
        held[number] = number
        allocator.allocate(number, rng.choice((100, 5000, MiB, 3 * MiB, 15 * MiB, 70 * MiB)), rng.randrange(2))
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for number in held:
        allocator.free(number)
    assert allocator.allocated_bytes == 0
    # Every segment is whole again, so that all of them can go back.
    assert allocator.return_segments() == allocator.reserved_bytes_peak and allocator.reserved_bytes == 0
