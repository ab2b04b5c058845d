"""Settings that make torchtitan, Megatron-LM, DeepSpeed or Cordee's own trainer run the layout that was chosen.

What a launcher cannot do is said, never left out in silence. Names were read in torchtitan's config/job_config.py,
Megatron-LM's training/arguments.py and transformer_config.py, and DeepSpeed's configuration and training reference.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.plan.layout import Layout, Training
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of a layout as text (flags, TOML, JSON or YAML).

    `cannot` is what this launcher does not do of the layout, `notes` what has to stand in the script.
    """

    launcher: str
    layout: str
    text: str
    cannot: tuple[str, ...]
    notes: tuple[str, ...]


def launch_settings(launcher: str, shape: ModelShape, layout: Layout, training: Training) -> Launch:
    """What to give this launcher.

    Raises:
        LayoutError: no such launcher.
    """
    if launcher not in LAUNCHERS:
        raise LayoutError(f"unknown launcher {launcher!r}", hint="use " + ", ".join(LAUNCHERS))
    text, cannot, notes = LAUNCHERS[launcher](shape, layout, training)
    return Launch(launcher, str(layout), text, tuple(cannot), tuple(notes))


def first_to_launch(launcher: str, shape: ModelShape, layouts: Sequence[Layout], training: Training) -> Launch:
    """The first of these layouts, the best first, that the launcher runs as planned; else the best with its limits.

    Raises:
        LayoutError: no such launcher.
    """
    assert layouts, "something fits"
    every = [launch_settings(launcher, shape, layout, training) for layout in layouts]
    return next((launch for launch in every if not launch.cannot), every[0])


_TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def _torchtitan(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    cannot = []
    replicate = layout.data_ranks // layout.shard_ranks if layout.zero == 3 else layout.dp
    shard = layout.dp // replicate if layout.zero == 3 else 1
    if layout.zero in (1, 2):
        cannot.append(f"torchtitan has no ZeRO-{layout.zero} without sharded weights: this replicates (DDP)")
    if layout.zero == 3 and layout.dp % replicate:
        cannot.append("HSDP replicates whole data ranks: the shard group cuts through context parallelism here")
        replicate, shard = 1, layout.dp
    schedule = _TITAN_SCHEDULES.get(layout.schedule)
    if schedule is None:
        cannot.append(f"torch has no {layout.schedule} schedule: 1F1B stands in")
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        cannot.append("context parallelism of torchtitan is a ring or an all-gather, not Ulysses")
    if layout.tp > 1 and not layout.sp:
        cannot.append("torchtitan's tensor parallelism always shards the sequence of the norms (sp)")
    per_rank = layout.micro_batches(training.global_batch) * layout.micro_batch
    # Without a pipeline gradients accumulate over local batches; a pipeline cuts one local batch into micro-batches.
    local = per_rank if layout.pp > 1 else layout.micro_batch
    lines = [
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {training.global_batch}",
        f"seq_len = {training.seq_tokens}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
        f"tensor_parallel_degree = {layout.tp}",
        f"context_parallel_degree = {layout.cp}",
        f"pipeline_parallel_degree = {layout.pp}",
    ]
    if layout.cp > 1:
        lines.append(
            f'context_parallel_rotate_method = "{"allgather" if layout.cp_kind == "all-gather" else "alltoall"}"'
        )
    if layout.pp > 1:
        stages = layout.pp * layout.chunks
        per_stage = -(-shape.layers // stages)
        if -(-shape.layers // per_stage) != stages:
            cannot.append(f"{shape.layers} layers do not divide into {stages} stages: name them by hand")
        lines += [
            f'pipeline_parallel_schedule = "{schedule or "1F1B"}"',
            f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
            f"pipeline_parallel_layers_per_stage = {per_stage}",
            "pipeline_parallel_first_stage_less_layers = 0",
            "pipeline_parallel_last_stage_less_layers = 0",
        ]
    if layout.ep > 1:
        lines.append(f"expert_parallel_degree = {layout.ep}")
        lines.append(f"expert_tensor_parallel_degree = {layout.expert_tp}")
    lines += ["", "[activation_checkpoint]", f'mode = "{layout.recompute}"']
    if layout.recompute == "selective":
        lines.append('selective_ac_option = "op"')
    if layout.offload != "none":
        cannot.append(f"offload of {layout.offload} is not a setting of torchtitan's trainer")
    return "\n".join(lines), cannot, []


_MEGATRON_CP = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}
_MEGATRON_OPTIMIZERS = {
    "adamw": (), "adamw-fp32-grads": (),
    "adamw-bf16-moments": ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
}  # fmt: skip


def _megatron(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    cannot = []
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {training.global_batch}",
        f"--seq-length {training.seq_tokens}",
        f"--num-layers {shape.layers}",
    ]
    flags += ["--sequence-parallel"] if layout.sp else []
    flags += [f"--cp-comm-type {_MEGATRON_CP[layout.cp_kind]}"] if layout.cp > 1 else []
    if layout.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    elif layout.schedule not in ("1f1b", "gpipe") and layout.pp > 1:
        cannot.append(f"Megatron-LM has no {layout.schedule} schedule: 1F1B stands in")
    if layout.schedule == "gpipe" and layout.pp > 1:
        cannot.append("Megatron-LM runs 1F1B where GPipe was planned: it needs less memory and the same time")
    if layout.ep > 1:
        flags += [f"--expert-model-parallel-size {layout.ep}", f"--expert-tensor-parallel-size {layout.expert_tp}"]
    flags += _megatron_sharding(layout)
    if layout.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif layout.recompute == "selective":
        flags.append("--recompute-granularity selective")
    optimizer = _MEGATRON_OPTIMIZERS.get(training.optimizer.name)
    if optimizer is None:
        cannot.append(f"optimizer {training.optimizer.name} is not one of Megatron-LM's")
    flags += list(optimizer or ())
    flags += ["--optimizer-cpu-offload"] if layout.offload in ("optimizer", "both") else []
    if layout.offload in ("activations", "both"):
        cannot.append("offload of activations needs --cpu-offloading-num-layers, which excludes a pipeline")
    flags += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(
        training.precision, []
    )
    flags += ["--attention-backend flash"] if training.flash else []
    if shape.layers % (layout.pp * layout.chunks):
        cannot.append(f"{shape.layers} layers do not divide into {layout.pp * layout.chunks}: set the stages by hand")
    return " \\\n".join(flags), cannot, []


def _megatron_sharding(layout: Layout) -> list[str]:
    if layout.zero == 0:
        return []
    flags = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero >= 2:
        strategy = "optim_grads_params" if layout.zero == 3 else "optim_grads"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
    if layout.shard_ranks != layout.data_ranks:
        flags.append(f"--num-distributed-optimizer-instances {layout.data_ranks // layout.shard_ranks}")
    return flags


def _deepspeed(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    cannot = []
    zero: dict[str, object] = {"stage": layout.zero, "overlap_comm": True}
    if layout.offload in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.shard_ranks != layout.data_ranks:
        if layout.zero == 3:
            zero["zero_hpz_partition_size"] = layout.shard_ranks
            cannot.append(
                "hpZ keeps a second copy of the weights in each group; optimizer states are sharded over all ranks"
            )
        else:
            cannot.append("DeepSpeed shards optimizer states over all data ranks")
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
    limits = _deepspeed_limits(layout)
    return json.dumps(settings, indent=2), cannot + limits, _deepspeed_notes(layout, training)


def _deepspeed_limits(layout: Layout) -> list[str]:
    """What DeepSpeed does not do of this layout."""
    limits = {
        "DeepSpeed's AutoTP trains with ZeRO-0 to 2, not 3": layout.tp > 1 and layout.zero == 3,
        f"DeepSpeed's pipeline works with ZeRO-0 and 1, not {layout.zero}": layout.pp > 1 and layout.zero >= 2,
        f"DeepSpeed's pipeline is 1F1B, not {layout.schedule}": layout.pp > 1 and layout.schedule != "1f1b",
        f"DeepSpeed's sequence parallelism is Ulysses, not {layout.cp_kind}": layout.cp > 1
        and layout.cp_kind != "ulysses",
    }
    return [limit for limit, applies in limits.items() if applies]


def _deepspeed_notes(layout: Layout, training: Training) -> list[str]:
    """What stands in the script, not in the settings."""
    notes = {
        f"the model must be a PipelineModule with num_stages={layout.pp}": layout.pp > 1,
        f"give sequence_parallel_size={layout.cp} to the trainer": layout.cp > 1,
        f"give ep_size={layout.ep} to each deepspeed.moe.layer.MoE": layout.ep > 1,
        "FP8 comes from the model's own layers (Transformer Engine)": training.precision == "fp8",
    }
    return [note for note, applies in notes.items() if applies]


def _cordee(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    """A job's YAML, whose model section admission judges by the same plan, and the mesh that its script builds."""
    notes = ["the script makes the mesh; Cordee starts, stops and restores it"]
    cannot = ["a job's YAML has no precision fp8 yet"] if training.precision == "fp8" else []
    axes = [("pp", layout.pp), ("dp", layout.dp), ("cp", layout.cp), ("tp", layout.tp)]
    named = [(name, size) for name, size in axes if size > 1] or [("dp", 1)]
    sizes = ", ".join(str(size) for _, size in named) + ("," if len(named) == 1 else "")
    names = ", ".join(f'"{name}"' for name, _ in named) + ("," if len(named) == 1 else "")
    lines = [
        "run: [python, train.py]",
        f"gpus: {layout.gpus}",
        "model:",
        f"  name: {shape.name}",
        f"  seq: {training.seq_tokens}",
        f"  global_batch: {training.global_batch}",
        f"  micro_batch: {layout.micro_batch}",
        f"  precision: {training.precision}",
        f"  optimizer: {training.optimizer.name}",
        f"  recompute: {layout.recompute}",
        f"  layout: {layout}",
        "",
        "# in train.py",
        f'# mesh = init_device_mesh("cuda", ({sizes}), mesh_dim_names=({names}))',
    ]
    if layout.zero == 3 and layout.dp > 1:
        lines.append('# fully_shard(layer, mesh=mesh["dp"]) for each layer, then for the model')
    return "\n".join(lines), cannot, notes


LAUNCHERS: dict[str, Callable[[ModelShape, Layout, Training], tuple[str, list[str], list[str]]]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "cordee": _cordee,
}
