"""What was wrong with a profile: named, counted, the first of each kind quoted. What was right is read all the same."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault; `example` is the first that was met."""

    kind: str
    count: int
    example: str


class Faults:
    """Counts them while a profile is read."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}

    def note(self, kind: str, example: str, count: int = 1) -> None:
        """One more, or several."""
        before, first = self._kinds.get(kind, (0, example))
        self._kinds[kind] = (before + count, first)

    def noted(self) -> tuple[Fault, ...]:
        """All of them, by kind."""
        return tuple(Fault(kind, count, example) for kind, (count, example) in sorted(self._kinds.items()))
