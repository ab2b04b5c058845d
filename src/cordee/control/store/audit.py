"""The audit log: who did what, from where, and whether it was allowed; each record has the hash of the one before it.

A record is written in the transaction of the change that it is about. A row of its own holds the number and the hash of
the newest record, so that records cut off at the end are missed; who has a copy of that pair proves that the log was
not written anew as a whole.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import SQLAlchemyError

from cordee.control.acts import Act, carried_out, plain
from cordee.control.store.credential_tables import metadata
from cordee.control.store.database import reason
from cordee.errors import StoreError
from cordee.units import US_PER_S

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String, nullable=False),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("session", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("agent", sa.String, nullable=False),
    sa.Column("operation", sa.String, nullable=False),
    sa.Column("object", sa.String, nullable=False),
    sa.Column("queue", sa.String, nullable=False),
    sa.Column("outcome", sa.String, nullable=False),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("event", sa.BigInteger),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("before", sa.String, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
)
# One row, which the schema's step makes: a writer locks it, so that the records are one chain.
audit_head = sa.Table(
    "audit_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
)
DONE, REFUSED, FAILED = "done", "refused", "failed"
PAGE = 1_000
EQUAL_MAX, ALL_MAX = 10, 120
"""Records a minute outside of changes: of one person, operation and outcome, and of all. Others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """A record of the audit log.

    Attributes:
        number: 1 for the first; there is no gap.
        at_us: when the request came.
        who: the person, the program or the node; "" if it was not recognized.
        token: the id of its token, which is no secret.
        session: the id of its browser's session.
        address: of the client.
        agent: the program that the client said it was.
        operation: method and route, such as `POST /v1/jobs/{ref}/stop`.
        object: a job's id, a node's name, or what else the request named.
        queue: of the object; "" for what belongs to the whole cluster.
        outcome: `done`, `refused` or `failed`.
        count: how many acts it stands for; above 1 where there were too many of them in a minute.
        event: the number of the log's last event after it; None if it wrote none.
        detail: more in words.
        before: the hash of the record before it; "" for the first.
        hash: SHA-256 of all of the above.
    """

    number: int
    at_us: int
    who: str
    token: str
    session: str
    address: str
    agent: str
    operation: str
    object: str
    queue: str
    outcome: str
    count: int = 1
    event: int | None = None
    detail: str = ""
    before: str = ""
    hash: str = ""

    def digest(self) -> str:
        """Return the hash that it must have."""
        content = [getattr(self, name) for name in _HASHED]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


_HASHED = tuple(each.name for each in fields(AuditRecord) if each.name != "hash")


class AuditHead(NamedTuple):
    """The number and the hash of a record, by default of none: those of an empty log."""

    number: int = 0
    hash: str = ""

    def __str__(self) -> str:
        """Return it as a line of text, such as `12:ab34...`."""
        return f"{self.number}:{self.hash}"


def append(connection: sa.Connection, act: Act, outcome: str, count: int = 1) -> None:
    """Append the record of an act, within a transaction."""
    head = connection.execute(sa.select(audit_head.c.number, audit_head.c.hash).with_for_update()).one()
    record = AuditRecord(
        number=head.number + 1,
        at_us=act.at_us,
        **{name: plain(getattr(act, name)) for name in ("who", "token", "session", "address", "agent", "queue")},
        operation=act.operation,
        object=act.about,
        outcome=outcome,
        count=count,
        event=act.event,
        detail=plain(act.detail),
        before=head.hash,
    )
    hashed = record.digest()
    connection.execute(audit.insert().values(asdict(record) | {"hash": hashed}))
    connection.execute(audit_head.update().values(number=record.number, hash=hashed))


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """The records that are asked for.

    Attributes:
        who: of this one only.
        object: about this only.
        queue: of this queue only.
        queues: of these queues only, and those of `own`; None: of all.
        own: whose records are seen in any queue.
        operations: of these only; None: of all.
        from_us, until_us: that began in this stretch of time only.
    """

    who: str | None = None
    object: str | None = None
    queue: str | None = None
    queues: Collection[str] | None = None
    own: str = ""
    operations: Collection[str] | None = None
    from_us: int = 0
    until_us: int | None = None

    def condition(self) -> sa.ColumnElement[bool]:
        """Return it as a condition of SQL."""
        found = audit.c.at_us >= self.from_us
        if self.until_us is not None:
            found &= audit.c.at_us < self.until_us
        if self.who is not None:
            found &= audit.c.who == self.who
        if self.object is not None:
            found &= audit.c.object == self.object
        if self.queue is not None:
            found &= audit.c.queue == self.queue
        if self.operations is not None:
            found &= audit.c.operation.in_(sorted(self.operations))
        if self.queues is not None:
            found &= audit.c.queue.in_(sorted(self.queues)) | (audit.c.who == self.own)
        return found


class Transactions(Protocol):
    """The transactions and queries of the store that holds an audit log."""

    def writing(self) -> AbstractContextManager[sa.Connection]:
        """Return a transaction that writes."""
        ...

    def read(self, query: sa.Select[Any]) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a query."""
        ...


class AuditLog:
    """The audit log of a store.

    What writes nothing else is recorded here, in a transaction of its own; of equal acts only some a minute, and the
    others as one record, so that a flood of refusals does not fill the disk.
    """

    def __init__(self, store: Transactions) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._minute = 0
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._more: dict[tuple[str, str, str], tuple[Act, int]] = {}

    def record(self, act: Act, outcome: str) -> None:
        """Record an act, or count it; a database that refuses keeps nobody from getting an answer."""
        minute, key = act.at_us // (60 * US_PER_S), (act.who, act.operation, outcome)
        with self._lock:
            if minute != self._minute:
                self._write_counted()
                self._minute = minute
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= EQUAL_MAX and self._seen.total() <= ALL_MAX:
                self._write([(act, outcome, 1)])
                return
            if key not in self._more and len(self._more) >= ALL_MAX:
                key, act = ("", "", outcome), Act(act.at_us, named="several operations", detail="of several users")
            first, count = self._more.get(key, (act, 0))
            self._more[key] = (first, count + 1)

    def settle(self) -> None:
        """Record what was only counted so far."""
        with self._lock:
            self._write_counted()

    def add(self, acts: Sequence[tuple[Act, str, int]]) -> None:
        """Record acts with their outcomes and counts in one transaction.

        Raises:
            StoreError: the database refuses.
        """
        if not acts:
            return
        try:
            with carried_out(None), self._store.writing() as connection:
                for act, outcome, count in acts:
                    append(connection, act, outcome, count)
        except SQLAlchemyError as error:
            raise StoreError(f"the audit log takes no record: {reason(error)}") from error

    def _write_counted(self) -> None:
        counted = [(act, key[2], count) for key, (act, count) in self._more.items()]
        self._more.clear()
        self._write(counted)

    def _write(self, acts: Sequence[tuple[Act, str, int]]) -> None:
        try:
            self.add(acts)
        except StoreError as error:
            for act, outcome, count in acts:
                facts = {"who": act.who, "operation": act.operation, "outcome": outcome, "count": count}
                structlog.get_logger().error("an act is not in the audit log", error=error.message, **facts)

    def head(self) -> AuditHead:
        """Return number and hash of the newest record, as the row of its own has them.

        Raises:
            StoreError: the database cannot be read.
        """
        self.settle()
        [row] = self._store.read(sa.select(audit_head.c.number, audit_head.c.hash)) or [AuditHead()._asdict()]
        return AuditHead(**row)

    def page(self, wanted: AuditFilter, *, after: int = 0, limit: int = PAGE) -> list[AuditRecord]:
        """Return records after a number, oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        found = sa.select(audit).where(wanted.condition() & (audit.c.number > after))
        return [AuditRecord(**row) for row in self._store.read(found.order_by(audit.c.number).limit(limit))]

    def newest(self, wanted: AuditFilter, limit: int) -> list[AuditRecord]:
        """Return the newest records, newest first.

        Raises:
            StoreError: the database cannot be read.
        """
        self.settle()
        found = sa.select(audit).where(wanted.condition()).order_by(audit.c.number.desc()).limit(limit)
        return [AuditRecord(**row) for row in self._store.read(found)]

    def records(self, wanted: AuditFilter | None = None) -> Iterator[AuditRecord]:
        """Yield records, oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        self.settle()
        after = 0
        while found := self.page(wanted or AuditFilter(), after=after):
            yield from found
            after = found[-1].number


def record_of(body: Mapping[str, Any]) -> AuditRecord:
    """Return a record of an export.

    Raises:
        TypeError: it has not the fields of one.
    """
    return AuditRecord(**body)


def fault(
    records: Iterable[AuditRecord],
    known: Collection[AuditHead] = (),
    head_after: Callable[[], AuditHead] | None = None,
) -> str | None:
    """Return the first fault of an audit log in a sentence; None if there is none.

    Args:
        records: all of it, oldest first.
        known: heads that the log must contain: the one that it had before the records were read, and copies of earlier
            ones.
        head_after: reads the head that it has after that; None: an export has none.
    """
    wanted = {each.number: each.hash for each in known if each.number}
    last = AuditHead()
    for record in records:
        if record.number > last.number + 1:
            return f"record {last.number + 1} is missing: the next one is {record.number}"
        if record.number <= last.number:
            return f"record {record.number} comes after record {last.number}"
        if record.digest() != record.hash:
            return f"record {record.number} was changed: its hash is of other content"
        if record.before != last.hash:
            return f"record {record.number} does not follow the record before it: one of both was replaced"
        if wanted.get(record.number, record.hash) != record.hash:
            return f"record {record.number} is not the one that was known: the log was written anew up to it"
        last = AuditHead(record.number, record.hash)
    end = max(wanted, default=0)
    if end > last.number:
        return f"record {last.number + 1} is missing: the log reached to record {end}"
    if head_after is not None and (head := head_after()).number < last.number:
        return f"record {head.number + 1} was added: the server wrote {head.number}"
    return None
