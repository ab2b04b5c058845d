"""Segments that torch keeps where there is room: a replay of its allocations, held against what is known of them."""

import pytest

from cordee.plan.allocator import NEEDED_WITHIN_BYTES, CachingAllocator, OutOfMemoryError, needed_bytes
from cordee.plan.layout import Layout, Recompute
from cordee.plan.memory import rank_memory
from cordee.plan.replay import is_replayed, replayed, with_replay
from cordee.plan.replay_sizes import TensorSizes
from cordee.plan.replay_step import ReplayedStep
from cordee.plan.settings import Settings
from cordee.plan.training import Training
from cordee.units import GiB
from cordee.workload.load import load_shape

L8 = load_shape("llama-3-8b")


def _held_gib(layout: Layout, training: Training) -> float:
    return with_replay(rank_memory(L8, layout, training), L8, layout, training).worst.held_bytes / GiB


@pytest.mark.parametrize(("ranks", "published_gib"), [(8, 82.4), (128, 67.0)])
def test_torchtitans_eager_peaks_are_met(ranks: int, published_gib: float) -> None:
    layout = Layout(dp=ranks, zero=3, micro_batch=2, recompute="selective")
    assert _held_gib(layout, Training(8192, 2 * ranks)) == pytest.approx(published_gib, rel=0.016)


def test_only_what_is_reserved_changes() -> None:
    layout, training = Layout(dp=8, zero=3), Training(8192, 8)
    before = rank_memory(L8, layout, training)
    after = with_replay(before, L8, layout, training)
    assert after.worst.allocated_bytes == before.worst.allocated_bytes and after.timelines == before.timelines
    assert after.worst.fragmentation_bytes != before.worst.fragmentation_bytes
    assert after.worst.cached_bytes > 0 < after.worst.fragmentation_bytes


def test_the_fewest_segments_are_those_with_which_a_step_goes_through() -> None:
    layout, training = Layout(dp=8, zero=3, recompute="full"), Training(2048, 8)
    free, needed = needed_bytes(lambda limit_bytes: replayed(L8, layout, training, limit_bytes))
    assert replayed(L8, layout, training, needed).reserved_bytes_peak <= needed < free.reserved_bytes_peak
    with pytest.raises(OutOfMemoryError):
        replayed(L8, layout, training, needed - NEEDED_WITHIN_BYTES - 1)


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        (Layout(dp=8, pp=2, zero=3), Training(8192, 64)),
        (Layout(dp=8, zero=1), Training(8192, 64)),
        (Layout(dp=8, zero=3), Training(8192, 64, framework="deepspeed")),
        (Layout(dp=8, zero=3), Training(8192, 64, loss="chunked")),
    ],
    ids=["pipeline", "zero1", "deepspeed", "chunked"],
)
def test_what_has_no_sequence_is_as_it_was(layout: Layout, training: Training) -> None:
    before = rank_memory(L8, layout, training)
    assert with_replay(before, L8, layout, training) is before


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_third_step_reserves_no_more_than_two(recompute: Recompute, zero: int, model: str) -> None:
    """Nothing of a step is left when the next begins, or segments would grow by its activations."""
    shape = load_shape(model)
    layout, training = Layout(dp=8, zero=zero, recompute=recompute), Training(2048, 16)
    allocator = CachingAllocator()
    step = ReplayedStep(allocator, TensorSizes.of(shape, layout, training), shape.layers, recompute, 2)
    step.run()
    states, reserved = len(step.held), allocator.reserved_bytes_peak
    step.step()
    assert (len(step.held), allocator.reserved_bytes_peak) == (states, reserved)
    # What the allocator hands out at once is what the formulas add up to.
    allocated = rank_memory(shape, layout, training).worst.allocated_bytes
    assert allocator.allocated_bytes_peak == pytest.approx(allocated, rel=0.005)


@pytest.mark.parametrize("train", ["lora", "qlora"])
def test_adapters_are_replayed(train: str) -> None:
    layout = Layout(dp=8, zero=3, recompute="full", micro_batch=2)
    training = Settings(train=train, seq_tokens=4096, global_batch=16).training(L8, 8)
    memory = rank_memory(L8, layout, training)
    assert replayed(L8, layout, training).allocated_bytes_peak == pytest.approx(memory.worst.allocated_bytes, rel=0.02)
    held = with_replay(memory, L8, layout, training).worst.held_bytes
    # The embedding's block stays with the stream that gathers, and inputs of layers have gone into that of its copy.
    assert held > memory.worst.reserved_bytes + 2 * 128_256 * 4096
    dora = Settings(train="dora", seq_tokens=4096, global_batch=16).training(L8, 8)
    assert not is_replayed(L8, layout, dora)
