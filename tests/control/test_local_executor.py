"""The server's end of the wire: agents here are sockets of the test, so that each message can be chosen."""

import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest

from cordee.agent import wire
from cordee.agent.gpus import lock_file
from cordee.control.executors.local import LocalExecutor
from cordee.control.executors.supervise import NodeConfig
from cordee.control.ports import Pending
from cordee.errors import StoreError
from cordee.event_json import encode
from cordee.events import AttemptPlaced, KillOrdered, Lease, Node, NodeDown, NodeUp, Outcome, RanksEnded

DEADLINE_S = 20.0


class FakeAgent:
    """Says what the test wants."""

    def __init__(self, address, hello=True, **fields):
        self.sock = socket.create_connection(address, timeout=DEADLINE_S)
        self.lines = self.sock.makefile("rb")
        self.challenge = self.hear().nonce
        if hello:
            proof = wire.prove(fields.pop("token", "right"), "agent", self.challenge, "n")
            claim = {"node": "a", "epoch": 1, "sources": ["node/a/1"], "nonce": "n", "proof": proof}
            self.say(wire.Hello(**claim | fields))

    def welcome(self, **marks):
        return wire.Welcome(marks=marks, proof=wire.prove("right", "server", self.challenge, "n"))

    def say(self, message):
        self.sock.sendall(wire.encode(message))

    def hear(self):
        line = self.lines.readline()
        return wire.decode(line) if line else None

    def report(self, seq, event, source="node/a/1"):
        self.say(wire.Record(source=source, seq=seq, event=encode(event)))

    def close(self):
        self.lines.close()
        self.sock.close()


class Bench:
    """An executor whose agents never start, because the test holds their locks."""

    def __init__(self, home, names=("a",), spawn=False):
        self.home, self.names = home, names
        self.marks, self.epochs, self.agents, self.woken = {}, {}, [], threading.Event()
        (home / "token").write_text("right\n")
        self.locks = []
        for name in names if not spawn else ():
            (home / "nodes" / name).mkdir(parents=True, exist_ok=True)
            self.locks.append(lock_file(home / "nodes" / name / "lock"))
        self.up()

    def up(self):
        self.executor = LocalExecutor(
            self.home,
            mark=self.mark,
            epoch=lambda node: self.epochs.get(node, 0),
            nodes=[NodeConfig(name=name, slots=1) for name in self.names],
            wake=self.woken.set,
            confirm_s=DEADLINE_S,
        )
        self.address = self.executor.listen()
        agents = {"host": self.address[0], "port": self.address[1]}
        (self.home / "server.json").write_text(json.dumps({"agents": agents}))
        self.executor.start()

    def mark(self, source):
        if self.marks is None:
            raise StoreError("the disk is full")
        return self.marks.get(source, 0)

    def agent(self, **fields):
        self.agents.append(FakeAgent(self.address, **fields))
        return self.agents[-1]

    def reports(self, n):
        deadline = time.monotonic() + DEADLINE_S
        while len(got := self.executor.reports()) < n:
            assert time.monotonic() < deadline, f"{got} is all that came"
            self.executor.wait(0.05)
        return [(report.source, report.seq, report.event) for report in got]

    def close(self):
        for agent in self.agents:
            agent.close()
        self.executor.close()
        for lock in self.locks:
            os.close(lock)


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def up(epoch=1, name="a"):
    return NodeUp(at_us=1, node=Node(name=name, epoch=epoch, gpu_name="slot", gpus=1))


def placed(*nodes):
    leases = tuple(Lease(node=node, gpus=(0,)) for node in nodes)
    return Pending(number=5, command=AttemptPlaced(at_us=1, job_id="j", epoch=1, leases=leases), spec='{"run": "x"}')


def in_thread(call):
    """Its result, once it has one."""
    box = []
    thread = threading.Thread(target=lambda: box.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE_S)
        assert box, "it did not return"
        return box[0]

    return result


def test_agents_get_their_marks_and_reports_stay_until_acknowledged(bench):
    bench.marks = {"node/a/1": 4}
    agent = bench.agent(sources=["node/a/1", "j.1/rank0"])
    assert agent.hear() == agent.welcome(**{"node/a/1": 4, "j.1/rank0": 0})
    bench.woken.clear()
    agent.report(5, up())
    agent.report(6, up())
    assert bench.reports(2) == bench.reports(2) == [("node/a/1", 5, up()), ("node/a/1", 6, up())]
    assert bench.woken.is_set()
    bench.executor.acknowledge("node/a/1", 5)
    assert agent.hear() == wire.Seen(source="node/a/1", seq=5)
    assert bench.reports(1) == [("node/a/1", 6, up())]


def test_reports_repeated_over_a_new_connection_count_once(bench):
    agent = bench.agent()
    agent.hear()
    agent.report(1, up())
    agent.report(2, up())
    bench.reports(2)
    again = bench.agent()
    assert again.hear() == again.welcome(**{"node/a/1": 0}), "nothing is committed yet"
    bench.executor.acknowledge("node/a/1", 1)
    assert again.hear() == wire.Seen(source="node/a/1", seq=1)
    for seq in (1, 2, 3):
        again.report(seq, up())
    assert again.hear() == wire.Seen(source="node/a/1", seq=1), "it gets the acknowledgement of 1 again"
    assert [seq for _, seq, _ in bench.reports(2)] == [2, 3]


@pytest.mark.parametrize(
    ("fields", "why", "final"),
    [
        ({"token": "wrong"}, "the token is wrong", False),
        ({"token": "wröng"}, "the token is wrong", False),
        ({"node": "z"}, "this server has no node z", False),
        ({"epoch": 2}, "epoch 2 of node a is over: its agent has epoch 3", True),
        ({"version": 2}, "this server speaks version 1 of the protocol", False),
    ],
)
def test_claims_that_do_not_hold(bench, fields, why, final):
    bench.epochs["a"] = 3
    agent = bench.agent(**{"epoch": 3, **fields})
    proof = wire.prove("right", "server", agent.challenge, "n") if final else ""
    assert agent.hear() == wire.Refused(why=why, final=final, proof=proof)
    assert agent.hear() is None


def test_a_connection_that_does_not_begin_with_hello_is_closed(bench):
    agent = bench.agent(hello=False)
    agent.say(wire.Confirm(number=1))
    assert isinstance(agent.hear(), wire.Refused)
    other = bench.agent(hello=False)
    other.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert other.hear() is None


def test_an_older_agent_is_refused_after_a_newer_one_came(bench):
    assert isinstance(bench.agent(epoch=7).hear(), wire.Welcome)
    refused = bench.agent(epoch=6).hear()
    assert isinstance(refused, wire.Refused) and refused.final


def test_a_log_that_cannot_be_read_refuses_for_now(bench):
    bench.marks = None
    refused = bench.agent().hear()
    assert isinstance(refused, wire.Refused) and not refused.final and "the disk is full" in refused.why
    bench.marks = {}
    assert isinstance(bench.agent().hear(), wire.Welcome)


def test_a_command_waits_for_its_confirmation_and_is_sent_once(bench):
    agent = bench.agent()
    agent.hear()
    result = in_thread(lambda: bench.executor.carry_out(placed("a")))
    order = agent.hear()
    assert (order.number, order.event["kind"], order.spec) == (5, "AttemptPlaced", '{"run": "x"}')
    assert order.master_addr == "127.0.0.1" and 20_000 <= order.master_port < 30_000
    agent.say(wire.Confirm(number=5))
    assert result() is True
    bench.executor.acknowledge("node/a/1", 1)
    assert isinstance(agent.hear(), wire.Seen), "nothing else was sent in between"


def test_a_command_without_its_agent_is_not_done(bench):
    assert bench.executor.carry_out(placed("a")) is False
    assert bench.executor.carry_out(placed("elsewhere")) is False


def test_an_agent_that_does_not_answer_is_asked_again_over_the_next_connection(bench):
    bench.executor._confirm_s = 0.01
    agent = bench.agent()
    agent.hear()
    assert bench.executor.carry_out(placed("a")) is False
    assert bench.executor.carry_out(placed("a")) is False
    first = agent.hear()
    again = bench.agent()
    again.hear()
    assert bench.executor.carry_out(placed("a")) is False
    assert again.hear() == first, "the same order: the meeting point does not change"
    again.say(wire.Confirm(number=5))
    again.report(1, up())
    bench.reports(1)
    assert bench.executor.carry_out(placed("a")) is True


def test_the_meeting_point_outlives_the_server(bench):
    bench.executor._confirm_s = 0.01
    agent = bench.agent()
    agent.hear()
    bench.executor.carry_out(placed("a"))
    port = agent.hear().master_port
    assert json.loads((bench.home / "attempts/j/1/meeting.json").read_text())["master_port"] == port
    bench.executor.close()
    bench.up()
    bench.executor._confirm_s = 0.01
    agent = bench.agent()
    agent.hear()
    bench.executor.carry_out(placed("a"))
    assert agent.hear().master_port == port


def test_a_kill_goes_to_the_attempts_nodes_or_to_all_if_they_are_not_known(tmp_path):
    bench = Bench(tmp_path, names=("a", "b"))
    try:
        bench.executor._confirm_s = 0.01
        a, b = bench.agent(), bench.agent(node="b", sources=[])
        assert isinstance(a.hear(), wire.Welcome) and isinstance(b.hear(), wire.Welcome)
        bench.executor.carry_out(placed("b"))
        assert b.hear().event["kind"] == "AttemptPlaced"
        kill = KillOrdered(at_us=1, job_id="j", epoch=1, why="x")
        bench.executor.carry_out(Pending(number=6, command=kill, spec="{}"))
        assert b.hear().event["kind"] == "KillOrdered"
        unknown = KillOrdered(at_us=1, job_id="k", epoch=1, why="x")
        bench.executor.carry_out(Pending(number=7, command=unknown, spec="{}"))
        assert a.hear().number == b.hear().number == 7, "the first thing that a hears"
    finally:
        bench.close()


def test_the_death_of_an_agent_is_reported_once_and_it_is_replaced(tmp_path):
    bench = Bench(tmp_path, spawn=True)
    try:
        ((source, seq, first),) = bench.reports(1)
        assert (source, seq, first.node.epoch) == ("node/a/1", 1, 1)
        bench.marks[source] = bench.epochs["a"] = 1
        bench.executor.acknowledge(source, 1)
        bench.executor.shutdown()
        ((source, seq, down),) = bench.reports(1)
        assert (source, seq) == ("server/a/1", 1)
        assert (type(down), down.node, down.epoch) == (NodeDown, "a", 1)
        bench.marks[source] = 1
        bench.executor.close()
        bench.up()
        ((source, _, second),) = bench.reports(1)
        assert (source, second.node.epoch) == ("node/a/2", 2), "the end of epoch 1 is committed and not reported again"
    finally:
        bench.executor.close(kill_agents=True)


def test_close_without_start_and_twice(tmp_path):
    executor = LocalExecutor(tmp_path, mark=lambda _: 0, epoch=lambda _: 0)
    executor.listen()
    executor.close()
    executor.close()


def test_a_record_that_cannot_be_read_is_left_out_and_the_agent_goes_on(bench):
    agent = bench.agent()
    agent.hear()
    for seq, (source, event) in enumerate(
        [("node/a/1", {"kind": "Nonsense"}), ("node/a/1", {"kind": "NodeUp", "node": 5}), ("node/b/1", encode(up()))], 1
    ):
        agent.say(wire.Record(source=source, seq=seq, event=event))
        assert agent.hear() == wire.Seen(source=source, seq=seq)
    end = RanksEnded(at_us=1, job_id="j", epoch=1, node="a", outcome=Outcome.FAILED, why="\ud800 is not there")
    agent.report(4, end)
    assert bench.reports(1) == [("node/a/1", 4, replace(end, why="? is not there"))]


@pytest.mark.parametrize(
    "line",
    [
        b'{"hello": ' + b"[" * 100_000,
        b'{"hello": {"node": "a", "epoch": 1, "sources": [5], "nonce": "n", "proof": "p"}}',
        b'{"hello": {"node": "a", "epoch": 1e30, "sources": [], "nonce": "n", "proof": "p"}}',
        b'{"hello": {"node": "a", "epoch": 1, "sources": [], "nonce": "\\ud800", "proof": "\\ud800"}}',
        b'{"confirm": {"number": 1}}\n{"confirm": {"number": 1}}',
    ],
    ids=["nested", "list", "number", "surrogate", "twice"],
)
def test_no_message_of_a_stranger_stops_the_executor(bench, line):
    stranger = bench.agent(hello=False)
    stranger.sock.sendall(line + b"\n")
    assert stranger.hear() is None or stranger.hear() is None
    assert isinstance(bench.agent().hear(), wire.Welcome)
