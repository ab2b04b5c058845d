"""The server's end of the link: which reports of agents count, and when a node that is silent has lost its ranks."""

import threading
import time
from dataclasses import replace

import pytest
from agent_bench import DEADLINE_S, TOKENS, Bench, up

from cordee.agent.clock import MachineClock
from cordee.agent.messages import (
    Beat,
    Records,
    Refused,
    Seen,
    Welcome,
)
from cordee.control.agents import link
from cordee.control.agents.claims import Member
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.leases import LeaseTerms
from cordee.control.engines.port import Death
from cordee.events import (
    NodeDown,
    NodeUnreachable,
    Outcome,
    RanksEnded,
    RanksStarted,
)


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
