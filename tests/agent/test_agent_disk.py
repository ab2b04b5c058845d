"""The disk of an agent: what is on it before what is said, and what happens while it is full.

A full disk is a limit on the size of files (RLIMIT_FSIZE), which the kernel answers at the same place.
"""

import contextlib
import errno
import json
import os
import resource
import selectors
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cordee.agent import journal as journal_module
from cordee.agent.clock import Clock
from cordee.agent.gpus import Devices
from cordee.agent.interpreters import Interpreters
from cordee.agent.journal import Journal
from cordee.agent.launch import Assignment
from cordee.agent.link import Link
from cordee.agent.node_stream import NodeStream
from cordee.agent.rank_groups import RankGroups
from cordee.agent.spools import Spools
from cordee.events import Lease, NodeDown, NodeUp, Outcome, RanksEnded
from cordee.ids import JobId
from cordee.telemetry.stream import last_records
from faults_world.machines import NoTransfers


@contextlib.contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Line:
    """Keeps what is sent."""

    address = "127.0.0.1"

    def __init__(self):
        self.records = []

    def send(self, message):
        self.records += [(message.source, seq) for seq in message.seqs]


def event(number):
    return NodeDown(at_us=number, node="a", epoch=1, why="")


def streams(folder):
    """Return a node's stream whose link is welcomed, the link, and the line with what is sent."""
    link, line = Link(), Line()
    stream = NodeStream(folder, "a", link, Clock())
    link.open(line)
    return stream, link, line


def test_reports_that_a_full_disk_does_not_take_are_sent_once_and_written_later(tmp_path):
    stream, link, line = streams(tmp_path)
    stream.begin(1)
    link.welcome({})
    stream.append(event(1))
    with full_disk():
        stream.append(event(2))
        link.forward()
        assert stream.problem == "its agent cannot write to its disk: File too large"
        stream.begin(2)
        stream.append(event(3))
        link.welcome({"node/a/1": 1})
        link.forward()
    assert line.records == [("node/a/1", 1), ("node/a/1", 2), ("node/a/1", 2), ("node/a/2", 1)]
    stream.append(event(4))
    assert not stream.problem
    link.forward()
    assert line.records[4:] == [("node/a/2", 2)], "the others are not sent again because they are in the files now"
    written = [[record.seq for record in last_records(tmp_path / f"{epoch}.jsonl")] for epoch in (1, 2)]
    assert written == [[1, 2], [1, 2]]
    stream.close()
    link.close()


def test_an_older_stream_that_the_server_has_needs_no_disk(tmp_path):
    stream, link, _ = streams(tmp_path)
    with full_disk():
        stream.begin(1)
        stream.append(event(1))
        stream.begin(2)
        stream.settle("node/a/1", 1)
    stream.write()
    assert not stream.problem and not (tmp_path / "1.jsonl").exists()
    stream.close()
    link.close()


def test_an_agent_whose_disk_is_full_goes_on_and_says_so(world):
    """Else the server would never learn that the job has ended which filled the disk."""
    world.start(["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done"])
    world.started()
    pid = world.agent_pid()
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    (world.home / "go").touch()
    assert world.ended().outcome is Outcome.FINISHED
    nodes = world.until(lambda: [each.node for each in world.log if isinstance(each, NodeUp)][1:], "the node's report")
    assert nodes[-1].unavailable == (0, 1, 2, 3)
    assert nodes[-1].unavailable_why[0] == "its agent cannot write to its disk: File too large"
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    world.start(["true"], epoch=2)
    assert world.ended(epoch=2).outcome is Outcome.FINISHED
    last = world.until(lambda: [each.node for each in world.log if isinstance(each, NodeUp)][2:], "the node's report")
    assert last[-1].unavailable == () and world.agent_pid() == pid
    kept = [record.event["kind"] for record in last_records(world.home / "nodes" / "local" / "1.jsonl")]
    assert kept.count(RanksEnded.__name__) == 2, "what it had in memory is on disk too"


def test_an_order_is_on_disk_and_confirmed_before_a_process_starts(tmp_path):
    """Of a gang, the other nodes wait for the confirmation of rank 0's."""
    seen, journal, link = [], Journal(tmp_path, "a"), Link()

    def spawn(*_, **__):
        seen.append("spawn")
        raise OSError("not here")

    groups = RankGroups(
        "a",
        Devices("slot", 1, ""),
        journal,
        Spools(link, seen.append, Clock()),
        selectors.DefaultSelector(),
        lambda event: None,
        Clock(),
        SimpleNamespace(spawn=spawn),
        NoTransfers(tmp_path, None, None),
        Interpreters(lambda: None),
    )
    leases = (Lease(node="a", gpus=(0,)),)
    order = Assignment(
        job_id="j", epoch=1, node="a", leases=leases, spec={"run": ["true"]}, master_addr="h", master_port=9
    )
    groups.start(order, {}, {}, lambda: seen.append(("confirmed", journal.has("j", 1, "order"))))
    assert seen == [("confirmed", True), "spawn"]


def _order(job_id: str) -> Assignment:
    leases = (Lease(node="a", gpus=(0,)),)
    return Assignment(
        job_id=job_id, epoch=1, node="a", leases=leases, spec={"run": ["true"]}, master_addr="h", master_port=9
    )


def test_what_a_power_cut_took_of_confirmed_orders_is_written_again(tmp_path):
    attempts = tmp_path / "attempts"
    journal = Journal(attempts, "a")
    journal.keep_order(_order("one"), launch="one process")
    journal.keep_order(_order("two"))
    journal.keep_tombstone("three", 1, "it was stopped")
    journal.keep_order(_order("done"))
    ended = RanksEnded(at_us=1, job_id=JobId("done"), epoch=1, node="a", outcome=Outcome.FINISHED)
    journal.settle(ended)
    with (tmp_path / "orders-a.log").open("ab") as log:
        log.write(b'["four/1/a/order.json", {"job_')  # its agent died before it was confirmed
    (journal.folder("one", 1) / "order.json").write_text("")  # a name without its content
    for job_id in ("two", "three", "done"):
        shutil.rmtree(attempts / job_id)
    after = Journal(attempts, "a")
    after.recover()
    assert [each.job_id for each in after.unsettled()] == ["one", "two"]
    assert after.has("three", 1, "killed") and not after.has("done", 1, "order") and not after.has("four", 1, "order")
    assert json.loads((after.folder("one", 1) / "order.json").read_text())["launch"] == "one process"
    after.keep_order(_order("five"))
    Journal(attempts, "a").recover()
    assert len((tmp_path / "orders-a.log").read_bytes().splitlines()) == 6, "the rest of the fourth is gone"


def test_the_log_of_orders_begins_anew_when_the_files_are_on_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), sync(fd)))
    monkeypatch.setattr(journal_module, "LOG_BYTES_MAX", 1000)
    journal, log = Journal(tmp_path / "attempts", "a"), tmp_path / "orders-a.log"
    orders = 0
    while not log.exists() or log.stat().st_size <= 1000:
        journal.keep_order(_order(f"j{orders}"))
        orders += 1
    assert synced == [str(tmp_path)], "the folder of the log; an order waits for the log alone"
    shutil.rmtree(tmp_path / "attempts" / "j0")
    journal.keep_order(_order("next"))
    assert len(log.read_bytes().splitlines()) == 1
    kept = {str(journal.folder(f"j{number}", 1) / "order.json") for number in range(1, orders)}
    assert kept | {str(tmp_path / "attempts"), str(tmp_path)} <= set(synced)
    log.unlink()
    after = Journal(tmp_path / "attempts", "a")
    after.recover()
    assert len(after.unsettled()) == orders


def test_an_order_that_the_disk_does_not_take_is_not_there(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "attempts", "a")
    journal.keep_order(_order("one"))
    before = (tmp_path / "orders-a.log").read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        journal.keep_order(_order("two"))
    assert not journal.has("two", 1, "order") and (tmp_path / "orders-a.log").read_bytes() == before
