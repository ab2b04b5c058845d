"""Columns over the attempts that could be pushed, and over nodes: the search for victims reads no other record.

A row is an attempt from its placement until it has notice, is killed or a share of it has ended. Leases are rows of
their own. Only `State` changes them, through the journal; freed rows are used again, and no answer depends on numbers.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from cordee.events import Lease
from cordee.ids import JobId
from cordee.schedule.journal import Journal
from cordee.schedule.order import counts_service
from cordee.schedule.policy import Policy
from cordee.schedule.preemption.loss import at_risk_us

_ROW: dict[str, Any] = {
    "live": np.bool_,
    "gpus": np.int64,
    "tier": np.int64,
    "priority": np.int64,
    "queue": np.int64,
    "value": np.int64,  # what decides its standing, when it was placed
    "pace": np.int64,  # and how that changes each microsecond
    "placed_us": np.int64,
    "rests_until_us": np.int64,  # from then on other tiers may push it
    "slice_ends_us": np.int64,  # from then on its own tier may
    "overdue": np.bool_,  # it had waited too long when it was placed
    "ends_us": np.int64,  # at the latest, or as far as one can tell
    "rate": np.float64,  # micro-dollars per hour of the gang
    "work_from_us": np.int64,  # work before this is durable
    "silent": np.bool_,  # it told of no checkpoint and is taken to have written them on time
    "saves": np.bool_,  # within its grace
    "awaited": np.bool_,  # it cannot, so its own tier may wait for its next checkpoint
    "save_us": np.int64,
    "restart_us": np.int64,
    "every_us": np.int64,
}
NEVER = 2**62


@lru_cache(maxsize=64)
def _marks(levels: tuple[int, ...]) -> Any:
    """Where levels begin, and NEVER."""
    return np.array((*levels, NEVER), np.int64)


class Columns(dict[str, Any]):
    """Arrays of equal length that grow, with a list of free rows; by name the part of each that is in use."""

    def __init__(self, journal: Journal, types: dict[str, Any]) -> None:
        self._journal = journal
        self._free: list[int] = []
        self.size = 0
        self.changes = 0  # how often anything changed
        self.columns = {name: np.zeros(64, kind) for name, kind in types.items()}

    def __missing__(self, name: str) -> Any:
        found = self[name] = self.columns[name][: self.size]
        return found

    def add(self, values: dict[str, Any]) -> int:
        """A row with these values."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.size
            self.size += 1
            self.clear()
            if self.size > len(next(iter(self.columns.values()))):
                self.columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self.columns.items()}
        for name, value in values.items():
            self.columns[name][row] = value
        self.changes += 1
        self._journal.note(self._drop, row)
        return row

    def drop(self, row: int) -> None:
        """Take a row out."""
        if self._journal.keeps:
            self._journal.note(self._restore, row, {name: column[row] for name, column in self.columns.items()})
        self._drop(row)

    def set(self, name: str, row: int, value: Any) -> None:
        """Change one cell."""
        self._journal.note(self._set, name, row, self.columns[name][row])
        self._set(name, row, value)

    def _set(self, name: str, row: int, value: Any) -> None:
        self.columns[name][row] = value
        self.changes += 1

    def _drop(self, row: int) -> None:
        for column in self.columns.values():
            column[row] = 0
        self._free.append(row)
        self.changes += 1

    def _restore(self, row: int, values: dict[str, Any]) -> None:
        assert self._free.pop() == row, "changes are taken back in reverse order"
        self.changes += 1
        for name, value in values.items():
            self.columns[name][row] = value


class Running:
    """What could be pushed, and where it lies."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.rows = Columns(journal, _ROW)
        self.leases = Columns(journal, {"row": np.int64, "node": np.int64, "gpus": np.int64})
        self.nodes: dict[str, int] = {}  # numbers; they are kept when a node goes
        self.node_names: list[str] = []
        self.node_free = np.zeros(64, np.int64)  # GPUs free or being vacated, and claimed by nobody
        self.node_usable = np.zeros(64, np.int64)
        self.node_kind = np.full(64, -1, np.int64)  # -1: nothing can be placed there
        self.kinds: dict[Any, int] = {}
        self.queues: dict[str, int] = {}
        self.jobs: dict[int, JobId] = {}  # of rows
        self.row_of: dict[JobId, int] = {}
        self.changes = 0  # of nodes
        self._masks: dict[tuple[Any, ...], Any] = {}  # of pools
        self._ranks = np.empty(0, np.int64)
        self._lease_rows: dict[JobId, tuple[int, ...]] = {}

    def queue(self, name: str) -> int:
        """The number of a queue."""
        return self.queues.setdefault(name, len(self.queues))

    def node(self, name: str) -> int:
        """The number of a node."""
        number = self.nodes.get(name)
        if number is None:
            number = self.nodes[name] = len(self.node_names)
            self.node_names.append(name)
            self._masks.clear()
            if number >= len(self.node_free):
                self.node_free = np.concatenate([self.node_free, np.zeros_like(self.node_free)])
                self.node_usable = np.concatenate([self.node_usable, np.zeros_like(self.node_usable)])
                self.node_kind = np.concatenate([self.node_kind, np.full_like(self.node_kind, -1)])
        return number

    def name_ranks(self) -> Any:
        """For each node its place in the order of names."""
        if len(self._ranks) != len(self.node_names):
            self._ranks = np.empty(len(self.node_names), np.int64)
            self._ranks[np.argsort(np.array(self.node_names))] = np.arange(len(self.node_names))
        return self._ranks

    def of_pool(self, pool: tuple[Any, ...]) -> Any:
        """A mask of the nodes of these kinds, to be read only."""
        mask = self._masks.get(pool)
        if mask is None:
            numbers = [self.kinds.get(each, -2) for each in pool]
            mask = self._masks[pool] = np.isin(self.node_kind[: len(self.node_names)], numbers)
        return mask

    def set_node(self, name: str, kind: Any, free: int, usable: int) -> None:
        """What a node has; kind None takes it out. Not journaled: `State` sets it anew when it takes something back."""
        number = self.node(name)
        kind_number = -1 if kind is None else self.kinds.setdefault(kind, len(self.kinds))
        if self.node_kind[number] != kind_number:
            self.node_kind[number] = kind_number
            self._masks.clear()
        elif self.node_free[number] == free and self.node_usable[number] == usable:
            return
        self.node_free[number], self.node_usable[number] = free, usable
        self.changes += 1

    def add(self, job_id: JobId, leases: tuple[Lease, ...], values: dict[str, Any]) -> None:
        """An attempt was placed."""
        row = self.rows.add(values | {"live": True})
        self._journal.put(self.jobs, row, job_id)
        self._journal.put(self.row_of, job_id, row)
        # A GPU that is shared does not become free with one of those on it, so it counts for nothing here.
        cells = [
            {"row": row, "node": self.node(lease.node), "gpus": len(lease.gpus) if lease.milli >= 1000 else 0}
            for lease in leases
        ]
        self._journal.put(self._lease_rows, job_id, tuple(self.leases.add(each) for each in cells))

    def drop(self, job_id: JobId) -> None:
        """It leaves, or it has begun to end."""
        row = self.row_of.get(job_id)
        if row is None:
            return
        for lease_row in self._lease_rows[job_id]:
            self.leases.drop(lease_row)
        self.rows.drop(row)
        self._journal.drop(self.jobs, row)
        self._journal.drop(self.row_of, job_id)
        self._journal.drop(self._lease_rows, job_id)

    def set(self, job_id: JobId, **values: Any) -> None:
        """Something changed of an attempt."""
        row = self.row_of.get(job_id)
        if row is not None:
            for name, value in values.items():
                self.rows.set(name, row, value)

    def next_us(self, column: str, now_us: int) -> int | None:
        """The first time in a column after now, of any row; NEVER is none, and rows that are free hold zero."""
        times = self.rows[column]
        times = times[(times > now_us) & (times < NEVER)]
        return int(times.min()) if times.size else None

    def standings(self, now_us: int, levels: tuple[int, ...] | None) -> Any:
        """Where each row stands now; with levels, its level."""
        values = self.served(now_us)
        return values if levels is None else _marks(levels)[:-1].searchsorted(values, side="right")

    def crosses_us(self, now_us: int, levels: tuple[int, ...]) -> int | None:
        """When the next attempt goes down a level."""
        rows = self.rows
        if not rows.size or not levels:
            return None
        marks = _marks(levels)
        nexts = marks[marks[:-1].searchsorted(self.served(now_us), side="right")]
        due = rows["placed_us"] + -(-(nexts - rows["value"]) // np.maximum(1, rows["pace"]))
        due = due[rows["live"] & (nexts < NEVER) & (due > now_us)]
        return int(due.min()) if due.size else None

    def at_risk_us(self, now_us: int) -> Any:
        """Of each row the work that no durable checkpoint holds."""
        rows = self.rows
        since_us = np.maximum(0, now_us - rows["work_from_us"])
        return at_risk_us(since_us, rows["every_us"], rows["restart_us"] + rows["save_us"], rows["silent"])

    def is_kept(self, job_id: JobId, now_us: int, policy: Policy) -> bool:
        """Whether it would lose its place now if it were not kept for its next checkpoint."""
        row = self.row_of.get(job_id)
        awaited = row is not None and policy.takes_turns and bool(self.rows["awaited"][row])
        return awaited and bool(self.kept_until_us(now_us, policy)[row] > now_us)

    def kept_until_us(self, now_us: int, policy: Policy) -> Any:
        """Until when each row keeps its place although its turn is over; 0: it is not kept.

        One that cannot save in its grace is kept until its next checkpoint is durable, if that takes less time than the
        work that it would lose took, and is due within an interval, and a minimum run, of when its turn was over. So
        no level further down lets anybody wait longer: when that checkpoint is due is the end of it.
        """
        rows = self.rows
        if not (policy.awaits_checkpoint and counts_service(policy) and rows["awaited"].any()):
            return np.zeros(rows.size, np.int64)
        since_us = now_us - rows["work_from_us"]
        left_us = rows["every_us"] + rows["restart_us"] + rows["save_us"] - since_us
        served = self.served(now_us)
        level = _marks(policy.levels_gpu_us)[:-1].searchsorted(served, side="right")
        below = served - np.array((0, *policy.levels_gpu_us), np.int64)[level]
        over_us = np.maximum(rows["slice_ends_us"], now_us - below // np.maximum(1, rows["pace"]))
        longest_us = np.minimum(rows["every_us"], policy.time_slice_us)
        is_kept = rows["awaited"] & (level > 0) & (over_us <= now_us) & (left_us > 0) & (left_us < since_us)
        return np.where(is_kept & (now_us + left_us <= over_us + longest_us), now_us + left_us, 0)

    def served(self, now_us: int) -> Any:
        """What decides each row's standing, now; GPU time received in the orders that count it."""
        rows = self.rows
        return rows["value"] + rows["pace"] * np.maximum(0, now_us - rows["placed_us"])

    def value(self) -> object:
        """A deep copy, to compare; numbers of rows and queues do not count."""
        queues = list(self.queues)
        rows = {
            job_id: {name: self.rows.columns[name][row] for name in _ROW}
            | {"queue": queues[self.rows.columns["queue"][row]]}
            for job_id, row in self.row_of.items()
        }
        leases = {
            job_id: sorted(
                (self.node_names[self.leases.columns["node"][each]], self.leases.columns["gpus"][each])
                for each in found
            )
            for job_id, found in self._lease_rows.items()
        }
        nodes = {
            name: (self.node_free[number], self.node_usable[number])
            for name, number in self.nodes.items()
            if self.node_kind[number] >= 0
        }
        return rows, leases, nodes
