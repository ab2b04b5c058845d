"""Searches that failed and need not be repeated before something becomes free or a turn changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SearchKey = tuple[object, object]
"""The shape of a job, and its queue where victims depend on it."""


class Scope(NamedTuple):
    """The running attempts that a waiting job may preempt, or move."""

    tier: int
    priority: int
    standing: int | None  # attempts of its own tier with a worse standing; None: no attempt of its own tier
    borrowers: frozenset[str] = frozenset()  # queues that borrowed the quota of its queue
    moves: int | None = None  # the most GPUs of attempts to move; None: preempt

    def covers(self, other: "Scope") -> bool:
        """Return whether it allows every victim that the other allows."""
        if self.tier > other.tier or other.borrowers - self.borrowers:
            return False
        if self.tier < other.tier or other.standing is None:
            return True
        return self.standing is not None and self.standing <= other.standing and self.priority >= other.priority


@dataclass(slots=True)
class FailedSearches:
    """Shapes for which a search failed: for victims, by their scope, and for free GPUs.

    They hold while no GPU becomes free (`gains` of the state stays) and until the next change of turns: no other event,
    such as a placement or an arrival, makes room for a job.

    Attributes:
        gains: that of the state at the time of the searches.
        from_us: the first time at which they hold.
        until_us: the time of the next change of turns; None if there is none.
        preemptions: for a shape and a queue, the scopes in which there were not enough victims.
        placements: shapes without a place at any time, when no GPU was kept for another job.
    """

    gains: int = -1
    from_us: int = 0
    until_us: int | None = None
    preemptions: dict[SearchKey, list[Scope]] = field(default_factory=dict)
    placements: frozenset[tuple[object, ...]] = frozenset()

    def valid(self, gains: int, now_us: int) -> "FailedSearches":
        """Return a copy with the searches that still hold."""
        if gains != self.gains or self.from_us > now_us:
            return FailedSearches(gains, now_us)
        if self.until_us is not None and now_us >= self.until_us:
            return FailedSearches(gains, now_us, placements=self.placements)
        preemptions = {key: list(scopes) for key, scopes in self.preemptions.items()}
        return FailedSearches(gains, now_us, self.until_us, preemptions, self.placements)

    def covers(self, key: SearchKey, scope: Scope) -> bool:
        """Return whether a search in this scope, or in a wider one, failed already."""
        scopes = self.preemptions.get(key)
        return scopes is not None and any(each.covers(scope) for each in scopes)

    def keep(self, is_asked: Callable[[SearchKey, Scope], bool]) -> None:
        """Keep the searches of which this holds."""
        kept = {key: [each for each in scopes if is_asked(key, each)] for key, scopes in self.preemptions.items()}
        self.preemptions = {key: scopes for key, scopes in kept.items() if scopes}

    def add(self, key: SearchKey, scope: Scope) -> None:
        """Add a failed search in this scope."""
        self.preemptions.setdefault(key, []).append(scope)
