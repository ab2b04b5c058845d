"""Noise of measured loads: counts of tokens are a sample, and a placement must not follow its noise.

The tokens of an expert in a window are at best Poisson: their variance is their mean. One function tests whether a GPU
is fuller than noise explains, the other updates an estimate of the loads by new counts.
"""

from statistics import NormalDist

import numpy as np

from cordee.hardware.arrays import Floats
from cordee.plan.experts.shape import ExpertPlacement, gpu_loads

CONFIDENCE = 0.95
"""The confidence that a layer's imbalance is more than noise."""


def beyond_noise(mean: Floats, variance: Floats, placement: ExpertPlacement) -> Floats:
    """Return the excess of each layer's fullest GPU over what noise explains: above 1 the imbalance is real.

    The noise of a GPU's load is that of its experts' loads, each divided by its replicas. The divisor is the excess
    that the fullest of so many equally loaded GPUs stays below in 95 of 100 windows.
    """
    loads = gpu_loads(mean, placement.slots)
    noise = np.sqrt(gpu_loads(variance / placement.counts, placement.slots))
    allowed = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / max(2, placement.fleet.gpus))
    excess: Floats = (loads - loads.mean(axis=1, keepdims=True)) / np.maximum(noise * allowed, 1e-300)
    found: Floats = excess.max(axis=1)
    return found


def updated(mean: Floats, variance: Floats, loads: Floats) -> tuple[Floats, Floats, Floats]:
    """Return mean and variance of the loads after a window of new counts, and the dispersion of the change.

    A Kalman step for each expert, scaled to the tokens of the new window. The dispersion is the chi-square of the
    change over its degrees of freedom: about 1 without drift. Drift widens the earlier variance: without it two
    windows are averaged, with much of it the new window replaces the estimate.
    """
    scale = loads.sum(axis=1, keepdims=True) / mean.sum(axis=1, keepdims=True)
    mean, variance = mean * scale, variance * scale**2
    counted = np.maximum(loads, 1.0)
    both = variance + counted
    dispersion: Floats = ((loads - mean) ** 2 / both).sum(axis=1) / max(1, loads.shape[1] - 1)
    wider = variance + np.maximum(dispersion - 1, 0)[:, None] * both
    gain = wider / (wider + counted)
    return mean + gain * (loads - mean), gain * counted, dispersion
