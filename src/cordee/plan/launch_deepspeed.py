"""Settings of DeepSpeed: names were read in its configuration reference and its tutorial of AutoTP for training."""

import json

from cordee.plan.launch_parts import Limit, Planned, Written, limited, noted, optimizer_note, scripts_notes
from cordee.plan.layout import Layout
from cordee.plan.training import Training


def deepspeed(planned: Planned) -> Written:
    """Return the JSON, what DeepSpeed does not do of what was planned, and what belongs in the script."""
    layout, training = planned.layout, planned.training
    zero: dict[str, object] = {"stage": layout.zero, "overlap_comm": True}
    if layout.offload in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.zero == 3 and layout.shard_ranks != layout.data_ranks:
        zero["zero_hpz_partition_size"] = layout.shard_ranks
    settings: dict[str, object] = {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(training.global_batch),
        "zero_optimization": zero,
        training.precision if training.precision in ("bf16", "fp16") else "bf16": {
            "enabled": training.precision != "fp32"
        },
    }
    if layout.recompute != "none":
        settings["activation_checkpointing"] = {
            "partition_activations": layout.sp,
            "cpu_checkpointing": layout.offload in ("activations", "both"),
        }
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        settings["pipeline"] = {"stages": layout.pp}
    return json.dumps(settings, indent=2), _limits(layout, training), _notes(layout, training)


def _limits(layout: Layout, training: Training) -> list[Limit]:
    """Return the parts of a plan that DeepSpeed does not do."""
    hybrid, keeps = layout.shard_ranks != layout.data_ranks, layout.offload in ("activations", "both")
    optimizer = training.optimizer
    return limited(
        {
            "hpZ keeps a second copy of the weights in each group; optimizer states are sharded over all ranks": (
                hybrid and layout.zero == 3
            ),
            "DeepSpeed shards optimizer states over all data ranks": hybrid and layout.zero != 3,
            "DeepSpeed keeps on the host only activations that it recomputes from (cpu_checkpointing)": (
                keeps and layout.recompute == "none"
            ),
            "DeepSpeed's AutoTP keeps norms whole: no sequence parallelism (sp)": layout.sp and layout.tp > 1,
            "PipelineModule divides layers by its partition_method, not by a split of yours": layout.split is not None,
            "DeepSpeed's AutoTP trains with ZeRO-0 to 2, not 3": layout.tp > 1 and layout.zero == 3,
            f"DeepSpeed's pipeline works with ZeRO-0 and 1, not {layout.zero}": layout.pp > 1 and layout.zero >= 2,
            f"DeepSpeed's pipeline is 1F1B, not {layout.schedule}": layout.pp > 1 and layout.schedule != "1f1b",
            f"DeepSpeed's sequence parallelism is Ulysses, not {layout.cp_kind}": layout.cp > 1
            and layout.cp_kind != "ulysses",
            f"DeepSpeed keeps fp32 weights beside 16-bit ones, {optimizer.name} does not": (
                training.precision != "fp32" and not optimizer.master_bytes
            ),
            "DeepSpeed's optimizer steps after the backward pass": optimizer.in_backward,
        }
    )


def _notes(layout: Layout, training: Training) -> list[str]:
    """Return the parts that belong in the script, not in the settings."""
    stages, again = layout.pp, layout.recompute
    notes = {
        f'the model must be a PipelineModule with num_stages={stages}, partition_method="type:YourLayer"': stages > 1,
        f"recompute={again} is deepspeed.checkpointing (or torch's) in the model": again != "none",
        f"{optimizer_note(training)}, made in the script": training.optimizer.name != "adamw",
        f"give sequence_parallel_size={layout.cp} to the trainer": layout.cp > 1,
        f"give ep_size={layout.ep} to each deepspeed.moe.layer.MoE": layout.ep > 1,
        "FP8 comes from the model's own layers (Transformer Engine)": training.precision == "fp8",
    }
    return noted(notes) + scripts_notes(training, where="before deepspeed.initialize", written=("in_backward",))
