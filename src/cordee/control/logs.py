"""The output of ranks, in the folders of agents on this machine or received from others, merged and labelled.

The agents mask the values of secrets before a line reaches the disk.
"""

import asyncio
import fcntl
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from cordee.control.files import check_room
from cordee.errors import InputError, StoreError
from cordee.units import GiB, MiB

POLL_S = 0.1
PART_BYTES_MAX = 4 * MiB
LOG_BYTES_MAX = GiB + MiB  # an agent ends a log at 1 GiB, with a line that says so
_CHUNK_BYTES = MiB  # read at once on the loop that also answers agents
_LOG_NAME = re.compile(r"(rank\d{1,6}|node)\.log")


def receive(home: Path, job_id: str, epoch: int, node: str, name: str, start: int, part: bytes) -> int | None:
    """Append a part to a log that its agent sends, if the log ends at `start`; return the log's new size, else None.

    Raises:
        InputError: it is no name of a log, or the log would be too long.
        StoreError: the disk is full; nothing was written.
    """
    if not _LOG_NAME.fullmatch(name):
        raise InputError(f"{name!r} is not the log of a rank", hint="rank<N>.log or node.log")
    if start + len(part) > LOG_BYTES_MAX:
        raise InputError(f"{name} would have {start + len(part):,} bytes, over {LOG_BYTES_MAX:,}")
    path = home / "attempts" / job_id / str(epoch) / node / "logs" / name
    check_room(home, len(part))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(fd, "ab", buffering=0) as file:
        fcntl.flock(fd, fcntl.LOCK_EX)  # the same part may come twice, over two connections
        size = os.fstat(fd).st_size
        if size != start:
            return None
        try:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            file.truncate(size)
            raise StoreError(f"{path} cannot be written: {error.strerror}", hint="free space on the disk") from error
        return size + len(part)


def size_of(home: Path, job_id: str, epoch: int, node: str, name: str) -> int:
    """Return the size of a log that an agent sends, in bytes."""
    path = home / "attempts" / job_id / str(epoch) / node / "logs" / name
    return path.stat().st_size if path.exists() else 0


def log_files(home: Path, job_id: str, epoch: int, rank: int | None = None) -> list[Path]:
    """Return the log files of an attempt, by rank.

    With `launch: node` a node's ranks write to one file, and no file is found for a single `rank`.
    """
    pattern = "*/logs/*.log" if rank is None else f"*/logs/rank{rank}.log"
    found = (home / "attempts" / job_id / str(epoch)).glob(pattern)
    return sorted(found, key=lambda path: (_number(path), path.parent.parent.name, path.name))


def lines(files: Sequence[Path], tail: int | None = None) -> Iterator[str]:
    """Yield the lines of the files, one file after the other; with `tail`, only the last `tail` lines of each."""
    for path in files:
        label = _label(path, several=len(files) > 1)
        with path.open(errors="replace") as file:
            for line in file if tail is None else deque(file, maxlen=tail):
                yield label + line.rstrip("\n") + "\n"


class Follower:
    """Reader of growing files. It yields a line once it is complete, or when `finish` is called."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    def fresh(self, files: Sequence[Path], *, several: bool) -> Iterator[str]:
        """Yield the lines completed since the last call."""
        for path in files:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while chunk := file.read(_CHUNK_BYTES):
                    self._read[path] = self._read.get(path, 0) + len(chunk)
                    *complete, self._rest[path] = (self._rest.get(path, b"") + chunk).split(b"\n")
                    for line in complete:
                        yield _label(path, several=several) + line.decode(errors="replace") + "\n"

    def finish(self, *, several: bool) -> Iterator[str]:
        """Yield the last lines, which have no newline."""
        for path, rest in self._rest.items():
            if rest:
                yield _label(path, several=several) + rest.decode(errors="replace") + "\n"
        self._rest.clear()


async def follow(
    files: Callable[[int], Sequence[Path]],
    progress: Callable[[], tuple[int, bool, bool]],
    epoch: int | None,
    several: bool,
) -> AsyncIterator[str]:
    """Yield lines as they are written, through all later attempts, until the job ends.

    Files are polled ten times a second: there is no portable way to wait for one.

    Args:
        files: returns the log files of the attempt with this epoch.
        progress: returns the newest epoch, whether that attempt has ended, and whether the job has.
        epoch: begin with this attempt; None: with the newest.
        several: whether lines are labelled with their rank.
    """
    follower = Follower()
    current = epoch
    while True:
        newest, ended, over = await asyncio.to_thread(progress)
        current = current or newest
        for line in follower.fresh(files(current), several=several):
            yield line
        if over or current < newest or (current == newest and ended):
            for line in follower.finish(several=several):
                yield line
        if current < newest:
            current += 1
        elif over:
            return
        else:
            await asyncio.sleep(POLL_S)


def _label(path: Path, *, several: bool) -> str:
    """Return the rank of a log's lines, or the node if a launcher starts its ranks."""
    name = path.parent.parent.name if path.stem == "node" else path.stem
    return f"[{name}] " if several else ""


def _number(path: Path) -> int:
    digits = re.search(r"\d+$", path.stem)
    return int(digits[0]) if digits else -1
