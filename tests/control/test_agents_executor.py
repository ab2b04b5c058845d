"""The server's end of the link: who may be an agent, which epoch it gets, and how commands reach it."""

import json
import os
import re
import time

import pytest
from agent_bench import DEADLINE_S, TOKENS, Bench, in_thread, placed, up

from cordee.agent.gpus import lock_file
from cordee.agent.messages import (
    Confirm,
    Meeting,
    Order,
    Records,
    Refused,
    Seen,
    Welcome,
)
from cordee.control.agents.claims import Member
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.leases import MARGIN_S, LeaseTerms
from cordee.control.engines.local import LocalEngine, NodeConfig
from cordee.control.ports import Pending
from cordee.event_json import encode as encode_event
from cordee.events import (
    KillOrdered,
    NodeDown,
    Outcome,
    RanksEnded,
)


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
    assert re.match(r"node a is here already: agent on host, heard \d+\.\d s ago", refused.why), refused.why
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
        bench.up(terms=LeaseTerms(lease_s=60.0))
        assert "node a is here already" in bench.agent(machine="other/2").hear().why, "ranks of the first may run"
        bench.executor.nodes.members["a"].heard_s -= 60.0 + MARGIN_S
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
