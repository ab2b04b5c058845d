"""The energy that each GPU has drawn since the last look: by the driver's counter, or else as power over time.

The counter (nvmlDeviceGetTotalEnergyConsumption) is of the whole GPU, in millijoules since the driver was loaded. GPUs
before Volta have none; a reload of the driver sets it back.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cordee.agent.gpus import GpuSample

_MW_MAX = 10_000_000
"""No GPU draws 10 kW: a counter that says so has jumped."""

_SLACK_S = 1.0  # the counter may be that old at either look


class Drawn(NamedTuple):
    """Energy of a GPU, and the part of it that is power over time."""

    energy_mj: int = 0
    integrated_mj: int = 0


class _Reading(NamedTuple):
    at_s: float
    sample: GpuSample


class EnergyMeter:
    """The counters of a node's GPUs at the last look."""

    def __init__(self) -> None:
        self._last: dict[int, _Reading] = {}

    def look(self, now_s: float, samples: Mapping[int, GpuSample]) -> dict[int, Drawn]:
        """Return what each GPU has drawn since its last look; a GPU is not counted before its first one.

        Args:
            now_s: monotonic time.
            samples: by GPU; of one that is missing, the next look counts the time in between.
        """
        found = {gpu: self._drawn(gpu, now_s, sample) for gpu, sample in samples.items()}
        self._last |= {gpu: _Reading(now_s, sample) for gpu, sample in samples.items()}
        return found

    def forget(self, gpus: Iterable[int]) -> None:
        """Count nothing of these GPUs until they have been looked at again: others use them."""
        for gpu in gpus:
            self._last.pop(gpu, None)

    def _drawn(self, gpu: int, now_s: float, sample: GpuSample) -> Drawn:
        last = self._last.get(gpu)
        if last is None:
            return Drawn()
        passed_s, before = now_s - last.at_s, last.sample
        counted_mj = sample.energy_mj - before.energy_mj
        if before.energy_mj and 0 <= counted_mj <= _MW_MAX * (passed_s + _SLACK_S):
            return Drawn(counted_mj)
        powers = [power for power in (before.power_mw, sample.power_mw) if power]
        integrated_mj = round(sum(powers) / len(powers) * passed_s) if powers else 0
        return Drawn(integrated_mj, integrated_mj)
