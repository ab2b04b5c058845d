"""How many collectives this process has begun and ended, and how long it spent in them; it touches none of them."""

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
    """Those of this process, by torch's flight recorder, which counts them as they begin and end.

    Of gloo's it does not know how long they took, so they are looked at: the part of the looks at which one had begun
    and not ended is the part of the time that this rank waited. Of NCCL's it knows, if TORCH_NCCL_ENABLE_TIMING is set.
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
        """Take note of what has begun and ended; a look stands for the time since the one before."""
        if self._dump is None:
            return
        try:
            record = json.loads(self._dump(includeCollectives=self._timed, onlyActive=False))
            status = record.get("pg_status", {}).values()
            counts = [(int(each[_BEGUN]), int(each[_ENDED])) for each in status]
        except (KeyError, ValueError, RuntimeError) as error:  # another torch's record: it is not a documented one
            log.debug("torch's flight recorder is not read any more: %r", error)
            self._dump = self.waits = None
            self.watched_s = 0.0
            return
        self.begun = sum(begun for begun, _ in counts)
        self.waits = any(begun > ended for begun, ended in counts)
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._timed:
            self._sum_up(record.get("entries", []))
        elif self._on_device:
            return  # hosts run ahead of their GPUs: what has begun here may not have begun there
        elif self.waits:
            self.waited_s += passed_s
        self.watched_s += passed_s

    def _sum_up(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["record_id"] > self._recorded and "duration_ms" in entry:
                self._recorded = entry["record_id"]
                self.waited_s += float(entry["duration_ms"]) / 1000
