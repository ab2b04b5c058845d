"""Settings of Hugging Face's accelerate and Trainer, and of Lightning, for a layout.

Names were read in accelerate's configuration files (FSDP version 2, `parallelism_config`), in transformers'
`TrainingArguments` and in Lightning's `ModelParallelStrategy`. Their loops have no pipelines and no expert parallelism.
Those of adapters are peft's `LoraConfig` and transformers' `BitsAndBytesConfig`.
"""

import json

from cordee.errors import LayoutError
from cordee.plan.layout import Layout
from cordee.plan.training import LINEARS, Adapters, Training
from cordee.workload.model import ModelShape

Settings = tuple[str, list[str], list[str]]
OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw-bf16": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit",
    "adamw-8bit-paged": "paged_adamw_8bit", "adamw-paged": "paged_adamw_32bit",
}  # fmt: skip
# The axes that each has no settings of. Their layers are those of transformers.
WITH_ADAPTERS = ("trainer",)
LEFT_OUT = {"accelerate": ("pp", "ep"), "trainer": ("pp", "ep", "tp", "cp"), "lightning": ("pp", "ep", "cp")}


def accelerate(shape: ModelShape, layout: Layout, training: Training) -> Settings:
    """Return the file for `accelerate launch --config_file`."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if layout.zero >= 2 else 'MULTI_GPU' if layout.gpus > 1 else 'NO'}",
        f"num_processes: {layout.gpus}",
        f"mixed_precision: {_mixed(training)}",
    ]
    if layout.zero >= 2:
        lines += ["fsdp_config:", *(f"  {key}: {_yaml(value)}" for key, value in _fsdp(layout, "fsdp_").items())]
    if layout.tp > 1 or layout.cp > 1 or layout.shard_ranks != layout.data_ranks:
        sizes = {
            "dp_replicate": layout.data_ranks // layout.shard_ranks,
            "dp_shard": layout.shard_ranks // layout.cp if layout.shard_ranks >= layout.cp else 1,
            "tp": layout.tp, "cp": layout.cp,
        }  # fmt: skip
        lines += ["parallelism_config:", *(f"  parallelism_config_{key}_size: {size}" for key, size in sizes.items())]
    notes = [
        f"in the script: a DataLoader of {layout.micro_batch} sequences a rank",
        f"Accelerator(gradient_accumulation_steps={layout.micro_batches(training.global_batch)})",
        "num_machines, machine_rank and main_process_ip are those of your nodes",
    ]
    return "\n".join(lines), _limits(layout, training), notes


def trainer(shape: ModelShape, layout: Layout, training: Training) -> Settings:
    """Return keyword arguments of `transformers.TrainingArguments`, as Python; and what makes adapters."""
    arguments: dict[str, object] = {
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(training.global_batch),
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "optim": OPTIMIZERS.get(training.optimizer.name, "adamw_torch_fused"),
    }
    if layout.zero >= 2:
        arguments["fsdp"] = "full_shard auto_wrap" if layout.zero == 3 else "shard_grad_op auto_wrap"
        arguments["fsdp_config"] = {"fsdp_version": 2} | _fsdp(layout, "", wrap=False)
    elif layout.recompute == "full":
        arguments["gradient_checkpointing"] = True
    lines = ["TrainingArguments(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"]
    cannot = _limits(layout, training)
    if layout.tp > 1 or layout.cp > 1:
        cannot.append("TrainingArguments have no tp and cp: give accelerate's parallelism_config (--launch accelerate)")
    if training.optimizer.name not in OPTIMIZERS:
        cannot.append(f"Trainer has no {training.optimizer.name}: give it optimizers=")
    notes = [f"torchrun --nproc-per-node: {layout.gpus} ranks in all"]
    if training.adapters is not None:
        lines += ["", _lora(training.adapters)]
        if training.adapters.base.bits < 16:
            lines += ["", _quantised(training.adapters, training.precision, sharded=layout.zero == 3)]
            notes.append("from_pretrained(..., quantization_config=...), then get_peft_model(model, LoraConfig(...))")
            if training.adapters.widened and layout.zero < 3:
                notes.append("before get_peft_model: prepare_model_for_kbit_training(model), which is planned")
        else:
            notes.append("get_peft_model(model, LoraConfig(...))")
        dropout = "lora_dropout is more than 0; " if training.adapters.dropout else ""
        notes.append(f"{dropout}lora_alpha and the learning rate are yours: no memory depends on them")
    return "\n".join(lines), cannot, notes


def lightning(shape: ModelShape, layout: Layout, training: Training) -> Settings:
    """Return the arguments of `lightning.Trainer`, as Python."""
    precision = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}.get(training.precision, "bf16-mixed")
    if layout.zero == 3 or layout.tp > 1:
        ways = f"ModelParallelStrategy(data_parallel_size={layout.dp}, tensor_parallel_size={layout.tp})"
        notes = ["in configure_model: fully_shard(layer, mesh=self.device_mesh['data_parallel']) for each layer"]
    else:
        ways = "'ddp'" if layout.gpus > 1 else "'auto'"
        notes = []
    lines = [
        "Trainer(",
        "    accelerator='gpu',",
        f"    devices={layout.gpus},  # of a node; num_nodes=... for more",
        f"    strategy={ways},",
        f"    precision={precision!r},",
        f"    accumulate_grad_batches={layout.micro_batches(training.global_batch)},",
        ")",
    ]
    cannot = _limits(layout, training)
    if layout.cp > 1:
        cannot.append("Lightning has no context parallelism")
    if layout.zero in (1, 2):
        cannot.append(f"Lightning's strategies shard everything or nothing, not ZeRO-{layout.zero}")
    notes.append(f"a DataLoader of {layout.micro_batch} sequences a rank; the optimizer in configure_optimizers")
    if layout.recompute == "full":
        notes.append("recomputation: apply_activation_checkpointing in configure_model")
    return "\n".join(lines), cannot, notes


def _lora(adapters: Adapters) -> str:
    """Return peft's settings; names of modules are Llama's, but for all of them, which peft finds itself.

    Raises:
        LayoutError: adapters, or a base, that peft and bitsandbytes do not have.
    """
    lacking = {
        "bitsandbytes has no FP8 base": adapters.base.name == "fp8",
        "peft has no joined adapter of queries, keys and values, which is LitGPT's": adapters.joined,
        "bitsandbytes leaves the output head in 16 bits": adapters.base.head,
    }
    for reason, applies in lacking.items():
        if applies:
            raise LayoutError(f"--launch trainer cannot write this: {reason}", hint="plan it without --launch")
    every = set(adapters.targets) == set(LINEARS)
    arguments: dict[str, object] = {
        "r": adapters.rank,
        "target_modules": "all-linear" if every else [f"{name}_proj" for name in adapters.targets],
        "task_type": "CAUSAL_LM",
    }
    if adapters.magnitudes:
        arguments["use_dora"] = True
    return "\n".join(["LoraConfig(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


def _quantised(adapters: Adapters, precision: str, *, sharded: bool) -> str:
    """Return transformers' settings of bitsandbytes; FSDP shards what is stored in one type."""
    if adapters.base.bits == 8:
        arguments: dict[str, object] = {"load_in_8bit": True}
    else:
        arguments = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        arguments["bnb_4bit_use_double_quant"] = adapters.base.name == "nf4-double"
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")
        arguments |= {"bnb_4bit_compute_dtype": dtype} | ({"bnb_4bit_quant_storage": dtype} if sharded else {})
    return "\n".join(["BitsAndBytesConfig(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


def _mixed(training: Training) -> str:
    return {"fp32": "'no'"}.get(training.precision, training.precision)


def _fsdp(layout: Layout, prefix: str, *, wrap: bool = True) -> dict[str, object]:
    """Return accelerate's settings of FSDP2, by its names."""
    settings: dict[str, object] = {
        "version": 2, "reshard_after_forward": layout.zero == 3, "activation_checkpointing": layout.recompute == "full",
        "offload_params": layout.offload in ("optimizer", "both"), "state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    if wrap:
        settings["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    else:
        del settings["version"]
    return {f"{prefix}{key}": value for key, value in settings.items()}


def _yaml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _limits(layout: Layout, training: Training) -> list[str]:
    """Return the parts of a layout that none of the three does."""
    limits = {
        "there are no pipelines (pp)": layout.pp > 1,
        "there is no expert parallelism (ep)": layout.ep > 1,
        "sequence parallelism (sp) is the model's own tensor-parallel plan": layout.sp and layout.tp > 1,
        "ZeRO-1 is not among FSDP's ways: every rank keeps its optimizer states": layout.zero == 1,
        f"selective recomputation is not a setting: {layout.recompute}": layout.recompute == "selective",
        "FP8 needs Transformer Engine's or torchao's layers in the model": training.precision == "fp8",
    }
    return [limit for limit, applies in limits.items() if applies]
