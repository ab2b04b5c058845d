"""Tensor parallelism of a subject: each layer's matrices divided over ranks as torchtitan does it, or transformers.

torchtitan's plan is that of `parallelize_llama.apply_non_moe_tp`; transformers' models carry one (`tp_plan`).
"""

import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cordee.errors import LayoutError
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.subject import Subject


def divide(subject: Subject, question: Question, mesh: DeviceMesh | None) -> None:
    """Divide the matrices of a model over the ranks of tensor parallelism.

    Raises:
        LayoutError: a model that nobody has said how to divide.
    """
    if mesh is None or question.tp == 1:
        return
    if question.function is not None:
        raise LayoutError(
            "how tp divides a function's model is not known", hint="divide it in the function, or leave tp out"
        )
    if question.adapters is not None:
        raise LayoutError("adapters over divided matrices are not traced", hint="trace them with fsdp alone")
    config = question.config
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or question.tp
    if heads % question.tp:
        hint = "use a tp that divides them: torch copies no heads, as Megatron-LM does"
        raise LayoutError(f"{heads} key and value heads cannot be divided over tp{question.tp}", hint=hint)
    if question.code == "torchtitan":
        _divide_titan(subject, question, mesh["tp"])
    else:
        _divide_hugging_face(subject, question, mesh["tp"])


def _divide_titan(subject: Subject, question: Question, mesh: DeviceMesh) -> None:
    between = Shard(1) if question.sp else Replicate()
    _apply(subject.module, mesh, {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    if question.sp:
        _apply(subject.module, mesh, {"norm": SequenceParallel()})
    whole = Replicate()
    for layer in subject.layers:
        _apply(layer, mesh, {
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=between),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        })  # fmt: skip
        if question.sp:
            _apply(layer, mesh, {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(between, None), desired_input_layouts=(whole, None)
                ),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,)),
            })  # fmt: skip


def _divide_hugging_face(subject: Subject, question: Question, mesh: DeviceMesh) -> None:
    plan = dict(getattr(subject.module, "tp_plan", None) or {})
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel, "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }  # fmt: skip
    family = question.config.get("model_type")
    if question.sp:
        hint = "leave sp out, or trace --model-code torchtitan"
        raise LayoutError("transformers divides matrices, and not the sequence between them", hint=hint)
    unknown = sorted(set(plan.values()) - set(styles))
    if not plan or unknown:
        why = f"it asks for {unknown[0]}" if unknown else "it has no tp_plan"
        raise LayoutError(f"transformers' {family} cannot be divided over tp: {why}", hint="use fsdp alone")
    names = [name for name, _ in subject.module.named_modules()]
    _apply(subject.module, mesh, {
        name: styles[style]() for pattern, style in plan.items() for name in fnmatch.filter(names, pattern)
    })  # fmt: skip


def _apply(module: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    parallelize_module(module, mesh, plan)
