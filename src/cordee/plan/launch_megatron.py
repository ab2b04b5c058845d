"""Flags of Megatron-LM.

Names were read in megatron/training/arguments.py, training/config, core/transformer/transformer_config.py,
pipeline_parallel_layer_layout.py and the guide of Megatron-FSDP.
"""

from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

_CONTEXT = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}
_PRECISION = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp8": ("--bf16", "--fp8-format hybrid"), "fp32": ()}
_AWARE = "--use-precision-aware-optimizer"
_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (), "adamw-fp32-grads": (), "muon": ("--optimizer muon",), "sgd-momentum": ("--optimizer sgd",),
    "adamw-bf16-moments": (_AWARE, "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
}  # fmt: skip


def megatron(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    """Return the flags, what Megatron-LM does not do of the layout, and what has to stand beside them."""
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
    flags += [f"--cp-comm-type {_CONTEXT[layout.cp_kind]}"] if layout.cp > 1 else []
    if layout.split is not None:
        flags.append(f'--pipeline-model-parallel-layout "{stages_text(layout.split)}"')
    elif layout.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    if shape.experts is not None:
        flags += [f"--expert-model-parallel-size {layout.ep}", f"--expert-tensor-parallel-size {layout.expert_tp}"]
    flags += _sharding(layout) + _recompute(layout)
    flags += _OPTIMIZERS.get(training.optimizer.name, ())
    if layout.offload in ("optimizer", "both"):
        flags += ["--optimizer-cpu-offload"] + ([_AWARE] if _AWARE not in flags else [])
    flags += _PRECISION[training.precision]
    flags += ["--attention-backend flash"] if training.flash else []
    cannot = [limit for limit, applies in _limits(layout, training).items() if applies]
    notes = ["Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset"] if layout.zero >= 2 else []
    return " \\\n".join(flags), cannot, notes


def stages_text(split: tuple[int, ...]) -> str:
    """Return the stages as Megatron-LM reads them: E the embedding, t a layer, L the loss, | between stages.

    >>> stages_text((7, 8, 7))
    'Et*7|t*8|t*7L'
    """
    return "E" + "|".join(f"t*{layers}" for layers in split) + "L"


def _sharding(layout: Layout) -> list[str]:
    if layout.zero == 0:
        return []
    flags = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero >= 2:
        sharding = "optim_grads_params" if layout.zero == 3 else "optim_grads"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {sharding}"]
        flags += ["--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]
    if layout.shard_ranks != layout.data_ranks:
        flags.append(f"--num-distributed-optimizer-instances {layout.data_ranks // layout.shard_ranks}")
    return flags


def _recompute(layout: Layout) -> list[str]:
    if layout.recompute == "selective":
        return ["--recompute-granularity selective"]
    if layout.recompute == "none":
        return []
    whole = layout.recompute_layers is None
    method, count = ("uniform", 1) if whole else ("block", layout.recompute_layers)
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {count}"]


def _limits(layout: Layout, training: Training) -> dict[str, bool]:
    name = training.optimizer.name
    return {
        f"Megatron-LM has no {layout.schedule} schedule: 1F1B stands in": layout.pp > 1
        and layout.schedule != "gpipe"
        and not find_schedule(layout.schedule).megatron,
        "Megatron-LM runs 1F1B where GPipe was planned: it needs less memory and the same time": layout.pp > 1
        and layout.schedule == "gpipe",
        f"optimizer {name} is not one of Megatron-LM's": name not in _OPTIMIZERS,
        "offload of activations needs --cpu-offloading-num-layers, which excludes a pipeline": layout.offload
        in ("activations", "both"),
    }
