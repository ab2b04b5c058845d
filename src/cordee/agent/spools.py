"""The spools of this node's ranks: find them, check each record and forward it, and count refused records.

The job writes its spools, so they may contain anything. Only files of possible ranks (`rank<N>.jsonl`), of their
uploaders (`rank<N>-uploader.jsonl`) and of their knowledge bases (`rank<N>-rag.jsonl`) are read, and only records that
`cordee.reports` accepts are forwarded.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from cordee.agent.clock import Clock
from cordee.agent.launch import Assignment
from cordee.agent.link import Link
from cordee.event_json import encode
from cordee.events import RankEvent, ReportsRefused
from cordee.ids import JobId
from cordee.reports import ReportError, ReportScope, parse_stream, read_report
from cordee.telemetry.stream import StreamRecord, last_records
from cordee.units import plural

_log = logging.getLogger("cordee.agent")


class Spool:
    """One rank's spool.

    Args:
        scope: bounds of what the rank may report.
        clock: the server's, by which the rank's times are corrected.
        report: called with the count of refused records: at the first one, whenever it has doubled, and at the end.
    """

    def __init__(self, scope: ReportScope, report: Callable[[ReportsRefused], object], clock: Clock) -> None:
        self._scope, self._report, self._clock = scope, report, clock
        self._checked = 0  # highest seq; after a reconnection records are read again
        self._refused = self._reported = 0
        self._why = ""

    def convert(self, record: StreamRecord) -> dict[str, object] | None:
        """Return the event to forward, or None if the record is refused."""
        again, self._checked = record.seq <= self._checked, max(self._checked, record.seq)
        try:
            return encode(read_report(self._clock.corrected(record.event), self._scope, self._clock.now_us()))
        except ReportError as error:
            if not again:
                self._refused, self._why = self._refused + 1, str(error)
                if self._refused & (self._refused - 1) == 0:
                    self.flush()
            return None

    def flush(self) -> None:
        """Report the records refused since the last report."""
        count = self._refused - self._reported
        if not count:
            return
        self._reported = self._refused
        scope = self._scope
        assert scope.rank is not None, "a spool is of one rank"
        named = (scope.job_id, scope.epoch, scope.rank)
        _log.warning("%s.%d: rank %d: %s refused: %s", *named, plural(count, "record"), self._why)
        refused = ReportsRefused(
            at_us=self._clock.now_us(),
            job_id=JobId(scope.job_id),
            epoch=scope.epoch,
            rank=scope.rank,
            count=count,
            why=self._why,
        )
        self._report(refused)


class Spools:
    """The spools of all attempts that the server has not settled."""

    def __init__(self, link: Link, report: Callable[[ReportsRefused], object], clock: Clock) -> None:
        self._link, self._report, self._clock = link, report, clock
        self._spools: dict[str, Spool] = {}  # by stream

    def follow(self, order: Assignment, folder: Path) -> None:
        """Forward the spools of an attempt, including those that have appeared since the last call."""
        for path, scope in spool_files(order, folder):
            name = f"{order.tag}/{path.stem}"
            if name not in self._spools:
                spool = self._spools[name] = Spool(scope, self._report, self._clock)
                self._link.add_rank_source(name, path, spool.convert)

    def complete(self, order: Assignment, folder: Path) -> None:
        """Forward all spools of an attempt after its processes have ended, before the node's next report."""
        self.follow(order, folder)
        self._link.complete(f"{order.tag}/")

    def drop(self, job_id: str, epoch: int) -> None:
        """Close the spools of an attempt, since the server has its end."""
        prefix = f"{job_id}.{epoch}/"
        for name in [name for name in self._spools if name.startswith(prefix)]:
            self._spools.pop(name).flush()
            self._link.drop(name)


def spool_files(order: Assignment, folder: Path) -> list[tuple[Path, ReportScope]]:
    """Return the files that can be spools of the attempt's ranks, in the order of ranks."""
    found = []
    for path in (folder / "spool").glob("rank*.jsonl"):
        stream = parse_stream(f"{order.tag}/{path.stem}")
        scope = order.scope(stream[2]) if stream else None
        if scope is not None and scope.rank is not None and scope.rank < scope.ranks:
            found.append((scope.rank, path, scope))
    return [(path, scope) for _, path, scope in sorted(found, key=lambda each: each[0])]


def last_reports(order: Assignment, folder: Path, clock: Clock) -> list[RankEvent]:
    """Return the last reports of each rank of this node."""
    reports = []
    for path, scope in spool_files(order, folder):
        for record in last_records(path):
            try:
                reports.append(read_report(clock.corrected(record.event), scope, clock.now_us()))
            except ReportError:
                continue  # `Spool` counts it when it is forwarded
    return reports
