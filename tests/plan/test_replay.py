"""Segments that torch keeps where there is room: a replay of its allocations, held against what is known of them."""

import pytest

from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory
from cordee.plan.replay import with_replay
from cordee.plan.training import Training
from cordee.units import GiB
from cordee.workload.load import load_shape

L8 = load_shape("llama-3-8b")


def _held_gib(layout: Layout, training: Training) -> float:
    return with_replay(rank_memory(L8, layout, training), L8, layout, training).worst.held_bytes / GiB


@pytest.mark.parametrize(("ranks", "published_gib"), [(8, 82.4), (128, 67.0)])
def test_torchtitans_eager_peaks_are_met(ranks: int, published_gib: float) -> None:
    layout = Layout(dp=ranks, zero=3, micro_batch=2, recompute="selective")
    assert _held_gib(layout, Training(8192, 2 * ranks)) == pytest.approx(published_gib, rel=0.035)


def test_only_what_is_kept_beyond_need_changes() -> None:
    layout, training = Layout(dp=8, zero=3), Training(8192, 8)
    before = rank_memory(L8, layout, training)
    after = with_replay(before, L8, layout, training)
    assert after.worst.parts() == before.worst.parts() and after.timelines == before.timelines
    assert after.worst.cached_bytes != before.worst.cached_bytes


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


def test_a_recomputed_step_frees_all_that_it_makes() -> None:
    # Nothing of the first step is left when the second begins, or segments would grow by its activations.
    training = Training(2048, 8)
    for recompute in ("none", "selective", "full"):
        layout = Layout(dp=8, zero=3, recompute=recompute)
        before = rank_memory(L8, layout, training)
        beyond = _held_gib(layout, training) * GiB - before.worst.allocated_bytes
        assert 0 < beyond < before.worst.loss_bytes + 4e9 + 0.5 * before.worst.activations_bytes
