"""Keys of the API: only their hashes are held."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cordee.serve.gateway.replies import ApiError


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a tenant.

    Attributes:
        hash: SHA-256 of the key, in hexadecimal.
        id: its name in reports.
        tenant: pays for its requests.
        models: it may use; none: all.
    """

    hash: str
    id: str
    tenant: str
    models: tuple[str, ...] = ()

    def is_good_for(self, *names: str) -> bool:
        """Return whether it may use what has one of these names, of a model or its service."""
        return not self.models or not set(self.models).isdisjoint(names)


ANYBODY = Key("", "", "default")
"""Stands for every client of a gateway without keys."""


def hash_key(secret: str) -> str:
    """Return the hash under which a key is kept.

    >>> hash_key("sk-1")[:8]
    '0f2c10bf'
    """
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyRing:
    """The keys that there are; without any, everybody may come in."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = {key.hash: key for key in keys}

    def find(self, authorization: str | None) -> Key:
        """Return the key of an Authorization header.

        Raises:
            ApiError: there are keys, and this is none of them.
        """
        if not self._keys:
            return ANYBODY
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise ApiError(401, "no key: send `Authorization: Bearer KEY`", code="missing_api_key")
        # The time of a look-up depends on the digest alone, and says nothing about how near a guess was: to learn a
        # digest by its first bytes one would have to find secrets with that digest. So no scan in constant time.
        found = self._keys.get(hash_key(secret.strip()))
        if found is None:
            raise ApiError(401, "the key is not known; hint: `cordee serve keys` lists them", code="invalid_api_key")
        return found

    def check_model(self, key: Key, model: str, service: str) -> None:
        """Raise ApiError if a key may not use a model."""
        if not key.is_good_for(model, service):
            text = f"the key {key.id} may not use {model!r}: it is for {', '.join(key.models)}"
            raise ApiError(403, f"{text}; hint: ask for a key of this model")
