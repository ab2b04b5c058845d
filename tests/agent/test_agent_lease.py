"""Partitions, silent servers, foreign machines and wrong clocks: agents with folders of their own, real processes."""

import re
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
from agent_world import DEADLINE_S, JOB, TAG, World, python

from cordee.agent import process
from cordee.control.agents.leases import LeaseTerms
from cordee.events import (
    Lease,
    NodeDown,
    NodeReachable,
    NodeUnreachable,
    NodeUp,
    Outcome,
    RankLeft,
    RanksEnded,
    RanksStarted,
)

TERMS = LeaseTerms(lease_s=2.0, margin_s=1.5)

SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("notice", flush=True), time.sleep(0.1), sys.exit(75)))
print("ready", flush=True)
while True: time.sleep(0.1)  # a handler that comes just before a sleep waits for its end
"""
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


class Wire:
    """A TCP proxy that can go dead: it then takes connections and bytes, and passes nothing on."""

    def __init__(self, port):
        self._target, self._live = port, threading.Event()
        self._live.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._live.clear()

    def mend(self):
        """Carry new connections again; those from before have lost bytes."""
        for each in self._sockets[1:]:
            self._close(each)
        self._live.set()

    def close(self):
        for each in self._sockets:
            self._close(each)

    def _close(self, each):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if self._live.is_set():
                    far = socket.create_connection(("127.0.0.1", self._target))
                    self._sockets.append(far)
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                if self._live.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class LongLease(LeaseTerms):
    """A lease that no stall of this machine ends, of a node whose silence is noticed soon all the same."""

    beat_s, unreachable_s = 0.25, 0.7


@pytest.fixture
def terms():
    return TERMS


@pytest.fixture
def world(tmp_path, terms):
    made = World(tmp_path / "home", nodes=(), terms=terms)
    yield made
    made.close()


@pytest.fixture
def wire(world):
    made = Wire(world.port)
    yield made
    made.close()


def of(world, kind, node="a"):
    named = [event for event in world.log if isinstance(event, kind)]
    return [event for event in named if (event.node.name if kind is NodeUp else event.node) == node]


def is_up(world, *names):
    return all(of(world, NodeUp, name) for name in names)


def lease_of(*names):
    return tuple(Lease(node=name, gpus=(0,)) for name in names)


def printed(folder, text, rank=0, epoch=1):
    path = folder / "attempts" / JOB / str(epoch) / folder.name / "logs" / f"rank{rank}.log"
    return path.exists() and text in path.read_text()


@pytest.mark.parametrize("terms", [LongLease(lease_s=60.0)])
def test_a_short_cut_stops_no_rank(world, wire, tmp_path):
    a = tmp_path / "a"
    world.join("a", a, port=wire.port)
    world.until(lambda: is_up(world, "a"))
    world.start(python(IGNORES), leases=lease_of("a"))
    world.until(lambda: printed(a, "ready"))
    running = process.find(TAG)
    wire.cut()
    world.until(lambda: of(world, NodeUnreachable), "NodeUnreachable")
    wire.mend()
    world.until(lambda: of(world, NodeReachable), "NodeReachable")
    assert process.find(TAG) == running
    assert [event.node.epoch for event in of(world, NodeUp)] == [1] and not of(world, NodeDown)
    world.kill()
    assert world.ended().outcome is Outcome.KILLED


@pytest.mark.parametrize(("code", "outcome"), [(SAVES, Outcome.CHECKPOINTED), (IGNORES, Outcome.LOST)])
def test_a_partition_ends_the_ranks_before_the_server_takes_them_for_lost(world, wire, tmp_path, code, outcome):
    a = tmp_path / "a"
    world.join("a", a, port=wire.port)
    world.until(lambda: is_up(world, "a"))
    world.start(python(code), leases=lease_of("a"))
    world.until(lambda: printed(a, "ready"))
    wire.cut()
    lost = world.ended()
    assert not process.find(TAG), "they would run twice"
    assert lost.outcome is Outcome.LOST and re.search(r"a: it was silent for \d s: its lease is over", lost.why)
    kinds = [type(event) for event in world.log if isinstance(event, NodeUnreachable | RanksEnded | NodeDown)]
    world.until(lambda: of(world, NodeDown), "NodeDown")
    before = kinds[: kinds.index(RanksEnded)]
    assert set(before) == {NodeUnreachable}, "more than once if this machine stalled"
    assert printed(a, "notice") is (code is SAVES)
    wire.mend()
    world.until(lambda: [event.node.epoch for event in of(world, NodeUp)] == [1, 2], "the node with a new epoch")
    late = world.until(lambda: world.of(RanksEnded)[1:], "the agent's own account")
    assert late[0].outcome is outcome
    world.start("true", epoch=2, leases=lease_of("a"))
    assert world.ended(epoch=2).outcome is Outcome.FINISHED


def test_no_server_stops_no_rank(world, tmp_path):
    a = tmp_path / "a"
    world.join("a", a)
    world.until(lambda: is_up(world, "a"))
    world.start(python(IGNORES), leases=lease_of("a"))
    world.until(lambda: printed(a, "ready"))
    running = process.find(TAG)
    world.down()
    gone_s = time.monotonic()
    world.until(lambda: time.monotonic() > gone_s + 2 * TERMS.lease_s)
    assert process.find(TAG) == running, "refused connections prove that no server can start them elsewhere"
    world.up()
    world.until(lambda: "a" in world.connected())
    assert [event.node.epoch for event in of(world, NodeUp)] == [1]
    world.kill()
    assert world.ended().outcome is Outcome.KILLED


def test_half_a_gang_is_unreachable_at_the_start_order(world, wire, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    world.join("a", a)
    world.join("b", b, port=wire.port)
    world.until(lambda: is_up(world, "a", "b"))
    wire.cut()
    world.executor._confirm_s = 0.1
    world.start(python(IGNORES), leases=lease_of("a", "b"))
    world.until(lambda: printed(a, "ready"))
    lost = world.ended()
    assert (lost.node, lost.outcome) == ("b", Outcome.LOST)
    world.until(lambda: not world.pending, "the start order, which b must not get any more")
    world.kill()
    assert {event.node for event in world.ended(groups=2)} == {"a", "b"}
    wire.mend()
    world.until(lambda: len(of(world, NodeUp, "b")) == 2)
    assert not (b / "attempts").exists() and not process.find(TAG)


def test_a_partition_in_the_middle_of_a_stop(world, wire, tmp_path):
    a = tmp_path / "a"
    world.join("a", a, port=wire.port)
    world.until(lambda: is_up(world, "a"))
    world.start(python(IGNORES), leases=lease_of("a"))
    world.until(lambda: printed(a, "ready"))
    world.notice(600)
    world.until(lambda: not world.pending)
    wire.cut()
    world.executor._confirm_s = 0.1
    world.kill()
    assert world.ended().outcome is Outcome.LOST
    assert not process.find(TAG)
    world.until(lambda: not world.pending, "the kill, which has nobody left to kill")
    wire.mend()
    world.until(lambda: len(of(world, NodeUp)) == 2)


def test_a_frozen_agent_is_noticed(world, tmp_path):
    a = tmp_path / "a"
    agent = world.join("a", a)
    world.until(lambda: is_up(world, "a"))
    agent.send_signal(signal.SIGSTOP)
    try:
        world.until(lambda: of(world, NodeUnreachable), "NodeUnreachable")
    finally:
        agent.send_signal(signal.SIGCONT)
    world.until(lambda: of(world, NodeReachable), "NodeReachable")


def test_a_node_that_joins_twice_is_refused_and_the_first_goes_on(world, tmp_path):
    first, second = tmp_path / "a", tmp_path / "second"
    world.join("a", first)
    world.until(lambda: is_up(world, "a"))
    world.join("a", second)
    refused = r"refused by the server: node a is here already: agent on \S+, heard \d+\.\d s ago \(hint: join with anot"
    world.until(lambda: re.search(refused, (second / "agent.log").read_text()), "the refusal")
    assert [event.node.epoch for event in of(world, NodeUp)] == [1] and "refused" not in (
        first / "agent.log"
    ).read_text()


def test_a_token_of_another_node_is_refused(world, tmp_path):
    world.join("a", tmp_path / "a")
    world.until(lambda: is_up(world, "a"))
    other = tmp_path / "b"
    world.join("a", other)
    settings = (other / "agent.json").read_text()
    (other / "agent.json").write_text(settings.replace('"node": "a"', '"node": "b"'))
    world.until(lambda: "this token is node a's, not b's" in (other / "agent.log").read_text(), "the refusal")
    assert not is_up(world, "b")


AN_HOUR_OFF = """
import runpy, time
own_ns, own = time.time_ns, time.time
time.time_ns, time.time = lambda: own_ns() - 3600 * 10**9, lambda: own() - 3600
runpy.run_module("cordee.agent", run_name="__main__")
"""
REPORTS = """
import os, time
from pathlib import Path
from cordee.events import RankLeft
from cordee.telemetry.stream import StreamWriter
writer = StreamWriter(Path(os.environ["CORDEE_SPOOL"]) / "rank0.jsonl")
at_us = time.time_ns() // 1000 - 3600 * 10**6
writer.append(RankLeft(at_us=at_us, job_id=os.environ["CORDEE_JOB"], epoch=1, rank=0, how="finished", step=1))
"""


SLEEPS = """
import runpy, time
from pathlib import Path
own, slept = time.clock_gettime, Path(r"{slept}")
time.clock_gettime = lambda clock: own(clock) + 3600 * (clock == time.CLOCK_BOOTTIME and slept.exists())
runpy.run_module("cordee.agent", run_name="__main__")
"""


def test_the_lease_of_a_machine_that_was_suspended_is_over(world, tmp_path):
    """Its monotonic clock stood still meanwhile, and the ranks run elsewhere by now."""
    a, slept = tmp_path / "a", tmp_path / "slept"
    world.join("a", a, code=SLEEPS.format(slept=slept))
    world.until(lambda: is_up(world, "a"))
    world.start(python(IGNORES), leases=lease_of("a"))
    world.until(lambda: printed(a, "ready"))
    slept.touch()
    ended = world.ended()
    assert ended.outcome is Outcome.LOST and "had no contact to a server" in ended.why
    assert not process.find(TAG)


def test_a_clock_that_is_an_hour_off_is_corrected(world, tmp_path):
    a = tmp_path / "a"
    world.join("a", a, code=AN_HOUR_OFF)
    world.until(lambda: is_up(world, "a"))
    world.start(python(REPORTS), leases=lease_of("a"))
    assert world.ended().outcome is Outcome.FINISHED
    now_us = time.time_ns() // 1000
    told = [*world.of(RanksStarted), *world.of(RankLeft), *world.of(RanksEnded), *of(world, NodeUp)]
    assert len(told) == 4 and all(abs(now_us - event.at_us) < DEADLINE_S * 1e6 for event in told)
    said_s = re.findall(r"clock is (\d+\.\d) s behind the server's", (a / "agent.log").read_text())
    assert said_s and all(abs(float(each) - 3600) < DEADLINE_S for each in said_s)
    assert abs(world.executor.link_facts("a")["clock_off_us"] + 3600 * 10**6) < DEADLINE_S * 1e6
