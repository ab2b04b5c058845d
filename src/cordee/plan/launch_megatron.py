"""Flags of Megatron-LM.

Names were read in megatron/training/arguments.py, training/config, core/transformer/transformer_config.py,
pipeline_parallel_layer_layout.py and the guide of Megatron-FSDP.
"""

from cordee.plan.launch_parts import Limit, Planned, Written, limited, noted, ranks_note
from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.training import Training

_CONTEXT = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}
_PRECISION = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp8": ("--bf16", "--fp8-format hybrid"), "fp32": ()}
_AWARE = "--use-precision-aware-optimizer"
_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (), "adamw-fp32-grads": (), "muon": ("--optimizer muon",), "sgd-momentum": ("--optimizer sgd",),
    "adamw-bf16-moments": (_AWARE, "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
}  # fmt: skip


def megatron(planned: Planned) -> Written:
    """Return the flags, what Megatron-LM does not do of the layout, and what has to stand beside them."""
    shape, layout, training = planned.shape, planned.layout, planned.training
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
    # Its own sums are fp32 where weights are bf16.
    narrow = training.optimizer.gradient_bytes == 2 and training.precision in ("bf16", "fp8")
    flags += ["--grad-reduce-in-bf16"] if narrow else []
    if layout.offload in ("optimizer", "both"):
        flags += ["--optimizer-cpu-offload"] + ([_AWARE] if _AWARE not in flags else [])
    flags += _PRECISION[training.precision]
    flags.append(f"--attention-backend {'flash' if training.flash else 'unfused'}")
    # Megatron-LM's own is 0.1.
    flags += [] if training.dropout else ["--hidden-dropout 0", "--attention-dropout 0"]
    # The fused kernel divides the vocabulary too.
    flags += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"] if training.loss == "fused" else []
    notes = noted(
        {
            ranks_note(planned): True,
            "Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset": layout.zero >= 2,
            "dropout is Megatron-LM's own, 0.1": training.dropout,
        }
    )
    return " \\\n".join(flags), _limits(layout, training), notes


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


def _limits(layout: Layout, training: Training) -> list[Limit]:
    """Return the parts of a plan that Megatron-LM does not do."""
    name, tuning = training.optimizer.name, training.tuning
    return limited(
        {
            f"Megatron-LM has no {layout.schedule} schedule: 1F1B stands in": layout.pp > 1
            and layout.schedule != "gpipe"
            and not find_schedule(layout.schedule).megatron,
            "Megatron-LM runs 1F1B where GPipe was planned: it needs less memory and the same time": layout.pp > 1
            and layout.schedule == "gpipe",
            f"optimizer {name} is not one of Megatron-LM's": name not in _OPTIMIZERS,
            "offload of activations needs --cpu-offloading-num-layers, which excludes a pipeline": layout.offload
            in ("activations", "both"),
            f"Megatron-LM's loss is not {training.loss}": training.loss in ("chunked", "compiled", "eager"),
            "layers are not compiled: it brings its own kernels": training.fused is True,
            "Megatron-LM freezes no part of a model": tuning.frozen is not None,
            "documents that are packed attend to each other": tuning.packed_tokens is not None,
            "the optimizer steps after the backward pass": training.optimizer.in_backward,
        }
    )
