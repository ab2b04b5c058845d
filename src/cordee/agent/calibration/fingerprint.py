"""Fingerprints, for which a calibration's numbers hold: device, driver, clocks, power limit, software. No torch."""

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cordee.agent.gpus import nvml_library

CPU, CUDA = "cpu", "cuda"
_SOFTWARE = {"torch": "torch", "triton": "triton", "nccl": "nvidia-nccl-cu13", "nccl-cu12": "nvidia-nccl-cu12"}


def fingerprint(gpu: int | None, threads: int) -> dict[str, str]:
    """Return the fingerprint of a GPU by its index, or of the CPU with so many threads: words by their name."""
    found = {"device": CPU if gpu is None else CUDA, "host": socket.gethostname(), **_software()}
    if gpu is None:
        return found | {"cpu": cpu_name(), "cores": str(os.cpu_count() or 1), "threads": str(threads)}
    nvml = nvml_library()
    return found if nvml is None else found | _of_gpu(nvml, gpu)


def same_device(kept: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprint as it is now of the device that a kept one names, on this host."""
    threads, index = (int(text) if text.isdigit() else 0 for text in (kept.get("threads", ""), kept.get("index", "")))
    return fingerprint(index if kept.get("device") == CUDA else None, threads)


def _software() -> dict[str, str]:
    found = {}
    for name, package in _SOFTWARE.items():
        try:
            found[name.partition("-")[0]] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _of_gpu(nvml: Any, index: int) -> dict[str, str]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    asked: dict[str, Callable[[], str]] = {
        "gpu": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": lambda: _cuda(nvml.nvmlSystemGetCudaDriverVersion()),
        "power-limit": lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000:.0f} W",
        "clock-max": lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)} MHz",
        "memory": lambda: f"{nvml.nvmlDeviceGetMemoryInfo(handle).total} bytes",
    }
    found = {}
    for key, ask in asked.items():
        try:
            found[key] = ask()
        except (nvml.NVMLError, AttributeError):  # a driver, or a stub, that does not know it
            continue
    return found


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model as its kernel names it; the architecture where that is not known."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def device_name(fingerprint: Mapping[str, str]) -> str:
    """Return the name of a CPU in the catalogue: `cpu-amd-epyc-2t`.

    >>> device_name({"cpu": "Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz", "threads": "4"})
    'cpu-intel-xeon-gold-6338-4t'
    """
    words = re.sub(r"\((R|TM|r|tm)\)|CPU|Processor|@.*|\d+-Core", " ", fingerprint["cpu"])
    plain = "-".join(re.findall(r"[a-z0-9]+", words.lower()))
    return f"cpu-{plain}-{fingerprint['threads']}t"
