"""Batches of the same global order for any number of ranks, and the position in it that a checkpoint has to hold.

`order.py` says which samples a global batch has; here each rank takes its part of it. A position counts the samples
that the loop was given, and not those that a data loader's workers have fetched ahead.
"""

import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Sampler, get_worker_info

from cordee.errors import CheckpointError, InputError, LayoutError
from cordee.train.data.detours import Detours
from cordee.train.data.order import SampleOrder

log = logging.getLogger("cordee")

T = TypeVar("T")
_SIZES_LISTED = 12


class ElasticBatchSampler(Sampler[list[int]]):  # type: ignore[misc]
    """A batch sampler that gives the same samples to each step, on any number of ranks.

    Pass it to `DataLoader(dataset, batch_sampler=...)`, put it into the state of the job, and take the batches from
    `batches(loader)`, which counts them.

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
        window: tuple[int, int] | None = None,
        dp: DeviceMesh | tuple[int, int] | None = None,
    ) -> None:
        """Make the sampler of one rank; all ranks pass the same arguments but `dp`.

        Args:
            dataset: anything with a length; indices run from 0 to it.
            global_batch: samples of one step, over all ranks and micro-batches.
            micro_batch_max: most samples of one rank at once; all micro-batches have one size.
            seed: of the order, which differs in each epoch.
            shuffle: if False, the order is that of the dataset.
            drop_last: leave out what does not fill a global batch at an epoch's end; if False, such a batch is filled
                from the next epoch.
            window: samples of a run, and runs that are shuffled together, as `Samples.window` returns them; None: the
                whole epoch is shuffled.
            dp: this rank among those that read different data, as a mesh or as (rank, size). Without it every rank of
                torch.distributed reads different data, which is wrong where ranks of tp, pp or cp read the same.

        Raises:
            LayoutError: the ranks do not divide the global batch.
        """
        run, runs = window or (0, 0)
        self.order = SampleOrder(
            length=len(dataset),
            global_batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            run=run,
            window=runs,
        )
        self.dp_rank, self.dp_size = _place(dp)
        if global_batch % self.dp_size:
            raise LayoutError(
                f"a global batch of {global_batch} does not divide by {self.dp_size} data-parallel ranks",
                hint=f"sizes that do: {_divisors(global_batch, self.dp_size)}",
            )
        self.rank_batch = global_batch // self.dp_size
        most = min(self.rank_batch, micro_batch_max or self.rank_batch)
        if most < 1:
            raise InputError(f"micro-batches of at most {micro_batch_max} samples hold nothing")
        self.micro_batch = max(size for size in range(1, most + 1) if self.rank_batch % size == 0)
        self.micro_batches = self.rank_batch // self.micro_batch
        self._detours = Detours()
        self._position = 0
        self._taken = 0  # micro-batches of the global batch at the position
        self._moved = object()  # a new object whenever the position is set from outside
        self._read = self._counted = self._seeded = False
        self._ahead = _Ahead(self.micro_batches, dataset)

    @property
    def position(self) -> int:
        """The samples of all ranks that the loop has trained on, in whole global batches."""
        return self._trained // self.micro_batches * self.order.global_batch

    @position.setter
    def position(self, samples: int) -> None:
        if samples < 0 or samples % self.order.global_batch:
            raise InputError(f"{samples} samples are not a number of global batches of {self.order.global_batch}")
        self._position, self._taken, self._moved, self._counted = samples, 0, object(), True
        self._ahead.reset(self._given)

    @property
    def _given(self) -> int:
        """The micro-batches that were handed out, from the beginning of the run."""
        return self._position // self.order.global_batch * self.micro_batches + self._taken

    @property
    def _trained(self) -> int:
        return self._given - self._ahead.count(self._given)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._original(self._position // self.order.global_batch) // self.order.epoch_samples

    @property
    def detours(self) -> int:
        """The number of times that batches were left out, or put off, after a spike of the loss."""
        return len(self._detours)

    def _original(self, number: int) -> int:
        """Return the place of a global batch in the order without detours, in samples."""
        return self._detours.original(number) * self.order.global_batch

    def _end(self, epoch: int) -> int:
        """Return the number of global batches until the end of an epoch."""
        return self._detours.end(self.order.steps_before(epoch + 1))

    def detour(self, first: int, count: int, *, reorder: bool) -> None:
        """Leave out global batches from this number on, or put them off until the end of their epoch.

        Those that end their epoch cannot be put off, and are left out.

        Args:
            first: the number of the first one, not below the position.
            count: the number of global batches.
            reorder: put them off.
        """
        if reorder:
            end = self._end(self._original(first) // self.order.epoch_samples)
            if self._detours.put_off(first, min(count, max(0, end - first)), end):
                self.position = self._position
                return
        self._detours.leave_out(first, count)
        self.position = self._position

    @property
    def trained_epoch(self) -> int:
        """The epoch of the newest global batch that the loop was given."""
        return self._original(max(0, self._position // self.order.global_batch - 1)) // self.order.epoch_samples

    def steps_in(self, epochs: int) -> int:
        """Return the number of steps until this many epochs are complete, from the beginning of the run."""
        return self.order.steps_before(epochs)

    def __len__(self) -> int:
        """Return the number of micro-batches of one rank in this epoch, from its beginning."""
        return (self._end(self.epoch) - self._end(self.epoch - 1)) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from the position to the end of the epoch."""
        self._read = True
        rest = range(self._position // self.order.global_batch, self._end(self.epoch))
        self._ahead.fetch(self._given_in(rest))
        yield from self._given_in(rest)

    def _given_in(self, numbers: range) -> Iterator[list[int]]:
        for number in numbers:
            first = self._original(number) + self.dp_rank * self.rank_batch
            indices = self.order.samples(first, self.rank_batch).tolist()
            if self._seeded:
                indices = [Sample(index).at(self.order.seed, first + i) for i, index in enumerate(indices)]
            for at in range(0, self.rank_batch, self.micro_batch):
                yield indices[at : at + self.micro_batch]

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield batches of the loader from the position on, epoch after epoch without end, and count each.

        The loader's own draws leave torch's generator as it is, since a resumed run draws at other times.

        Raises:
            InputError: the loader does not read from this sampler.
        """
        if getattr(loader, "batch_sampler", self) is not self:
            raise InputError(
                "the loader does not read from this sampler",
                hint="make it with batch_sampler=sampler, and without sampler, shuffle and batch_size",
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
            self._ahead.check_read()

    def seeded(self, dataset: "Dataset[T]") -> "Dataset[T]":
        """Return the dataset with Python's, numpy's and torch's generators seeded for each sample by its position.

        So its random numbers do not depend on the rank, on the worker, or on where the run was resumed.
        """
        self._seeded = True
        return _Seeded(dataset)

    def state_dict(self) -> dict[str, object]:
        """Return the position, and the parameters of the order: the same on every rank, and on any number of them."""
        detours = {"detours": self._detours.saved()} if self._detours else {}
        return {**self._order_fields(), "position": self.position, **detours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the state.

        Raises:
            CheckpointError: the state is of another order.
        """
        mine = self._order_fields()
        names = [*mine, *(each for each in ("run", "window") if each in state and each not in mine)]
        if changed := [
            f"{name} was {state.get(name)} and is {mine.get(name)}"
            for name in names
            if state.get(name) != mine.get(name)
        ]:
            raise CheckpointError(
                f"the order of the data has changed: {', '.join(changed)}",
                hint="use the arguments that the run began with, or take the sampler out of the state: a new order",
            )
        counted = self._counted
        self._detours = Detours(state.get("detours", ()))
        self.position = state["position"]
        self._counted = counted

    def enter(self) -> None:
        """Note that a job is entered, which may set the position next."""
        self._ahead.enter(self._given)

    def begin(self, step: int) -> None:
        """Note that the loop begins with this step."""
        self._ahead.begin(step, self._given)

    def check(self, step: int | None = None) -> None:
        """Check before a save of this step that a run can go on from the position.

        Raises:
            CheckpointError: batches were read from the loader, and not through `batches`.
        """
        if self._read and not self._counted:
            raise CheckpointError(
                "batches were read from the loader itself, so it is not known how many the loop has trained on",
                hint="take them from sampler.batches(loader), or set sampler.position after each step",
            )
        if step is not None:
            self._ahead.check(step, self._given)
        if taken := self._trained % self.micro_batches:
            log.warning(
                "a checkpoint in the middle of a global batch (%d of %d micro-batches) goes back to its beginning: "
                "accumulated gradients are in no checkpoint. Make one step of the job one global batch",
                taken,
                self.micro_batches,
            )

    def _order_fields(self) -> dict[str, object]:
        given = {name: value for name, value in asdict(self.order).items() if value or name not in ("run", "window")}
        return dict(sorted(given.items()))


class _Ahead:
    """The micro-batches that were given, but fetched ahead of the loop.

    What is taken within the job before its first step is fetched ahead, or only looked at, and a resumed run takes it
    again; so the position stays behind what was given by that much.
    """

    def __init__(self, micro_batches: int, dataset: object) -> None:
        self._micro_batches = micro_batches
        self._fetch, self._check = getattr(dataset, "fetch_ahead", None), getattr(dataset, "check_read", None)
        self._from = 0  # micro-batches that were given when the position was set, or the job entered
        self._at_begin = 0  # of those given, how many were ahead of the loop when it began
        self._began: int | None = None  # the step that the loop began with
        self._entered = self._warned = False

    def fetch(self, batches: Iterator[list[int]]) -> None:
        """Let data of `cordee.data` be fetched in this order."""
        if self._fetch is not None:
            self._fetch(batches)

    def check_read(self) -> None:
        """Raise if data of `cordee.data` that were read in the epoch have turned out to be damaged."""
        if self._check is not None:
            self._check()

    def reset(self, given: int) -> None:
        self._at_begin, self._from, self._began = 0, given, None

    def count(self, given: int) -> int:
        """Return the number fetched ahead; before the loop of a job begins, all that were given in the job."""
        return given - self._from if self._entered else self._at_begin

    def enter(self, given: int) -> None:
        if self._began is None and given != self._from:  # else an earlier job has trained on them
            log.warning(
                "%d micro-batches were taken before the job was entered: a resumed run would not train on the same"
                " ones. Call sampler.batches(loader) within the job",
                given - self._from,
            )
        self._from, self._began, self._entered = given, None, True

    def begin(self, step: int, given: int) -> None:
        if self._entered:
            self._at_begin, self._began, self._entered = self.count(given), step, False  # `_from` stays as it is

    def check(self, step: int, given: int) -> None:
        """Warn if the loop has not taken a global batch, or some number of them, in each step."""
        if self._began is None or self._warned or step <= self._began:
            return
        steps = step - self._began
        batches = (given - self.count(given) - self._from) // self._micro_batches
        if batches > steps and batches % steps:
            self._warned = True
            log.warning(
                "%d global batches in %d steps: is something fetching ahead of the loop? A resumed run would skip what"
                " it fetched. Wrap sampler.batches() around it, and not the other way round",
                batches,
                steps,
            )


class Sample(int):
    """An index with the seed of its position in the order."""

    seed: int

    def at(self, seed: int, position: int) -> "Sample":
        """Set the seed of this position."""
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
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # of the loop, whose process this is
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
    """Keep torch's generator as it is, from which a loader draws its workers' seed when its iterator is made."""
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
            raise LayoutError("this rank is not in the mesh dp")
        rank = 0
        for at, size in zip(coordinate, dp.mesh.shape, strict=True):
            rank = rank * size + at
        return rank, dp.size()
    if dp is not None:
        rank, size = dp
        if not 0 <= rank < size:
            raise LayoutError(
                f"dp=({rank}, {size}): the rank must be from 0 to {size - 1}", hint="dp=(rank, size), the rank from 0"
            )
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
    nearest = sorted(found, key=lambda each: (abs(each - near), each))[:_SIZES_LISTED]
    return ", ".join(map(str, sorted(nearest)))
