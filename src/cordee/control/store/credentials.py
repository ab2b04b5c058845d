"""The tokens of nodes and the secrets of jobs in the database: short transactions beside those of the log."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from cordee.control.store.credential_tables import agents, join_tokens, secrets
from cordee.control.store.database import reason
from cordee.control.store.sql import SqlStore
from cordee.errors import StoreError

_KEPT_US = 30 * 86_400_000_000  # so that an expired token is refused as expired, not as unknown


class Credentials:
    """The tables of tokens and secrets. Every method raises StoreError if the database refuses."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    # -- tokens ----------------------------------------------------------------------------------------------------

    def add_join_token(self, token_hash: str, *, uses: int, now_us: int, expires_us: int, by: str) -> None:
        """Add a token, and remove those that expired long ago."""
        with changing(self._store) as connection:
            connection.execute(join_tokens.delete().where(join_tokens.c.expires_us < now_us - _KEPT_US))
            row = {"hash": token_hash, "expires_us": expires_us, "uses": uses, "used": 0, "by": by}
            connection.execute(join_tokens.insert().values(row))

    def join_token(self, token_hash: str) -> Mapping[str, Any] | None:
        """Return the row of a join token."""
        return self._one(sa.select(join_tokens).where(join_tokens.c.hash == token_hash))

    def agent(self, node: str) -> Mapping[str, Any] | None:
        """Return the row of a node that has joined."""
        return self._one(sa.select(agents).where(agents.c.node == node))

    def agent_with(self, token_hash: str) -> Mapping[str, Any] | None:
        """Return the row of the node that joined, and may have left, whose token has this hash."""
        return self._one(sa.select(agents).where(agents.c.token_hash == token_hash))

    def add_agent(self, row: Mapping[str, Any], *, join_hash: str) -> bool:
        """Let a node in, and count the use of its join token; return False if that was used up, and change nothing."""
        with changing(self._store) as connection:
            free = (join_tokens.c.hash == join_hash) & (join_tokens.c.used < join_tokens.c.uses)
            if not connection.execute(join_tokens.update().where(free).values(used=join_tokens.c.used + 1)).rowcount:
                return False
            connection.execute(agents.delete().where(agents.c.node == row["node"]))
            connection.execute(agents.insert().values(**row))
        return True

    def close_agent(self, node: str, now_us: int) -> None:
        """Make the token of a node void."""
        with changing(self._store) as connection:
            present = (agents.c.node == node) & agents.c.left_us.is_(None)
            connection.execute(agents.update().where(present).values(left_us=now_us))

    def nodes_that_left(self) -> set[str]:
        """Return the nodes that have left and not joined again."""
        return {row["node"] for row in self._store.read(sa.select(agents.c.node).where(agents.c.left_us.is_not(None)))}

    # -- secrets of jobs; the store removes them when a job ends ------------------------------------------------------

    def keep_secrets(self, job_id: str, sealed: Mapping[str, str]) -> None:
        """Keep the encrypted secrets of a job, in place of its earlier ones."""
        rows = [{"job_id": job_id, "name": name, "sealed": value} for name, value in sealed.items()]
        with changing(self._store) as connection:
            connection.execute(secrets.delete().where(secrets.c.job_id == job_id))
            if rows:
                connection.execute(secrets.insert(), rows)

    def sealed_secrets(self, job_id: str) -> dict[str, str]:
        """Return the encrypted secrets of a job."""
        rows = self._store.read(sa.select(secrets).where(secrets.c.job_id == job_id))
        return {row["name"]: row["sealed"] for row in rows}

    def _one(self, query: sa.Select[Any]) -> Mapping[str, Any] | None:
        return next(iter(self._store.read(query)), None)


@contextmanager
def changing(store: SqlStore) -> Iterator[sa.Connection]:
    """Open a transaction.

    Raises:
        StoreError: the database refuses, and nothing was changed.
    """
    try:
        with store.writing() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StoreError(f"nothing was changed: {reason(error)}") from error
