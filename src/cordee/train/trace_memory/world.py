"""A world of N ranks that is not there: fake tensors on the CPU, and a process group that sends nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    """Yield the mesh alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {"replicas": question.replicas, "fsdp": question.fsdp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    world = question.replicas * question.fsdp
    if world == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def dtype_of_weights(question: Question) -> torch.dtype:
    """Return the type in which a rank keeps its weights."""
    return torch.bfloat16 if question.weights == "bf16" else torch.float32
