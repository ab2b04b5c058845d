"""Tenants of the gateways and their keys: who is counted, by which key, within which limits.

A key is shown once, when it is made; the database keeps its hash. Gateways get the hashes of the keys that are valid,
and are woken when they change: a revoked key stops within the time of one request to this server.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cordee.account.usage import DAY_US
from cordee.answers.services import (
    KeyHashView,
    KeyRequest,
    KeyView,
    NewKeyView,
    TenantRules,
    TenantView,
    TokenPricesView,
)
from cordee.control.members import hash_of
from cordee.control.ports import Clock
from cordee.control.store.tenants import Row, TenantRows
from cordee.control.tick import Control
from cordee.errors import NotFoundError
from cordee.events import KeyCreated, KeyRevoked, TenantSet
from cordee.units import month_start_us

PREFIX = "sk-cordee-"
_ID_CHARS = 12  # of the hash: ids of a million keys differ


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tenants and keys.

    Attributes:
        control: the control plane, which has the ledger.
        rows: the tables of tenants and keys.
        clock: the time.
        wake: wakes the gateways that wait for a change.
    """

    control: Control
    rows: TenantRows
    clock: Clock
    wake: Callable[[], None] = lambda: None

    def create_key(self, request: KeyRequest, by: str) -> NewKeyView:
        """Make a key, and its tenant if there is none of that name; return it with its secret."""
        if all(row["name"] != request.tenant for row in self.rows.tenants()):
            self.set_tenant(request.tenant, TenantRules(), by)
        secret = PREFIX + secrets.token_urlsafe(32)
        digest, now_us = hash_of(secret), self.clock.now_us()
        key = KeyView(id=f"key-{digest[:_ID_CHARS]}", created_us=now_us, by=by, revoked_us=None, **request.model_dump())
        self.rows.add_key({**key.model_dump(), "hash": digest})
        self._note(KeyCreated(at_us=now_us, key=key.id, tenant=key.tenant, by=by))
        return NewKeyView(**key.model_dump(), secret=secret)

    def keys(self) -> list[KeyView]:
        """Return all keys, oldest first, revoked ones as well."""
        return [_key(row) for row in self.rows.all_keys()]

    def revoke_key(self, key: str, by: str) -> KeyView:
        """Make a key void; one that is void stays as it is.

        Raises:
            NotFoundError: there is no such key.
        """
        found = self._find(key)
        if found["revoked_us"] is None:
            now_us = self.clock.now_us()
            self.rows.revoke_key(found["id"], now_us)
            self._note(KeyRevoked(at_us=now_us, key=found["id"], tenant=found["tenant"], by=by))
        return _key(self._find(found["id"]))

    def set_tenant(self, name: str, rules: TenantRules, by: str) -> TenantView:
        """Add a tenant, or replace its rules."""
        self.rows.set_tenant({"name": name, **rules.model_dump()})
        self._note(TenantSet(at_us=self.clock.now_us(), tenant=name, by=by, **rules.model_dump()))
        return next(tenant for tenant in self.tenants() if tenant.name == name)

    def tenants(self) -> list[TenantView]:
        """Return all tenants by name, with what each has spent in its budget's day or month of UTC."""
        now_us = self.clock.now_us()
        with self.control.changed:
            ledger = self.control.ledger
            spent = {
                per: ledger.spent(from_us, now_us)
                for per, from_us in (("day", now_us // DAY_US * DAY_US), ("month", month_start_us(now_us)))
            }
        return [TenantView(**row, spent_micro_usd=spent[row["per"]].get(row["name"], 0)) for row in self.rows.tenants()]

    def key_hashes(self) -> list[KeyHashView]:
        """Return the keys as a gateway compares them: none if there were never any, and then anybody may come in.

        If all keys are revoked, one of them without a hash stands for them: it equals no key, and nobody comes in.
        """
        rows = self.rows.all_keys()
        valid = [row for row in rows if row["revoked_us"] is None]
        found = valid or [{**row, "hash": ""} for row in rows[-1:]]
        return [KeyHashView.model_validate({name: row[name] for name in KeyHashView.model_fields}) for row in found]

    def prices(self) -> dict[str, TokenPricesView]:
        """Return micro-dollars of a million tokens of each service, by which gateways weigh requests."""
        with self.control.changed:
            found = self.control.ledger.prices(self.clock.now_us())
        return {service: TokenPricesView.of(weights) for service, weights in found.items()}

    def _find(self, key: str) -> Row:
        rows = self.rows.all_keys()
        found = [row for row in rows if row["id"] == key] or [row for row in rows if key and row["name"] == key]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(row["id"] for row in found[:5])
            raise NotFoundError(f"{len(found)} keys are named {key!r}", hint=f"say which: {ids}")
        raise NotFoundError(f"there is no key {key!r}", hint="`cordee serve keys list` shows them")

    def _note(self, event: KeyCreated | KeyRevoked | TenantSet) -> None:
        self.control.note(event)
        self.wake()


def _key(row: Row) -> KeyView:
    return KeyView.model_validate({name: row[name] for name in KeyView.model_fields})
