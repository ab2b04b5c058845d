"""The lead over a PostgreSQL database that several servers share: one writes, the others stand by.

A session's advisory lock makes the change quick: PostgreSQL frees it as soon as the leader's process is gone. A frozen
leader keeps it, so a row with a lease makes the change certain, and every commit names the row's epoch: a leader that
was replaced while it was frozen writes nothing.
"""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from cordee.agent.clock import monotonic_s
from cordee.control.store import tables
from cordee.control.store.database import make_engine, reason
from cordee.errors import ReplacedError, StoreError

LEASE_S = 4.5  # so that a frozen leader is replaced within 5 s, the standby's next look included
_LOOK_MS = 250  # how often a standby looks at the lease while it waits for the lock
_KNOWN_S = 15  # a server that has not registered for this long is no longer listed
# A renewal that a crash of PostgreSQL takes back was of a lease that is over by then: it waits for no disk.
_NOT_DURABLE = sa.text("set local synchronous_commit = off")
_NOW_US = sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)
# The schema's name, so that servers of two schemas in one database do not wait for each other.
_LOCK = sa.func.hashtextextended(sa.literal("cordee ") + sa.func.current_schema(), 0)


@dataclass(frozen=True, slots=True)
class Leader:
    """The row of the server that leads.

    Attributes:
        epoch, holder, url: of its lead, of its sessions, of itself.
        left_us: what remains of its lease, by the database's clock.
        known_by: the keys by which agents and clients know it: names and hashes.
    """

    epoch: int
    holder: str
    url: str
    left_us: int
    known_by: Mapping[str, str] = field(default_factory=dict)


class Lead:
    """One server's claim to the lead, from waiting for it to its loss.

    Attributes:
        holder: the name of this server's sessions in PostgreSQL, unique to this claim.
        url: this server's address.
        known_by: the keys by which agents and clients know this server: names and hashes.
        epoch: the epoch in which this server leads; 0: it has never led.
        servers: the addresses of all servers of the database, the leader's first; `register` refreshes them.
    """

    def __init__(
        self, database: str, *, url: str, known_by: Mapping[str, str] | None = None, lease_s: float = LEASE_S
    ) -> None:
        self.holder = f"cordee-{secrets.token_hex(8)}"
        self.url, self.known_by, self.epoch, self.servers = url, dict(known_by or {}), 0, [url]
        self.lease_s = lease_s
        self._engine = make_engine(database, name=self.holder)
        self._session: sa.Connection | None = None
        self._was_held = False  # whether this session has seen the lock in another server's hands
        self._proven_s = -lease_s  # when the last commit began that found this server's epoch in the row

    @property
    def holds(self) -> bool:
        """Return whether this server's lease has not run out, as far as this process knows without asking."""
        return self.epoch > 0 and monotonic_s() - self._proven_s < self.lease_s

    def locate(self, url: str) -> None:
        """Set this server's address, before it is listed."""
        self.url, self.servers = url, [url]

    def close(self) -> None:
        """Give the lead up, if this server has it: another server takes over at once."""
        try:
            if self.epoch:
                mine = (tables.leader.c.id == 1) & (tables.leader.c.epoch == self.epoch)
                with self._engine.begin() as connection:
                    connection.execute(tables.leader.update().where(mine).values(expires_us=_NOW_US))
            with self._engine.begin() as connection:
                connection.execute(tables.servers.delete().where(tables.servers.c.url == self.url))
        except SQLAlchemyError:
            pass  # the database is away, or was never opened: the lease runs out by itself
        self._drop_session()
        self._engine.dispose()

    def leader(self) -> Leader | None:
        """Return the row of the leader; None if no server has ever led."""
        row = tables.leader
        left_us = (row.c.expires_us - _NOW_US).label("left_us")
        query = sa.select(row.c.epoch, row.c.holder, row.c.url, left_us, row.c.known_by)
        try:
            with self._engine.connect() as connection:
                found = connection.execute(query).first()
        except SQLAlchemyError as error:
            raise StoreError(f"the leader cannot be read: {reason(error)}") from error
        if found is None:
            return None
        return Leader(found.epoch, found.holder, found.url, found.left_us, json.loads(found.known_by))

    def check_nobody_leads(self) -> None:
        """Raise StoreError if a server leads: the schema is its version's, and must stay so while it writes."""
        row = tables.leader
        with self._engine.connect() as connection:  # only columns that the first schema with servers has
            url = connection.execute(sa.select(row.c.url).where(row.c.expires_us > _NOW_US)).scalar()
        if url is not None:
            raise StoreError(
                f"the database has the schema of an earlier version, and {url} leads on it",
                hint="end that server first (SIGTERM; ranks go on); this one then brings the schema up to date",
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the lead; return whether this server has it now.

        Raises:
            StoreError: the database cannot be reached.
        """
        deadline = monotonic_s() + timeout_s
        try:
            while not self._try_once():
                if monotonic_s() >= deadline:
                    return False
        except SQLAlchemyError as error:
            self._drop_session()
            raise StoreError(f"the lead cannot be asked for: {reason(error)}") from error
        return True

    def _try_once(self) -> bool:
        session = self._open_session()
        if not self._was_held and not session.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK))).scalar():
            self._was_held = True
        if self._was_held and not self._wait_for_lock(session):
            leader = self.leader()
            if leader is not None and leader.left_us <= 0:
                self._end_sessions(session, leader.holder)  # it is frozen or cut off, and keeps the lock
            return False
        if not self._was_held:
            # The lock was free when this session began. A restart of PostgreSQL frees it too, and a leader that
            # lives through one takes it again: only its lease says whether it does.
            leader = self.leader()
            if leader is not None and leader.left_us > 0:
                session.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK)))
                time.sleep(_LOOK_MS / 1000)
                return False
        self._take(session)
        return True

    def _wait_for_lock(self, session: sa.Connection) -> bool:
        try:
            session.execute(sa.select(sa.func.pg_advisory_lock(_LOCK)))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == "55P03":  # lock_not_available: the session's lock_timeout
                return False
            raise
        return True

    def _end_sessions(self, session: sa.Connection, holder: str) -> None:
        pids = sa.text("select pg_terminate_backend(pid) from pg_stat_activity where application_name = :holder")
        session.execute(pids, {"holder": holder})

    def _take(self, session: sa.Connection) -> None:
        """Begin the next epoch. The lock is held."""
        leader, began_s = self.leader(), monotonic_s()
        if leader is not None and leader.holder != self.holder:
            self._end_sessions(session, leader.holder)  # it may be frozen within a commit, which holds the row
        values: dict[str, object] = {"holder": self.holder, "url": self.url, "known_by": json.dumps(self.known_by)}
        values["expires_us"] = _NOW_US + self._lease_us
        epoch = 1 if leader is None else leader.epoch + 1
        with self._engine.begin() as connection:
            if leader is None:
                connection.execute(tables.leader.insert().values(id=1, epoch=epoch, **values))
            else:
                as_read = tables.leader.c.epoch == leader.epoch
                if not connection.execute(tables.leader.update().where(as_read).values(epoch=epoch, **values)).rowcount:
                    raise StoreError("another server has taken the lead in the same moment")
        self.epoch, self._proven_s = epoch, began_s

    @property
    def _lease_us(self) -> int:
        return round(self.lease_s * 1e6)

    def fence(self, connection: sa.Connection) -> float:
        """Renew the lease within a transaction, which goes no further if this server has been replaced.

        Returns when it began, for `proven` once the transaction is committed: until then a standby whose patience is
        over ends its session, and leads.

        Raises:
            ReplacedError: another server leads; the transaction must not be committed.
        """
        began_s = monotonic_s()
        mine = (tables.leader.c.id == 1) & (tables.leader.c.epoch == self.epoch)
        renewed = tables.leader.update().where(mine).values(expires_us=_NOW_US + self._lease_us)
        if connection.execute(renewed).rowcount == 1:
            return began_s
        found = connection.execute(sa.select(tables.leader.c.epoch, tables.leader.c.url)).first()
        whom = "nobody: the row is gone" if found is None else f"{found.url} in epoch {found.epoch}"
        raise ReplacedError(
            f"this server led in epoch {self.epoch} and was replaced by {whom}",
            hint="it was frozen or cut off from the database for longer than its lease of "
            f"{self.lease_s:g} s; what it had not committed is decided again",
        )

    def proven(self, began_s: float) -> None:
        """Count the lease from then: a transaction that `fence` began is committed."""
        self._proven_s = began_s

    def renew(self) -> None:
        """Renew the lease, and take the lock again if PostgreSQL has cut its session.

        Raises:
            ReplacedError: another server leads.
            StoreError: the database cannot be reached.
        """
        try:
            with self._engine.begin() as connection:
                connection.execute(_NOT_DURABLE)
                began_s = self.fence(connection)
            self.proven(began_s)
            session = self._open_session()
            if not self._has_lock(session):
                session.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK)))
        except SQLAlchemyError as error:
            self._drop_session()
            raise StoreError(f"the lease cannot be renewed: {reason(error)}") from error

    def _has_lock(self, session: sa.Connection) -> bool:
        mine = sa.text(
            "select count(*) from pg_locks where locktype = 'advisory' and granted and pid = pg_backend_pid()"
        )
        return bool(session.execute(mine).scalar())

    def register(self) -> None:
        """List this server's address, and refresh `servers`."""
        row = tables.servers
        try:
            with self._engine.begin() as connection:
                connection.execute(_NOT_DURABLE)
                if not connection.execute(row.update().where(row.c.url == self.url).values(seen_us=_NOW_US)).rowcount:
                    connection.execute(row.insert().values(url=self.url, seen_us=_NOW_US))
                recent = sa.select(row.c.url).where(row.c.seen_us > _NOW_US - _KNOWN_S * 1_000_000)
                found = list(connection.execute(recent.order_by(row.c.url)).scalars())
            leader = self.leader()
        except SQLAlchemyError as error:
            raise StoreError(f"this server cannot be listed: {reason(error)}") from error
        first = leader.url if leader is not None else self.url
        self.servers = [first, *(url for url in found if url != first)]

    def _open_session(self) -> sa.Connection:
        if self._session is None:
            session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            session.execute(sa.text(f"set lock_timeout = {_LOOK_MS}"))
            self._session, self._was_held = session, False
        return self._session

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.invalidate()
            self._session.close()
            self._session = None
