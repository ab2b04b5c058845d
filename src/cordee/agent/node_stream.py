"""The streams of a node's agents: that of this agent's epoch, and those of earlier epochs until the server has them."""

from pathlib import Path

from cordee.agent.link import Link
from cordee.agent.takeover import read_ends
from cordee.events import Event, RanksEnded
from cordee.telemetry.stream import StreamWriter


class NodeStream:
    """The reports of one node's agent, on disk before they are sent.

    Args:
        folder: the agent's folder.
        node: the node's name.
        link: forwards the streams.
    """

    def __init__(self, folder: Path, node: str, link: Link) -> None:
        self._folder, self._node, self._link = folder, node, link
        self._epoch = 0
        self._writer: StreamWriter | None = None
        self._waiting: list[Event] = []  # reports from before the first epoch
        # By stream: the ends that the server has not committed yet.
        self._ends: dict[str, list[tuple[int, RanksEnded]]] = {}
        self._older: dict[str, tuple[Path, int]] = {}  # streams of earlier epochs: file and last seq

    @property
    def epoch_min(self) -> int:
        """The lowest epoch without a stream on this disk."""
        return 1 + max((int(path.stem) for path in self._paths()), default=0)

    def forward_older(self) -> set[str]:
        """Forward the streams of earlier agents; return the tags of attempts that ended in them."""
        for path in self._paths():
            source = self._source(path.stem)
            self._link.add_node_source(source, path)
            self._ends[source], last_seq = read_ends(path)
            self._older[source] = (path, last_seq)
        return {f"{ended.job_id}.{ended.epoch}" for ends in self._ends.values() for _, ended in ends}

    def begin(self, epoch: int) -> None:
        """Write the reports into the stream of this epoch from now on."""
        if self._writer is not None:
            self._older[self._source(str(self._epoch))] = (self._path(self._epoch), self._writer.seq)
            self._writer.close()
        self._epoch, self._writer = epoch, StreamWriter(self._path(epoch), durable=True)
        self._link.add_node_source(self._source(str(epoch)), self._path(epoch))
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.append(event)

    def append(self, event: Event) -> None:
        """Report an event; before the first epoch it waits in memory."""
        if self._writer is None:
            self._waiting.append(event)
            return
        seq = self._writer.append(event)
        if isinstance(event, RanksEnded):
            self._ends.setdefault(self._source(str(self._epoch)), []).append((seq, event))

    def settle(self, source: str, seq: int) -> list[RanksEnded]:
        """Return the ends that the server has committed, now that it has a stream up to `seq`."""
        ends = self._ends.get(source, [])
        settled = [ended for each_seq, ended in ends if each_seq <= seq]
        self._ends[source] = [(each_seq, ended) for each_seq, ended in ends if each_seq > seq]
        older = self._older.get(source)
        if older is not None and seq >= older[1]:
            del self._older[source]
            self._link.drop(source)
            older[0].unlink(missing_ok=True)
        return settled

    def close(self) -> None:
        """Close this agent's stream."""
        if self._writer is not None:
            self._writer.close()

    def _paths(self) -> list[Path]:
        numbered = [path for path in self._folder.glob("*.jsonl") if path.stem.isdigit()]
        return sorted(numbered, key=lambda each: int(each.stem))

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{epoch}.jsonl"

    def _source(self, epoch: str) -> str:
        return f"node/{self._node}/{epoch}"
