"""The answer to a question, as plain values that travel between processes. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cordee.train.trace_memory.timeline import CLASSES, Reserve, TracedMoment

# cuBLAS allocates a workspace from torch's allocator at the first product: 32 MiB since Hopper. A CPU has none.
WORKSPACE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes of rank 0 by class at the fullest moment of each phase, and what torch's allocator reserves.

    `layers_recorded` of `layers` have run; one of them was repeated for the rest. `layers` 0: none repeats.
    `reads_tokens`: the model takes sequences of tokens, and no images.
    """

    moments: tuple[TracedMoment, ...]
    reserve: Reserve
    parameters: int
    trained_parameters: int
    layers: int
    layers_recorded: int
    events: int
    cpu_s: float
    reads_tokens: bool = True

    @property
    def peak(self) -> TracedMoment:
        """The fullest moment of the step."""
        return max(self.moments, key=lambda moment: moment.allocated_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes as torch's max_memory_allocated counts them."""
        return self.peak.allocated_bytes

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self) | {"allocated_bytes": self.allocated_bytes, "peak": self.peak.phase}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Traced":
        """Return the answer of a document."""
        fields = {key: value for key, value in document.items() if key not in ("allocated_bytes", "peak")}
        moments = tuple(TracedMoment(each["phase"], _parts(each["parts"])) for each in fields["moments"])
        return cls(**fields | {"moments": moments, "reserve": Reserve(**fields["reserve"])})


def _parts(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: parts[name] for name in CLASSES}
