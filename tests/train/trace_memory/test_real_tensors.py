"""A trace of fake tensors against the same step on real ones: every allocation, in order, byte for byte."""

from dataclasses import replace

import pytest
from torch.distributed.device_mesh import DeviceMesh

from cordee.plan.training import BASES, Adapters
from cordee.train.trace_memory.events import Birth
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.replicas import optimizer_of
from cordee.train.trace_memory.step import record
from cordee.train.trace_memory.trace import prepare
from cordee.train.trace_memory.world import fake_ranks, fake_world

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
ONE = Question(config=CONFIG, code="hf", seq_tokens=128, micro_batch=2, weights="fp32")
TITAN = replace(ONE, code="torchtitan")


@pytest.mark.parametrize(
    "question",
    [
        ONE,
        pytest.param(replace(ONE, config=CONFIG | {"model_type": "qwen3"}), marks=pytest.mark.soak),
        pytest.param(replace(ONE, config=GPT2), marks=pytest.mark.soak),
        replace(TITAN, tp=2, sp=True, fsdp=2),
        pytest.param(replace(ONE, tp=2), marks=pytest.mark.soak),
        replace(TITAN, zero=0, replicas=2),
        pytest.param(replace(TITAN, zero=1, replicas=2), marks=pytest.mark.soak),
        pytest.param(replace(TITAN, zero=2, fsdp=2), marks=pytest.mark.soak),
        replace(ONE, weights="autocast", adapters=Adapters(4, base=BASES["nf4"])),
    ],
    ids=["llama", "qwen3", "gpt2", "tp", "tp-transformers", "ddp", "zero1", "zero2", "qlora"],
)
def test_fake_tensors_allocate_what_real_ones_do(question: Question) -> None:
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

    with fake_world(question) as mesh:
        fake = lives(mesh)
    with fake_ranks(question) as mesh:
        assert lives(mesh) == fake
    assert sum(is_birth for *_, is_birth in fake) > 100
