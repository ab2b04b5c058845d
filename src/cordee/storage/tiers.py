"""Several stores as one: the nearest first, and last the home, which alone holds the log and is the truth.

Chunks and manifests say by their key what is in them, so each tier has a copy, any intact one serves, and a bad one is
repaired from it. Everything else lives in the home only: there must not be two truths. A generation may lack the
farthest tiers: then its chunks are in the nearer ones only, while all that is small is in the home too.
"""

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from cordee.errors import DestinationError
from cordee.storage.files import Blobs, Data
from cordee.storage.sealed import Damaged

logger = logging.getLogger("cordee.storage")
# What has a copy in each tier.
COPIED = ("chunks", "manifests", "bases")


class Tiers:
    """`Blobs` over several stores. The near ones may differ from node to node; the home is the same for all ranks."""

    def __init__(self, tiers: Sequence[Blobs]) -> None:
        self.tiers = tuple(tiers)
        self.home = self.tiers[-1]

    def __str__(self) -> str:
        return ",".join(map(str, self.tiers))

    def put_if_absent(self, key: str, data: Data, *, durable: bool = True) -> bool:
        """Create the blob; the home decides who wins."""
        if _is_copied(key):
            for tier in self.tiers[:-1]:
                tier.put_if_absent(key, data, durable=durable)
        return self.home.put_if_absent(key, data, durable=durable)

    def sync(self, keys: Iterable[str]) -> None:
        """In each tier that has them."""
        keys = list(keys)
        for tier in self.tiers:
            tier.sync(key for key in keys if tier in self._of(key))

    def put(self, key: str, data: Data) -> None:
        """Create or replace the blob."""
        for tier in self._of(key):
            tier.put(key, data)

    def get(self, key: str) -> bytes | None:
        """The blob of the nearest tier that has it, unverified."""
        return next((data for tier in self._of(key) if (data := tier.get(key)) is not None), None)

    def size(self, key: str) -> int | None:
        """Bytes of the blob in the nearest tier that has it."""
        return next((size for tier in self._of(key) if (size := tier.size(key)) is not None), None)

    def list(self, prefix: str) -> Iterator[str]:
        """All keys below the folder `prefix` in any tier, sorted."""
        return iter(sorted({key for tier in self._of(prefix) for key in tier.list(prefix)}))

    def delete(self, key: str) -> None:
        """Remove every copy; the home's last, since it is the one that lists."""
        for tier in self._of(key):
            tier.delete(key)

    def read_blocks(
        self, key: str, seen: Callable[[memoryview], object], into: memoryview | None = None, *, from_disk: bool = False
    ) -> int | None:
        """The blob of the nearest tier that has it, unverified."""
        tier = next((tier for tier in self._of(key) if tier.size(key) is not None), self.home)
        return tier.read_blocks(key, seen, into, from_disk=from_disk)

    def sweep_tmp(self) -> None:
        """In each tier."""
        for tier in self.tiers:
            tier.sweep_tmp()

    def _of(self, key: str) -> tuple[Blobs, ...]:
        return self.tiers if _is_copied(key) else (self.home,)


def _is_copied(key: str) -> bool:
    return key.partition("/")[0] in COPIED


def without_farthest(blobs: Blobs, lacks: int) -> Blobs:
    """The same store without its `lacks` farthest tiers, but never without the nearest."""
    return Tiers(blobs.tiers[: max(1, len(blobs.tiers) - lacks)]) if lacks else blobs


def read_intact(blobs: Blobs, key: str, problem_of: Callable[[bytes | None], str | None]) -> bytes:
    """The nearest copy without a problem; nearer ones that have one are repaired from it.

    Raises:
        Damaged: no tier has an intact copy; it says what is wrong in each.
        DestinationError: a tier cannot be read, and no other has an intact copy.
    """
    bad: list[tuple[Blobs, str]] = []
    unreadable: DestinationError | None = None
    for tier in blobs.tiers:
        try:
            data = tier.get(key)
        except DestinationError as error:
            if is_decay(error):
                bad.append((tier, error.message))
            else:
                unreadable = error
            continue
        problem = problem_of(data)
        if problem is None and data is not None:
            for store, why in bad:
                _repair(store, key, data, why, tier)
            return data
        bad.append((tier, problem or f"{key} is missing"))
    if unreadable is not None:
        raise unreadable  # A copy that nobody has seen is not a damaged one.
    raise Damaged("; ".join(why if len(bad) == 1 else f"{why} in {store}" for store, why in bad))


def is_decay(error: DestinationError) -> bool:
    """Whether it tells of a sector that cannot be read any more: then the store is there, and the copy is not."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


def _repair(store: Blobs, key: str, data: bytes, why: str, intact: Blobs) -> None:
    try:
        store.put(key, data)
    except DestinationError as error:
        logger.warning("%s in %s; read from %s, and not repaired: %s", why, store, intact, error.message)
        return
    logger.warning("%s in %s; repaired from %s", why, store, intact)
