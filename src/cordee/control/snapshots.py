"""The keeping of snapshots: a server starts from the newest, and a process beside it makes the next.

The next snapshot is the newest one and the events since: the process reads both from the database, and the server only
starts it and forgets the jobs that were retired. So no tick waits for a snapshot.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import takewhile
from typing import IO, NamedTuple

import structlog

from cordee.control.fold import Fold
from cordee.control.snapshot import SnapshotError, encoded_curves, encoded_jobs, loaded, taken
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.errors import StoreError
from cordee.ids import JobId
from cordee.imports import end_uncollected
from cordee.schedule.policy import Policy

EVERY = 5_000
"""Events after which the next snapshot is made."""

_AT_END = 1_000  # events since the newest snapshot after which a server that ends makes one
_KEPT = 10_000  # newest events that stay in the log's table
_NICE = 10


def newest_fold(store: SqlStore, policy: Policy) -> Fold:
    """Return the fold of the newest snapshot; an empty one, and a line in the server's log, if it cannot be used."""
    snapshot = store.archive.snapshot()
    if snapshot is None:
        return Fold(policy)
    try:
        return loaded(snapshot, policy, store.archive.log_number())
    except SnapshotError as error:
        structlog.get_logger().warning("the snapshot is not used, and the whole log is replayed", why=str(error))
        return Fold(policy)


class _Making(NamedTuple):
    """A process that makes a snapshot, and the jobs that it retires."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    retired: list[JobId]


class Snapshots:
    """The snapshots of one server."""

    def __init__(self, store: SqlStore, database: str, fold: Fold) -> None:
        """Start from this fold of the database at a URL."""
        self._store, self._database = store, database
        self._log = structlog.get_logger()
        self._number = fold.number  # of the newest snapshot
        self._making: _Making | None = None

    def step(self, control: Control) -> None:
        """Start the next snapshot when it is due, and finish the one that is made."""
        try:
            if self._making is not None:
                if self._making.process.poll() is not None:
                    self._finish(control, self._making)
            elif control.number - self._number >= EVERY:
                self._begin(control)
        except (OSError, ValueError) as error:
            control.retiring = frozenset()
            self._log.warning("the snapshot failed; the next one is tried later", why=str(error))

    def _begin(self, control: Control) -> None:
        with control.changed:
            self._number, retired = control.number, control.fold.ended_jobs()
            control.retiring = frozenset(retired)
        task = {"database": self._database, "through": self._number, "retire": retired}
        output = tempfile.TemporaryFile()  # noqa: SIM115 - `_finish` closes it
        with tempfile.TemporaryFile() as file:  # a pipe would make this server wait for the reader
            file.write(json.dumps(task).encode())
            file.seek(0)
            argv = [sys.executable, "-m", "cordee.control.snapshots"]
            process = subprocess.Popen(argv, stdin=file, stdout=output, stderr=subprocess.STDOUT)
        self._making = _Making(process, output, retired)

    def _finish(self, control: Control, making: _Making) -> None:
        self._making = None
        with making.output as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines() or ["it said nothing"]
        if making.process.returncode:
            raise OSError(lines[-1])
        with control.changed:
            control.retire(making.retired)
            control.retiring = frozenset()
        self._log.info("snapshot", **json.loads(lines[-1]))

    def end(self, control: Control) -> None:
        """Make a snapshot of a server that ends, if there is enough to save."""
        interrupted = self._making is not None
        if self._making is not None:
            self._making.process.kill()
            self._making.process.wait()
            self._making.output.close()
        if not interrupted and control.number - self._number < _AT_END:
            return
        try:
            with control.changed:
                ended = control.fold.ended_jobs()
                curves, retired = control.fold.saved_curves(ended), control.fold.retire(ended)
                self._store.archive.keep(taken(control.fold), encoded_jobs(retired), encoded_curves(curves))
        except StoreError as error:
            self._log.warning("no snapshot at the end; the next start replays more of the log", why=error.message)


def make(database: str, through: int, retire: list[JobId]) -> dict[str, int]:
    """Make the snapshot of a number, retire jobs, and move old events into segments; return the counts."""
    store = SqlStore(database)
    try:
        fold = newest_fold(store, Policy())
        first = fold.number
        fold.apply(takewhile(lambda each: each[0] <= through, store.events(first)))
        curves, retired = fold.saved_curves(retire), fold.retire(retire)
        snapshot = taken(fold)
        store.archive.keep(snapshot, encoded_jobs(retired), encoded_curves(curves))
        moved = store.archive.move(fold.number - _KEPT)
    finally:
        store.close()
    counts = {"number": fold.number, "events": fold.number - first, "bytes": len(snapshot.body)}
    return counts | {"retired": len(retired), "segments": moved}


def main() -> int:
    """Read one task from stdin, and print the counts or the reason why it failed."""
    argparse.ArgumentParser(prog="python -m cordee.control.snapshots", description=__doc__).parse_args()
    os.nice(_NICE)
    task = json.loads(sys.stdin.read())
    try:
        counts = make(task["database"], task["through"], [JobId(each) for each in task["retire"]])
    except StoreError as error:
        print(error.message)
        return 1
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    end_uncollected()
    sys.exit(main())
