"""Memory as driver and allocator have it: what a GPU holds, what libraries take of it, reserved over allocated."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cordee.train.calibration.timing import Device

_WIDTH, _LAYERS, _TOKENS = 2048, 4, 4096
SUSTAINED_S = 5.0


def measure_memory(device: Device) -> Iterator[dict[str, Any]]:
    """Yield single numbers: `memory_bytes`, `context_bytes`, and on a GPU `reserved_ratio`."""
    if device.kind == "cpu":
        yield {"number": "memory_bytes", "value": float(_host_bytes())}
        yield {"number": "context_bytes", "value": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
        return
    _, total = torch.cuda.mem_get_info(device.torch)
    yield {"number": "memory_bytes", "value": float(total)}
    ratio = _reserved_ratio(device)
    free, _ = torch.cuda.mem_get_info(device.torch)
    # What others hold is not told apart; calibrations are refused beside them.
    held = total - free - torch.cuda.memory_reserved(device.torch)
    yield {"number": "context_bytes", "value": float(held)}
    yield {"number": "reserved_ratio", "value": ratio}


def _host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no MemTotal")


def _reserved_ratio(device: Device) -> float:
    """Return the most that the allocator reserved over the most that was allocated, in steps of a small MLP."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device.torch)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, device=device.torch) for _ in range(_LAYERS)]
    model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(_TOKENS, _WIDTH, device=device.torch)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize(device.torch)
    return float(torch.cuda.max_memory_reserved(device.torch) / torch.cuda.max_memory_allocated(device.torch))


def measure_sustained(device: Device, seconds: float = SUSTAINED_S) -> Iterator[dict[str, Any]]:
    """Yield `sustained_fraction`: the rate of products at the end of some seconds of nothing else, over the first's."""
    if device.kind == "cpu":
        return
    side = torch.ones(8192, 8192, device=device.torch, dtype=torch.bfloat16)
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        times.append(device.seconds(lambda: torch.mm(side, side), 10))
    part = max(1, len(times) // 5)
    yield {"number": "sustained_fraction", "value": sum(times[:part]) / sum(times[-part:])}
