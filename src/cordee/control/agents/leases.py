"""Leases of nodes as the server counts them, and what it says about a node that is silent (docs/decisions/0013)."""

from dataclasses import dataclass

LEASE_S = 30.0
MARGIN_S = 5.0
"""For the agent to kill its ranks and for the drift of two clocks."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The times of a lease.

    Attributes:
        lease_s: an agent without an answer for so long ends its ranks.
    """

    lease_s: float = LEASE_S

    @property
    def beat_s(self) -> float:
        """The time between two beats of an agent."""
        return min(2.0, self.lease_s / 8)

    @property
    def down_s(self) -> float:
        """After this silence the node's ranks are gone for certain."""
        return self.lease_s + MARGIN_S
