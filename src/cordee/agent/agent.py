"""The NodeAgent: one loop over its child processes, its server and its rank groups.

It stores each order before it confirms it, and reports what happened. Only the server decides which ranks start, get
notice or are killed. The server may die at any time without any effect on the ranks.
"""

import json
import logging
import os
import selectors
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cordee.agent import process, wire
from cordee.agent.facts import Facts, labels_of
from cordee.agent.gpus import Devices, lock_file
from cordee.agent.journal import Journal
from cordee.agent.launch import Assignment, LaunchError, prepare
from cordee.agent.link import Link
from cordee.agent.logs import LogPump
from cordee.agent.node_stream import NodeStream
from cordee.agent.rank_group import RankGroup, RankGroupResult, read_secrets, without_secrets
from cordee.agent.reclaim import Reclaims
from cordee.agent.spools import Spools
from cordee.agent.takeover import end_survivors
from cordee.agent.wakeup import Wakeup
from cordee.event_json import decode
from cordee.events import (
    AttemptPlaced,
    Event,
    KillOrdered,
    NodeReclaimed,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId
from cordee.telemetry.cloud import Hint, Reclaim
from cordee.telemetry.notices import write_hint
from cordee.units import US_PER_S, plural

DIAL_S = 0.1  # between two tries to reach the server
FOLLOW_S = 0.05  # between two reads of the spools while ranks run
LOCK_S_MAX = 10.0  # a predecessor may be dying

_log = logging.getLogger("cordee.agent")


class NodeAgent:
    """The agent of one node.

    Args:
        home: the server's home.
        node: the node's name.
        epoch: higher than that of every earlier agent of this node; the server refuses a lower one.
        devices: the GPUs or slots of the node.
    """

    def __init__(self, home: Path, node: str, epoch: int, devices: Devices) -> None:
        self._home, self._node, self._epoch = home, node, epoch
        self._facts = Facts(node, devices, labels_of(self._folder))
        self._journal = Journal(home, node)
        self._selector = selectors.DefaultSelector()
        self._link = Link(home, node, epoch, self._selector)
        self._spools = Spools(self._link, self._report)
        self._groups: dict[str, RankGroup] = {}
        self._wakeup = Wakeup(self._selector)
        self._leaving = False
        self._reclaim: Reclaim | None = None
        self._next_dial_s = self._next_follow_s = 0.0

    @property
    def _folder(self) -> Path:
        return self._home / "nodes" / self._node

    def run(self) -> int:
        """Serve until the server or a signal ends the agent; return the exit code."""
        if self._take_lock() is None:
            _log.error("another agent holds %s", self._folder / "lock")
            return 1
        process.become_subreaper()
        self._wakeup.watch_signals()
        self._stream = NodeStream(self._folder, self._epoch)
        self._take_over()
        self._report_node()
        reclaims = Reclaims(self._wakeup.wake)
        reclaims.start(self._reclaimed, self._withdrawn, self._hinted, self._located)
        while not (self._leaving and not self._groups):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            reclaims.take_in()
            self._step()
        reclaims.close()
        self._link.forward()
        self._stream.close()
        return 0

    # -- before the first order ----------------------------------------------------------------------------

    def _take_lock(self) -> int | None:
        self._folder.mkdir(parents=True, exist_ok=True)
        until_s = time.monotonic() + LOCK_S_MAX
        while (fd := lock_file(self._folder / "lock")) is None and time.monotonic() < until_s:
            time.sleep(0.02)
        return fd

    def _take_over(self) -> None:
        """End the processes that an earlier agent of this node left, and forward all its reports."""
        ended = self._stream.forward_all(self._link)
        orders = self._journal.unsettled()
        for order in orders:
            self._spools.complete(order, self._journal.folder(order.job_id, order.epoch))
        for order in orders:
            if order.tag in ended:
                continue
            n_ended = end_survivors(order, self._journal.ranks(order))
            why = f"the agent of {self._node} died; its successor ended {plural(n_ended, 'process', 'processes')}"
            self._report_end(order, RankGroupResult(Outcome.LOST, why))

    # -- the loop ------------------------------------------------------------------------------------------

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        due = [group.wake_at_s for group in self._groups.values() if group.wake_at_s is not None]
        if self._link.channel is None:
            due.append(self._next_dial_s)
        elif self._groups:
            due.append(self._next_follow_s)
        if self._facts.devices.real:
            due.append(self._facts.devices.next_s)
        return max(0.0, min(due) - now_s) if due else None

    def _step(self) -> None:
        now_s = time.monotonic()
        self._reap(now_s)
        if self._wakeup.terminated and not self._leaving:
            self._leaving = True
            for group in self._groups.values():
                group.notice(now_s + group.order.grace_s)
        for tag, group in list(self._groups.items()):
            if group.tick(now_s):
                del self._groups[tag]
                self._finish(group)
        if self._link.channel is None and now_s >= self._next_dial_s:
            self._next_dial_s = now_s + DIAL_S
            self._dial()
        if self._facts.devices.real and now_s >= self._facts.devices.next_s:
            self._report_node()
        if now_s >= self._next_follow_s:
            self._next_follow_s = now_s + FOLLOW_S
            for group in self._groups.values():
                self._spools.follow(group.order, group.folder)
        self._link.forward()

    def _reap(self, now_s: float) -> None:
        exits = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            exits.append((pid, os.waitstatus_to_exitcode(status)))
        # When a rank is killed, others may fail because of it before this loop sees either: report the killed one.
        for pid, code in sorted(exits, key=lambda each: each[1] != -signal.SIGKILL):
            any(group.reaped(pid, code, now_s) for group in self._groups.values())

    def _finish(self, group: RankGroup) -> None:
        for log in group.logs:
            if log.read_fd in self._selector.get_map():
                self._selector.unregister(log.read_fd)
            log.close()
        result = group.result()
        self._spools.complete(group.order, group.folder)
        self._report_end(group.order, result)

    def _pump(self, log: LogPump) -> None:
        if not log.pump():
            self._selector.unregister(log.read_fd)

    # -- reports -------------------------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        self._stream.append(event)

    def _report_end(self, order: Assignment, result: RankGroupResult) -> None:
        _log.info("%s ended: %s: %s", order.tag, result.outcome, result.why)
        ended = RanksEnded(
            at_us=_now_us(),
            job_id=JobId(order.job_id),
            epoch=order.epoch,
            node=self._node,
            outcome=result.outcome,
            failure=result.failure,
            why=result.why,
        )
        self._report(ended)

    def _report_node(self) -> None:
        """Report the node when it is new or has changed."""
        ours = {each.pid for group in self._groups.values() for each in group.processes()}
        node = self._facts.changed(self._epoch, ours)
        if node is not None:
            self._report(NodeUp(at_us=_now_us(), node=node))

    # -- the cloud -----------------------------------------------------------------------------------------

    def _reclaimed(self, reclaim: Reclaim) -> None:
        """Report the reclaim and give the ranks notice at once: the server may be down, or on this machine."""
        _log.warning("the cloud takes this machine in %.0f s: %s", reclaim.left_s(), reclaim.why)
        self._reclaim = reclaim
        self._report(
            NodeReclaimed(at_us=_now_us(), node=self._node, epoch=self._epoch, deadline_us=reclaim.deadline_us)
        )
        for group in self._groups.values():
            self._notice_of(reclaim, group)

    def _notice_of(self, reclaim: Reclaim, group: RankGroup) -> None:
        group.notice(time.monotonic() + min(reclaim.left_s(), group.order.grace_s), machine_stays=False)

    def _withdrawn(self, reclaim: Reclaim) -> None:
        """Exit, since the machine stays: the claim of the next agent puts the node back into use."""
        _log.warning("the cloud takes its notice back (%s); another agent takes this node over", reclaim.why)
        self._leaving = True

    def _hinted(self, hint: Hint) -> None:
        """Pass a hint that the machine may go soon on to the ranks, which save and go on."""
        _log.warning("the cloud says: %s", hint.why)
        for group in self._groups.values():
            write_hint(group.folder / "spool", _now_us(), hint.why)

    def _located(self, labels: Mapping[str, str]) -> None:
        """Report where and how the cloud runs this machine."""
        self._facts.learn(labels)
        self._report_node()

    # -- the server ----------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if not (self._folder / "lock").exists():
            _log.warning("the home %s is gone", self._home)
            self._end_all("the home of its server is gone")
        else:
            self._link.dial(self._receive)

    def _receive(self) -> None:
        for message in self._link.receive():
            if isinstance(message, wire.Challenge):
                self._link.hello(message.nonce)
            elif isinstance(message, wire.Welcome | wire.Refused):
                self._answered(message)
            elif not self._link.welcomed:
                _log.error("the process at the server's address is not the server")
                self._link.hang_up()
            elif isinstance(message, wire.Seen):
                self._seen(message.source, message.seq)
            elif isinstance(message, wire.Order):
                self._carry_out(message)
            elif isinstance(message, wire.Shutdown):
                self._leaving = True
                if message.now:
                    self._end_all("the server ended its agents")

    def _answered(self, message: wire.Welcome | wire.Refused) -> None:
        """Handle the answer to the claim, if it is the server's."""
        if not self._link.is_server(message.proof):
            why = (
                message.why if isinstance(message, wire.Refused) else "its answer does not prove that it is our server"
            )
            _log.error("no server for us: %s", why)
            self._link.hang_up()
        elif isinstance(message, wire.Welcome):
            self._link.welcome(message.marks)
            for source, mark in message.marks.items():
                self._seen(source, mark)
        else:
            _log.error("refused by the server: %s", message.why)
            self._link.hang_up()
            if message.final:
                self._end_all(f"its agent was refused: {message.why}")

    def _end_all(self, why: str) -> None:
        self._leaving = True
        for group in self._groups.values():
            group.kill(why, time.monotonic())

    def _seen(self, source: str, seq: int) -> None:
        """Handle that the server has committed a stream up to `seq`."""
        self._link.seen(source, seq)
        self._stream.settle(source, seq, self._journal, self._spools, self._link)

    # -- orders --------------------------------------------------------------------------------------------

    def _carry_out(self, order: wire.Order) -> None:
        """Carry out an order unless that was done before; then confirm it."""
        event = decode(order.event)
        if self._leaving and isinstance(event, AttemptPlaced):
            return  # the next agent starts it
        try:
            self._obey(event, order)
        except OSError as error:
            # An order that is not on disk is not confirmed, so the server sends it again over the next connection.
            _log.error("command %d cannot be kept: %s", order.number, error)
            self._link.hang_up()
            return
        self._link.send(wire.Confirm(number=order.number))

    def _obey(self, event: Event, order: wire.Order) -> None:
        if isinstance(event, AttemptPlaced):
            if not self._journal.has(event.job_id, event.epoch, "order"):
                self._start(event, order)
        elif isinstance(event, NoticeGiven):
            group = self._groups.get(f"{event.job_id}.{event.epoch}")
            if group is not None:
                deadline_s = time.monotonic() + (event.deadline_us - _now_us()) / US_PER_S
                group.notice(deadline_s, machine_stays=event.reason is not NoticeReason.RECLAIM)
        elif isinstance(event, KillOrdered):
            group = self._groups.get(f"{event.job_id}.{event.epoch}")
            if group is not None:
                group.kill(event.why, time.monotonic())
            elif not self._journal.has(event.job_id, event.epoch, "order"):
                self._journal.keep_tombstone(event.job_id, event.epoch, event.why)

    def _start(self, placed: AttemptPlaced, message: wire.Order) -> None:
        order = Assignment(
            job_id=placed.job_id,
            epoch=placed.epoch,
            node=self._node,
            leases=placed.leases,
            spec=json.loads(message.spec),
            estimate=message.estimate,
            master_addr=message.master_addr,
            master_port=message.master_port,
            placed_us=placed.at_us,
        )
        folder = self._journal.folder(order.job_id, order.epoch)
        if self._journal.has(order.job_id, order.epoch, "killed"):
            self._journal.keep_order(order)
            self._report_end(order, RankGroupResult(Outcome.KILLED, "it was killed before it started"))
            return
        try:
            secrets = read_secrets(self._home, list(order.spec.get("secrets") or ()))
            launch = prepare(
                order,
                folder=folder,
                base_env=without_secrets(self._home, os.environ),
                secrets=secrets,
                real_gpus=self._facts.devices.real,
                gpus=self._facts.devices.count,
            )
        except Exception as error:  # an error in one job's spec must not end the node's other rank groups
            why = str(error) if isinstance(error, LaunchError) else f"its spec cannot be used: {error!r}"
            self._journal.keep_order(order)
            self._report_end(order, RankGroupResult(Outcome.FAILED, why))
            return
        self._journal.keep_order(order, launch=launch.says, omp_num_threads=launch.omp_num_threads)
        group = self._groups[order.tag] = RankGroup(order, folder)
        group.start(launch, secrets)
        self._journal.keep_ranks(order, group.known)
        for log in group.logs:
            self._selector.register(log.read_fd, selectors.EVENT_READ, partial(self._pump, log))
        if self._reclaim is not None:
            self._notice_of(self._reclaim, group)
        _log.info("%s started: %s", order.tag, launch.says)
        self._report(
            RanksStarted(at_us=_now_us(), job_id=placed.job_id, epoch=placed.epoch, node=self._node, launch=launch.says)
        )


def _now_us() -> int:
    return time.time_ns() // 1000
