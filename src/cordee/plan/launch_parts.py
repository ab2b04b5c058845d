"""Parts that launchers have in common: a plan to write, limits with their hints, and notes for the script.

Each setting that memory or time is planned with is in a launcher's text, in a note, or among its limits.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cordee.plan.layout import Layout
from cordee.plan.training import Framework, Frozen, Training
from cordee.workload.model import ModelShape

LAYOUT_HINT = "leave --layout and --recompute out, or add GPUs: it has fsdp=N, recompute=full or none"
# The framework whose memory a launcher's runs have; Cordee starts all of them.
FRAMEWORKS_OF: dict[str, Framework] = {
    "megatron": "megatron", "deepspeed": "deepspeed", "torchtitan": "torch", "accelerate": "torch", "trainer": "torch",
    "lightning": "torch",
}  # fmt: skip
WITH_ADAPTERS = ("trainer", "cordee")
# The axes that each has no settings of. Their layers are those of transformers.
LEFT_OUT = {"accelerate": ("pp", "ep"), "trainer": ("pp", "ep", "tp", "cp"), "lightning": ("pp", "ep", "cp")}
# Optimizers as a script makes them.
_MADE = {
    "adamw": "torch.optim.AdamW(..., fused=True)", "adamw-bf16": "torch.optim.AdamW(..., fused=True)",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit", "adamw-8bit-master": "bitsandbytes.optim.AdamW8bit",
    "adamw-8bit-paged": "bitsandbytes.optim.PagedAdamW8bit", "adamw-paged": "bitsandbytes.optim.PagedAdamW32bit",
    "sgd-momentum": "torch.optim.SGD(..., momentum=0.9)",
    "muon": "torch.optim.Muon for matrices, AdamW for the rest",
}  # fmt: skip


class Limit(NamedTuple):
    """A part of a plan that a launcher does not do, and what to ask for instead."""

    says: str
    hint: str = LAYOUT_HINT


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is to be launched: a model, its layout and training, and the GPUs of a node."""

    shape: ModelShape
    layout: Layout
    training: Training
    node_gpus: int = 8

    @property
    def nodes(self) -> int:
        """Nodes that it takes, each with the same number of ranks."""
        least = -(-self.layout.gpus // self.node_gpus)
        return next(count for count in range(least, self.layout.gpus + 1) if self.layout.gpus % count == 0)


Written = tuple[str, list[Limit], list[str]]


def limited(said: Mapping[str, bool], hint: str = LAYOUT_HINT) -> list[Limit]:
    """Return the limits that apply."""
    return [Limit(says, hint) for says, applies in said.items() if applies]


def noted(said: Mapping[str, bool]) -> list[str]:
    """Return the notes that apply."""
    return [note for note, applies in said.items() if applies]


def weights_type(training: Training) -> str:
    """Return torch's type of the weights that are trained, or of those that adapters are over."""
    if training.precision == "fp32" or training.keeps_fp32:
        return "float32"
    return "float16" if training.precision == "fp16" else "bfloat16"


def is_mixed(training: Training) -> bool:
    """Return whether products are computed in another type than the trained weights have: autocast, or FSDP's policy.

    Adapters are fp32, but for an optimizer of 16-bit weights.
    """
    if training.adapters is not None:
        return training.optimizer.weight_bytes == 4
    return training.precision != "fp32" and weights_type(training) == "float32"


def frozen_text(frozen: Frozen) -> str:
    """Return frozen parts as `--freeze` has them.

    >>> frozen_text(Frozen((0, 1, 2, 5), embeddings=True))
    'embeddings,0..2,5'
    """
    runs: list[list[int]] = []
    for layer in frozen.layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    layers = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return ",".join([*["embeddings"] * frozen.embeddings, *["head"] * frozen.head, *layers])


def ranks_note(planned: Planned) -> str:
    """Return how torchrun starts the ranks."""
    ranks, nodes = planned.layout.gpus, planned.nodes
    where = f"--nproc-per-node {ranks}" if nodes == 1 else f"--nnodes {nodes} --nproc-per-node {ranks // nodes}"
    return f"torchrun {where}: {ranks} rank{'s' * (ranks > 1)} in all"


def optimizer_note(training: Training) -> str:
    """Return how a script makes the optimizer."""
    name = training.optimizer.name
    return f"optimizer: {_MADE.get(name, f'one that keeps what {name} does, which neither torch nor bitsandbytes has')}"


def scripts_notes(training: Training, *, where: str, written: Container[str] = ()) -> list[str]:
    """Return what a model and a loop of torch's must do by themselves, but for what is written; `where` they are made.

    What may be written is seq, loss, compile and in_backward.
    """
    tuning, loss = training.tuning, training.loss
    kinds = {
        "chunked": "Liger's LigerFusedLinearCrossEntropyLoss, or any that has the output head in it",
        "fused": "Liger's LigerCrossEntropyLoss, or any that writes its gradient into the logits",
        "parallel": "torch.distributed.tensor.parallel.loss_parallel",
        "compiled": "a cross-entropy through torch.compile",
    }
    return noted(
        {
            f"sequences of {training.seq_tokens:,} tokens": "seq" not in written,
            f"{where}: freeze {frozen_text(tuning.frozen or Frozen())} (requires_grad_(False))": tuning.frozen
            is not None,
            f"pack documents of {tuning.packed_tokens} tokens, with attention that does not go beyond one": (
                tuning.packed_tokens is not None
            ),
            "attention that keeps its scores (in transformers attn_implementation='eager')": not training.flash,
            f"loss: {kinds.get(loss or '')}": loss in kinds and "loss" not in written,
            f"{where}: torch.compile for each layer": training.fused is True and "compile" not in written,
            "the optimizer steps in the backward pass: register_post_accumulate_grad_hook on each parameter": (
                training.optimizer.in_backward and "in_backward" not in written
            ),
        }
    )


def any_launchers_limits(launcher: str, planned: Planned) -> list[Limit]:
    """Return what no launcher, or none but those that write it, does of what was planned."""
    layout, training = planned.layout, planned.training
    framework = FRAMEWORKS_OF.get(launcher, training.framework)
    own_etp = planned.shape.experts is not None and layout.expert_tp != layout.tp
    found = limited(
        {
            "there is no limit to the layers that are recomputed": launcher != "megatron"
            and layout.recompute_layers is not None,
            "experts are divided like the rest of a layer: there is no etp": own_etp
            and (launcher in LEFT_OUT or launcher == "deepspeed" or (launcher == "torchtitan" and layout.ep == 1)),
            "traffic runs beside the kernels where it can": not training.overlap,
        }
    )
    if training.framework != framework:
        says = f"the memory of {training.framework} was planned, not {framework}'s"
        found.append(Limit(says, f"leave --framework out, or write --framework {framework}"))
    if training.adapters is not None and launcher not in WITH_ADAPTERS:
        found.append(Limit("adapters are not written", "use --launch trainer"))
    if training.tuning.flat and launcher != "cordee":
        found.append(Limit("FSDP is version 2: it has no flat gradients", "leave --fsdp-version out"))
    if training.tuning.stage is not None:
        found.append(Limit(f"{training.tuning.stage.name} is not written", "configure it in the script"))
    return found


def any_launchers_notes(launcher: str, planned: Planned) -> list[str]:
    """Return what no launcher has settings of: it belongs to the model's code."""
    training, tuning = planned.training, planned.training.tuning
    rms, several = planned.shape.norm == "rms", tuning.composite_norms
    gelu, written_out = planned.shape.tanh_gelu, tuning.composite_gelu
    plain, loads = launcher in LEFT_OUT and training.fused is None, bool(training.imbalance_by_ep)
    return noted(
        {
            "the model's norms are several kernels, as Hugging Face's": rms and several and launcher not in LEFT_OUT,
            "the model's norms are one kernel each (nn.RMSNorm)": rms and not several and plain,
            "the model's GELU is written out, as Hugging Face's (NewGELUActivation)": written_out
            and launcher not in LEFT_OUT,
            "the model's GELU is one kernel (nn.GELU(approximate='tanh'))": gelu and not written_out and plain,
            "the loss is in the model's forward pass, as in Hugging Face's models": tuning.loss_within
            and launcher not in LEFT_OUT,
            "the loss is computed beside the model, from logits that it returns": not tuning.loss_within and plain,
            f"attention: kernels as fast as the {training.attention} generation's": training.attention is not None,
            "operations between products are kernels of their own": training.fused is False,
            "dropout after attention and feed-forward block": training.dropout and launcher != "megatron",
            "no dropout, although the model's config asks for it": planned.shape.drops and not training.dropout,
            "gathered inputs of products are gathered anew in the backward pass": tuning.regathers,
            "place the experts as `cordee experts` says: that load was planned": loads,
            f"the fullest expert rank was planned with {training.imbalance:g} times the mean's tokens": (
                training.imbalance != 1 and not loads
            ),
        }
    )
