"""The difference of elements of two bytes, such as bf16 weights, as steps: how many representable values lie between.

A pattern of a floating-point number and its sign make an integer that grows with the number, so neighbours differ by
one. Steps of fine-tuned weights are few: most fit into half a byte, the others follow in full. How many steps an update
of one size takes follows from the base's exponent: where that says much, steps are in its order, so that those of one
exponent are compressed together. The base gives the order back.
"""

from collections.abc import Callable, Iterator

import numpy as np

from cordee.storage.sealed import Damaged

STEP_WIDTH = 2
# Elements at a time: their arrays stay in the cache of a core.
_AT_ONCE = 1 << 18
_SLICES = 8  # of steps in order, each compressed with a code of its own
_FULL = 15  # this half byte stands for a step that follows in full
_SAMPLE = 1 << 14
# Putting steps in order takes three times as long as all else: only for less than this of their bits.
_ORDER_WORTH = 0.6

Next = Callable[[int], np.ndarray]
"""Return the next plane of so many bytes."""


def step_parts(whole: np.ndarray, base: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the planes that `stepped` takes; both are bytes of as many elements."""
    new, old = whole.view(np.uint16), base.view(np.uint16)
    for at in range(0, new.size, _AT_ONCE):
        before = old[at : at + _AT_ONCE]
        steps = _rank(new[at : at + _AT_ONCE])
        steps -= _rank(before)
        signs = steps.view(np.int16) >> 15
        steps <<= 1
        steps ^= signs.view(np.uint16)  # 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
        short = np.minimum(steps, _FULL).astype(np.uint8)
        classes = _classes(before)
        in_order = _order_saves(short, classes)
        if in_order:
            order = np.argsort(classes, kind="stable")
            steps, short = steps[order], short[order]
        full = steps[short == _FULL]
        if short.size % 2:
            short = np.append(short, np.uint8(0))
        yield np.frombuffer(np.array([full.size << 1 | in_order], "<u4").tobytes(), np.uint8)
        yield from np.array_split(short[0::2] | (short[1::2] << 4), _SLICES if in_order else 1)
        yield full.astype(np.uint8)
        yield (full >> 8).astype(np.uint8)


def stepped(following: Next, base: np.ndarray) -> bytes:
    """Return the bytes of elements from the base's and their planes.

    Raises:
        Damaged: there are no such planes.
    """
    old = base.view(np.uint16)
    made = np.empty(old.size, np.uint16)
    for at in range(0, old.size, _AT_ONCE):
        before = old[at : at + _AT_ONCE]
        head = int(following(4).view("<u4")[0])
        if head >> 1 > before.size:
            raise Damaged(f"{head >> 1} steps in full, of {before.size}")
        slices = np.array_split(np.empty((before.size + 1) // 2, np.uint8), _SLICES if head & 1 else 1)
        pairs = np.concatenate([following(each.size) for each in slices])
        short = np.empty(2 * pairs.size, np.uint8)
        short[0::2] = pairs & 0xF
        short[1::2] = pairs >> 4
        short = short[: before.size]
        full = following(head >> 1).astype(np.uint16)
        full |= following(head >> 1).astype(np.uint16) << 8
        steps, where = short.astype(np.uint16), np.flatnonzero(short == _FULL)
        if where.size != full.size:
            raise Damaged(f"{full.size} steps in full, where {where.size} are missing")
        steps[where] = full
        if head & 1:
            order = np.argsort(_classes(before), kind="stable")
            placed = np.empty_like(steps)
            placed[order] = steps
            steps = placed
        signs = -(steps & 1).view(np.int16)
        steps >>= 1
        steps ^= signs.view(np.uint16)
        steps += _rank(before)
        made[at : at + _AT_ONCE] = _pattern(steps)
    return made.tobytes()


def _rank(pattern: np.ndarray) -> np.ndarray:
    """Return integers in the order of the numbers that have these patterns."""
    rank: np.ndarray = pattern ^ ((pattern.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))
    return rank


def _pattern(rank: np.ndarray) -> np.ndarray:
    """Return the patterns of these ranks."""
    pattern: np.ndarray = rank ^ (~(rank.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))
    return pattern


def _classes(base: np.ndarray) -> np.ndarray:
    """Return the exponents of bf16; of other elements the same bits, which say as much of their size."""
    return (base >> 7).astype(np.uint8)


def _order_saves(short: np.ndarray, classes: np.ndarray) -> bool:
    """Return whether steps in the order of the exponents take far fewer bits, by the entropies of a sample."""
    begin = max(0, (short.size - _SAMPLE) // 2)
    sample = slice(begin, begin + _SAMPLE)
    both = classes[sample].astype(np.intp) << 4 | short[sample]
    counts = np.bincount(both, minlength=256 << 4).reshape(256, 16)
    return _bits(counts) < _ORDER_WORTH * _bits(counts.sum(axis=0, keepdims=True))


def _bits(counts: np.ndarray) -> float:
    """Return the bits that an ideal code takes for rows of counted symbols, with a code for each row."""
    rows = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
    seen = counts > 0
    return float((counts[seen] * np.log2(rows[seen] / counts[seen])).sum())
