"""The interval of memory beside a plan, and the mark of what fits only as planned."""

from dataclasses import replace

import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan import Request, Settings
from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory
from cordee.plan.memory_interval import (
    RESIDUALS,
    held_surely,
    needed_interval_bytes,
    residuals_of,
    seen_interval_bytes,
)
from cordee.plan.search import evaluate
from cordee.plan.training import FRAMEWORKS, Adapters, Training
from cordee.workload.load import load_shape

L8 = load_shape("llama-3-8b")
LAYOUT = Layout(dp=64, zero=3, recompute="full")
TRAINING = Training(8192, 64)
STAGE = rank_memory(L8, LAYOUT, TRAINING).worst
H100 = replace(load_catalogue().find_gpu("H100"), visible_fraction=1.0)


def test_each_framework_has_its_interval_around_the_plan_and_adapters_have_one_in_all() -> None:
    assert set(RESIDUALS) == {*FRAMEWORKS, "adapters"}
    for framework in FRAMEWORKS:
        training = replace(TRAINING, framework=framework)
        low, high = needed_interval_bytes(STAGE.total_bytes, training)
        assert low <= STAGE.total_bytes < high
        seen = seen_interval_bytes(STAGE, training, 10**12)
        assert seen is not None and seen[0] <= STAGE.seen_bytes < seen[1]
        assert residuals_of(replace(training, adapters=Adapters())) is RESIDUALS["adapters"]


def test_no_more_is_seen_than_the_gpu_has_and_nothing_where_it_does_not_fit_or_with_adapters() -> None:
    assert seen_interval_bytes(STAGE, TRAINING, STAGE.total_bytes) == (
        min(STAGE.total_bytes, STAGE.seen_bytes), STAGE.total_bytes
    )  # fmt: skip
    assert seen_interval_bytes(STAGE, TRAINING, STAGE.total_bytes - 1) is None
    assert seen_interval_bytes(STAGE, replace(TRAINING, adapters=Adapters()), 10**12) is None


@pytest.mark.parametrize("train", ["full", "qlora"])
def test_a_plan_is_tight_between_its_middle_and_its_upper_end(train: str) -> None:
    settings = Settings(seq_tokens=2048, global_batch=64, train=train)  # type: ignore[arg-type]
    case = Request(shape=L8, gpu=H100, gpus=64, settings=settings).case()
    needs = evaluate(case, LAYOUT).needed_interval_bytes[1]

    def tight_on(memory_bytes: int) -> tuple[bool, bool]:
        found = evaluate(replace(case, gpu=replace(H100, memory_bytes=memory_bytes)), LAYOUT)
        return found.fits, found.tight

    planned = evaluate(case, LAYOUT).peak_bytes
    assert [tight_on(size) for size in (planned - 1, planned, needs - 1, needs)] == [
        (False, False), (True, True), (True, True), (True, False),
    ]  # fmt: skip
    surely = held_surely(replace(H100, memory_bytes=needs), case.training).memory_bytes
    assert abs(surely - planned) <= 1
