"""The NodeAgent: one loop over its child processes, its server and its rank groups.

It stores each order before it confirms it, and reports what happened. Only the server decides which ranks start, get
notice or are killed. The server may die at any time without any effect on the ranks; when it may run and cannot be
reached, the agent ends its ranks with its lease.
"""

import json
import logging
import math
import os
import platform
import secrets
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import cordee
from cordee.agent import process
from cordee.agent.clock import Clock
from cordee.agent.connection import Arrival, Closed, Opened
from cordee.agent.facts import Facts
from cordee.agent.gpus import lock_file
from cordee.agent.interpreters import Interpreters, Software
from cordee.agent.journal import Journal
from cordee.agent.launch import Assignment
from cordee.agent.lease import Lease
from cordee.agent.link import Link
from cordee.agent.messages import Beat, Claim, Confirm, Dial, Meeting, Order, Refused, Seen, Shutdown, Welcome
from cordee.agent.node_stream import NodeStream
from cordee.agent.process import Processes
from cordee.agent.rank_group import RankGroup
from cordee.agent.rank_groups import RankGroups
from cordee.agent.reclaim import Reclaims
from cordee.agent.settings import AgentSettings, machine_id
from cordee.agent.spools import Spools
from cordee.agent.transfers import Transfers
from cordee.agent.wakeup import Wakeup
from cordee.event_json import decode
from cordee.events import (
    AttemptPlaced,
    Event,
    KillOrdered,
    ModelOrdered,
    NodeReclaimed,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
)
from cordee.telemetry.cloud import Hint, Reclaim
from cordee.telemetry.host import free_port
from cordee.units import US_PER_S

LOCK_S_MAX = 10.0  # a predecessor may be dying

_log = logging.getLogger("cordee.agent")


class Connects(Protocol):
    """The connection to the servers (`connection.Connection`, or a test's)."""

    def start(self) -> None:
        """Begin to dial."""
        ...

    def arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call, in order."""
        ...

    def close(self) -> None:
        """Dial no more."""
        ...


class NodeAgent:
    """The agent of one node.

    Args:
        folder: the agent's folder.
        settings: its agent.json.
        facts: about the node, with its GPUs or slots.
        connect: makes the connection, from the folder and a function that wakes the loop.
        transfers: makes the transfers, from the folder, the settings and a function that wakes the loop.
        clock: the time.
        processes: those of the machine.

    Attributes:
        lease: of its node, as the agent counts it.
    """

    def __init__(
        self,
        folder: Path,
        settings: AgentSettings,
        facts: Facts,
        connect: Callable[[Path, Callable[[], None]], Connects],
        *,
        transfers: Callable[[Path, AgentSettings, Callable[[], None]], Transfers] = Transfers,
        clock: Clock | None = None,
        processes: Processes = process,
    ) -> None:
        self._folder, self._settings = folder, settings
        self._facts = facts
        self._clock = clock or Clock()
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup(self._selector)
        self._connection = connect(folder, self._wakeup.wake)
        self._link, self.lease = Link(), Lease()
        self._stream = NodeStream(folder, settings.node, self._link, self._clock)
        journal = Journal(settings.attempts(folder), settings.node)
        spools = Spools(self._link, self._stream.append, self._clock)
        self._groups = RankGroups(
            settings.node,
            facts.devices,
            journal,
            spools,
            self._selector,
            self._stream.append,
            self._clock,
            processes,
            transfers(folder, settings, self._wakeup.wake),
            Interpreters(self._wakeup.wake),
        )
        self._claim = Claim(
            incarnation=secrets.token_hex(8),
            machine="",
            epoch=0,
            epoch_min=0,
            sources=[],
            clock_us=0,
            cordee=cordee.__version__,
            python=platform.python_version(),
        )
        self._claimed_s = 0.0
        self._leaving = False
        self._reclaim: Reclaim | None = None

    def run(self) -> int:
        """Serve until the server or a signal ends the agent; return the exit code."""
        if self._take_lock() is None:
            _log.error("another agent holds %s", self._folder / "lock")
            return 1
        process.become_subreaper()
        self._wakeup.watch_signals()
        self.begin()
        reclaims = Reclaims(self._wakeup.wake)
        reclaims.start(self.reclaimed, self._withdrawn, self._hinted, self._located)
        while not self.ended:
            due_s = self.due_s
            for key, _ in self._selector.select(None if due_s == math.inf else max(0.0, due_s - self._clock.now_s())):
                key.data()
            reclaims.take_in()
            self.step()
        reclaims.close()
        self._link.forward()
        self.close()
        return 0

    def _take_lock(self) -> int | None:
        self._folder.mkdir(parents=True, exist_ok=True)
        until_s = time.monotonic() + LOCK_S_MAX
        while (fd := lock_file(self._folder / "lock")) is None and time.monotonic() < until_s:
            time.sleep(0.02)
        return fd

    def begin(self) -> None:
        """Take over from an earlier agent of this node, and dial."""
        self._claim = replace(self._claim, machine=machine_id(self._folder))
        self._groups.take_over(ended=self._stream.forward_older())
        self._groups.transfers.begin()
        self._connection.start()

    def close(self) -> None:
        """Close the connection after what was sent, and every file; ranks go on."""
        self._groups.close()
        self._connection.close()
        self._link.close()
        self._stream.close()
        self._wakeup.close()
        self._selector.close()

    # -- the loop ------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Return the epoch that a server has granted; 0 before the first welcome."""
        return self._claim.epoch

    @property
    def ended(self) -> bool:
        """Return whether nothing is left to do."""
        return self._leaving and not self._groups and self._groups.transfers.hold_until_s is None

    @property
    def due_s(self) -> float:
        """The monotonic time of the next `step`; infinite if nothing is due."""
        due = [*self._groups.due_s, self.lease.next_beat_s, self._groups.transfers.hold_until_s or math.inf]
        due.append(self._stream.retry_s)
        if self._groups:
            ends = [self.lease.notice_s(group.order.grace_s) for group in self._groups] + [self.lease.ends_s]
            due += [each_s for each_s in ends if each_s > self._clock.now_s()]
        if self._facts.devices.real and self._claim.epoch:
            due.append(self._facts.devices.next_s)
        return min(due)

    def step(self) -> None:
        """Do everything that is due."""
        for arrival in self._connection.arrived():
            self._take_in(arrival)
        now_s = self._clock.now_s()
        if self._wakeup.terminated and not self._leaving:
            self._terminated(now_s)
        self._keep_lease(now_s)
        if self._groups.examined():
            self._report_node()  # before the end of the attempt, so that the next one is placed elsewhere
        self._groups.step(now_s)
        self._keep_disk(now_s)
        data = self._groups.transfers.prefetches
        prefetched = (self._facts.data, self._facts.gives_at) != (data.held, data.sharing.gives_at)
        if prefetched or (self._facts.devices.real and now_s >= self._facts.devices.next_s):
            self._report_node()
        self._link.forward(hold=self._groups.transfers.hold_until_s is not None)

    def _terminated(self, now_s: float) -> None:
        """Leave: whoever ends the agent takes the node, as Slurm does when an allocation is over."""
        self._leaving = True
        grace_s = max((group.order.grace_s for group in self._groups), default=0.0)
        deadline_us = time.time_ns() // 1000 + round(grace_s * US_PER_S)
        self._reclaim = Reclaim(why="its agent was told to leave", deadline_us=deadline_us)
        self._report_reclaim()
        for group in self._groups:
            group.notice(now_s + group.order.grace_s)

    def _keep_lease(self, now_s: float) -> None:
        """Send the beat that is due; give notice to the ranks before the lease ends, and kill them at its end."""
        lease = self.lease
        if now_s >= lease.next_beat_s:
            if lease.unanswered or not self._link.welcomed:
                _log.warning("the server does not answer; dialling again")
                self._hang_up()
            else:
                self._link.send(Beat(number=lease.beat(now_s), clock_us=self._clock.now_us()))
        for group in self._groups:
            if now_s >= lease.notice_s(group.order.grace_s):
                group.notice(lease.ends_s)
        if now_s >= lease.ends_s and not lease.lapsed:
            lease.lapsed = True
            _log.error("the lease of %.0f s has ended without an answer of a server", lease.lease_s)
            for group in self._groups:
                group.notice(now_s)  # no uploader is spared either
            self._end_all(f"its node had no contact to a server for {lease.lease_s:g} s", Outcome.LOST)
            self._hang_up()

    def _keep_disk(self, now_s: float) -> None:
        """Write what a full disk has not taken; while there is such a thing, offer no GPU for new work."""
        if now_s >= self._stream.retry_s:
            self._stream.write()
        if self._facts.problem != self._stream.problem:
            self._facts.problem = self._stream.problem
            self._report_node()

    def _hang_up(self) -> None:
        self._link.hang_up()
        self.lease.disconnected()

    def _end_all(self, why: str, outcome: Outcome = Outcome.KILLED) -> None:
        for group in self._groups:
            group.kill(why, self._clock.now_s(), outcome=outcome)

    # -- reports -------------------------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        self._stream.append(event)

    def _report_node(self) -> None:
        """Report the node when it is new or has changed; before the first welcome it has no epoch."""
        data = self._groups.transfers.prefetches
        self._facts.data, self._facts.gives_at = data.held, data.sharing.gives_at
        node = self._facts.changed(self._claim.epoch, self._groups.pids()) if self._claim.epoch else None
        if node is not None:
            self._report(NodeUp(at_us=self._clock.now_us(), node=replace(node, machine=self._claim.machine)))

    # -- the cloud -----------------------------------------------------------------------------------------

    def reclaimed(self, reclaim: Reclaim) -> None:
        """Report the reclaim and give the ranks notice at once: the server may be down, or on this machine."""
        _log.warning("the cloud takes this machine in %.0f s: %s", reclaim.left_s(), reclaim.why)
        self._reclaim = reclaim
        self._report_reclaim()
        for group in self._groups:
            self._notice_of(reclaim, group)

    def _report_reclaim(self) -> None:
        if self._reclaim is not None and self._claim.epoch:
            deadline_us = self._reclaim.deadline_us + self._clock.offset_us
            reclaimed = NodeReclaimed(
                at_us=self._clock.now_us(),
                node=self._settings.node,
                epoch=self._claim.epoch,
                deadline_us=deadline_us,
            )
            self._report(reclaimed)

    def _notice_of(self, reclaim: Reclaim, group: RankGroup) -> None:
        group.notice(self._clock.now_s() + min(reclaim.left_s(), group.order.grace_s), machine_stays=False)

    def _withdrawn(self, reclaim: Reclaim) -> None:
        """Exit, since the machine stays: the claim of the next agent puts the node back into use."""
        _log.warning("the cloud takes its notice back (%s); another agent takes this node over", reclaim.why)
        self._leaving = True

    def _hinted(self, hint: Hint) -> None:
        _log.warning("the cloud says: %s", hint.why)
        self._groups.hint(hint.why)

    def _located(self, labels: Mapping[str, str]) -> None:
        """Report where and how the cloud runs this machine."""
        self._facts.learn(labels)
        self._report_node()

    # -- the server ----------------------------------------------------------------------------------------

    def _take_in(self, arrival: Arrival) -> None:
        if isinstance(arrival, Closed):
            self._closed(arrival)
        elif isinstance(arrival, Opened):
            self._link.open(arrival.line)
            self._claimed_s = self._clock.now_s()
            self.lease.claimed(self._claimed_s)
            epoch_min = self._claim.epoch or self._stream.epoch_min
            self._claim = replace(
                self._claim, epoch_min=epoch_min, sources=self._link.sources, clock_us=self._clock.now_us()
            )
            self._link.send(self._claim)
        elif self._link.line is None:
            return  # of a connection that was dropped
        elif isinstance(arrival, Welcome):
            self._welcomed(arrival)
        elif isinstance(arrival, Refused):
            self._refused(arrival)
        elif isinstance(arrival, Beat):
            self._know(arrival.servers or ())
            self._groups.transfers.prefetches.will_come(arrival.queued)
            address = self._settings.address or self._link.line.address
            self._groups.transfers.prefetches.sharing.learn(arrival.neighbours, address)
            sent_s = self.lease.answered(arrival.number)
            if sent_s is not None:
                self._clock.answered(arrival.clock_us, sent_s)
        elif isinstance(arrival, Seen):
            self._seen(arrival.source, arrival.seq)
        elif isinstance(arrival, Order):
            self._carry_out(arrival)
        elif isinstance(arrival, Dial):
            self._groups.dial(arrival)
        elif isinstance(arrival, Shutdown):
            self._leaving = True
            if arrival.now:
                self._end_all("the server ended its agents")

    def _closed(self, closed: Closed) -> None:
        if self._link.line is not None:
            _log.info("the connection to the server ended: %s", closed.why)
        self._link.closed()
        self.lease.disconnected()
        if closed.refused:
            self.lease.no_server(closed.at_s)
        if not (self._folder / "lock").exists():
            _log.warning("the folder %s is gone", self._folder)
            self._leaving = True
            self._end_all("the folder of its agent is gone")

    def _welcomed(self, welcome: Welcome) -> None:
        now_s = self._clock.now_s()
        self._clock.begin()
        self._clock.answered(welcome.clock_us, self._claimed_s)
        self.lease.welcome(welcome.lease_s, welcome.beat_s, self._claimed_s, now_s)
        if welcome.epoch != self._claim.epoch:
            if self._claim.epoch:
                self._end_all("its node was taken to be down", Outcome.LOST)
            self._claim = replace(self._claim, epoch=welcome.epoch)
            self._stream.begin(welcome.epoch)
            self._report_node()
            self._report_reclaim()
        self._know(welcome.servers)
        self._link.welcome(welcome.marks)
        self._groups.transfers.connected()
        for source, mark in welcome.marks.items():
            self._seen(source, mark)

    def _know(self, servers: Sequence[str]) -> None:
        """Keep the addresses of the servers for the next round of dialling; one with a home reads them there."""
        if self._settings.home is None and servers and set(servers) != set(self._settings.servers):
            self._settings = replace(self._settings, servers=tuple(servers))
            try:
                self._settings.write(self._folder)
            except OSError as error:
                _log.warning("the addresses of the servers are not kept: %s", error)

    def _refused(self, refused: Refused) -> None:
        _log.error("refused by the server: %s%s", refused.why, f" (hint: {refused.hint})" if refused.hint else "")
        self._hang_up()
        if refused.final:
            self._leaving = True
            self._end_all(f"its agent was refused: {refused.why}")

    def _seen(self, source: str, seq: int) -> None:
        """Handle that the server has committed a stream up to `seq`."""
        self._link.seen(source, seq)
        for ended in self._stream.settle(source, seq):
            self._groups.settle(ended)

    # -- orders --------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order) -> None:
        """Carry out an order unless that was done before, and confirm it as soon as it is on disk."""
        event = decode(order.event)
        over = self._leaving or self._clock.now_s() >= self.lease.ends_s
        if over and isinstance(event, AttemptPlaced):
            return  # the next agent starts it, or another node: this order may have waited while the agent stood still
        try:
            self._obey(event, order)
        except OSError as error:
            # An order that is not on disk is not confirmed, so the server sends it again over the next connection.
            _log.error("command %d cannot be kept: %s", order.number, error)
            self._hang_up()

    def _obey(self, event: Event, order: Order) -> None:
        if isinstance(event, AttemptPlaced):
            self._start(event, order)
            return
        if isinstance(event, NoticeGiven):
            group = self._groups.get(event.job_id, event.epoch)
            if group is not None:
                deadline_s = self._clock.now_s() + (event.deadline_us - self._clock.now_us()) / US_PER_S
                group.notice(deadline_s, machine_stays=event.reason is not NoticeReason.RECLAIM)
        elif isinstance(event, KillOrdered):
            self._groups.kill(event.job_id, event.epoch, event.why)
        elif isinstance(event, ModelOrdered):
            self._groups.hold(event.job_id, event.epoch, event.model, order.number)
        self._link.send(Confirm(number=order.number))

    def _start(self, placed: AttemptPlaced, order: Order) -> None:
        """Start a rank group, unless that was done before."""
        env = _without_secrets(self._settings.home, os.environ)
        kept = self._groups.kept_order(placed.job_id, placed.epoch)
        if kept is not None:
            self._confirm_start(kept, order.number, env)
            return
        new = self._assignment(placed, order)
        sick = self._facts.devices.preflight(new.gpus)
        if sick:
            self._report_node()  # before the end of the attempt, so that the next one is placed elsewhere
        self._groups.start(new, order.secrets or {}, env, lambda: self._confirm_start(new, order.number, env), sick)
        group = self._groups.get(placed.job_id, placed.epoch)
        if group is not None and self._reclaim is not None:
            self._notice_of(self._reclaim, group)
        if order.meeting is not None:
            self._groups.compare(new, Software(order.meeting.python, order.meeting.torch), env)

    def _confirm_start(self, kept: Assignment, number: int, env: Mapping[str, str]) -> None:
        """Confirm an order that is on disk; of a gang's rank 0 when the software of its interpreter is known."""
        if kept.node_rank or not kept.master_port:
            self._link.send(Confirm(number=number))
            return
        meeting = Meeting(address=kept.master_addr, port=kept.master_port)
        if len(kept.leases) == 1:
            self._link.send(Confirm(number=number, meeting=meeting))
            return

        def confirm(own: Software) -> None:
            self._link.send(Confirm(number=number, meeting=replace(meeting, python=own.python, torch=own.torch)))

        self._groups.interpreters.ask(kept.spec, env, confirm)

    def _assignment(self, placed: AttemptPlaced, order: Order) -> Assignment:
        meeting = order.meeting
        if placed.leases[0].node == self._settings.node:
            assert self._link.line is not None, "the order came over it"
            meeting = Meeting(address=self._settings.address or self._link.line.address, port=free_port())
        return Assignment(
            job_id=placed.job_id,
            epoch=placed.epoch,
            node=self._settings.node,
            leases=placed.leases,
            spec=json.loads(order.spec),
            estimate=order.estimate,
            master_addr=meeting.address if meeting else "",
            master_port=meeting.port if meeting else 0,
            placed_us=placed.at_us,
        )


def _without_secrets(home: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the shell that started the server, without the secrets of its home.

    A job that declares a secret gets it, masked in its logs; other jobs shall not find it by chance.
    """
    known = {path.name for path in (Path(home) / "secrets").glob("*")} if home else set()
    return {name: value for name, value in environ.items() if name not in known}
