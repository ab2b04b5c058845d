"""The cache of one node: a folder with objects, and a limit that counts the room which they take when complete.

objects/<2>/<id>/   data, state, about.json (pieces.py)
hints/              what jobs will still read (hints.py)
damaged/            objects that had other bytes than their store says
lock                held while objects come or go
"""

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import CacheFullError
from cordee.storage.cache.evict import Held, victims
from cordee.storage.cache.hints import read_hints
from cordee.storage.cache.pieces import ABOUT, DATA, Pieces
from cordee.storage.cache.pins import Pin
from cordee.units import GB, format_bytes, parse_bytes

FOLDER, LIMIT = "CORDEE_CACHE", "CORDEE_CACHE_LIMIT"
_FLOOR_BYTES, _FLOOR_PARTS = 10 * GB, 20
_OBJECTS, _GONE, _BAD = "objects", "gone", "damaged"


def default_folder() -> Path:
    """Return the folder of this node's cache: CORDEE_CACHE, or one in the user's own cache folder."""
    given = os.environ.get(FOLDER)
    own = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given).expanduser() if given else Path(own).expanduser() / "cordee" / "data"


def default_limit_bytes() -> int | None:
    """Return CORDEE_CACHE_LIMIT; None: what the disk has, but for a floor."""
    given = os.environ.get(LIMIT)
    return parse_bytes(given) if given else None


@dataclass(frozen=True, slots=True)
class Room:
    """The room of a cache in bytes: what its objects take when complete, what they take now, and what may come."""

    taken_bytes: int
    filled_bytes: int
    free_bytes: int


class NodeCache:
    """A node's cache.

    Args:
        root: its folder.
        limit_bytes: the room that its objects may take; None: the disk's, but for a twentieth, at most 10 GB.
    """

    def __init__(self, root: Path | None = None, limit_bytes: int | None = None) -> None:
        self.root = root or default_folder()
        self.limit_bytes = limit_bytes if limit_bytes is not None else default_limit_bytes()
        (self.root / _OBJECTS).mkdir(parents=True, exist_ok=True)

    def open(self, object_id: str) -> Pieces | None:
        """Open an object; None: it is not in the cache."""
        folder = self._folder(object_id)
        try:
            pieces = Pieces(folder)
        except OSError:
            return None
        with suppress(OSError):
            os.utime(folder / ABOUT)  # when it was used last
        return pieces

    def admit(self, pins: Sequence[Pin], *, soon: float = 0.0) -> None:
        """Make room for objects, and their files; those that are there stay.

        Args:
            pins: the objects.
            soon: how soon they are read, in the unit of the hints; nothing that is read before leaves for them.

        Raises:
            CacheFullError: there is no room for one of them; those before it are admitted.
        """
        missing = [pin for pin in pins if self.open(pin.object_id) is None]
        if not missing:
            return
        with self._locked():
            held = self.held()
            room = self._room(held)
            next_use: dict[str, float] | None = None
            for pin in missing:
                folder = self._folder(pin.object_id)
                if folder.exists():  # since this lock was waited for, or broken
                    if self.open(pin.object_id) is not None:
                        continue
                    self._remove(pin.object_id)
                if pin.size_bytes > room.free_bytes:
                    if next_use is None:
                        next_use, held = self._uses(held)
                    out = victims(held, next_use, pin.size_bytes - room.free_bytes, before=soon)
                    if out is None:
                        raise self._full(pin, room)
                    for each in out:
                        self._remove(each.object_id)
                        held.remove(each)
                    room = self._room(held)
                    if pin.size_bytes > room.free_bytes:
                        raise self._full(pin, room)
                self._make(pin, folder)
                room = Room(room.taken_bytes + pin.size_bytes, room.filled_bytes, room.free_bytes - pin.size_bytes)

    def make_room(self, needed_bytes: int, *, soon: float = 0.0, but: str = "") -> bool:
        """Remove objects until so much of the disk is free; False: too little could be removed.

        Args:
            needed_bytes: the room.
            soon: as in `admit`.
            but: the id of an object that stays.
        """
        with self._locked():
            next_use, held = self._uses([each for each in self.held() if each.object_id != but])
            filled = [
                Held(each.object_id, self._filled_bytes(each.object_id), each.used_s, each.is_kept) for each in held
            ]
            out = victims([each for each in filled if each.size_bytes], next_use, needed_bytes, before=soon)
            for each in out or ():
                self._remove(each.object_id)
            return out is not None

    def condemn(self, object_id: str) -> None:
        """Remove an object that is damaged, and say so to those that have read it."""
        (self.root / _BAD).mkdir(exist_ok=True)
        (self.root / _BAD / object_id).write_text(secrets.token_hex(8))
        self.drop(object_id)

    def drop(self, object_id: str) -> None:
        """Remove one object; who has it open reads on."""
        with self._locked():
            self._remove(object_id)

    def condemned(self) -> dict[str, str]:
        """Return the ids of objects that were damaged, each with a mark that is new whenever it is noticed again."""
        with suppress(FileNotFoundError):
            return {path.name: path.read_text() for path in (self.root / _BAD).iterdir()}
        return {}

    def held(self) -> list[Held]:
        """Return all objects."""
        found = []
        for folder in self.root.glob(f"{_OBJECTS}/*/*"):
            with suppress(OSError):  # it goes meanwhile
                found.append(Held(folder.name, (folder / DATA).stat().st_size, (folder / ABOUT).stat().st_mtime))
        return found

    def about(self, object_id: str) -> dict[str, str]:
        """Return the dataset and the name of an object; empty if they are not known."""
        try:
            found: dict[str, str] = json.loads((self._folder(object_id) / ABOUT).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def room(self) -> Room:
        """Return the room of the cache."""
        return self._room(self.held())

    # -- under the lock --------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in self.root.glob(f"{_GONE}-*"):  # by one that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _make(self, pin: Pin, folder: Path) -> None:
        new = self.root / f"{_GONE}-{secrets.token_hex(8)}"
        try:
            Pieces.lay_out(new, pin.size_bytes)
            about = {"url": pin.url, "name": pin.name, "tag": pin.tag, "admitted_s": time.time()}
            (new / ABOUT).write_text(json.dumps(about))
            folder.parent.mkdir(exist_ok=True)
            new.rename(folder)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise CacheFullError(
                f"the cache {self.root} cannot take {pin.where}: {error.strerror}", hint="free some space on its disk"
            ) from error

    def _remove(self, object_id: str) -> None:
        gone = self.root / f"{_GONE}-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            self._folder(object_id).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _uses(self, held: Sequence[Held]) -> tuple[dict[str, float], list[Held]]:
        about = {each.object_id: self.about(each.object_id).get("url", "") for each in held}
        next_use, kept = read_hints(self.root, about)
        return next_use, [Held(each.object_id, each.size_bytes, each.used_s, each.object_id in kept) for each in held]

    def _room(self, held: Sequence[Held]) -> Room:
        taken = sum(each.size_bytes for each in held)
        filled = sum(self._filled_bytes(each.object_id) for each in held)
        disk = os.statvfs(self.root)
        floor = min(_FLOOR_BYTES, disk.f_blocks * disk.f_frsize // _FLOOR_PARTS)
        free = disk.f_bavail * disk.f_frsize - floor - max(0, taken - filled)  # holes will be filled
        if self.limit_bytes is not None:
            free = min(free, self.limit_bytes - taken)
        return Room(taken, filled, max(0, free))

    def _filled_bytes(self, object_id: str) -> int:
        try:
            status = (self._folder(object_id) / DATA).stat()
        except OSError:
            return 0
        return min(status.st_blocks * 512, status.st_size)

    def _full(self, pin: Pin, room: Room) -> CacheFullError:
        limit = "its disk's room" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        return CacheFullError(
            f"the cache {self.root} has no room for {pin.where} of {format_bytes(pin.size_bytes)}: of {limit}, "
            f"{format_bytes(room.taken_bytes)} are taken, and {format_bytes(room.free_bytes)} free",
            hint=f"raise {LIMIT}, or free some space on its disk",
        )

    def _folder(self, object_id: str) -> Path:
        return self.root / _OBJECTS / object_id[:2] / object_id
