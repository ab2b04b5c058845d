"""Notes of the contents that each user has sent: a digest alone is no right to a content that another user has sent."""

import os
import time
from pathlib import Path

from cordee.storage.content import KEEP_S
from cordee.storage.tree import digest_of


class Sent:
    """Notes in a folder: an empty file for each content and user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, owner: str, digest: str) -> None:
        """Note that a user has sent a content."""
        self._folder.mkdir(exist_ok=True)
        self._path(owner, digest).touch()

    def has(self, owner: str, digest: str) -> bool:
        """Return whether a user has sent a content; the note then stays for another week, as contents do."""
        try:
            os.utime(self._path(owner, digest))
        except FileNotFoundError:
            return False
        return True

    def collect(self) -> None:
        """Remove the notes that nobody has asked for in a week."""
        before_s = time.time() - KEEP_S
        for path in self._folder.glob("*.*"):
            if path.stat().st_mtime <= before_s:
                path.unlink(missing_ok=True)

    def _path(self, owner: str, digest: str) -> Path:
        return self._folder / f"{digest}.{digest_of(owner.encode())[:16]}"
