"""Defects of a profile, counted by kind with the first as an example. The rest of the file is still read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defect:
    """One kind of defect; `example` is the first."""

    kind: str
    count: int
    example: str


class Defects:
    """The defects found so far in a file."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def note(self, kind: str, example: str, count: int = 1) -> None:
        """Count one defect, or several of a kind."""
        before, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = (before + count, first)

    def found(self) -> tuple[Defect, ...]:
        """Return all defects by kind."""
        return tuple(Defect(kind, count, example) for kind, (count, example) in sorted(self._kinds.items()))
