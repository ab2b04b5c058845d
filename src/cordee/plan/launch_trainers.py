"""Settings of Hugging Face's accelerate and Trainer, and of Lightning.

Names were read in accelerate's configuration files (FSDP version 2, `parallelism_config`), in transformers'
`TrainingArguments` and in Lightning's `ModelParallelStrategy`. Their loops have no pipelines and no expert parallelism.
"""

import json

from cordee.plan.launch_adapters import adapters_notes, adapters_text
from cordee.plan.launch_parts import (
    Limit,
    Planned,
    Written,
    is_mixed,
    limited,
    optimizer_note,
    ranks_note,
    scripts_notes,
    weights_type,
)
from cordee.plan.layout import Layout
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw-bf16": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit",
    "adamw-8bit-master": "adamw_bnb_8bit", "adamw-8bit-paged": "paged_adamw_8bit", "adamw-paged": "paged_adamw_32bit",
    "sgd-momentum": "sgd",
}  # fmt: skip
# Families that Liger's kernels are written for, of those that are planned.
LIGER = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "granite", "gemma", "gemma2", "gemma3")
CONTEXT = {"ring": "alltoall", "all-gather": "allgather"}


def accelerate(planned: Planned) -> Written:
    """Return the file for `accelerate launch --config_file`."""
    layout, training = planned.layout, planned.training
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if layout.zero >= 2 else 'MULTI_GPU' if layout.gpus > 1 else 'NO'}",
        f"num_machines: {planned.nodes}",
        f"num_processes: {layout.gpus}",
        f"mixed_precision: '{_mixed(training)}'",
    ]
    if training.fused:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR", "  dynamo_use_regional_compilation: true"]
    if layout.zero >= 2:
        lines += ["fsdp_config:", *(f"  fsdp_{key}: {_yaml(value)}" for key, value in _fsdp(layout).items())]
    if layout.tp > 1 or layout.cp > 1 or layout.shard_ranks != layout.data_ranks:
        sizes = _dimensions(layout) | {"tp": layout.tp, "cp": layout.cp}
        lines += ["parallelism_config:", *(f"  parallelism_config_{key}_size: {size}" for key, size in sizes.items())]
        if layout.cp > 1 and layout.cp_kind in CONTEXT:
            lines.append(f"  parallelism_config_cp_comm_strategy: {CONTEXT[layout.cp_kind]}")
    notes = [
        f"in the script: a DataLoader of {layout.micro_batch} sequences a rank",
        f"Accelerator(gradient_accumulation_steps={layout.micro_batches(training.global_batch)})",
        f"from_pretrained(..., dtype=torch.{weights_type(training)})",
        optimizer_note(training),
        *scripts_notes(training, where="before accelerator.prepare", written=("compile",)),
    ]
    notes += ["machine_rank and main_process_ip are those of your nodes"] if planned.nodes > 1 else []
    if layout.recompute == "full" and layout.zero < 2:
        notes.append("recomputation: model.gradient_checkpointing_enable()")
    limits = _limits(layout, training)
    if layout.cp > 1 and layout.cp_kind not in CONTEXT:
        limits.append(Limit(f"accelerate's context parallelism is torch's, not {layout.cp_kind}"))
    return "\n".join(lines), limits, notes


def trainer(planned: Planned) -> Written:
    """Return keyword arguments of `transformers.TrainingArguments`, as Python; and what makes adapters.

    Raises:
        LayoutError: adapters that peft does not have.
    """
    layout, training = planned.layout, planned.training
    arguments: dict[str, object] = {
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(training.global_batch),
        "bf16": _mixed(training) == "bf16",
        "fp16": _mixed(training) == "fp16",
        "optim": OPTIMIZERS.get(training.optimizer.name, "adamw_torch_fused"),
    }
    arguments |= {"optim_args": "momentum=0.9"} if training.optimizer.name == "sgd-momentum" else {}
    arguments |= {"torch_compile": True} if training.fused else {}
    arguments |= {"use_liger_kernel": True} if training.loss == "chunked" else {}
    if layout.zero >= 2:
        fsdp = _fsdp(layout)
        fsdp["cpu_offload"] = fsdp.pop("offload_params")
        arguments |= {"fsdp": True, "fsdp_config": fsdp}
    elif layout.recompute == "full":
        arguments["gradient_checkpointing"] = True
    lines = [f"    {key}={value!r}," for key, value in arguments.items()]
    if layout.shard_ranks != layout.data_ranks:
        sizes = ", ".join(f"{key}_size={size}" for key, size in _dimensions(layout).items())
        lines.append(f"    parallelism_config=ParallelismConfig({sizes}),  # accelerate's")
    text = "\n".join(["TrainingArguments(", *lines, ")"])
    notes = [ranks_note(planned)]
    if training.adapters is not None:
        text += "\n\n" + adapters_text(planned.shape, layout, training, training.adapters)
        notes += adapters_notes(planned.shape, layout, training, training.adapters)
    else:
        notes.append(f"from_pretrained(..., dtype=torch.{weights_type(training)})")
    if training.fused:
        notes.append("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true in the environment: layers by themselves")
    if training.loss == "chunked":
        notes.append("Liger's kernels also fuse norms, rotations and activations: a little less memory than planned")
    notes += scripts_notes(training, where="before Trainer(...)", written=("loss", "compile", "in_backward"))
    return text, _trainers_limits(planned.shape, layout, training), notes


def lightning(planned: Planned) -> Written:
    """Return the arguments of `lightning.Trainer`, as Python."""
    layout, training = planned.layout, planned.training
    plain = {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true"}[weights_type(training)]
    mixed = "16-mixed" if training.precision == "fp16" else "bf16-mixed"
    precision = mixed if is_mixed(training) else plain
    sharded, offloaded = layout.zero == 3 or layout.tp > 1, layout.offload in ("optimizer", "both")
    if sharded:
        ways = f"ModelParallelStrategy(data_parallel_size={layout.dp}, tensor_parallel_size={layout.tp})"
        policies = (
            ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
            * is_mixed(training)
        )
        policies += ", offload_policy=CPUOffloadPolicy()" * offloaded
        shard = f"fully_shard(layer, mesh=self.device_mesh['data_parallel']{policies})"
        notes = [f"in configure_model: {shard} for each layer, then for the model"]
    else:
        ways = "'ddp'" if layout.gpus > 1 else "'auto'"
        notes = []
    lines = [
        "Trainer(",
        "    accelerator='gpu',",
        f"    devices={layout.gpus // planned.nodes},",
        f"    num_nodes={planned.nodes},",
        f"    strategy={ways},",
        f"    precision={precision!r},",
        f"    accumulate_grad_batches={layout.micro_batches(training.global_batch)},",
        ")",
    ]
    limits = _limits(layout, training) + limited(
        {
            "Lightning has no context parallelism": layout.cp > 1,
            f"Lightning's strategies shard everything or nothing, not ZeRO-{layout.zero}": layout.zero in (1, 2),
            "Lightning's ModelParallelStrategy has one axis of data: no groups that shard": layout.shard_ranks
            != layout.data_ranks,
            "Lightning's ModelParallelStrategy has no 16-mixed": sharded and precision == "16-mixed",
        }
    )
    notes.append(f"a DataLoader of {layout.micro_batch} sequences a rank; in configure_optimizers, the optimizer")
    notes.append(optimizer_note(training))
    notes.append(f"weights of torch.{weights_type(training)} (from_pretrained takes dtype=)")
    if layout.recompute == "full":
        notes.append("recomputation: apply_activation_checkpointing in configure_model")
    return "\n".join(lines), limits, notes + scripts_notes(training, where="in configure_model")


def _mixed(training: Training) -> str:
    """Return what autocast and FSDP compute in; no where weights are of that type."""
    return training.precision if is_mixed(training) else "no"


def _fsdp(layout: Layout) -> dict[str, object]:
    """Return accelerate's settings of FSDP2, by its names."""
    return {
        "version": 2, "reshard_after_forward": layout.zero == 3, "activation_checkpointing": layout.recompute == "full",
        "offload_params": layout.offload in ("optimizer", "both"), "state_dict_type": "SHARDED_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }  # fmt: skip


def _dimensions(layout: Layout) -> dict[str, int]:
    """Return accelerate's dimensions of data parallelism."""
    return {
        "dp_replicate": layout.data_ranks // layout.shard_ranks,
        "dp_shard": layout.shard_ranks // layout.cp if layout.shard_ranks >= layout.cp else 1,
    }


def _yaml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _limits(layout: Layout, training: Training) -> list[Limit]:
    """Return the parts of a plan that none of the three does."""
    optimizer, precision = training.optimizer, training.precision
    offloads = layout.offload in ("optimizer", "both")
    found = limited(
        {
            "there are no pipelines (pp)": layout.pp > 1,
            "there is no expert parallelism (ep)": layout.ep > 1,
            "sequence parallelism (sp) is the model's own tensor-parallel plan": layout.sp and layout.tp > 1,
            "ZeRO-1 is not among FSDP's ways: every rank keeps its optimizer states": layout.zero == 1,
            f"selective recomputation is not a setting: {layout.recompute}": layout.recompute == "selective",
            "activations stay on the GPU: there is no setting that offloads them": layout.offload
            in ("activations", "both"),
            "only FSDP offloads, whatever it shards": offloads and layout.zero < 2,
        }
    )
    fp8 = "FP8 needs Transformer Engine's or torchao's layers in the model"
    found += limited({fp8: precision == "fp8"}, "leave --precision out: it trains in bf16")
    unlike = {
        f"gradients have the type of the weights, with {optimizer.name} they are wider": (
            optimizer.gradient_bytes > optimizer.weight_bytes
        ),
        f"fp16 is scaled with fp32 weights, {optimizer.name} has none": (
            precision == "fp16" and training.adapters is None and not is_mixed(training)
        ),
    }
    return found + limited(unlike, "leave --optimizer out: it has adamw")


def _trainers_limits(shape: ModelShape, layout: Layout, training: Training) -> list[Limit]:
    """Return what the Trainer does not do beside."""
    name, loss = training.optimizer.name, training.loss
    axes = "TrainingArguments have no tp and cp: give accelerate's parallelism_config (--launch accelerate)"
    found = _limits(layout, training) + limited({axes: layout.tp > 1 or layout.cp > 1})
    optimizers = "use --optimizer " + ", ".join(OPTIMIZERS)
    found += limited({f"Trainer has no {name}: give it optimizers=": name not in OPTIMIZERS}, optimizers)
    steps = "Trainer's optimizer steps after the backward pass"
    found += limited({steps: training.optimizer.in_backward}, "leave --optimizer-in-backward out")
    unlike = {
        f"the loss is the model's own, not {loss}": loss not in (None, "eager", "chunked"),
        f"Liger has no chunked loss for {shape.family}": loss == "chunked" and shape.family not in LIGER,
    }
    return found + limited(unlike, "leave --loss out")
