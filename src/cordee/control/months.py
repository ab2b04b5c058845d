"""Costs of a stretch of time: by user, queue, job and model, with what was idle beside it.

An attempt that lies in two months is divided by its time in each, every class alike; its sum is exact while it holds
all of its leases. Retired jobs are read from the archive once, and old segments of the log once, for the nodes.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from cordee.account.attempt import AttemptRow
from cordee.account.chargeback import About, ChargeKey, ChargeLine, add_line, charge_lines, held_lines
from cordee.control.access import Access
from cordee.control.operations import Operations
from cordee.control.snapshot import decoded_jobs
from cordee.control.store import tables
from cordee.event_json import decode
from cordee.events import Event, NodeCordoned, NodeDown, NodeReclaimed, NodeUncordoned, NodeUp, Queue, QueuesSet
from cordee.schedule.quota.queues import DEFAULT
from cordee.units import US_PER_DAY, US_PER_HOUR, US_PER_S
from cordee.view.markup import CLASSES

NODE_EVENTS = (NodeUp, NodeDown, NodeCordoned, NodeUncordoned, NodeReclaimed)
_KEPT = (*NODE_EVENTS, QueuesSet)
_KINDS = tuple(each.__name__ for each in _KEPT)
_MARKERS = tuple(f'"kind": "{kind}"' for kind in _KINDS)
_PAGE = 5_000
_FEW = 100  # retired jobs that are read one by one


class Span(NamedTuple):
    """A stretch of time, and the month that it is."""

    from_us: int
    to_us: int
    name: str

    @classmethod
    def month(cls, name: str) -> "Span":
        """Return a month of UTC.

        Raises:
            ValueError: it is none.

        >>> Span.month("1970-01").to_us // 86_400_000_000
        31
        """
        first = datetime.strptime(name, "%Y-%m").replace(tzinfo=UTC)
        after = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
        return cls(_us(first), _us(after), f"{first:%Y-%m}")

    @classmethod
    def containing(cls, at_us: int) -> "Span":
        """Return the month of a moment."""
        return cls.month(f"{datetime.fromtimestamp(at_us / US_PER_S, UTC):%Y-%m}")

    @property
    def lasts_us(self) -> int:
        """Return its length."""
        return self.to_us - self.from_us

    def before(self) -> "Span":
        """Return the month before."""
        return Span.containing(self.from_us - 1)

    def part_of(self, from_us: int, to_us: int) -> float:
        """Return the fraction of a stretch that lies within this one."""
        if to_us <= from_us:
            return float(self.from_us <= from_us < self.to_us)
        return max(0, min(to_us, self.to_us) - max(from_us, self.from_us)) / (to_us - from_us)


@dataclass(slots=True)
class Amounts:
    """GPU time and money by class."""

    gpu_us: dict[str, int] = field(default_factory=dict)
    micro_usd: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    jobs: set[str] = field(default_factory=set)

    def add(self, row: AttemptRow, part: float) -> None:
        """Add a part of an attempt."""
        for name in CLASSES:
            for mine, amount in ((self.gpu_us, row.gpu_us), (self.micro_usd, row.micro_usd)):
                if value := getattr(amount, name):
                    mine[name] = mine.get(name, 0) + round(value * part)
        self.tokens += round(row.tokens * part)
        self.jobs.add(row.job_id)

    @property
    def held_us(self) -> int:
        """Return the sum of GPU time."""
        return sum(self.gpu_us.values())

    @property
    def paid(self) -> int:
        """Return the sum of micro-dollars."""
        return sum(self.micro_usd.values())


class Lost(NamedTuple):
    """Money that was lost: whose it was, by which cause, and for whose sake."""

    owner: str
    cause: str
    payer: str
    micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a stretch of time.

    Attributes:
        span: the stretch, which may not be over.
        until_us: its end, or the present.
        by: the sums by each key.
        total: of all.
        lost: the losses, the largest first.
        days: micro-dollars held, and of the whole capacity, by day from the first.
        capacity_gpu_us, capacity_micro_usd: of all nodes while they were up, without GPUs that could not be leased.
        rate_of: the stretch whose rate is expected to go on.
        ahead_micro_usd: what will have been paid at the end, at that rate.
    """

    span: Span
    until_us: int
    by: Mapping[str, Mapping[str, Amounts]]
    total: Amounts
    lost: Sequence[Lost]
    days: Sequence[tuple[int, int]]
    capacity_gpu_us: int
    capacity_micro_usd: int
    rate_of: Span
    ahead_micro_usd: int

    @property
    def idle_micro_usd(self) -> int:
        """Return the price of what nobody held."""
        return max(0, self.capacity_micro_usd - self.total.paid)

    @property
    def idle_gpu_us(self) -> int:
        """Return the GPU time that nobody held."""
        return max(0, self.capacity_gpu_us - self.total.held_us)


class Books:
    """The accounts of all attempts and the times of all nodes, each of which is read from the database once."""

    def __init__(self, operations: Operations) -> None:
        self._operations, self._lock = operations, threading.Lock()
        self._retired: dict[str, list[AttemptRow]] = {}
        self._summed: set[str] = set()  # retired jobs that `_lines` hold
        self._lines: dict[ChargeKey, ChargeLine] = {}
        self._names: dict[str, str] = {}
        self._about: dict[str, About] = {}
        self._kept: list[Event] = []
        self._read = 0

    def node_events(self) -> list[Event]:
        """Return the events about nodes, oldest first."""
        return [event for event in self._events() if isinstance(event, NODE_EVENTS)]

    def queues_at(self, at_us: int) -> Sequence[Queue]:
        """Return the tree of queues at a time, which has the queue `default` too; nothing before the first was set."""
        trees = (event for event in reversed(self._events()) if isinstance(event, QueuesSet) and event.at_us <= at_us)
        if (found := next(trees, None)) is None:
            return ()
        return list({each.name: each for each in (Queue(name=DEFAULT), *found.queues)}.values())

    def first_us(self, now_us: int) -> int:
        """Return the time of the first event of a node, or now."""
        events = self.node_events()
        return events[0].at_us if events else now_us

    def recent(self, now_us: int) -> Span:
        """Return the stretch whose rate forecasts take: the last seven days, or since the first node joined."""
        return Span(max(self.first_us(now_us), now_us - 7 * US_PER_DAY), now_us, "")

    def rows(self, now_us: int) -> list[AttemptRow]:
        """Return the accounts of all attempts."""
        with self._lock:
            self._read_retired()
            rows, live = self._live(now_us)
            return [*rows, *(row for job_id, each in self._retired.items() if job_id not in live for row in each)]

    def charge_lines(self, now_us: int, *, divides_idle: bool = False) -> list[ChargeLine]:
        """Return the lines of the chargeback of all months; those of retired jobs are summed once."""
        about, idle = self.about(), self.idle_months(now_us)
        with self._lock:
            self._read_retired()
            rows, live = self._live(now_us)
            if not self._summed.isdisjoint(live):
                self._summed, self._lines = set(), {}
            new = self._retired.keys() - self._summed - live
            found = held_lines((row for job_id in new for row in self._retired[job_id]), about)
            for line in found.values():
                add_line(self._lines, line)
            self._summed |= new
            return charge_lines(rows, idle, about, now_us, divides_idle=divides_idle, others=self._lines)

    def _live(self, now_us: int) -> tuple[tuple[AttemptRow, ...], set[str]]:
        """Return the accounts of the jobs that are not retired, and those jobs."""
        with self._operations.control.changed:
            return self._operations.control.ledger.rows(now_us), set(self._operations.control.state.jobs)

    def _read_retired(self) -> None:
        store = self._operations.store
        if store.count(tables.retired) == len(self._retired):
            return
        known = {row["job_id"] for row in store.read(sa.select(tables.retired.c.job_id))}
        new = known - self._retired.keys()
        reads = [None] if len(new) > _FEW else sorted(new)
        bodies = {job_id: body for each in reads for job_id, body in store.archive.retired(each).items()}
        for job_id in new & bodies.keys():
            [job] = decoded_jobs([bodies[job_id]])
            self._retired[job_id] = list(job.accounts)

    def names(self) -> Mapping[str, str]:
        """Return the name of each job."""
        with self._lock:
            self._read_names()
            return dict(self._names)

    def about(self) -> dict[str, About]:
        """Return the project and the model of each job."""
        with self._lock:
            self._read_names()
            return dict(self._about)

    def _read_names(self) -> None:
        store, jobs = self._operations.store, tables.jobs
        if store.count(jobs) == len(self._names):
            return
        unknown = [row["job_id"] for row in store.read(sa.select(jobs.c.job_id)) if row["job_id"] not in self._names]
        for begin in range(0, len(unknown), 500):
            query = sa.select(jobs.c.job_id, jobs.c.name, jobs.c.spec)
            for row in store.read(query.where(jobs.c.job_id.in_(unknown[begin : begin + 500]))):
                self._names[row["job_id"]] = row["name"]
                self._about[row["job_id"]] = _about(row["spec"])

    def idle_months(self, now_us: int) -> dict[int, tuple[int, int]]:
        """Return what nobody held in each month, by its start: GPU-microseconds and micro-dollars."""
        with self._operations.control.changed:
            return self._operations.control.ledger.idle_months(now_us)

    def held_by_queue(self, span: Span, now_us: int) -> dict[str, int]:
        """Return the GPU time that each queue's own jobs held in a stretch of time."""
        found: dict[str, int] = {}
        for row in self.rows(now_us):
            self._operations.control.precedence.give_way()
            if part := span.part_of(row.placed_us, now_us if row.ended_us is None else row.ended_us):
                found[row.queue] = found.get(row.queue, 0) + round(row.gpu_us.held * part)
        return found

    def costs(self, span: Span, now_us: int, viewer: Access | None = None) -> Costs:
        """Return what was paid in a stretch of time, until now at most.

        Sums by user, queue, job and model, and losses, are of what the viewer may see, by default all; totals are of
        all. A job that may not be seen, for whose sake something was lost, is another user's.
        """
        rows, names, about = self.rows(now_us), self.names(), self.about()
        until_us = min(span.to_us, now_us)
        by: dict[str, dict[str, Amounts]] = {"user": {}, "queue": {}, "project": {}, "job": {}, "model": {}}
        total, lost = Amounts(), dict[tuple[str, str, str], int]()
        for row in rows:
            self._operations.control.precedence.give_way()
            part = span.part_of(row.placed_us, now_us if row.ended_us is None else row.ended_us)
            if not part:
                continue
            total.add(row, part)
            if viewer is not None and not viewer.sees(row):
                continue
            name = names.get(row.job_id, row.job_id)
            project, model = about.get(row.job_id, ("", ""))
            keys = {
                "user": row.owner,
                "queue": row.queue,
                "project": project or "no project named",
                "job": row.service or name,
                "model": model or "no model named",
            }
            for kind, key in keys.items():
                by[kind].setdefault(key, Amounts()).add(row, part)
            if row.cause is not None and row.micro_usd.lost:
                payer = "" if (job := row.charged) is None else job.owner if viewer is None else viewer.owner_of(job)
                key3 = (row.owner, row.cause, payer)
                lost[key3] = lost.get(key3, 0) + round(row.micro_usd.lost * part)
        capacity = list(self._capacity(span, until_us))
        recent = self.recent(until_us)
        recently = sum(
            row.micro_usd.held * recent.part_of(row.placed_us, now_us if row.ended_us is None else row.ended_us)
            for row in rows
        )
        return Costs(
            span=span,
            until_us=until_us,
            by={kind: dict(sorted(sums.items(), key=lambda each: -each[1].paid)) for kind, sums in by.items()},
            total=total,
            lost=[Lost(*key, each) for key, each in sorted(lost.items(), key=lambda each: -each[1])],
            days=list(_days(rows, capacity, span, until_us, now_us)),
            capacity_gpu_us=sum((to_us - from_us) * gpus for from_us, to_us, gpus, _ in capacity),
            capacity_micro_usd=sum(
                (to_us - from_us) * gpus * price // US_PER_HOUR for from_us, to_us, gpus, price in capacity
            ),
            rate_of=recent,
            ahead_micro_usd=total.paid + round(recently * (span.to_us - until_us) / max(1, recent.lasts_us)),
        )

    def _capacity(self, span: Span, until_us: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield stretches in which a node was up: from, to, GPUs, and micro-dollars of a GPU-hour."""
        up: dict[str, tuple[int, int, int]] = {}
        for event in [*self.node_events(), None]:
            at_us = until_us if event is None else min(event.at_us, until_us)
            names = list(up) if event is None else [name_in(event)]
            for name in names:
                if name in up and (event is None or isinstance(event, NodeUp | NodeDown)):
                    from_us, gpus, price = up.pop(name)
                    if max(from_us, span.from_us) < at_us:
                        yield max(from_us, span.from_us), at_us, gpus, price
            if isinstance(event, NodeUp):
                node = event.node
                up[node.name] = (event.at_us, node.gpus - len(node.unavailable), node.micro_usd_per_gpu_hour)

    def _events(self) -> list[Event]:
        with self._lock:
            self._read_log()
            return list(self._kept)

    def _read_log(self) -> None:
        store, newest = self._operations.store, self._operations.control.number
        while self._read < newest:
            log = tables.log
            query = sa.select(log.c.number, log.c.kind, log.c.body).where(log.c.number > self._read)
            rows = store.read(query.where(log.c.number <= self._read + _PAGE).order_by(log.c.number))
            if rows and rows[0]["number"] == self._read + 1:
                found = [(row["number"], row["body"]) for row in rows if row["kind"] in _KINDS]
                last = rows[-1]["number"]
            else:
                old = store.archive.rows_after(self._read)
                if not old:
                    return
                found = [(number, body) for number, body in old if any(marker in body for marker in _MARKERS)]
                last = old[-1][0]
            events = (decode(json.loads(body)) for _, body in found)
            self._kept += [each for each in events if isinstance(each, _KEPT)]
            self._read = last


def name_in(event: Event) -> str:
    """Return the name of the node that an event is about; "": about none."""
    return event.node.name if isinstance(event, NodeUp) else str(getattr(event, "node", ""))


def _days(
    rows: Iterable[AttemptRow],
    capacity: Iterable[tuple[int, int, int, int]],
    span: Span,
    until_us: int,
    now_us: int,
) -> Iterator[tuple[int, int]]:
    """Yield micro-dollars held, and of the capacity, of each day."""
    day_us = US_PER_DAY
    count = max(1, -(-(until_us - span.from_us) // day_us))
    held, offered = [0.0] * count, [0.0] * count
    for row in rows:
        ended_us = now_us if row.ended_us is None else row.ended_us
        for day, part in _parts_by_day(row.placed_us, ended_us, span.from_us, day_us, count):
            held[day] += row.micro_usd.held * part
    for from_us, to_us, gpus, price in capacity:
        paid = (to_us - from_us) * gpus * price / US_PER_HOUR
        for day, part in _parts_by_day(from_us, to_us, span.from_us, day_us, count):
            offered[day] += paid * part
    for day in range(count):
        yield round(held[day]), round(offered[day])


def _parts_by_day(from_us: int, to_us: int, first_us: int, day_us: int, count: int) -> Iterator[tuple[int, float]]:
    """Yield the days that a stretch touches, with the fraction of it in each."""
    if to_us <= first_us or to_us <= from_us:
        return
    for day in range(max(0, (from_us - first_us) // day_us), min(count, (to_us - 1 - first_us) // day_us + 1)):
        begin = first_us + day * day_us
        yield day, (min(to_us, begin + day_us) - max(from_us, begin)) / (to_us - from_us)


def _about(spec: str) -> About:
    found: Any = json.loads(spec)
    model = found.get("model") or {}
    service = found.get("service") or {}
    named = str(model.get("name") or model.get("config") or service.get("model") or "")
    return About(project=str(found.get("project") or ""), model=named)


def _us(time: datetime) -> int:
    return round(time.timestamp()) * US_PER_S
