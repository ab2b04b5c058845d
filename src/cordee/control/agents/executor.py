"""The executor that reaches machines through their agents, each of which dials in over one link.

The web server's thread brings claims and messages, a thread of its own watches leases and engines, and the control
loop's thread takes reports and sends commands. A report stays here until it is committed, and at the agent until the
agent has the acknowledgement.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Protocol, cast

from cordee.agent.clock import MachineClock
from cordee.agent.messages import (
    Beat,
    Claim,
    Confirm,
    FromAgent,
    Order,
    Records,
    Refused,
    Seen,
    Shutdown,
    Welcome,
)
from cordee.control.agents.claims import Member, Session, judge
from cordee.control.agents.inbox import Inbox
from cordee.control.agents.leases import LeaseTerms
from cordee.control.engines.port import Engine
from cordee.control.ports import Pending, Report
from cordee.errors import CordeeError, StandbyError, StoreError
from cordee.event_json import decode, encode
from cordee.events import (
    AttemptPlaced,
    Event,
    NodeDown,
    NodeReachable,
    NodeReclaimed,
    NodeUnreachable,
    NodeUp,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId
from cordee.reports import parse_stream, repair_text

LOOK_S = 0.1
"""The time between two questions to the engines while a node of theirs is not connected."""

LOOK_S_MAX = 1.0
"""The time between two questions otherwise, and between two looks at the leases."""

FROZEN_S = 3.0
"""A server that stood still for so long has heard nobody meanwhile, so that the silence proves nothing."""

_log = logging.getLogger("cordee.control")


class ClusterLog(Protocol):
    """The queries of the log that the executor makes, from each thread."""

    def mark(self, source: str) -> int:
        """Return the highest committed seq of a stream; 0 if none.

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


class AgentsExecutor:
    """The executor over agents; implements `cordee.control.ports.Executor`.

    Args:
        log: what was committed.
        node_of: returns the node whose token this is, None if it is no node's.
        engines: they start agents; an agent may also come by itself.
        terms: of the nodes' leases.
        wake: called from other threads when `reports` has something new, or a command can be sent.
        confirm_s: how long `carry_out` waits for agents to confirm.
        servers: returns the URLs of all servers of the cluster, none if this is the only one; raises StandbyError
            while another one may lead.
        clock: the time.
        changed: the lock, and the condition for which `carry_out` waits.
    """

    def __init__(
        self,
        *,
        log: ClusterLog,
        node_of: Callable[[str], str | None],
        engines: Sequence[Engine] = (),
        terms: LeaseTerms | None = None,
        wake: Callable[[], None] = lambda: None,
        confirm_s: float = 2.0,
        servers: Callable[[], list[str]] = list,
        clock: MachineClock | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        self.node_of, self._servers = node_of, servers
        self._log, self._engines, self.terms = log, engines, terms or LeaseTerms()
        self._wake, self._confirm_s = wake, confirm_s
        self._members: dict[str, Member] = {}
        self._clock, self._changed = clock or MachineClock(), changed or threading.Condition()
        self._inbox = Inbox()
        self._stopped = False
        self._farewell: Shutdown | None = None  # sent to the agents of the engines when they shall exit
        self._poke = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cordee-agents", daemon=True)

    def know(self, nodes: Iterable[Member], *, lease_before_s: float = 0.0) -> None:
        """Take in the nodes of the log, each with a fresh lease, before the first agent can claim one.

        `lease_before_s` is the lease of the server before; agents that cannot be reached still count by that.
        """
        with self._changed:
            from_s = self._clock.now_s() + max(0.0, lease_before_s - self.terms.lease_s)
            for member in nodes:
                self._members[member.name] = replace(member, heard_s=from_s)

    def start(self) -> None:
        """Start the engines, and watch over the nodes. Agents must find the server's address before."""
        self.begin()
        self._thread.start()

    def begin(self) -> None:
        """Do what `start` does, except that the caller watches over the nodes, by calls of `look`."""
        for engine in self._engines:
            engine.start(self._poke.set, self._is_connected)

    # -- the port: the control loop's thread ------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Return the reports that were not acknowledged, in an order in which they may be committed."""
        with self._changed:
            return self._inbox.reports()

    def acknowledge(self, source: str, seq: int) -> None:
        """Record that a stream was committed up to `seq`, and pass this on to the agent."""
        with self._changed:
            owner = self._inbox.acknowledge(source, seq)
            if owner is not None and owner.session is not None:
                owner.session.send(Seen(source=source, seq=self._inbox.acknowledged(source)))

    def carry_out(self, pending: Pending) -> bool:
        """Send the command to the agents concerned; return True when all of them have confirmed that it is on disk.

        A start goes to the agent of rank 0 first, whose confirmation carries the rendezvous of all ranks. A node whose
        part of the attempt has ended needs no command.
        """
        command = pending.command
        names = list(self._log.held(command.job_id, command.epoch))
        order = Order(
            number=pending.number,
            event=encode(command),
            spec=pending.spec,
            estimate=None if pending.estimate is None else asdict(pending.estimate),
        )
        if not isinstance(command, AttemptPlaced):
            return self._send(order, names)
        with self._changed:
            for name in names:
                member = self._members.get(name)
                if member is not None and member.lost:  # it was placed in the moment in which the lease ended
                    self._report(member, self._lost(name, command.job_id, command.epoch, "its lease is over"))
        order = replace(order, secrets=self._log.secrets(command.job_id, _secret_names(pending.spec)))
        first = command.leases[0].node
        if first in names:
            if not self._send(order, [first], keep=True):
                return False
            names.remove(first)
        with self._changed:
            confirm = self._members[first].confirmed.get(order.number) if first in self._members else None
        done = self._send(replace(order, meeting=confirm.meeting if confirm else None), names)
        if done and confirm:
            with self._changed:
                self._members[first].confirmed.pop(order.number, None)
        return done

    def _send(self, order: Order, names: Sequence[str], *, keep: bool = False) -> bool:
        """Send an order to these nodes; return whether all have confirmed it, and forget that unless `keep`."""
        with self._changed:
            nodes = [self._members[name] for name in names if name in self._members]
            fresh = [node for node in nodes if node.must_send(order.number)]
            for node in fresh:
                assert node.session is not None, "must_send says so"
                node.sent.add(order.number)
                node.session.send(_reachable_meeting(order, node.session))
            if any(node.reachable for node in fresh):  # do not wait a second time for an agent that did not answer
                self._changed.wait_for(lambda: not any(order.number in node.sent for node in nodes), self._confirm_s)
            done = len(nodes) == len(names) and all(order.number in node.confirmed for node in nodes)
            for node in nodes if done and not keep else ():
                del node.confirmed[order.number]
            return done

    def spare_nodes(self) -> int:
        """Return the number of further nodes that the engines may still bring."""
        return sum(engine.spare_nodes() for engine in self._engines)

    def link_facts(self, name: str) -> dict[str, int]:
        """Return what is known of a node's link: reports refused, and the agent's clock minus the server's."""
        with self._changed:
            member = self._members.get(name)
            return {"refused": member.refused, "clock_off_us": member.clock_off_us} if member else {}

    def dismiss(self, name: str) -> None:
        """Make the agent of a node exit when it runs no rank group any more; the node is down with its connection."""
        with self._changed:
            member = self._members.get(name)
            if member is None:
                return
            member.leaves = True
            if member.session is not None:
                member.session.send(Shutdown())
            else:
                self._report_down(member, "it has left")

    def wait(self, timeout_s: float) -> bool:
        """Wait until `reports` has something new; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inbox.fresh, timeout_s)

    def shutdown(self, *, now: bool = False, timeout_s: float = 10.0) -> bool:
        """Make the agents of the engines exit, and wait until they have; joined ones wait for the next server.

        Args:
            now: end the rank groups that still run; otherwise an agent exits when its last one has ended.
            timeout_s: the longest wait.

        Returns:
            True if every agent has exited.
        """
        for engine in self._engines:
            engine.retire()
        with self._changed:
            self._farewell = Shutdown(now=now)
            owned = [member for member in self._members.values() if self._owner(member.name) is not None]
            for member in owned:
                if member.session is not None:
                    member.session.send(self._farewell)
            self._poke.set()
            return self._changed.wait_for(lambda: not any(member.up for member in owned), timeout_s)

    def close(self, *, kill_agents: bool = False) -> None:
        """Stop the executor; agents and ranks go on unless `kill_agents` is set."""
        if self._thread.is_alive():
            if kill_agents:
                self.shutdown(now=True)
            self._stopped = True
            self._poke.set()
            self._thread.join()
        with self._changed:
            for member in self._members.values():
                member.disconnect()
        for engine in self._engines:
            engine.close()

    # -- the link: the web server's thread ---------------------------------------------------------------------

    def claim(self, name: str, claim: Claim, session: Session) -> Refused | None:
        """Judge an agent's claim; welcome it over its session, or return the refusal."""
        try:  # Without the lock: while a database hangs, the beats of other agents are answered.
            session.servers = self._servers()
            marks = {source: self._log.mark(source) for source in claim.sources if _is_stream_of(name, source)}
        except StandbyError as error:
            return Refused(why=error.message, hint=error.hint or "")
        except StoreError as error:
            return _unreadable(error)
        with self._changed:
            member = self._members.get(name) or Member(name)
            is_other = member.is_other(claim)
        held = self._log.held_on(name) if is_other else ()  # without the lock, since a tick takes it too
        with self._changed:
            member = self._members.get(name) or member
            epoch = judge(member, claim, self.terms, self._clock.now_s(), held=bool(held))
            if isinstance(epoch, Refused):
                _log.warning("a claim of node %s from %s was refused: %s", name, session.peer, epoch.why)
                return epoch
            try:
                if epoch != member.epoch and is_other:
                    self._report_lost(member, held, "its lease is over, and another machine has its name")
                elif epoch != member.epoch:
                    self._report_down(member, "its agent is gone: another one has the node")
            except StoreError as error:
                return _unreadable(error)
            self._members[name] = member
            member.disconnect()
            member.leaves = False
            if epoch != member.epoch:
                member.epoch, member.up, member.reachable, member.lost = epoch, True, True, False
            member.machine, member.incarnation, member.session = claim.machine, claim.incarnation, session
            self._heard(member)
            now_us = self._clock.now_us()
            member.clock_off_us = claim.clock_us - now_us
            self._inbox.open(marks.items(), member)
            session.send(
                Welcome(
                    epoch=epoch,
                    marks=marks,
                    lease_s=self.terms.lease_s,
                    beat_s=self.terms.beat_s,
                    clock_us=now_us,
                    servers=session.servers,
                )
            )
            if self._farewell is not None and self._owner(name) is not None:
                session.send(self._farewell)
            self._notify()  # commands may be waiting for this node
        return None

    def receive(self, name: str, session: Session, message: FromAgent) -> None:
        """Take in a message of an agent whose claim was accepted."""
        with self._changed:
            member = self._members[name]
            if member.session is not session:
                return
            try:
                self._heard(member)
                if isinstance(message, Beat):
                    self._answer(session, message)
                elif isinstance(message, Confirm):
                    member.sent.discard(message.number)
                    member.confirmed[message.number] = message
                    self._changed.notify_all()
                elif isinstance(message, Records):
                    self._take_in(member, session, message)
            except StoreError as error:
                _log.warning("a message of node %s waits for the log, and is sent again: %s", name, error)
                member.disconnect()

    def _answer(self, session: Session, beat: Beat) -> None:
        """Answer a beat, which extends the node's lease, unless another server may count that by now."""
        try:
            servers = self._servers()
        except StandbyError as error:
            _log.warning("a beat is not answered: %s", error.message)
            session.close()  # the agent dials until it finds the server that leads
            return
        fresh = None if servers == session.servers else servers
        session.servers = servers
        session.send(Beat(number=beat.number, clock_us=self._clock.now_us(), servers=fresh))

    def closed(self, name: str, session: Session, why: str) -> None:
        """Note that a connection has ended."""
        with self._changed:
            member = self._members.get(name)
            if member is not None and member.session is session:
                _log.info("the connection to the agent of %s ended: %s", name, why)
                member.disconnect()
                if member.leaves:
                    self._report_down(member, "it has left")
                self._poke.set()
                self._notify()

    def _take_in(self, member: Member, session: Session, records: Records) -> None:
        """Keep new records; those that are refused are acknowledged, as the agent would else send them for ever.

        Raises:
            StoreError: it cannot be read from the log whether the node may report this.
        """
        source = records.source
        why_not = self._why_foreign(member, source)
        for seq, data in zip(records.seqs, records.events, strict=True):
            if why_not:  # the inbox keeps the numbers of this stream's own agent
                self._refuse(member, source, seq, why_not)
                session.send(Seen(source=source, seq=seq))
            elif not self._inbox.is_new(source, seq, member):
                # A repeated record: if it is committed, the agent has missed the acknowledgement.
                seen = self._inbox.acknowledged(source)
                if seq <= seen:
                    session.send(Seen(source=source, seq=seen))
            else:
                self._take_in_new(member, session, source, seq, data)

    def _take_in_new(self, member: Member, session: Session, source: str, seq: int, data: dict[str, object]) -> None:
        try:
            event = self._read(member, source, data)
        except ValueError as error:
            self._refuse(member, source, seq, str(error))
            session.send(Seen(source=source, seq=self._inbox.skip(source, seq)))
        else:
            self._inbox.add(Report(source=source, seq=seq, event=event))
            self._notify()

    def _refuse(self, member: Member, source: str, seq: int, why: str) -> None:
        member.refused += 1
        _log.error("record %d of %r from node %s is refused: %s", seq, source, member.name, why)

    def _why_foreign(self, member: Member, source: str) -> str:
        """Return why a node must not send this stream; "" if it may."""
        if not _is_stream_of(member.name, source):
            return "it is not a stream of this node"
        stream = parse_stream(source)
        return "" if stream is None else self._why_not_leased(member, stream[0], stream[1])

    def _why_not_leased(self, member: Member, job_id: str, epoch: int) -> str:
        leased = member.name in self._log.leased(job_id, epoch)
        return "" if leased else f"attempt {job_id}.{epoch} has no lease on this node"

    def _read(self, member: Member, source: str, data: dict[str, object]) -> Event:
        """Return a record's event.

        Raises:
            ValueError: it is not an event, or not one that this node may report.
            StoreError: it cannot be read from the log whether it may.
        """
        if parse_stream(source) is not None:
            return decode(data)
        event = decode(cast("dict[str, object]", repair_text(data)))
        if isinstance(event, RanksStarted | RanksEnded):
            if event.node != member.name:
                raise ValueError(f"it is about ranks of node {event.node}")
            if why_not := self._why_not_leased(member, event.job_id, event.epoch):
                raise ValueError(why_not)
            return event
        about = event.node.name if isinstance(event, NodeUp) else getattr(event, "node", member.name)
        if about != member.name:
            raise ValueError(f"it is about node {about}")
        return event

    # -- the thread that watches leases and engines ------------------------------------------------------------

    def _watch(self) -> None:
        looked_s = self._clock.now_s()
        while not self._stopped:
            before_s, looked_s = looked_s, self._clock.now_s()
            self._poke.wait(self.look(before_s))
            self._poke.clear()

    def look(self, before_s: float) -> float:
        """Look after every node and every engine; return the seconds until it is time to do so again.

        Args:
            before_s: the monotonic time at which it was done last.
        """
        now_s = self._clock.now_s()
        if now_s - before_s > FROZEN_S:
            _log.warning("this server stood still for %.1f s: every node gets a fresh lease", now_s - before_s)
            with self._changed:
                for member in self._members.values():
                    member.heard_s = now_s
        try:
            self._look()
        except (CordeeError, OSError) as error:
            _log.error("nodes cannot be looked after now, it is tried again: %s", error)
        except Exception:  # whatever an engine raises, the leases of all nodes are looked after
            _log.exception("nodes cannot be looked after now, it is tried again")
        with self._changed:
            lonely = any(
                member.session is None and self._owner(member.name) is not None for member in self._members.values()
            )
        nothing_yet = bool(self._engines) and not self._members
        return LOOK_S if lonely or nothing_yet else LOOK_S_MAX

    def _look(self) -> None:
        """Take in the deaths that the engines know, and report nodes that are silent."""
        with self._changed:
            before = {name: member.epoch for name, member in self._members.items()}
        deaths = [death for engine in self._engines for death in engine.ended()]
        gone: list[tuple[str, str]] = []
        with self._changed:
            for death in deaths:
                member = self._members.get(death.node)
                if member is not None and death.ranks_gone:
                    of_epoch = member.announced.setdefault(death.why, before.get(death.node, 0))
                    gone += [(death.node, death.why)] if of_epoch == member.epoch else []
                if member is not None and member.epoch == before.get(death.node) and not death.ranks_gone:
                    member.disconnect()
                    self._report_down(member, death.why)
            for reclaim in (each for engine in self._engines for each in engine.reclaims()):
                member = self._members.get(reclaim.node)
                if member is not None and member.up and member.announced.get(reclaim.deadline_us) != member.epoch:
                    member.announced[reclaim.deadline_us] = member.epoch
                    self._report_reclaim(member, reclaim.deadline_us)
            gone += [(name, self._silence(member)) for name, member in self._members.items() if self._is_over(member)]
        for name, why in gone:
            held = self._log.held_on(name)  # without the lock, since a tick takes it too
            with self._changed:
                member = self._members.get(name)
                over = member is not None and (member.epoch == before.get(name)) and not member.lost
                if member is not None and over and (self._is_over(member) or not member.session):
                    self._report_lost(member, held, why)

    def _is_over(self, member: Member) -> bool:
        """Report a node whose agent has become silent; return whether its lease is over, so that its ranks are gone."""
        silent_s = self._clock.now_s() - member.heard_s
        if member.up and member.reachable and silent_s >= self.terms.unreachable_s:
            self._report(member, NodeUnreachable(at_us=self._clock.now_us(), node=member.name, epoch=member.epoch))
            member.reachable = False
        return member.up and silent_s >= self.terms.down_s

    def _silence(self, member: Member) -> str:
        return f"it was silent for {self._clock.now_s() - member.heard_s:.0f} s: its lease is over"

    def _heard(self, member: Member) -> None:
        member.heard_s = self._clock.now_s()
        if not member.reachable and member.up:
            self._report(member, NodeReachable(at_us=self._clock.now_us(), node=member.name, epoch=member.epoch))
            member.reachable = True

    def _report_lost(self, member: Member, held: Iterable[tuple[str, int]], why: str) -> None:
        """Report a node down whose ranks are gone for certain: the scheduler starts them elsewhere."""
        self._next_seq(member)  # it raises before anything has changed, so that the next look does all of it
        member.disconnect()
        member.lost = True
        for job_id, epoch in held:
            self._report(member, self._lost(member.name, job_id, epoch, why))
        self._report_down(member, why)

    def _is_connected(self, node: str) -> bool:
        with self._changed:
            member = self._members.get(node)
            return member is not None and member.session is not None

    def _owner(self, node: str) -> Engine | None:
        return next((engine for engine in self._engines if engine.owns(node)), None)

    def _report_down(self, member: Member, why: str) -> None:
        """Report once that the agent with the node's epoch is gone, even if it died while no server ran."""
        if member.up:
            down = NodeDown(at_us=self._clock.now_us(), node=member.name, epoch=member.epoch, why=why)
            self._report(member, down)
            member.up = False

    def _report_reclaim(self, member: Member, deadline_us: int) -> None:
        now_us = self._clock.now_us()
        self._report(member, NodeReclaimed(at_us=now_us, node=member.name, epoch=member.epoch, deadline_us=deadline_us))

    def _report(self, member: Member, event: Event) -> None:
        """Add a report of the server's own about the node's epoch."""
        source, seq = self._next_seq(member)
        self._inbox.add(Report(source=source, seq=seq, event=event))
        self._notify()

    def _next_seq(self, member: Member) -> tuple[str, int]:
        """Return the server's own stream about the node's epoch, and the number of its next record.

        Raises:
            StoreError: the log cannot be read now; it is asked once for each stream.
        """
        source = f"server/{member.name}/{member.epoch}"
        return source, self._inbox.next_seq(source, self._log.mark)

    def _lost(self, node: str, job_id: str, epoch: int, why: str) -> RanksEnded:
        at_us, why = self._clock.now_us(), f"{node}: {why}"
        return RanksEnded(at_us=at_us, job_id=JobId(job_id), epoch=epoch, node=node, outcome=Outcome.LOST, why=why)

    def _notify(self) -> None:
        self._changed.notify_all()
        self._wake()


def _unreadable(error: StoreError) -> Refused:
    return Refused(why=f"the log cannot be read now: {error.message}")


def _is_stream_of(node: str, source: str) -> bool:
    """Return whether an agent of the node may forward a stream of this name: its own, or a rank's."""
    return parse_stream(source) is not None or re.fullmatch(rf"node/{re.escape(node)}/\d{{1,15}}", source) is not None


def _reachable_meeting(order: Order, session: Session) -> Order:
    """Return the order with a meeting that the session's agent can reach.

    Rank 0 on the server's machine knows itself by its loopback address; others know it by the one that they dialled.
    """
    meeting = order.meeting
    if meeting is None or not meeting.address.startswith("127.") or session.peer.startswith("127."):
        return order
    return replace(order, meeting=replace(meeting, address=session.own_address))


def _secret_names(spec: str) -> list[str]:
    names = json.loads(spec).get("secrets")
    return [str(name) for name in names] if isinstance(names, list) else []
