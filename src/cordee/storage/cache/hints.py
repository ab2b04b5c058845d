"""Hints of the objects that jobs will still read: a file for each reader, which goes with its process.

A running job writes the order in which it reads objects; the agent writes the datasets of jobs that wait in the queue.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

FOLDER = "hints"
QUEUED = 1e15
"""Waiting jobs read later than all running ones, those at the head of the queue first."""


class Hint:
    """The hint of this process; other processes believe it as long as this one holds its lock."""

    def __init__(self, root: Path) -> None:
        (root / FOLDER).mkdir(parents=True, exist_ok=True)
        self._path = root / FOLDER / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        new = self._path.with_suffix(".new")  # until it is locked, another process would take it for a dead one's
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self._path)
        self._pid = os.getpid()

    def write(self, reads: Sequence[str], queued: Sequence[str] = (), kept: Sequence[str] = ()) -> None:
        """Replace the hint.

        Args:
            reads: ids of objects, in the order in which they are read next.
            queued: URLs of datasets of waiting jobs, in the order of the queue.
            kept: ids of objects whose path was given away.
        """
        data = json.dumps({"reads": list(reads), "queued": list(queued), "kept": list(kept)}).encode()
        with suppress(OSError):  # a full disk: others go by the hint before
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        """Take the hint back."""
        if self._fd >= 0 and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def read_hints(root: Path, about: Mapping[str, str]) -> tuple[dict[str, float], set[str]]:
    """Return how soon each object is read, by all living hints, and the ids of objects that are kept.

    Args:
        root: the cache's folder.
        about: the dataset's URL of each object in the cache.
    """
    next_use: dict[str, float] = {}
    kept: set[str] = set()
    for path in sorted((root / FOLDER).glob("*.json")):
        found = _living(path)
        if found is None:
            continue
        kept.update(found.get("kept", ()))
        _lower(next_use, ((each, float(turn)) for turn, each in enumerate(found.get("reads", ()), 1)))
        for turn, url in enumerate(found.get("queued", ())):
            whole = url.rstrip("/")
            _lower(next_use, ((each, QUEUED + turn) for each, of in about.items() if of.rstrip("/") == whole))
    return next_use, kept


def _lower(next_use: dict[str, float], uses: Iterable[tuple[str, float]]) -> None:
    for object_id, turn in uses:
        next_use[object_id] = min(turn, next_use.get(object_id, turn))


def _living(path: Path) -> dict[str, list[str]] | None:
    """Return a hint whose process lives; remove it otherwise."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found: dict[str, list[str]] = json.loads(file.read() or b"{}")
                return found
            path.unlink(missing_ok=True)
    except (OSError, ValueError):
        pass  # it goes, or is being written: what it says is advice
    return None
