"""FSDP2, HSDP and recomputation, put onto a model as torchtitan does it, or accelerate for transformers.

Both give each layer, the embedding, and the norm with the head a group of their own; the last one stays gathered after
the forward pass (torchtitan `parallelize_llama.apply_fsdp`, accelerate 1.15 `fsdp2_prepare_model`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cordee.train.trace_memory.kernels import KEPT_OPERATORS
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.subject import Subject


def recompute(subject: Subject, question: Question) -> Subject:
    """Return the model with its layers recomputed as asked; transformers' own switch is set when it is built."""
    if question.recompute == "none" or (
        question.recompute == "full" and question.code == "hf" and not question.function
    ):
        return subject
    wrapped = {}
    for layer in subject.layers:
        if question.recompute == "full":
            wrapped[id(layer)] = checkpoint_wrapper(layer, preserve_rng_state=False)
        else:
            wrapped[id(layer)] = checkpoint_wrapper(layer, context_fn=_every_second, preserve_rng_state=False)
    for parent in list(subject.module.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrapped and parent is not wrapped[id(child)]:
                parent.register_module(name, wrapped[id(child)])
    return replace(subject, layers=tuple(wrapped[id(layer)] for layer in subject.layers))


def _every_second() -> Any:
    """Return torchtitan's selective checkpoint "op": attention and every second product are kept."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in KEPT_OPERATORS:
            return CheckpointPolicy.MUST_SAVE
        if operator is torch.ops.aten.mm.default:
            mode = "recompute" if context.is_recompute else "forward"
            seen[mode] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if seen[mode] % 2 == 0 else CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shard(subject: Subject, question: Question, mesh: DeviceMesh | None) -> None:
    """Put FSDP2 onto the groups of a model; with replicas as well, HSDP."""
    if mesh is None or question.zero < 2 or question.fsdp * question.replicas == 1:
        return
    names = ("replicas", "fsdp") if question.replicas > 1 else ("fsdp",)
    given: dict[str, Any] = {"mesh": mesh[names]}
    if question.weights == "mixed":
        # Both reduce in fp32: torchtitan by its default, accelerate since 16-bit sums lose the small ones.
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if question.zero == 2:
        given["reshard_after_forward"] = False
    if subject.embedding is not None:
        fully_shard(_sharing(subject, subject.embedding), **given)
    for layer in subject.layers:
        fully_shard(layer, **given)
    if subject.tail:
        fully_shard(_sharing(subject, *subject.tail), **given | {"reshard_after_forward": False})
    fully_shard(subject.module, **given)


def _sharing(subject: Subject, *modules: nn.Module) -> list[nn.Module]:
    """Return these modules and all that hold a parameter of theirs: T5's encoder and decoder have one embedding."""
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    inside = {id(inner) for module in modules for inner in module.modules()}
    others = [
        module for module in subject.module.modules()
        if id(module) not in inside and any(id(each) in held for each in module.parameters(recurse=False))
    ]  # fmt: skip
    return [*modules, *others]


def owners(subject: Subject) -> dict[int, int]:
    """Return the layer of each parameter by its identity."""
    return {id(parameter): index for index, layer in enumerate(subject.layers) for parameter in layer.parameters()}
