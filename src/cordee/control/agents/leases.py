"""Leases of nodes as the server counts them, and what it says about a node that is silent (docs/decisions/0013)."""

from dataclasses import dataclass

from cordee.control.home import Home
from cordee.errors import InputError
from cordee.units import parse_duration_s

LEASE_S, LEASE_S_MIN, MARGIN_S = 30.0, 3.0, 5.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The times of a lease.

    Attributes:
        lease_s: an agent without an answer for so long ends its ranks.
        margin_s: for the agent to kill them, and for the drift of two clocks.
    """

    lease_s: float = LEASE_S
    margin_s: float = MARGIN_S

    @classmethod
    def of(cls, home: Home, text: str | None) -> "LeaseTerms":
        """Return the terms of the option --lease; None: as for the last `up`.

        Raises:
            InputError: it is not a duration, or a too short one.
        """
        text = home.settings().get("lease", f"{LEASE_S:g}s") if text is None else text
        lease_s = parse_duration_s(text)
        if lease_s < LEASE_S_MIN:
            raise InputError(
                f"a lease of {text} is too short: a network that stumbles would end ranks",
                hint=f"give --lease {LEASE_S_MIN:g}s or more; {LEASE_S:g}s is the default",
            )
        home.keep_settings({"lease": text})
        return cls(lease_s)

    @property
    def beat_s(self) -> float:
        """The time between two beats of an agent."""
        return min(2.0, self.lease_s / 8)

    @property
    def unreachable_s(self) -> float:
        """After this silence nothing new is placed on the node."""
        return min(5.0, self.lease_s / 3)

    @property
    def down_s(self) -> float:
        """After this silence the node's ranks are gone for certain."""
        return self.lease_s + self.margin_s
