"""The doubt of a step's time beyond its table's spread: what the step would be if something unknown were worse.

One number of the table at a time is put as far off as nine of ten stay within, and the step is timed again: that is how
far the interval reaches for it. So a slower network counts where its traffic is hidden today, and a slower host where
kernels are about to wait for it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import ChipEfficiency, Gpu
from cordee.plan.layout import Layout
from cordee.plan.step import INTERVAL_SIGMAS, StepTime, step_time
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

# How far sources of software that was never seen stand from those that were: of each other they differ by a tenth.
SOFTWARE_SPREAD = 0.15
# Fused attention of one generation reaches 0.75 to 1.25 of its middle, by head width and length (FlashAttention-2,
# arXiv:2307.08691, figure 5; FlashAttention-3, arXiv:2407.08608, figure 5).
ATTENTION_SPREAD = 0.15
# Tokens of the fullest expert rank over the mean, where no loads were given: 1 with forced balance, 2 and more without.
ROUTING_SPREAD = 0.35
_ATTENTION = ("attention_fraction", "vendor_attention_fraction")


def doubt(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, step: StepTime) -> Real:
    """Return the standard deviation of log(measured / predicted) that a step has beyond its table's `spread`."""
    table = gpu.efficiency
    variance: Real = (SOFTWARE_SPREAD if table.fitted_on and training.framework not in table.software else 0.0) ** 2
    for worse, routed in _worse(shape, gpu, layout, training):
        longer = step_time(shape, replace(gpu, efficiency=worse), layout, routed).total_s / step.total_s
        variance = variance + (np.log(longer) / INTERVAL_SIGMAS) ** 2
    return np.sqrt(variance)


def _worse(
    shape: ModelShape, gpu: Gpu, layout: Layout, training: Training
) -> Iterator[tuple[ChipEfficiency, Training]]:
    """Yield the table, and the training, with one unknown as much worse as nine of ten stay within."""
    table = gpu.efficiency
    yield replace(table, host_s=table.host_s * _worst(table.host_spread)), training
    network = _worst(table.network_spread)
    yield (
        replace(
            table, network_fraction=table.network_fraction / network, network_alpha_s=table.network_alpha_s * network
        ),
        training,
    )
    yield _slower_attention(table, _worst(ATTENTION_SPREAD)), training
    if training.framework == "torch" and np.any(layout.cp > 1):
        # Where each rank has one slice of a causal sequence the last one has the most work; torch divides it evenly by
        # default, and its published steps take as long as if it did not.
        yield _slower_attention(table, 2 - 1 / layout.cp), training
    if shape.experts is not None and training.imbalance == 1 and not training.imbalance_by_ep:
        yield table, replace(training, imbalance=_worst(ROUTING_SPREAD))


def _worst(spread: float) -> float:
    return math.exp(INTERVAL_SIGMAS * spread)


def _slower_attention(table: ChipEfficiency, times: Real) -> ChipEfficiency:
    slower: dict[str, Any] = {name: getattr(table, name) / times for name in _ATTENTION}
    return replace(table, **slower)
