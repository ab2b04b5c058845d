"""Electricity of serving: kilowatt-hours and dollars of a million tokens.

A rented GPU's price holds its electricity already; these dollars count where the GPUs are owned or housed.
"""

from cordee.hardware.catalog import Gpu
from cordee.hardware.power import J_PER_KWH, Electricity, draw_of
from cordee.plan.serving.price.price import MTOK


def gpu_watts(gpu: Gpu, at: Electricity, busy_fraction: float = 1.0) -> float | None:
    """Return the watts that a building draws for this GPU at work this fraction of the time; None: unknown."""
    draw = draw_of(gpu)
    if draw is None:
        return None
    board = draw.watts * (busy_fraction + (1 - busy_fraction) * at.idle_fraction)
    return (board + draw.host.watts) * at.building_factor


def energy_usd_per_mtok(
    gpu: Gpu, gpus: int, tokens_per_s: float, at: Electricity, busy_fraction: float = 1.0
) -> float | None:
    """Return the dollars of electricity of a million tokens; `tokens_per_s` is at full load of `gpus` GPUs."""
    watts = gpu_watts(gpu, at, busy_fraction)
    if watts is None:
        return None
    kwh_per_token = watts * gpus / (tokens_per_s * busy_fraction) / J_PER_KWH
    return kwh_per_token * MTOK * at.usd_per_kwh
