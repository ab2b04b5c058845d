"""A trace of fake tensors against the same step on real ones: every allocation, in order, byte for byte."""

import pytest
import torch

from cordee.train.trace_memory.events import Birth
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.step import record
from cordee.train.trace_memory.subject import build
from cordee.train.trace_memory.world import fake_world

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.soak) for each in ("qwen3", "gpt2"))]
)
def test_fake_tensors_allocate_what_real_ones_do(family: str) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
    config = CONFIG | {"model_type": family} if family != "gpt2" else config
    question = Question(config=config, code="hf", seq_tokens=128, micro_batch=2, weights="fp32")

    def lives(question: Question) -> list[tuple[int, str, int]]:
        subject = build(question)
        trained = list(subject.module.parameters())
        found = record(subject, question, torch.optim.AdamW(trained, fused=True), gpu=False)
        born = {event.number: event.size_bytes for event in found.events if isinstance(event, Birth)}
        # Scalars are made by code that looks at values, which fake tensors do not have.
        return [
            (born[event.number], event.segment.phase, isinstance(event, Birth))
            for event in found.events
            if born[event.number] > 64
        ]

    with fake_world(question):
        fake = lives(question)
    assert lives(question) == fake
    assert sum(is_birth for *_, is_birth in fake) > 100
