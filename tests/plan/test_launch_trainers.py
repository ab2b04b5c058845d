"""Settings for accelerate, Hugging Face's Trainer and Lightning: their own code takes them."""

import ast

import pytest
from asking import planned
from ruamel.yaml import YAML

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan.launch import launch_settings
from cordee.plan.layout import Layout
from cordee.plan.settings import Settings
from cordee.workload.load import load_shape

SHAPE = load_shape("llama-3-8b")
TRAINING = Settings(global_batch=64).training(SHAPE, 8)
FSDP = Layout(dp=8, zero=3, micro_batch=2, recompute="full")


def arguments(text: str) -> dict[str, object]:
    """The keyword arguments of a call as text, those that are literals."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return {
        each.arg or "": ast.literal_eval(each.value) for each in call.keywords if not isinstance(each.value, ast.Call)
    }


def test_accelerate_gets_fsdp2_with_what_the_layout_has() -> None:
    launch = launch_settings("accelerate", SHAPE, FSDP, TRAINING)
    found = YAML(typ="safe").load(launch.text)
    assert (found["distributed_type"], found["num_processes"], found["mixed_precision"]) == ("FSDP", 8, "bf16")
    fsdp = found["fsdp_config"]
    assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_reshard_after_forward"] and fsdp["fsdp_activation_checkpointing"]
    assert "gradient_accumulation_steps=4" in " ".join(launch.notes) and not launch.cannot
    hybrid = YAML(typ="safe").load(launch_settings("accelerate", SHAPE, Layout(dp=8, zero=3, shard=4), TRAINING).text)
    assert hybrid["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    plain = YAML(typ="safe").load(launch_settings("accelerate", SHAPE, Layout(dp=8), TRAINING).text)
    assert plain["distributed_type"] == "MULTI_GPU" and "fsdp_config" not in plain


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that 5.3 does not know yet
def test_the_trainers_own_class_takes_its_arguments() -> None:
    training_arguments = pytest.importorskip("transformers").TrainingArguments
    for layout in (Layout(micro_batch=2), Layout(micro_batch=4, recompute="full")):
        found = arguments(launch_settings("trainer", SHAPE, layout, TRAINING).text)
        made = training_arguments(output_dir="unused", use_cpu=True, **(found | {"bf16": False}))
        assert made.gradient_accumulation_steps == 64 // layout.micro_batch
        assert made.gradient_checkpointing == (layout.recompute == "full")
    sharded = arguments(launch_settings("trainer", SHAPE, FSDP, TRAINING).text)
    assert sharded["fsdp"] == "full_shard auto_wrap" and sharded["gradient_accumulation_steps"] == 4


def test_adapters_are_written_as_peft_and_bitsandbytes_have_them() -> None:
    # peft is not among the tests' packages: its settings are compared as text.
    quantised = pytest.importorskip("transformers").BitsAndBytesConfig
    text = launch_settings("trainer", SHAPE, Layout(), Settings(train="qlora", rank=32).training(SHAPE, 1)).text
    _, lora, base = text.split("\n\n")
    assert arguments(lora) == {"r": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    made = quantised(**arguments(base))
    assert made.load_in_4bit and made.bnb_4bit_quant_type == "nf4" and not made.bnb_4bit_use_double_quant
    sharded = Settings(train="dora", base_bits="nf4-double", targets="q,v").training(SHAPE, 8)
    _, lora, base = launch_settings("trainer", SHAPE, FSDP, sharded).text.split("\n\n")
    assert arguments(lora)["target_modules"] == ["q_proj", "v_proj"] and arguments(lora)["use_dora"]
    assert quantised(**arguments(base)).bnb_4bit_use_double_quant and "bnb_4bit_quant_storage='bfloat16'" in base
    plain = launch_settings("trainer", SHAPE, Layout(), Settings(train="lora").training(SHAPE, 1)).text
    assert "BitsAndBytesConfig" not in plain
    with pytest.raises(LayoutError, match="bitsandbytes has no FP8 base"):
        launch_settings("trainer", SHAPE, Layout(), Settings(train="qlora", base_bits="fp8").training(SHAPE, 1))


def test_the_trainer_says_to_prepare_a_quantised_model_as_it_is_planned() -> None:
    training = Settings(train="qlora", model_code="hf").training(SHAPE, 1)
    assert any(
        "prepare_model_for_kbit_training" in each
        for each in launch_settings("trainer", SHAPE, Layout(), training).notes
    )
    sharded = launch_settings("trainer", SHAPE, Layout(dp=2, zero=3), training)
    assert not any("prepare_model_for_kbit_training" in each for each in sharded.notes)


def test_lightning_gets_a_strategy_of_the_layouts_sizes() -> None:
    launch = launch_settings("lightning", SHAPE, Layout(dp=4, tp=2, zero=3), TRAINING)
    assert "ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)" in launch.text
    assert arguments(launch.text)["accumulate_grad_batches"] == 16


@pytest.mark.parametrize("launcher", ["accelerate", "trainer", "lightning"])
def test_what_they_cannot_is_said(launcher: str) -> None:
    launch = launch_settings(launcher, SHAPE, Layout(dp=2, pp=4, zero=1), TRAINING)
    assert any("pipelines" in each for each in launch.cannot)


@pytest.mark.parametrize("launcher", ["accelerate", "trainer", "lightning"])
def test_only_what_they_run_is_searched_with_the_norms_of_hugging_face(launcher: str) -> None:
    answer = planned(SHAPE, load_catalogue().find_gpu("H100"), 8, launcher=launcher)
    assert answer.launch is not None and answer.training.tuning.composite_norms
    assert not answer.launch.cannot
    assert {(each.layout.pp, each.layout.ep, each.layout.recompute == "selective") for each in answer.fitting} == {
        (1, 1, False)
    }


def test_a_trainer_that_runs_none_of_the_layouts_has_no_settings() -> None:
    small = load_shape("gpt2")
    answer = planned(small, load_catalogue().find_gpu("H100"), 8, launcher="trainer", layout="tp=2,dp=4,zero=1")
    with pytest.raises(LayoutError, match="trainer runs no layout that fits"):
        _ = answer.launch
