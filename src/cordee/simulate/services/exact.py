"""The play by requests: each one goes to the replica with the fewest open requests, and is batched there step by step.

It takes as long as the engine has steps, so it stands for short stretches and measures how exact `fluid.py` is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cordee.plan.serving.queueing.batching import Replica, Steps
from cordee.plan.serving.queueing.routing import HASHED_BLOCKS, LARGEST_LOAD
from cordee.plan.serving.queueing.served import Outcome
from cordee.simulate.services.arrivals import Arrivals
from cordee.simulate.services.replica import ReplicaModel

_LOOK_S = 0.25  # the age of the numbers of open requests by which a replica is chosen


@dataclass
class ExactPlay:
    """All replicas of a service in time; one that leaves answers what it has.

    `steps` are other step times than the model's own.
    """

    model: ReplicaModel
    arrivals: Arrivals
    steps: Steps | None = None
    replicas: dict[int, Replica] = field(default_factory=dict)
    left: list[Replica] = field(default_factory=list)
    next: int = 0
    held: list[int] = field(default_factory=list)
    looked_s: float = 0.0

    def advance(self, from_s: float, to_s: float, ready: Sequence[int]) -> None:
        """Play until `to_s` with these replicas, which are ready at `from_s`."""
        for name in [name for name in self.replicas if name not in ready]:
            self.left.append(self.replicas.pop(name))
        for name in ready:
            if name not in self.replicas:
                self.replicas[name] = Replica(self.steps or self.model.speed, self.model.limits)
                self.replicas[name].now_s = from_s
        if self.replicas:
            for index in self.held:
                self._offer(index, from_s)
            self.held.clear()
        end = int(np.searchsorted(self.arrivals.at_s, to_s))
        for index in range(self.next, end):
            if self.replicas:
                self._offer(index, float(self.arrivals.at_s[index]))
            else:
                self.held.append(index)
        self.next = end
        self._run(to_s)

    def finish(self) -> None:
        """Answer what is open."""
        for each in (*self.replicas.values(), *self.left):
            each.run()

    @property
    def open(self) -> int:
        """Requests that are open at replicas, or held until there is one."""
        return len(self.held) + sum(each.open for each in (*self.replicas.values(), *self.left))

    @property
    def outcomes(self) -> list[Outcome]:
        """The answered requests in the order of arrival."""
        found = [each for replica in (*self.replicas.values(), *self.left) for each in replica.served.outcomes]
        return sorted(found, key=lambda each: each.arrival_s)

    @property
    def refused(self) -> int:
        """Requests that are longer than the context or the cache."""
        return sum(each.tally.refused for each in (*self.replicas.values(), *self.left))

    def _run(self, to_s: float) -> None:
        for each in (*self.replicas.values(), *self.left):
            each.run(to_s)
        self.looked_s = to_s

    def _offer(self, index: int, now_s: float) -> None:
        if now_s - self.looked_s >= _LOOK_S:
            self._run(now_s)
        request = self.arrivals.request(index, float(self.arrivals.at_s[index]))
        replicas = list(self.replicas.values())
        chosen = min(replicas, key=_open)
        if request.blocks:
            mean = sum(map(_open, replicas)) / len(replicas)
            first = replicas[hash(request.blocks[:HASHED_BLOCKS]) % len(replicas)]
            chosen = first if first.open <= LARGEST_LOAD * mean + 1 else chosen
        chosen.run(now_s)
        chosen.offer(request)


def _open(replica: Replica) -> int:
    return replica.open
