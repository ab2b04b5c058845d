"""Answers to requests that carried an idempotency key, kept for a day: the same request again gets the same answer."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from cordee.control.acts import carried_out
from cordee.control.store.credential_tables import answers
from cordee.control.store.credentials import changing
from cordee.control.store.sql import SqlStore

_KEPT_US = 86_400_000_000


class AnsweredRequests:
    """The table of answers. Every method raises StoreError if the database refuses; none is an act of its own."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def begin(self, key: str, *, request: str, now_us: int) -> Mapping[str, Any] | None:
        """Claim a key for a request, and drop the keys of yesterday; return the row of who has claimed it before."""
        with carried_out(None), changing(self._store) as connection:
            connection.execute(answers.delete().where(answers.c.at_us < now_us - _KEPT_US))
            found = connection.execute(sa.select(answers).where(answers.c.key == key)).mappings().first()
            if found is None:
                connection.execute(answers.insert().values(key=key, request=request, at_us=now_us))
        return None if found is None else dict(found)

    def end(self, key: str, *, status: int, body: str) -> None:
        """Keep the answer of a key."""
        with carried_out(None), changing(self._store) as connection:
            connection.execute(answers.update().where(answers.c.key == key).values(status=status, body=body))

    def drop(self, key: str) -> None:
        """Let a key go: what it was used for has not happened."""
        with carried_out(None), changing(self._store) as connection:
            connection.execute(answers.delete().where(answers.c.key == key))
