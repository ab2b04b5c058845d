"""Parameter counts, exactly: against what the checkpoints on Hugging Face hold."""

import json
from pathlib import Path

import pytest

from cordee.errors import CatalogueError, ShapeError
from cordee.workload.families import FAMILIES, shape_from_config
from cordee.workload.load import load_config, load_shape, model_names

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def _compressed(weights: dict[str, object], activations: object, packing: str = "pack-quantized") -> dict[str, object]:
    group = {"weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen2-7b", 7_615_616_512),
        ("qwen2-72b", 72_706_203_648),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_419_200),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-14b", 14_768_307_200),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("phi-4", 14_659_507_200),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-v2-lite", 15_706_484_224),
        ("nemotron-3-nano-30b-a3b", 31_577_940_288),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_known_models_have_their_exact_number_of_parameters(name: str, parameters: int) -> None:
    assert load_shape(name).parameters == parameters


@pytest.mark.parametrize("name", model_names())
def test_parts_sum_to_the_whole_and_layers_to_the_model(name: str) -> None:
    shape = load_shape(name)
    count = shape.parameter_count
    ends = shape.embedding_parameters + shape.head_parameters + shape.norm_parameters
    assert count.total == shape.parameters == ends + sum(shape.layer(i).total for i in range(shape.layers))
    assert 0 < shape.active_parameters <= shape.parameters
    assert shape.matmul_parameters > 0


def test_the_names_say_how_many_are_active() -> None:
    assert load_shape("qwen3-30b-a3b").active_parameters / 1e9 == pytest.approx(3.3, abs=0.1)
    assert load_shape("qwen3-235b-a22b").active_parameters / 1e9 == pytest.approx(22, abs=0.3)
    assert load_shape("deepseek-v3").active_parameters / 1e9 == pytest.approx(37, abs=0.7)
    assert load_shape("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.9, abs=0.1)
    assert load_shape("llama-3-70b").active_parameters == load_shape("llama-3-70b").parameters


def test_a_tiny_llama_by_hand() -> None:
    shape = shape_from_config(LLAMA, name="tiny")
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert shape.parameters == 2 * 1000 * 64 + 2 * layer + 64
    tied = shape_from_config(LLAMA | {"tie_word_embeddings": True}, name="tiny")
    assert shape.parameters - tied.parameters == 64_000
    assert shape.matmul_parameters == tied.matmul_parameters
    biased = shape_from_config(LLAMA | {"attention_bias": True, "mlp_bias": True}, name="tiny")
    assert biased.parameters - shape.parameters == 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)


@pytest.mark.parametrize(
    ("quantisation", "name"),
    [
        (None, "bf16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8-wo"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8"),
        (_compressed({"num_bits": 8, "type": "int"}, {"num_bits": 8}), "int8"),
        (_compressed({"num_bits": 4, "type": "int"}, None), "int4"),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "block"}, {"num_bits": 8}), "fp8-block"),
        (_compressed({"num_bits": 4, "type": "float"}, None, "mxfp4-pack-quantized"), "mxfp4"),
        ({"quant_method": "quark"}, "quark"),
    ],
)
def test_the_format_of_a_checkpoint_is_read(quantisation: dict[str, object] | None, name: str) -> None:
    assert shape_from_config(LLAMA | {"quantization_config": quantisation}, name="tiny").native_format == name


def test_the_format_of_a_checkpoint_may_be_in_its_own_file_or_beside_the_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert load_shape(str(tmp_path)).native_format == "nvfp4"
    beside = {"text_config": LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    assert load_shape(str(tmp_path)).native_format == "int4"


def test_training_flops_by_hand() -> None:
    shape = shape_from_config(LLAMA, name="tiny")
    products = shape.parameters - 64_000
    scores = 2 * (2 * 100 * 4 * 2 * 16) / 2
    assert shape.train_flop_per_token(100) == 3 * (2 * products + scores)


def test_expert_layers_follow_the_config() -> None:
    v3 = load_shape("deepseek-v3")
    assert [v3.is_expert_layer(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert v3.expert_layers == 58
    sparse = {
        **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3],
    }  # fmt: skip
    shape = shape_from_config(sparse, name="sparse")
    assert [shape.is_expert_layer(i) for i in range(6)] == [False, True, False, False, False, True]


def test_qwen2_moe_has_a_gated_shared_expert() -> None:
    config = {
        **LLAMA, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    }  # fmt: skip
    layer = shape_from_config(config, name="q").layer(0)
    assert layer.experts == 4 * 3 * 64 * 32
    assert layer.mlp == 3 * 64 * 96 + 64
    assert layer.router == 64 * 4


def test_deepseek_without_compressed_queries() -> None:
    v2_lite = {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 10944, "vocab_size": 102400, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    assert shape_from_config(v2_lite, name="v2-lite").parameters == 15_706_484_224


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(ShapeError, match=f"config.json has no {field}") as caught:
        shape_from_config(config, name="tiny")
    assert field in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"model_type": "lama"}, "model_type 'lama' is not a family"),
        ({"model_type": None}, "no model_type, so that its family is unknown"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        shape_from_config(LLAMA | change, name="tiny")
    assert says in caught.value.message
    assert caught.value.hint


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(ShapeError, match="a token passes 3 of 2 experts"):
        shape_from_config(config, name="m")


def test_a_folder_without_a_config_and_an_unknown_family_say_what_can_be_done(tmp_path: Path) -> None:
    for load in (load_shape, load_config):
        with pytest.raises(ShapeError, match="has no config"):
            load(str(tmp_path))
    with pytest.raises(ShapeError) as caught:
        shape_from_config({"model_type": "mamba"}, name="x")
    assert str(caught.value.hint).startswith("`cordee plan MODEL --gpus 8xH100 --trace`")


def test_every_family_is_in_the_catalogue_or_tested_here() -> None:
    # A family with another's reader is tested with that one.
    shipped = {FAMILIES[load_shape(name).family] for name in model_names()}
    assert {name for name, reader in FAMILIES.items() if reader not in shipped} == {"qwen2_moe"}


def test_a_config_may_be_a_file_or_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_shape(str(folder)) == load_shape(str(folder / "config.json"))
    assert load_shape(str(folder)).name == "my-model"
    (folder / "vision.json").write_text(json.dumps({"model_type": "llava", "text_config": LLAMA}))
    assert load_shape(str(folder / "vision.json")).parameters == load_shape(str(folder)).parameters


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="unknown model 'llama-3-70'") as caught:
        load_shape("llama-3-70")
    assert (caught.value.hint or "").startswith("did you mean llama-3-70b? ")
    with pytest.raises(CatalogueError, match="unknown model"):
        load_shape(str(tmp_path / "nowhere"))
    with pytest.raises(ShapeError, match=r"has no config\.json"):
        load_shape(str(tmp_path))
    with pytest.raises(CatalogueError, match="unknown model ''"):
        load_shape("")
    for text, says in (("{", "cannot be read"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ShapeError, match=says):
            load_shape(str(tmp_path))
