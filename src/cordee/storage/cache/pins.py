"""Objects of a dataset as they were when their names were pinned, and the identity by which a node caches them."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from blake3 import blake3

ID_CHARS = 32
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True, slots=True)
class Pin:
    """One object of a dataset.

    Attributes:
        url: of the dataset.
        name: of the object below it.
        size_bytes: its size.
        tag: the store's etag; of a file its inode and the time of its last change.
    """

    url: str
    name: str
    size_bytes: int
    tag: str

    @property
    def md5(self) -> str | None:
        """The digest that the store may have named its content by; None: the tag is no digest.

        S3 makes it the MD5 of an object that was put in one part, unless it is encrypted by a key of KMS.
        """
        found = _MD5.fullmatch(self.tag) if self.url.startswith("s3://") else None
        return found[1] if found else None

    @property
    def object_id(self) -> str:
        """The name of the object in caches: one for equal contents, if the store says that they are equal."""
        return _object_id(self)

    @property
    def where(self) -> str:
        """The URL of the object."""
        return f"{self.url}/{quote(self.name)}" if "://" in self.url else f"{self.url}/{self.name}"

    def as_json(self) -> list[Any]:
        """Return it as a row of JSON."""
        return [self.url, self.name, self.size_bytes, self.tag]


@lru_cache(maxsize=4096)  # a fetcher asks for it several times a piece
def _object_id(pin: Pin) -> str:
    where = "" if pin.md5 else f"{pin.url}\n{pin.name}"
    return blake3(f"{where}\n{pin.tag}\n{pin.size_bytes}".encode()).hexdigest()[:ID_CHARS]


def digest_of_pins(pins: tuple[Pin, ...]) -> str:
    """Return a digest of names, sizes and tags: equal for two readings of an unchanged dataset.

    >>> digest_of_pins((Pin("s3://b", "a", 1, "t"),)) == digest_of_pins((Pin("s3://b", "a", 1, "u"),))
    False
    """
    rows = "\n".join(f"{pin.name}\t{pin.size_bytes}\t{pin.tag}" for pin in pins)
    return blake3(rows.encode()).hexdigest()[:ID_CHARS]
