"""The pruned search gives what brute force gives, and what its proof rests on holds."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.hardware.load import load_catalogue
from cordee.plan.layout import OFFLOADS, RECOMPUTES, SCHEDULES, Layout
from cordee.plan.memory import peak_bytes, rank_memory
from cordee.plan.optimum import Case, best_of_meshes, brute_force, count, optimum
from cordee.plan.rules import first_misfit
from cordee.plan.space import ALL_CHOICES, Choices
from cordee.plan.step import step_time
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.load import load_shape

CATALOGUE = load_catalogue()
NAMES = ("gpt-3-175b", "llama-3-70b", "llama-3-405b", "mixtral-8x7b", "deepseek-v3", "gpt2-xl", "qwen2-7b")
SHAPES = {name: load_shape(name) for name in NAMES}


FEW, MANY = 8_000, 100_000


def _sub_space(seed: int, size: int) -> tuple[Case, LayoutWanted, Choices]:
    """A random job and a random part of its space, of about so many candidates."""
    draw = random.Random(seed)
    while True:
        shape = SHAPES[draw.choice(NAMES)]
        gpu = CATALOGUE.find_gpu(draw.choice(["A100-80", "H100", "B200", "L40S", "A10"]))
        training = Training(draw.choice([1024, 2048, 8192]), draw.choice([96, 256, 768, 1536]))
        training = replace(training, flash=draw.random() < 0.8)
        if shape.learned_positions:
            training = replace(training, seq_tokens=min(training.seq_tokens, shape.learned_positions))
        case = Case(shape, gpu, draw.choice([8, 32, 48, 128, 512, 1024]), training)
        wanted = LayoutWanted(
            tp=draw.choice([None, None, 2, 8]), pp=draw.choice([None, None, 4]), zero=draw.choice([None, None, 1, 3])
        )
        choices = replace(
            ALL_CHOICES,
            schedules=tuple(draw.sample(SCHEDULES, draw.randint(2, 8))),
            recomputes=("none", *draw.sample(["selective", "full"], draw.randint(1, 2))),
            offloads=("none", *draw.sample(["optimizer", "activations", "both"], draw.randint(1, 3))),
            hsdp=draw.random() < 0.5,
        )
        if 0.8 * size <= count(case, wanted, choices) <= 1.2 * size:
            return case, wanted, choices


def _spaces(few: range, many: range) -> list[object]:
    """Small spaces by default, large ones in the soak."""
    return [*((seed, FEW) for seed in few), *(pytest.param(seed, MANY, marks=pytest.mark.soak) for seed in many)]


@pytest.mark.parametrize(("seed", "size"), _spaces(range(1), range(8)))
def test_on_random_sub_spaces_the_answer_is_that_of_brute_force(seed: int, size: int) -> None:
    case, wanted, choices = _sub_space(seed, size)
    found, tally = optimum(case, wanted, choices)
    sure = brute_force(case, wanted, choices)
    assert tally.candidates == count(case, wanted, choices) >= 0.8 * size
    assert found is not None and sure is not None
    assert found.seconds == sure.seconds, (found, sure)
    if found.seconds is None:
        assert found.peak_bytes == sure.peak_bytes
    else:
        assert found.peak_bytes <= case.gpu.visible_bytes
        again = float(step_time(case.shape, case.gpu, found.layout, case.training).total_s)
        assert again == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize(("seed", "size"), _spaces(range(101, 102), range(100, 104)))
def test_the_best_of_each_mesh_is_that_of_brute_force(seed: int, size: int) -> None:
    case, wanted, choices = _sub_space(seed, size)
    for winner in random.Random(seed).sample(found := best_of_meshes(case, wanted, choices)[0], min(6, len(found))):
        layout = winner.layout
        only = replace(wanted, tp=layout.tp, pp=layout.pp, cp=layout.cp, dp=layout.dp, zero=layout.zero)
        # Where a pipeline is asked for, its stages are uneven only if that is asked for too.
        only = replace(only, split=None if wanted.pp else "uneven")
        sure = brute_force(case, only, choices)
        assert sure is not None
        assert winner.seconds == pytest.approx(sure.seconds, rel=1e-12) if sure.seconds else winner.seconds is None
        if sure.seconds is None:
            assert winner.peak_bytes == pytest.approx(sure.peak_bytes, rel=1e-12)


def test_pruning_leaves_most_of_a_large_space_alone() -> None:
    case = Case(SHAPES["gpt-3-175b"], CATALOGUE.find_gpu("A100-80"), 512, Training(2048, 1536))
    _, tally = optimum(case, LayoutWanted(tp=8), ALL_CHOICES)
    assert tally.timed <= tally.weighed < tally.candidates / 10
    assert tally.candidates == 12 * tally.rows


SIZES = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(
    Layout, dp=SIZES, tp=SIZES, pp=SIZES, zero=st.integers(0, 3), sp=st.booleans(), micro_batch=SIZES,
    cp=st.sampled_from([1, 2]), ep=st.sampled_from([1, 8]), schedule=st.sampled_from(SCHEDULES),
    vpp=st.sampled_from([1, 2]), cp_kind=st.sampled_from(["ring", "all-gather", "ulysses"]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(LAYOUTS, st.sampled_from(NAMES), st.sampled_from(["A100-80", "H100", "L40S"]), st.booleans())
def test_no_heavier_burden_is_faster(layout: Layout, name: str, gpu_name: str, flash: bool) -> None:
    shape, gpu = SHAPES[name], CATALOGUE.find_gpu(gpu_name)
    training = Training(1024, 512, flash=flash)
    if first_misfit(layout, shape, layout.gpus, training) is not None:
        return
    floor = float(step_time(shape, gpu, layout, training).total_s)
    for recompute in RECOMPUTES:
        for offload in OFFLOADS:
            burdened = replace(layout, recompute=recompute, offload=offload)
            assert float(step_time(shape, gpu, burdened, training).total_s) >= floor * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, st.sampled_from(NAMES))
def test_one_layout_and_an_array_of_it_have_one_verdict(layout: Layout, name: str) -> None:
    shape, gpu, training = SHAPES[name], CATALOGUE.find_gpu("H100"), Training(1024, 512)
    if first_misfit(layout, shape, layout.gpus, training) is not None:
        return
    sizes = ("dp", "tp", "cp", "ep", "zero", "sp", "micro_batch")
    twice = replace(layout, **{size: np.array([getattr(layout, size)] * 2) for size in sizes})
    peaks = np.broadcast_to(peak_bytes(shape, twice, training), 2)
    assert peaks[0] == peaks[1] == pytest.approx(float(peak_bytes(shape, layout, training)), rel=1e-12)
    assert rank_memory(shape, layout, training).total_bytes == pytest.approx(peaks[0], abs=64)
    times = np.broadcast_to(step_time(shape, gpu, twice, training).total_s, 2)
    assert times[0] == times[1] == pytest.approx(float(step_time(shape, gpu, layout, training).total_s), rel=1e-12)
