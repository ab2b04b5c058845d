"""Slices of a GPU (MIG): the profiles as records, and a slice as a GPU of its own for small models.

A slice has a fraction of the memory, of its bandwidth and of the units, so all else of the planner holds for it. It has
no link to other slices: one slice is one GPU of tp=1. A part of a GPU that several processes share in time is one too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cordee.errors import CatalogueError
from cordee.hardware.catalog import Gpu, Source

SOURCE = Source("NVIDIA Multi-Instance GPU User Guide, Supported MIG Profiles", "2026-08")


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of slice of a GPU with seven compute and eight memory slices.

    Attributes:
        compute_slices: of 7: its fraction of the units (SMs).
        memory_slices: of 8: its fraction of the memory, of its bandwidth and of the L2 cache.
        instances: so many of them on one GPU.
    """

    compute_slices: int
    memory_slices: int
    instances: int

    @property
    def compute_fraction(self) -> float:
        """The fraction of the units."""
        return self.compute_slices / 7

    @property
    def memory_fraction(self) -> float:
        """The fraction of the memory and of its bandwidth."""
        return self.memory_slices / 8


MIG_PROFILES = (
    MigProfile(1, 1, 7),
    MigProfile(1, 2, 4),
    MigProfile(2, 2, 3),
    MigProfile(3, 4, 2),
    MigProfile(4, 4, 1),
    MigProfile(7, 8, 1),
)
"""The same on A100, H100, H200, B200 and their like; the smaller A30 has four slices and is not in the catalogue."""

MIG_SLICE_GB: Mapping[str, tuple[int, int, int, int]] = {
    "A100-40": (5, 10, 20, 40),
    "A100-80": (10, 20, 40, 80),
    "H100": (10, 20, 40, 80),
    "H200": (18, 35, 71, 141),
    "B200": (23, 45, 90, 180),
    "B300": (34, 67, 135, 269),
}
"""Gigabytes of 1, 2, 4 and 8 memory slices as the profiles' names say them, by GPU."""
_POSITION = {1: 0, 2: 1, 4: 2, 8: 3}


def profile_name(gpu: Gpu, profile: MigProfile) -> str:
    """Return the name by which NVIDIA's tools know the profile.

    >>> from cordee.hardware.load import load_catalogue
    >>> h100 = load_catalogue().find_gpu("H100")
    >>> [profile_name(h100, each) for each in MIG_PROFILES]
    ['1g.10gb', '1g.20gb', '2g.20gb', '3g.40gb', '4g.40gb', '7g.80gb']

    Raises:
        CatalogueError: the GPU has no slices.
    """
    if gpu.name not in MIG_SLICE_GB:
        known = ", ".join(MIG_SLICE_GB)
        raise CatalogueError(f"{gpu.name} cannot be cut into MIG slices", hint=f"these can: {known}")
    return f"{profile.compute_slices}g.{MIG_SLICE_GB[gpu.name][_POSITION[profile.memory_slices]]}gb"


def slice_gpu(gpu: Gpu, profile: MigProfile) -> Gpu:
    """Return a slice of a GPU as a GPU.

    Raises:
        CatalogueError: the GPU has no slices.
    """
    fractions = profile.memory_fraction, profile.compute_fraction
    return replace(_fraction(gpu, profile_name(gpu, profile), *fractions), source=SOURCE)


def time_slice(gpu: Gpu, milli: int) -> Gpu:
    """Return a part of a GPU in thousandths, as it is while all its parts are busy.

    >>> from cordee.hardware.load import load_catalogue
    >>> quarter = time_slice(load_catalogue().find_gpu("H100"), 250)
    >>> quarter.name, quarter.memory_bytes
    ('H100 x 0.25', 20000000000)
    """
    return _fraction(gpu, f"x {milli / 1000:g}", milli / 1000, milli / 1000)


def _fraction(gpu: Gpu, name: str, memory: float, compute: float) -> Gpu:
    return replace(
        gpu,
        name=f"{gpu.name} {name}",
        aliases=(),
        memory_bytes=round(gpu.memory_bytes * memory),
        memory_bytes_per_s=gpu.memory_bytes_per_s * memory,
        flop_per_s={dtype: rate * compute for dtype, rate in gpu.flop_per_s.items()},
        island_gpus=1,
    )


def slices(gpu: Gpu) -> tuple[tuple[Gpu, int], ...]:
    """Return each slice of a GPU with their number on it, without the whole; nothing for a GPU without slices."""
    if gpu.name not in MIG_SLICE_GB:
        return ()
    return tuple((slice_gpu(gpu, each), each.instances) for each in MIG_PROFILES if each.compute_slices < 7)
