"""Bytes of the KV cache, by hand."""

import pytest
from cases import served
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.serving.memory.kv import kv_bytes, kv_bytes_per_token, state_bytes


@pytest.mark.parametrize(
    ("model", "tp", "kv", "per_token"),
    [
        ("llama-3-8b", 1, "bf16", 131_072),  # 32 layers x 2 x 8 heads x 128 x 2 bytes
        ("llama-3-8b", 1, "fp8", 65_536),
        ("llama-3-8b", 8, "bf16", 16_384),
        ("llama-3-8b", 16, "bf16", 16_384),  # 8 heads on 16 GPUs: each has one
        ("llama-2-7b", 1, "bf16", 524_288),
        ("llama-2-70b", 4, "bf16", 81_920),
        ("qwen3-235b-a22b", 4, "bf16", 48_128),
        ("deepseek-v3", 1, "bf16", 70_272),  # 61 layers x (512 + 64) x 2 bytes
        ("deepseek-v3", 8, "bf16", 70_272),  # the latent is copied
        ("deepseek-v3.2", 1, "bf16", 61 * (576 * 2 + 132)),
        ("mistral-small-24b", 1, "bf16", 163_840),
        ("qwen3.5-27b", 1, "bf16", 65_536),  # 16 of 64 layers
        ("qwen3.5-35b-a3b", 1, "bf16", 20_480),  # 10 of 40 layers, 2 heads of 256
    ],
)
def test_a_token_takes_its_bytes(model: str, tp: int, kv: str, per_token: int) -> None:
    assert kv_bytes_per_token(served(model, tp=tp, kv=kv)) == per_token


def test_stages_share_the_layers() -> None:
    case = served("llama-3-8b", pp=4)
    assert [kv_bytes_per_token(case, stage) for stage in range(4)] == [32_768] * 4


def test_windows_stop_growing() -> None:
    case = served("gpt-oss-20b")
    layer = 2 * 8 * 64 * 2
    assert kv_bytes(case, 128) == 24 * layer * 128
    assert kv_bytes(case, 16_000) == 12 * layer * 16_000 + 12 * layer * (128 + 16)
    gemma = served("gemma-4-31b")
    full, near = 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2
    assert kv_bytes(gemma, 262_144) == full * 262_144 + near * (1024 + 16)


def test_a_recurrent_state_does_not_grow() -> None:
    case = served("qwen3.5-27b")
    # 48 layers: 48 heads of 128 x 128 in fp32, and 3 taps of 10,240 channels in bf16.
    assert state_bytes(case.shape, case.layout) == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)
    assert kv_bytes(case, 1600) - kv_bytes(case, 800) == 800 * 65_536
    split = served("qwen3.5-27b", tp=2)
    assert state_bytes(split.shape, split.layout) * 2 == state_bytes(case.shape, case.layout)


def test_the_last_block_is_whole() -> None:
    case = served("llama-3-8b")
    assert kv_bytes(case, 1) == kv_bytes(case, 16) == 16 * 131_072
    assert kv_bytes(case, 17) == 32 * 131_072


@given(
    model=st.sampled_from(["llama-3-8b", "qwen3-235b-a22b", "deepseek-v3", "gemma-4-31b", "qwen3.5-27b"]),
    tp=st.sampled_from([1, 2, 4, 8]), kv=st.sampled_from(["bf16", "fp8"]), length=st.integers(1, 300_000),
)  # fmt: skip
def test_a_sequence_never_shrinks_and_tp_never_more_than_halves_it(model: str, tp: int, kv: str, length: int) -> None:
    case, twice = served(model, tp=tp, kv=kv), served(model, tp=2 * tp, kv=kv)
    one = kv_bytes(case, length)
    assert 0 < one <= kv_bytes(case, length + 16)
    assert one / 2 <= kv_bytes(twice, length) + 1 <= one + 1
    assert kv_bytes(case, 2 * length) <= 2 * one + 32 * kv_bytes_per_token(case)
