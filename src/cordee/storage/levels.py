"""Several storage levels as one store: nearest first; the last one, the home, alone has the log.

The key of a chunk or a manifest identifies its content, so each level may hold a copy, and an intact one repairs a bad
one. Everything else is only in the home, since there must not be two logs. A generation may skip the farthest levels:
its chunks are then only in the nearer ones, but its manifest and records are in the home too.
"""

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from cordee.errors import DestinationError
from cordee.storage.files import Blobs, Data
from cordee.storage.sealed import Damaged

logger = logging.getLogger("cordee.storage")
# Folders with a copy in each level.
COPIED = ("chunks", "manifests", "bases")


class LeveledBlobs:
    """`Blobs` over several levels. The near ones may differ from node to node; the home is the same for all ranks."""

    def __init__(self, levels: Sequence[Blobs]) -> None:
        self.levels = tuple(levels)
        self.home = self.levels[-1]

    def __str__(self) -> str:
        return ",".join(map(str, self.levels))

    def put_if_absent(self, key: str, data: Data, *, durable: bool = True) -> bool:
        """Create the blob; the home decides which writer wins."""
        if _is_copied(key):
            for level in self.levels[:-1]:
                level.put_if_absent(key, data, durable=durable)
        return self.home.put_if_absent(key, data, durable=durable)

    def sync(self, keys: Iterable[str]) -> None:
        """Make blobs durable in each level that has them."""
        keys = list(keys)
        for level in self.levels:
            level.sync(key for key in keys if level in self._of(key))

    def put(self, key: str, data: Data) -> None:
        """Create or replace the blob."""
        for level in self._of(key):
            level.put(key, data)

    def get(self, key: str) -> bytes | None:
        """Return the blob of the nearest level that has it, unverified."""
        return next((data for level in self._of(key) if (data := level.get(key)) is not None), None)

    def size(self, key: str) -> int | None:
        """Return the size in the nearest level that has it."""
        return next((size for level in self._of(key) if (size := level.size(key)) is not None), None)

    def list(self, prefix: str) -> Iterator[str]:
        """Return all keys below the folder `prefix` in any level, sorted."""
        return iter(sorted({key for level in self._of(prefix) for key in level.list(prefix)}))

    def delete(self, key: str) -> None:
        """Remove every copy; the home's last, since the home lists the keys."""
        for level in self._of(key):
            level.delete(key)

    def read_blocks(
        self, key: str, seen: Callable[[memoryview], object], into: memoryview | None = None, *, from_disk: bool = False
    ) -> int | None:
        """Return the blob of the nearest level that has it, unverified."""
        level = next((level for level in self._of(key) if level.size(key) is not None), self.home)
        return level.read_blocks(key, seen, into, from_disk=from_disk)

    def sweep_tmp(self) -> None:
        """Remove temporary files in each level."""
        for level in self.levels:
            level.sweep_tmp()

    def _of(self, key: str) -> tuple[Blobs, ...]:
        return self.levels if _is_copied(key) else (self.home,)


def _is_copied(key: str) -> bool:
    return key.partition("/")[0] in COPIED


def without_farthest(blobs: Blobs, missing_levels: int) -> Blobs:
    """Return the same store without its farthest levels, but with the nearest at least."""
    return LeveledBlobs(blobs.levels[: max(1, len(blobs.levels) - missing_levels)]) if missing_levels else blobs


def read_intact(blobs: Blobs, key: str, problem_of: Callable[[bytes | None], str | None]) -> bytes:
    """Return the nearest intact copy; nearer ones that are damaged are repaired from it.

    Raises:
        Damaged: no level has an intact copy; the message says what is wrong in each.
        DestinationError: a level cannot be read, and no other has an intact copy.
    """
    bad: list[tuple[Blobs, str]] = []
    unreadable: DestinationError | None = None
    for level in blobs.levels:
        try:
            data = level.get(key)
        except DestinationError as error:
            if is_decay(error):
                bad.append((level, error.message))
            else:
                unreadable = error
            continue
        problem = problem_of(data)
        if problem is None and data is not None:
            for store, why in bad:
                _repair(store, key, data, why, level)
            return data
        bad.append((level, problem or f"{key} is missing"))
    if unreadable is not None:
        raise unreadable  # An unreadable copy need not be damaged.
    raise Damaged("; ".join(why if len(bad) == 1 else f"{why} in {store}" for store, why in bad))


def is_decay(error: DestinationError) -> bool:
    """Return whether the error is an unreadable sector, which costs only this copy."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


def _repair(store: Blobs, key: str, data: bytes, why: str, intact: Blobs) -> None:
    try:
        store.put(key, data)
    except DestinationError as error:
        logger.warning("%s in %s; read from %s, but not repaired: %s", why, store, intact, error.message)
        return
    logger.warning("%s in %s; repaired from %s", why, store, intact)
