"""Nodes: their leased, vacating and claimed GPUs, and the indexes of free ones."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from cordee.events import (
    Job,
    Lease,
    NodeCordoned,
    NodeDown,
    NodeReachable,
    NodeReclaimed,
    NodeUncordoned,
    NodeUnreachable,
    NodeUp,
    ReservationMade,
)
from cordee.schedule.placement.entry import Entry, Used, entry_of, mask_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.mix import Mix
from cordee.schedule.quota.held import NOTHING, Held, offered_by
from cordee.schedule.state.changes import Changes
from cordee.schedule.state.columns import NodeColumns
from cordee.schedule.state.journal import Journal
from cordee.schedule.state.records import NodeRecord
from cordee.units import US_PER_HOUR

_Entries = tuple[Entry | None, Entry | None, Entry | None]
_UNUSED = Used()

FLAPS = 3
"""After this number of failures within `FLAPS_WITHIN_US`, nothing is placed on a node for `QUARANTINE_US`."""

FLAPS_WITHIN_US = US_PER_HOUR
QUARANTINE_US = US_PER_HOUR

Resized = Callable[[Held, Held, int], None]
"""A function of the resources that a node offered before, those that it offers now, and the time."""


class Claimed(NamedTuple):
    """GPUs and MIG instances of a node that a cycle keeps for a job."""

    mask: int = 0  # of GPUs
    instances: tuple[Lease, ...] = ()

    def out_of(self, entry: Entry) -> Entry:
        """Return an entry without all this."""
        entry = entry.without(self.mask) if self.mask else entry
        return entry.holding(self.instances) if self.instances else entry


_NOT_CLAIMED = Claimed()


class Nodes:
    """All known nodes by name, with the indexes that placement reads; changed by `State` and by cycles only.

    Attributes:
        records: the nodes themselves.
        leased: the leased part of each node.
        vacating: leases of leaving attempts, by node.
        claimed: GPUs and MIG instances that a cycle keeps for a job; empty between cycles.
        earmarked: GPUs that are being vacated for a certain job, as a mask; not in `soon`; empty between cycles.
        went_down: (time of its failure, node), for failures less than the window before the newest one.
        quarantines: (end, node), ascending.
        free: the index of free GPUs.
        soon: the index of free GPUs and of those that are being vacated for no job.
        vacated: the index of free GPUs and of all that are being vacated.
        columns: the numbers of free and usable GPUs, as arrays.
    """

    def __init__(self, journal: Journal, changes: Changes, resized: Resized, mix: Mix | None = None) -> None:
        """Start without nodes; `mix` holds the shapes submitted so far."""
        self.records: dict[str, NodeRecord] = {}
        self.leased: dict[str, Used] = {}
        self.vacating: dict[str, tuple[tuple[Lease, Job], ...]] = {}
        self.claimed: dict[str, Claimed] = {}
        self.earmarked: dict[str, int] = {}
        self.went_down: dict[str, int] = {}
        self.quarantines: list[tuple[int, str]] = []
        self.free = FreeIndex(mix)
        self.soon = FreeIndex(self.free.mix)
        self.vacated = FreeIndex(self.free.mix)
        self.columns = NodeColumns()
        self._bare: dict[str, tuple[Entry, Entry]] = {}  # free, and free with vacating GPUs; claims not considered
        self._journal, self._changes, self._resized = journal, changes, resized

    # -- changes of nodes ------------------------------------------------------------------------------------

    def up(self, event: NodeUp) -> None:
        """Add a node, or describe it anew."""
        known = self.records.get(event.node.name)
        if known is None:
            self._set(NodeRecord(node=event.node), event.at_us)
        elif event.node.epoch >= known.node.epoch:
            # The same agent describes a change of its GPUs; the cloud's announcement still holds.
            same = event.node.epoch == known.node.epoch
            reclaimed_us = known.reclaimed_us if same else None
            record = replace(known, node=event.node, up=True, why="", reclaimed_us=reclaimed_us)
            self._set(replace(record, unreachable=known.unreachable and same), event.at_us)

    def down(self, event: NodeDown, *, expected: bool) -> None:
        """Take a node out of use until it is up again; quarantine it if it went down too often unexpectedly."""
        known = self.records.get(event.node)
        if known is None or event.epoch < known.node.epoch:
            return
        downs = known.downs
        if known.up and known.reclaimed_us is None and not expected:
            downs = (*(at_us for at_us in downs if at_us > event.at_us - FLAPS_WITHIN_US), event.at_us)
        until_us = known.quarantined_until_us
        if len(downs) >= FLAPS and downs != known.downs:
            if until_us:
                self._journal.remove(self.quarantines, (until_us, event.node))
            until_us = event.at_us + QUARANTINE_US
            self._journal.insert(self.quarantines, (until_us, event.node))
        if downs != known.downs:
            for name, at_us in list(self.went_down.items()):
                if at_us <= event.at_us - FLAPS_WITHIN_US:
                    self._journal.drop(self.went_down, name)
            self._journal.put(self.went_down, event.node, event.at_us)
        record = replace(known, up=False, unreachable=False, why=event.why, downs=downs)
        self._set(replace(record, quarantined_until_us=until_us), event.at_us)

    def heard(self, event: NodeUnreachable | NodeReachable) -> None:
        """Take a node out of use while its agent is silent."""
        known = self.records.get(event.node)
        if known is not None and known.up and event.epoch == known.node.epoch:
            self._set(replace(known, unreachable=isinstance(event, NodeUnreachable)), event.at_us)

    def reclaimed(self, event: NodeReclaimed) -> bool:
        """Mark a node that the cloud takes back; return whether its attempts have to leave."""
        known = self.records.get(event.node)
        if known is None or event.epoch != known.node.epoch:
            return False
        self._set(replace(known, reclaimed_us=event.deadline_us), event.at_us)
        return True

    def cordoned(self, event: NodeCordoned) -> bool:
        """Take a node out of use; return whether its attempts have to leave."""
        known = self.records.get(event.node)
        if known is None:
            return False
        record = replace(known, cordoned_by=event.by, cordon_why=event.why, drains=event.drain)
        self._set(replace(record, leave_us=event.leave_us), event.at_us)
        return event.drain or event.leave_us is not None

    def uncordoned(self, event: NodeUncordoned) -> None:
        """Put a cordoned node back into use."""
        known = self.records.get(event.node)
        if known is not None:
            self._set(replace(known, cordoned_by=None, cordon_why="", drains=False, leave_us=None), event.at_us)

    def reserve(self, name: str, reservation: ReservationMade, at_us: int) -> bool:
        """Keep a node for the jobs of a reservation; return whether it is known and was not kept for it already."""
        known = self.records.get(name)
        if known is None or reservation in known.reservations:
            return False
        self._set(replace(known, reservations=(*known.reservations, reservation)), at_us)
        return True

    def unreserve(self, reservation: ReservationMade, at_us: int) -> None:
        """Keep the nodes of a reservation for its jobs no longer."""
        for name in reservation.nodes:
            known = self.records.get(name)
            if known is not None and reservation in known.reservations:
                left = tuple(each for each in known.reservations if each != reservation)
                self._set(replace(known, reservations=left), at_us)

    def end_quarantines(self, now_us: int) -> None:
        """End the quarantines that are over by now."""
        while self.quarantines and self.quarantines[0][0] <= now_us:
            until_us, name = self.quarantines[0]
            self._journal.remove(self.quarantines, (until_us, name))
            self._set(replace(self.records[name], quarantined_until_us=0), until_us)

    def _set(self, record: NodeRecord, at_us: int) -> None:
        name = record.node.name
        known = self.records.get(name)
        before = offered_by(known.node) if known is not None and known.stays else NOTHING
        after = offered_by(record.node) if record.stays else NOTHING
        self._journal.put(self.records, name, record)
        if before != after:
            self._resized(before, after, at_us)
        self.reindex(name)
        self._changes.count()

    def value(self) -> object:
        """Return a deep copy, to compare; indexes included."""
        return {
            "records": dict(self.records),
            "leased": dict(self.leased),
            "vacating": dict(self.vacating),
            "claimed": {name: each for name, each in self.claimed.items() if any(each)},
            "earmarked": {name: mask for name, mask in self.earmarked.items() if mask},
            "went_down": dict(self.went_down),
            "quarantines": tuple(self.quarantines),
            "indexes": (self.free.value(), self.soon.value(), self.vacated.value()),
            "columns": self.columns.value(),
        }

    # -- leases ----------------------------------------------------------------------------------------------

    def lease(self, lease: Lease, job: Job) -> None:
        """Lease GPUs to a job."""
        self._journal.put(self.leased, lease.node, self.leased.get(lease.node, _UNUSED).plus(lease, job))
        self.reindex(lease.node)

    def vacate(self, lease: Lease, job: Job) -> None:
        """Mark a lease whose attempt leaves."""
        leaving = (*self.vacating.get(lease.node, ()), (lease, job))
        self._journal.put(self.vacating, lease.node, leaving)
        self.reindex(lease.node)

    def free_lease(self, lease: Lease, job: Job, *, was_leaving: bool) -> None:
        """Free the GPUs of a lease."""
        name = lease.node
        self._journal.put(self.leased, name, self.leased[name].minus(lease, job))
        if was_leaving:
            left = tuple(each for each in self.vacating.get(name, ()) if each[1].job_id != job.job_id)
            if left:
                self._journal.put(self.vacating, name, left)
            else:
                self._journal.drop(self.vacating, name)
        self.reindex(name)

    def held_milli(self, name: str) -> int:
        """Return the thousandths of GPUs that are leased on a node, without those of leaving attempts."""
        vacating = sum(lease.gpu_milli for lease, _ in self.vacating.get(name, ()))
        return self.leased.get(name, _UNUSED).milli - vacating

    # -- claims, inside a cycle ------------------------------------------------------------------------------

    def claim(self, leases: Iterable[Lease]) -> None:
        """Keep GPUs from all other jobs for the rest of a cycle; inside a what-if only."""
        self._journal.mark()
        for lease in leases:
            mask, instances = self.claimed.get(lease.node, _NOT_CLAIMED)
            if lease.instance is None:
                kept = Claimed(mask | mask_of(lease.gpus), instances)
            else:
                kept = Claimed(mask, (*instances, lease))
            self._journal.put(self.claimed, lease.node, kept)
            self._shade(lease.node)

    def unclaim(self, leases: Iterable[Lease]) -> None:
        """Release claimed GPUs, which are whole."""
        for lease in leases:
            mask, instances = self.claimed.get(lease.node, _NOT_CLAIMED)
            self._journal.put(self.claimed, lease.node, Claimed(mask & ~mask_of(lease.gpus), instances))
            self._shade(lease.node)

    def earmark(self, name: str, mask: int) -> None:
        """Take GPUs of a node that are being vacated for a certain job out of `soon`."""
        self._journal.put(self.earmarked, name, mask)
        self._shade(name)

    def open_all(self) -> None:
        """Release everything that is claimed or earmarked."""
        for name in dict.fromkeys((*self.claimed, *self.earmarked)):
            self._journal.drop(self.claimed, name)
            self._journal.drop(self.earmarked, name)
            self._shade(name)

    # -- indexes of free GPUs --------------------------------------------------------------------------------

    def reindex(self, name: str) -> None:
        """Index a node anew after a change of its record, its leases or its vacating GPUs."""
        self._bare.pop(name, None)
        self._shade(name)

    def _shade(self, name: str) -> None:
        """Index a node anew after a change of its claimed or earmarked GPUs."""
        record = self.records[name]
        if record.stays:
            bare = self._bare.get(name)
            if bare is None:
                entry = entry_of(record.node, self.leased.get(name, _UNUSED), record.reserved_for)
                leaving = self.vacating.get(name)
                bare = self._bare[name] = (entry, entry.plus(leaving) if leaving else entry)
            entry, vacated = bare
            claimed, earmarked = self.claimed.get(name), self.earmarked.get(name, 0)
            if claimed is not None:
                entry, vacated = claimed.out_of(entry), claimed.out_of(vacated)
            before = self._put(name, (entry, vacated.without(earmarked) if earmarked else vacated, vacated))
        else:
            before = self._put(name, (None, None, None))
        self._journal.note(self._put_back, name, before)

    def _put_back(self, name: str, before: _Entries) -> None:
        self._bare.pop(name, None)
        self._put(name, before)

    def _put(self, name: str, entries: _Entries) -> _Entries:
        """Set the entries of a node in `free`, `soon` and `vacated`; return those that were there."""
        free, soon, vacated = entries
        before = (self.free.put(name, free), self.soon.put(name, soon), self.vacated.put(name, vacated))
        if before[2] is vacated is not None:
            return before
        if vacated is None:
            self.columns.set(name, None, 0, 0)
        else:
            self.columns.set(name, vacated.kind, vacated.free.bit_count(), vacated.usable)
        return before
