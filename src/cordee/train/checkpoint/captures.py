"""Captures: copies of the state in this rank's staging buffers, and the buffers' layout for the uploader."""

import contextlib
import threading
import time
from collections.abc import Collection
from typing import Any

import torch

from cordee.errors import CheckpointError
from cordee.storage.chunks import lay_out
from cordee.train.checkpoint.capture_marks import BUFFERS
from cordee.train.checkpoint.dcp import CaptureWriter, RankPlan, planner_for
from cordee.train.checkpoint.staging import StagingBuffers, local_bytes
from cordee.train.checkpoint.state import gather
from cordee.units import MiB

_ROOM_BYTES = 2 * MiB  # for extras and gaps between tensors


class Captures:
    """The captures of one rank; `buffers` are shared with its uploader."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.buffers = StagingBuffers()
        self._writers = [CaptureWriter(buffer) for buffer in self.buffers.buffers]
        self._laid_out: list[RankPlan | None] = [None] * BUFFERS
        self._starting = threading.Lock()
        self._ended = False

    def prepare(self, state: dict[str, object], *, in_memory: bool) -> None:
        """Allocate the buffers while training runs; `in_memory`: also the one for captures that stay in memory."""
        with contextlib.suppress(CheckpointError):  # The first save reports errors of the state.
            tensors, _ = gather(state)
            device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
            size_bytes = local_bytes(tensors.values(), self.world_size) + _ROOM_BYTES
            self.buffers.warm(size_bytes, both=in_memory, device=device)

    def usable(self, *, in_memory: bool | None) -> range:
        """Return the buffers that a capture may use; `in_memory` None: it may or may not stay in memory."""
        return range(BUFFERS) if in_memory is None else self.buffers.slots(in_memory=in_memory)

    def pick(self, reading: Collection[int], *, in_memory: bool) -> int:
        """Return the buffer for the next capture; the caller has waited until one is free."""
        slot = self.buffers.pick(reading, in_memory=in_memory)
        assert slot is not None, "one was free, and only this thread takes any"
        return slot

    def fill(self, slot: int, plan: RankPlan, tensors: dict[str, torch.Tensor], extras: bytes) -> None:
        """Copy the state into a buffer.

        Raises:
            CheckpointError: the process is ending.
            OSError, RuntimeError: staging memory is exhausted, or a device failed.
        """
        try:
            self._fill(slot, plan, tensors, extras)
        except BaseException:
            self._laid_out[slot] = None
            raise

    def _fill(self, slot: int, plan: RankPlan, tensors: dict[str, torch.Tensor], extras: bytes) -> None:
        writer = self._writers[slot]
        with self._starting:
            if self._ended:
                raise CheckpointError("this process is ending", hint="the uploader brings what it holds")
            self.buffers.filling(slot)
        if self._laid_out[slot] is not plan:
            writer.prepare(plan.items)
            self._laid_out[slot] = plan
        writer.make_room(plan.items, len(extras))
        writer.write(plan.items, planner_for(tensors, self.rank))
        at = writer.layout.total_bytes
        writer.staging.bytes[at : at + len(extras)] = torch.frombuffer(bytearray(extras), dtype=torch.uint8)

    def shards(self, slot: int, plan: RankPlan) -> list[list[object]]:
        """Return the rows of the part record for each shard in a buffer."""
        return plan.shards(self._writers[slot].layout)

    def command(self, slot: int, step: int, extras_bytes: int, started_s: float) -> dict[str, Any]:
        """Return the uploader's command for the capture in this buffer."""
        layout = self._writers[slot].layout
        behind = lay_out([extras_bytes])
        return {
            "slot": slot,
            "step": step,
            "cuts": [*layout.cuts, *((layout.total_bytes + at, length) for at, length in behind.cuts)],
            "extras": [[len(layout.cuts) + p.chunk, p.offset, p.length_bytes] for p in behind.pieces[0]],
            "total_bytes": layout.total_bytes + behind.total_bytes,
            "stall_us": round((time.monotonic() - started_s) * 1_000_000),
            "captured_us": time.time_ns() // 1000,
        }

    def end(self) -> None:
        """Allow no more captures, since the uploader reads the buffers."""
        with self._starting:
            self._ended = True  # A capture that began before has cleared its mark, so the uploader leaves it alone.

    def close(self) -> None:
        """Free the buffers; the uploader's own mappings live on."""
        self.buffers.close()
