"""Memory as driver and allocator have it: what a GPU holds, and what libraries take of it."""

import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cordee.train.calibration.timing import Device

SUSTAINED_S = 5.0


def measure_memory(device: Device) -> Iterator[dict[str, Any]]:
    """Yield single numbers: `memory_bytes` and `context_bytes`."""
    if device.kind == "cpu":
        yield {"number": "memory_bytes", "value": float(_host_bytes())}
        yield {"number": "context_bytes", "value": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
        return
    _, total = torch.cuda.mem_get_info(device.torch)
    yield {"number": "memory_bytes", "value": float(total)}
    # Libraries load their modules with the first product and the first attention.
    side = torch.ones(1, 8, 256, 64, device=device.torch, dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(side @ side.mT @ side, side, side)
    torch.cuda.synchronize(device.torch)
    free, _ = torch.cuda.mem_get_info(device.torch)
    # What others hold is not told apart; calibrations are refused beside them.
    held = total - free - torch.cuda.memory_reserved(device.torch)
    yield {"number": "context_bytes", "value": float(held)}


def _host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no MemTotal")


def measure_sustained(device: Device, seconds: float = SUSTAINED_S) -> Iterator[dict[str, Any]]:
    """Yield what a GPU keeps through some seconds of nothing but products.

    `sustained_fraction` is their rate at the end over the first's; `sustained_watts` and `sustained_mhz` are the
    board's draw and the SMs' clock at the end, where the driver's library tells them.
    """
    if device.kind == "cpu":
        return
    side = torch.ones(8192, 8192, device=device.torch, dtype=torch.bfloat16)
    times, sensed, until = [], [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        times.append(device.seconds(lambda: torch.mm(side, side), 10))
        sensed.append(_sensors(device))
    part = max(1, len(times) // 5)
    yield {"number": "sustained_fraction", "value": sum(times[:part]) / sum(times[-part:])}
    for name in sensed[-1]:
        yield {"number": name, "value": statistics.median(each[name] for each in sensed[-part:] if name in each)}


def _sensors(device: Device) -> dict[str, float]:
    """Return the board's watts and the SMs' MHz over the last part of a second; of a board without sensors, none."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        milliwatts, mhz = torch.cuda.power_draw(device.torch), torch.cuda.clock_rate(device.torch)
    except (pynvml.NVMLError, RuntimeError):  # RuntimeError: no driver
        return {}
    return {"sustained_watts": milliwatts / 1000, "sustained_mhz": float(mhz)}
