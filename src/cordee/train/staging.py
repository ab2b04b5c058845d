"""Staging memory: one shared buffer per rank, kept between saves, that the trainer fills and its drain reads.

Memory that is made anew for each save costs 7 times a copy into memory that is there (our measurement: page faults),
and with CUDA the pinning besides; so this one only grows.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from cordee.units import MiB


class Staging:
    """Anonymous shared memory behind a descriptor."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("cordee-staging", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def grow(self, size_bytes: int) -> bool:
        """Make it hold at least this much; True if it is a new mapping."""
        if size_bytes <= self.bytes.numel():
            return False
        whole = -(-size_bytes // MiB) * MiB
        self._unpin()
        os.posix_fallocate(self.fd, 0, whole) if hasattr(os, "posix_fallocate") else os.ftruncate(self.fd, whole)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, whole, flags=flags), dtype=torch.uint8)
        return True

    def fill(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy sources into targets (views of `bytes`); they are there when this returns."""
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self._pin()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        side.synchronize()

    def close(self) -> None:
        """Give the memory back; the drain's own mapping lives on."""
        if self.fd < 0:
            return
        self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)
        self.fd = -1

    def _pin(self) -> None:
        if not self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))
            self._pinned = False
