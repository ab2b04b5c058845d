"""The reports of a replica, in the spool of its rank."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from cordee.events import Event, ReplicaReady, ReplicaUnready
from cordee.ids import JobId
from cordee.telemetry.stream import StreamWriter


class ReplicaReports:
    """A writer of reports about the engine that a rank runs. Nothing here waits: a spool is a file."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Open the spool of the rank that this environment names; outside an attempt nothing is written."""
        spool = environ.get("CORDEE_SPOOL")
        self._rank = int(environ.get("RANK") or 0)
        self._job_id = JobId(environ.get("CORDEE_JOB", ""))
        self._epoch = int(environ.get("CORDEE_EPOCH") or 0)
        self._writer = StreamWriter(Path(spool) / f"rank{self._rank}.jsonl") if spool else None

    def ready(
        self,
        *,
        address: str,
        engine: str,
        model: str,
        kv_tokens: int | None = None,
        slots: int | None = None,
        load_us: int | None = None,
    ) -> None:
        """Report that the engine has answered a request at `address`, http://HOST:PORT."""
        self._append(
            ReplicaReady(
                at_us=_now_us(),
                job_id=self._job_id,
                epoch=self._epoch,
                rank=self._rank,
                address=address,
                engine=engine,
                model=model,
                kv_tokens=kv_tokens,
                slots=slots,
                load_us=load_us,
            )
        )

    def unready(self, why: str, *, draining: bool = False) -> None:
        """Report that the engine gets no new requests: it does not answer, or the replica drains."""
        self._append(
            ReplicaUnready(
                at_us=_now_us(),
                job_id=self._job_id,
                epoch=self._epoch,
                rank=self._rank,
                why=why,
                draining=draining,
            )
        )

    def _append(self, event: Event) -> None:
        if self._writer is not None:
            self._writer.append(event)


def _now_us() -> int:
    return time.time_ns() // 1000
