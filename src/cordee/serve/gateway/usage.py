"""Tokens that were served, on disk as soon as a request ends, and kept there until the server has acknowledged them.

A journal is a file of lines; its number is the number under which it is reported, so a report that is sent twice, also
by the gateway after a crash, has the same content under the same number.
"""

import errno
import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cordee.errors import HomeInUseError
from cordee.servers import write_private

UNWRITTEN_MAX = 100_000  # lines kept in memory while the disk is full, of about 300 bytes; the oldest are lost
SUMMED = ("busy_us", "requests", "failed", "input_tokens", "cached_tokens", "output_tokens")
TIMES = ("retrieval_us", "generation_us")
"""Of knowledge bases; no row of another engine has them, so that an older server takes those."""
_KEYS = ("service", "job_id", "epoch", "tenant", "key", "model")

_log = logging.getLogger("cordee.gateway")


class UsageSpool:
    """The journals of one gateway in one folder."""

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Raises:
            HomeInUseError: another gateway uses it.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HomeInUseError(f"another gateway uses {folder}", hint="give each gateway its own --name") from None
        self.number = max([_last_number(folder / "last"), *self._numbers()])
        self._file, self._size = -1, 0
        self._unwritten: deque[bytes] = deque(maxlen=UNWRITTEN_MAX)  # lines that the disk has not taken
        self._problem = ""
        self._spent: dict[int, dict[str, int]] = {}
        self._next()

    def spent(self, tenant: str, pico_usd: int) -> None:
        """Note what a tenant spent, until the server knows it."""
        of = self._spent.setdefault(self.number, {})
        of[tenant] = of.get(tenant, 0) + pico_usd

    def unreported_pico_usd(self) -> dict[str, int]:
        """Return by tenant what the server does not know yet."""
        found: dict[str, int] = {}
        for each in self._spent.values():
            for tenant, pico_usd in each.items():
                found[tenant] = found.get(tenant, 0) + pico_usd
        return found

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row: `from_us`, `until_us`, whose it is and what is summed; what is absent counts as 0.

        It waits in memory while the disk is full, since the request that ends here was answered.
        """
        self._unwritten.append(msgspec.json.encode(row) + b"\n")
        self._write()

    def _write(self) -> None:
        """Write the lines that wait, as far as the disk takes them; never a part of one."""
        try:
            while self._unwritten:
                line = self._unwritten[0]
                written = os.write(self._file, line)
                if written < len(line):
                    os.ftruncate(self._file, self._size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._unwritten.popleft()
                self._size += written
        except OSError as error:
            if not self._problem:
                _log.error("usage waits in memory: %s takes no line (%s); hint: free space", self._folder, error)
            self._problem = str(error)
        else:
            self._problem = ""

    def close_journal(self) -> None:
        """End the present journal, so that it is reported."""
        self._write()
        if self._size and not self._problem:
            self._next()

    def unreported(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the number and the sums of each ended journal, the oldest first."""
        for number in self._numbers():
            if number < self.number:
                if rows := _sums(self._path(number)):
                    yield number, rows
                else:
                    self._path(number).unlink(missing_ok=True)

    def acknowledge(self, number: int) -> None:
        """Remove the journals up to this number."""
        for each in self._numbers():
            if each <= number and each < self.number:
                self._path(each).unlink(missing_ok=True)
        self._spent = {each: spent for each, spent in self._spent.items() if each > number}

    def close(self) -> None:
        """Give the folder back."""
        self._write()
        os.close(self._file)
        os.close(self._lock)

    def _next(self) -> None:
        self.number += 1
        write_private(self._folder / "last", str(self.number).encode())
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self._path(self.number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}.jsonl"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.jsonl"))


def _last_number(path: Path) -> int:
    """Return the number of the last journal. One that was lost is above all that the gateway may have reported."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):  # A machine that lost its power may leave an empty file.
        return int(time.time())


def _sums(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a journal, summed by whose they are; a torn last line of a killed gateway is left out."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        into = found.setdefault(tuple(row[name] for name in _KEYS), {name: row[name] for name in _KEYS})
        into["from_us"] = min(into.get("from_us", row["from_us"]), row["from_us"])
        into["until_us"] = max(into.get("until_us", row["until_us"]), row["until_us"])
        for name in (*SUMMED, *(each for each in TIMES if each in row)):
            into[name] = into.get(name, 0) + row.get(name, 0)
    return list(found.values())
