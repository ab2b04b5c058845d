"""Samples of the GPUs that rank groups hold: busy time, memory, power and energy, as the driver counts them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cordee.agent.clock import Clock
from cordee.agent.gpus import Devices, GpuSample
from cordee.agent.launch import Assignment
from cordee.events import Event, GpusSampled
from cordee.ids import JobId

SAMPLE_S = 5.0
"""The time between two looks."""

LOOKS = 6
"""Looks that make one report; the first look of an attempt is reported at once."""


@dataclass(slots=True)
class _Taken:
    """The looks at one rank group's GPUs since its last report; energies are by GPU, as counted by the driver."""

    order: Assignment
    from_us: int
    energy_mj: dict[int, int]
    reported: bool = False
    busy: list[float] = field(default_factory=list)
    memory_bytes: int = 0


class Samples:
    """The samples of one node's rank groups.

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
        self.next_s = 0.0 if devices.real else math.inf

    def step(self, now_s: float, orders: Iterable[Assignment]) -> None:
        """Look at the GPUs of these rank groups if it is time, and report what is due."""
        if now_s < self.next_s:
            return
        self.next_s = now_s + SAMPLE_S
        for order in orders:
            found = self._devices.sample(order.gpus)
            if not found:
                continue
            taken = self._taken.get(order.tag)
            if taken is None:
                self._taken[order.tag] = _Taken(order, self._clock.now_us(), _energies(found))
                continue
            taken.busy.append(sum(each.busy for each in found.values()) / len(found))
            taken.memory_bytes = max(taken.memory_bytes, *(each.memory_bytes for each in found.values()))
            if len(taken.busy) >= LOOKS or not taken.reported:
                self._say(taken, found)

    def end(self, order: Assignment) -> None:
        """Report what is left of a rank group that has ended."""
        taken = self._taken.pop(order.tag, None)
        if taken is not None and taken.busy and (found := self._devices.sample(order.gpus)):
            self._say(taken, found)

    def _say(self, taken: _Taken, found: Mapping[int, GpuSample]) -> None:
        energies, now_us = _energies(found), self._clock.now_us()
        self._report(
            GpusSampled(
                at_us=now_us,
                job_id=JobId(taken.order.job_id),
                epoch=taken.order.epoch,
                node=self._node,
                gpus=len(found),
                from_us=taken.from_us,
                busy=sum(taken.busy) / len(taken.busy),
                memory_bytes=taken.memory_bytes,
                power_mw=sum(each.power_mw for each in found.values()),
                energy_mj=sum(max(0, energy - taken.energy_mj.get(gpu, energy)) for gpu, energy in energies.items()),
            )
        )
        taken.from_us, taken.energy_mj, taken.reported = now_us, energies, True
        taken.busy, taken.memory_bytes = [], 0


def _energies(found: Mapping[int, GpuSample]) -> dict[int, int]:
    return {gpu: each.energy_mj for gpu, each in found.items()}
