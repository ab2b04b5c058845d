"""The executor that reaches machines through their agents, each of which dials in over one link.

The web server's thread brings claims and messages, a thread of its own watches leases and engines, and the control
loop's thread takes reports and sends commands. A report stays here until it is committed, and at the agent until the
agent has the acknowledgement.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace

from cordee.agent.clock import MachineClock
from cordee.agent.messages import (
    Beat,
    Claim,
    Confirm,
    Dial,
    FromAgent,
    Order,
    Records,
    Refused,
    Seen,
    Shutdown,
    Welcome,
)
from cordee.control.agents.claim_queue import Arrived, ArrivedClaim, ArrivedToken, ClaimQueue
from cordee.control.agents.claims import Member, Session, judge
from cordee.control.agents.intake import Intake, is_stream_of
from cordee.control.agents.leases import LeaseTerms
from cordee.control.agents.neighbourhoods import Neighbourhoods
from cordee.control.agents.nodes import ClusterLog, Nodes
from cordee.control.agents.watch import Watch
from cordee.control.engines.port import Engine
from cordee.control.node_tokens import check_node
from cordee.control.ports import Pending, Report
from cordee.errors import ForbiddenError, NodeLeftError, StandbyError, StoreError, TokenError
from cordee.event_json import encode
from cordee.events import NODE_LEFT, AttemptPlaced

_log = logging.getLogger("cordee.control")


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
        cluster_key: by which nodes know each other when they give data.

    Attributes:
        nodes: the nodes behind the agents.
        watch: the watch over nodes and engines.
        claims: the tokens and claims that are not judged yet.
        queued: URLs of the datasets of waiting jobs, in the order of the queue; agents are told of a change.
        neighbours: the nodes that give data to each other; agents are told of a change.
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
        cluster_key: str = "",
    ) -> None:
        self._node_of, self._servers, self._confirm_s = node_of, servers, confirm_s
        self._log, self._engines = log, engines
        self._changed = changed or threading.Condition()
        self.nodes = Nodes(log, terms or LeaseTerms(), wake, clock or MachineClock(), self._changed)
        self.watch = Watch(self.nodes, log, engines)
        self.claims = ClaimQueue(self._judge)
        self._intake = Intake(self.nodes, log)
        self.queued: tuple[str, ...] = ()
        self.neighbours = Neighbourhoods(cluster_key)
        self._farewell: Shutdown | None = None  # sent to the agents of the engines when they shall exit

    def start(self, reads: Callable[[], "Future[None]"] | None = None) -> None:
        """Start the engines, and watch over the nodes. Agents must find the server's address before.

        `reads` makes the web server read all that has arrived; without it what has arrived counts as read.
        """
        self.begin()
        self.watch.count_silence_by(reads)
        self.claims.start()
        self.watch.start()

    def begin(self) -> None:
        """Do what `start` does, except that the caller watches over the nodes, by calls of `watch.look`."""
        for engine in self._engines:
            engine.start(self.watch.poke, self.nodes.is_connected)

    # -- the port: the control loop's thread ------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Return the reports that were not acknowledged, in an order in which they may be committed."""
        with self._changed:
            return self.nodes.inbox.reports()

    def acknowledge(self, source: str, seq: int) -> None:
        """Record that a stream was committed up to `seq`, and pass this on to the agent."""
        with self._changed:
            owner = self.nodes.inbox.acknowledge(source, seq)
            if owner is not None and owner.session is not None:
                owner.session.send(Seen(source=source, seq=self.nodes.inbox.acknowledged(source)))

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
                member = self.nodes.members.get(name)
                if member is not None and member.lost:  # it was placed in the moment in which the lease ended
                    self.nodes.report_ranks_lost(member, command.job_id, command.epoch, "its lease is over")
        order = replace(order, secrets=self._log.secrets(command.job_id, _secret_names(pending.spec)))
        first = command.leases[0].node
        if first in names:
            if not self._send(order, [first], keep=True):
                return False
            names.remove(first)
        with self._changed:
            confirm = self.nodes.members[first].confirmed.get(order.number) if first in self.nodes.members else None
        done = self._send(replace(order, meeting=confirm.meeting if confirm else None), names)
        if done and confirm:
            with self._changed:
                self.nodes.members[first].confirmed.pop(order.number, None)
        return done

    def _send(self, order: Order, names: Sequence[str], *, keep: bool = False) -> bool:
        """Send an order to these nodes; return whether all have confirmed it, and forget that unless `keep`."""
        with self._changed:
            nodes = [self.nodes.members[name] for name in names if name in self.nodes.members]
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
            member = self.nodes.members.get(name)
            return {"refused": member.refused, "clock_off_us": member.clock_off_us} if member else {}

    def dial(self, name: str, dial: Dial) -> bool:
        """Ask the agent of a node to dial a tunnel; return whether it is connected."""
        with self._changed:
            member = self.nodes.members.get(name)
            if member is None or member.session is None:
                return False
            member.session.send(dial)
            return True

    def dismiss(self, name: str) -> None:
        """Make the agent of a node exit when it runs no rank group any more; the node is down with its connection."""
        with self._changed:
            member = self.nodes.members.get(name)
            if member is None:
                return
            member.leaves = True
            if member.session is not None:
                member.session.send(Shutdown())
            else:
                self.nodes.report_down(member, NODE_LEFT)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `reports` has something new; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.nodes.inbox.fresh, timeout_s)

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
            owned = [member for member in self.nodes.members.values() if self.watch.owner(member.name) is not None]
            for member in owned:
                if member.session is not None:
                    member.session.send(self._farewell)
            self.watch.poke()
            return self._changed.wait_for(lambda: not any(member.up for member in owned), timeout_s)

    def close(self, *, kill_agents: bool = False) -> None:
        """Stop the executor; agents and ranks go on unless `kill_agents` is set."""
        if self.watch.runs:
            if kill_agents:
                self.shutdown(now=True)
            self.watch.stop()
        self.claims.stop()
        with self._changed:
            for member in self.nodes.members.values():
                member.disconnect()
        for engine in self._engines:
            engine.close()

    # -- the link: the web server's thread ---------------------------------------------------------------------

    def _judge(self, arrived: Sequence[Arrived]) -> list[Refused | None]:
        """Check tokens, and judge claims; return the refusals."""
        claims = [each for each in arrived if isinstance(each, ArrivedClaim)]
        answers = iter(self.claim(claims) if claims else ())
        return [self._check(each) if isinstance(each, ArrivedToken) else next(answers) for each in arrived]

    def _check(self, arrived: ArrivedToken) -> Refused | None:
        try:
            check_node(arrived.node, arrived.token, self._node_of)
        except (TokenError, ForbiddenError, StoreError) as error:
            return Refused(why=error.message, hint=error.hint or "", final=isinstance(error, NodeLeftError))
        return None

    def claim(self, claims: Sequence[ArrivedClaim]) -> list[Refused | None]:
        """Judge agents' claims; welcome each over its session, or return its refusal."""
        sources = [[source for source in claim.sources if is_stream_of(node, source)] for node, claim, _ in claims]
        try:  # Without the lock: while a database hangs, the beats of other agents are answered.
            servers = self._servers()
            every = list(dict.fromkeys(source for each in sources for source in each))
            marks = self._log.marks(every) if every else {}
        except StandbyError as error:
            return [Refused(why=error.message, hint=error.hint or "")] * len(claims)
        except StoreError as error:
            return [_unreadable(error)] * len(claims)
        answers = []
        for (node, claim, session), own in zip(claims, sources, strict=True):
            session.servers = servers
            answers.append(self._claim(node, claim, session, {source: marks[source] for source in own}))
        with self._changed:
            self.nodes.notify()  # commands may be waiting for these nodes
        return answers

    def _claim(self, name: str, claim: Claim, session: Session, marks: dict[str, int]) -> Refused | None:
        with self._changed:
            member = self.nodes.members.get(name) or Member(name)
            is_other = member.is_other(claim)
        held = self._log.held_on(name) if is_other else ()  # without the lock, since a tick takes it too
        with self._changed:
            member = self.nodes.members.get(name) or member
            epoch = judge(member, claim, self.nodes.terms, self.nodes.clock.now_s(), held=bool(held))
            if isinstance(epoch, Refused):
                _log.warning("a claim of node %s from %s was refused: %s", name, session.peer, epoch.why)
                return epoch
            try:
                if epoch != member.epoch and is_other:
                    self.nodes.report_lost(member, held, "its lease is over, and another machine has its name")
                elif epoch != member.epoch:
                    self.nodes.report_down(member, "its agent is gone: another one has the node")
            except StoreError as error:
                return _unreadable(error)
            self.nodes.members[name] = member
            member.disconnect()
            member.leaves = False
            if epoch != member.epoch:
                member.epoch, member.up, member.reachable, member.lost = epoch, True, True, False
            member.machine, member.incarnation, member.session = claim.machine, claim.incarnation, session
            self.nodes.heard(member)
            now_us = self.nodes.clock.now_us()
            member.clock_off_us = claim.clock_us - now_us
            self.nodes.inbox.open(marks.items(), member)
            session.send(
                Welcome(
                    epoch=epoch,
                    marks=marks,
                    lease_s=self.nodes.terms.lease_s,
                    beat_s=self.nodes.terms.beat_s,
                    clock_us=now_us,
                    servers=list(session.servers),
                )
            )
            if self._farewell is not None and self.watch.owner(name) is not None:
                session.send(self._farewell)
        return None

    def receive(self, name: str, session: Session, message: FromAgent) -> None:
        """Take in a message of an agent whose claim was accepted."""
        with self._changed:
            member = self.nodes.members[name]
            if member.session is not session:
                return
            try:
                self.nodes.heard(member)
                if isinstance(message, Beat):
                    self._answer(session, message)
                elif isinstance(message, Confirm):
                    member.sent.discard(message.number)
                    member.confirmed[message.number] = message
                    self._changed.notify_all()
                elif isinstance(message, Records):
                    self._intake.take(member, session, message)
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
        queued = None if self.queued == session.queued else list(self.queued)
        session.queued = self.queued
        around = self.neighbours.now
        fresh_around = None if around == session.neighbours else around
        session.neighbours = around
        now_us = self.nodes.clock.now_us()
        session.send(Beat(number=beat.number, clock_us=now_us, servers=fresh, queued=queued, neighbours=fresh_around))

    def closed(self, name: str, session: Session, why: str) -> None:
        """Note that a connection has ended."""
        with self._changed:
            member = self.nodes.members.get(name)
            if member is not None and member.session is session:
                _log.info("the connection to the agent of %s ended: %s", name, why)
                member.disconnect()
                if member.leaves:
                    self.nodes.report_down(member, NODE_LEFT)
                self.watch.poke()
                self.nodes.notify()


def _unreadable(error: StoreError) -> Refused:
    return Refused(why=f"the log cannot be read now: {error.message}")


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
