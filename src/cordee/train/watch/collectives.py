"""Count the collectives that this process has begun and ended, and the time in them, by torch's flight recorder."""

import json
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("cordee")

_BEGUN, _ENDED = "last_enqueued_collective", "last_completed_collective"


class CollectiveCounter:
    """The collectives of this process.

    The flight recorder has durations of NCCL's collectives if TORCH_NCCL_ENABLE_TIMING is set, but none of gloo's.
    Those are sampled: the fraction of looks that find one under way is the fraction of time that this rank waited.

    Attributes:
        begun: number of collectives begun.
        waits: a collective is under way; None: not known.
        waited_s: time in collectives, out of `watched_s`.
        sees: the time is sampled, so looks have to be frequent.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.waits: bool | None = None
        self.waited_s = self.watched_s = 0.0
        self._looked_s = time.monotonic()
        self._recorded = -1
        self._dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        self._on_device = "nccl" in str(dist.get_backend())
        self._timed = self._on_device and os.environ.get("TORCH_NCCL_ENABLE_TIMING", "0") not in ("", "0")
        self.sees = self._dump is not None and not self._on_device

    def look(self, now_s: float) -> None:
        """Count collectives; a look stands for the time since the previous one."""
        if self._dump is None:
            return
        try:
            record = json.loads(self._dump(includeCollectives=self._timed, onlyActive=False))
            status = record.get("pg_status", {}).values()
            counts = [(int(each[_BEGUN]), int(each[_ENDED])) for each in status]
        except (
            KeyError,
            ValueError,
            RuntimeError,
        ) as error:  # the record of another torch: its format is not documented
            log.debug("torch's flight recorder cannot be read: %r", error)
            self._dump = self.waits = None
            self.watched_s = 0.0
            return
        self.begun = sum(begun for begun, _ in counts)
        self.waits = any(begun > ended for begun, ended in counts)
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._timed:
            self._sum_up(record.get("entries", []))
        elif self._on_device:
            return  # hosts run ahead of their GPUs: a collective that has begun here may not have begun there
        elif self.waits:
            self.waited_s += passed_s
        self.watched_s += passed_s

    def _sum_up(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["record_id"] > self._recorded and "duration_ms" in entry:
                self._recorded = entry["record_id"]
                self.waited_s += float(entry["duration_ms"]) / 1000
