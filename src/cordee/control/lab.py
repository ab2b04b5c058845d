"""The policy lab: the newest part of the log, replayed under another policy by a process beside the server.

One replay at a time. It ends when its client leaves, or after two minutes; no decision of the server waits for it.
Jobs that had ended before that part are not copied for it, so that its cost follows the days and not the log's age.
"""

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from cordee.control.operations import Operations
from cordee.control.store import tables
from cordee.errors import BusyError, CordeeError, InputError
from cordee.events import GpusSampled, IdleGpusSampled, Measured, MetricsLogged
from cordee.units import US_PER_DAY, GiB, format_bytes

POLICIES = {
    "fifo": "strict order of arrival",
    "fit": "order of arrival, every job that fits",
    "easy": "order of arrival, a reservation, backfill around it; it knows the true run times",
    "sjf": "shortest first, every job that fits; it knows the true run times",
    "srsf": "shortest remaining service first, preempts; it knows the true run times",
    "2d-las": "least attained service first in two levels, preempts (Tiresias)",
    "fgd": "as now, but places by fragmentation gradient descent (FGD)",
    "no-notice": "as now, but kills victims without notice",
}
"""The policies that can be tried, by name; a test holds them to those of `cordee replay`."""

DAYS = (1, 7, 28)
LASTS_S = 120.0
"""The longest that a replay may take, with the copy of the log that it reads."""

COPY_BYTES_MAX = GiB
"""The largest copy."""

_LOOK_S = 0.25
_ELSEWHERE = "try fewer days, or `cordee replay` elsewhere"
_UNUSED = {each.__name__ for each in (MetricsLogged, GpusSampled, IdleGpusSampled, Measured)}


@dataclass(slots=True)
class Lab:
    """The lab of one server.

    Attributes:
        operations: what is replayed.
    """

    operations: Operations
    _busy: bool = field(default=False, init=False)

    async def replay(self, policy: str, days: int, is_wanted: Callable[[], Awaitable[bool]]) -> dict[str, Any] | None:
        """Return the answer of `cordee replay --json`; None if the client has left.

        Raises:
            InputError: the policy or the number of days is none of those that can be tried, or no job ran.
            BusyError: somebody else's replay runs, or this one takes too long.
        """
        if policy not in POLICIES or days not in DAYS:
            raise InputError(f"{policy[:20]!r} over {days} days cannot be tried", hint=f"try {', '.join(POLICIES)}")
        if self._busy:
            raise BusyError("another replay runs", hint="reload this page in a minute")
        self._busy = True
        try:
            until_s = time.monotonic() + LASTS_S
            with tempfile.TemporaryDirectory(prefix="cordee-lab-") as folder:
                log = Path(folder) / "log.jsonl"
                if not await self._copied(log, days, until_s, is_wanted):
                    return None
                return await _run([str(log), "--policy", policy, "--last", f"{days}d"], until_s, is_wanted)
        finally:
            self._busy = False

    async def _copied(self, path: Path, days: int, until_s: float, is_wanted: Callable[[], Awaitable[bool]]) -> bool:
        """Write what the replay reads; return False if the client has left."""
        stop = threading.Event()
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, path, days, stop))
        try:
            return await _is_done(copying, until_s, is_wanted)
        finally:
            stop.set()
            await asyncio.wait([copying])
            if not copying.cancelled() and (error := copying.exception()) is not None:
                raise error

    def _copy(self, path: Path, days: int, stop: threading.Event) -> None:
        """Write the log without the jobs that had ended before its newest days, until it is told to stop."""
        store, jobs = self.operations.store, tables.jobs
        from_us = self.operations.control.fold.last_us - days * US_PER_DAY
        gone = {row["job_id"] for row in store.read(sa.select(jobs.c.job_id).where(jobs.c.ended_us < from_us))}
        with path.open("w") as file:
            for number, body in store.bodies():
                if stop.is_set():
                    return
                event = json.loads(body)
                if event["kind"] in _UNUSED or event.get("job", event).get("job_id") in gone:
                    continue
                file.write(body + "\n")
                if number % 1000 == 0 and file.tell() > COPY_BYTES_MAX:
                    raise InputError(
                        f"the log of {days} days has more than {format_bytes(COPY_BYTES_MAX)}", hint=_ELSEWHERE
                    )


async def _is_done(work: asyncio.Future[Any], until_s: float, is_wanted: Callable[[], Awaitable[bool]]) -> bool:
    """Wait for some work; return False if the client has left.

    Raises:
        BusyError: it takes too long.
    """
    while not (await asyncio.wait([work], timeout=_LOOK_S))[0]:
        if not await is_wanted():
            return False
        if time.monotonic() > until_s:
            raise BusyError(f"the replay took more than {LASTS_S:.0f} s", hint=_ELSEWHERE)
    return True


async def _run(words: list[str], until_s: float, is_wanted: Callable[[], Awaitable[bool]]) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "cordee", "replay", *words, "--json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, preexec_fn=_be_nice)
    answer = asyncio.ensure_future(process.communicate())
    try:
        return _answer(process.returncode, *answer.result()) if await _is_done(answer, until_s, is_wanted) else None
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(asyncio.CancelledError):
                await answer


def _answer(code: int | None, out: bytes, err: bytes) -> dict[str, Any]:
    if code:
        with suppress(ValueError, KeyError):
            raise InputError(str(json.loads(err)["error"]))
        raise CordeeError(f"the replay failed: {err.decode(errors='replace')[-500:]}")
    found: dict[str, Any] = json.loads(out)
    return found


def _be_nice() -> None:
    os.nice(10)
