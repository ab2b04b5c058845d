"""The parts of the log's database that are made from the log afterwards: segments, the snapshot and retired jobs.

A segment is one row with some thousand events as compressed lines of JSON, in place of their rows in `log`. Whoever
writes these rows needs no lead: they follow from committed events, which never change.
"""

import time
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from cordee.control.acts import acting
from cordee.control.precedence import Precedence
from cordee.control.snapshot import Snapshot
from cordee.control.store import tables
from cordee.control.store.segments import checked_lines, digest
from cordee.errors import StoreError, first_line
from cordee.ids import JobId

SEGMENT = 1_000
"""Events of one segment."""

_PAUSE_S = 0.02  # between two segments: SQLite gives the lock to whoever asks next
_RETIRED = 200  # jobs written in one transaction

Row = tuple[int, str]
"""A number of the log, and the event as JSON."""


class Archive:
    """Segments, the snapshot and retired jobs of one database."""

    def __init__(self, engine: sa.Engine, precedence: Precedence) -> None:
        self._engine, self._precedence = engine, precedence

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot."""
        columns = (tables.snapshots.c[name] for name in Snapshot._fields)
        rows = self._read(sa.select(*columns).order_by(tables.snapshots.c.number.desc()).limit(1))
        return Snapshot(*rows[0]) if rows else None

    def log_number(self) -> int:
        """Return the log's last number."""
        ends = sa.select(sa.func.max(tables.log.c.number)), sa.select(sa.func.max(tables.segments.c.last))
        return max(int(row[0] or 0) for query in ends for row in self._read(query))

    def keep(
        self, snapshot: Snapshot, retired: Mapping[JobId, str], curves: Mapping[JobId, bytes] = MappingProxyType({})
    ) -> None:
        """Keep a snapshot in place of all earlier ones, and the jobs that were retired from it, with their curves."""
        kept, newest = self.snapshot(), self.log_number()
        if kept is not None and snapshot.number < kept.number <= newest:
            return  # of a server that has taken over
        try:
            # The jobs come first: one that is in the state and here as well is taken from the state.
            for first in range(0, len(retired), _RETIRED):
                page = list(islice(retired, first, first + _RETIRED))
                rows = [{"job_id": each, "body": retired[each]} for each in page]
                with self._engine.begin() as connection:
                    known = tables.retired.c.job_id.in_(page)
                    connection.execute(tables.retired.delete().where(known))
                    connection.execute(tables.retired.insert(), rows)
                    drawn = [{"job_id": each, "body": curves[each]} for each in page if each in curves]
                    connection.execute(tables.curves.delete().where(tables.curves.c.job_id.in_(page)))
                    if drawn:
                        connection.execute(tables.curves.insert(), drawn)
            with self._engine.begin() as connection:
                connection.execute(tables.snapshots.delete())
                connection.execute(tables.snapshots.insert().values(snapshot._asdict()))
        except SQLAlchemyError as error:
            raise _refused("the snapshot was not written", error) from error

    def retired(self, job_id: str | None = None) -> dict[str, str]:
        """Return retired jobs as JSON: all, or one."""
        query = sa.select(tables.retired.c.job_id, tables.retired.c.body)
        if job_id is not None:
            query = query.where(tables.retired.c.job_id == job_id)
        return {str(row[0]): str(row[1]) for row in self._read(query)}

    def curves(self, job_id: str) -> bytes | None:
        """Return the curves of a retired job in their stored form; None: it has none."""
        rows = self._read(sa.select(tables.curves.c.body).where(tables.curves.c.job_id == job_id))
        return bytes(rows[0][0]) if rows else None

    # -- segments --------------------------------------------------------------------------------------------

    def move(self, through: int, segment: int = SEGMENT) -> int:
        """Move the oldest rows of the log, up to a number, into segments; return the number of segments made.

        Only whole segments are made. A command that waits for its delivery stays in the log, with all after it.
        """
        waiting = self._read(sa.select(sa.func.min(tables.commands.c.number)))[0][0]
        through = through if waiting is None else min(through, int(waiting) - 1)
        count = 0
        while rows := self._oldest(segment, through):
            first, last = rows[0][0], rows[-1][0]
            body = zlib.compress("\n".join(body for _, body in rows).encode(), 9)
            made = {"first": first, "last": last, "hash": digest(body), "body": body}
            try:
                with self._engine.begin() as connection:
                    connection.execute(tables.segments.insert().values(made))
                    within = tables.log.c.number.between(first, last)
                    gone = connection.execute(tables.log.delete().where(within)).rowcount
                    assert gone == len(rows), f"{gone} rows between {first} and {last}, expected {len(rows)}"
            except SQLAlchemyError as error:
                raise _refused(f"events {first} to {last} were not moved into a segment", error) from error
            count += 1
            time.sleep(_PAUSE_S)
        return count

    def _oldest(self, count: int, through: int) -> list[Row]:
        query = sa.select(tables.log.c.number, tables.log.c.body).where(tables.log.c.number <= through)
        rows = [(int(row[0]), str(row[1])) for row in self._read(query.order_by(tables.log.c.number).limit(count))]
        return rows if len(rows) == count else []

    def rows_after(self, number: int) -> list[Row]:
        """Return the events after a number that its segment holds; none if they are in no segment.

        Raises:
            StoreError: the segment is damaged.
        """
        columns = (tables.segments.c[name] for name in ("first", "last", "hash", "body"))
        query = sa.select(*columns).where(tables.segments.c.last > number).order_by(tables.segments.c.first).limit(1)
        for first, last, found, body in self._read(query):
            lines = checked_lines(first, last, found, body)
            return [each for each in enumerate(lines, start=first) if each[0] > number]
        return []

    def segments(self) -> Iterator[tuple[int, int, str, bytes]]:
        """Yield first and last number, hash and body of each segment, in order."""
        after = 0
        columns = (tables.segments.c[name] for name in ("first", "last", "hash", "body"))
        query = sa.select(*columns).order_by(tables.segments.c.first).limit(1)
        while rows := self._read(query.where(tables.segments.c.first > after)):
            first, last, found, body = rows[0]
            yield int(first), int(last), str(found), bytes(body)
            after = int(first)

    def _read(self, query: sa.Select[Any]) -> list[tuple[Any, ...]]:
        if acting() is not None:
            self._precedence.give_way()
        try:
            with self._engine.connect().execution_options(cordee_read=True) as connection:
                return [tuple(row) for row in connection.execute(query)]
        except SQLAlchemyError as error:
            raise _refused("the database cannot be read", error) from error


def _refused(what: str, error: SQLAlchemyError) -> StoreError:
    return StoreError(f"{what}: {first_line(getattr(error, 'orig', None) or error)}")
