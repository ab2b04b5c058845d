"""The order of samples: the same on any number of ranks, from any step, and counted by what the loop was given."""

import logging
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from cordee import ElasticBatchSampler
from cordee.errors import CheckpointError, InputError, LayoutError
from cordee.train.checkpoint import rank_state
from cordee.train.data.order import SampleOrder


class Numbers(Dataset):
    """Sample i is the number i, and what four generators say beside it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return int(index), random.random(), float(np.random.rand()), torch.rand(1).item()


def in_order(length: int, global_batch: int, size: int, steps: int, start: int = 0, **options) -> list[int]:
    """What all ranks of one size are given in these steps, put together as one line of samples."""
    line: list[list[int]] = [[] for _ in range(steps * size)]
    for rank in range(size):
        sampler = ElasticBatchSampler(range(length), global_batch, dp=(rank, size), **options)
        sampler.position = start * global_batch
        batches = sampler.batches(Loader(sampler))
        for step in range(steps):
            for _ in range(sampler.micro_batches):
                line[step * size + rank] += next(batches)
            assert sampler.position == (start + step + 1) * global_batch
    return [index for part in line for index in part]


class Loader:
    """What a DataLoader is to a sampler, without a dataset."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self.batch_sampler = sampler

    def __iter__(self):
        return iter(self.batch_sampler)


@given(
    length=st.integers(1, 200),
    batch=st.sampled_from([1, 2, 6, 12, 48]),
    seed=st.integers(0, 2**40),
    drop=st.booleans(),
    shuffle=st.booleans(),
)
def test_an_epoch_has_each_sample_once_and_any_place_is_reached_at_once(length, batch, seed, drop, shuffle) -> None:
    if drop and length < batch:
        with pytest.raises(InputError, match=f"{length} samples do not fill one global batch of {batch}"):
            SampleOrder(length=length, global_batch=batch, drop_last=drop)
        return
    order = SampleOrder(length=length, global_batch=batch, seed=seed, drop_last=drop, shuffle=shuffle)
    three = order.samples(0, 3 * order.epoch_samples).tolist()
    for epoch in range(3):
        samples = three[epoch * order.epoch_samples : (epoch + 1) * order.epoch_samples]
        assert len(set(samples)) == len(samples) and set(samples) <= set(range(length))
        assert drop or set(samples) == set(range(length))
        assert shuffle or samples == sorted(samples)
    for position in (0, 1, order.epoch_samples - 1, order.epoch_samples, len(three) - 1):
        assert order.samples(position, len(three) - position).tolist() == three[position:]


@pytest.mark.parametrize("drop_last", [True, False])
def test_all_numbers_of_ranks_see_one_line_of_samples(drop_last: bool) -> None:
    whole = in_order(50, 12, 1, steps=13, drop_last=drop_last)  # three epochs and a bit
    assert len(set(whole[:48])) == 48
    for size in (1, 2, 3, 4, 6, 12):
        assert in_order(50, 12, size, steps=13, drop_last=drop_last) == whole
        assert in_order(50, 12, size, steps=4, start=9, drop_last=drop_last, micro_batch_max=2) == whole[108:]
    if not drop_last:
        assert sorted(whole[:50]) == list(range(50)), "the fifth batch ends in the second epoch; nothing is left out"


def test_the_order_is_what_it_was() -> None:
    """A resumed run may have a newer Cordee: these numbers must never change."""
    small, large = (
        SampleOrder(length=1000, global_batch=8, seed=7),
        SampleOrder(length=10**12, global_batch=8, seed=2**40),
    )
    assert small.samples(0, 8).tolist() == [682, 186, 793, 138, 754, 316, 499, 369]
    assert small.samples(5 * 1000, 4).tolist() == [930, 386, 668, 401]
    assert large.samples(10**15, 3).tolist() == [293022167506, 764296955952, 708386402296]


def test_all_orders_are_about_equally_likely() -> None:
    """Chi-square of the first two samples of 6, 4,000 epochs; 29 degrees of freedom exceed 58 once in 1,000."""
    counts = np.zeros((6, 6))
    for seed in range(50):
        epochs = SampleOrder(length=6, global_batch=1, seed=seed).samples(0, 6 * 80).reshape(80, 6)
        np.add.at(counts, (epochs[:, 0], epochs[:, 1]), 1)
    expected = 4_000 / 30
    assert ((counts[~np.eye(6, dtype=bool)] - expected) ** 2 / expected).sum() < 58
    assert np.diagonal(counts).sum() == 0


def test_a_long_order_has_no_trend() -> None:
    order = SampleOrder(length=100_003, global_batch=1, seed=1, drop_last=False)
    first, second = order.samples(0, 100_003), order.samples(100_003, 100_003)
    bound = 5 / math.sqrt(100_003)  # five standard deviations of a correlation of independent numbers
    for one, other in ((first[:-1], first[1:]), (first, np.arange(100_003)), (first, second)):
        assert abs(np.corrcoef(one, other)[0, 1]) < bound


def test_sizes_that_do_not_divide_are_told_with_those_that_do() -> None:
    with pytest.raises(LayoutError, match="48 does not divide by 5 data-parallel ranks") as told:
        ElasticBatchSampler(range(100), 48, dp=(0, 5))
    assert told.value.hint == "sizes that do: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"
    with pytest.raises(LayoutError, match=r"dp=\(4, 4\): the rank must be from 0 to 3"):
        ElasticBatchSampler(range(100), 48, dp=(4, 4))
    with pytest.raises(InputError, match="7 samples are not a number of global batches of 48"):
        ElasticBatchSampler(range(100), 48).position = 7
    with pytest.raises(InputError, match="global batches of 0"):
        ElasticBatchSampler(range(100), 0)


def test_micro_batches_are_as_large_as_allowed_and_all_alike() -> None:
    made = {size: ElasticBatchSampler(range(100), 48, micro_batch_max=5, dp=(0, size)) for size in (1, 2, 3, 4, 16, 48)}
    assert {size: (one.micro_batches, one.micro_batch) for size, one in made.items()} == {
        1: (12, 4), 2: (6, 4), 3: (4, 4), 4: (3, 4), 16: (1, 3), 48: (1, 1),
    }  # fmt: skip
    assert len(made[1]) == 24 and made[1].steps_in(3) == 6


def test_ranks_that_nobody_has_told_about_each_other_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LayoutError, match=r"one of 4 ranks, and torch\.distributed is not initialised"):
        ElasticBatchSampler(range(100), 48)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True])
def test_the_position_is_what_the_loop_was_given_not_what_workers_fetched(workers: int, stateful: bool) -> None:
    make = DataLoader
    if stateful:
        make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loaded(position: dict | None, steps: int) -> tuple[list[list[float]], dict]:
        sampler = ElasticBatchSampler(range(20), 6, seed=3, micro_batch_max=3)
        data = sampler.seeded(Numbers(20))
        loader = make(data, batch_sampler=sampler, num_workers=workers)
        if position:
            sampler.load_state_dict(position)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        batches = sampler.batches(loader)
        rows = []
        for _ in range(steps):
            for _ in range(sampler.micro_batches):
                rows += torch.stack([column.double() for column in next(batches)], 1).tolist()
        assert torch.equal(torch.get_rng_state(), before), "the loop's generator was drawn from"
        sampler.check()
        return rows, sampler.state_dict()

    whole, end = loaded(None, 7)
    assert end["position"] == 42
    assert len({tuple(row) for row in whole}) == 42, "a sample draws other numbers in another epoch"
    first, state = loaded(None, 2)  # in the middle of the first epoch, with four batches fetched ahead
    assert state["position"] == 12
    second, state = loaded(state, 1)  # to the end of the epoch
    third, state = loaded(state, 4)
    assert first + second + third == whole, "samples, and what they draw, differ after a resume"
    assert state == end


def test_a_checkpoint_within_a_global_batch_goes_back_to_its_beginning(caplog) -> None:
    sampler = ElasticBatchSampler(range(20), 6, micro_batch_max=2)
    batches = sampler.batches(Loader(sampler))
    first = [next(batches) for _ in range(3)]
    again = [next(batches) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "cordee"):
        rank_state.capture({"data": sampler})
    assert "middle of a global batch (2 of 3 micro-batches)" in caplog.text
    other = ElasticBatchSampler(range(20), 6, dp=(0, 1))
    other.load_state_dict(sampler.state_dict())
    assert other.position == 6 and next(iter(other))[:4] == [*again[0], *again[1]]
    assert first[0] != again[0]


def test_batches_that_were_fetched_before_a_load_are_thrown_away() -> None:
    sampler = ElasticBatchSampler(range(60), 6)
    batches = sampler.batches(Loader(sampler))
    line = [next(batches) for _ in range(5)]
    sampler.load_state_dict({**sampler.state_dict(), "position": 12})
    assert [next(batches) for _ in range(3)] == line[2:5]


def test_a_position_that_nobody_counted_is_no_checkpoint() -> None:
    sampler = ElasticBatchSampler(range(20), 6)
    rank_state.capture({"data": sampler})
    next(iter(sampler))
    with pytest.raises(CheckpointError, match="it is not known how many the loop has trained on"):
        rank_state.capture({"data": sampler})
    sampler.position = 6  # by a loop that counts for itself
    assert rank_state.capture({"data": sampler})["own"]["data"]["position"] == 6
    with pytest.raises(InputError, match="does not read from this sampler"):
        sampler.batches(DataLoader(range(20)))


def test_another_order_is_refused_with_the_numbers() -> None:
    state = ElasticBatchSampler(range(20), 6, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="length was 20 and is 21, seed was 1 and is 2"):
        ElasticBatchSampler(range(21), 6, seed=2).load_state_dict(state)


def test_a_mesh_says_which_ranks_read_the_same(tmp_path: Path) -> None:
    mesh_of = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = mesh_of("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        assert ElasticBatchSampler(range(20), 6, dp=mesh["dp"]).dp_size == 1
        assert ElasticBatchSampler(range(20), 6, dp=mesh).dp_rank == 0
        assert ElasticBatchSampler(range(20), 6).dp_size == 1
    finally:
        torch.distributed.destroy_process_group()


@settings(max_examples=50)
@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 7),
    run=st.integers(1, 40),
    window=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    drop_last=st.booleans(),
)
def test_an_order_with_a_window_is_a_permutation_that_stays_in_it(length, batch, run, window, seed, drop_last) -> None:
    order = SampleOrder(
        length=length, global_batch=min(batch, length), seed=seed, run=run, window=window, drop_last=drop_last
    )
    for epoch in (0, 3):
        first = epoch * order.epoch_samples
        line = order.samples(first, order.epoch_samples).tolist()
        assert len(set(line)) == len(line) and set(line) <= set(range(length))
        assert drop_last or len(line) == length
        at = len(line) // 3
        assert order.samples(first + at, 5).tolist()[: len(line) - at] == line[at : at + 5]
        size = run * window
        for at in range(0, len(line), size):
            assert len({index // run for index in line[at : at + size]}) <= window + 1


def test_an_order_with_a_window_differs_by_epoch_and_is_saved_with_it() -> None:
    order = SampleOrder(length=1000, global_batch=10, run=10, window=5)
    first, second = (order.samples(epoch * 1000, 1000).tolist() for epoch in range(2))
    assert first != second and first[:50] != sorted(first[:50])
    saved = ElasticBatchSampler(range(1000), 10, window=(10, 5)).state_dict()
    ElasticBatchSampler(range(1000), 10, window=(10, 5)).load_state_dict(saved)
    plain = ElasticBatchSampler(range(1000), 10)
    assert "window" not in plain.state_dict(), "as checkpoints had it before there were windows"
    with pytest.raises(CheckpointError, match="run was 10 and is None, window was 5 and is None"):
        plain.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="run was None and is 10"):
        ElasticBatchSampler(range(1000), 10, window=(10, 5)).load_state_dict(plain.state_dict())
    with pytest.raises(InputError, match="a window of 0 runs of 10 samples is none"):
        SampleOrder(length=10, global_batch=1, run=10)
