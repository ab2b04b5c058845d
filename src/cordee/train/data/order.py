"""The order of samples: a function of the data's length, the global batch and a seed only.

It does not depend on ranks, keeps no array of the data's length, and reaches any position at the same cost.
`sampler.py` assigns the samples to ranks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cordee.errors import InputError

_ROUNDS = 16  # With 8, orders of 5 or 6 samples were not equally likely (chi-square over 40,000 keys); 16 pass.
# Of SplitMix64's last steps: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_BLOCK = 512  # samples; so many are permuted in twice the time of one

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An endless sequence of samples, epoch after epoch; a position is a number of samples from its beginning.

    With `drop_last` an epoch has whole global batches only, and leaves out the rest: other samples each time. Without
    it nothing is left out, and a global batch may begin in one epoch and end in the next.

    With a window the samples that lie together stay near each other: runs of `run` successive samples are permuted, and
    the samples of `window` runs at a time are. What does not fill a run comes with the last window of its epoch.
    """

    length: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    run: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.global_batch < 1 or self.seed < 0:
            raise InputError(
                f"{self.length} samples, global batches of {self.global_batch} and seed {self.seed} make no order",
                hint="samples and global batch are 1 or more, a seed 0 or more",
            )
        if self.run < 0 or self.window < 0 or bool(self.run) != bool(self.window):
            raise InputError(
                f"a window of {self.window} runs of {self.run} samples is none",
                hint="both are 1 or more; without a window the whole epoch is shuffled",
            )
        if self.drop_last and self.length < self.global_batch:
            raise InputError(
                f"{self.length} samples do not fill one global batch of {self.global_batch}",
                hint="drop_last=False takes the rest of a batch from the next epoch",
            )

    @property
    def epoch_samples(self) -> int:
        """The number of samples in one epoch."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def steps_before(self, epoch: int) -> int:
        """Return the number of global batches that begin before this epoch does.

        >>> [SampleOrder(length=10, global_batch=4, drop_last=drop).steps_before(2) for drop in (True, False)]
        [4, 5]
        """
        return -(-epoch * self.epoch_samples // self.global_batch)

    def samples(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the indices of `count` samples from this position on."""
        if count >= _BLOCK:
            return self._computed(position, count)
        first, last = position // _BLOCK, (position + count - 1) // _BLOCK
        found = np.concatenate([_block(self, number) for number in range(first, last + 1)])
        return found[position - first * _BLOCK :][:count]

    def _computed(self, position: int, count: int) -> NDArray[np.int64]:
        found = []
        while count > 0:
            epoch, at = divmod(position, self.epoch_samples)
            here = min(count, self.epoch_samples - at)
            indices = np.arange(at, at + here, dtype=np.uint64)
            found.append(self._shuffled(indices, epoch) if self.shuffle else indices)
            position, count = position + here, count - here
        return np.concatenate(found).astype(np.int64)

    def _shuffled(self, places: Numbers, epoch: int) -> Numbers:
        if not self.window:
            return permute(places, self.length, _keys(self.seed, epoch))
        size, moved = self.run * self.window, places.copy()
        for number in range(int(places[0]) // size, int(places[-1]) // size + 1):
            here, first = (places // np.uint64(size)) == number, number * size
            keys = _keys(self.seed, epoch, 1 + number)
            within = permute(places[here] - np.uint64(first), min(size, self.length - first), keys)
            moved[here] = within + np.uint64(first)
        runs, within_run = np.divmod(moved, np.uint64(self.run))
        whole = runs < self.length // self.run
        if whole.any():
            runs[whole] = permute(runs[whole], self.length // self.run, _keys(self.seed, epoch))
        return runs * np.uint64(self.run) + within_run


@lru_cache(maxsize=8)
def _block(order: SampleOrder, number: int) -> NDArray[np.int64]:
    return order._computed(number * _BLOCK, _BLOCK)


def permute(numbers: Numbers, length: int, keys: Numbers) -> Numbers:
    """Apply a permutation of 0 .. length - 1, chosen by the keys, to these numbers.

    A Feistel network on a grid of about sqrt(length) by sqrt(length) cells, which is a permutation whatever its rounds
    mix in; a number that lands on one of the few cells past the length goes through it again (cycle walking: Black and
    Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002).
    """
    width = np.uint64(math.isqrt(length - 1) + 1)
    height = np.uint64(-(-length // int(width)))
    moved = numbers.astype(np.uint64)
    going = np.arange(len(moved))
    while len(going):
        row, column = np.divmod(moved[going], width)
        for even, odd in keys.reshape(-1, 2):
            row = (row + _mix(column ^ even) % height) % height
            column = (column + _mix(row ^ odd) % width) % width
        moved[going] = row * width + column
        going = going[moved[going] >= length]
    return moved


def _mix(numbers: Numbers) -> Numbers:
    mixed: Numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=8)
def _keys(*entropy: int) -> Numbers:
    return np.random.SeedSequence(entropy).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
