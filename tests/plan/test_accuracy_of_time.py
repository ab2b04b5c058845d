"""The accuracy benchmark's time half: a stack predicts what each case alone takes, on torchtitan's published speeds."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan.step import step_time

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    import step_cases  # A script beside the package: importable only from here.

    return step_cases


def test_a_stack_takes_what_each_of_its_cases_takes(benchmark: ModuleType) -> None:
    import published

    runs, _ = published.read_published(BENCHMARKS / "data" / "torchtitan_speed.csv", load_catalogue())
    cases, left_out = benchmark.time_cases(runs)
    assert len(cases) == 20 and not left_out
    table = cases[0].gpu.uncalibrated
    alone = [
        float(step_time(case.shape, replace(case.gpu, efficiency=table), case.layout, case.training).total_s)
        for case in cases
    ]
    assert np.allclose(benchmark.Stack(cases).predict(table), alone, rtol=1e-9)
    # 8 GPUs, eager, 16 sequences of 8192: 5,762 tokens a second on each.
    assert cases[0].measured_s == pytest.approx(16 * 8192 / 8 / 5762)


def test_the_spread_is_what_the_middle_source_needs(benchmark: ModuleType) -> None:
    import least_squares

    sources = np.repeat(["near", "middle", "far"], 10)
    errors = np.repeat([0.01, 0.0329, 0.5], 10) * np.tile([1.0, -1.0], 15)
    assert least_squares.spread_of(errors, np.zeros(30), sources) == pytest.approx(0.02)
    # What the planner knows of already is not counted again; a source of two rows weighs a fifth.
    assert least_squares.spread_of(errors, np.full(30, 0.012), sources) == pytest.approx(0.016)
    few = np.r_[0:10, 10:12, 20:22]
    assert least_squares.spread_of(errors[few], np.zeros(14), sources[few]) == pytest.approx(0.01 / 1.645)


def test_products_that_were_measured_as_steps_sustain_them_move_half_as_far(benchmark: ModuleType) -> None:
    """B200's long products were measured, below what a short test reaches; H100 begins with such a test."""
    import least_squares

    freedom = {}
    for name in ("H100", "B200"):
        gpu = load_catalogue().find_gpu(name)
        freedom[name] = least_squares.freedom_of("product_fraction", gpu.uncalibrated, gpu.matmul_fraction)
    assert freedom == {"H100": 0.2, "B200": 0.1}
    assert least_squares.freedom_of("memory_fraction", gpu.uncalibrated, gpu.matmul_fraction) == 0.2
