"""The streams of a node's agents: that of this agent, and those of earlier agents until the server has them."""

from pathlib import Path

from cordee.agent.journal import Journal
from cordee.agent.link import Link
from cordee.agent.spools import Spools
from cordee.agent.takeover import read_ends
from cordee.events import Event, RanksEnded
from cordee.telemetry.stream import StreamWriter


class NodeStream:
    """The reports of one node's agent, on disk before they are sent.

    Args:
        folder: the node's folder.
        epoch: the agent's epoch, after which its stream is named.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder, self._epoch = folder, epoch
        self._writer = StreamWriter(folder / f"{epoch}.jsonl", durable=True)
        self._ends: dict[
            str, list[tuple[int, RanksEnded]]
        ] = {}  # by stream: ends that the server has not committed yet
        self._older: dict[str, tuple[Path, int]] = {}  # streams of earlier agents: file and last seq

    def forward_all(self, link: Link) -> set[str]:
        """Forward the streams of earlier agents and then this one; return the tags of attempts that ended in them."""
        ended = set()
        for path in sorted(self._folder.glob("*.jsonl"), key=lambda each: int(each.stem)):
            source = self._source(path.stem)
            link.add_node_source(source, path)
            self._ends[source], last_seq = read_ends(path)
            ended |= {f"{event.job_id}.{event.epoch}" for _, event in self._ends[source]}
            if int(path.stem) != self._epoch:
                self._older[source] = (path, last_seq)
        return ended

    def append(self, event: Event) -> None:
        """Report an event."""
        seq = self._writer.append(event)
        if isinstance(event, RanksEnded):
            self._ends.setdefault(self._source(str(self._epoch)), []).append((seq, event))

    def settle(self, source: str, seq: int, journal: Journal, spools: Spools, link: Link) -> None:
        """Drop what the server has committed, now that it has a stream up to `seq`."""
        for each_seq, ended in list(self._ends.get(source, ())):
            if each_seq <= seq:
                self._ends[source].remove((each_seq, ended))
                journal.settle(ended)
                spools.drop(ended.job_id, ended.epoch)
        older = self._older.get(source)
        if older is not None and seq >= older[1]:
            del self._older[source]
            link.drop(source)
            older[0].unlink(missing_ok=True)

    def close(self) -> None:
        """Close this agent's stream."""
        self._writer.close()

    def _source(self, epoch: str) -> str:
        return f"node/{self._folder.name}/{epoch}"
