"""The tree of queues with their holdings: admission, victims by quota, and the order of queues.

`State` owns one `Quotas` and alone changes it. `put` and `take`, `leave` and `stay`, `resize` and its opposite undo
each other exactly, in time that grows with the depth of the tree alone; `QueuesSet` makes a new one (`regrouped`).

The cluster stands above the outermost queues, and its quota is all GPUs: a queue that holds more than its quota has
borrowed it. A queue that does not lend counts as holding its quota even while it does not. docs/design/queues.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from cordee.events import Budget, Job, Queue
from cordee.schedule.quota import bounds
from cordee.schedule.quota.bounds import Bound, Refusal, milli, show_gpus
from cordee.schedule.quota.budgets import BudgetKey, Budgets, SavedBudgets, changed, rebuilt
from cordee.schedule.quota.day import DAY_US, Day, Pair
from cordee.schedule.quota.decay import Decay
from cordee.schedule.quota.held import MILLI, NOTHING, Borrowed, Held, Holder, count
from cordee.schedule.quota.queues import DEFAULT
from cordee.schedule.quota.tree import has_rules, leaf_of, net, occupied, over_quota, set_occupied, upward
from cordee.schedule.quota.victims import VictimFilter
from cordee.units import US_PER_HOUR

HALF_LIFE_US = 7 * DAY_US
"""The time after which GPUs that a queue borrowed count half in the order of queues."""

PAST_WEIGHT = 4
"""The weight of the decayed average of a queue's borrowed GPUs against those that it borrows now."""

SHARE = 10**9
"""The whole cluster in `Quotas.share`."""

_CLUSTER = "the cluster"
Vacated = Sequence[tuple[str, int]]
"""Queues, and the GPUs of their jobs that leave."""

_Key = tuple[str, str, int]  # the queue that a job names, its owner, its grace period


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrower:
    """A queue that must give back; `distance` 1 is a sibling of the job's queue, 2 one of its parent's, ..."""

    queue: str
    over_milli: int
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A queue's holdings as they are shown.

    Attributes:
        lends_milli: the unused part of its quota that others may use.
        share: its borrowed GPUs by its weight, in billionths of the cluster: the queue with the least goes first.
        users: each user's GPUs.
        day_gpu_us, day_micro_usd: used within the last day; None without a limit.
    """

    queue: Queue
    depth: int
    held_milli: int
    borrowed_milli: int
    lends_milli: int
    share: int
    users: tuple[tuple[str, int], ...]
    day_gpu_us: int | None
    day_micro_usd: int | None


@dataclass(slots=True)
class _Assumed:
    """GPUs of assumed jobs (their place is known, and victims hold a part of it) by queue; empty between cycles.

    Attributes:
        held: all their GPUs, counted as held already.
        awaited: the part that is being vacated.
        vacated: that part by the queues of the leaving jobs, where it counts as well.
    """

    held: dict[str, int] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    vacated: dict[str, int] = field(default_factory=dict)


class _Rules(NamedTuple):
    """Properties of the queues alone: whether any has a rule, keeps its unused quota from others, or has a day."""

    some: bool
    kept: bool
    days: bool


class SavedQuotas(NamedTuple):
    """The saved form of a tree of queues. `own` is of the leaves of queues that have others inside."""

    queues: tuple[Queue, ...]
    half_life_us: int
    offered: Held
    origin_us: int | None
    held: dict[_Key, Held]
    leaving: dict[str, int]
    moves: list[tuple[int, _Key, Held]]
    borrowed: dict[str, Borrowed]
    own: dict[str, Borrowed]
    days: dict[str, Day]
    budgets: SavedBudgets


class Quotas:
    """The tree of queues with their holdings."""

    def __init__(self, queues: Iterable[Queue] = (), *, half_life_us: int = HALF_LIFE_US) -> None:
        """Start with no holdings. `queues.check` accepts the queues; `default` is added if it is missing."""
        self.queues = tuple(sorted(queues, key=lambda queue: queue.name))
        self.half_life_us = half_life_us
        self.offered = NOTHING  # resources of all nodes that stay
        self._clock: Decay | None = None
        self._held: dict[_Key, Held] = {}
        self._leaving: dict[str, int] = {}  # by the queue that jobs name
        self._assumed = _Assumed()
        self._moves: list[tuple[int, _Key, Held]] = []  # of the last day at least
        self._over: dict[tuple[Holder, int], list[Borrower]] = {}  # beside a queue, until a holding changes
        self._cluster = Holder(Queue(name=_CLUSTER), None)
        self._holders: dict[str, Holder] = {}
        named = {queue.name: queue for queue in self.queues}
        named.setdefault(DEFAULT, Queue(name=DEFAULT))
        for queue in named.values():
            self._grow(queue, named)
        self._rules = _Rules(
            some=any(has_rules(queue) for queue in named.values()),
            kept=any(not queue.lend for queue in named.values()),
            days=any(holder.day is not None for holder in self._holders.values()),
        )
        self.budgets = Budgets()
        self._leaves = {name: leaf_of(holder) for name, holder in self._holders.items()}
        set_occupied(self._cluster)

    def _grow(self, queue: Queue, named: dict[str, Queue]) -> Holder:
        if queue.name not in self._holders:
            parent = self._cluster if queue.parent is None else self._grow(named[queue.parent], named)
            self._holders[queue.name] = Holder(queue, parent)
        return self._holders[queue.name]

    @property
    def rules(self) -> bool:
        """Return whether a rule may keep a job from starting or from preempting another."""
        return self._rules.some or self.budgets.hard

    @property
    def refuses(self) -> bool:
        """Return whether jobs are asked about before they start."""
        return bool(self.queues) or self.budgets.hard

    @property
    def counts_time(self) -> bool:
        """Return whether use over time may end something: a day, or a budget."""
        return self._rules.days or bool(self.budgets.kept)

    @property
    def held_milli(self) -> int:
        """Return the thousandths of GPUs that jobs hold, those that leave included."""
        return self._cluster.held

    def leaf(self, queue: str) -> Holder:
        """Return the holder in which jobs that name this queue are counted."""
        return self._leaves.get(queue) or self._leaves[DEFAULT]

    # -- changes ---------------------------------------------------------------------------------------------

    def resize(self, more: Held, at_us: int) -> None:
        """Let the nodes that stay offer more (less, if negative); the opposite undoes it."""
        if self._clock is None:
            self._clock = Decay(self.half_life_us, at_us)
        self.offered = self.offered.plus(more)

    def put(self, job: Job, held: Held, at_us: int) -> None:
        """Add holdings to a job; `take` of the same at the same time undoes it."""
        self._move((job.queue, job.owner, job.grace_us), held, at_us)

    def take(self, job: Job, held: Held, at_us: int) -> None:
        """Take holdings from a job; `put` of the same at the same time undoes it."""
        self._move((job.queue, job.owner, job.grace_us), held.negated(), at_us)

    def assume(self, job: Job, held: Held, at_us: int, vacated: Vacated = ()) -> None:
        """Count the future holdings of a job that waits for its victims, inside a cycle, against the jobs behind it.

        `withdraw` undoes it. An assumed job does not use the quota that a queue keeps: a job refused for it stays so.
        `vacated` is the part of it that leaving jobs of these queues still hold.
        """
        self._count_assumed(job, held, at_us, vacated, +1)

    def withdraw(self, job: Job, held: Held, at_us: int, vacated: Vacated = ()) -> None:
        """Count an assumed job no longer; `assume` undoes it."""
        self._count_assumed(job, held, at_us, vacated, -1)

    def _count_assumed(self, job: Job, held: Held, at_us: int, vacated: Vacated, sign: int) -> None:
        counted = held if sign > 0 else held.negated()
        self._count((job.queue, job.owner, job.grace_us), counted, at_us, self._reading(at_us))  # not a move: it ends
        count(self._assumed.held, job.queue, sign * held.gpu_milli)
        for queue, left_milli in vacated:
            count(self._assumed.awaited, job.queue, sign * left_milli)
            count(self._assumed.vacated, queue, sign * left_milli)

    def leave(self, job: Job, gpu_milli: int) -> None:
        """Give notice to this part of a job's holdings: it no longer counts as borrowed. `stay` undoes it."""
        self._leave(job.queue, gpu_milli)

    def stay(self, job: Job, gpu_milli: int) -> None:
        """End the notice of this part, after its `take`. `leave` undoes it."""
        self._leave(job.queue, -gpu_milli)

    def forget(self) -> None:
        """Drop moves older than a day before the newest one; it cannot be undone, so never inside `what_if`."""
        if len(self._moves) > 64 and self._moves[len(self._moves) // 2][0] < self._since_us():
            newest_us, since_us = self._moves[-1][0], self._since_us()
            self._moves = [move for move in self._moves if move[0] >= since_us]
            for holder in self._holders.values():
                if holder.day is not None:
                    holder.day.forget(newest_us)

    def _since_us(self) -> int:
        """Return the time a day before the newest move; `forget` keeps all moves since then."""
        return self._moves[-1][0] - DAY_US if self._moves else 0

    def regrouped(self, queues: Iterable[Queue], at_us: int) -> "Quotas":
        """Return the same holdings and use under other queues. This object stays as it is."""
        new = Quotas(queues, half_life_us=self.half_life_us)
        new.offered, new._clock = self.offered, self._clock
        clock = self._clock.at(at_us) if self._clock else 0
        for ours, theirs in ((self._holders, new._holders), (self._leaves, new._leaves)):
            for name, holder in theirs.items():
                if name in ours:
                    holder.borrowed.inherit(ours[name].borrowed, clock)
        before = dict(self._held)
        for _, key, held in self._moves:
            before[key] = before.get(key, NOTHING).less(held)
        # Holdings from before the first known move lasted all day: forgotten moves are older than that.
        first_us = min(self._moves[0][0] if self._moves else at_us, at_us - DAY_US)
        for key in sorted(before):
            new._count(key, before[key], first_us, clock)
        for moved_us, key, held in self._moves:
            new._count(key, held, moved_us, clock)
        new._moves = list(self._moves)
        for name, gpu_milli in self._leaving.items():
            new._leave(name, gpu_milli)
        new.budgets = new._rebuilt(self.budgets.saved(), at_us)
        return new

    def budgeted(self, key: BudgetKey, budget: Budget | None, at_us: int) -> "Quotas":
        """Return the same with a budget set, or removed if it is None. This object stays as it is."""
        new = self.copied()
        used, kept = self.budgets.saved()
        new.budgets = new._rebuilt(SavedBudgets(used, changed(kept, key, budget)), at_us)
        return new

    def _rebuilt(self, saved: SavedBudgets, at_us: int) -> Budgets:
        return rebuilt(saved, self._held, lambda queue: self.leaf(queue).path, at_us)

    def copied(self) -> "Quotas":
        """Return a copy for a second owner; frozen values are shared."""
        shared = (self._held, self._leaving, self._moves, self.budgets.used)
        return deepcopy(self, {id(each): each.copy() for each in shared})

    def saved(self) -> SavedQuotas:
        """Return the saved form; it shares this object's values, so encode it before the next change."""
        return SavedQuotas(
            queues=self.queues,
            half_life_us=self.half_life_us,
            offered=self.offered,
            origin_us=None if self._clock is None else self._clock.origin_us,
            held=self._held,
            leaving=self._leaving,
            moves=self._moves,
            borrowed={name: holder.borrowed for name, holder in self._holders.items()},
            own={name: leaf.borrowed for name, leaf in self._leaves.items()},
            days={name: holder.day for name, holder in self._holders.items() if holder.day is not None},
            budgets=self.budgets.saved(),
        )

    @classmethod
    def restored(cls, saved: SavedQuotas) -> "Quotas":
        """Return the tree that was saved."""
        new = cls(saved.queues, half_life_us=saved.half_life_us)
        new.offered, new._moves = saved.offered, saved.moves
        new._clock = None if saved.origin_us is None else Decay(saved.half_life_us, saved.origin_us)
        for key, held in saved.held.items():
            new._count(key, held, 0, 0)
        for name, gpu_milli in saved.leaving.items():
            new._leave(name, gpu_milli)
        # The past of a queue does not follow from its holdings.
        for name, holder in new._holders.items():
            new._leaves[name].borrowed, holder.borrowed = saved.own[name], saved.borrowed[name]
            holder.day = saved.days.get(name)
        newest_us = max((each.month_us for each in saved.budgets.used.values()), default=0)
        new.budgets = new._rebuilt(saved.budgets, newest_us)
        return new

    def _leave(self, queue: str, gpu_milli: int) -> None:
        count(self._leaving, queue, gpu_milli)
        path = self.leaf(queue).path
        for holder in path:
            holder.leaving += gpu_milli
        self._net(path, -gpu_milli)

    def _move(self, key: _Key, held: Held, at_us: int) -> None:
        self._count(key, held, at_us, self._reading(at_us))
        # An undo is the opposite move at the same time, so there is one move of each key at one time.
        at = len(self._moves) - 1
        while at >= 0 and self._moves[at][0] == at_us:
            if self._moves[at][1] == key:
                held = self._moves.pop(at)[2].plus(held)
                break
            at -= 1
        if held != NOTHING:
            self._moves.append((at_us, key, held))

    def _count(self, key: _Key, held: Held, at_us: int, clock: int) -> None:
        queue, owner, grace_us = key
        now = self._held.get(key, NOTHING).plus(held)
        if now != NOTHING:
            self._held[key] = now
        else:
            self._held.pop(key, None)
        path, more = self.leaf(queue).path, held.gpu_milli
        for holder in path:
            holder.move(owner, grace_us, held, clock, at_us)
            holder.inner += more
            before, holder.occupied = holder.occupied, holder.occupied_with(holder.inner)
            more = holder.occupied - before
        self._net(path, held.gpu_milli)
        self.budgets.move((queue, owner), path, grace_us, held, at_us)

    def _net(self, path: Sequence[Holder], gpu_milli: int) -> None:
        net(path, gpu_milli)
        self._over.clear()

    def _reading(self, at_us: int) -> int:
        assert self._clock is not None, "a cluster without nodes holds nothing"
        return self._clock.at(at_us)

    # -- queries ---------------------------------------------------------------------------------------------

    def admits(self, job: Job, now_us: int, gpus: int | None = None) -> Refusal | None:
        """Return the refusal of a job on `gpus` GPUs (None: those it asks for); None if it may start.

        Free GPUs are not considered.
        """
        more = milli(job, gpus)
        path = self.leaf(job.queue).path
        for holder in path[:-1]:
            refusal = bounds.limit(holder, more) or bounds.user_limit(holder, job.owner, more)
            refusal = refusal or bounds.day(holder, job, more, self._average(), now_us)
            if refusal is not None:
                return refusal
        for each in self.budgets.of((job.queue, job.owner), path):
            refusal = each.refusal(job, more, self._average(), now_us) if each.budget.hard else None
            if refusal is not None:
                return refusal
        return self._kept(job, path, more) if self._rules.kept else None

    def never(self, job: Job, gpus: int | None = None) -> str | None:
        """Return the rule by which the job can never start, even on an empty cluster; None if there is none."""
        more = milli(job, gpus)
        for holder in self.leaf(job.queue).path[:-1]:
            rule = bounds.never(holder, job, more, self._average())
            if rule is not None:
                return rule
        for each in self.budgets.of((job.queue, job.owner), self.leaf(job.queue).path):
            rule = each.never(job, more, self._average()) if each.budget.hard else None
            if rule is not None:
                return rule
        return None

    def most_of_day(self, job: Job, used: Pair) -> str | None:
        """Return the amount and the limit if an attempt used most of its queue's day, or of one above; else None."""
        found = (bounds.most_of_day(holder, used) for holder in self.leaf(job.queue).path[:-1])
        return next((each for each in found if each is not None), None)

    def entitled(self, job: Job, gpus: int | None = None) -> bool:
        """Return whether its queue, or one above it, stays inside its quota if it starts: then it takes back."""
        added = upward(self.leaf(job.queue).path[:-1], milli(job, gpus))
        return any(holder.net + more <= holder.quota for holder, more in added)

    def victims(self, job: Job, refusal: Refusal | None = None, gpus: int | None = None) -> VictimFilter:
        """Return the filter of jobs that it may preempt; with a refusal, of those that help to lift it."""
        path = self.leaf(job.queue).path
        inside = {holder: holder.net + more <= holder.quota for holder, more in upward(path, milli(job, gpus))}
        return VictimFilter(path, inside, refusal, job.owner, self.leaf)

    def borrowers(self, job: Job, gpus: int | None = None) -> tuple[Borrower, ...]:
        """Return the queues from which it may take back GPUs: nearest first, then most over quota, then by name."""
        found = list[Borrower]()
        added = upward(self.leaf(job.queue).path, milli(job, gpus))
        for distance, ((holder, more), (parent, _)) in enumerate(pairwise(added), start=1):
            if holder.net + more <= holder.quota:
                if (holder, distance) not in self._over:
                    others = [each for each in parent.inside if each is not holder]
                    over = sorted((-each.net + each.quota, each.queue.name) for each in over_quota(others))
                    borrowers = [Borrower(queue=name, over_milli=-under, distance=distance) for under, name in over]
                    self._over[holder, distance] = borrowers
                found += self._over[holder, distance]
        return tuple(found)

    def share(self, queue: str, now_us: int) -> tuple[int, ...]:
        """Return the key that orders queues, the smallest first: a pair for each level from the outermost down.

        At each level: first queues inside their quota, then by the fraction of the cluster's GPUs, CPU or memory that
        is borrowed (the largest of them), by weight, now and on the decayed average.
        """
        clock, key = self._clock.at(now_us) if self._clock else 0, list[int]()
        for holder in reversed(self.leaf(queue).path[:-1]):
            key += (holder.staying >= holder.quota, self._share(holder, clock))
        return tuple(key)

    def spent(self, job: Job, now_us: int) -> bool:
        """Return whether a day or a budget is used up within the job's grace period, so that it gets notice now."""
        path = self.leaf(job.queue).path
        return any(
            holder.day.used(now_us)[rule.which] + bounds.pace(holder, rule.which) * job.grace_us >= rule.most
            for holder in path
            if holder.day is not None
            for rule in bounds.day_limits(holder)
        ) or any(each.is_spent(job.grace_us, now_us) for each in self.budgets.of((job.queue, job.owner), path))

    def wake_us(self, now_us: int) -> int | None:
        """Return when the next running jobs are `spent`, or a part of a budget, if no holding changes; None: never."""
        times = [
            holder.day.crosses_us(
                rule.which, rule.most - bounds.pace(holder, rule.which) * grace_us, now_us, falling=False
            )
            for holder in self._holders.values()
            if holder.day is not None
            for rule in bounds.day_limits(holder)
            for grace_us in holder.graces
        ]
        times.append(self.budgets.wake_us(now_us))
        # Jobs that are spent now have notice already, and hold their GPUs until they have left.
        return min((at_us for at_us in times if at_us is not None and at_us > now_us), default=None)

    def standings(self, now_us: int) -> tuple[Standing, ...]:
        """Return every queue, outer ones first, otherwise by name."""
        clock = self._clock.at(now_us) if self._clock else 1

        def below(holder: Holder, depth: int) -> Iterator[Standing]:
            for each in sorted(holder.inside, key=lambda inner: inner.queue.name):
                if self._holders.get(each.queue.name) is each:
                    yield self._standing(each, depth, clock, now_us)
                    yield from below(each, depth + 1)

        return tuple(below(self._cluster, 0))

    def _standing(self, holder: Holder, depth: int, clock: int, now_us: int) -> Standing:
        used = None if holder.day is None else holder.day.used(now_us)
        return Standing(
            queue=holder.queue,
            depth=depth,
            held_milli=holder.held,
            borrowed_milli=max(0, holder.held - holder.quota),
            lends_milli=max(0, holder.quota - holder.held) if holder.queue.lend else 0,
            share=self._share(holder, clock),
            users=tuple(sorted(holder.users.items())),
            day_gpu_us=None if used is None else used[0] // MILLI,
            day_micro_usd=None if used is None else used[1] // (MILLI * US_PER_HOUR),
        )

    def value(self) -> object:
        """Return a deep copy as plain values, to compare."""
        since_us = self._since_us()
        holders = {name: holder.value(since_us) for name, holder in self._holders.items()}
        own = {name: leaf.value(since_us) for name, leaf in self._leaves.items() if leaf is not self._holders[name]}
        moves = tuple(sorted((move for move in self._moves if move[0] >= since_us), key=lambda move: move[:2]))
        held = (dict(self._held), dict(self._leaving))
        return (self.queues, self.offered, held, moves, holders, own, self.budgets.value())

    def _kept(self, job: Job, path: tuple[Holder, ...], more: int) -> Refusal | None:
        """Return a refusal if it needs GPUs that non-lending queues keep."""
        offered = self.offered.gpu_milli
        if occupied(path, more, now=True) <= offered or (kept := self._unused(path, more)) <= 0:
            return None
        # GPUs that are being vacated count twice: they are either still with the victim, or already with the preemptor.
        counts_once = (self._without(each, now=True) for each in (self._assumed.awaited, self._assumed.vacated))
        if self._assumed.vacated and all(occupied(path, more, gone, now=True) <= offered for gone in counts_once):
            return None
        text = f"it needs {show_gpus(more)} GPUs; {show_gpus(self._cluster.held - sum(self._assumed.vacated.values()))}"
        text += f" of {show_gpus(offered)} are held, and {show_gpus(kept)} are kept by queues that do not lend"
        short = occupied(path, more) - self.offered.gpu_milli
        return Refusal(bound=Bound.KEPT, queue=job.queue, text=text, short_milli=short)

    def _unused(self, path: tuple[Holder, ...], more: int) -> int:
        """Return the quota that queues keep unused after `more` is held here and jobs with notice have left.

        GPUs of assumed jobs are not used yet.
        """
        held = self._cluster.staying + more - sum(self._assumed.held.values())
        return occupied(path, more, self._without(self._assumed.held)) - held

    def _without(self, amounts: Mapping[str, int], *, now: bool = False) -> dict[Holder, int]:
        """Return the part of these amounts that each queue holds or keeps; they are keyed by the queues of jobs."""
        gone = dict[Holder, int]()
        for queue, gpu_milli in sorted(amounts.items()):
            for holder, less in upward(self.leaf(queue).path, -gpu_milli, gone, now=now):
                gone[holder] = gone.get(holder, 0) - less
        return gone

    def _average(self) -> int:
        """Return the nano-dollars per hour of a thousandth of a GPU."""
        return self.offered.nano_usd_per_hour // self.offered.gpu_milli if self.offered.gpu_milli > 0 else 0

    def _share(self, holder: Holder, clock: int) -> int:
        """Return the fraction borrowed of the resource that it borrowed most of, by weight: now and on average."""
        past = clock - self._clock.begin if self._clock else 0
        offers = (self.offered.gpu_milli, self.offered.cpu_milli, self.offered.memory_bytes)
        parts = (
            (rate + (base + rate * clock) * PAST_WEIGHT // past if past else rate * (1 + PAST_WEIGHT)) * SHARE // offer
            for base, rate, offer in zip(holder.borrowed.base, holder.borrowed.rate, offers, strict=True)
            if offer > 0
        )
        return max(parts, default=0) // (holder.queue.weight * (1 + PAST_WEIGHT))
