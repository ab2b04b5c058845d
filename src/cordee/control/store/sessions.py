"""Sessions of browsers in the database, by the hash of their cookie: a restart and a standby log nobody out."""

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from cordee.control.acts import carried_out
from cordee.control.store.credential_tables import metadata
from cordee.control.store.credentials import changing
from cordee.control.store.sql import SqlStore

OWN_MAX = 100
"""Sessions of one person at a time; the oldest go."""

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("by", sa.String, nullable=False),
    sa.Column("groups", sa.Text, nullable=False),
    sa.Column("begun_us", sa.BigInteger, nullable=False),
    sa.Column("seen_us", sa.BigInteger, nullable=False),
)


class SessionRows:
    """The table of sessions. Every method raises StoreError if the database refuses."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def add(self, key: str, name: str, by: str, groups: Sequence[str], *, now_us: int, over_us: int) -> None:
        """Add a session that begins now, and remove those that began before `over_us`."""
        row = {"id": key, "name": name, "by": by, "groups": json.dumps(list(groups)), "begun_us": now_us}
        own = sa.select(sessions.c.id).where(sessions.c.name == name).order_by(sessions.c.begun_us.desc())
        with changing(self._store) as connection:
            connection.execute(sessions.delete().where(sessions.c.begun_us < over_us))
            older = connection.execute(own.offset(OWN_MAX - 1)).scalars().all()
            connection.execute(sessions.delete().where(sessions.c.id.in_(older)))
            connection.execute(sessions.insert().values(row | {"seen_us": now_us}))

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a session's row."""
        found = self._store.read(sa.select(sessions).where(sessions.c.id == key))
        return dict(found[0]) if found else None

    def see(self, key: str, now_us: int) -> None:
        """Note that a session is used: no act of the person, so without a record of the audit log."""
        with carried_out(None), changing(self._store) as connection:
            connection.execute(sessions.update().where(sessions.c.id == key).values(seen_us=now_us))

    def end(self, key: str) -> None:
        """End a session."""
        with changing(self._store) as connection:
            connection.execute(sessions.delete().where(sessions.c.id == key))

    def end_all(self, name: str) -> int:
        """End the sessions of a person; return their number."""
        with changing(self._store) as connection:
            return connection.execute(sessions.delete().where(sessions.c.name == name)).rowcount
