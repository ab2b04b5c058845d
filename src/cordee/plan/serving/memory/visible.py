"""GPU memory as CUDA reports it: less than the chip's by what ECC and the driver keep; a nameplate says neither."""

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.case import ServingCase
from cordee.units import GiB

VISIBLE_GIB = {
    "A100-40": 39.49,
    "A100-80": 79.15,
    "H100": 79.18,
    "H800": 79.11,
    "H200": 139.8,
    "B200": 178.36,
    "GB200": 184.3,
    "B300": 267.7,
    "GB300": 276.6,
    "L40S": 44.39,
    "A10": 22.06,
    "RTX-4090": 23.52,
    "MI300X": 191.98,
}
"""GiB that torch.cuda.get_device_properties shows, from logs of engines. Drivers differ by up to 0.2 %."""

USUAL_FRACTION = 0.985
"""Part of the binary nameplate (80 GB read as 80 GiB) that cards show which are not in the table."""


def visible_bytes(gpu: Gpu) -> int:
    """Return the bytes that CUDA reports as the GPU's total."""
    if gpu.whole is not None:  # A MIG instance: its memory is what the driver lists as usable.
        return gpu.memory_bytes
    if gpu.name in VISIBLE_GIB:
        return round(VISIBLE_GIB[gpu.name] * GiB)
    return round(gpu.memory_bytes / 1e9 * GiB * USUAL_FRACTION)


def case_visible_bytes(case: ServingCase) -> int:
    """Return the total of a case's GPU: as it was read on the machine, or as its type usually shows."""
    return case.visible_bytes if case.visible_bytes is not None else visible_bytes(case.gpu)
