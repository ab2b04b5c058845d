"""Refusals with their numbers, and changes that help."""

from cases import served

from cordee.plan.serving.fit import refusal, remedies
from cordee.plan.serving.memory import memory


def test_a_replica_that_starts_is_not_refused() -> None:
    assert refusal(memory(served("llama-3.1-8b"))) is None


def test_weights_that_leave_no_room_are_refused() -> None:
    """vLLM 0.11.0 did not start so on one H100: -1.44 GiB were left (llm-d-planner)."""
    case = served("llama-3.1-70b", weights="fp8")
    assert "leave -1." in (refusal(memory(case)) or "")
    changes = [remedy.change for remedy in remedies(case)]
    assert "a memory fraction of 0.95" not in changes
    assert {"int4 weights", "tp=2", "tp=4", "tp=8"} <= set(changes)


def test_a_context_that_is_too_long_is_refused() -> None:
    """vLLM 0.6.4 refused 29,000 tokens of Llama-3.1-8B on 24 GB: vllm#10517."""
    case = served("llama-3.1-8b", "RTX-4090", version="0.6.4", context=29_000)
    found = memory(case)
    assert refusal(found) == (
        f"a sequence of 29,000 tokens takes 3.54 GiB of KV cache, but {found.kv_bytes / 2**30:.2f} GiB are left: "
        f"{found.longest_context_tokens:,} tokens"
    )
    first = remedies(case)[0]
    assert first.change == f"a longest context of {found.longest_context_tokens:,} tokens"
    assert first.memory.fits


def test_fewer_sequences_give_the_sampler_back_its_memory() -> None:
    case = served("qwen3-32b", context=24_000)
    assert not memory(case).fits
    fewer = next(remedy for remedy in remedies(case) if remedy.change.startswith("max sequences"))
    assert fewer.memory.case.max_sequences == 512
    assert fewer.memory.kv_bytes - memory(case).kv_bytes > 2 * 2**30
