"""Processes that are on this machine while it is measured: busy ones, those on a GPU, and the load."""

import os
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from cordee.agent.gpus import nvml_library
from cordee.units import format_bytes

SHOWN = 5
WORDS, LETTERS = 4, 40
BUSY_FRACTION = 0.05  # of a core
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process beside the probes: its name, and what it has of a core or of the GPU's memory."""

    pid: int
    name: str
    has: str


Times = Mapping[int, tuple[str, float]]


class Neighbours:
    """The processes that are busy between two moments, this one left out."""

    def __init__(self) -> None:
        self._began_s, self._before = time.monotonic(), cpu_seconds()

    def busy(self) -> tuple[Neighbour, ...]:
        """Return the busiest processes since it was made, the busiest first."""
        return busiest(self._before, cpu_seconds(), max(0.05, time.monotonic() - self._began_s), {os.getpid()})


def busiest(before: Times, after: Times, passed_s: float, ours: Container[int]) -> tuple[Neighbour, ...]:
    """Return the processes that were busy for more than BUSY_FRACTION of the time between two looks, busiest first."""
    found = []
    for pid, (name, seconds) in after.items():
        part = (seconds - before.get(pid, (name, 0.0))[1]) / passed_s
        if part >= BUSY_FRACTION and pid not in ours:
            found.append((part, Neighbour(pid, command(pid) or name, f"{part:.0%} of a core")))
    return tuple(each for _, each in sorted(found, key=lambda pair: -pair[0])[:SHOWN])


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return name and CPU seconds of each process."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for folder in _PROC.iterdir() if _PROC.exists() else ():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            found[int(folder.name)] = name, (int(fields[11]) + int(fields[12])) / tick
    return found


def load() -> float:
    """Return the processes that wanted a core in the last minute, on average."""
    return os.getloadavg()[0]


def on_gpu(index: int, ours: Container[int] = ()) -> tuple[Neighbour, ...]:
    """Return the other processes on a GPU, as the driver names them."""
    nvml = nvml_library()
    if nvml is None:
        return ()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    return tuple(
        Neighbour(each.pid, command(each.pid) or "?", f"{format_bytes(each.usedGpuMemory or 0)} of GPU {index}")
        for each in running
        if each.pid not in ours
    )


def command(pid: int) -> str:
    """Return the first words of a process's command, its program without folders; "" if it has ended."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    shown = [Path(words[0]).name, *words[1:WORDS]]
    return " ".join(word for word in shown if word)[:LETTERS]
