"""The policy lab: the newest part of the log, replayed under another policy by a process beside the server.

One replay at a time. It ends when its client leaves, or after two minutes; no decision of the server waits for it.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cordee.control.operations import Operations
from cordee.errors import BusyError, CordeeError, InputError
from cordee.event_json import encode
from cordee.events import GpusSampled, IdleGpusSampled, Measured, MetricsLogged

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
"""The longest that a replay may take."""

_LOOK_S = 0.25
_UNUSED = (MetricsLogged, GpusSampled, IdleGpusSampled, Measured)


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
            with tempfile.TemporaryDirectory(prefix="cordee-lab-") as folder:
                log = Path(folder) / "log.jsonl"
                await asyncio.to_thread(self._write, log)
                return await _run([str(log), "--policy", policy, "--last", f"{days}d"], is_wanted)
        finally:
            self._busy = False

    def _write(self, path: Path) -> None:
        with path.open("w") as file:
            for _, event in self.operations.store.events():
                if not isinstance(event, _UNUSED):
                    file.write(json.dumps(encode(event)) + "\n")


async def _run(words: list[str], is_wanted: Callable[[], Awaitable[bool]]) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "cordee", "replay", *words, "--json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, preexec_fn=_be_nice)
    answer = asyncio.ensure_future(process.communicate())
    try:
        for _ in range(round(LASTS_S / _LOOK_S)):
            done, _ = await asyncio.wait([answer], timeout=_LOOK_S)
            if done:
                return _answer(process.returncode, *answer.result())
            if not await is_wanted():
                return None
        raise BusyError(
            f"the replay took more than {LASTS_S:.0f} s", hint="try fewer days, or `cordee replay` elsewhere"
        )
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
