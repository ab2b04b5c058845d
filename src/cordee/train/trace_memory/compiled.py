"""Layers through torch.compile, each by itself, as torchtitan and accelerate's regional compilation do it.

AOTAutograd joins a layer's forward and backward pass, and torch's min-cut partitioner decides what is kept between
them, as it does ahead of Inductor. Both graphs then run operator by operator under the tracker. Inductor fuses: a
result that only fusible operators read, and that the graph does not return, is never written, and so is not seen.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from cordee.errors import InputError, first_line
from cordee.train.trace_memory.tracker import unseen


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward function of each layer; hooks of FSDP2 and of the tracker stay around it."""
    for layer in layers:
        layer.forward = compiled(layer.forward)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose passes are two graphs, divided by the min-cut partitioner."""
    found: Callable[..., Any] = torch.compile(function, backend=_backend(), fullgraph=True, dynamic=False)
    return found


@contextmanager
def refusing() -> Iterator[None]:
    """Refuse code that the compiler cannot take whole, and forget what was compiled.

    Raises:
        InputError: it has a break in its graph; with the compiler's reason.
    """
    torch._dynamo.reset()
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        why = first_line(error)
        raise InputError(f"a layer does not compile whole: {why}", hint="leave --compile out") from error
    finally:
        torch._dynamo.reset()


@functools.cache
def _backend() -> Any:
    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    return aot_autograd(
        fw_compiler=_runner, bw_compiler=_runner, decompositions=select_decomp_table, partition_fn=partition
    )


def _runner(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
    interpreter = _Fused(graph)

    def run(args: list[Any]) -> Any:
        try:
            return interpreter.boxed_run(args)
        finally:
            interpreter.env.clear()  # it would keep the results until its next run

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_OPERATORS = get_default_op_list()


def _is_fusible(node: fx.Node) -> bool:
    """Return whether the partitioner counts on a fusion; a number scattered over a constant is one too (the loss's).

    Inductor writes that as a comparison: its pass `scatter_upon_const_tensor`.
    """
    if node.target is torch.ops.aten.scatter.value:
        over = node.args[0]
        return isinstance(over, fx.Node) and over.target is torch.ops.aten.full.default
    return bool(_OPERATORS.is_fusible(node))


class _Fused(fx.Interpreter):
    """Runs a graph, and keeps the tracker from seeing what a fused kernel would not write."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        written: set[fx.Node] = set()
        for node in reversed(graph.graph.nodes):  # from the end, since a view is written where what reads it wants it
            if any(not _is_fusible(user) or (_OPERATORS.is_view(user) and user in written) for user in node.users):
                written.add(node)
        calls = (node for node in graph.graph.nodes if node.op == "call_function" and not _OPERATORS.is_view(node))
        self._inside = {node for node in calls if _is_fusible(node) and node not in written}

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator."""
        if n not in self._inside:
            return super().run_node(n)
        with unseen():
            return super().run_node(n)
