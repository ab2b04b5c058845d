"""What of a change is noise: counts of tokens are a sample, and a placement must not follow the sample's noise.

Tokens that go to an expert in a window are at best Poisson: their variance is their mean. Two questions are answered:
is a GPU fuller than such noise makes one of that many GPUs, and how far do new counts replace what was believed.
"""

from statistics import NormalDist

import numpy as np

from cordee.plan.experts.shape import Floats, Placement, gpu_loads

CONFIDENCE = 0.95
"""How sure it has to be that a layer's imbalance is more than noise."""


def beyond_noise(mean: Floats, variance: Floats, placement: Placement) -> Floats:
    """How far the GPU that stands out most stands out, for each layer, over what noise explains: above 1 it is real.

    The noise of a GPU's load is that of its experts' loads, each divided by its replicas. Among so many GPUs the
    fullest one exceeds the mean by some of it although nothing is wrong: by how much at most, in 95 of 100 windows,
    is what the excess is divided by.
    """
    loads = gpu_loads(mean, placement.slots)
    noise = np.sqrt(gpu_loads(variance / placement.counts, placement.slots))
    allowed = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / max(2, placement.fleet.gpus))
    excess: Floats = (loads - loads.mean(axis=1, keepdims=True)) / np.maximum(noise * allowed, 1e-300)
    found: Floats = excess.max(axis=1)
    return found


def updated(mean: Floats, variance: Floats, loads: Floats) -> tuple[Floats, Floats, Floats]:
    """What to believe after a window of new counts: mean, variance, and how much more they differ than noise explains.

    A Kalman step for each expert, in shares of its layer's tokens (scaled to the new window). The last value is the
    chi-square of the difference by its degrees of freedom: about 1 if nothing drifted. What is above 1 is drift, and
    widens what was believed before it is combined with what was counted: without drift two windows are averaged, with
    much of it the new one stands alone.
    """
    scale = loads.sum(axis=1, keepdims=True) / mean.sum(axis=1, keepdims=True)
    mean, variance = mean * scale, variance * scale**2
    counted = np.maximum(loads, 1.0)
    both = variance + counted
    dispersion: Floats = ((loads - mean) ** 2 / both).sum(axis=1) / max(1, loads.shape[1] - 1)
    wider = variance + np.maximum(dispersion - 1, 0)[:, None] * both
    gain = wider / (wider + counted)
    return mean + gain * (loads - mean), gain * counted, dispersion
