"""One step of the subject under the tracker: forward and backward passes, AdamW; marks where each layer begins."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from cordee.train.trace_memory.adapters import elements
from cordee.train.trace_memory.events import Event, Segment
from cordee.train.trace_memory.kernels import gpu_kernels
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.replicas import replicate
from cordee.train.trace_memory.sharding import owners
from cordee.train.trace_memory.stretch import MIDDLE
from cordee.train.trace_memory.subject import Subject, one_document_a_sequence
from cordee.train.trace_memory.tracker import StorageTracker, tracking


@dataclass(frozen=True, slots=True)
class Recorded:
    """All events of a step, and the numbers of storages whose class is known by what holds them."""

    events: list[Event]
    weights: frozenset[int]
    optimizer: frozenset[int]
    gradients: frozenset[int]
    sent: frozenset[int]
    elements: dict[int, int]
    parameters: int
    trained: int
    layers: int
    layer_parameters: int
    layer_trained: int
    reads_tokens: bool


def record(subject: Subject, question: Question, optimizer: torch.optim.Optimizer, *, gpu: bool = True) -> Recorded:
    """Return what one step allocates and frees, after a first one that has made the optimizer's moments.

    With `gpu` operators allocate as a GPU's do.
    """
    trained = [each for each in subject.module.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker = StorageTracker(Segment("states"))
    weights, moments = _see_states(subject, optimizer, tracker)
    loss_of, unreduced = subject.loss, contextlib.nullcontext
    gradients: set[int] = set()
    if question.is_replicated:
        with tracking(tracker):
            loss_of = replicate(subject)
        unreduced = loss_of.no_sync
        gradients |= {event.number for event in tracker.events} - weights - moments
    marks = _Marks(tracker, len(subject.layers))

    def pass_both_ways(micro_batch: int) -> None:
        is_last = micro_batch == question.micro_batches - 1
        with contextlib.nullcontext() if is_last else unreduced(), _divided_loss(question):
            marks.start(micro_batch)
            with _autocast(question):
                loss = loss_of()
            marks.backward()
            loss.backward()

    with one_document_a_sequence(), gpu_kernels() if gpu else contextlib.nullcontext():
        removers = [remove for index, layer in enumerate(subject.layers) for remove in marks.put(index, layer)]
        if question.compiled:  # graphs are made in the first passes
            pass_both_ways(0)
            optimizer.zero_grad()
        with tracking(tracker):
            for micro_batch in range(question.micro_batches):
                pass_both_ways(micro_batch)
                gradients |= {_number(tracker, each.grad) for each in trained if each.grad is not None}
            tracker.segment = Segment("step", None, question.micro_batches - 1)
            optimizer.step()
            optimizer.zero_grad()
    for remove in removers:
        remove()
    return Recorded(
        tracker.events, weights, moments, frozenset(gradients), frozenset(tracker.sent), tracker.elements,
        elements(subject.module), sum(each.numel() for each in trained),
        len(subject.layers), *_middle(subject), subject.reads_tokens,
    )  # fmt: skip


def _middle(subject: Subject) -> tuple[int, int]:
    """Return the parameters of the layer that stands for others, and those of them that are trained."""
    if len(subject.layers) <= MIDDLE:
        return 0, 0
    layer = subject.layers[MIDDLE]
    return elements(layer), sum(each.numel() for each in layer.parameters() if each.requires_grad)


def _number(tracker: StorageTracker, tensor: torch.Tensor) -> int:
    found = tracker.number(tensor)
    return -1 if found is None else found


def _see_states(
    subject: Subject, optimizer: torch.optim.Optimizer, tracker: StorageTracker
) -> tuple[frozenset[int], frozenset[int]]:
    """Note weights, buffers and moments, layer by layer."""
    owner, weights, moments = owners(subject), set(), set()
    states = getattr(optimizer, "optim", optimizer).state  # ZeRO-1's optimizer has one of its own parameters inside
    parameters = sorted(subject.module.parameters(), key=lambda each: owner.get(id(each), -1))
    for parameter in parameters:
        tracker.segment = Segment("states", owner.get(id(parameter)))
        tracker.see(parameter)
        weights.add(_number(tracker, parameter))
        for state in states.get(parameter, {}).values():
            if isinstance(state, torch.Tensor) and state.numel() > 1:
                tracker.see(state)
                moments.add(_number(tracker, state))
    tracker.segment = Segment("states")
    for buffer in subject.module.buffers():
        tracker.see(buffer)
        weights.add(_number(tracker, buffer))
    return frozenset(weights), frozenset(moments)


def _autocast(question: Question) -> Any:
    alone = question.fsdp * question.replicas == 1
    if question.weights == "autocast" or (question.weights == "mixed" and alone):
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _divided_loss(question: Question) -> Any:
    """Return the loss over logits that tp divides, which torchtitan does not gather."""
    return loss_parallel() if question.tp > 1 and question.code == "torchtitan" else contextlib.nullcontext()


class _Marks:
    """Moves the tracker's segment along the step, by hooks on the layers and on what they return."""

    def __init__(self, tracker: StorageTracker, layers: int) -> None:
        self.tracker, self.layers = tracker, layers
        self.micro_batch, self.is_backward = 0, False

    def start(self, micro_batch: int) -> None:
        """Begin a forward pass."""
        self.micro_batch, self.is_backward = micro_batch, False
        self._at(Segment("forward", None, micro_batch))

    def backward(self) -> None:
        """Begin a backward pass: with the loss."""
        self.is_backward = True
        self._at(Segment("loss", None, self.micro_batch))

    def put(self, index: int, layer: nn.Module) -> list[Callable[[], None]]:
        """Put the hooks of one layer; the functions take them off again."""
        before = layer.register_forward_pre_hook(lambda _, args: self._enter(index, args))
        after = layer.register_forward_hook(lambda _, __, output: self._leave(index, output))
        return [before.remove, after.remove]

    def _at(self, segment: Segment) -> None:
        self.tracker.segment = segment

    def _enter(self, index: int, args: Any) -> None:
        if self.is_backward:
            return
        self._at(Segment("forward", index, self.micro_batch))
        first = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if index == 0 and first is not None and first.requires_grad:
            first.register_hook(lambda _: self._at(Segment("embedding", None, self.micro_batch)))

    def _leave(self, index: int, output: Any) -> None:
        if self.is_backward:
            return
        first = output[0] if isinstance(output, (tuple, list)) else output
        if first.requires_grad:
            first.register_hook(lambda _: self._at(Segment("backward", index, self.micro_batch)))
        if index == self.layers - 1:
            self._at(Segment("loss", None, self.micro_batch))
