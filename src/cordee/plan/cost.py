"""Dollars of GPU time and of storage.

Estimates are floats in dollars; what is billed is counted elsewhere, in whole micro-dollars.
"""

import math
from dataclasses import dataclass

from cordee.units import GB, US_PER_HOUR, US_PER_S

# Amazon S3 Standard in us-east-1: the first 50 TB of a month, and what leaves for the internet
# (aws.amazon.com/s3/pricing).
STORAGE_USD_PER_GB_MONTH = 0.023
EGRESS_USD_PER_GB = 0.09


def hold_usd(gpus: int, seconds: float, usd_per_gpu_hour: float) -> float:
    """Return the dollars of holding GPUs for a time.

    >>> round(hold_usd(64, 47 * 3600, 2.99), 2)
    8993.92
    """
    return gpus * seconds * usd_per_gpu_hour * US_PER_S / US_PER_HOUR


def usd_per_billion_tokens(gpus: int, tokens_per_s: float, usd_per_gpu_hour: float) -> float:
    """Return the dollars for 10^9 tokens at this pace."""
    return hold_usd(gpus, 1e9 / tokens_per_s, usd_per_gpu_hour)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Time and money of training on so many tokens, interruptions included. Dollars are None without a price."""

    tokens: float
    steps: int
    run_s: float
    gpu_hours: float
    usd: float | None
    usd_lost: float | None


def training_run(
    tokens: float,
    *,
    tokens_per_step: int,
    step_s: float,
    gpus: int,
    goodput: float,
    usd_per_gpu_hour: float | None = None,
) -> TrainingRun:
    """Return time and dollars for so many tokens, at this useful fraction of the time.

    >>> run = training_run(1e12, tokens_per_step=4_000_000, step_s=10.0, gpus=64, goodput=0.95)
    >>> run.steps, round(run.run_s / 86400, 2)
    (250000, 30.46)
    """
    steps = math.ceil(tokens / tokens_per_step)
    run_s = steps * step_s / goodput
    usd = None if usd_per_gpu_hour is None else hold_usd(gpus, run_s, usd_per_gpu_hour)
    return TrainingRun(
        tokens=tokens,
        steps=steps,
        run_s=run_s,
        gpu_hours=gpus * run_s / 3600,
        usd=usd,
        usd_lost=None if usd is None else usd * (1 - goodput),
    )


def storage_usd_per_month(n_bytes: float, usd_per_gb_month: float = STORAGE_USD_PER_GB_MONTH) -> float:
    """Return the dollars a month for bytes at rest.

    >>> round(storage_usd_per_month(30 * 420 * GB, 0.02), 2)
    252.0
    """
    return n_bytes / GB * usd_per_gb_month


def egress_usd(n_bytes: float, usd_per_gb: float = EGRESS_USD_PER_GB) -> float:
    """Return the dollars to carry bytes out of the cloud once.

    >>> round(egress_usd(420 * GB), 2)
    37.8
    """
    return n_bytes / GB * usd_per_gb
