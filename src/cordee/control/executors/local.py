"""The executor of this machine: one NodeAgent per node, each a separate process that outlives the server.

One thread holds the connections and starts missing agents; the control loop's thread takes reports and sends
commands. A report stays here until it is committed, and at the agent until the agent has the acknowledgement.
"""

import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

from cordee.agent import wire
from cordee.agent.wakeup import Wakeup
from cordee.control.executors import rendezvous
from cordee.control.executors.inbox import Inbox
from cordee.control.executors.supervise import LOOK_S, NodeConfig, Supervised
from cordee.control.ports import Pending, Report
from cordee.errors import StoreError
from cordee.event_json import decode, encode
from cordee.events import AttemptPlaced, Event, NodeDown
from cordee.reports import parse_stream, repair_text

_log = logging.getLogger("cordee.control")


@dataclass(frozen=True, slots=True)
class _Log:
    """Queries of the log; the executor's thread calls them too."""

    mark: Callable[[str], int]
    epoch: Callable[[str], int]


class LocalExecutor:
    """The executor that runs attempts on this machine's nodes; implements `cordee.control.ports.Executor`.

    Args:
        home: the server's. Agents find the server by the home's `server.json` (`agents`: host, port) and `token`.
        mark: returns the highest committed seq of a stream. The executor's thread calls it too.
        epoch: returns a node's highest epoch in the log's NodeUp events; 0 if none.
        slots: number of CPU slots of the single node `local`, in place of its GPUs.
        nodes: the nodes of this machine; None: the single node `local`.
        wake: called from the executor's thread when `reports` has something new.
        confirm_s: how long `carry_out` waits for agents to confirm.
    """

    def __init__(
        self,
        home: Path,
        *,
        mark: Callable[[str], int],
        epoch: Callable[[str], int],
        slots: int | None = None,
        nodes: Sequence[NodeConfig] | None = None,
        wake: Callable[[], None] = lambda: None,
        confirm_s: float = 2.0,
    ) -> None:
        self._home = home
        self._log, self._wake, self._confirm_s = _Log(mark, epoch), wake, confirm_s
        self._configs = [NodeConfig(name="local", slots=slots)] if nodes is None else list(nodes)
        self._nodes: dict[str, Supervised] = {}
        self._changed = threading.Condition()
        self._inbox = Inbox()
        self._stopped = False
        self._farewell: wire.Shutdown | None = None  # sent to the agents when they shall exit
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wakeup = Wakeup(self._selector)
        self._thread = threading.Thread(target=self._loop, name="cordee-local-executor", daemon=True)

    def listen(self) -> tuple[str, int]:
        """Open the port that agents dial; return host and port, which belong in `server.json`."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()
        return str(host), int(port)

    def start(self) -> None:
        """Accept connections of agents, and start missing agents. Write `server.json` before this call."""
        assert self._listener is not None, "listen() comes first: agents must find the port in server.json"
        self._token = (self._home / "token").read_text().strip()
        for config in self._configs:
            self._nodes[config.name] = Supervised(config, self._home, self._log.epoch(config.name))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread.start()

    # -- the port: the control loop's thread ------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Return the reports that were not acknowledged, in an order in which they may be committed."""
        with self._changed:
            return self._inbox.reports()

    def acknowledge(self, source: str, seq: int) -> None:
        """Record that a stream was committed up to `seq`, and pass this on to the agent."""
        with self._changed:
            owner = self._inbox.acknowledge(source, seq)
            if owner is not None:
                self._send(owner, wire.Seen(source=source, seq=seq))

    def carry_out(self, pending: Pending) -> bool:
        """Send the command to the agents concerned; return True when all of them have confirmed that it is on disk."""
        try:
            order, names = self._order(pending)
        except OSError as error:
            _log.error("command %d cannot be prepared, it is tried again: %s", pending.number, error)
            return False
        with self._changed:
            nodes = [self._nodes[name] for name in names if name in self._nodes]
            fresh = [node for node in nodes if node.must_send(order.number)]
            for node in fresh:
                node.sent.add(order.number)
                self._send(node, order)
            if fresh:  # do not wait a second time for an agent that did not answer
                self._changed.wait_for(lambda: not any(order.number in node.sent for node in nodes), self._confirm_s)
            done = len(nodes) == len(names) and all(order.number in node.confirmed for node in nodes)
            for node in nodes if done else ():
                node.confirmed.discard(order.number)
            return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until `reports` has something new; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inbox.fresh, timeout_s)

    def shutdown(self, *, now: bool = False, timeout_s: float = 10.0) -> bool:
        """Make the agents exit, and wait until they have.

        Args:
            now: end the rank groups that still run; otherwise an agent exits when its last one has ended.
            timeout_s: the longest wait.

        Returns:
            True if every agent has exited.
        """
        with self._changed:
            self._farewell = wire.Shutdown(now=now)
            for node in self._nodes.values():
                self._send(node, self._farewell)
            return self._changed.wait_for(lambda: all(node.gone for node in self._nodes.values()), timeout_s)

    def close(self, *, kill_agents: bool = False) -> None:
        """Stop the executor; agents and ranks go on unless `kill_agents` is set."""
        if self._thread.is_alive():
            if kill_agents:
                self.shutdown(now=True)
            with self._changed:
                self._stopped = True
            self._wakeup.wake()
            self._thread.join()
        for node in self._nodes.values():
            node.release()
        for each in (self._listener, self._wakeup, self._selector):
            if each is not None:
                each.close()

    def _order(self, pending: Pending) -> tuple[wire.Order, Sequence[str]]:
        """Return the command as it is sent to agents, and the names of the nodes concerned."""
        command = pending.command
        meeting = rendezvous.known(self._home, command.job_id, command.epoch)
        if meeting is None and isinstance(command, AttemptPlaced):
            names = [lease.node for lease in command.leases]
            meeting = rendezvous.agree(self._home, command.job_id, command.epoch, names)
        order = wire.Order(
            number=pending.number,
            event=encode(command),
            spec=pending.spec,
            estimate=None if pending.estimate is None else asdict(pending.estimate),
            master_addr=meeting.master_addr if meeting else "",
            master_port=meeting.master_port if meeting else 0,
        )
        # The nodes of an attempt whose start was never sent are not known: its kill goes to all nodes.
        return order, meeting.nodes if meeting else list(self._nodes)

    # -- the executor's thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopped:
            with self._changed:
                unconnected = any(node.channel is None for node in self._nodes.values())
            for key, _ in self._selector.select(LOOK_S if unconnected else None):
                with self._changed:
                    if self._selector.get_map().get(key.fd) is key:  # an earlier handler may have closed it
                        key.data()
            with self._changed:
                for node in self._nodes.values():
                    self._supervise(node)

    def _supervise(self, node: Supervised) -> None:
        """Start an agent on a node that has none, and report a lost agent."""
        if node.channel is not None or node.gone or time.monotonic() < node.next_look_s:
            return
        node.next_look_s = time.monotonic() + LOOK_S
        if node.is_alive():
            return
        try:
            self._report_down(node)
        except StoreError as error:
            _log.warning("the log cannot be read now, %s waits for its agent: %s", node.config.name, error.message)
            return
        if self._farewell is not None:
            node.gone = True
            self._changed.notify_all()
        else:
            try:
                node.spawn()
            except OSError as error:
                _log.error("no agent can be started for %s, it is tried again: %s", node.config.name, error)

    def _report_down(self, node: Supervised) -> None:
        """Report once that the agent with the node's epoch is gone, even if it died while no server ran."""
        source = f"server/{node.config.name}/{node.epoch}"
        if node.epoch == 0 or self._inbox.knows(source) or self._log.mark(source) > 0:
            return
        down = NodeDown(at_us=time.time_ns() // 1000, node=node.config.name, epoch=node.epoch, why="its agent is gone")
        self._take_in(Report(source=source, seq=1, event=down))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        channel, challenge = wire.Channel(sock), os.urandom(16).hex()
        try:
            channel.send(wire.Challenge(nonce=challenge))
        except ConnectionError:
            channel.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, partial(self._greet, channel, challenge))

    def _greet(self, channel: wire.Channel, challenge: str) -> None:
        """Handle the first message of a connection: an agent's claim."""
        try:
            messages = channel.receive()
            if not messages:
                return
            if len(messages) > 1:
                raise wire.WireError("an agent says nothing more before it is welcomed")
            answer = self._judge(messages[0], challenge)
            channel.send(answer)
        except (ConnectionError, wire.WireError) as error:
            answer = wire.Refused(why=str(error), final=False)
        self._selector.unregister(channel.sock)
        if isinstance(answer, wire.Refused):
            _log.warning("an agent's claim was refused: %s", answer.why)
            channel.close()
            return
        hello = messages[0]
        assert isinstance(hello, wire.Hello), "nothing else is welcomed"
        self._adopt(channel, hello, answer.marks)

    def _judge(self, message: wire.Message, challenge: str) -> wire.Welcome | wire.Refused:
        """Return the answer to an agent's claim."""
        if not isinstance(message, wire.Hello) or message.version != wire.VERSION:
            return wire.Refused(why=f"this server speaks version {wire.VERSION} of the protocol", final=False)
        if not wire.is_proof(message.proof, self._token, "agent", challenge, message.nonce):
            return wire.Refused(why="the token is wrong", final=False)
        proof = wire.prove(self._token, "server", challenge, message.nonce)
        if message.node not in self._nodes:
            return wire.Refused(why=f"this server has no node {message.node}", final=False)
        try:
            newest = max(self._nodes[message.node].epoch, self._log.epoch(message.node))
            marks = {
                source: self._log.mark(source) for source in message.sources if _is_stream_of(message.node, source)
            }
        except StoreError as error:
            return wire.Refused(why=f"the log cannot be read now: {error.message}", final=False)
        if message.epoch < newest:
            why = f"epoch {message.epoch} of node {message.node} is over: its agent has epoch {newest}"
            return wire.Refused(why=why, final=True, proof=proof)
        return wire.Welcome(marks=marks, proof=proof)

    def _adopt(self, channel: wire.Channel, hello: wire.Hello, marks: dict[str, int]) -> None:
        node = self._nodes[hello.node]
        self._hang_up(node)
        node.adopt(channel, hello.epoch)
        self._inbox.open(marks.items(), node)
        self._selector.register(channel.sock, selectors.EVENT_READ, partial(self._ready, node))
        if self._farewell is not None:
            self._send(node, self._farewell)
        self._notify()  # commands may be waiting for this node

    def _ready(self, node: Supervised) -> None:
        assert node.channel is not None
        try:
            node.channel.flush()
            for message in node.channel.receive():
                self._handle(node, message)
        except (ConnectionError, wire.WireError, ValueError) as error:
            _log.info("the connection to the agent of %s ended: %s", node.config.name, error)
            self._hang_up(node)
            self._notify()
            return
        node.channel.watch(self._selector)

    def _handle(self, node: Supervised, message: wire.Message) -> None:
        if isinstance(message, wire.Confirm):
            node.sent.discard(message.number)
            node.confirmed.add(message.number)
            self._changed.notify_all()
        elif isinstance(message, wire.Record):
            if not self._inbox.is_new(message.source, message.seq, node):
                # A repeated record: if it is committed, the agent has missed the acknowledgement.
                seen = self._inbox.acknowledged(message.source)
                if message.seq <= seen:
                    self._send(node, wire.Seen(source=message.source, seq=seen))
                return
            event = self._read(node, message)
            if event is not None:
                self._take_in(Report(source=message.source, seq=message.seq, event=event))

    def _read(self, node: Supervised, record: wire.Record) -> Event | None:
        """Return the record's event, or None if it cannot be read: the agent would otherwise send it forever."""
        problem = "it is not a stream of this node"
        if _is_stream_of(node.config.name, record.source):
            try:
                event = record.event if parse_stream(record.source) else repair_text(record.event)
                return decode(cast("dict[str, object]", event))
            except ValueError as error:
                problem = str(error)
        _log.error("record %d of %r is refused: %s", record.seq, record.source, problem)
        self._inbox.skip(record.source, record.seq)
        self._send(node, wire.Seen(source=record.source, seq=record.seq))
        return None

    def _take_in(self, report: Report) -> None:
        self._inbox.add(report)
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        self._wake()

    # -- both threads, under the lock ----------------------------------------------------------------------

    def _send(self, node: Supervised, message: wire.Message) -> None:
        if node.channel is None:
            return
        try:
            node.channel.send(message)
        except ConnectionError:
            return  # the executor's thread sees the error too, and hangs up
        node.channel.watch(self._selector)

    def _hang_up(self, node: Supervised) -> None:
        if node.channel is not None:
            self._selector.unregister(node.channel.sock)
        node.hang_up()
        self._changed.notify_all()


def _is_stream_of(node: str, source: str) -> bool:
    """Return whether an agent of the node may forward a stream of this name: its own, or a rank's."""
    return parse_stream(source) is not None or re.fullmatch(rf"node/{re.escape(node)}/\d{{1,15}}", source) is not None
