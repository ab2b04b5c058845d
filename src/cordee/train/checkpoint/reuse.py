"""Chunks that a save may use again instead of writing them, and the reads that check them for decay.

Each chunk that is used again is read again at intervals, counted in saves, in each storage level: if it decays, every
generation that uses it is lost.
"""

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cordee.storage.base_destination import owner_of
from cordee.storage.chunks import Chunk, has_decayed
from cordee.storage.files import Blobs
from cordee.storage.generations import base_chunks, known_chunks
from cordee.storage.log import Log
from cordee.storage.manifest import read_manifest
from cordee.storage.sealed import Damaged

logger = logging.getLogger("cordee.train")

REREAD_SAVES = 16


class ReusableChunks:
    """The chunks of the generation before, and those of the base.

    Attributes:
        known: chunks by xxh3.
        since: the generation of the known chunks; None: only the base's are known.
        decayed: copies found bad, by level and key, until a save that reaches the level has written them again.
    """

    def __init__(self, blobs: Blobs, base: str | None) -> None:
        self._blobs = blobs
        self._base = {} if base is None else base_chunks(blobs, base)
        self.known: dict[str, Chunk] = dict(self._base)
        self.since: int | None = None
        self.decayed: set[tuple[Blobs, str]] = set()
        # By level; random, so that an uploader that dies often does not begin with the same chunks each time.
        self._turns = [secrets.randbelow(REREAD_SAVES) for _ in blobs.levels]

    def load(self, log: Log, generation: int | None) -> None:
        """Load the chunks of a generation that verifies."""
        self.since = generation
        for entry in log.commits():
            if entry.index == generation:
                with contextlib.suppress(Damaged):  # Damaged since then: use none of its chunks.
                    whole = read_manifest(self._blobs, entry.fields["manifest"])
                    self.known |= known_chunks(self._blobs, log.entries, whole)

    def forget(self) -> None:
        """Forget all chunks but the base's."""
        self.known = dict(self._base)

    def learn(self, generation: int, chunks: Sequence[Chunk]) -> None:
        """Add the chunks of a generation that was read back."""
        self.known |= {chunk.xxh3: chunk for chunk in chunks}
        self.since = generation

    def reread(
        self,
        levels: Sequence[Blobs],
        chunks: Sequence[Chunk],
        written: Sequence[Chunk],
        pool: ThreadPoolExecutor,
        is_busy: Callable[[], bool],
    ) -> None:
        """Read those chunks of a save that are due for a check; the next save, which has them in memory, repairs.

        A base, which is not a level of this destination, is read if any level is due.
        """
        self._turns = [turn + (at < len(levels)) for at, turn in enumerate(self._turns)]
        new = {chunk.key for chunk in written}

        def look(number: int, chunk: Chunk) -> None:
            due = [level for at, level in enumerate(levels) if (number + self._turns[at]) % REREAD_SAVES == 0]
            if chunk.key in new or not due or is_busy():
                return
            owner, key = owner_of(self._blobs, chunk.key)
            for level in due if owner is self._blobs else owner.levels:
                if has_decayed(level, chunk, key):
                    logger.warning("%s has decayed in %s", key, level)
                    self.decayed.add((level, key))

        list(pool.map(look, itertools.count(), chunks))
