"""The server's end of the link: agents here are WebSockets of the test, so that each message can be chosen."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from fastapi import FastAPI
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from cordee.agent import messages
from cordee.agent.clock import MachineClock
from cordee.agent.gpus import lock_file
from cordee.agent.messages import (
    Beat,
    Claim,
    Confirm,
    Meeting,
    Order,
    Records,
    Refused,
    Seen,
    Welcome,
    encode,
)
from cordee.control.agents import link
from cordee.control.agents.claims import Member
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.leases import LeaseTerms
from cordee.control.engines.local import LocalEngine, NodeConfig
from cordee.control.engines.port import Death
from cordee.control.http import WebServer
from cordee.control.node_tokens import DerivedTokens
from cordee.control.ports import Pending
from cordee.errors import StandbyError, StoreError
from cordee.event_json import encode as encode_event
from cordee.events import (
    AttemptPlaced,
    KillOrdered,
    Lease,
    Node,
    NodeDown,
    NodeUnreachable,
    NodeUp,
    Outcome,
    RanksEnded,
    RanksStarted,
)

DEADLINE_S = 20.0
TOKENS = DerivedTokens("right")


class FakeAgent:
    """Says what the test wants."""

    def __init__(self, url, node="a", token=None, claim=True, **fields):
        headers = {"Authorization": f"Bearer {TOKENS.issue(node) if token is None else token}"}
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(
            connect(f"{url}/v1/agents/{node}/link", additional_headers=headers, compression=None, close_timeout=1)
        )
        if claim:
            known = {"incarnation": "i", "machine": "host/1", "epoch": 0, "epoch_min": 1, "sources": ["node/a/1"]}
            self.say(Claim(**known | {"clock_us": time.time_ns() // 1000, "cordee": "0", "python": "3"} | fields))

    def say(self, message):
        self.socket.send(encode(message))

    def hear(self):
        """Return the next message; None if the server has closed the connection."""
        try:
            return messages.decode(self.socket.recv(DEADLINE_S))
        except ConnectionClosed:
            return None

    def report(self, seq, event, source="node/a/1"):
        self.say(Records(source=source, seqs=[seq], events=[encode_event(event)]))

    def close(self):
        self.stack.close()


class Bench:
    """An executor whose agents are played by the test, and the log that it reads."""

    def __init__(self, home, engines=(), links_max=None):
        self.home, self.engines, self.links_max = home, engines, links_max
        self.committed, self.known, self.agents, self.woken = {}, [], [], threading.Event()
        self.attempts = {("j", 1): ["a"]}
        self.urls, self.replaced = ["https://a"], False
        self.up()

    def up(self, confirm_s=DEADLINE_S, terms=None, clock=None):
        self.executor = AgentsExecutor(
            log=self,
            node_of=TOKENS.node_of,
            engines=self.engines,
            terms=terms,
            wake=self.woken.set,
            confirm_s=confirm_s,
            servers=self.servers,
            clock=clock,
        )
        app = link.AgentLinks(FastAPI(), self.executor, self.links_max)
        listener = socket.create_server(("127.0.0.1", 0))
        self.web = WebServer(app, listener)
        self.executor.nodes.know(self.known)
        self.web.begin()
        port = listener.getsockname()[1]
        (self.home / "server.json").write_text(json.dumps({"agents": f"http://127.0.0.1:{port}"}))
        self.url = f"ws://127.0.0.1:{port}"
        if clock is None:
            self.executor.start(self.reads)
        else:  # the test looks by itself
            self.executor.claims.start()
            self.executor.watch.count_silence_by(self.reads)

    def reads(self):
        return self.web.submit(link.read_all(self.executor))

    def servers(self):
        if self.replaced:
            raise StandbyError("this server stands by; https://b leads")
        return self.urls

    def marks(self, sources):
        if self.committed is None:
            raise StoreError("the disk is full")
        return {source: self.committed.get(source, 0) for source in sources}

    def leased(self, job_id, epoch):
        self.marks([])
        return self.attempts.get((job_id, epoch), [])

    def held(self, job_id, epoch):
        return self.attempts.get((job_id, epoch), [])

    def held_on(self, node):
        return [attempt for attempt, nodes in self.attempts.items() if node in nodes]

    def secrets(self, job_id, names):
        return dict.fromkeys(names, "hush")

    def agent(self, **fields):
        self.agents.append(FakeAgent(self.url, **fields))
        return self.agents[-1]

    def reports(self, n):
        deadline = time.monotonic() + DEADLINE_S
        while len(got := self.executor.reports()) < n:
            assert time.monotonic() < deadline, f"{got} is all that came"
            self.executor.wait(0.05)
        return [(report.source, report.seq, report.event) for report in got]

    def down(self):
        self.executor.close()
        self.web.end()

    def close(self):
        for agent in self.agents:
            agent.close()
        self.down()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def up(epoch=1, name="a"):
    return NodeUp(at_us=1, node=Node(name=name, epoch=epoch, gpu_name="slot", gpus=1))


def placed(*nodes, spec='{"run": "x"}'):
    leases = tuple(Lease(node=node, gpus=(0,)) for node in nodes)
    return Pending(number=5, command=AttemptPlaced(at_us=1, job_id="j", epoch=1, leases=leases), spec=spec)


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
    bench.committed = {"node/a/1": 4}
    agent = bench.agent(sources=["node/a/1", "j.1/rank0"])
    welcome = agent.hear()
    assert (welcome.epoch, welcome.marks) == (1, {"node/a/1": 4, "j.1/rank0": 0})
    bench.woken.clear()
    agent.report(5, up())
    agent.report(6, up())
    assert bench.reports(2) == bench.reports(2) == [("node/a/1", 5, up()), ("node/a/1", 6, up())]
    assert bench.woken.is_set()
    bench.executor.acknowledge("node/a/1", 5)
    assert agent.hear() == Seen(source="node/a/1", seq=5)
    assert bench.reports(1) == [("node/a/1", 6, up())]


def test_reports_repeated_over_a_new_connection_count_once(bench):
    agent = bench.agent()
    agent.hear()
    agent.report(1, up())
    agent.report(2, up())
    bench.reports(2)
    again = bench.agent(epoch=1)
    assert again.hear().marks == {"node/a/1": 0}, "nothing is committed yet"
    bench.executor.acknowledge("node/a/1", 1)
    assert again.hear() == Seen(source="node/a/1", seq=1)
    again.say(Records(source="node/a/1", seqs=[1, 2, 3], events=[encode_event(up())] * 3))
    assert again.hear() == Seen(source="node/a/1", seq=1), "it gets the acknowledgement of 1 again"
    assert [seq for _, seq, _ in bench.reports(2)] == [2, 3]


# -- claims ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("wrong", "the token is no node's"),
        ("", "no token was sent"),
        (TOKENS.issue("b"), "this token is node b's, not a's"),
    ],
)
def test_a_token_is_good_for_its_own_node(bench, token, why):
    agent = bench.agent(token=token, claim=False)
    refused = agent.hear()
    assert isinstance(refused, Refused) and refused.why == why and refused.hint
    assert agent.hear() is None


def test_another_version_of_the_protocol_is_refused(bench):
    agent = bench.agent(claim=False)
    agent.socket.send(json.dumps({"claim": {"protocol": 3, "cordee": "9.0", "news": True}}))
    why = "this server speaks protocol 2, the agent (Cordee 9.0) 3"
    hint = "install the same version of Cordee on the server and on the node"
    assert agent.hear() == Refused(why=why, hint=hint)
    assert agent.hear() is None


def test_a_name_is_had_by_one_machine_at_a_time(bench):
    first = bench.agent()
    assert isinstance(first.hear(), Welcome)
    refused = bench.agent(incarnation="k", machine="other/2").hear()
    assert refused.why.startswith("node a is here already: agent on host, heard 0.")
    assert "another --name" in refused.hint and not refused.final
    again = bench.agent(incarnation="k")
    assert again.hear().epoch == 2, "its folder's lock proves that the first one is dead"
    assert first.hear() is None
    ((source, seq, down),) = bench.reports(1)
    assert (source, seq, down.epoch) == ("server/a/1", 1, 1)


def test_a_name_stays_with_the_machine_of_the_log(tmp_path):
    bench = Bench(tmp_path)
    try:
        bench.down()
        bench.known = [Member("a", epoch=3, up=True, machine="host/1")]
        bench.up()
        assert "node a is here already" in bench.agent(machine="other/2").hear().why
        assert bench.agent(epoch=3).hear().epoch == 3, "the agent of the log comes back"
    finally:
        bench.close()


def test_another_machine_gets_a_name_when_the_ranks_of_the_first_are_gone_and_reports_them(tmp_path):
    bench = Bench(tmp_path)
    try:
        bench.down()
        bench.known = [Member("a", epoch=3, up=False, machine="host/1")]
        bench.up(terms=LeaseTerms(lease_s=1.0, margin_s=1.0))
        assert "node a is here already" in bench.agent(machine="other/2").hear().why, "ranks of the first may run"
        deadline = time.monotonic() + DEADLINE_S
        while isinstance(welcome := bench.agent(machine="other/2").hear(), Refused):
            assert time.monotonic() < deadline
        assert welcome.epoch == 4
        ((source, _, ended),) = bench.reports(1)
        assert (source, type(ended), ended.job_id, ended.outcome) == ("server/a/3", RanksEnded, "j", Outcome.LOST)
    finally:
        bench.close()


def test_epochs_grow_and_a_known_agent_keeps_its_own(bench):
    assert bench.agent(epoch_min=7).hear().epoch == 7
    assert bench.agent(epoch=7, epoch_min=7).hear().epoch == 7, "it has reconnected"
    assert bench.agent(epoch=0, epoch_min=7).hear().epoch == 7, "the welcome was lost"
    assert bench.agent(incarnation="k", epoch_min=3).hear().epoch == 8
    refused = bench.agent(epoch=7).hear()
    assert refused == Refused(why="epoch 7 of node a is over: its agent has epoch 8", final=True)


def test_an_epoch_that_an_earlier_server_granted_is_kept(bench):
    assert bench.agent(epoch=4, epoch_min=4).hear().epoch == 4


def test_a_connection_that_does_not_begin_with_a_claim_is_closed(bench):
    agent = bench.agent(claim=False)
    agent.say(Confirm(number=1))
    assert agent.hear() == Refused(why="an agent begins with its claim")
    assert agent.hear() is None


def test_a_log_that_cannot_be_read_refuses_for_now(bench):
    bench.committed = None
    refused = bench.agent().hear()
    assert isinstance(refused, Refused) and not refused.final and "the disk is full" in refused.why
    bench.committed = {}
    assert isinstance(bench.agent().hear(), Welcome)


@pytest.mark.parametrize(
    "text",
    [
        '{"claim": ' + "[" * 100_000,
        '{"claim": {"protocol": 2, "incarnation": "i", "machine": "m", "epoch": 1, "epoch_min": 1, "sources": [5]}}',
        '{"claim": {"protocol": 2, "epoch": 1e30}}',
        '{"claim": {"protocol": {"a": []}, "cordee": "\\ud800"}}',
        '{"confirm": {"number": 1}}\n{"confirm": {"number": 1}}',
        "\0",
    ],
    ids=["nested", "list", "number", "surrogate", "twice", "null"],
)
def test_no_message_of_a_stranger_stops_the_server(bench, caplog, text):
    stranger = bench.agent(claim=False)
    stranger.socket.send(text)
    assert isinstance(stranger.hear(), Refused | None)
    assert isinstance(bench.agent().hear(), Welcome)
    caplog.text.encode()  # a log that holds a lone surrogate cannot be written to a file


def test_what_another_library_writes_is_read_too(bench):
    agent = bench.agent()
    agent.hear()
    agent.socket.send('{"beat": {"clock_us": 5, "number": 9007199254740991}}')
    assert agent.hear().number == 2**53 - 1
    agent.socket.send('{"beat":{"number":9007199254740992,"clock_us":5}}')
    assert "not a message" in agent.hear().why


def test_bytes_are_refused(bench):
    stranger = bench.agent()
    stranger.hear()
    stranger.socket.send(b'{"beat":{"number":1,"clock_us":1}}')
    assert stranger.hear() == Refused(why="not a message: bytes in place of text")
    assert stranger.hear() is None


def test_a_link_more_than_the_limit_of_open_files_allows_is_refused_until_another_ends(tmp_path):
    bench = Bench(tmp_path, links_max=1)
    try:
        first = bench.agent()
        first.hear()
        refused = bench.agent(node="b", claim=False).hear()
        assert refused.why.startswith("this server has 1 agents' links, and may open ") and not refused.final
        assert "LimitNOFILE=" in refused.hint
        first.close()
        deadline = time.monotonic() + DEADLINE_S
        while bench.executor.nodes.members["a"].session is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert isinstance(bench.agent(node="b").hear(), Welcome)
    finally:
        bench.close()


# -- orders ----------------------------------------------------------------------------------------------


def test_a_command_waits_for_its_confirmation_and_is_sent_once(bench):
    agent = bench.agent()
    agent.hear()
    result = in_thread(lambda: bench.executor.carry_out(placed("a", spec='{"run": "x", "secrets": ["TOKEN"]}')))
    order = agent.hear()
    assert (order.number, order.event["kind"], order.secrets) == (5, "AttemptPlaced", {"TOKEN": "hush"})
    agent.say(Confirm(number=5, meeting=Meeting(address="127.0.0.1", port=29_000)))
    assert result() is True
    bench.executor.acknowledge("node/a/1", 1)
    assert isinstance(agent.hear(), Seen), "nothing else was sent in between"


def test_a_command_without_its_agent_is_not_done(bench):
    assert bench.executor.carry_out(placed("a")) is False
    bench.attempts = {}
    assert bench.executor.carry_out(placed("a")) is True, "the attempt has ended: nobody may start it"


def test_an_agent_that_does_not_answer_is_asked_again_over_the_next_connection(bench):
    bench.executor._confirm_s = 0.01
    agent = bench.agent()
    agent.hear()
    assert bench.executor.carry_out(placed("a")) is False
    assert bench.executor.carry_out(placed("a")) is False
    first = agent.hear()
    again = bench.agent(epoch=1)
    again.hear()
    assert bench.executor.carry_out(placed("a")) is False
    assert again.hear() == first
    again.say(Confirm(number=5))
    again.report(1, up())
    bench.reports(1)
    assert bench.executor.carry_out(placed("a")) is True


def test_a_start_goes_to_rank_0_first_and_takes_its_rendezvous_to_the_others(bench):
    bench.attempts = {("j", 1): ["b", "a"]}
    a, b = bench.agent(), bench.agent(node="b", sources=[])
    assert isinstance(a.hear(), Welcome) and isinstance(b.hear(), Welcome)
    result = in_thread(lambda: bench.executor.carry_out(placed("b", "a")))
    assert b.hear().meeting is None
    b.say(Confirm(number=5, meeting=Meeting(address="10.0.0.7", port=29_000)))
    order = a.hear()
    assert isinstance(order, Order) and order.meeting == Meeting(address="10.0.0.7", port=29_000)
    a.say(Confirm(number=5))
    assert result() is True
    kill = KillOrdered(at_us=1, job_id="j", epoch=1, why="x")
    result = in_thread(lambda: bench.executor.carry_out(Pending(number=6, command=kill, spec="{}")))
    for agent in (a, b):
        assert agent.hear().number == 6
        agent.say(Confirm(number=6))
    assert result() is True


def test_a_start_whose_rank_0_has_ended_reaches_the_others_without_a_rendezvous(bench):
    bench.attempts = {("j", 1): ["b"]}
    bench.executor._confirm_s = 0.01
    b = bench.agent(node="b", sources=[])
    b.hear()
    bench.executor.carry_out(placed("a", "b"))
    assert b.hear().meeting is None, "its agent reports that they never started"


# -- engines ---------------------------------------------------------------------------------------------


def test_the_death_of_an_agent_is_reported_once_and_it_is_replaced(tmp_path):
    bench = Bench(tmp_path, [LocalEngine(tmp_path, [NodeConfig(name="a", slots=1)], TOKENS)])
    try:
        ((source, seq, first),) = bench.reports(1)
        assert (source, seq, first.node.epoch) == ("node/a/1", 1, 1)
        bench.committed[source] = 1
        bench.executor.acknowledge(source, 1)
        bench.executor.shutdown()
        ((source, seq, down),) = bench.reports(1)
        assert (source, seq) == ("server/a/1", 1)
        assert (type(down), down.node, down.epoch) == (NodeDown, "a", 1)
        bench.committed[source] = 1
        bench.down()
        bench.known = [Member("a", epoch=1, up=False, machine=first.node.machine)]
        bench.engines = [LocalEngine(tmp_path, [NodeConfig(name="a", slots=1)], TOKENS)]
        bench.up()
        ((source, _, second),) = bench.reports(1)
        assert (source, second.node.epoch) == ("node/a/2", 2), "the end of epoch 1 is committed and not reported again"
    finally:
        bench.executor.close(kill_agents=True)
        bench.web.end()


def test_an_agent_that_died_without_a_server_is_reported(tmp_path):
    held = None
    (tmp_path / "nodes" / "a").mkdir(parents=True)
    bench = Bench(tmp_path, [LocalEngine(tmp_path, [NodeConfig(name="a", slots=1)], TOKENS)])
    try:
        bench.reports(1)
        bench.executor.close(kill_agents=True)
        bench.web.end()
        held = lock_file(tmp_path / "nodes" / "a" / "lock")
        bench.engines = [LocalEngine(tmp_path, [NodeConfig(name="a", slots=1)], TOKENS)]
        bench.known = [Member("a", epoch=5, up=True)]
        bench.up()
        assert bench.executor.reports() == [], "a process holds the lock"
        os.close(held)
        source, _, down = bench.reports(1)[0]
        assert (source, type(down), down.epoch) == ("server/a/5", NodeDown, 5)
        assert bench.reports(3)[-1][2].node.epoch == 6, "after the older stream"
    finally:
        bench.executor.close(kill_agents=True)
        bench.web.end()


def test_close_without_start_and_twice():
    executor = AgentsExecutor(log=None, node_of=TOKENS.node_of)
    executor.close()
    executor.close()


# -- reports ---------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_read_is_left_out_and_the_agent_goes_on(bench):
    agent = bench.agent()
    agent.hear()
    for seq, (source, event) in enumerate(
        [("node/a/1", {"kind": "Nonsense"}), ("node/a/1", {"kind": "NodeUp", "node": 5}), ("node/b/1", {})], 1
    ):
        agent.say(Records(source=source, seqs=[seq], events=[event]))
        assert agent.hear() == Seen(source=source, seq=seq)
    end = RanksEnded(at_us=1, job_id="j", epoch=1, node="a", outcome=Outcome.FAILED, why="\ud800 is not there")
    agent.report(4, end)
    assert bench.reports(1) == [("node/a/1", 4, replace(end, why="? is not there"))]


OF = {"at_us": 1, "job_id": "k", "epoch": 1}


@pytest.mark.parametrize(
    ("source", "event", "why"),
    [
        ("node/a/1", RanksStarted(**OF, node="a"), "attempt k.1 has no lease on this node"),
        ("node/a/1", RanksEnded(**OF | {"job_id": "j"}, node="b", outcome=Outcome.LOST), "about ranks of node b"),
        ("node/a/1", up(name="b"), "it is about node b"),
        ("node/a/1", NodeDown(at_us=1, node="b", epoch=1, why=""), "it is about node b"),
        ("node/a/2/3", up(), "it is not a stream of this node"),
        ("k.1/rank0", RanksStarted(**OF, node="a"), "attempt k.1 has no lease on this node"),
    ],
)
def test_a_foreign_report_is_refused_and_counted(bench, caplog, source, event, why):
    bench.attempts[("k", 1)] = ["b"]
    agent = bench.agent()
    agent.hear()
    agent.report(1, event, source)
    assert agent.hear() == Seen(source=source, seq=1), "or the agent would send it for ever"
    assert bench.executor.reports() == []
    assert f"record 1 of {source!r} from node a is refused" in caplog.text and why in caplog.text
    assert bench.executor.nodes.members["a"].refused == 1


def test_a_foreign_report_does_not_move_the_numbers_of_its_stream(bench):
    bench.attempts[("k", 1)] = ["b"]
    stranger, owner = bench.agent(), bench.agent(node="b", sources=["node/b/1", "k.1/rank0"])
    stranger.hear(), owner.hear()
    for source in ("node/b/1", "k.1/rank0"):
        stranger.report(10**9, up(name="b"), source)
        assert stranger.hear() == Seen(source=source, seq=10**9)
    owner.report(1, up(name="b"), "node/b/1")
    assert [(source, seq) for source, seq, _ in bench.reports(1)] == [("node/b/1", 1)]


def test_a_report_that_cannot_be_checked_now_comes_again(bench):
    """The database is away for a moment: the end of ranks must not be lost by that."""
    agent = bench.agent()
    agent.hear()
    end = RanksEnded(at_us=1, job_id="j", epoch=1, node="a", outcome=Outcome.FAILED, why="")
    marks, bench.committed = bench.committed, None
    agent.report(1, end)
    assert agent.hear() is None, "so that it dials again"
    bench.committed = marks
    again = bench.agent()
    assert isinstance(again.hear(), Welcome)
    again.report(1, end)
    assert bench.reports(1) == [("node/a/1", 1, end)]
    assert bench.executor.nodes.members["a"].refused == 0


def test_a_refused_report_is_acknowledged_with_those_before_it(bench):
    agent = bench.agent()
    agent.hear()
    agent.report(1, up())
    agent.say(Records(source="node/a/1", seqs=[2], events=[{"kind": "Nonsense"}]))
    assert agent.hear() == Seen(source="node/a/1", seq=0), "an agent forgets what it has an acknowledgement of"
    bench.reports(1)
    bench.executor.acknowledge("node/a/1", 1)
    assert agent.hear() == Seen(source="node/a/1", seq=2)


def test_a_lease_that_ends_while_the_log_is_away_is_reported_later(tmp_path, caplog):
    bench = Bench(tmp_path)
    bench.down()
    try:
        bench.committed, bench.known = None, [Member("a", epoch=5, up=True)]
        bench.up(terms=LeaseTerms(lease_s=0.2, margin_s=0.1))
        deadline = time.monotonic() + DEADLINE_S
        while caplog.text.count("it is tried again: the disk is full") < 2:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
        bench.committed = {}
        kinds = [type(event) for _, _, event in bench.reports(3)]
        assert kinds == [NodeUnreachable, RanksEnded, NodeDown]
    finally:
        bench.close()


class LateClock(MachineClock):
    """A clock that the test sets forward."""

    late_s = 0.0

    def now_s(self):
        return super().now_s() + self.late_s


def test_what_a_loaded_server_has_not_read_yet_is_no_silence_of_a_node(tmp_path):
    bench, clock = Bench(tmp_path), LateClock()
    bench.down()
    bench.up(clock=clock)
    read, looks = threading.Event(), lambda: bench.executor.watch.look(clock.now_s())
    try:
        agent = bench.agent()
        agent.hear()
        looks()
        bench.web.submit(blocked(read))
        agent.say(Beat(number=1, clock_us=1))
        clock.late_s = 60
        looks()
        assert bench.executor.reports() == [], "its beat is in the socket"
        read.set()
        assert isinstance(agent.hear(), Beat)
        deadline = time.monotonic() + DEADLINE_S
        while bench.executor.nodes.read_s < clock.now_s() - 30:
            assert time.monotonic() < deadline
            looks()
        assert bench.executor.reports() == []
        clock.late_s = 120
        while not bench.executor.reports():  # a look goes on from where the web server was late
            assert time.monotonic() < deadline
            looks()
        kinds = [type(event) for _, _, event in bench.reports(3)]
        assert kinds == [NodeUnreachable, RanksEnded, NodeDown], "now it is silent"
    finally:
        read.set()
        bench.close()


async def blocked(until):
    """Keep the web server's loop from anything else."""
    until.wait(DEADLINE_S)


def test_an_agent_learns_of_a_new_standby_by_its_next_beat(bench):
    """Else it would take the refused connections of a dead leader for the end of all servers, and keep its ranks."""
    agent = bench.agent()
    assert agent.hear().servers == ["https://a"]
    told = []
    for number in (1, 2, 3):
        agent.say(Beat(number=number, clock_us=1))
        told.append(agent.hear().servers)
        bench.urls = ["https://a", "https://b"]
    assert told == [None, ["https://a", "https://b"], None]


def test_an_agent_learns_which_datasets_waiting_jobs_will_read(bench):
    agent = bench.agent()
    agent.hear()
    told = []
    for number, queued in enumerate([(), (), ("s3://a", "s3://b"), ("s3://a", "s3://b"), ("s3://b",), ()], 1):
        bench.executor.queued = queued
        agent.say(Beat(number=number, clock_us=1))
        told.append(agent.hear().queued)
    assert told == [[], None, ["s3://a", "s3://b"], None, ["s3://b"], []]


def test_a_server_that_may_have_been_replaced_extends_no_lease(bench):
    """The server that leads counts the silence of these nodes, and starts their ranks elsewhere."""
    agent = bench.agent()
    agent.hear()
    bench.replaced = True
    agent.say(Beat(number=1, clock_us=1))
    assert agent.hear() is None, "so that it dials the others"
    refused = bench.agent().hear()
    assert isinstance(refused, Refused) and not refused.final and "leads" in refused.why


class Cloud:
    """An engine that repeats one death, as Slurm's does."""

    def __init__(self):
        self.deaths = []

    def start(self, on_change, is_connected):
        self.on_change = on_change

    def owns(self, node):
        return node == "a"

    def ended(self):
        return self.deaths

    def reclaims(self):
        return ()

    def close(self):
        pass


def test_a_repeated_death_does_not_count_for_the_next_agent_of_the_node(tmp_path):
    cloud = Cloud()
    bench = Bench(tmp_path, engines=[cloud])
    try:
        bench.agent().hear()
        cloud.deaths = [Death("a", "job 10 has ended", ranks_gone=True)]
        bench.agents[0].close()
        assert [type(event) for _, _, event in bench.reports(2)] == [RanksEnded, NodeDown]
        second = bench.agent(incarnation="second")
        assert second.hear().epoch == 2
        second.close()
        member = bench.executor.nodes.members["a"]
        deadline = time.monotonic() + DEADLINE_S
        while member.session is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        bench.executor.watch.look(time.monotonic())
        assert member.up and not member.lost and len(bench.executor.reports()) == 2, "its lease decides"
    finally:
        bench.close()


def test_the_longer_lease_of_the_server_before_is_waited_for(tmp_path):
    """An agent that cannot be reached has not heard of the shorter one, and keeps its ranks until then."""
    executor = AgentsExecutor(log=None, node_of=TOKENS.node_of, terms=LeaseTerms(lease_s=10))
    now_s = executor.nodes.clock.now_s()
    executor.nodes.know([Member("a", epoch=1, up=True)], lease_before_s=60)
    assert executor.nodes.members["a"].heard_s >= now_s + 50
    executor.nodes.know([Member("a", epoch=1, up=True)], lease_before_s=5)
    assert executor.nodes.members["a"].heard_s < now_s + 50


def test_an_agent_that_does_not_read_is_dropped(bench, monkeypatch):
    agent = bench.agent()
    agent.hear()
    monkeypatch.setattr(link, "TEXTS_MAX", 0)
    agent.say(Beat(number=1, clock_us=1))
    assert agent.hear() is None
