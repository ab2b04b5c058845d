"""Reports between the agents and the control plane: each once, in order, until it is committed."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from cordee.control.agents.claims import Member
from cordee.control.ports import Report


class Inbox:
    """Reports that have arrived and are not acknowledged. Not thread-safe: hold the executor's lock.

    Attributes:
        fresh: a report arrived since the last call of `reports`.
    """

    def __init__(self) -> None:
        self.fresh = False
        self._reports: dict[tuple[str, int], Report] = {}  # by stream and seq, in the order of their arrival
        self._open: dict[str, deque[int]] = {}  # by stream: the seqs of its reports
        self._received: dict[str, int] = {}  # by stream: the highest seq that has arrived
        self._acknowledged: dict[str, int] = {}
        self._skipped: dict[str, int] = {}  # by stream: the newest record that was not kept, after some that wait
        self._owners: dict[str, Member] = {}

    def reports(self) -> list[Report]:
        """Return all reports that were not acknowledged."""
        self.fresh = False
        return list(self._reports.values())

    def open(self, marks: Iterable[tuple[str, int]], owner: Member) -> None:
        """Expect streams from an agent, starting at their committed marks."""
        for source, mark in marks:
            self._owners[source] = owner
            self._received[source] = max(mark, self._received.get(source, 0))
            self._acknowledged[source] = max(mark, self._acknowledged.get(source, 0))

    def next_seq(self, source: str, marks: Callable[[Sequence[str]], Mapping[str, int]]) -> int:
        """Return the number of the next record of one of the server's own streams; `marks` reads its committed mark."""
        if source not in self._received:
            self._received[source] = marks([source])[source]
        return self._received[source] + 1

    def is_new(self, source: str, seq: int, owner: Member) -> bool:
        """Return whether a record arrives for the first time; remember the agent that sent it."""
        self._owners[source] = owner
        return seq > self._received.get(source, 0)

    def add(self, report: Report) -> None:
        """Keep a report until it is acknowledged."""
        self._received[report.source] = report.seq
        self._reports[report.source, report.seq] = report
        self._open.setdefault(report.source, deque()).append(report.seq)
        self.fresh = True

    def skip(self, source: str, seq: int) -> int:
        """Note that a record arrived, without keeping it; return up to where its stream is acknowledged.

        It counts as acknowledged with those before it: the agent forgets what it has an acknowledgement of.
        """
        self._received[source] = self._skipped[source] = seq
        self._acknowledge_skipped(source)
        return self.acknowledged(source)

    def acknowledged(self, source: str) -> int:
        """Return the highest acknowledged seq of a stream."""
        return self._acknowledged.get(source, 0)

    def acknowledge(self, source: str, seq: int) -> Member | None:
        """Drop the reports of a stream up to a seq; return the agent to acknowledge them to."""
        seqs = self._open.get(source)
        while seqs and seqs[0] <= seq:
            del self._reports[source, seqs.popleft()]
        if seqs is not None and not seqs:
            del self._open[source]
        self._acknowledged[source] = max(seq, self._acknowledged.get(source, 0))
        if source in self._skipped:
            self._acknowledge_skipped(source)
        return self._owners.get(source)

    def _acknowledge_skipped(self, source: str) -> None:
        if source not in self._open:
            self._acknowledged[source] = max(self._skipped.pop(source), self.acknowledged(source))
