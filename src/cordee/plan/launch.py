"""Settings that make a launcher run the layout that was chosen.

The answer lists what a launcher cannot do. torchtitan and Megatron-LM have modules of their own;
DeepSpeed's names were read in its configuration reference and its tutorial of AutoTP for training.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cordee.errors import LayoutError
from cordee.near import did_you_mean
from cordee.plan.launch_megatron import megatron
from cordee.plan.launch_torchtitan import torchtitan
from cordee.plan.launch_trainers import LEFT_OUT, accelerate, lightning, trainer
from cordee.plan.layout import Layout
from cordee.plan.space import Choices
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
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


_CALLED = dict.fromkeys(("trainingarguments", "transformers", "huggingface", "trl", "sfttrainer"), "trainer")


def check_launcher(launcher: str) -> None:
    """Refuse what is no launcher.

    Raises:
        LayoutError: with the nearest name, or all of them.
    """
    if launcher not in LAUNCHERS:
        raise LayoutError(f"unknown launcher {launcher!r}", hint=did_you_mean(launcher, LAUNCHERS, also=_CALLED))


def launch_settings(launcher: str, shape: ModelShape, layout: Layout, training: Training) -> Launch:
    """Return the settings for this launcher.

    Raises:
        LayoutError: no such launcher.
    """
    check_launcher(launcher)
    text, cannot, notes = LAUNCHERS[launcher](shape, layout, training)
    return Launch(launcher, str(layout), text, tuple(cannot), tuple(notes))


def first_to_launch(launcher: str, shape: ModelShape, layouts: Sequence[Layout], training: Training) -> Launch:
    """Return the first of these layouts that the launcher runs as planned; else the best with its limits.

    Raises:
        LayoutError: no such launcher, or one of a library's loop that runs none of them.
    """
    assert layouts, "something fits"
    every = [launch_settings(launcher, shape, layout, training) for layout in layouts]
    found = next((launch for launch in every if not launch.cannot), every[0])
    if found.cannot and launcher in LEFT_OUT:
        hint = "leave --layout and --recompute out, or add GPUs: it has fsdp=N, recompute=full or none"
        raise LayoutError(f"{launcher} runs no layout that fits: of {found.layout}, {found.cannot[0]}", hint=hint)
    return found


def expressible(launcher: str | None, wanted: LayoutWanted, choices: Choices) -> tuple[LayoutWanted, Choices]:
    """Return what to search for a launcher: without the axes that it has no settings of, unless they are asked for."""
    if launcher not in LEFT_OUT:
        return wanted, choices
    alone: dict[str, Any] = {axis: 1 for axis in LEFT_OUT[launcher] if getattr(wanted, axis) is None}
    recomputes = tuple(each for each in choices.recomputes if each != "selective")
    return replace(wanted, **alone), replace(choices, recomputes=recomputes, sp=(False,))


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
    elif layout.offload in ("activations", "both"):
        cannot.append("DeepSpeed keeps on the host only activations that it recomputes from (cpu_checkpointing)")
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        settings["pipeline"] = {"stages": layout.pp}
    limits = _deepspeed_limits(layout)
    return json.dumps(settings, indent=2), cannot + limits, _deepspeed_notes(layout, training)


def _deepspeed_limits(layout: Layout) -> list[str]:
    """Return the parts of this layout that DeepSpeed does not do."""
    limits = {
        "DeepSpeed's AutoTP keeps norms whole: no sequence parallelism (sp)": layout.sp and layout.tp > 1,
        "PipelineModule divides layers by its partition_method, not by a split of yours": layout.split is not None,
        "DeepSpeed's AutoTP trains with ZeRO-0 to 2, not 3": layout.tp > 1 and layout.zero == 3,
        f"DeepSpeed's pipeline works with ZeRO-0 and 1, not {layout.zero}": layout.pp > 1 and layout.zero >= 2,
        f"DeepSpeed's pipeline is 1F1B, not {layout.schedule}": layout.pp > 1 and layout.schedule != "1f1b",
        f"DeepSpeed's sequence parallelism is Ulysses, not {layout.cp_kind}": layout.cp > 1
        and layout.cp_kind != "ulysses",
    }
    return [limit for limit, applies in limits.items() if applies]


def _deepspeed_notes(layout: Layout, training: Training) -> list[str]:
    """Return the parts that belong in the script, not in the settings."""
    stages, again = layout.pp, layout.recompute
    notes = {
        f'the model must be a PipelineModule with num_stages={stages}, partition_method="type:YourLayer"': stages > 1,
        f"recompute={again} is deepspeed.checkpointing (or torch's) in the model": again != "none",
        f"optimizer {training.optimizer.name} is made in the script": training.optimizer.name != "adamw",
        f"give sequence_parallel_size={layout.cp} to the trainer": layout.cp > 1,
        f"give ep_size={layout.ep} to each deepspeed.moe.layer.MoE": layout.ep > 1,
        "FP8 comes from the model's own layers (Transformer Engine)": training.precision == "fp8",
    }
    return [note for note, applies in notes.items() if applies]


def _cordee(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    """Return a job's YAML, whose model section admission evaluates by the same plan, and the mesh of its script."""
    notes = [
        "the script makes the mesh; Cordee starts, stops and restores it",
        "`cordee plan ... --json > plan.json` and `cordee run --plan plan.json` do the same without a YAML",
    ]
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
        f"  framework: {training.framework}",
        f"  recompute: {layout.recompute}",
        f"  layout: {layout}",
        "",
        "# in train.py",
        f"# mesh = job.mesh(): {', '.join(f'{name} of {size}' for name, size in layout.axes)}",
    ]
    if layout.zero == 3 and layout.shard_ranks > 1:
        lines.append('# fully_shard(layer, mesh=mesh["dp"]) for each layer, then for the model')
    return "\n".join(lines), [], notes


LAUNCHERS: dict[str, Callable[[ModelShape, Layout, Training], tuple[str, list[str], list[str]]]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": _deepspeed,
    "accelerate": accelerate,
    "trainer": trainer,
    "lightning": lightning,
    "cordee": _cordee,
}
