"""Samples of a node's GPUs: busy time, memory, power and energy, as the driver counts them.

Each joule goes to one account: at every look, what a GPU has drawn since the last one goes to the rank groups that held
it meanwhile, in proportion to their parts of it, and else to the node's idle energy. The driver counts whole GPUs only:
what each MIG instance or other part of one draws is not known.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cordee.account.split import apportioned
from cordee.agent.clock import Clock
from cordee.agent.energy import Drawn, EnergyMeter
from cordee.agent.gpus import Devices, GpuSample
from cordee.agent.launch import Assignment
from cordee.events import Event, GpusSampled, IdleGpusSampled
from cordee.ids import JobId

SAMPLE_S = 5.0
"""The time between two looks."""

LOOKS = 6
"""Looks that make one report; the first look of an attempt is reported at once."""

IDLE_LOOK_S = 60.0
"""The time between two looks at a node without rank groups."""

IDLE_REPORT_S = 600.0
"""The time between two reports of a node's idle energy."""


@dataclass(slots=True)
class _Taken:
    """The looks at one rank group's GPUs since its last report."""

    order: Assignment
    from_us: int
    reported: bool = False
    looks: int = 0
    seen: dict[int, list[GpuSample]] = field(default_factory=dict)  # by GPU
    drawn: Drawn = field(default_factory=Drawn)


@dataclass(slots=True)
class _Idle:
    """The energy that no rank group's account has taken since the last report of it."""

    from_us: int = 0
    report_s: float = -math.inf  # monotonic time of the next report
    drawn: Drawn = field(default_factory=Drawn)


class Samples:
    """The samples of one node.

    Args:
        node: the node's name.
        devices: its GPUs or slots; slots have nothing to sample.
        report: reports an event to the server.
        clock: the time.

    Attributes:
        next_s: monotonic time of the next look; infinite without GPUs.
    """

    def __init__(self, node: str, devices: Devices, report: Callable[[Event], None], clock: Clock) -> None:
        self._node, self._devices, self._report, self._clock = node, devices, report, clock
        self._taken: dict[str, _Taken] = {}
        self._meter, self._idle = EnergyMeter(), _Idle()
        self.next_s = 0.0 if devices.real else math.inf

    def begin(self, order: Assignment, now_s: float) -> None:
        """Give what its GPUs draw from now on to a rank group."""
        if self._devices.real and order.tag not in self._taken:
            self._look(now_s)
            self._taken[order.tag] = _Taken(order, self._clock.now_us())
            self.next_s = min(self.next_s, now_s + SAMPLE_S)

    def step(self, now_s: float, orders: Iterable[Assignment]) -> None:
        """Look at the GPUs if it is time, and report what is due of the rank groups whose ranks run."""
        if now_s < self.next_s:
            return
        self.next_s = now_s + (SAMPLE_S if self._taken else IDLE_LOOK_S)
        found = self._look(now_s)
        for order in orders:
            if order.tag in self._taken:
                self._count(self._taken[order.tag], found)
        if now_s >= self._idle.report_s:
            self._say_idle(now_s)

    def end(self, order: Assignment, now_s: float) -> None:
        """Report what is left of a rank group that has ended."""
        if order.tag not in self._taken:
            return
        found = self._look(now_s)
        taken = self._taken.pop(order.tag)
        if not taken.looks:
            self._count(taken, found, at_end=True)
        if taken.looks or taken.drawn.energy_mj:
            self._say(taken, found)

    def _look(self, now_s: float) -> dict[int, GpuSample]:
        """Sample all GPUs that are this node's to lease, and give what each has drawn to those that held it."""
        holders: dict[int, list[tuple[_Taken, int]]] = {}
        for taken in self._taken.values():
            lease = taken.order.leases[taken.order.node_rank]
            for gpu in lease.gpus:
                holders.setdefault(gpu, []).append((taken, lease.milli))
        others = self._devices.others - holders.keys()
        found = self._devices.sample([gpu for gpu in range(self._devices.count) if gpu not in others])
        self._meter.forget(others)
        for gpu, drawn in self._meter.look(now_s, found).items():
            held: list[tuple[_Taken | _Idle, int]] = [*holders.get(gpu, ())] or [(self._idle, 1)]
            weights = [weight for _, weight in held]
            parts = zip(apportioned(drawn.energy_mj, weights), apportioned(drawn.integrated_mj, weights), strict=True)
            for (account, _), (energy_mj, integrated_mj) in zip(held, parts, strict=True):
                before = account.drawn
                account.drawn = Drawn(before.energy_mj + energy_mj, before.integrated_mj + integrated_mj)
        return found

    def _count(self, taken: _Taken, found: Mapping[int, GpuSample], *, at_end: bool = False) -> None:
        mine = [gpu for gpu in taken.order.gpus if gpu in found]
        if not mine:
            return
        for gpu in mine:
            taken.seen.setdefault(gpu, []).append(found[gpu])
        taken.looks += 1
        if not at_end and (taken.looks >= LOOKS or not taken.reported):
            self._say(taken, found)

    def _say(self, taken: _Taken, found: Mapping[int, GpuSample]) -> None:
        now_us = self._clock.now_us()
        mine = [found[gpu] for gpu in taken.order.gpus if gpu in found]
        busy = {gpu: sum(each.busy for each in seen) / len(seen) for gpu, seen in taken.seen.items()}
        memory = {gpu: max(each.memory_bytes for each in seen) for gpu, seen in taken.seen.items()}
        self._report(
            GpusSampled(
                at_us=now_us,
                job_id=JobId(taken.order.job_id),
                epoch=taken.order.epoch,
                node=self._node,
                gpus=len(mine) or len(taken.order.gpus),
                from_us=taken.from_us,
                busy=sum(busy.values()) / len(busy) if busy else 0.0,
                memory_bytes=max(memory.values(), default=0),
                power_mw=sum(each.power_mw for each in mine),
                energy_mj=taken.drawn.energy_mj,
                integrated_mj=taken.drawn.integrated_mj,
                busy_each=tuple(round(busy[gpu], 3) if gpu in busy else None for gpu in taken.order.gpus),
                memory_bytes_each=tuple(memory.get(gpu) for gpu in taken.order.gpus),
            )
        )
        taken.from_us, taken.reported, taken.drawn = now_us, True, Drawn()
        taken.looks, taken.seen = 0, {}

    def _say_idle(self, now_s: float) -> None:
        """Report idle energy; the first time there is none, and it only begins."""
        idle, now_us = self._idle, self._clock.now_us()
        if idle.drawn.energy_mj:
            energy_mj, integrated_mj = idle.drawn
            self._report(
                IdleGpusSampled(
                    at_us=now_us,
                    node=self._node,
                    from_us=idle.from_us,
                    energy_mj=energy_mj,
                    integrated_mj=integrated_mj,
                )
            )
        idle.from_us, idle.drawn, idle.report_s = now_us, Drawn(), now_s + IDLE_REPORT_S
