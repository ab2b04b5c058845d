"""MIG profiles as the catalogue knows them: names, legal starts, usable memory and SMs, each with its source.

What nobody published is None: an agent asks NVML for it, and nothing here computes it.
"""

from dataclasses import dataclass

from cordee.errors import CatalogueError
from cordee.events import MigGpus, MigProfile
from cordee.near import did_you_mean


@dataclass(frozen=True, slots=True)
class MigFacts:
    """One profile of one GPU.

    Attributes:
        placed: its name, its slices, the starts at which it may begin, and the most of them on a GPU.
        number: its id in `nvidia-smi mig -lgip`.
        memory_bytes: what CUDA can use of it; None: not published.
        units: streaming multiprocessors; None: not published.
    """

    placed: MigProfile
    number: int
    memory_bytes: int | None
    units: int | None

    @property
    def name(self) -> str:
        """The name by which NVIDIA's tools know it."""
        return self.placed.name


@dataclass(frozen=True, slots=True)
class MigTable:
    """The profiles of one GPU of the catalogue, the smallest first.

    Attributes:
        gpu: its name in the catalogue.
        slices: memory slices of the GPU.
        compute: its compute slices.
        source: of names, memory and SMs, read on `as_of`.
        placements_source: of the starts.
    """

    gpu: str
    slices: int
    compute: int
    profiles: tuple[MigFacts, ...]
    source: str
    as_of: str
    placements_source: str

    def find(self, name: str) -> MigFacts:
        """Return a profile by its name.

        Raises:
            CatalogueError: the GPU has no such profile.
        """
        found = next((each for each in self.profiles if each.name == name), None)
        if found is None:
            hint = did_you_mean(name, (each.name for each in self.profiles), listed="it has ")
            raise CatalogueError(f"{self.gpu} has no MIG profile {name!r}", hint=hint)
        return found

    def gpus(self, indices: tuple[int, ...], *, switched: bool = False) -> MigGpus:
        """Return GPUs of a node that its agent cuts by these profiles."""
        profiles = tuple(each.placed for each in self.profiles)
        return MigGpus(gpus=indices, profiles=profiles, slices=self.slices, compute=self.compute, switched=switched)
