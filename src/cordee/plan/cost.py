"""Dollars of GPU time. Estimates are floats in dollars; what is billed is counted elsewhere, in whole micro-dollars."""

from cordee.units import US_PER_HOUR, US_PER_S


def hold_usd(gpus: int, seconds: float, usd_per_gpu_hour: float) -> float:
    """What it costs to hold GPUs for a time.

    >>> round(hold_usd(64, 47 * 3600, 2.99), 2)
    8993.92
    """
    return gpus * seconds * usd_per_gpu_hour * US_PER_S / US_PER_HOUR


def usd_per_billion_tokens(gpus: int, tokens_per_s: float, usd_per_gpu_hour: float) -> float:
    """Dollars for 10^9 tokens at this pace."""
    return hold_usd(gpus, 1e9 / tokens_per_s, usd_per_gpu_hour)
