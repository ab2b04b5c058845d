"""GPUs of a cluster over time: those that are up and held, and the gangs that wait for them.

`Occupancy` integrates GPU time in thousandths of GPUs times microseconds: all of it, the held part, and the fragmented
part, which was free while the smallest waiting gang would have fitted in it by number.
"""

from cordee.events import Node, NodeDown, NodeUp
from cordee.units import US_PER_S

POINTS = 1000


class Occupancy:
    """GPUs up, GPUs held and gangs waiting.

    Attributes:
        points: time, thousandths of GPUs held, waiting jobs, thousandths of GPUs up; thinned as they grow.
        since_us: the time until which it has integrated.
        held_milli: thousandths of GPUs that are held.
        sums: GPU time up, held and fragmented, until `since_us`.
        prices: micro-dollars of a GPU-hour, by node.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, int, int, int]] = []
        self.since_us = self.held_milli = 0
        self.sums = (0, 0, 0)
        self.prices: dict[str, int] = {}
        self._every_us = US_PER_S
        self._up: dict[str, Node] = {}
        self._milli = self._n_waiting = self._smallest = 0
        self._waiting: dict[int, int] = {}  # by thousandths of GPUs

    def advance(self, at_us: int) -> None:
        """Integrate until this time, and keep a point if the last one is old enough."""
        self.sums = self.until(at_us)
        self.since_us = at_us
        points = self.points
        if not points or at_us - points[-1][0] >= self._every_us:
            points.append((at_us, self.held_milli, self._n_waiting, self._milli))
            if len(points) >= 2 * POINTS:
                del points[1::2]
                self._every_us = max(2 * self._every_us, (at_us - points[0][0]) // (2 * POINTS))

    def until(self, at_us: int) -> tuple[int, int, int]:
        """Return the sums as they will be at this time if nothing changes."""
        past_us, free = at_us - self.since_us, self._milli - self.held_milli
        up, held, fragmented = self.sums
        if self._smallest and free >= self._smallest:
            fragmented += free * past_us
        return up + self._milli * past_us, held + self.held_milli * past_us, fragmented

    def node_up(self, event: NodeUp) -> None:
        """Add the node's GPUs, or what changed of them."""
        node, known = event.node, self._up.get(event.node.name)
        if known is None or node.epoch >= known.epoch:
            self._milli += 1000 * (_gpus(node) - (_gpus(known) if known else 0))
            self._up[node.name] = node
            self.prices[node.name] = node.micro_usd_per_gpu_hour

    def node_down(self, event: NodeDown) -> None:
        """Take the node's GPUs away."""
        node = self._up.get(event.node)
        if node is not None and event.epoch >= node.epoch:
            self._milli -= 1000 * _gpus(self._up.pop(event.node))

    def wait(self, milli: int, sign: int) -> None:
        """Count one gang of so many thousandths of GPUs more (+1) or less (-1) among those that wait."""
        waiting = self._waiting
        self._n_waiting += sign
        left = waiting[milli] = waiting.get(milli, 0) + sign
        if not left:
            del waiting[milli]
            if milli == self._smallest:
                self._smallest = min((each for each in waiting if each), default=0)
        elif milli and (not self._smallest or milli < self._smallest):  # a job without GPUs waits for none
            self._smallest = milli


def _gpus(node: Node) -> int:
    return node.gpus - len(node.unavailable)
