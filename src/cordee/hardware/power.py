"""Watts of boards and their hosts, and what electricity costs and emits: facts with their sources, and one sum.

What a GPU draws is at most its board's limit, which training comes near; a measured run has its joules from the driver.
A building draws its factor (PUE) more than its machines, and a kilowatt-hour emits what its grid does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cordee.hardware.catalog import PLAIN_HOST, Gpu, HostDraw, PowerDraw, Source

J_PER_KWH = 3.6e6
G_PER_KG = 1000


_DGX_A100 = HostDraw(412.5, "6.5 kW less 8 boards, NVIDIA DGX A100 datasheet")
_DGX_H100 = HostDraw(575.0, "10.2 kW less 8 boards, NVIDIA DGX H100 and H200 datasheets")
_DGX_B200 = HostDraw(787.5, "14.3 kW less 8 boards, NVIDIA DGX B200 datasheet")
_NVL72 = HostDraw(467.0, "estimate: about 120 kW for 72 boards of a GB200 NVL72")
_LIKE_H100 = HostDraw(575.0, "estimate: as for an H100")
_LIKE_B200 = HostDraw(787.5, "estimate: as for a B200")
_SUPERCHIP = HostDraw(0.0, "CPU and memory are in the board's watts; fans and network are not counted")


_A100 = PowerDraw(400, Source("NVIDIA A100 Tensor Core GPU datasheet, SXM4", "2021-06"), _DGX_A100)
_HOPPER = PowerDraw(700, Source("NVIDIA H100 and H200 Tensor Core GPU datasheets, SXM5", "2023-11"), _DGX_H100)
POWER = {
    "A100-40": _A100,
    "A100-80": _A100,
    "A100-PCIe-40": PowerDraw(250, Source("thundercompute.com, NVIDIA A100 specs, A100 PCIe 40GB", "2026-11")),
    "A100-PCIe-80": PowerDraw(300, Source("thundercompute.com, NVIDIA A100 specs, A100 PCIe 80GB", "2026-11")),
    "A30": PowerDraw(165, Source("NVIDIA A30 Tensor Core GPU datasheet", "2022-03")),
    "H100": _HOPPER,
    "H100-PCIe": PowerDraw(350, Source("NVIDIA H100 PCIe product brief, PB-11133-001_v02", "2022-11")),
    "H20": PowerDraw(400, Source("willitrunai.com, H20 96GB", "2026-11"), _LIKE_H100),
    "H100-NVL": PowerDraw(400, Source("NVIDIA H100 Tensor Core GPU datasheet, NVL, configurable up to", "2024-10")),
    "H200-NVL": PowerDraw(600, Source("NVIDIA H200 Tensor Core GPU datasheet, NVL, configurable up to", "2024-11")),
    "GH200": PowerDraw(
        1000, Source("NVIDIA GH200 datasheet, with its CPU and memory, configurable up to", "2023-08"), _SUPERCHIP
    ),
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
    "A40": PowerDraw(300, Source("NVIDIA A40 datasheet, as quoted by ecer.com", "2026-11")),
    "RTX-4090": PowerDraw(450, Source("NVIDIA GeForce RTX 4090, total graphics power", "2022-10")),
    "RTX-3090": PowerDraw(350, Source("NVIDIA GeForce RTX 3090, total graphics power", "2020-09")),
    "RTX-3080": PowerDraw(320, Source("cputronic.com and stockx.com, GeForce RTX 3080", "2026-11")),
    "RTX-3060": PowerDraw(170, Source("pcpartdb.com and askgeek.io, GeForce RTX 3060 12 GB", "2026-11")),
    "RTX-5080": PowerDraw(360, Source("notebookcheck.net, GeForce RTX 5080, total graphics power", "2026-11")),
    "RTX-4060-Ti-16": PowerDraw(165, Source("cputronic.com, GeForce RTX 4060 Ti 16 GB", "2026-11")),
    "RTX-5090": PowerDraw(575, Source("NVIDIA GeForce RTX 5090, total graphics power", "2025-01")),
    "RTX-A6000": PowerDraw(300, Source("NVIDIA RTX A6000 datasheet", "2020-10")),
    "RTX-A5000": PowerDraw(230, Source("NVIDIA RTX A5000 datasheet", "2021-04")),
    "RTX-4070-Ti-Super": PowerDraw(285, Source("NVIDIA GeForce RTX 4070 Ti SUPER, total graphics power", "2024-01")),
    "RTX-4080": PowerDraw(320, Source("NVIDIA GeForce RTX 4080, total graphics power", "2022-11")),
    "RTX-6000-Ada": PowerDraw(300, Source("NVIDIA RTX 6000 Ada Generation datasheet", "2023-01")),
    "RTX-PRO-6000": PowerDraw(600, Source("NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet", "2025-03")),
    "L4": PowerDraw(72, Source("NVIDIA L4 Tensor Core GPU datasheet", "2023-03")),
    "T4": PowerDraw(70, Source("NVIDIA T4 Tensor Core GPU datasheet", "2019-03")),
    "V100-16": PowerDraw(300, Source("NVIDIA V100 Tensor Core GPU datasheet, SXM2", "2020-01")),
    "V100-32": PowerDraw(300, Source("NVIDIA V100 Tensor Core GPU datasheet, SXM2", "2020-01")),
    "MI250X": PowerDraw(
        280, Source("half of a board of 560 W: rocm-smi of an MI250, huggingface.co, AMD Instinct", "2026-11")
    ),
    "MI300X": PowerDraw(750, Source("AMD Instinct MI300X datasheet", "2023-12"), _LIKE_H100),
    "MI325X": PowerDraw(1000, Source("AMD Instinct MI325X accelerator data sheet", "2024-10"), _LIKE_H100),
    "MI355X": PowerDraw(1400, Source("theregister.com, AMD's MI355X", "2025-06"), _LIKE_B200),
}
"""Board limits and hosts, by the name of the GPU in gpus.toml."""


MEAN_BUILDING = Source("the mean of the Uptime Institute's survey", "2024")


@dataclass(frozen=True, slots=True)
class PowerGrid:
    """Grams of CO2 equivalents that a kilowatt-hour emits where it is made, over the life of its power stations."""

    name: str
    g_co2e_per_kwh: float
    source: Source


@dataclass(frozen=True, slots=True)
class Electricity:
    """The price of electricity, what a building needs beside its machines, and what its grid emits.

    Attributes:
        building_factor: watts of the building for a watt of the machines (PUE).
        idle_fraction: the fraction of its limit that a GPU draws while it waits with a model loaded (assumed).
        grid: None: emissions are not told.
    """

    usd_per_kwh: float = 0.10
    building_factor: float = 1.56
    idle_fraction: float = 0.2
    building_source: Source = MEAN_BUILDING
    grid: PowerGrid | None = None

    def kg_co2e(self, building_kwh: float) -> float | None:
        """Return the emissions of a building's energy.

        >>> Electricity(grid=PowerGrid("a grid", 500.0, Source("", ""))).kg_co2e(20)
        10.0
        """
        return None if self.grid is None else building_kwh * self.grid.g_co2e_per_kwh / G_PER_KG

    def building_kwh(self, machine_joules: float) -> float:
        """Return the energy of a building for so many joules of its machines."""
        return machine_joules / J_PER_KWH * self.building_factor

    @property
    def sources(self) -> tuple[str, ...]:
        """The building's factor and the grid's emissions in words, each with its source."""
        factor = f"{self.building_factor:g} W of the building for a watt of machines (PUE): {self.building_source}"
        if self.grid is None:
            return (factor,)
        return factor, f"{self.grid.g_co2e_per_kwh:g} g CO2e a kWh, {self.grid.name}: {self.grid.source}"


def draw_of(gpu: Gpu) -> PowerDraw | None:
    """Return what the board and the host of a GPU draw; a MIG instance has the part of its SMs. None: unknown.

    The limit that the driver enforced when the GPU was calibrated counts before the one that its vendor names.
    """
    if gpu.whole is not None:
        whole = draw_of(gpu.whole)
        return None if whole is None else _of_instance(whole, gpu.efficiency.units, gpu.whole.efficiency.units)
    found, limit = gpu.draw or POWER.get(gpu.name), _enforced(gpu)
    if limit is None or (found is not None and found.watts == limit.watts):
        return found
    return limit if found is None else replace(limit, host=found.host)


def _enforced(gpu: Gpu) -> PowerDraw | None:
    """Return the power limit in the fingerprint of a calibration, which has it as `250 W`."""
    if gpu.measured is None:
        return None
    written = re.fullmatch(r"(\d+) W", str(gpu.measured.fingerprint.get("power-limit", "")))
    if written is None or int(written[1]) == 0:
        return None
    return PowerDraw(
        int(written[1]), Source("the limit that its driver enforced, cordee calibrate", gpu.measured.as_of)
    )


def _of_instance(whole: PowerDraw, units: int, of: int) -> PowerDraw:
    part = f"the part of its SMs, {units} of {of}, of {{:g}} W, {{}}"
    return PowerDraw(
        round(whole.watts * units / of, 1),
        Source(part.format(whole.watts, whole.source.title), whole.source.as_of),
        HostDraw(round(whole.host.watts * units / of, 1), part.format(whole.host.watts, whole.host.source)),
    )


def mean_draw(counts: Mapping[Gpu, int]) -> PowerDraw | None:
    """Return the mean of what GPUs of several kinds draw; None: of one of them it is unknown."""
    each = {gpu: draw_of(gpu) for gpu in counts}
    known = {gpu: draw for gpu, draw in each.items() if draw is not None}
    if len(known) < len(each):
        return None
    total = sum(counts.values())
    boards, hosts = (
        "the mean of " + "; ".join(f"{gpu.name} {text}" for gpu, text in texts.items())
        for texts in (
            {gpu: f"{draw.watts:g} W, {draw.source.title}" for gpu, draw in known.items()},
            {gpu: f"{draw.host.watts:g} W, {draw.host.source}" for gpu, draw in known.items()},
        )
    )
    return PowerDraw(
        round(sum(counts[gpu] * draw.watts for gpu, draw in known.items()) / total, 1),
        Source(boards, min(draw.source.as_of for draw in known.values())),
        HostDraw(round(sum(counts[gpu] * draw.host.watts for gpu, draw in known.items()) / total, 1), hosts),
    )


def host_of(name: str) -> HostDraw:
    """Return the host of a GPU of the catalogue; of one that has none there, that of a server with 8 cards."""
    return POWER[name].host if name in POWER else PLAIN_HOST


def no_draw(gpu: Gpu) -> str:
    """Return in words why the energy of a GPU is not known, and what tells it."""
    return f"energy: nobody says how many watts {gpu.name} draws; watts = 300 in its table of gpus.toml would"


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Energy of GPUs at their boards' limits over some seconds: at most what they draw.

    Attributes:
        gpus: their number, each with a board and its part of a host.
        seconds: how long they run.
    """

    gpus: int
    seconds: float
    draw: PowerDraw
    electricity: Electricity

    @property
    def sources(self) -> tuple[str, ...]:
        """The watts of board, host and building, and the grid's emissions, each with its source."""
        return *self.draw.sources, *self.electricity.sources

    @property
    def machine_joules(self) -> float:
        """Joules of boards and hosts."""
        return self.gpus * (self.draw.watts + self.draw.host.watts) * self.seconds

    @property
    def kwh(self) -> float:
        """Kilowatt-hours of the building."""
        return self.electricity.building_kwh(self.machine_joules)

    @property
    def kg_co2e(self) -> float | None:
        """Kilograms of CO2 equivalents; None without a grid."""
        return self.electricity.kg_co2e(self.kwh)

    @property
    def usd(self) -> float:
        """Dollars of electricity, which the price of a rented GPU holds already."""
        return self.kwh * self.electricity.usd_per_kwh
