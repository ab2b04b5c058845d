"""The disk of an agent: what is on it before what is said, and what happens while it is full.

A full disk is a limit on the size of files (RLIMIT_FSIZE), which the kernel answers at the same place.
"""

import contextlib
import resource
import selectors
from types import SimpleNamespace

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
