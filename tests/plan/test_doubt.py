"""How unsure a step is: each unknown counts by what the step would be if it were worse."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan.doubt import ATTENTION_SPREAD, SOFTWARE_SPREAD, doubt
from cordee.plan.layout import Layout
from cordee.plan.step import step_time
from cordee.plan.training import Training
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape

H100 = load_catalogue().find_gpu("H100")
L8, MIXTRAL = load_shape("llama-3-8b"), load_shape("mixtral-8x7b")
MEGATRON = Training(4096, 256, framework="megatron")


def unsure(shape: ModelShape, layout: Layout, training: Training = MEGATRON) -> float:
    return float(doubt(shape, H100, layout, training, step_time(shape, H100, layout, training)))


def test_traffic_between_islands_counts_where_a_slower_network_would_show_it() -> None:
    one, many = (unsure(L8, Layout(dp=dp, zero=1), replace(MEGATRON, global_batch=1024)) for dp in (8, 1024))
    assert one < 0.05 < 0.1 < many
    assert unsure(L8, Layout(tp=16, micro_batch=8)) > 2 * unsure(L8, Layout(tp=8, micro_batch=8))


def test_attention_counts_by_its_part_of_the_step() -> None:
    short, long = (unsure(L8, Layout(), replace(MEGATRON, seq_tokens=tokens)) for tokens in (2048, 262_144))
    assert short < 0.05 < 0.1 < long < ATTENTION_SPREAD


def test_software_that_no_source_of_the_table_ran_is_less_sure() -> None:
    assert "internevo" not in H100.efficiency.software
    known, new = (unsure(L8, Layout(dp=8), replace(MEGATRON, framework=name)) for name in ("megatron", "internevo"))
    assert new >= math.hypot(SOFTWARE_SPREAD, 0.9 * known)


def test_loads_that_are_given_leave_nothing_to_doubt_of_routing() -> None:
    layout = Layout(dp=8, ep=8)
    guessed, given = (unsure(MIXTRAL, layout, replace(MEGATRON, imbalance=many)) for many in (1.0, 1.2))
    assert guessed > given + 0.05


def test_contexts_in_torch_are_less_sure_than_in_megatron() -> None:
    layout, training = Layout(cp=8, zero=3), Training(262_144, 1, framework="torch")
    assert unsure(L8, layout, training) > 2 * unsure(L8, layout, replace(training, framework="megatron"))


def test_a_small_step_is_as_sure_as_the_host() -> None:
    small = replace(L8, layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024)
    found = unsure(small, Layout(), Training(128, 8, framework="torch"))
    assert 0.7 * H100.efficiency.host_spread < found <= 1.05 * H100.efficiency.host_spread


def test_many_layouts_at_once_are_what_each_is_alone() -> None:
    training = replace(MEGATRON, framework="torch")
    many = Layout(dp=np.array([8, 4, 2]), tp=np.array([1, 2, 1]), cp=np.array([1, 1, 4]), zero=np.array([3, 3, 3]))
    found = doubt(L8, H100, many, training, step_time(L8, H100, many, training))
    for at, (dp, tp, cp) in enumerate([(8, 1, 1), (4, 2, 1), (2, 1, 4)]):
        alone = unsure(L8, Layout(dp=dp, tp=tp, cp=cp, zero=3), training)
        assert np.asarray(found)[at] == pytest.approx(alone)
