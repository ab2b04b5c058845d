"""An index of what a folder's files held when they were last captured, so that only those that changed are read again.

A file counts as unchanged if its size, times, inode and device are, as in git's index. One that changed within two
seconds of its reading may change again without another time, so it is read again the next time.
"""

import json
import os
from pathlib import Path

from cordee.storage.tree import digest_of

FOLDER = "captured"
_VERSION = 1
_RACY_NS = 2_000_000_000

_Entry = list[int | str]


class CapturedIndex:
    """Digests of the files of one folder.

    Args:
        home: the folder with all indexes; None, or one that cannot be written: nothing is kept.
        root: the folder that is captured.
    """

    def __init__(self, home: Path | None, root: Path) -> None:
        self._path = None if home is None else home / FOLDER / f"{digest_of(os.fsencode(root))[:32]}.json"
        self._before: dict[str, _Entry] = {}
        self._now: dict[str, _Entry] = {}
        try:
            found = json.loads(self._path.read_bytes()) if self._path is not None else {}
            if found.get("version") == _VERSION and found.get("root") == str(root):
                self._before = found["files"]
        except (OSError, ValueError, AttributeError, KeyError):
            pass  # it is made anew
        self._root = str(root)

    def digest(self, path: str, status: os.stat_result) -> str | None:
        """Return the digest of a file that is as it was; None: it must be read."""
        entry = self._before.get(path)
        if entry is None or entry[1:] != _stamp(status):
            return None
        self._now[path] = entry
        return str(entry[0])

    def note(self, path: str, status: os.stat_result, digest: str, read_ns: int) -> None:
        """Note what a file held at this time, by the status from before it was read."""
        if max(status.st_mtime_ns, status.st_ctime_ns) < read_ns - _RACY_NS:
            self._now[path] = [digest, *_stamp(status)]

    def keep(self) -> None:
        """Write the index, if it has changed; an error only makes the next capture slower."""
        if self._path is None or self._now == self._before or not self._path.parent.parent.is_dir():
            return
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            data = {"version": _VERSION, "root": self._root, "files": self._now}
            fresh.write_text(json.dumps(data, separators=(",", ":")))
            fresh.replace(self._path)
        except OSError:
            fresh.unlink(missing_ok=True)


def _stamp(status: os.stat_result) -> _Entry:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
