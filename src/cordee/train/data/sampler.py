"""Batches of the same global order for any number of ranks, and the place in it that a checkpoint has to hold.

`order.py` says which samples a global batch has; here each rank takes its share of it. A position counts what the loop
was given, and not what a data loader's workers have fetched ahead.
"""

import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Sampler, get_worker_info

from cordee.errors import CheckpointError, InputError, LayoutError
from cordee.train.data.order import SampleOrder

log = logging.getLogger("cordee")

T = TypeVar("T")
_SIZES_SAID = 12


class ElasticBatchSampler(Sampler[list[int]]):  # type: ignore[misc]
    """For `DataLoader(dataset, batch_sampler=...)`: the same samples in each step, however many ranks share them.

    Put it into the state of the job, and take the batches from `batches(loader)`: those are what is counted.

        sampler = cordee.ElasticBatchSampler(dataset, 48)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        with cordee.job({"model": model, "optimizer": optimizer, "data": sampler}) as job:
            batches = sampler.batches(loader)
            for step in job.steps(sampler.steps_in(epochs=3)):
                for _ in range(sampler.micro_batches):
                    ...next(batches)...
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        micro_batch_max: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        dp: DeviceMesh | tuple[int, int] | None = None,
    ) -> None:
        """One per rank, with the same arguments but `dp`.

        Args:
            dataset: what has a length; indices run from 0 to it.
            global_batch: samples of one step over all ranks and micro-batches.
            micro_batch_max: of one rank at once; as many micro-batches as needed are made, all of one size.
            seed: of the order, another one in each epoch.
            shuffle: without it the order is that of the dataset.
            drop_last: leave out what does not fill a global batch at an epoch's end; without it such a batch goes on in
                the next epoch.
            dp: this rank's place among those that read different data, as a mesh or as (rank, size). Without it every
                rank of torch.distributed reads different data, which is wrong where tp, pp or cp share a sample.

        Raises:
            LayoutError: the ranks do not divide the global batch.
        """
        self.order = SampleOrder(
            length=len(dataset), global_batch=global_batch, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self.dp_rank, self.dp_size = _place(dp)
        if global_batch % self.dp_size:
            raise LayoutError(
                f"a global batch of {global_batch} does not divide by {self.dp_size} data-parallel ranks",
                hint=f"sizes that do: {_divisors(global_batch, self.dp_size)}",
            )
        self.share = global_batch // self.dp_size
        most = min(self.share, micro_batch_max or self.share)
        if most < 1:
            raise InputError(f"micro-batches of at most {micro_batch_max} samples hold nothing")
        self.micro_batch = max(size for size in range(1, most + 1) if self.share % size == 0)
        self.micro_batches = self.share // self.micro_batch
        self._position = 0
        self._taken = 0  # micro-batches of the global batch at the position
        self._moved = object()  # another one whenever the position is set from outside
        self._read = self._counted = self._seeded = False
        self._from = 0  # micro-batches that were given when the position was set, or the job entered
        self._begun_ahead = 0  # of those given, how many were fetched ahead of the loop when it began
        self._began: int | None = None  # the step that the loop began with
        self._entered = self._told = False

    @property
    def position(self) -> int:
        """Samples of all ranks that the loop has trained on, in whole global batches."""
        return self._trained // self.micro_batches * self.order.global_batch

    @position.setter
    def position(self, samples: int) -> None:
        if samples < 0 or samples % self.order.global_batch:
            raise InputError(f"{samples} samples are not a number of global batches of {self.order.global_batch}")
        self._position, self._taken, self._moved, self._counted = samples, 0, object(), True
        self._begun_ahead, self._from, self._began = 0, self._given, None

    @property
    def _given(self) -> int:
        """Micro-batches that were handed out, from the beginning of the run."""
        return self._position // self.order.global_batch * self.micro_batches + self._taken

    @property
    def _ahead(self) -> int:
        """Of those given, how many are fetched ahead of the loop: within a job that has not begun, all since then."""
        return self._given - self._from if self._entered else self._begun_ahead

    @property
    def _trained(self) -> int:
        return self._given - self._ahead

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._position // self.order.epoch_samples

    def steps_in(self, epochs: int) -> int:
        """The steps until so many epochs are complete, from the beginning of the run."""
        return self.order.steps_before(epochs)

    def __len__(self) -> int:
        """Micro-batches of one rank in this epoch, from its beginning."""
        return (self.order.steps_before(self.epoch + 1) - self.order.steps_before(self.epoch)) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches from the position to the end of the epoch."""
        self._read = True
        for step in range(self._position // self.order.global_batch, self.order.steps_before(self.epoch + 1)):
            first = step * self.order.global_batch + self.dp_rank * self.share
            indices = self.order.samples(first, self.share).tolist()
            if self._seeded:
                indices = [Sample(index).at(self.order.seed, first + i) for i, index in enumerate(indices)]
            for at in range(0, self.share, self.micro_batch):
                yield indices[at : at + self.micro_batch]

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Batches of the loader without end, epoch after epoch, from the position on; each counts when it is given.

        The loader's own draws leave torch's generator alone, since a resumed run draws at other times.

        Raises:
            InputError: the loader does not read from this sampler.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise InputError(
                "these batches would not be in this sampler's order",
                hint="make the loader with batch_sampler= this sampler, and without sampler, shuffle and batch_size",
            )
        batches: Iterator[T] = self._batches(loader)
        return batches

    def _batches(self, loader: Iterable[T]) -> Iterator[T]:
        while True:
            moved = self._moved
            with _torch_generator_kept((self.order.seed, self.epoch, self.dp_rank)):
                given = iter(loader)
            for batch in given:
                if self._moved is not moved:
                    break  # Fetched for another place, before a checkpoint was loaded.
                self._counted = True
                self._taken += 1
                if self._taken == self.micro_batches:
                    self._position, self._taken = self._position + self.order.global_batch, 0
                yield batch

    def seeded(self, dataset: "Dataset[T]") -> "Dataset[T]":
        """The dataset, with Python's, numpy's and torch's random numbers seeded for each sample by its position.

        So what it draws does not depend on the rank, on the worker, or on where the run was resumed.
        """
        self._seeded = True
        return _Seeded(dataset)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order is made of. The same on every rank, and on any number of them."""
        return {**self._order_fields(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of the state.

        Raises:
            CheckpointError: the state is of another order.
        """
        mine = self._order_fields()
        if changed := [
            f"{name} was {state.get(name)} and is {mine[name]}" for name in mine if state.get(name) != mine[name]
        ]:
            raise CheckpointError(
                f"the data's order is another one: {', '.join(changed)}",
                hint="go on with what the run began with, or leave the sampler out of the state to begin a new order",
            )
        counted = self._counted
        self.position = state["position"]
        self._counted = counted

    def enter(self) -> None:
        """A job is entered, and may set the position next."""
        if self._began is None and self._given != self._from:  # else a job before this one has trained on them
            log.warning(
                "%d micro-batches were taken before the job was entered: one that is trained on later would be another"
                " one in a resumed run. Call sampler.batches(loader) within the job",
                self._given - self._from,
            )
        self._from, self._began, self._entered = self._given, None, True

    def begin(self, step: int) -> None:
        """The loop begins: what was taken within the job before its first step is fetched ahead, or only looked at.

        A resumed run does so again; so the position stays behind what was given by that much.
        """
        if self._entered:
            self._begun_ahead, self._began, self._entered = self._ahead, step, False  # `_from` stays: it is `_trained`

    def check(self, step: int | None = None) -> None:
        """Before a save of this step: is the position one to go on from?

        Raises:
            CheckpointError: nobody has counted, since the loader was read, but not through `batches`.
        """
        if self._read and not self._counted:
            raise CheckpointError(
                "batches were read from the loader itself, so that nobody knows how many the loop has trained on",
                hint="take them from sampler.batches(loader), or set sampler.position after each step",
            )
        if step is not None:
            self._check_ahead(step)
        if taken := self._trained % self.micro_batches:
            log.warning(
                "a checkpoint in the middle of a global batch (%d of %d micro-batches) goes back to its beginning: "
                "gradients that were added up are in no checkpoint. Let one step of the job be one global batch",
                taken,
                self.micro_batches,
            )

    def _check_ahead(self, step: int) -> None:
        """A loop that takes a global batch a step, or some number of them, has taken so many."""
        if self._began is None or self._told or step <= self._began:
            return
        steps, batches = step - self._began, (self._trained - self._from) // self.micro_batches
        if batches > steps and batches % steps:
            self._told = True
            log.warning(
                "%d global batches in %d steps: is something fetching ahead of the loop? A resumed run would skip that."
                " Then give sampler.batches() what fetches ahead, and not the other way round",
                batches,
                steps,
            )

    def _order_fields(self) -> dict[str, Any]:
        order = self.order
        return {
            "drop_last": order.drop_last,
            "global_batch": order.global_batch,
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }


class Sample(int):
    """An index that knows the seed of its place in the order."""

    seed: int

    def at(self, seed: int, position: int) -> "Sample":
        """With the seed of this position."""
        self.seed = int(np.random.SeedSequence((seed, 1, position)).generate_state(1, np.uint64)[0])
        return self


class _Seeded(Dataset[T]):  # type: ignore[misc]
    def __init__(self, dataset: "Dataset[T]") -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Sample) -> T:
        if get_worker_info() is not None:
            _seed_all(index.seed)
            sample: T = self.dataset[index]
            return sample
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # The loop's own, in its process.
        _seed_all(index.seed)
        try:
            sample = self.dataset[index]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        return sample


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def _torch_generator_kept(entropy: tuple[int, ...]) -> Iterator[None]:
    """A loader draws its workers' seed from torch's generator when it is asked for an iterator."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _place(dp: DeviceMesh | tuple[int, int] | None) -> tuple[int, int]:
    if isinstance(dp, DeviceMesh):
        coordinate = dp.get_coordinate()
        if coordinate is None:
            raise LayoutError("this rank is not in the mesh that was given as dp")
        rank = 0
        for at, size in zip(coordinate, dp.mesh.shape, strict=True):
            rank = rank * size + at
        return rank, dp.size()
    if dp is not None:
        rank, size = dp
        if not 0 <= rank < size:
            raise LayoutError(f"dp=({rank}, {size}) is no rank of {size}", hint="dp=(rank, size), the rank from 0")
        return rank, size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (world_size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise LayoutError(
            f"this is one of {world_size} ranks, and torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() first, or give dp=(rank, size)",
        )
    return 0, 1


def _divisors(number: int, near: int) -> str:
    found = {each for low in range(1, math.isqrt(number) + 1) if number % low == 0 for each in (low, number // low)}
    nearest = sorted(found, key=lambda each: (abs(each - near), each))[:_SIZES_SAID]
    return ", ".join(map(str, sorted(nearest)))
