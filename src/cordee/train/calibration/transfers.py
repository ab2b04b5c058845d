"""Copies between host and GPU, pinned and pageable, both ways at once, and with a product beside; GPUs only."""

from collections.abc import Iterator
from functools import partial

import torch

from cordee.hardware.measured import Sample
from cordee.train.calibration.sweeps import measure
from cordee.train.calibration.timing import Case, CudaDevice

SIZES = tuple(1 << power for power in (16, 20, 24, 28, 30))
SIDE = 8192


def measure_copies(device: CudaDevice, limit_s: float) -> Iterator[Sample]:
    """Yield samples of copies by direction and size, over bytes."""
    yield from measure([*_one_way(device), *_at_once(device)], device, limit_s)


def _one_way(device: CudaDevice) -> Iterator[Case]:
    for size in SIZES:
        there = torch.empty(size, dtype=torch.uint8, device=device.torch)
        for kind in ("pinned", "pageable"):
            here = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
            at = (float(size),)
            yield Case(f"to-device {kind}", at, float(size), partial(there.copy_, here, non_blocking=True))
            yield Case(f"to-host {kind}", at, float(size), partial(here.copy_, there, non_blocking=True))


def _at_once(device: CudaDevice) -> Iterator[Case]:
    """Yield a copy each way at the same time, and a product alone and with a copy beside it."""
    size = SIZES[-2]
    up, down = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(size, dtype=torch.uint8, device=device.torch) for _ in range(2))
    side = torch.ones(SIDE, SIDE, device=device.torch, dtype=torch.bfloat16)
    one, two = torch.cuda.Stream(device.torch), torch.cuda.Stream(device.torch)
    current = torch.cuda.current_stream(device.torch)

    def fork_and_join(*streams: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> None:
        for stream, to, of in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                to.copy_(of, non_blocking=True)

    def joined(*streams: torch.cuda.Stream) -> None:
        for stream in streams:
            current.wait_stream(stream)

    def both() -> None:
        fork_and_join((one, there, up), (two, down, back))
        joined(one, two)

    def product_and_copy() -> None:
        fork_and_join((one, there, up))
        torch.mm(side, side)
        joined(one)

    flop = 2.0 * SIDE**3
    yield Case("both-ways pinned", (float(size),), 2.0 * size, both)
    yield Case("product alone", (float(SIDE),), flop, lambda: torch.mm(side, side))
    yield Case("product beside-copy", (float(SIDE),), flop, product_and_copy)
