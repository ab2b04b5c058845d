"""Data-parallel ranks that each hold whole weights: torch's DDP, and ZeRO-1 as its ZeroRedundancyOptimizer has it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.subject import Subject


def replicate(subject: Subject) -> DistributedDataParallel:
    """Return the loss as a module under DDP, whose buckets of 25 MiB are what the gradients are views of."""
    found = DistributedDataParallel(_Loss(subject.module, subject.loss), gradient_as_bucket_view=True)
    found.register_comm_hook(None, _arrived)
    # It would order the buckets again by values that it reads; their sizes stay as they are.
    found.reducer = _Steady(found.reducer)
    return found


def optimizer_of(trained: list[nn.Parameter], question: Question) -> torch.optim.Optimizer:
    """Return AdamW as one kernel a group of parameters; with ZeRO-1 a rank has the moments of its own ones alone."""
    if question.is_replicated and question.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its package warns of itself

        return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, fused=True)
    # Over a list of tensors whose placements differ the kernel would gather all of them: with tp each has its own call.
    groups = [[each] for each in trained] if question.tp > 1 else [trained]
    return torch.optim.AdamW([{"params": each} for each in groups], fused=True)


class _Loss(nn.Module):
    """A model's loss as a module, which DDP takes."""

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self) -> torch.Tensor:
        """Return the loss of one micro-batch."""
        return self._loss()


class _Steady:
    """DDP's reducer with the buckets that it began with."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _arrived(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a bucket as if it had been reduced: the fake group's own answer has no tensor in it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
