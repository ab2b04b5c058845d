"""Tenants and keys in the database: short transactions beside those of the log."""

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from cordee.control.store.credential_tables import keys, tenants
from cordee.control.store.credentials import changing
from cordee.control.store.sql import SqlStore

Row = Mapping[str, Any]


class TenantRows:
    """The tables of tenants and keys. Every method raises StoreError if the database refuses."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def tenants(self) -> list[Row]:
        """Return all tenants by name."""
        return self._store.read(sa.select(tenants).order_by(tenants.c.name))

    def all_keys(self) -> list[Row]:
        """Return all keys, oldest first, revoked ones as well; `models` is a list."""
        rows = self._store.read(sa.select(keys).order_by(keys.c.created_us, keys.c.id))
        return [{**row, "models": json.loads(row["models"])} for row in rows]

    def set_tenant(self, row: Row) -> None:
        """Add a tenant, or replace its limits."""
        with changing(self._store) as connection:
            connection.execute(tenants.delete().where(tenants.c.name == row["name"]))
            connection.execute(tenants.insert().values(**row))

    def add_key(self, row: Row) -> None:
        """Add a key."""
        with changing(self._store) as connection:
            connection.execute(keys.insert().values({**row, "models": json.dumps(row["models"])}))

    def revoke_key(self, key: str, now_us: int) -> None:
        """Make a key void; one that is void stays as it is."""
        with changing(self._store) as connection:
            valid = (keys.c.id == key) & keys.c.revoked_us.is_(None)
            connection.execute(keys.update().where(valid).values(revoked_us=now_us))
