"""Multi-Instance GPU (MIG) in events: the GPUs of a node that are cut into instances, their profiles, one instance."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A profile by which a GPU can be cut, as NVML or the catalogue states it."""

    name: str  # such as 1g.10gb
    size: int  # memory slices that an instance takes
    compute: int  # compute slices that it takes
    starts: tuple[int, ...]  # memory slices at which it may begin
    instances: int  # the most of them on one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """The instance that a lease is on."""

    profile: str
    start: int  # its first memory slice
    size: int  # memory slices


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGpus:
    """The GPUs of a node whose instances are leased."""

    gpus: tuple[int, ...]
    profiles: tuple[MigProfile, ...]
    slices: int = 8  # memory slices of a GPU
    compute: int = 7  # compute slices of a GPU
    fixed: tuple[tuple[int, int, int, str], ...] | None = None
    """(GPU, start, size, profile) of the instances that are there, if the agent makes no others."""
    switched: bool = False  # the agent turns MIG on and off, so that a GPU without instances can be leased whole

    def milli(self, size: int) -> int:
        """Return the thousandths of a GPU that an instance of so many memory slices counts as.

        >>> MigGpus(gpus=(0,), profiles=()).milli(4)
        500
        """
        return 1000 * size // self.slices
