"""The output of ranks, in the folders of agents on this machine or received from others, merged and labelled.

The agents mask the values of secrets before a line reaches the disk.
"""

import asyncio
import fcntl
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from cordee.control.files import check_room
from cordee.errors import InputError, StoreError
from cordee.units import GiB, MiB

POLL_S = 0.1
PART_BYTES_MAX = 4 * MiB
LOG_BYTES_MAX = GiB + MiB  # an agent ends a log at 1 GiB, with a line that says so
READ_BYTES = MiB
"""Bytes of a log that a reader holds in memory, however large it is."""

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
    """Yield the lines of the files, many at once, one file after the other; with `tail`, the last `tail` of each."""
    for path in files:
        at = 0 if tail is None else _tail_start(path, tail)
        while part := _part(path, at, last=True):
            at += len(part)
            yield _labelled(path, part, several=len(files) > 1)


async def follow(
    files: Callable[[int], Sequence[Path]],
    progress: Callable[[], tuple[int, bool, bool]],
    epoch: int | None,
    several: bool,
) -> AsyncIterator[str]:
    """Yield lines as they are written, many at once, through all later attempts, until the job ends.

    Files are polled ten times a second: there is no portable way to wait for one.

    Args:
        files: returns the log files of the attempt with this epoch.
        progress: returns the newest epoch, whether that attempt has ended, and whether the job has.
        epoch: begin with this attempt; None: with the newest.
        several: whether lines are labelled with their rank.
    """
    read: dict[Path, int] = {}

    def fresh(of: int, last: bool) -> str:
        for path in files(of):
            part = _part(path, read.get(path, 0), last=last)
            if part:
                read[path] = read.get(path, 0) + len(part)
                return _labelled(path, part, several=several)
        return ""

    current = epoch
    while True:
        newest, ended, over = await asyncio.to_thread(progress)
        current = current or newest
        last = over or current < newest or ended
        while found := await asyncio.to_thread(fresh, current, last):
            yield found
        if current < newest:
            current += 1
        elif over:
            return
        else:
            await asyncio.sleep(POLL_S)


def _part(path: Path, start: int, *, last: bool) -> bytes:
    """Return whole lines from a byte on, as many as are read at once; a line that is longer comes in parts.

    With `last` the last line may lack its newline.
    """
    with path.open("rb") as file:
        file.seek(start)
        part = file.read(READ_BYTES)
    end = part.rfind(b"\n") + 1
    return part[:end] if end else part if last or len(part) == READ_BYTES else b""


def _tail_start(path: Path, tail: int) -> int:
    """Return the byte at which the last `tail` lines of a file begin."""
    with path.open("rb") as file:
        at = size = file.seek(0, os.SEEK_END)
        if not tail or not size:
            return size
        file.seek(size - 1)
        wanted = tail + (file.read(1) == b"\n")  # the newline at the end begins no line
        while at:
            begin = max(0, at - READ_BYTES)
            file.seek(begin)
            block = file.read(at - begin)
            found = block.count(b"\n")
            if found >= wanted:
                place = len(block)
                for _ in range(wanted):
                    place = block.rfind(b"\n", 0, place)
                return begin + place + 1
            wanted, at = wanted - found, begin
    return 0


def _labelled(path: Path, part: bytes, *, several: bool) -> str:
    label = _label(path, several=several)
    return "".join(f"{label}{line}\n" for line in part.removesuffix(b"\n").decode(errors="replace").split("\n"))


def _label(path: Path, *, several: bool) -> str:
    """Return the rank of a log's lines, or the node if a launcher starts its ranks."""
    name = path.parent.parent.name if path.stem == "node" else path.stem
    return f"[{name}] " if several else ""


def _number(path: Path) -> int:
    digits = re.search(r"\d+$", path.stem)
    return int(digits[0]) if digits else -1
