"""The files that an agent keeps for each rank group, from its order to its settled end.

attempts/<job>/<epoch>/<node>/order.json    the group was ordered (fsynced before the confirmation)
                              killed.json   the group was killed before it was ordered: it must never start
                              ranks.json    the direct children, to find them even if they change their environment
                              ended.json    the server has the RanksEnded: nothing is left to do
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cordee.agent.launch import Assignment
from cordee.agent.process import Process
from cordee.event_json import encode
from cordee.events import Lease, MigInstance, RanksEnded


class Journal:
    """The rank groups of one node, as files in the folder of all attempts."""

    def __init__(self, attempts: Path, node: str) -> None:
        self._attempts = attempts
        self._node = node

    def folder(self, job_id: str, epoch: int) -> Path:
        """Return the folder of a rank group, which may not exist yet."""
        return self._attempts / job_id / str(epoch) / self._node

    def has(self, job_id: str, epoch: int, name: str) -> bool:
        """Return whether the rank group has this file: `order`, `killed`, `ended`."""
        return (self.folder(job_id, epoch) / f"{name}.json").exists()

    def keep_order(self, order: Assignment, **recorded: object) -> None:
        """Make the order durable, with the agent's own decisions about it."""
        data = {"version": 1, **asdict(order), **recorded}
        _write_durably(self.folder(order.job_id, order.epoch) / "order.json", data)

    def order(self, job_id: str, epoch: int) -> Assignment:
        """Return the order that was kept for a rank group."""
        return _read_order(self.folder(job_id, epoch) / "order.json")

    def keep_tombstone(self, job_id: str, epoch: int, why: str) -> None:
        """Record that the rank group was killed before its order arrived."""
        _write_durably(self.folder(job_id, epoch) / "killed.json", {"why": why})

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
        write_json(self.folder(ended.job_id, ended.epoch) / "ended.json", encode(ended))

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


def _write_durably(path: Path, data: object) -> None:
    write_json(path, data, sync=True)
    # The folders may be new too, and a file's name is durable only if its folders are. At once they wait for one or two
    # flushes of the disk, one after the other for four.
    folders = path.parents[:4]
    with ThreadPoolExecutor(len(folders)) as pool:
        list(pool.map(_sync, folders))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
