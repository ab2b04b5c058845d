"""A base: another destination, from which many jobs read chunks, by keys `base/<id>/<key there>`.

`bases/<id>` in the job's own destination holds the base's address. A pin in the base keeps the chunks.
"""

from functools import lru_cache

from blake3 import blake3

from cordee.storage.destination import is_remote, level_urls, open_existing
from cordee.storage.files import Blobs, folder_of
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

FOLDER = "bases"
_PREFIX = "base/"
_ID_DIGITS = 16


def remember(blobs: Blobs, to: str) -> str:
    """Write the base's address into the job's destination, and return the prefix of its keys."""
    absolute = ",".join(place if is_remote(place) else str(folder_of(place)) for place in level_urls(to))
    name = blake3(absolute.encode()).hexdigest()[:_ID_DIGITS]
    blobs.put_if_absent(f"{FOLDER}/{name}", seal({"format": FORMAT, "to": absolute}))
    return f"{_PREFIX}{name}/"


def is_of_base(key: str) -> bool:
    """Return whether a chunk is in a base."""
    return key.startswith(_PREFIX)


def owner_of(blobs: Blobs, key: str) -> tuple[Blobs, str]:
    """Return the store that has this chunk, and its key there.

    Raises:
        Damaged: the record with the base's address cannot be read.
        DestinationError: the base does not exist.
    """
    if not is_of_base(key):
        return blobs, key
    _, name, theirs = key.split("/", 2)
    data = blobs.get(f"{FOLDER}/{name}")
    if data is None:
        raise Damaged(f"{FOLDER}/{name} is missing")
    return _open(unseal(data)["to"]), theirs


@lru_cache(maxsize=16)
def _open(to: str) -> Blobs:
    return open_existing(to)
