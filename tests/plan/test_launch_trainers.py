"""Settings for accelerate, Hugging Face's Trainer and Lightning: their own code takes them."""

import ast
import os
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from asking import planned
from ruamel.yaml import YAML

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan.launch import launch_settings
from cordee.plan.launch_parts import FRAMEWORKS_OF
from cordee.plan.layout import Layout, Offload
from cordee.plan.settings import Settings
from cordee.plan.states import layer_linears
from cordee.plan.training import Framework
from cordee.workload.families import shape_from_config
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


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (replace(FSDP, offload="optimizer"), {"compiled": True}),
        (Layout(dp=64, zero=3, shard=8), {}),
        (Layout(dp=4, cp=2, zero=3, cp_kind="all-gather"), {"optimizer": "adamw-bf16"}),
        (Layout(dp=4, tp=2, zero=3), {"precision": "fp32"}),
        (Layout(), {"precision": "fp16"}),
    ],
)
def test_accelerates_own_class_reads_its_file(layout: Layout, settings: dict[str, Any], tmp_path: Path) -> None:
    read = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig.from_yaml_file
    training = Settings(**settings).training(SHAPE, layout.gpus)
    path = tmp_path / "accelerate.yaml"
    path.write_text(launch_settings("accelerate", SHAPE, layout, training).text)
    made = read(str(path))
    pure = settings.get("optimizer") == "adamw-bf16" or training.precision == "fp32"
    assert (made.num_processes, made.num_machines) == (layout.gpus, max(1, layout.gpus // 8))
    assert made.mixed_precision == ("no" if pure else training.precision)
    assert bool(made.fsdp_config) == (layout.zero == 3) and bool(made.dynamo_config) == (training.fused is True)
    assert made.fsdp_config.get("fsdp_offload_params", False) == (layout.offload == "optimizer")
    sizes = {key: value for key, value in (made.parallelism_config or {}).items() if key.endswith("_size")}
    assert not sizes or prod(sizes.values()) == layout.gpus


def made_arguments(text: str, **other: object) -> Any:
    """transformers' own object from what is written, on a CPU; without a type that a CPU cannot train in."""
    training_arguments = pytest.importorskip("transformers").TrainingArguments
    found = arguments(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        # Its other name is not known to 5.3 yet.
        warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated", FutureWarning)
        return training_arguments(output_dir="unused", use_cpu=True, **(found | {"bf16": False, "fp16": False} | other))


def test_the_trainers_own_class_takes_its_arguments() -> None:
    for layout in (Layout(micro_batch=2), Layout(micro_batch=4, recompute="full")):
        made = made_arguments(launch_settings("trainer", SHAPE, layout, TRAINING).text)
        assert made.gradient_accumulation_steps == 64 // layout.micro_batch
        assert made.gradient_checkpointing == (layout.recompute == "full")
    for name, wanted in (("adamw-8bit-paged", "paged_adamw_8bit"), ("sgd-momentum", "sgd")):
        training = Settings(optimizer=name).training(SHAPE, 1)
        assert made_arguments(launch_settings("trainer", SHAPE, Layout(), training).text).optim.value == wanted


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_trainer_shards_offloads_and_recomputes_as_planned(offload: Offload) -> None:
    launch = launch_settings("trainer", SHAPE, replace(FSDP, offload=offload), TRAINING)
    plugin = made_arguments(launch.text).fsdp_plugin_args
    assert plugin["fsdp_version"] == 2 and plugin["reshard_after_forward"] and plugin["activation_checkpointing"]
    made = pytest.importorskip("accelerate").FullyShardedDataParallelPlugin(**plugin)
    assert type(made.cpu_offload).__name__ == ("CPUOffloadPolicy" if offload == "optimizer" else "OffloadPolicy")
    kept = made_arguments(launch_settings("trainer", SHAPE, Layout(dp=8, zero=2), TRAINING).text).fsdp_plugin_args
    assert not kept["reshard_after_forward"] and not kept["activation_checkpointing"]


def test_groups_that_shard_are_accelerates_dimensions() -> None:
    launch = launch_settings("trainer", SHAPE, Layout(dp=64, zero=3, shard=8), TRAINING)
    config = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
    call = ast.parse(launch.text, mode="eval").body
    assert isinstance(call, ast.Call)
    dimensions = next(each.value for each in call.keywords if each.arg == "parallelism_config")
    made = config(**arguments(ast.unparse(dimensions)))
    assert (made.dp_replicate_size, made.dp_shard_size) == (8, 8) and not launch.cannot
    assert launch_settings("lightning", SHAPE, Layout(dp=64, zero=3, shard=8), TRAINING).cannot


@pytest.mark.parametrize("launcher", ["accelerate", "trainer", "lightning", "torchtitan"])
def test_weights_are_of_the_type_that_is_planned(launcher: str) -> None:
    def said(layout: Layout = FSDP, **settings: Any) -> str:
        launch = launch_settings(launcher, SHAPE, layout, Settings(**settings).training(SHAPE, 8))
        return "\n".join((launch.text, *launch.notes))

    mixed = {"accelerate": "mixed_precision: 'bf16'", "trainer": "bf16=True", "lightning": "precision='bf16-mixed'"}
    pure = {"accelerate": "mixed_precision: 'no'", "trainer": "bf16=False", "lightning": "precision='bf16-true'"}
    for name in ("adamw", "adamw-8bit-master"):
        assert mixed.get(launcher, "") in said(optimizer=name) and "float32" in said(optimizer=name)
    for name in ("adamw-bf16", "adamw-8bit"):
        assert pure.get(launcher, "") in said(optimizer=name) and "bfloat16" in said(optimizer=name)
    assert pure.get(launcher, "").replace("bf16-true", "32-true") in said(precision="fp32")


def test_layers_are_compiled_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Settings(compiled=True, model_code="hf").training(SHAPE, 8)
    dynamo = YAML(typ="safe").load(launch_settings("accelerate", SHAPE, FSDP, training).text)["dynamo_config"]
    assert dynamo["dynamo_backend"] == "INDUCTOR" and dynamo["dynamo_use_regional_compilation"]
    launch = launch_settings("trainer", SHAPE, FSDP, training)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert made_arguments(launch.text).torch_compile
    variable, _, value = next(note for note in launch.notes if "DYNAMO" in note).split(" ")[0].partition("=")
    os.environ[variable] = value
    plugin = pytest.importorskip("accelerate.utils").TorchDynamoPlugin(backend="inductor")
    assert plugin.use_regional_compilation


def test_a_chunked_loss_is_ligers_where_it_has_the_family() -> None:
    training = Settings(loss="chunked").training(SHAPE, 8)
    assert made_arguments(launch_settings("trainer", SHAPE, FSDP, training).text).use_liger_kernel
    small = load_shape("gpt2")
    launch = launch_settings("trainer", small, FSDP, Settings(loss="chunked").training(small, 8))
    assert launch.cannot == ("Liger has no chunked loss for gpt2",)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
        ("phi3", {"pad_token_id": 0}),
        ("llama", {}),
        ("qwen3", {"head_dim": 8}),
    ],
)
def test_targets_are_modules_of_the_familys_code(family: str, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    plain = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 32,
    }  # fmt: skip
    given = config if family == "gpt2" else plain | config
    shape = shape_from_config({"model_type": family, **given}, name=family)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **given))
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    for linear in layer_linears(shape):
        training = Settings(train="lora", targets=linear.name).training(shape, 1)
        (target,) = arguments(launch_settings("trainer", shape, Layout(), training).text.split("\n\n")[1])[
            "target_modules"
        ]  # type: ignore[misc]
        found = [module for name, module in modules.items() if name.endswith(f".{target}")]
        sizes = {linear.inputs, linear.outputs}
        assert [set(module.weight.shape) for module in found] == [sizes] * shape.layers, target
    every = Settings(train="lora").training(shape, 1)
    assert "'all-linear'" in launch_settings("trainer", shape, Layout(), every).text


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


def test_stacks_of_experts_are_written_as_parameters() -> None:
    mixtral, deepseek = load_shape("mixtral-8x7b"), load_shape("deepseek-v3")
    training = Settings(train="qlora", targets="q,router,experts").training(mixtral, 8)
    found = launch_settings("trainer", mixtral, FSDP, training)
    lora = arguments(found.text.split("\n\n")[1])
    assert lora["target_modules"] == ["q_proj"]
    assert lora["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    assert any("bitsandbytes leaves in 16 bits" in note for note in found.notes)
    latent = Settings(train="lora", targets="attention").training(deepseek, 8)
    lora = arguments(launch_settings("trainer", deepseek, FSDP, latent).text.split("\n\n")[1])
    assert lora["target_modules"] == ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def test_the_trainer_says_to_prepare_a_quantised_model_as_it_is_planned() -> None:
    training = Settings(train="qlora", model_code="hf").training(SHAPE, 1)
    assert any(
        "prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)" in each
        for each in launch_settings("trainer", SHAPE, Layout(), training).notes
    )
    sharded = launch_settings("trainer", SHAPE, Layout(dp=2, zero=3), training)
    assert not any("prepare_model_for_kbit_training" in each for each in sharded.notes)


def test_dropout_is_written_as_it_was_asked() -> None:
    training = Settings(train="lora", lora_dropout=0.1).training(SHAPE, 1)
    _, lora = launch_settings("trainer", SHAPE, Layout(), training).text.split("\n\n")
    assert arguments(lora)["lora_dropout"] == 0.1


@pytest.mark.parametrize("layout", [Layout(dp=64, zero=3), Layout(dp=8, tp=2, zero=3), Layout()])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-bf16"])
@pytest.mark.filterwarnings("ignore:The `srun` command")
def test_lightning_makes_its_trainer(layout: Layout, optimizer: str) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.strategies import ModelParallelStrategy

    training = Settings(optimizer=optimizer).training(SHAPE, layout.gpus)
    launch = launch_settings("lightning", SHAPE, layout, training, node_gpus=8)
    made = eval(
        launch.text.replace("accelerator='gpu'", "accelerator='cpu', logger=False, enable_checkpointing=False"),
        {"Trainer": lightning.Trainer, "ModelParallelStrategy": ModelParallelStrategy},
    )
    assert (made.num_nodes, made.world_size) == (max(1, layout.gpus // 8), layout.gpus)
    assert made.accumulate_grad_batches == layout.micro_batches(training.global_batch)


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
    with pytest.raises(LayoutError, match="trainer does not run tp2 dp4 zero1"):
        _ = answer.launch


@pytest.mark.parametrize(
    ("settings", "hint"), [({"precision": "fp8"}, "leave --precision out"), ({"optimizer": "muon"}, "use --optimizer")]
)
def test_the_hint_is_about_what_was_asked(settings: dict[str, Any], hint: str) -> None:
    answer = planned(SHAPE, load_catalogue().find_gpu("H100"), 8, launcher="trainer", **settings)
    with pytest.raises(LayoutError) as caught:
        _ = answer.launch
    assert caught.value.hint is not None and caught.value.hint.startswith(hint)


@pytest.mark.parametrize("launcher", ["megatron", "deepspeed", "torchtitan"])
def test_a_launcher_plans_with_its_own_framework(launcher: str) -> None:
    gpu, own = load_catalogue().find_gpu("H100"), FRAMEWORKS_OF[launcher]
    answer = planned(SHAPE, gpu, 8, launcher=launcher, framework=None)
    assert answer.training.framework == own and answer.launch is not None and not answer.launch.cannot
    other: Framework = "torch" if own != "torch" else "megatron"
    with pytest.raises(LayoutError, match=f"--launch {launcher} runs {own}, not {other}"):
        planned(SHAPE, gpu, 8, launcher=launcher, framework=other)
