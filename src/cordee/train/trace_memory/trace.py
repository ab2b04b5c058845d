"""From a question to its answer: build, shard and run the model on fake ranks, few layers deep where that is enough."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from cordee.errors import InputError, first_line
from cordee.train.trace_memory.adapters import adapt
from cordee.train.trace_memory.answer import WORKSPACE_BYTES, Traced
from cordee.train.trace_memory.divided import divide
from cordee.train.trace_memory.events import Event
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.replicas import optimizer_of
from cordee.train.trace_memory.sharding import recompute, shard
from cordee.train.trace_memory.step import Recorded, record
from cordee.train.trace_memory.stretch import TRACED, IrregularError, original, stretch
from cordee.train.trace_memory.subject import Subject, build, depth, uniform, with_depth
from cordee.train.trace_memory.timeline import Known, classify, moments, reserve
from cordee.train.trace_memory.world import dtype_of_weights, fake_world


def trace(question: Question, *, whole: bool = False) -> Traced:
    """Return what a step holds on rank 0 of the question's ranks; `whole` records every layer.

    Raises:
        ShapeError, ScriptError, MissingExtraError: there is no such model.
        InputError: its code cannot run on fake tensors.
    """
    began = time.process_time()
    layers = depth(question.config) if question.function is None else None
    # DDP's buckets hold parts of several layers, so that none stands for the others.
    if not (whole or question.is_replicated) and layers is not None and layers > TRACED and uniform(question):
        few, wide = _record(replace(question, config=with_depth(question.config, TRACED)))
        try:
            return _answer(few, wide, stretch(few.events, layers), layers, began)
        except IrregularError:
            pass  # recorded whole
    found, wide = _record(question)
    return _answer(found, wide, found.events, None, began)


def prepare(question: Question, mesh: DeviceMesh | None) -> Subject:
    """Return the model of a question as its ranks run it: adapted, divided, recomputed, sharded."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of_weights(question))
    try:
        subject = build(question)
    finally:
        torch.set_default_dtype(default)
    subject = adapt(subject, question)
    divide(subject, question, mesh)
    subject = recompute(subject, question)
    if question.compiled:
        from cordee.train.trace_memory.compiled import compile_layers

        compile_layers(subject.layers)
    shard(subject, question, mesh)
    return subject


def _record(question: Question) -> tuple[Recorded, frozenset[int]]:
    """Return a recorded step, and its tensors of logits."""
    with fake_world(question) as mesh:
        try:
            with compiler(question):
                subject = prepare(question, mesh)
                trained = [each for each in subject.module.parameters() if each.requires_grad]
                found = record(subject, question, optimizer_of(trained, question))
        except (RuntimeError, NotImplementedError) as error:
            hint = "fake tensors have no values: code that reads one, or a kernel without a fake, cannot be traced"
            raise InputError(f"the model does not run on fake tensors: {first_line(error)}", hint=hint) from error
    wide = subject.wide // question.tp if question.code == "torchtitan" else subject.wide
    return found, frozenset(number for number, count in found.elements.items() if _is_logits(count, wide, question))


def compiler(question: Question) -> AbstractContextManager[None]:
    """Return a torch.compile that remembers nothing, where it is asked for."""
    if not question.compiled:
        return nullcontext()
    from cordee.train.trace_memory.compiled import refusing

    return refusing()


def _is_logits(elements: int, wide: int, question: Question) -> bool:
    """Return whether so many elements are the logits of a micro-batch, or those of it whose next token is known."""
    rows, rest = divmod(elements, wide) if wide else (0, 1)
    tokens = question.seq_tokens * question.micro_batch
    return rest == 0 and tokens - question.micro_batch <= rows <= tokens


def _answer(found: Recorded, wide: frozenset[int], events: list[Event], layers: int | None, began: float) -> Traced:
    def copies(numbers: frozenset[int]) -> frozenset[int]:
        if layers is None:
            return numbers
        return frozenset(each.number for each in events if original(each.number, layers) in numbers)

    known = Known(*(copies(each) for each in (found.weights, found.optimizer, found.gradients, found.sent, wide)))
    recorded = found.layers
    extra = 0 if layers is None else layers - recorded
    return Traced(
        moments=moments(events, classify(events, known), WORKSPACE_BYTES),
        reserve=reserve(events, WORKSPACE_BYTES),
        parameters=found.parameters + extra * found.layer_parameters,
        trained_parameters=found.trained + extra * found.layer_trained,
        layers=recorded if layers is None else layers,
        layers_recorded=recorded,
        events=len(events),
        cpu_s=time.process_time() - began,
        reads_tokens=found.reads_tokens,
    )
