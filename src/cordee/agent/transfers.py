"""Threads of an agent that carry what is large between its node and the server: submitted files, logs of ranks."""

from collections.abc import Callable
from pathlib import Path

from cordee.agent.clock import monotonic_s
from cordee.agent.copies import Copies
from cordee.agent.log_shipping import LogShipper
from cordee.agent.prefetches import Prefetches
from cordee.agent.settings import AgentSettings
from cordee.agent.tunnels import Tunnels
from cordee.agent.uplink import Uplink
from cordee.hardware.load import own_gpu_files
from cordee.storage.content import Contents

FILES, ARTIFACTS, DATASETS = "files", "artifacts", "datasets.json"


class Transfers:
    """The transfers of one agent; one that sees the server's home reads and writes there.

    Attributes:
        copies: the copies of submitted files.
        tunnels: to commands, ports and shells.
        prefetches: of datasets, before the ranks start.
        gpu_files: what the server's home knows of GPUs beyond the catalogue, if the agent sees it.
    """

    def __init__(self, folder: Path, settings: AgentSettings, wake: Callable[[], None]) -> None:
        self._attempts, self._node = settings.attempts(folder), settings.node
        self._shipper: LogShipper | None = None
        self.tunnels = Tunnels(folder, settings.node)
        self.prefetches = Prefetches(folder / DATASETS)
        self.gpu_files = () if settings.home is None else own_gpu_files(Path(settings.home))
        if settings.home is not None:
            self.copies = Copies(Contents(Path(settings.home) / FILES), None, wake)
        else:
            self.copies = Copies(Contents(folder / FILES), lambda: Uplink(folder), wake, folder / ARTIFACTS)
            self._shipper = LogShipper(Uplink(folder), wake)

    def begin(self) -> None:
        """Start, with the logs that an earlier agent has not sent."""
        if self._shipper is not None:
            self._shipper.begin(self._attempts, self._node)

    def started(self, job_id: str, epoch: int, folder: Path) -> None:
        """Send the logs of a rank group from now on."""
        if self._shipper is not None:
            self._shipper.follow(job_id, epoch, self._node, folder)

    def ended(self, job_id: str, epoch: int) -> None:
        """Send the rest of the logs of a rank group."""
        if self._shipper is not None:
            self._shipper.complete(job_id, epoch)

    def connected(self) -> None:
        """Try again at once what has failed."""
        if self._shipper is not None:
            self._shipper.connected()

    @property
    def hold_until_s(self) -> float | None:
        """The monotonic time until which the end of ranks waits for their logs; None: it does not wait."""
        until_s = None if self._shipper is None else self._shipper.holds_until_s
        return None if until_s is None or until_s <= monotonic_s() else until_s

    def close(self) -> None:
        """Stop; the next agent goes on with the logs."""
        self.copies.close()
        self.prefetches.sharing.close()
        self.tunnels.close()
        if self._shipper is not None:
            self._shipper.close()
