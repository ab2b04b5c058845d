"""The part of `State` that is about nodes: what is leased, vacated and claimed there, and the indexes of what is free.

Not about jobs: whom a node is leased to, and what follows for them, is state.py's.
"""

from collections.abc import Iterable
from dataclasses import replace

from cordee.events import Job, Lease, NodeCordoned, NodeDown, NodeReclaimed, NodeUncordoned, NodeUp
from cordee.ids import JobId
from cordee.schedule.journal import Journal
from cordee.schedule.placement.entry import Entry, Used, entry_of, mask_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.preemption.running import Running
from cordee.schedule.quota.held import NOTHING, offered_by
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.records import Attempt, NodeRecord
from cordee.units import US_PER_HOUR

_Entries = tuple[Entry | None, Entry | None, Entry | None]

UNUSED = Used()

FLAPS = 3
"""A node that went down so often within `FLAPS_WITHIN_US` is not placed on for `QUARANTINE_US`."""

FLAPS_WITHIN_US = US_PER_HOUR
QUARANTINE_US = US_PER_HOUR


class Nodes:
    """Nodes, and the attempts on them; changed by the handlers of `State` only."""

    def __init__(self, half_life_us: int) -> None:
        """None is there yet."""
        self.journal = Journal()
        self.attempts: dict[JobId, Attempt] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.leased: dict[str, Used] = {}  # of nodes: what is leased
        self.vacating: dict[str, tuple[tuple[Lease, Job], ...]] = {}  # of nodes: leases whose attempts leave
        self.claimed: dict[str, int] = {}  # of nodes: GPUs that a cycle keeps for somebody; empty between cycles
        self.earmarked: dict[str, int] = {}  # of nodes: GPUs being vacated for somebody, not in `soon`; alike empty
        self.attention: dict[JobId, None] = {}  # jobs that the lifecycle must look at: not plainly queued or running
        self.went_down: dict[str, int] = {}  # nodes that failed before the newest failure by less than the window, when
        self.quarantines: list[tuple[int, str]] = []  # until when, of nodes, ascending
        self.index = FreeIndex()  # what is free
        self.soon = FreeIndex(self.index.mix)  # and what is being vacated for nobody
        self.vacated = FreeIndex(self.index.mix)  # and what is being vacated, for whomever
        self._bare: dict[
            str, tuple[Entry, Entry]
        ] = {}  # of nodes: free, and with what is being vacated; claimed or not
        self.running = Running(self.journal)
        self.quotas = Quotas(half_life_us=half_life_us)
        self.changes = 0  # how often something happened after which a cycle may decide something
        self.gains = 0  # how often something became free, or somebody's turn changed by more than time

    def release(self, now_us: int) -> None:
        """Quarantines that are over by then."""
        while self.quarantines and self.quarantines[0][0] <= now_us:
            until_us, name = self.quarantines[0]
            self.journal.remove(self.quarantines, (until_us, name))
            self._set_node(replace(self.nodes[name], quarantined_until_us=0), until_us)

    def claim(self, leases: Iterable[Lease]) -> None:
        """Keep these GPUs from everybody else for the rest of a cycle; inside `what_if` only."""
        self.journal.mark()
        for lease in leases:
            self.journal.put(self.claimed, lease.node, self.claimed.get(lease.node, 0) | mask_of(lease.gpus))
            self._shade(lease.node)

    def earmark(self, name: str, mask: int) -> None:
        """These GPUs of a node, which are being vacated, are not open in `soon`: they leave for somebody."""
        self.journal.put(self.earmarked, name, mask)
        self._shade(name)

    def disclaim(self, leases: Iterable[Lease]) -> None:
        """They are open again."""
        for lease in leases:
            self.journal.put(self.claimed, lease.node, self.claimed.get(lease.node, 0) & ~mask_of(lease.gpus))
            self._shade(lease.node)

    def open_all(self) -> None:
        """Nothing is claimed or spoken for any more."""
        names = dict.fromkeys((*self.claimed, *self.earmarked))
        for name in names:
            self.journal.drop(self.claimed, name)
            self.journal.drop(self.earmarked, name)
            self._shade(name)

    def _changed(self, *, gain: bool = True) -> None:
        self.journal.note(self._unchanged, self.changes, self.gains)
        self.changes += 1
        self.gains += gain

    def _unchanged(self, changes: int, gains: int) -> None:
        self.changes, self.gains = changes, gains

    # -- what happens to them ----------------------------------------------------------------------------------

    def _node_up(self, event: NodeUp) -> None:
        known = self.nodes.get(event.node.name)
        if known is None:
            self._set_node(NodeRecord(node=event.node), event.at_us)
        elif event.node.epoch >= known.node.epoch:
            # The same agent again describes a change of its GPUs; what the cloud announced still holds.
            same = event.node.epoch == known.node.epoch
            reclaimed_us = known.reclaimed_us if same else None
            record = replace(known, node=event.node, up=True, why="", reclaimed_us=reclaimed_us)
            self._set_node(record, event.at_us)

    def _node_down(self, event: NodeDown) -> None:
        known = self.nodes.get(event.node)
        if known is None or event.epoch < known.node.epoch:
            return
        downs = known.downs
        if known.up and known.reclaimed_us is None:
            downs = (*(at_us for at_us in downs if at_us > event.at_us - FLAPS_WITHIN_US), event.at_us)
        until_us = known.quarantined_until_us
        if len(downs) >= FLAPS and downs != known.downs:
            if until_us:
                self.journal.remove(self.quarantines, (until_us, event.node))
            until_us = event.at_us + QUARANTINE_US
            self.journal.insert(self.quarantines, (until_us, event.node))
        if downs != known.downs:
            for name, at_us in list(self.went_down.items()):
                if at_us <= event.at_us - FLAPS_WITHIN_US:
                    self.journal.drop(self.went_down, name)
            self.journal.put(self.went_down, event.node, event.at_us)
        record = replace(known, up=False, why=event.why, downs=downs, quarantined_until_us=until_us)
        self._set_node(record, event.at_us)

    def _node_reclaimed(self, event: NodeReclaimed) -> None:
        known = self.nodes.get(event.node)
        if known is not None and event.epoch == known.node.epoch:
            self._set_node(replace(known, reclaimed_us=event.deadline_us), event.at_us)
            self._look_at(event.node)

    def _node_cordoned(self, event: NodeCordoned) -> None:
        known = self.nodes.get(event.node)
        if known is None:
            return
        record = replace(known, cordoned_by=event.by, cordon_why=event.why, drains=event.drain)
        self._set_node(record, event.at_us)
        if event.drain:
            self._look_at(event.node)

    def _node_uncordoned(self, event: NodeUncordoned) -> None:
        known = self.nodes.get(event.node)
        if known is not None:
            self._set_node(replace(known, cordoned_by=None, cordon_why="", drains=False), event.at_us)

    def _set_node(self, record: NodeRecord, at_us: int) -> None:
        name = record.node.name
        before, after = (
            offered_by(each.node) if each is not None and each.stays else NOTHING
            for each in (self.nodes.get(name), record)
        )
        self.journal.put(self.nodes, name, record)
        if before != after:
            self.quotas.resize(after.less(before), at_us)
            self.journal.note(self.quotas.resize, before.less(after), at_us)
        self._reindex(name)
        self._changed()

    def _look_at(self, name: str) -> None:
        """What runs on the node needs attention."""
        for job_id, attempt in self.attempts.items():
            if any(lease.node == name for lease in attempt.held):
                self.journal.put(self.attention, job_id, None)

    # -- what is free ------------------------------------------------------------------------------------------

    def _reindex(self, name: str) -> None:
        """Something about the node, or about what is leased or being vacated there, has changed."""
        self._bare.pop(name, None)
        self._shade(name)

    def _shade(self, name: str) -> None:
        """What is claimed there or spoken for may have changed."""
        record = self.nodes[name]
        if record.stays:
            bare = self._bare.get(name)
            if bare is None:
                entry = entry_of(record.node, self.leased.get(name, UNUSED))
                leaving = self.vacating.get(name)
                bare = self._bare[name] = (entry, entry.plus(leaving) if leaving else entry)
            entry, all_ = bare
            kept, earmarked = self.claimed.get(name, 0), self.earmarked.get(name, 0)
            if kept:
                entry, all_ = entry.without(kept), all_.without(kept)
            before = self._put(name, (entry, all_.without(earmarked) if earmarked else all_, all_))
        else:
            before = self._put(name, (None, None, None))
        self.journal.note(self._put_back, name, before)

    def _put_back(self, name: str, before: _Entries) -> None:
        self._bare.pop(name, None)
        self._put(name, before)

    def _put(self, name: str, entries: _Entries) -> _Entries:
        """Set a node's entries: what is free, what will be for anybody, what will be; returns those that were there."""
        free, open_, all_ = entries
        before = (self.index.put(name, free), self.soon.put(name, open_), self.vacated.put(name, all_))
        if before[2] is all_ is not None:
            return before
        if all_ is None:
            self.running.set_node(name, None, 0, 0)
        else:
            self.running.set_node(name, all_.kind, all_.free.bit_count(), all_.usable)
        return before
