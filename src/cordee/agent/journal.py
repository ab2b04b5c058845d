"""Files that an agent keeps for each rank group, from its order to its settled end.

orders-<node>.log                           orders and tombstones, a line each, on the disk before they are confirmed
attempts/<job>/<epoch>/<node>/order.json    the group was ordered
                              killed.json   the group was killed before it was ordered: it must never start
                              ranks.json    the direct children, to find them even if they change their environment
                              ended.json    the server has the RanksEnded: nothing is left to do

Only the log waits for the disk, once an order: a file in new folders would have to wait for each of them. What a power
cut has taken from the folders is written again from the log.
"""

import errno
import json
import os
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cordee.agent.launch import Assignment
from cordee.agent.process import Process
from cordee.event_json import encode
from cordee.events import Lease, MigInstance, RanksEnded

LOG_BYTES_MAX = 1 << 20
"""The size of the log at which the files are brought to the disk, and it begins anew."""


class Journal:
    """The rank groups of one node, as files in the folder of all attempts."""

    def __init__(self, attempts: Path, node: str) -> None:
        self._attempts = attempts
        self._node = node
        self._log = _OrderLog(attempts.parent / f"orders-{node}.log")

    def recover(self) -> None:
        """Write again what a power cut has taken of what an earlier agent confirmed."""
        self._log.cut()
        for path, data in self._log.entries().items():
            if not _is_whole(self._attempts / path):
                write_json(self._attempts / path, data)

    def folder(self, job_id: str, epoch: int) -> Path:
        """Return the folder of a rank group, which may not exist yet."""
        return self._attempts / job_id / str(epoch) / self._node

    def has(self, job_id: str, epoch: int, name: str) -> bool:
        """Return whether the rank group has this file: `order`, `killed`, `ended`."""
        return (self.folder(job_id, epoch) / f"{name}.json").exists()

    def keep_order(self, order: Assignment, **recorded: object) -> None:
        """Make the order durable, with the agent's own decisions about it."""
        data = {"version": 1, **asdict(order), **recorded}
        self._keep(self.folder(order.job_id, order.epoch) / "order.json", data)

    def _keep(self, path: Path, data: dict[str, Any]) -> None:
        if self._log.size_bytes > LOG_BYTES_MAX:
            for entry in self._log.entries():
                _sync_to(self._attempts / entry, self._attempts.parent)
            self._log.clear()
        self._log.append(self._entry(path), data)
        write_json(path, data)

    def _entry(self, path: Path) -> str:
        return str(path.relative_to(self._attempts))

    def order(self, job_id: str, epoch: int) -> Assignment:
        """Return the order that was kept for a rank group."""
        return _read_order(self.folder(job_id, epoch) / "order.json")

    def keep_tombstone(self, job_id: str, epoch: int, why: str) -> None:
        """Record that the rank group was killed before its order arrived."""
        self._keep(self.folder(job_id, epoch) / "killed.json", {"why": why})

    def keep_ranks(self, order: Assignment, ranks: list[Process]) -> None:
        """Record the direct children."""
        write_json(self.folder(order.job_id, order.epoch) / "ranks.json", [list(process) for process in ranks])

    def ranks(self, order: Assignment) -> list[Process]:
        """Return the direct children that were recorded."""
        try:
            data = json.loads((self.folder(order.job_id, order.epoch) / "ranks.json").read_text())
        except (OSError, ValueError):
            return []
        return [Process(int(pid), float(started)) for pid, started in data]

    def settle(self, ended: RanksEnded) -> None:
        """Record that the server has committed the end of the rank group."""
        folder = self.folder(ended.job_id, ended.epoch)
        write_json(folder / "ended.json", encode(ended))
        self._log.append(self._entry(folder / "order.json"), None)

    def unsettled(self) -> list[Assignment]:
        """Return the orders of rank groups without a committed end, oldest first."""
        paths = self._attempts.glob(f"*/*/{self._node}/order.json")
        found = [_read_order(path) for path in paths if not (path.parent / "ended.json").exists()]
        return sorted(found, key=lambda order: (order.placed_us, order.tag))


def _read_order(path: Path) -> Assignment:
    data = json.loads(path.read_text())
    leases = tuple(_lease(each) for each in data["leases"])
    # Orders of earlier versions lack some fields, which then have their defaults.
    known = {each.name: data[each.name] for each in fields(Assignment) if each.name in data}
    return Assignment(**known | {"leases": leases})


def _lease(data: dict[str, Any]) -> Lease:
    instance = data.get("instance")
    part = None if instance is None else MigInstance(**instance)
    return Lease(**data | {"gpus": tuple(data["gpus"]), "instance": part})


def write_json(path: Path, data: object, *, sync: bool = False, mode: int = 0o666) -> None:
    """Write a file of JSON whole or not at all; with `sync` its content is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    text = json.dumps(data)  # in one piece and without indent: ranks wait for it, and only so is it not made in Python
    with open(fresh, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)


class _OrderLog:
    """A file to which entries are appended: files with their content, or None for those that are not needed any more.

    An entry that was cut off is the last one, and was not confirmed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def cut(self) -> None:
        """Remove an entry that was cut off."""
        with suppress(FileNotFoundError):
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the content of the files that are needed."""
        found: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            for path, data in map(json.loads, self._path.read_bytes().splitlines()):
                found.pop(path, None)
                found |= {} if data is None else {path: data}
        return found

    @property
    def size_bytes(self) -> int:
        """The bytes that it has by now."""
        return os.fstat(self._open()).st_size

    def append(self, path: str, data: dict[str, Any] | None) -> None:
        """Write an entry, to the disk if it has a content.

        Raises:
            OSError: that was not possible; the log is as before.
        """
        fd, before = self._open(), self.size_bytes
        line = json.dumps([path, data]).encode() + b"\n"
        try:
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            if data is not None:
                os.fdatasync(fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, before)
            raise

    def clear(self) -> None:
        """Begin anew."""
        os.ftruncate(self._open(), 0)

    def _open(self) -> int:
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            _sync(self._path.parent)
        return self._fd


def _is_whole(path: Path) -> bool:
    """Return whether a file of JSON is there as it was written; a power cut may leave one without its content."""
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _sync_to(path: Path, above: Path) -> None:
    """Bring a file and its name to the disk, up to the folder `above`; nothing if it was removed."""
    with suppress(FileNotFoundError):
        for each in (path, *path.parents[: len(path.relative_to(above).parents)]):
            _sync(each)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
