"""The nodes behind their agents: who is connected, who is silent, and this server's own reports about them."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cordee.agent.clock import MachineClock
from cordee.control.agents.claims import Member
from cordee.control.agents.inbox import Inbox
from cordee.control.agents.leases import LeaseTerms
from cordee.control.ports import Report
from cordee.events import (
    NODE_LEFT,
    Event,
    NodeDown,
    NodeReachable,
    NodeReclaimed,
    NodeUnreachable,
    Outcome,
    RanksEnded,
)
from cordee.ids import JobId


class ClusterLog(Protocol):
    """The queries of the log that the executor makes, from each thread."""

    def marks(self, sources: Sequence[str]) -> Mapping[str, int]:
        """Return the highest committed seq of each of these streams; 0 if none.

        Raises:
            StoreError: the log cannot be read now.
        """
        ...

    def leased(self, job_id: str, epoch: int) -> Sequence[str]:
        """Return the nodes of an attempt in the order of its leases; empty if there was no such attempt.

        Raises:
            StoreError: the log cannot be read now.
        """
        ...

    def held(self, job_id: str, epoch: int) -> Sequence[str]:
        """Return the nodes on which an attempt's ranks have not ended; call it on the control loop's thread only."""
        ...

    def held_on(self, node: str) -> Sequence[tuple[str, int]]:
        """Return the attempts (job, epoch) whose ranks on a node have not ended; waits for the end of a tick."""
        ...

    def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]:
        """Return the values of these secrets of a job, as far as they exist."""
        ...


class Nodes:
    """The nodes of one server, their leases and the inbox of their reports.

    Hold `changed` while calling anything but `know` and `is_connected`, and while reading `members`.

    Args:
        log: what was committed.
        terms: of the nodes' leases.
        wake: called when the inbox has something new, or a command can be sent.
        clock: the time.
        changed: the lock, and the condition that `notify` notifies.

    Attributes:
        terms, clock, changed: as given.
        members: the nodes by name.
        inbox: the reports that are not acknowledged.
        read_s: the monotonic time up to which every message that had arrived is read; None: up to now.
    """

    def __init__(
        self,
        log: ClusterLog,
        terms: LeaseTerms,
        wake: Callable[[], None],
        clock: MachineClock,
        changed: threading.Condition,
    ) -> None:
        self._log, self._wake = log, wake
        self.terms, self.clock, self.changed = terms, clock, changed
        self.members: dict[str, Member] = {}
        self.inbox = Inbox()
        self.read_s: float | None = None

    def know(self, nodes: Iterable[Member], *, lease_before_s: float = 0.0) -> None:
        """Take in the nodes of the log, each with a fresh lease, before the first agent can claim one.

        `lease_before_s` is the lease of the server before; agents that cannot be reached still count by that.
        """
        with self.changed:
            from_s = self.clock.now_s() + max(0.0, lease_before_s - self.terms.lease_s)
            for member in nodes:
                self.members[member.name] = replace(member, heard_s=from_s)

    def is_connected(self, node: str) -> bool:
        """Return whether the agent of a node is connected."""
        with self.changed:
            member = self.members.get(node)
            return member is not None and member.session is not None

    def notify(self) -> None:
        """Wake who waits for a change, and the control loop."""
        self.changed.notify_all()
        self._wake()

    # -- leases ------------------------------------------------------------------------------------------------

    def renew_leases(self) -> None:
        """Give every node a fresh lease."""
        for member in self.members.values():
            member.heard_s = self.clock.now_s()

    def heard(self, member: Member) -> None:
        """Note that a message of a node's agent has arrived."""
        member.heard_s = self.clock.now_s()
        if not member.reachable and member.up:
            reachable = NodeReachable(at_us=self.clock.now_us(), node=member.name, epoch=member.epoch)
            self._report(member, reachable)
            member.reachable = True

    def is_over(self, member: Member) -> bool:
        """Report a node whose agent has become silent; return whether its lease is over, so that its ranks are gone."""
        silent_s = self._silent_s(member)
        if member.up and member.reachable and silent_s >= self.terms.unreachable_s:
            self._report(member, NodeUnreachable(at_us=self.clock.now_us(), node=member.name, epoch=member.epoch))
            member.reachable = False
        return member.up and silent_s >= self.terms.down_s

    def silence(self, member: Member) -> str:
        """Return why the ranks of a node are gone whose lease is over."""
        return f"it was silent for {self._silent_s(member):.0f} s: its lease is over"

    def _silent_s(self, member: Member) -> float:
        """Return the silence of a node, as far as it is the node's own: a loaded server reads late what was sent."""
        return (self.clock.now_s() if self.read_s is None else self.read_s) - member.heard_s

    # -- this server's own reports -----------------------------------------------------------------------------

    def report_down(self, member: Member, why: str) -> None:
        """Report once that the agent with the node's epoch is gone, even if it died while no server ran."""
        if member.up:
            why = NODE_LEFT if member.leaves else why
            down = NodeDown(at_us=self.clock.now_us(), node=member.name, epoch=member.epoch, why=why)
            self._report(member, down)
            member.up = False

    def report_lost(self, member: Member, held: Iterable[tuple[str, int]], why: str) -> None:
        """Report a node down whose ranks are gone for certain: the scheduler starts them elsewhere."""
        self._next_seq(member)  # it raises before anything has changed, so that the next look does all of it
        member.disconnect()
        member.lost = True
        for job_id, epoch in held:
            self.report_ranks_lost(member, job_id, epoch, why)
        self.report_down(member, why)

    def report_ranks_lost(self, member: Member, job_id: str, epoch: int, why: str) -> None:
        """Report that the ranks of an attempt on a node are gone for certain."""
        at_us, why, node = self.clock.now_us(), f"{member.name}: {why}", member.name
        lost = RanksEnded(at_us=at_us, job_id=JobId(job_id), epoch=epoch, node=node, outcome=Outcome.LOST, why=why)
        self._report(member, lost)

    def report_reclaim(self, member: Member, deadline_us: int) -> None:
        """Report that a node is taken back at a deadline."""
        at_us = self.clock.now_us()
        self._report(member, NodeReclaimed(at_us=at_us, node=member.name, epoch=member.epoch, deadline_us=deadline_us))

    def _report(self, member: Member, event: Event) -> None:
        """Add a report of the server's own about the node's epoch."""
        source, seq = self._next_seq(member)
        self.inbox.add(Report(source=source, seq=seq, event=event))
        self.notify()

    def _next_seq(self, member: Member) -> tuple[str, int]:
        """Return the server's own stream about the node's epoch, and the number of its next record.

        Raises:
            StoreError: the log cannot be read now; it is asked once for each stream.
        """
        source = f"server/{member.name}/{member.epoch}"
        return source, self.inbox.next_seq(source, self._log.marks)
