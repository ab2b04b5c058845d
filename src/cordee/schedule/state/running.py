"""The attempts that could be preempted, as columns: a search for victims reads nothing else about them.

A row is an attempt from its placement until it has notice, is killed, or its ranks on a node have ended.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from cordee.events import Job, Lease
from cordee.hardware.arrays import Ints, Mask
from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.schedule.state.columns import Cell, Columns, NodeColumns
from cordee.schedule.state.journal import Journal
from cordee.schedule.state.order import TIERS, counts_service, level, pace
from cordee.schedule.state.records import NEVER, Attempt, JobRecord

_INTS = (
    "gpus",
    "gpu_milli",
    "tier",
    "priority",
    "queue",  # its number
    "value",  # its standing when it was placed, before levels are applied
    "placed_us",
    "min_run_ends_us",  # other tiers may preempt it after that
    "slice_ends_us",  # its own tier may preempt it after that
    "ends_us",  # its limit or its estimated end
    "work_from_us",  # work before this is durable
    "save_us",
    "restart_us",
    "every_us",  # its checkpoint interval
)
_FLAGS = (
    "live",
    "overdue",  # its job was overdue when it was placed
    "silent",  # it reported no checkpoint; it counts as if it had written them on time
    "saves",  # it can save within its grace period
    "awaited",  # it cannot save in time, so its own tier may wait for its next checkpoint
)
_FLOATS = (
    "pace",  # the change of the value in each microsecond: GPUs, in the orders that count GPU time
    "rate",  # micro-dollars per hour of the gang
)
_ROW = (*_INTS, *_FLAGS, *_FLOATS)


class Running:
    """Attempts that could be preempted, with their leases.

    Attributes:
        levels: GPU time received at which an attempt moves down a level; some of the bounds.
        rows: of attempts.
        leases: rows of their leases: the attempt's row, the node's number, GPUs.
        queues: the numbers of queues.
        jobs: the jobs of rows.
        row_of: the rows of jobs.
        overdue_milli: thousandths of GPUs of jobs that were overdue when they were placed.
        awaited: the number of rows that cannot save in time.
        of_tiers: the number of rows of each tier.
    """

    def __init__(self, journal: Journal, nodes: NodeColumns, bounds: tuple[int, ...], levels: tuple[int, ...]) -> None:
        """Start empty; `bounds` are all that levels may ever have."""
        self._journal, self._nodes, self.levels = journal, nodes, levels
        self._lost = tuple((bound, _lost(bound)) for bound in bounds)
        self.rows = Columns(journal, ints=(*_INTS, *(name for _, name in self._lost)), flags=_FLAGS, floats=_FLOATS)
        self.leases = Columns(journal, ints=("row", "node", "gpus"))
        self.queues: dict[str, int] = {}
        self.jobs: dict[int, JobId] = {}
        self.row_of: dict[JobId, int] = {}
        self.overdue_milli = self.awaited = 0
        self.of_tiers = [0] * len(TIERS)
        self._lease_rows: dict[JobId, tuple[int, ...]] = {}

    def add(self, job_id: JobId, leases: tuple[Lease, ...], queue: str, values: dict[str, Cell]) -> None:
        """Add an attempt that was placed, with the values of its row (`row_values`)."""
        number = self.queues.setdefault(queue, len(self.queues))
        row = self.rows.add({**values, "live": True, "queue": number, **self._loses(values)})
        self._count_tier(int(values["tier"]), +1)
        if values["overdue"]:
            self._count_overdue(int(values["gpu_milli"]))
        if values["awaited"]:
            self._count_awaited(+1)
        self._journal.put(self.jobs, row, job_id)
        self._journal.put(self.row_of, job_id, row)
        # A part of a GPU frees no GPU when it ends, so it counts for nothing here.
        cells: list[dict[str, Cell]] = [
            {"row": row, "node": self._nodes.number(each.node), "gpus": 0 if each.has_part else len(each.gpus)}
            for each in leases
        ]
        self._journal.put(self._lease_rows, job_id, tuple(self.leases.add(each) for each in cells))

    def drop(self, job_id: JobId) -> None:
        """Take out an attempt that leaves or has begun to end."""
        row = self.row_of.get(job_id)
        if row is None:
            return
        for lease_row in self._lease_rows[job_id]:
            self.leases.drop(lease_row)
        arrays = self.rows.arrays
        if arrays["overdue"][row]:
            self._count_overdue(-int(arrays["gpu_milli"][row]))
        if self.awaited and arrays["awaited"][row]:
            self._count_awaited(-1)
        self._count_tier(int(arrays["tier"][row]), -1)
        self.rows.drop(row)
        self._journal.drop(self.jobs, row)
        self._journal.drop(self.row_of, job_id)
        self._journal.drop(self._lease_rows, job_id)

    def _loses(self, values: dict[str, Cell]) -> dict[str, Cell]:
        """Return the times of `lost_us` for an attempt with these values."""
        value, pace, placed_us = int(values["value"]), values["pace"], int(values["placed_us"])
        slice_ends_us, lost = values["slice_ends_us"], dict[str, Cell]()
        for bound, name in self._lost:
            if value >= bound:
                lost[name] = slice_ends_us
            elif pace:
                left_us = placed_us - int((value - bound) // pace)
                lost[name] = left_us if left_us > slice_ends_us else slice_ends_us
            else:
                lost[name] = NEVER
        return lost

    @property
    def lowest_tier(self) -> int:
        """Return the lowest tier of the rows, as the number of its level; 0 without rows."""
        lowest = len(self.of_tiers) - 1
        while lowest and not self.of_tiers[lowest]:
            lowest -= 1
        return lowest

    def _count_tier(self, tier: int, sign: int) -> None:
        self._journal.note(self.of_tiers.__setitem__, tier, self.of_tiers[tier])
        self.of_tiers[tier] += sign

    def _count_overdue(self, gpu_milli: int) -> None:
        self._journal.note(setattr, self, "overdue_milli", self.overdue_milli)
        self.overdue_milli += gpu_milli

    def _count_awaited(self, sign: int) -> None:
        self._journal.note(setattr, self, "awaited", self.awaited)
        self.awaited += sign

    def set(self, job_id: JobId, **values: Cell) -> None:
        """Change values of an attempt, but for its GPUs and for whether its job was overdue."""
        row = self.row_of.get(job_id)
        if row is not None:
            for name, value in values.items():
                self.rows.set(name, row, value)

    def next_us(self, column: str, now_us: int) -> int | None:
        """Return the first time in a column after now; NEVER is no time, and free rows hold zero."""
        times = self.rows.ints[column]
        first = int(times.min(where=times > now_us, initial=NEVER))
        return first if first < NEVER else None

    def of_level(self, now_us: int) -> Ints:
        """Return the level of each row now, in the orders that count service."""
        return np.array(self.levels, np.int64).searchsorted(self.served(now_us), side="right").astype(np.int64)

    def lost_us(self, level: int) -> Ints:
        """Return when each row loses its turn to jobs of a level; 0 of a free row.

        Its time slice is over then, and it is on a worse level. The level of an overdue job is -1.
        """
        return self.rows.ints[self._lost_name(level)]

    def _lost_name(self, level: int) -> str:
        return "slice_ends_us" if level < 0 else _lost(self.levels[level])

    def next_lost_us(self, now_us: int, levels: Iterable[int]) -> int:
        """Return when an attempt loses its turn next to jobs of one of these levels; NEVER if none does."""
        names = tuple([self._lost_name(level) for level in levels if level < len(self.levels)])
        return self.rows.first_after(names, now_us) if names else NEVER

    def has_lost(self, level: int, now_us: int) -> bool:
        """Return whether an attempt has lost its turn to jobs of a level."""
        if level >= len(self.levels):
            return False
        return bool(np.count_nonzero(self.rows.flags["live"] & (self.lost_us(level) <= now_us)))

    def next_movable_us(self, now_us: int, gpus: int) -> int:
        """Return when the time slice of the next attempt of up to so many GPUs ends: it may move then; NEVER: none."""
        ends, rows = self.rows.ints["slice_ends_us"], self.rows
        movable = (ends > now_us) & (rows.ints["gpus"] <= gpus) & rows.flags["saves"]
        return int(ends.min(where=movable, initial=NEVER))

    def at_risk_us(self, now_us: int) -> Ints:
        """Return the work of each row that no durable checkpoint holds (`loss.work_at_risk_us`)."""
        rows = self.rows.ints
        since_us = np.maximum(0, now_us - rows["work_from_us"])
        past_us = np.maximum(0, since_us - rows["restart_us"] - rows["save_us"])
        every_us = rows["every_us"]
        written_us = past_us // np.maximum(1, every_us) * every_us
        return np.where(self.rows.flags["silent"], since_us - written_us, since_us)

    def is_kept(self, job_id: JobId, now_us: int, policy: Policy) -> bool:
        """Return whether an attempt would lose its place now but for the wait for its next checkpoint."""
        row = self.row_of.get(job_id)
        awaited = row is not None and policy.takes_turns and bool(self.rows.flags["awaited"][row])
        return awaited and bool(self.kept_until_us(now_us, policy)[row] > now_us)

    def kept_until_us(self, now_us: int, policy: Policy) -> Ints:
        """Return the time until which each row keeps its place although its turn is over; 0: it is not kept.

        An attempt that cannot save in its grace period is kept until its next checkpoint is durable, if the wait is
        shorter than the work that it would lose, and the checkpoint is due within an interval and a time slice after
        the end of its turn. The wait ends when that checkpoint is due, so a further level makes no job wait longer.
        """
        rows, awaited = self.rows.ints, self.rows.flags["awaited"]
        if not (policy.awaits_checkpoint and counts_service(policy) and self.awaited):
            return np.zeros(self.rows.size, np.int64)
        since_us = now_us - rows["work_from_us"]
        left_us = rows["every_us"] + rows["restart_us"] + rows["save_us"] - since_us
        served = self.served(now_us)
        levels = self.of_level(now_us)
        below = served - np.array((0, *self.levels), np.int64)[levels]
        pace = self.rows.floats["pace"]
        on_level_us = (below / np.where(pace > 0, pace, 1)).astype(np.int64)
        over_us = np.maximum(rows["slice_ends_us"], now_us - on_level_us)
        longest_us = np.minimum(rows["every_us"], policy.time_slice_us)
        is_kept = awaited & (levels > 0) & (over_us <= now_us) & (left_us > 0) & (left_us < since_us)
        return np.where(is_kept & (now_us + left_us <= over_us + longest_us), now_us + left_us, 0)

    def served(self, now_us: int) -> Ints:
        """Return the value behind the standing of each row now: GPU time received, in the orders that count it."""
        rows = self.rows.ints
        received = self.rows.floats["pace"] * np.maximum(0, now_us - rows["placed_us"])
        return rows["value"] + received.astype(np.int64)

    def of_queues(self, names: frozenset[str]) -> Mask:
        """Return for each row whether its job waits in one of these queues."""
        named = np.array([name in names for name in self.queues], np.bool_)  # by their numbers
        return named[self.rows.ints["queue"]]

    def row(self, job_id: JobId) -> dict[str, Cell]:
        """Return the values with which `add` makes the row of an attempt again."""
        row = self.row_of[job_id]
        return {name: self.rows.arrays[name][row].item() for name in _ROW if name not in ("live", "queue")}

    def value(self) -> object:
        """Return a deep copy, to compare; numbers of rows, queues and nodes do not count."""
        queues, names, arrays = list(self.queues), self._nodes.names, self.rows.arrays
        rows = {
            job_id: {name: arrays[name][row] for name in _ROW} | {"queue": queues[int(arrays["queue"][row])]}
            for job_id, row in self.row_of.items()
        }
        lease = self.leases.arrays
        leases = {
            job_id: sorted((names[int(lease["node"][each])], int(lease["gpus"][each])) for each in found)
            for job_id, found in self._lease_rows.items()
        }
        return rows, leases


@lru_cache(maxsize=64)
def _lost(bound_gpu_us: int) -> str:
    """Return the name of the column of `Running.lost_us` for the level that ends there."""
    return f"lost_{bound_gpu_us}_us"


def row_values(
    policy: Policy, record: JobRecord, attempt: Attempt, left_us: int | None, overdue_until_us: int | None
) -> dict[str, Cell]:
    """Return the row of an attempt without its queue.

    Args:
        policy: the rules of the order.
        record, attempt: the job, and its attempt.
        left_us: the run time that it has left; None: not known.
        overdue_until_us: its own tier does not preempt it until then; None: it is not overdue.
    """
    job, placed_us, gpu_milli = attempt.job, attempt.placed_us, attempt.gpu_milli
    value, rate = pace(policy, gpu_milli, record.served_gpu_us, left_us)
    exempt = is_exempt(record)
    slice_ends_us = placed_us + (policy.time_slice_us if attempt.epoch > 1 else 0)
    return {
        "gpus": attempt.gpus,
        "gpu_milli": gpu_milli,
        "tier": level(job.tier),
        "priority": job.priority,
        "value": value,
        "pace": rate,
        "placed_us": placed_us,
        "min_run_ends_us": NEVER if exempt else min_run_ends_us(attempt),
        "slice_ends_us": NEVER if exempt else max(slice_ends_us, overdue_until_us or 0),
        "overdue": overdue_until_us is not None,
        "ends_us": _ends_us(attempt, left_us),
        "rate": attempt.micro_usd_per_hour,
        "work_from_us": NEVER if attempt.started_us is None else max(attempt.started_us, attempt.captured_us or 0),
        "silent": job.protected and attempt.captured_us is None and job.checkpoint_every_us > 0,
        "saves": job.protected and job.grace_us >= job.save_us,
        "save_us": job.save_us,
        "awaited": job.protected and job.grace_us < job.save_us and job.checkpoint_every_us > 0,
        "restart_us": job.restart_us,
        "every_us": max(0, job.checkpoint_every_us),
    }


def is_exempt(record: JobRecord) -> bool:
    """Return whether a job was preempted as often as it allows."""
    return record.job.preemptions_max is not None and record.preemptions >= record.job.preemptions_max


def min_run_us(job: Job, epoch: int) -> int:
    """Return the least run time before a preemption; 0 for a first attempt, which has no restart to waste."""
    return job.min_run_us if epoch > 1 else 0


def min_run_ends_us(attempt: Attempt) -> int:
    """Return the time after which another tier may preempt an attempt."""
    min_us = min_run_us(attempt.job, attempt.epoch)
    if min_us <= 0:
        return 0
    return NEVER if attempt.started_us is None else attempt.started_us + min_us


def _ends_us(attempt: Attempt, left_us: int | None) -> int:
    """Return the end of an attempt by its limit, or by its estimate; NEVER if neither is known."""
    ends = NEVER if attempt.limit_at_us is None else attempt.limit_at_us + attempt.job.grace_us
    return ends if left_us is None else min(ends, attempt.placed_us + left_us)
