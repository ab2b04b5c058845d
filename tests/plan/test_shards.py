"""Rows that FSDP2 gives to ranks: the fullest one decides, in states, in what is gathered and in traffic."""

import numpy as np
import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan.layout import Layout
from cordee.plan.memory import peak_bytes, rank_memory
from cordee.plan.settings import Settings
from cordee.plan.shards import expert_stretch, layer_padding, rank_padding, uneven_rows
from cordee.plan.step import step_time
from cordee.plan.training import Framework, Training
from cordee.workload.load import load_shape

MIXTRAL, L8 = load_shape("mixtral-8x7b"), load_shape("llama-3-8b")
TRAINING = Training(4096, 256)


@pytest.mark.parametrize(("ranks", "stretch"), [(1, 1), (8, 1), (5, 10 / 8), (12, 12 / 8), (32, 4), (64, 8)])
def test_the_fullest_rank_has_whole_experts(ranks: int, stretch: float) -> None:
    layout = Layout(dp=ranks, zero=3)
    assert float(expert_stretch(MIXTRAL, layout, TRAINING)) == stretch
    weights = rank_memory(MIXTRAL, layout, TRAINING).worst_timeline[0].weights_bytes
    count = MIXTRAL.parameter_count
    even = 4 * (count.total - count.experts - count.router - 32000 * 4096 * 2) / ranks
    assert float(weights) == pytest.approx(even + 4 * count.experts * stretch / ranks, rel=0.02)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_flat_buffers_are_divided_evenly(framework: Framework) -> None:
    layout = Layout(dp=32, zero=3)
    assert float(rank_padding(MIXTRAL, layout, Training(4096, 256, framework=framework), 0).total) == 0
    flat = Settings(seq_tokens=4096, global_batch=32, fsdp_version=1, train="lora").training(L8, 32)
    assert float(rank_padding(L8, layout, flat, 0).total) == 0
    # DDP with ZeRO-1 divides no weights.
    assert float(rank_padding(MIXTRAL, Layout(dp=32, zero=1), TRAINING, 0).total) == 0


def test_a_few_rows_more_than_ranks_are_padded_too() -> None:
    """1,024 rows of keys on 768 ranks are two rows a rank; 14,336 of the gate are 19."""
    padded = layer_padding(L8, Layout(dp=768, zero=3), TRAINING, expert=False)
    rows = {4096: 6, 1024: 2, 14336: 19}
    matrices = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    matrices += [(4096, 1), (4096, 1)]
    expected = sum((rows[out] * 768 - out) * inputs for out, inputs in matrices)
    assert float(padded.dense) == pytest.approx(expected, rel=1e-9)


def test_expert_parallelism_cuts_another_dimension() -> None:
    for layout in (Layout(dp=32, zero=3, ep=8), Layout(dp=32, zero=3, ep=4)):
        assert float(expert_stretch(MIXTRAL, layout, TRAINING)) == 1
    assert float(expert_stretch(MIXTRAL, Layout(dp=32, zero=3, ep=4), TRAINING)) == 1
    hsdp = Layout(dp=32, zero=3, shard=8)
    assert float(expert_stretch(MIXTRAL, hsdp, TRAINING)) == 1


def test_many_layouts_at_once_are_those_one_by_one() -> None:
    ranks = np.array([8, 12, 32, 64])
    together = peak_bytes(MIXTRAL, Layout(dp=ranks, zero=3), TRAINING)  # type: ignore[arg-type]
    alone = [float(peak_bytes(MIXTRAL, Layout(dp=int(each), zero=3), TRAINING)) for each in ranks]
    assert np.asarray(together).tolist() == pytest.approx(alone)


def test_a_plan_says_what_whole_rows_cost() -> None:
    assert uneven_rows(MIXTRAL, Layout(dp=8, zero=3), TRAINING) is None
    assert uneven_rows(L8, Layout(dp=64, zero=3), TRAINING) is None
    said = uneven_rows(MIXTRAL, Layout(dp=32, zero=3), TRAINING)
    assert said is not None and "8 experts are 8 rows on 32 ranks: the fullest rank holds 3.9 times" in said
    few = uneven_rows(L8, Layout(dp=8192, zero=3), TRAINING)
    assert few is not None and "fewer than 8192" in few and "experts" not in few


def test_what_is_padded_is_sent_and_updated() -> None:
    gpu = load_catalogue().find_gpu("H100")
    whole, padded = (step_time(MIXTRAL, gpu, Layout(dp=dp, zero=3), Training(4096, 2 * dp)) for dp in (8, 32))
    assert float(padded.optimizer_s) == pytest.approx(float(whole.optimizer_s), rel=0.05)
