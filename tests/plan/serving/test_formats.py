"""Formats by the names that people write, and the checkpoint's own as the default of a plan."""

import json
from pathlib import Path

import pytest

from cordee.errors import LayoutError
from cordee.plan.serving.engine import ENGINES, Engine
from cordee.plan.serving.formats import KV, WEIGHTS, default_format, find_format
from cordee.planning import serving_request
from cordee.workload.load import load_shape, model_names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Q4_K_M", "gguf-q4_k_m"), ("q4_k_m", "gguf-q4_k_m"), ("GGUF-Q8_0", "gguf-q8_0"), ("IQ4_XS", "gguf-iq4_xs"),
        ("FP8", "fp8"), ("float16", "fp16"), ("F32", "fp32"), ("awq", "int4"), ("w8a8", "int8"),
    ],
)  # fmt: skip
def test_formats_are_found_by_the_names_of_their_files(text: str, name: str) -> None:
    assert find_format(WEIGHTS, text).name == name


def test_a_mistyped_format_has_a_near_one() -> None:
    with pytest.raises(LayoutError) as refused:
        find_format(WEIGHTS, "Q4_KM")
    assert refused.value.hint is not None and "did you mean q4_k_m?" in refused.value.hint
    with pytest.raises(LayoutError) as refused:
        find_format(KV, "q8")
    assert refused.value.hint is not None and "q8_0" in refused.value.hint


def test_more_bits_are_larger_among_the_types_of_llama_cpp() -> None:
    """Bits a weight of Llama 7B: Q3_K_M 3.91, Q4_K_M 4.84, Q5_K_M 5.68 (llama.cpp, quantize)."""
    for name, bits in (("q3_k_m", 3.91), ("q4_k_m", 4.84), ("q5_k_m", 5.68)):
        form = WEIGHTS[f"gguf-{name}"]
        assert form.bits < bits < max(form.mixed_bits.values())


@pytest.mark.parametrize("engine", ENGINES, ids=lambda each: f"{each.name}-{each.version}")
def test_every_engine_starts_from_the_checkpoints_format_or_one_with_as_many_bits(engine: Engine) -> None:
    served = engine.weights
    for model in model_names():
        native = WEIGHTS[load_shape(model).native_format]
        found = default_format(native.name, served)
        assert found.name in served and found.bits >= native.bits - 0.01
        assert native.name not in served or found is native


@pytest.mark.parametrize(
    ("model", "gpus", "engine", "name"),
    [
        ("deepseek-v3", "8xH200", None, "fp8-block"), ("gpt-oss-20b", "1xRTX-4090", None, "mxfp4"),
        ("llama-3-8b", "1xH100", None, "bf16"), ("deepseek-v3", "16xH200", "llama.cpp", "gguf-q8_0"),
        ("gpt-oss-20b", "1xH100", "llama.cpp", "mxfp4"),
    ],
)  # fmt: skip
def test_a_plan_starts_from_the_checkpoints_format(model: str, gpus: str, engine: str | None, name: str) -> None:
    assert [each.name for each in serving_request(model, gpus, engine=engine).weights] == [name]


def test_a_config_with_quantisation_is_planned_in_it(tmp_path: Path) -> None:
    llama = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000, "quantization_config": {"quant_method": "awq", "bits": 4},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama))
    assert serving_request(path, "1xH100").weights == (WEIGHTS["int4"],)
    path.write_text(json.dumps({**llama, "quantization_config": {"quant_method": "quark"}}))
    with pytest.raises(LayoutError, match="the checkpoint's weights are in 'quark'") as refused:
        serving_request(path, "1xH100")
    assert refused.value.hint is not None and "--weights" in refused.value.hint
    assert serving_request(path, "1xH100", weights="fp8").weights == (WEIGHTS["fp8"],)


def test_any_format_is_one_that_the_engine_serves() -> None:
    assert {each.name for each in serving_request("llama-3-8b", "1xH100", weights="any").weights} == {
        "bf16", "fp8", "int4"
    }  # fmt: skip
    found = serving_request("llama-3-8b", "1xH100", weights="any", kv="any", engine="llama.cpp")
    assert {each.name for each in found.weights} == {"bf16", "gguf-q8_0", "gguf-q4_k_m"}
    assert {each.name for each in found.kv} == {"bf16", "q8_0"}
