"""The shape that a gang waits for, and its arrangement on nodes."""

from typing import NamedTuple

ANYWHERE = 99
"""The height of the whole cluster above the racks."""

DOMAIN_HEIGHTS = {"rack": 0, "block": 1}
"""The values of `within`: domains by their height above the racks."""

HIGHEST: dict[str | None, int] = {"island": -1, "rack": 0, "block": 1, None: ANYWHERE}
"""The highest domain that a gang may spread over, by its `within`."""

Pick = tuple[str, int, int]
"""A node, the number of units on it, and the GPUs of a rest there (0: none)."""


class Need(NamedTuple):
    """The parts into which a gang may be divided."""

    unit: int  # GPUs
    units: int
    rest: int  # GPUs of the one part that is smaller than a unit; 0: none
    in_island: bool  # a unit lies in one island where islands are large enough, not just in one node
    within: str | None

    @property
    def gpus(self) -> int:
        """All GPUs of the gang."""
        return self.units * self.unit + self.rest


class Arrangement(NamedTuple):
    """The arrangement of a gang in its place."""

    spread: int  # 0 one island, 1 one node, 2 an island of several nodes, 3 a rack, then each level above
    picks: tuple[Pick, ...]
    left_over: int  # free GPUs that stay in the node or domain
