"""A trace of fake tensors against the same step on real ones: every allocation, in order, byte for byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from cordee.plan.training import BASES, Adapters
from cordee.train.trace_memory.events import Birth
from cordee.train.trace_memory.question import Question, Weights
from cordee.train.trace_memory.replicas import optimizer_of
from cordee.train.trace_memory.step import record
from cordee.train.trace_memory.trace import compiler, prepare
from cordee.train.trace_memory.world import fake_ranks, fake_world

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
ONE = Question(config=CONFIG, code="hf", seq_tokens=128, micro_batch=2, weights="fp32")
TINY = CONFIG | {
    "head_dim": 16,
    "sliding_window": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": TINY, "gemma3_text": TINY, "phi3": TINY | {"original_max_position_embeddings": 256}, "gpt_oss": TINY,
    "mixtral": TINY, "bert": LAYERS | {"vocab_size": 256},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
    "mamba": LAYERS | {"vocab_size": 256, "state_size": 8},
    "mamba2": LAYERS
    | {"vocab_size": 256, "state_size": 8, "num_heads": 8, "head_dim": 16, "chunk_size": 32, "n_groups": 2},
    "vit": LAYERS | {"image_size": 32, "patch_size": 8},
}  # fmt: skip
TITAN = replace(ONE, code="torchtitan")


@pytest.mark.parametrize(
    "question",
    [
        ONE,
        pytest.param(replace(ONE, config=CONFIG | {"model_type": "qwen3"}), marks=pytest.mark.soak),
        pytest.param(replace(ONE, config=GPT2), marks=pytest.mark.soak),
        replace(TITAN, tp=2, sp=True, fsdp=2),
        pytest.param(replace(ONE, tp=2), marks=pytest.mark.soak),
        pytest.param(replace(TITAN, zero=0, replicas=2), marks=pytest.mark.soak),
        pytest.param(replace(TITAN, zero=1, replicas=2), marks=pytest.mark.soak),
        pytest.param(replace(TITAN, zero=2, fsdp=2), marks=pytest.mark.soak),
        replace(ONE, weights="autocast", adapters=Adapters(4, base=BASES["nf4"], widened=True)),
        replace(ONE, weights="autocast", adapters=Adapters(4, magnitudes=True)),
        replace(TITAN, compiled=True, fsdp=2),
    ],
    ids=["llama", "qwen3", "gpt2", "tp", "tp-transformers", "ddp", "zero1", "zero2", "qlora", "dora", "compiled"],
)
def test_fake_tensors_allocate_what_real_ones_do(question: Question) -> None:
    _compare(question)


@pytest.mark.parametrize(
    "family", ["t5", *(pytest.param(each, marks=pytest.mark.soak) for each in FAMILIES if each != "t5")]
)
def test_families_without_formulas_allocate_what_real_ones_do(family: str) -> None:
    # Grouped products of experts are of 16 bits alone.
    weights: Weights = "bf16" if family in ("gpt_oss", "mixtral") else "fp32"
    _compare(replace(ONE, config=FAMILIES[family] | {"model_type": family}, seq_tokens=64, weights=weights))


@pytest.mark.parametrize("name", [pytest.param("diffusion_transformer", marks=pytest.mark.soak), "unet"])
def test_functions_allocate_what_real_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    _compare(replace(ONE, config={}, function=f"traced_models:{name}"))


def _compare(question: Question) -> None:
    def lives(mesh: DeviceMesh | None) -> list[tuple[int, str, int]]:
        subject = prepare(question, mesh)
        trained = [each for each in subject.module.parameters() if each.requires_grad]
        found = record(subject, question, optimizer_of(trained, question), gpu=False)
        born = {event.number: event.size_bytes for event in found.events if isinstance(event, Birth)}
        # Scalars are made by code that looks at values, which fake tensors do not have.
        return [
            (born[event.number], event.segment.phase, isinstance(event, Birth))
            for event in found.events
            if born[event.number] > 64
        ]

    with fake_world(question) as mesh, compiler(question):
        fake = lives(mesh)
    with fake_ranks(question) as mesh, compiler(question):
        assert lives(mesh) == fake
    assert sum(is_birth for *_, is_birth in fake) > 50
