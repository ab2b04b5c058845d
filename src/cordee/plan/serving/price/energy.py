"""Electricity of serving: watts of a GPU with their source, kilowatt-hours and dollars of a million tokens.

A rented GPU's price holds its electricity already; these dollars count where the GPUs are owned or housed.
"""

from dataclasses import dataclass

from cordee.hardware.catalog import Gpu, Source
from cordee.plan.serving.price.price import MTOK

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """The limit of a GPU's board in watts, which a loaded GPU comes near."""

    watts: float
    source: Source


_A100 = PowerDraw(400, Source("NVIDIA A100 Tensor Core GPU datasheet, SXM4", "2021-06"))
_HOPPER = PowerDraw(700, Source("NVIDIA H100 and H200 Tensor Core GPU datasheets, SXM5", "2023-11"))
POWER = {
    "A100-40": _A100,
    "A100-80": _A100,
    "H100": _HOPPER,
    "H800": PowerDraw(700, Source("as H100: the same chip and board", "2025-05")),
    "H200": _HOPPER,
    "B200": PowerDraw(1000, Source("NVIDIA DGX B200 datasheet", "2025-03")),
    "GB200": PowerDraw(1200, Source("NVIDIA GB200 NVL72 datasheet, configurable up to", "2025-03")),
    "B300": PowerDraw(1100, Source("aiconfigurator-core 0.12.0, systems/b300_sxm.yaml, configurable up to", "2026-08")),
    "GB300": PowerDraw(1400, Source("aiconfigurator-core 0.12.0, systems/gb300.yaml", "2026-08")),
    "L40S": PowerDraw(350, Source("NVIDIA L40S datasheet", "2023-08")),
    "A10": PowerDraw(150, Source("NVIDIA A10 datasheet", "2021-04")),
    "RTX-4090": PowerDraw(450, Source("NVIDIA GeForce RTX 4090, total graphics power", "2022-10")),
    "MI300X": PowerDraw(750, Source("AMD Instinct MI300X datasheet", "2023-12")),
}
"""Board limits, by the name of the GPU in gpus.toml."""


@dataclass(frozen=True, slots=True)
class Electricity:
    """The price of electricity and what a GPU needs beside its board.

    Attributes:
        host_watts_per_gpu: a GPU's part of CPUs, memory, network and fans: DGX H100 draws 10.2 kW with 8 x 700 W.
        building_factor: watts of the building for a watt of the machines (PUE); 1.56 is the mean of the Uptime
            Institute's survey of 2024.
        idle_fraction: the part of its limit that a GPU draws while it waits with a model loaded (assumed).
    """

    usd_per_kwh: float = 0.10
    host_watts_per_gpu: float = 575.0
    building_factor: float = 1.56
    idle_fraction: float = 0.2


def gpu_watts(gpu: Gpu, at: Electricity, busy_fraction: float = 1.0) -> float | None:
    """Return the watts that a building draws for this GPU at work this fraction of the time; None: unknown."""
    draw = POWER.get(gpu.name)
    if draw is None:
        return None
    board = draw.watts * (busy_fraction + (1 - busy_fraction) * at.idle_fraction)
    return (board + at.host_watts_per_gpu) * at.building_factor


def energy_usd_per_mtok(
    gpu: Gpu, gpus: int, tokens_per_s: float, at: Electricity, busy_fraction: float = 1.0
) -> float | None:
    """Return the dollars of electricity of a million tokens; `tokens_per_s` is at full load of `gpus` GPUs."""
    watts = gpu_watts(gpu, at, busy_fraction)
    if watts is None:
        return None
    kwh_per_token = watts * gpus / (tokens_per_s * busy_fraction) / J_PER_KWH
    return kwh_per_token * MTOK * at.usd_per_kwh
