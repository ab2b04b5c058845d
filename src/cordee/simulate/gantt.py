"""The attempts on the first nodes of a cluster over time, for drawings: a fold over the log."""

from collections.abc import Iterable
from dataclasses import dataclass

from cordee.events import AttemptPlaced, Event, Outcome, RanksEnded
from cordee.ids import JobId

NODES = 32
_HELD_MAX = 200_000  # a longer run is drawn from its beginning

DRAWN = frozenset((AttemptPlaced, RanksEnded))
"""The kinds of events that are drawn."""


@dataclass(frozen=True, slots=True)
class Held:
    """GPUs of one node, by one attempt."""

    node: str
    gpus: tuple[int, ...]
    job_id: JobId
    from_us: int
    to_us: int
    outcome: Outcome | None


class Gantt:
    """The fold over the log."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = [name for name, _ in zip(nodes, range(NODES), strict=False)]
        self.held: list[Held] = []
        self._shown = set(self.nodes)
        self._live: dict[tuple[JobId, str], tuple[int, tuple[int, ...]]] = {}

    def apply(self, event: Event) -> None:
        """Fold one event."""
        if isinstance(event, AttemptPlaced):
            for lease in event.leases:
                if lease.node in self._shown:
                    self._live[event.job_id, lease.node] = (event.at_us, lease.gpus)
        elif isinstance(event, RanksEnded) and event.node in self._shown:
            live = self._live.pop((event.job_id, event.node), None)
            if live is not None and len(self.held) < _HELD_MAX:
                self.held.append(Held(event.node, live[1], event.job_id, live[0], event.at_us, event.outcome))

    def window(self, from_us: int, to_us: int) -> list[Held]:
        """Return what was held in a window of time."""
        live = [
            Held(node, gpus, job_id, since_us, to_us, None) for (job_id, node), (since_us, gpus) in self._live.items()
        ]
        return [each for each in (*self.held, *live) if each.to_us > from_us and each.from_us < to_us]
