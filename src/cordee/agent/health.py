"""The health of a GPU by the counters of its driver: a sick GPU gets no new work, with the reason.

The rules are those of NVIDIA's own health check (DCGM): an uncorrectable error since the driver was loaded, memory that
waits for a reset or cannot be repaired, and clocks that the hardware lowers because of heat.
"""

from collections.abc import Callable, Iterator
from typing import Any

RETIRED_PAGES_MAX = 60  # NVIDIA replaces a GPU with more
_RESET = "reset it: nvidia-smi --gpu-reset"


def sickness(nvml: Any, handle: Any) -> str | None:
    """Return why a GPU should get no work; None if it is healthy. A counter that it does not have says nothing."""
    return next(_findings(nvml, handle), None)


def _findings(nvml: Any, handle: Any) -> Iterator[str]:
    def ask(question: Callable[..., Any], *more: int) -> Any:
        try:
            return question(handle, *more)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            return None

    try:
        errors = ask(nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        rows = ask(nvml.nvmlDeviceGetRemappedRows)
        causes = range(nvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
        pages = sum(len(ask(nvml.nvmlDeviceGetRetiredPages, cause) or ()) for cause in causes)
        pending = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)
        slow = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    except nvml.NVMLError_GpuIsLost:
        yield "lost: the driver cannot reach it; restart the node"
        return
    if rows and rows[3]:
        yield f"{rows[1]} rows remapped after uncorrectable errors, and one more could not be: replace it"
    if rows and rows[2]:
        yield f"a remapped row waits for a reset; {_RESET}"
    if pages > RETIRED_PAGES_MAX:
        yield f"{pages} retired pages of memory, more than {RETIRED_PAGES_MAX}: replace it"
    if pending:
        yield f"a retired page of memory waits for a reset; {_RESET}"
    if errors:
        yield f"{errors} uncorrectable memory errors since its last reset; {_RESET}"
    if slow and slow & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
        yield "too hot: the hardware has lowered its clocks"


def slow_clocks(nvml: Any, handle: Any) -> str:
    """Return why the clocks are lower than they could be, but for power limits and idleness; "" if they are not."""
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return ""
    causes = {
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat, by the hardware",
        nvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat, by the driver",
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "the power supply's brake",
    }
    found = [cause for bit, cause in causes.items() if bits & bit]
    return f"lowered because of {' and '.join(found)}" if found else ""
