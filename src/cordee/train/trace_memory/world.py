"""A world of N ranks that is not there: fake tensors on the CPU, and a process group that sends nothing."""

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from cordee.train.trace_memory.question import Question


@contextmanager
def fake_world(question: Question) -> Iterator[DeviceMesh | None]:
    """Yield the mesh of a question's ranks, seen from rank 0; None for one rank. Tensors made inside are fake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The mesh reads its own ranks, which fake tensors could not tell.
        with fake_ranks(question) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
            yield mesh


@contextmanager
def fake_ranks(question: Question) -> Iterator[DeviceMesh | None]:
    """Yield the mesh alone, in a torch that reads no values for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {"replicas": question.replicas, "fsdp": question.fsdp, "tp": question.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    if question.ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=question.ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with contextlib.ExitStack() as stack:
            for owner, name, function in _FAKEABLE:
                stack.enter_context(replaced(owner, name, function))
            yield mesh
    finally:
        dist.destroy_process_group()


def dtype_of_weights(question: Question) -> torch.dtype:
    """Return the type in which a rank keeps its weights: frozen ones in 16 bits."""
    return torch.bfloat16 if question.weights == "bf16" or question.adapters is not None else torch.float32


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_concatenate = DeviceMesh._concatenate


def _concatenate_real(*args: Any, **kwargs: Any) -> DeviceMesh:
    """Join two meshes with their ranks as values: a mesh looks for its own among them."""
    with unset_fake_temporarily():
        return _concatenate(*args, **kwargs)


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagate_apart(self: ShardingPropagator, *args: Any) -> Any:
    """Work out the shape of an operator's result where nobody counts the tensors that it is worked out on."""
    with _disable_current_modes():
        return _propagate(self, *args)


def _mask(self: MaskBuffer, tensor: torch.Tensor) -> None:
    """Zero the rows of tokens that other ranks have: by the mask, since how many they are is a value."""
    assert self.data is not None, "a mask is there when it is applied"
    mask = self.data if tensor.ndim == self.data.ndim else self.data.unsqueeze(-1)
    tensor.masked_fill_(mask, 0.0)


# Parts of torch that read values, which fake tensors do not have, or that make tensors only to know their shape.
_FAKEABLE = (
    (DeviceMesh, "_concatenate", staticmethod(_concatenate_real)),
    (MaskBuffer, "apply_mask", _mask),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate_apart),
    (ddp, "_verify_param_shape_across_processes", lambda *_: None),
    (ddp, "_sync_module_states", lambda *_, **__: None),
)
