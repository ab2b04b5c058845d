"""Events of a trace: births and deaths of storages, each in a segment of the step. No torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["states", "forward", "loss", "backward", "embedding", "step"]
PHASES: tuple[Phase, ...] = ("states", "forward", "loss", "backward", "embedding", "step")


class Segment(NamedTuple):
    """A stretch of a step: the phase, the repeated layer within it (None outside of them), and the micro-batch."""

    phase: Phase
    layer: int | None = None
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Birth:
    """A storage is allocated on a stream; 0 is the default one."""

    number: int
    size_bytes: int
    stream: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Death:
    """A storage is freed."""

    number: int
    segment: Segment


Event = Birth | Death
