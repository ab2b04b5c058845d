"""Quantisation by batch: measured tables, the claims they contradict, and where both formats are equally fast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.hardware.load import load_catalogue, load_speedups
from cordee.plan.serving.formats import WEIGHTS
from cordee.plan.serving.levers.quantise import (
    FormatCrossover,
    borrowed_kernels,
    find_crossovers,
    measured_crossover,
    unpacking_crossover,
)

TABLES = load_speedups()


def only(gpu: str, name: str) -> FormatCrossover:
    (found,) = find_crossovers(TABLES, gpu, name)
    return found


def test_every_table_names_a_gpu_and_a_format_that_exist() -> None:
    gpus = {gpu.name for gpu in load_catalogue().gpus}
    assert {row.gpu for row in TABLES} <= gpus
    assert {row.format for row in TABLES} <= set(WEIGHTS)
    assert all(list(row.batches) == sorted(row.batches) and min(row.ratios) > 0 for row in TABLES)


def test_weight_only_int4_wins_at_small_batch_and_loses_from_256_on_h200() -> None:
    found = only("H200", "int4")
    assert found.ratios[0] == 2.32
    assert found.losing[0].low == 256
    assert found.even_at[0] == pytest.approx(59, abs=1)
    assert found.remark is not None
    assert "the reverse of the claim" in found.remark
    assert "2.32x as fast up to batch 16, 0.70x from 256" in str(found)


def test_a_format_that_was_not_measured_is_taken_from_the_same_chip() -> None:
    assert only("H100", "int4").where.startswith("H200")
    assert only("A100-40", "int8").where.startswith("A100-80")
    assert find_crossovers(TABLES, "A100-40") == ()
    assert find_crossovers(TABLES, "MI300X", "fp8") == ()


def test_kernels_of_another_engine_or_gpu_are_marked_as_borrowed() -> None:
    assert borrowed_kernels(TABLES, "H200", "tensorrt-llm", "int4") is None
    assert borrowed_kernels(TABLES, "H200", "vllm", "int4") == (
        "int4 products measured on H200 in tensorrt-llm 1.2, not in vllm"
    )
    assert borrowed_kernels(TABLES, "H100", "tensorrt-llm", "int4") == (
        "int4 products measured on H200 in tensorrt-llm 1.2"
    )
    assert borrowed_kernels(TABLES, "MI300X", "vllm", "int4") == "int4 products assumed, not measured"
    assert borrowed_kernels(TABLES, "H200", "vllm", "bf16") is None


def test_on_a100_it_loses_little_and_late() -> None:
    found = only("A100-80", "int4")
    assert found.winning[0].low == 1
    assert found.winning[0].high == 128
    assert found.even_at[0] == pytest.approx(205, abs=1)
    assert min(found.ratios) == 0.93


def test_w8a8_wins_everywhere_on_a100() -> None:
    found = only("A100-80", "int8")
    assert found.losing == ()
    assert found.remark is None
    assert str(found.winning[0]) == "from 1"


def test_int8_weight_only_saves_time_at_batch_1_only_on_h100() -> None:
    found = only("H100", "int8-wo")
    assert found.losing[0].low == 16
    assert "faster than bf16 at 1, slower from 16" in str(found)


def test_a_format_that_saves_no_time_is_said_to() -> None:
    found = FormatCrossover("by hand", "int8-wo", (1.0, 16.0, 256.0), (0.9, 0.8, 0.7))
    assert found.remark is not None
    assert "no time at any batch" in found.remark
    assert "faster than bf16 at no batch, slower from 1" in str(found)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "vllm"])
def test_fp8_wins_at_every_batch_on_hopper(engine: str) -> None:
    for gpu in ("H100", "H200"):
        (found,) = (each for each in find_crossovers(TABLES, gpu, "fp8") if engine in each.where)
        assert found.losing == ()


def test_fp8_on_b200_in_tensorrt_llm_pays_in_large_batches_only() -> None:
    (found,) = (each for each in find_crossovers(TABLES, "B200", "fp8") if "tensorrt" in each.where)
    assert found.winning[0].low == 512
    assert "no time in small batches" in (found.remark or "")


SECONDS = st.floats(1e-4, 1)


@given(st.floats(1.1, 16), st.floats(0.01, 10), SECONDS, st.just(0.0) | SECONDS, st.just(0.0) | SECONDS)
def test_at_the_crossover_of_unpacking_both_take_the_same_time(
    ratio: float, weights_s: float, token_s: float, once_s: float, each_s: float
) -> None:
    batch = unpacking_crossover(ratio, weights_s, token_s, unpack_s=once_s, unpack_token_s=each_s)

    def gained_s(tokens: float) -> float:
        packed = max(weights_s / ratio, tokens * token_s) + once_s + tokens * each_s
        return max(weights_s, tokens * token_s) - packed

    if batch:
        assert gained_s(batch) == pytest.approx(0, abs=1e-6 * weights_s)
        assert gained_s(batch / 2) >= -1e-9
    else:
        assert gained_s(0.0) <= 1e-9
    assert gained_s(2 * batch + 1) <= 1e-9


def test_a_crossover_of_steps() -> None:
    found = FormatCrossover("by hand", "int4", (1, 8, 64), (2.0, 1.0, 0.8))
    assert found.losing[0].low == 64
    assert measured_crossover(TABLES[0]).batches[0] == 1
