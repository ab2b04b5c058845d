"""Traces of ranks that divide a model in other ways than FSDP2, and of adapters, against bytes counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from cordee.errors import LayoutError
from cordee.plan.allocator import ROUND_BYTES
from cordee.plan.training import BASES, Adapters
from cordee.train.trace_memory.answer import Traced
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own, of fake tensors

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 2048, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = {"q": (256, 256), "k": (256, 128), "v": (256, 128), "o": (256, 256),
           "gate": (256, 768), "up": (256, 768), "down": (768, 256)}  # fmt: skip
LAYER = sum(inputs * outputs for inputs, outputs in LINEARS.values())
VOCAB, NORMS = 2048 * 256, 5 * 256
ROUNDED = 200 * ROUND_BYTES


def _trace(**given: Any) -> Traced:
    filled: dict[str, Any] = {"config": CONFIG, "code": "torchtitan", "seq_tokens": 512} | given
    return trace(Question(**filled))


def _at(found: Traced, phase: str) -> dict[str, int]:
    return next(dict(moment.parts) for moment in found.moments if moment.phase == phase)


def test_tensor_parallel_ranks_divide_matrices_and_the_sequence_between_them() -> None:
    plain, whole, cut = _trace(fsdp=2), _trace(fsdp=2, tp=2), _trace(fsdp=2, tp=2, sp=True)
    assert plain.parameters == whole.parameters == 2 * LAYER + 2 * VOCAB + NORMS
    # Norms are whole on each rank of tp.
    assert _at(whole, "states")["optimizer"] == pytest.approx(
        8 * ((2 * LAYER + 2 * VOCAB) / 4 + NORMS / 2), abs=ROUNDED
    )
    hidden = 2 * 512 * 256
    saved = _at(whole, "loss")["activations"] - _at(cut, "loss")["activations"]
    # Of each layer its input, the sum in its middle and both norms' results; of the head the same two. A layer's whole
    # input of its products, which is gathered again, takes the place of the norm's.
    assert 0 < saved < (2 * 4 + 2) * hidden / 2
    assert whole.allocated_bytes < plain.allocated_bytes


def test_replicas_hold_whole_gradients_in_buckets_and_zero_1_divides_the_moments() -> None:
    replicas = {"replicas": 4, "weights": "autocast"}
    ddp, divided = _trace(zero=0, **replicas), _trace(zero=1, **replicas)
    parameters = 2 * LAYER + 2 * VOCAB + NORMS
    for found, moments in ((ddp, 8 * parameters), (divided, 8 * parameters / 4)):
        states = _at(found, "states")
        assert states["gradients"] == pytest.approx(4 * parameters, abs=ROUNDED)
        # ZeRO-1 gives whole tensors to ranks: the fullest has an embedding more than its part at most.
        assert states["optimizer"] == pytest.approx(moments, abs=8 * VOCAB if found is divided else ROUNDED)
    assert _at(divided, "loss") | {"optimizer": 0} == _at(ddp, "loss") | {"optimizer": 0}


def test_zero_2_keeps_what_it_has_gathered_until_the_backward_pass() -> None:
    again, kept = _trace(fsdp=4), _trace(fsdp=4, zero=2)
    assert _at(again, "states") == _at(kept, "states")
    assert kept.allocated_bytes - again.allocated_bytes == 2 * (VOCAB + 2 * (LAYER + 2 * 256))


def test_weights_have_the_type_that_is_trained_in_whatever_the_checkpoint_is_stored_in() -> None:
    """Models' own config.json say bfloat16, and a multimodal one says it of each part."""
    stored = CONFIG | {"torch_dtype": "bfloat16", "vision": {"dtype": "float16"}, "quantization_config": {"bits": 4}}
    plain, given = (_trace(config=config, code="hf", fsdp=4) for config in (CONFIG, stored))
    assert _at(given, "states") == _at(plain, "states")
    assert _at(given, "states")["weights"] >= 4 * (2 * VOCAB + 2 * LAYER) / 4


@pytest.mark.parametrize("base", [pytest.param("bf16", marks=pytest.mark.soak), "nf4"])
def test_adapters_are_all_that_has_gradients_and_moments(base: str) -> None:
    found = _trace(code="hf", adapters=Adapters(8, ("q", "down"), BASES[base]))
    trained = 2 * 8 * sum(sum(LINEARS[name]) for name in ("q", "down"))
    frozen = sum(BASES[base].matrix_bytes(*size) for size in LINEARS.values())
    assert found.trained_parameters == trained
    assert found.parameters == 2 * LAYER + 2 * VOCAB + NORMS + trained  # packed matrices have as many as before
    assert _at(found, "states")["optimizer"] == pytest.approx(8 * trained, abs=ROUNDED)
    assert _at(found, "step")["gradients"] == pytest.approx(4 * trained, abs=ROUNDED)
    weights = 2 * frozen + 2 * (2 * VOCAB + NORMS) + 4 * trained
    assert _at(found, "states")["weights"] == pytest.approx(weights, abs=ROUNDED)


JOINED = {
    "phi3": {**CONFIG, "model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 256},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 128, "vocab_size": 512},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "targets", "widths"),
    [
        ("phi3", ("qkv", "down"), ((256, 512), (768, 256))),
        pytest.param("gpt_neox", ("v", "up"), ((64, 192), (64, 128)), marks=pytest.mark.soak),
        pytest.param("gpt2", ("q", "o", "down"), ((64, 192), (64, 64), (256, 64)), marks=pytest.mark.soak),
    ],
)
def test_one_matrix_of_several_has_one_adapter(
    family: str, targets: tuple[str, ...], widths: tuple[tuple[int, int], ...]
) -> None:
    found = _trace(code="hf", config=JOINED[family], adapters=Adapters(8, targets, BASES["nf4"]))
    assert found.trained_parameters == 2 * 8 * sum(map(sum, widths))


def test_adapters_on_all_matrices_find_them_by_any_name() -> None:
    """T5 has its own names, and casts what its MLP's second matrix reads to the type of that matrix."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
    adapters = Adapters(rank=8, targets=("q", "k", "v", "o", "gate", "up", "down"), base=BASES["nf4"])
    t5 = sizes | {"model_type": "t5", "decoder_start_token_id": 0}
    found = _trace(config=t5, code="hf", seq_tokens=64, adapters=adapters)
    # Four matrices of six attentions, and two of four MLPs.
    assert found.trained_parameters == 8 * (6 * 4 * (64 + 64) + 4 * 2 * (64 + 128))


def test_a_quantised_head_and_its_copies_are_traced() -> None:
    plain, double = BASES["nf4"], replace(BASES["nf4"], copies=2)
    first, second, head = (
        _trace(code="hf", adapters=Adapters(8, ("q",), base)) for base in (plain, double, replace(plain, head=True))
    )
    assert _at(second, "states") == _at(first, "states") and second.allocated_bytes >= first.allocated_bytes
    saved = 2 * VOCAB - plain.matrix_bytes(256, VOCAB // 256)
    assert _at(first, "states")["weights"] - _at(head, "states")["weights"] == pytest.approx(saved, abs=ROUNDED)


def test_what_nobody_has_said_how_to_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="has no tp_plan"):
        _trace(code="hf", config={"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, tp=2)
    with pytest.raises(LayoutError, match="not the sequence"):
        _trace(code="hf", tp=2, sp=True)
    with pytest.raises(LayoutError, match="2 key and value heads cannot be divided over tp4"):
        _trace(tp=4)
    with pytest.raises(LayoutError, match="over divided matrices"):
        _trace(tp=2, adapters=Adapters(8))
