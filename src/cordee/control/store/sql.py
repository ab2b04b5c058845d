"""The log in a database: events, tables, commands and marks move in one transaction or not at all.

SQLAlchemy Core, so that SQLite and PostgreSQL run the same statements. SQLite runs in WAL mode with synchronous=FULL:
a commit that has returned survives a power cut, as PostgreSQL's does by default.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, SQLAlchemyError

from cordee.control.acts import acting
from cordee.control.ports import Command, Pending
from cordee.control.precedence import Precedence
from cordee.control.store import tables
from cordee.control.store.archive import Archive
from cordee.control.store.audit import DONE, AuditLog, append
from cordee.control.store.database import is_old, make_engine, migrate, reason
from cordee.control.store.leader import Lead
from cordee.errors import StoreError
from cordee.event_json import decode
from cordee.events import Event

_PAGE = 1000  # events fetched at once: no transaction stays open while the reader works


class SqlStore:
    """The `Store` port on a database; usable from several threads.

    Attributes:
        archive: old events in segments, the snapshot, and retired jobs.
        audit: who asked for which change.
        precedence: of decisions, to which other threads give way.
    """

    def __init__(self, url: str, *, lead: Lead | None = None, precedence: Precedence | None = None) -> None:
        """Open the database and bring its schema to this version.

        Args:
            url: `sqlite:///PATH` or `postgresql://...`.
            lead: writes are refused once it is lost; None: this process alone writes to the database.
            precedence: of decisions, to which requests give way.

        Raises:
            StoreError: it cannot be opened, or a newer version of Cordee wrote it.
        """
        self._engine = make_engine(url, name=lead.holder if lead is not None else "")
        self._lead = lead
        self.precedence = precedence or Precedence()
        self.archive = Archive(self._engine, self.precedence)
        self.audit = AuditLog(self)
        try:
            if lead is not None and is_old(self._engine):
                lead.check_nobody_leads()
            migrate(self._engine)
        except StoreError:
            self.close()
            raise
        except SQLAlchemyError as error:
            self.close()
            url = self._engine.url.set(drivername=self._engine.dialect.name).render_as_string(hide_password=True)
            hint = f"see that it runs, or name another with --database; this one is {url}"
            raise StoreError(f"the database cannot be opened: {reason(error)}", hint=hint) from error

    def close(self) -> None:
        """Close the database."""
        self.audit.settle()
        self._engine.dispose()

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Commit all of it, or raise and change nothing.

        Raises:
            StoreError: the database refuses; whether it had committed when its connection broke, the log says later.
            ValueError: an event holds what the database cannot, such as a NUL in a text.
        """
        try:
            with self.writing() as connection:
                number = connection.execute(sa.select(sa.func.max(tables.log.c.number))).scalar() or 0
                tables.record(connection, number + 1, events)
                _move_marks(connection, seen)
                if (act := acting()) is not None:
                    act.event = number + len(events)
        except DataError as error:
            raise ValueError(f"the database cannot hold an event: {reason(error)}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"{len(events)} events were not written: {reason(error)}") from error

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the log after a number, in order.

        Raises:
            StoreError: the database cannot be read, or an event is damaged.
        """
        for number, body in self.bodies(after):
            yield number, _event(number, body)

    def bodies(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the same as JSON.

        Raises:
            StoreError: the database cannot be read.
        """
        columns = (tables.log.c.number, tables.log.c.body)
        while True:
            page = self.read(
                sa.select(*columns).where(tables.log.c.number > after).order_by(tables.log.c.number).limit(_PAGE)
            )
            if not page or page[0]["number"] != after + 1:
                # They lie in a segment, or were moved into one just now.
                yield from (rows := self.archive.rows_after(after))
                if rows:
                    after = rows[-1][0]
                    continue
            for row in page:
                yield row["number"], row["body"]
            if len(page) < _PAGE:
                return
            after = page[-1]["number"]

    def marks(self, sources: Sequence[str]) -> dict[str, int]:
        """Return the highest committed `seq` of each of these streams; 0 if none."""
        found, marks = dict.fromkeys(sources, 0), tables.marks
        for begin in range(0, len(sources), _PAGE):
            page = sources[begin : begin + _PAGE]
            rows = self.read(sa.select(marks.c.source, marks.c.seq).where(marks.c.source.in_(page)))
            found |= {row["source"]: row["seq"] for row in rows}
        return found

    def pending(self) -> list[Pending]:
        """Return the commands that are not confirmed, oldest first."""
        waiting = (
            sa.select(tables.commands.c.number, tables.log.c.body, tables.jobs.c.spec)
            .join(tables.log, tables.log.c.number == tables.commands.c.number)
            .join(tables.jobs, tables.jobs.c.job_id == tables.commands.c.job_id)
            .order_by(tables.commands.c.number)
        )
        return [_pending(row) for row in self.read(waiting)]

    def confirm(self, numbers: Sequence[int]) -> None:
        """Remove delivered commands from the outbox."""
        try:
            with self.writing() as connection:
                one = tables.commands.c.number == sa.bindparam("delivered")
                connection.execute(tables.commands.delete().where(one), [{"delivered": each} for each in numbers])
        except SQLAlchemyError as error:
            raise StoreError(f"{len(numbers)} commands were not marked as delivered: {reason(error)}") from error

    def jobs(
        self,
        job_id: str | None = None,
        *,
        name: str | None = None,
        live: bool = False,
        after: tuple[int, str] | None = None,
        limit: int | None = None,
    ) -> list[Mapping[str, Any]]:
        """Return the rows of jobs, newest first, with the steps of their newest attempts.

        Args:
            job_id: of the only one.
            name: of those that are wanted.
            live: leave out those that have ended.
            after: submission time and id of the job after which they begin.
            limit: the most rows.
        """
        attempts, jobs = tables.attempts, tables.jobs
        newest = (attempts.c.job_id == jobs.c.job_id) & (attempts.c.epoch == jobs.c.epoch)
        # The newest checkpoint may be of an earlier attempt; a new one has none.
        every = attempts.alias()
        saved = sa.select(sa.func.max(every.c.checkpoint_step)).where(every.c.job_id == jobs.c.job_id)
        query = sa.select(jobs, attempts.c.step, saved.scalar_subquery().label("checkpoint_step"))
        query = query.join(attempts, newest, isouter=True)
        if job_id is not None:
            query = query.where(jobs.c.job_id == job_id)
        if name is not None:
            query = query.where(jobs.c.name == name)
        if live:
            query = query.where(jobs.c.ended_us.is_(None))
        if after is not None:
            same = (jobs.c.submitted_us == after[0]) & (jobs.c.job_id > after[1])
            query = query.where((jobs.c.submitted_us < after[0]) | same)
        return self.read(query.order_by(jobs.c.submitted_us.desc(), jobs.c.job_id).limit(limit))

    def unfinished(self) -> list[Mapping[str, Any]]:
        """Return the ids and specs of all jobs that have not ended."""
        jobs = tables.jobs
        return self.read(sa.select(jobs.c.job_id, jobs.c.spec).where(jobs.c.ended_us.is_(None)))

    def attempts(self, job_id: str) -> list[Mapping[str, Any]]:
        """Return the rows of the job's attempts, oldest first."""
        attempts = tables.attempts
        return self.read(sa.select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.epoch))

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction; an error undoes it, and so does the loss of the lead.

        The record of the act that it is part of is written with it.
        """
        act = acting()
        if act is not None:
            self.precedence.give_way()
        with self._engine.begin() as connection:
            began_s = self._lead.fence(connection) if self._lead is not None else 0.0
            yield connection
            if act is not None and not act.quiet:
                append(connection, act, DONE)
        if self._lead is not None:
            self._lead.proven(began_s)
        if act is not None:
            act.recorded = True

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open one consistent read of several queries."""
        level = {"isolation_level": "REPEATABLE READ"} if self._engine.dialect.name == "postgresql" else {}
        with self._engine.connect().execution_options(cordee_read=True, **level) as connection:
            yield connection

    def count(self, table: sa.Table) -> int:
        """Return the number of rows of a table."""
        [row] = self.read(sa.select(sa.func.count().label("rows")).select_from(table))
        return int(row["rows"])

    def read(self, query: sa.Select[Any]) -> list[Mapping[str, Any]]:
        """Return the rows of a query.

        Raises:
            StoreError: the database cannot be read.
        """
        if acting() is not None:
            self.precedence.give_way()
        try:
            with self._engine.connect().execution_options(cordee_read=True) as connection:
                found = connection.execute(query)
                names = tuple(found.keys())  # `mappings` asks for them at each row
                return [dict(zip(names, row, strict=True)) for row in found]
        except SQLAlchemyError as error:
            raise StoreError(f"the database cannot be read: {reason(error)}") from error


def _pending(row: Mapping[str, Any]) -> Pending:
    command = _event(row["number"], row["body"])
    assert isinstance(command, Command), "only decisions enter the outbox"
    return Pending(number=row["number"], command=command, spec=row["spec"])


def _event(number: int, body: str) -> Event:
    try:
        return decode(json.loads(body))
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"event {number} of the log is damaged: {error}",
            hint="restore the newest backup: cordee admin restore; `cordee admin check` says what else is damaged",
        ) from error


def _move_marks(connection: sa.Connection, seen: Iterable[tuple[str, int]]) -> None:
    rows = [{"source": source, "seq": seq} for source, seq in seen]
    if not rows:
        return
    insert = (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(tables.marks)
    moved = insert.on_conflict_do_update(index_elements=["source"], set_={"seq": insert.excluded.seq})
    connection.execute(moved, rows)
