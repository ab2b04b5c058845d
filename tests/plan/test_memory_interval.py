"""The interval of memory beside a plan: around what is kept where there is room, never beyond the GPU."""

from dataclasses import replace

from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory
from cordee.plan.memory_interval import RESIDUALS, seen_interval_bytes
from cordee.plan.training import FRAMEWORKS, Adapters, Training
from cordee.workload.load import load_shape

L8 = load_shape("llama-3-8b")
LAYOUT = Layout(dp=64, zero=3, recompute="full")
TRAINING = Training(8192, 64)
STAGE = rank_memory(L8, LAYOUT, TRAINING).worst


def test_each_framework_has_its_interval_around_the_plan() -> None:
    assert set(RESIDUALS) == set(FRAMEWORKS)
    for framework in FRAMEWORKS:
        found = seen_interval_bytes(STAGE, replace(TRAINING, framework=framework), 10**12)
        assert found is not None and found[0] < STAGE.seen_bytes < found[1]


def test_no_more_is_seen_than_the_gpu_has_and_nothing_where_it_does_not_fit() -> None:
    assert seen_interval_bytes(STAGE, TRAINING, STAGE.total_bytes) == (
        min(STAGE.total_bytes, round(STAGE.seen_bytes * 0.98)), STAGE.total_bytes
    )  # fmt: skip
    assert seen_interval_bytes(STAGE, TRAINING, STAGE.total_bytes - 1) is None


def test_adapters_have_none() -> None:
    assert seen_interval_bytes(STAGE, replace(TRAINING, adapters=Adapters()), 10**12) is None
