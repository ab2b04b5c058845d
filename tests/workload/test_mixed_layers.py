"""Layers that differ: their kinds from a config, their FLOPs, and that training them is refused."""

import pytest

from cordee.errors import ShapeError
from cordee.hardware.load import load_catalogue
from cordee.plan import Request
from cordee.workload.families import shape_from_config
from cordee.workload.load import load_shape

MISTRAL = {
    "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "sliding_window": 16,
}  # fmt: skip


def test_kinds_follow_the_config() -> None:
    assert set(shape_from_config(MISTRAL, name="m").mixed.kinds) == {"window"}
    assert shape_from_config(MISTRAL | {"sliding_window": None}, name="m").mixed is None
    qwen = MISTRAL | {"model_type": "qwen2", "max_window_layers": 3}
    assert shape_from_config(qwen, name="q").mixed is None  # use_sliding_window is not set
    windowed = shape_from_config(qwen | {"use_sliding_window": True}, name="q")
    assert [windowed.kind(layer) for layer in range(4)] == ["full", "full", "full", "window"]
    oss = load_shape("gpt-oss-20b")
    assert [oss.kind(layer) for layer in range(4)] == ["window", "full", "window", "full"]
    llama = load_shape("llama-4-scout")
    assert llama.mixed.kinds.count("full") == 12
    assert llama.mixed.window.chunked


@pytest.mark.parametrize("listed", [["full_attention"] * 3, ["other"] * 4])
def test_a_list_of_layers_that_is_wrong_is_refused(listed: list[str]) -> None:
    config = MISTRAL | {"model_type": "qwen2", "use_sliding_window": True, "layer_types": listed}
    with pytest.raises(ShapeError, match="layer_types has"):
        shape_from_config(config, name="m")


def test_a_window_costs_its_own_flops() -> None:
    full, near = shape_from_config(MISTRAL | {"sliding_window": None}, name="f"), shape_from_config(MISTRAL, name="w")
    assert near.attention_flop_per_token(16) == full.attention_flop_per_token(16)
    # Of 64 tokens the first 16 attend to 8 on average and the other 48 to 16: 14 instead of 32.
    assert near.attention_flop_per_token(64) / full.attention_flop_per_token(64) == 14 / 32
    assert near.parameters == full.parameters


@pytest.mark.parametrize("name", ["qwen3.5-27b", "gemma-3-27b", "nemotron-h-56b", "deepseek-v3.2"])
def test_training_such_a_model_is_refused(name: str) -> None:
    request = Request(shape=load_shape(name), gpu=load_catalogue().find_gpu("H100"), gpus=8)
    with pytest.raises(ShapeError, match="is not planned, since its layers differ"):
        request.case()


def test_linear_scaling_of_positions_lengthens_the_longest_sequence() -> None:
    scaled = MISTRAL | {"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert shape_from_config(scaled, name="m").positions == 400
    with pytest.raises(ShapeError, match="rope_scaling has factor 0"):
        shape_from_config(scaled | {"rope_scaling": {"type": "linear", "factor": 0}}, name="m")
    yarn = scaled | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert shape_from_config(yarn, name="m").positions == 100


def test_a_pattern_with_an_unknown_letter_is_refused() -> None:
    config = MISTRAL | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*X-"}
    with pytest.raises(ShapeError, match="hybrid_override_pattern is"):
        shape_from_config(config, name="n")
