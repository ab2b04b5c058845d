"""The process that writes to a destination without a server: a second start on its machine is refused while it runs.

    writer    sealed {"format":1,"nonce":…,"since_us":n,"host","where","pid","started"}; deleted when the attempt closes

The log fences the older of two attempts, so a script that is started twice by mistake would end the run. A process on
another machine cannot be looked at: the newer attempt goes on, as it must where a machine is gone, and says so.
"""

import logging
import os
import time
from contextlib import suppress
from typing import Any

from cordee.errors import DestinationError, InUseError
from cordee.storage.files import Blobs
from cordee.storage.rescue import is_running, process
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal
from cordee.units import US_PER_S, format_duration

logger = logging.getLogger("cordee.train")

KEY = "writer"
TAKE_OVER = "CORDEE_TAKE_OVER"
ENDING_S = 3.0  # for a process that is just leaving
_LOOK_S = 0.05


def check_free(blobs: Blobs, within_s: float = ENDING_S) -> None:
    """Check that no other process of this machine writes here; wait for one that is leaving.

    Raises:
        InUseError: one does, and CORDEE_TAKE_OVER is not set.
    """
    if os.environ.get(TAKE_OVER, "0") not in ("", "0"):
        return
    until_s = time.monotonic() + within_s
    while (found := _read(blobs)) is not None and found["pid"] != os.getpid() and (running := is_running(found)):
        if time.monotonic() >= until_s:
            raise InUseError(
                f"{blobs} is in use by {_name(found)}",
                hint="end that run first (Ctrl-C saves), give this one a folder of its own, or take the folder over: "
                f"{TAKE_OVER}=1",
            )
        time.sleep(_LOOK_S)
    if found is not None and found["pid"] != os.getpid() and running is None:
        logger.warning("taking %s over from %s, which cannot be looked at from here", blobs, _name(found))


def announce(blobs: Blobs, nonce: str, since_us: int) -> None:
    """Write that this process writes here from now on."""
    blobs.put(KEY, seal({"format": FORMAT, "nonce": nonce, "since_us": since_us, **process()}))


def withdraw(blobs: Blobs, nonce: str) -> None:
    """Remove the announcement of this attempt; one that stays counts only while its process runs."""
    with suppress(DestinationError):
        found = _read(blobs)
        if found is not None and found["nonce"] == nonce:
            blobs.delete(KEY)


def _read(blobs: Blobs) -> dict[str, Any] | None:
    data = blobs.get(KEY)
    with suppress(Damaged):
        return None if data is None else unseal(data)
    return None


def _name(found: dict[str, Any]) -> str:
    ago = format_duration(max(1, round(time.time() - found["since_us"] / US_PER_S)))
    return f"process {found['pid']} on {found['host']}, which began {ago} ago"
