"""Seconds that the host needs to issue the kernels of a layer: a step is never faster, however small they are.

Kernels are counted as torch's dispatcher counts them in a layer that is written like the frameworks'.
"""

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.plan.layout import Layout
from cordee.plan.states import adapter_targets, counted_kinds, layer_linears
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

# Kernels of a layer with fused norms, rotations and activations, and where torch runs rotations and activations one by
# one (benchmarks/host_issue.py counts 16 and 23).
FORWARD_KERNELS, EAGER_KERNELS = 16, 23
# The backward pass has so many for each, and one more adds up the gradient of each of about 12 weights (27 and 12).
BACKWARD_RATIO, GRADIENT_KERNELS = 1.7, 12
# The engine of the backward pass is not Python: a kernel takes less than half of the time (0.4, by the same script;
# with the driver's own part of a launch, which stays, about a half).
BACKWARD_FRACTION = 0.5
# Going back into a layer to recompute it saves and restores the state of random numbers and builds the graph again: as
# long as so many kernels (the same script).
REENTRY_KERNELS = 16
# A router, its sort and its permutations, forward.
EXPERT_KERNELS = 24
# An adapter is two products, a scaling and a sum; a quantised matrix is made 16-bit again by one kernel. There are two
# gradients for each adapter, and none for the rest.
ADAPTER_KERNELS, ADAPTER_GRADIENTS = 4, 2
# A collective is issued between two waits for streams.
COLLECTIVE_KERNELS = 2
# An all-reduce after each block, each way; with sequence parallelism a gather and a scatter in its place, and backward
# each block's input is gathered once more (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
COLLECTIVES, SPLIT_FORWARD, SPLIT_BACKWARD = 2, 4, 6


def layer_host_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, repeated: Real) -> Real:
    """Return the host's seconds for a layer and micro-batch; `repeated` is the fraction of layers run again."""
    kernels: Real = FORWARD_KERNELS if training.is_fused else EAGER_KERNELS
    if shape.experts is not None:
        kernels = kernels + EXPERT_KERNELS * shape.expert_layers / shape.layers
    gradients: float = GRADIENT_KERNELS
    if training.adapters is not None:
        gradients = 0.0
        for expert, count in counted_kinds(shape):
            part, modules = count / shape.layers, sum(not each.stack for each in layer_linears(shape, expert))
            adapted = part * len(adapter_targets(shape, training.adapters, expert=expert))
            kernels = kernels + ADAPTER_KERNELS * adapted + part * modules * (training.adapters.base_bits < 16)
            gradients += ADAPTER_GRADIENTS * adapted
    backward = BACKWARD_FRACTION * (BACKWARD_RATIO * kernels + gradients)
    each = COLLECTIVE_KERNELS * (layout.tp > 1)
    calls, returned = (
        each * (COLLECTIVES + (count - COLLECTIVES) * layout.sp) for count in (SPLIT_FORWARD, SPLIT_BACKWARD)
    )
    issued = (1 + repeated) * (kernels + calls) + repeated * REENTRY_KERNELS + backward + returned
    return gpu.efficiency.host_s * issued
