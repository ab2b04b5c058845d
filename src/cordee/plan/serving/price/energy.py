"""Electricity of serving: watts of a GPU with their source, kilowatt-hours and dollars of a million tokens.

A rented GPU's price holds its electricity already; these dollars count where the GPUs are owned or housed.
"""

from dataclasses import dataclass

from cordee.hardware.catalog import Gpu, Source
from cordee.plan.serving.price.price import MTOK

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class HostDraw:
    """Watts of CPUs, memory, network and fans for one GPU: the server's limit less its boards, by their number."""

    watts: float
    source: str


_DGX_A100 = HostDraw(412.5, "6.5 kW less 8 boards, NVIDIA DGX A100 datasheet")
_DGX_H100 = HostDraw(575.0, "10.2 kW less 8 boards, NVIDIA DGX H100 and H200 datasheets")
_DGX_B200 = HostDraw(787.5, "14.3 kW less 8 boards, NVIDIA DGX B200 datasheet")
_NVL72 = HostDraw(467.0, "estimate: about 120 kW for 72 boards of a GB200 NVL72")
_LIKE_H100 = HostDraw(575.0, "estimate: as for an H100")
_LIKE_B200 = HostDraw(787.5, "estimate: as for a B200")
_PLAIN = HostDraw(150.0, "estimate: 1.2 kW of a server with 8 cards")


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """The limit of a GPU's board in watts, which a loaded GPU comes near, and what its host draws for it."""

    watts: float
    source: Source
    host: HostDraw = _PLAIN

    def __str__(self) -> str:
        return f"{self.watts:g} W a board: {self.source}; {self.host.watts:g} W of its host: {self.host.source}"


_A100 = PowerDraw(400, Source("NVIDIA A100 Tensor Core GPU datasheet, SXM4", "2021-06"), _DGX_A100)
_HOPPER = PowerDraw(700, Source("NVIDIA H100 and H200 Tensor Core GPU datasheets, SXM5", "2023-11"), _DGX_H100)
POWER = {
    "A100-40": _A100,
    "A100-80": _A100,
    "H100": _HOPPER,
    "H800": PowerDraw(700, Source("as H100: the same chip and board", "2025-05"), _LIKE_H100),
    "H200": _HOPPER,
    "B200": PowerDraw(1000, Source("NVIDIA DGX B200 datasheet", "2025-03"), _DGX_B200),
    "GB200": PowerDraw(1200, Source("NVIDIA GB200 NVL72 datasheet, configurable up to", "2025-03"), _NVL72),
    "B300": PowerDraw(
        1100, Source("aiconfigurator-core 0.12.0, systems/b300_sxm.yaml, configurable up to", "2026-08"), _LIKE_B200
    ),
    "GB300": PowerDraw(1400, Source("aiconfigurator-core 0.12.0, systems/gb300.yaml", "2026-08"), _NVL72),
    "L40S": PowerDraw(350, Source("NVIDIA L40S datasheet", "2023-08")),
    "A10": PowerDraw(150, Source("NVIDIA A10 datasheet", "2021-04")),
    "RTX-4090": PowerDraw(450, Source("NVIDIA GeForce RTX 4090, total graphics power", "2022-10")),
    "RTX-3090": PowerDraw(350, Source("NVIDIA GeForce RTX 3090, total graphics power", "2020-09")),
    "RTX-5090": PowerDraw(575, Source("NVIDIA GeForce RTX 5090, total graphics power", "2025-01")),
    "RTX-A6000": PowerDraw(300, Source("NVIDIA RTX A6000 datasheet", "2020-10")),
    "MI300X": PowerDraw(750, Source("AMD Instinct MI300X datasheet", "2023-12"), _LIKE_H100),
}
"""Board limits and hosts, by the name of the GPU in gpus.toml."""


@dataclass(frozen=True, slots=True)
class Electricity:
    """The price of electricity and what a building needs beside its machines.

    Attributes:
        building_factor: watts of the building for a watt of the machines (PUE); 1.56 is the mean of the Uptime
            Institute's survey of 2024.
        idle_fraction: the fraction of its limit that a GPU draws while it waits with a model loaded (assumed).
    """

    usd_per_kwh: float = 0.10
    building_factor: float = 1.56
    idle_fraction: float = 0.2


def gpu_watts(gpu: Gpu, at: Electricity, busy_fraction: float = 1.0) -> float | None:
    """Return the watts that a building draws for this GPU at work this fraction of the time; None: unknown."""
    draw = POWER.get(gpu.name)
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
