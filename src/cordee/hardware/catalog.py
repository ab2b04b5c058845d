"""GPUs and prices as values, and how a name written by a person finds its GPU.

Every fact names its source and the month it was read. Nothing here reads a file: see `load.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cordee.errors import CatalogueError
from cordee.hardware.kernels import Kernels
from cordee.hardware.mig import MigTable
from cordee.near import nearest_model

if TYPE_CHECKING:
    from cordee.hardware.measured import Measured  # it imports numpy, and agents start without it

Capacity = Literal["on-demand", "spot", "reserved"]
CAPACITIES: tuple[Capacity, ...] = ("on-demand", "spot")
"""The kinds that differ in their interruptions."""
PRICED: tuple[Capacity, ...] = (*CAPACITIES, "reserved")
"""The kinds that a price list may have; a reserved GPU is paid for in every hour."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place where a fact was read, and the date (`2026-03` or `2026-03-11`)."""

    title: str
    as_of: str

    def __str__(self) -> str:
        return f"{self.title} ({self.as_of})"


@dataclass(frozen=True, slots=True)
class HostDraw:
    """Watts of CPUs, memory, network and fans for one GPU: the server's limit less its boards, by their number."""

    watts: float
    source: str


PLAIN_HOST = HostDraw(150.0, "estimate: 1.2 kW of a server with 8 cards")


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """The limit of a GPU's board in watts, which a loaded GPU comes near, and what its host draws for it."""

    watts: float
    source: Source
    host: HostDraw = PLAIN_HOST

    @property
    def sources(self) -> tuple[str, str]:
        """The watts of the board and of its host in words, each with its source."""
        return f"{self.watts:g} W a board: {self.source}", f"{self.host.watts:g} W of its host: {self.host.source}"

    def __str__(self) -> str:
        return "; ".join(self.sources)


@dataclass(frozen=True, slots=True)
class ChipEfficiency:
    """The fractions of its nameplate that a chip reaches, as a handful of physical numbers.

    The uncalibrated table holds vendor facts, published ceilings and stated assumptions; a calibrated one was fitted to
    published step times by `benchmarks/fit_efficiency.py`, `fitted_on` names their
    sources and `software` the frameworks that these ran.

    `product_fraction` is of the dense peak of 16-bit products whose tiles fill the chip, `product8_fraction` of
    8-bit ones, `grouped_fraction` what a grouped product over experts keeps of a plain one's rate.
    `attention_fraction` is of the 16-bit peak in portable fused attention (FlashAttention-2),
    `vendor_attention_fraction` in the vendor's own (cuDNN). `memory_fraction` (what a layer's kernels move),
    `stream_fraction` (what large plain ones do: copies, casts, the optimizer), `island_fraction` and
    `network_fraction` are of the bandwidths; the network's rate falls as (islands / 2) ** -`network_decay`.
    `host_s` is what the host needs to issue one kernel, `launch_s`
    what the device loses between two. `exposed_fraction` is the part of overlapped traffic that costs time all
    the same. `portable_fraction` is what frameworks that are not the vendor's own reach of its speed. `spread`
    is the standard deviation of log(measured / predicted), `host_spread` that of log(host_s),
    `network_spread` that of the logarithm of the time of traffic between islands.
    """

    units: int
    switch_reduces: bool
    product_fraction: float
    product8_fraction: float
    attention_fraction: float
    vendor_attention_fraction: float
    grouped_fraction: float
    memory_fraction: float
    stream_fraction: float
    island_fraction: float
    network_fraction: float
    network_decay: float
    island_alpha_s: float
    network_alpha_s: float
    launch_s: float
    host_s: float
    exposed_fraction: float
    portable_fraction: float
    spread: float
    host_spread: float
    network_spread: float
    source: Source
    fitted_on: tuple[str, ...] = ()
    software: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its vendor describes it, and the node it usually comes in.

    `memory_bytes` is the nameplate in decimal bytes, `visible_fraction` of which CUDA shows to a program.
    `flop_per_s` is dense, by dtype. `link_bytes_per_s` (inside an island) and `network_bytes_per_s` (between nodes)
    are per GPU and per direction. `matmul_fraction` is the part of the dense bf16 peak that large matrix products
    reach. `island_gpus` may exceed `gpus_per_node` (GB200 NVL72). `efficiency` is what step times are predicted
    with: the calibrated table of the chip, if it has one. `kernels` holds the single kernels that were measured on
    it, or on another GPU with its chip. `mig` holds its MIG profiles, if they are known. A MIG instance is a GPU
    too: it has `part` of the memory slices of `whole`. `board_ratio` is the fraction of the peak that its board's power
    limit leaves to large products, over that of the board which its chip's fractions are of. `draw` is what a user's
    file says that it draws: see `power.draw_of`.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_s: float
    flop_per_s: Mapping[str, float] = field(hash=False)
    link: str
    link_bytes_per_s: float
    matmul_fraction: float
    gpus_per_node: int
    island_gpus: int
    network_bytes_per_s: float
    source: Source
    matmul_source: Source
    node_source: Source
    uncalibrated: ChipEfficiency
    efficiency: ChipEfficiency
    kernels: Kernels = field(default=Kernels(), hash=False, compare=False, repr=False)
    mig: MigTable | None = field(default=None, hash=False, compare=False, repr=False)
    whole: "Gpu | None" = field(default=None, hash=False, compare=False, repr=False)
    part: float = 1.0
    measured: "Measured | None" = field(default=None, hash=False, compare=False, repr=False)
    visible_fraction: float = 1.0
    board_ratio: float = 1.0
    draw: PowerDraw | None = field(default=None, hash=False, compare=False, repr=False)

    @property
    def visible_bytes(self) -> int:
        """The wall: memory that CUDA shows to a program. Vendors' GB are GiB, less what ECC and the driver keep."""
        return round(self.memory_bytes * self.visible_fraction)

    @property
    def is_synchronous(self) -> bool:
        """Return whether it computes while it is told to, as a CPU: the host's time adds up, and nothing hides it."""
        return self.measured is not None and self.measured.fingerprint.get("device") == "cpu"

    @property
    def peak16_flop_per_s(self) -> float:
        """The dense FLOP/s in 16 bits; chips before A100 have fp16 only, and a CPU may have none but 32 bits."""
        rates = self.flop_per_s
        return rates.get("bf16") or rates.get("fp16") or rates["fp32"]

    @property
    def peak32_flop_per_s(self) -> float:
        """The dense FLOP/s of products of 32-bit numbers, as frameworks allow them: TF32 where there is such."""
        return self.flop_per_s.get("tf32") or self.flop_per_s["fp32"]

    def peak_flop_per_s(self, dtype: str) -> float:
        """Return the dense FLOP/s in `dtype`.

        Raises:
            CatalogueError: the GPU has no unit for this dtype.
        """
        if dtype not in self.flop_per_s:
            known = ", ".join(sorted(self.flop_per_s))
            asked = next((f": --precision {each}" for each in ("bf16", "fp16", "fp32") if each in self.flop_per_s), "")
            raise CatalogueError(f"{self.name} has no {dtype} units", hint=f"it computes in {known}{asked}")
        return self.flop_per_s[dtype]

    def instance(self, profile: str) -> "Gpu":
        """Return a MIG instance of it as a GPU: with its usable memory and its SMs, and without links.

        Bandwidth goes with memory slices, compute with SMs. Instances share PCIe and the power limit: two that compute
        at full load slow each other, which is not in these numbers.

        Raises:
            CatalogueError: it has no such profile, or its memory and SMs are not known.
        """
        if self.mig is None:
            hint = "A30, A100, Hopper, B200, B300, their Grace boards and RTX PRO 6000 have them"
            raise CatalogueError(f"no MIG profile of {self.name} is known", hint=hint)
        facts = self.mig.find(profile)
        if facts.memory_bytes is None or facts.units is None:
            hint = "ask a machine that has one: nvidia-smi mig -lgip; then write it as a GPU of your own in gpus.toml"
            raise CatalogueError(f"memory or SMs of {profile} of {self.name} are published nowhere", hint=hint)
        part, compute = facts.placed.size / self.mig.slices, facts.units / self.efficiency.units
        return replace(
            self,
            name=f"{self.name} {profile}",
            aliases=(),
            memory_bytes=facts.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s * part,
            flop_per_s={dtype: rate * compute for dtype, rate in self.flop_per_s.items()},
            island_gpus=1,
            uncalibrated=replace(self.uncalibrated, units=facts.units),
            efficiency=replace(self.efficiency, units=facts.units),
            source=Source(self.mig.source, self.mig.as_of),
            mig=None,
            whole=self,
            part=part,
            measured=None,
            visible_fraction=1.0,  # its memory is what the driver lists as usable
        )

    def instances(self) -> tuple[tuple["Gpu", int], ...]:
        """Return each MIG instance with their number on the GPU, without the whole and those with media engines.

        Profiles whose memory or SMs were published nowhere are left out.
        """
        if self.mig is None:
            return ()
        known = (each for each in self.mig.profiles if each.memory_bytes is not None and each.units is not None)
        small = (each.placed for each in known if each.placed.size < self.mig.slices and "+" not in each.name)
        return tuple((self.instance(each.name), each.instances) for each in small)


@dataclass(frozen=True, slots=True)
class Price:
    """The dollars of one GPU-hour, with their source."""

    gpu: str
    capacity: Capacity
    usd_per_gpu_hour: float
    source: Source


@dataclass(frozen=True, slots=True)
class CpuPrice:
    """The dollars of one CPU core for an hour, with their source. Only jobs without GPUs pay for cores."""

    usd_per_core_hour: float
    source: Source


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All GPUs and prices that are known; a core has the price of the user's own file, if any."""

    gpus: tuple[Gpu, ...]
    prices: tuple[Price, ...]
    cpu: CpuPrice | None = None

    def find_gpu(self, name: str) -> Gpu:
        """Return the GPU that a person means by `H100`, `h100-80gb`, `NVIDIA H100 80GB HBM3` or `H100 1g.10gb`.

        Raises:
            CatalogueError: no such GPU, or no such MIG profile of it.
        """
        whole, _, profile = name.strip().rpartition(" ")
        if re.fullmatch(r"\d+g\.\d+gb(\+[a-z.]+)?", profile):
            return self.find_gpu(whole).instance(profile)
        wanted = _plain(name)
        known = {_plain(alias): gpu for gpu in self.gpus for alias in (gpu.name, *gpu.aliases)}
        # People leave out the RTX of a card's name.
        short = {each.removeprefix("rtx"): gpu for each, gpu in known.items()}
        if wanted in known or wanted in short:
            return known.get(wanted) or short[wanted]
        names = [each for gpu in self.gpus for each in (gpu.name, *gpu.aliases)]
        near = nearest_model(re.sub(_VENDORS, "", name, flags=re.IGNORECASE), names)
        did_you_mean = f"did you mean {known[_plain(near)].name}? " if near else ""
        listed = "`cordee plan --kinds` lists those that are known; or describe it in gpus.toml, in Cordee's home"
        raise CatalogueError(f"unknown GPU {name!r}", hint=did_you_mean + listed)

    def price(self, gpu: Gpu, capacity: Capacity) -> Price | None:
        """Return the price of this GPU in this kind of capacity, or None where no source gives one."""
        return price_of(self.prices, gpu, capacity)


def price_of(prices: Sequence[Price], gpu: Gpu, capacity: Capacity) -> Price | None:
    """Return the price of a GPU in a kind of capacity; a MIG instance costs its part of the whole one."""
    found = {each.gpu: each for each in prices if each.capacity == capacity}
    own, whole = found.get(gpu.name), None if gpu.whole is None else found.get(gpu.whole.name)
    if own is not None or whole is None:
        return own
    return replace(whole, gpu=gpu.name, usd_per_gpu_hour=whole.usd_per_gpu_hour * gpu.part)


_VENDORS = "nvidia|amd|geforce|instinct"


def _plain(name: str) -> str:
    """Return a name without vendor, case and punctuation, so that spellings meet."""
    return re.sub(rf"[^a-z0-9]|{_VENDORS}", "", name.lower())
