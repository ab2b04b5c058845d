"""Logs of ranks on their way to a server that does not see this machine's disk, as they grow, by a thread of its own.

The server appends a part only where its own copy ends, so a part arrives once, whatever was lost, and the copy tells a
new agent where to go on. A log is sent whole before the end of its ranks is reported, unless the server takes none.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cordee.agent.clock import monotonic_s
from cordee.agent.uplink import Uplink, UplinkError
from cordee.units import GiB, MiB, format_bytes

LOG_BYTES_MAX = GiB
PART_BYTES = MiB
BYTES_PER_S_MAX = 64 * MiB
POLL_S = 0.1
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
HOLD_S = 10.0  # how long the end of ranks waits for logs that make no progress
_DONE = "logs.sent"
_CLOSE_S = 1.0

_log = logging.getLogger("cordee.agent")


@dataclass(slots=True)
class _Shipment:
    """The logs of one rank group; `sent` is where the server's copies end."""

    job_id: str
    epoch: int
    node: str
    folder: Path
    sent: dict[str, int] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    complete: bool = False  # its processes have ended

    def ask(self) -> None:
        """Send the last byte of each log again, which a server answers with the size of its copy."""
        self.sent = {name: max(sent - 1, 0) for name, sent in self.sent.items()}


class LogShipper:
    """The logs of all rank groups of one agent.

    Args:
        uplink: the servers.
        wake: wakes the agent's loop, when logs have been sent that the end of ranks waited for.
    """

    def __init__(self, uplink: Uplink, wake: Callable[[], None]) -> None:
        self._uplink, self._wake = uplink, wake
        self._shipments: dict[tuple[str, int], _Shipment] = {}
        self._changed = threading.Condition()
        self._progress_s = monotonic_s()
        self._retry_s = RETRY_S_MIN
        self._closing = self._asks_again = False
        self._thread = threading.Thread(target=self._run, name="cordee-logs", daemon=True)

    def begin(self, attempts: Path, node: str) -> None:
        """Start, with the logs that an earlier agent of the node has not sent."""
        for logs in attempts.glob(f"*/*/{node}/logs"):
            folder, epoch, job_id = logs.parent, logs.parent.parent.name, logs.parent.parent.parent.name
            if epoch.isdecimal() and not (folder / _DONE).exists():
                self._shipments[job_id, int(epoch)] = _Shipment(job_id, int(epoch), node, folder, complete=True)
        self._thread.start()

    def follow(self, job_id: str, epoch: int, node: str, folder: Path) -> None:
        """Send the logs of a rank group as they grow."""
        with self._changed:
            self._shipments[job_id, epoch] = _Shipment(job_id, epoch, node, folder)
            self._changed.notify()

    def complete(self, job_id: str, epoch: int) -> None:
        """Send the rest of the logs of a rank group, whose processes have ended."""
        with self._changed:
            shipment = self._shipments.get((job_id, epoch))
            if shipment is not None:
                shipment.complete = True
                self._progress_s = monotonic_s()
            self._changed.notify()

    def connected(self) -> None:
        """Try again at once, since the agent has a server again, which may be another one with none of the logs."""
        with self._changed:
            self._asks_again = True
            self._progress_s, self._retry_s = monotonic_s(), 0.0
            self._changed.notify()

    @property
    def holds_until_s(self) -> float | None:
        """The monotonic time until which the end of ranks waits for their logs; None: nothing waits."""
        with self._changed:
            waits = any(each.complete for each in self._shipments.values())
            return self._progress_s + HOLD_S if waits else None

    def close(self) -> None:
        """Send no more; the next agent goes on."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    self._uplink.close()
                    return
                shipments = list(self._shipments.values())
                if not shipments:
                    self._changed.wait()
                    continue
                asks, self._asks_again = self._asks_again, False
            if asks:
                for each in shipments:
                    each.ask()
            try:
                moved = [self._send(each) for each in shipments]
                self._retry_s = RETRY_S_MIN
                pause_s = 0.0 if any(moved) else POLL_S
            except (UplinkError, OSError) as error:
                _log.warning("logs wait for the server: %s", error)
                self._retry_s = min(max(2 * self._retry_s, RETRY_S_MIN), RETRY_S_MAX)
                pause_s = self._retry_s
            with self._changed:
                if pause_s and not self._closing:
                    self._changed.wait(pause_s)

    def _send(self, shipment: _Shipment) -> bool:
        """Send a part of each log of a rank group; return whether there was something to send."""
        complete = shipment.complete  # before the logs are read, which end then
        moved = False
        for path in sorted((shipment.folder / "logs").glob("*.log")):
            if path.name not in shipment.given_up:
                moved = self._send_part(shipment, path) or moved
        if complete and not moved:
            with self._changed:
                key = shipment.job_id, shipment.epoch
                if self._shipments.get(key) is shipment:  # else `follow` has just begun with these logs anew
                    (shipment.folder / _DONE).touch()
                    del self._shipments[key]
            self._wake()
        return moved

    def _send_part(self, shipment: _Shipment, path: Path) -> bool:
        start = shipment.sent.get(path.name, 0)
        size = path.stat().st_size
        if start < min(size, LOG_BYTES_MAX):
            with path.open("rb") as file:
                file.seek(start)
                part = file.read(min(PART_BYTES, LOG_BYTES_MAX - start))
        elif start == LOG_BYTES_MAX and size > LOG_BYTES_MAX:
            limit = format_bytes(LOG_BYTES_MAX)
            part = f"\ncordee: this log has more than {limit}; the rest is on {shipment.node}: {path}\n".encode()
        else:
            return False
        try:
            sent = self._uplink.put_log(shipment.job_id, shipment.epoch, path.name, start, part)
        except UplinkError as error:
            if error.again:
                raise
            _log.error("%s is not sent: %s", path, error)
            shipment.given_up.add(path.name)
            return True
        shipment.sent[path.name] = sent
        if sent == start:
            raise UplinkError(f"{path} made no progress at byte {sent}", again=True)
        self._progress_s = monotonic_s()
        time.sleep(len(part) / BYTES_PER_S_MAX)
        return True
