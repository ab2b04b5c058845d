"""Deaths and restarts of server, agent and ranks, with real processes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from agent_world import JOB, TAG, World, python

from cordee.agent import process
from cordee.control.engines.local import NodeConfig
from cordee.events import Lease, ModelOrdered, Node, NodeDown, NodeUp, Outcome, RankLeft, RanksEnded, RanksStarted
from cordee.ids import JobId
from cordee.telemetry.notices import read_model

SLEEPS = "import os, time; print(f'pid={os.getpid()}', flush=True); time.sleep(600)"

COUNTS = """
import os, signal, sys
from pathlib import Path
from cordee.telemetry.stream import StreamWriter
from cordee.events import RankLeft
writer = StreamWriter(Path(os.environ["CORDEE_SPOOL"]) / "rank0.jsonl")
pipe = open("pipe")
print("open", flush=True)
while line := pipe.readline():
    writer.append(RankLeft(at_us=1, job_id=os.environ["CORDEE_JOB"], epoch=1,
                           rank=0, how="finished", step=int(line)))
"""


def kill_agent(world, node="local"):
    pid = world.until(lambda: world.agent_pid(node))
    os.kill(pid, signal.SIGKILL)
    return pid


def open_pipe(world):
    """For writing, whether a rank reads or not."""
    return os.fdopen(os.open(world.home / "pipe", os.O_RDWR), "w", buffering=1)


def epochs_up(world, node="local"):
    return [event.node.epoch for event in world.log if isinstance(event, NodeUp) and event.node.name == node]


def test_server_gone_and_back_nothing_is_lost_nothing_twice(world):
    os.mkfifo(world.home / "pipe")
    world.start(python(COUNTS))
    world.started()
    pid = world.agent_pid()
    with open_pipe(world) as pipe:
        world.logged("open")
        pipe.write("0\n1\n")
        world.until(lambda: len(world.of(RankLeft)) == 2)
        for more in ("2\n3\n", "4\n"):
            # The server dies after its commit and before the acknowledgement: the marks include the commit.
            world.down()
            pipe.write(more)
            world.up()
            world.until(lambda: f"{more.split()[-1]}" in [str(event.step) for event in world.of(RankLeft)])
        world.down()
        pipe.write("5\n")
    world.until(lambda: not process.find(TAG))
    world.up()
    assert world.ended().outcome is Outcome.FINISHED
    assert [event.step for event in world.of(RankLeft)] == [0, 1, 2, 3, 4, 5]
    assert len(world.of(RanksStarted)) == len(world.of(RanksEnded)) == 1
    assert isinstance(world.log[-1], RanksEnded), "the ranks' records come before the end of their rank group"
    assert (world.agent_pid(), epochs_up(world)) == (pid, [1]), "the agent was adopted, not replaced"
    assert not [event for event in world.log if isinstance(event, NodeDown)]


def test_commands_wait_for_the_server_that_comes_back(world):
    world.start(python(SLEEPS))
    world.logged("pid=")
    pid = process.find(TAG)
    world.down()
    world.up()
    world.kill()
    assert world.ended().outcome is Outcome.KILLED
    assert pid and not process.find(TAG)


def test_kill_9_of_the_agent_ends_its_ranks_before_the_node_is_up_again(world):
    world.start(python("import os, time\nif os.fork() == 0: os.setsid()\n" + SLEEPS), gpus=2)
    world.logged("pid=", "rank0.log")
    world.logged("pid=", "rank1.log")
    assert len(process.find(TAG)) == 4
    kill_agent(world)
    ended = world.ended()
    assert not process.find(TAG)
    assert ended.outcome is Outcome.LOST
    # Some of the four may end by themselves after their agent's death, before they are counted.
    assert re.search(r"the agent of local died; its successor ended [1-4] process", ended.why), ended.why
    world.until(lambda: epochs_up(world) == [1, 2])
    tail = [event for event in world.log if isinstance(event, NodeDown | RanksEnded | NodeUp)][-3:]
    assert [type(event).__name__ for event in tail] == ["NodeDown", "RanksEnded", "NodeUp"]
    assert (tail[0].node, tail[0].epoch) == ("local", 1)
    world.start("true", epoch=2)
    assert world.ended(epoch=2).outcome is Outcome.FINISHED


def test_agent_and_server_both_die(world):
    world.start(python(SLEEPS))
    world.logged("pid=")
    world.down()
    pid = world.agent_pid()
    os.kill(pid, signal.SIGKILL)
    world.until(lambda: world.agent_pid() is None)
    assert process.find(TAG), "nobody is there to end it"
    world.up()
    assert world.ended().outcome is Outcome.LOST
    assert not process.find(TAG)
    world.until(lambda: epochs_up(world) == [1, 2])
    assert [(e.node, e.epoch) for e in world.log if isinstance(e, NodeDown)] == [("local", 1)]


def test_next_agent_forwards_the_stream_of_a_dead_one(world):
    os.mkfifo(world.home / "pipe")
    world.start(python(COUNTS))
    world.started()
    with open_pipe(world) as pipe:
        world.logged("open")
        world.down()
        pipe.write("0\n1\n")
    world.until(lambda: not process.find(TAG))
    stream = world.home / "nodes" / "local" / "1.jsonl"
    world.until(lambda: "RanksEnded" in stream.read_text())
    kill_agent(world)
    world.until(lambda: world.agent_pid() is None)
    world.up()
    assert world.ended().outcome is Outcome.FINISHED
    assert [event.step for event in world.of(RankLeft)] == [0, 1]
    world.until(
        lambda: epochs_up(world) == [1, 2] and not stream.exists(), "the older stream goes when it is committed"
    )
    assert len(world.of(RanksEnded)) == 1


def test_an_older_agent_is_refused_and_ends_its_ranks(world):
    world.start(python(SLEEPS))
    world.logged("pid=")
    world.down()
    world.log.append(NodeUp(at_us=2, node=Node(name="local", epoch=7, gpu_name="slot", gpus=4)))
    world.up()
    ended = world.ended()
    assert not process.find(TAG)
    assert ended.outcome is Outcome.KILLED
    assert "epoch 1 of node local is over: its agent has epoch 7" in ended.why
    world.until(lambda: epochs_up(world)[-1] == 8)


def test_a_second_agent_of_a_node_does_not_start(world):
    world.until(lambda: epochs_up(world) == [1])
    code = "import runpy, cordee.agent.agent as agent; agent.LOCK_S_MAX = 0.05; "
    code += "runpy.run_module('cordee.agent', run_name='__main__')"
    argv = [sys.executable, "-c", code, "--folder", str(world.home / "nodes" / "local")]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "another agent holds" in done.stderr) == (1, True)


def test_a_wrong_token_is_refused(world):
    world.until(lambda: epochs_up(world) == [1])
    world.down()
    (world.home / "token").write_text("another\n")
    world.executor = None
    world.up()
    world.until(lambda: epochs_up(world) == [1] and "local" in world.connected(), "the agent reads its new token")


def test_start_twice_is_once(world):
    (world.home / "count.py").write_text("print('started')")
    for _ in range(2):
        world.start([sys.executable, "count.py"])
    world.ended()
    world.start([sys.executable, "count.py"])
    world.until(lambda: not world.pending)
    assert world.log_text("rank0.log").count("started") == 1
    assert len(world.of(RanksStarted)) == len(world.of(RanksEnded)) == 1


@pytest.mark.parametrize("between", [False, True])
def test_kill_before_start_leaves_a_tombstone(world, between):
    world.until(lambda: epochs_up(world))
    world.kill()
    world.until(lambda: not world.pending)
    if between:
        kill_agent(world)
        world.until(lambda: epochs_up(world) == [1, 2])
    world.start("echo no > ran")
    ended = world.ended()
    assert (ended.outcome, ended.why) == (Outcome.KILLED, "it was killed before it started")
    assert not world.of(RanksStarted) and not (world.home / "ran").exists()


def test_a_model_to_hold_reaches_ranks_that_run_and_that_start_later(world):
    def hold(model):
        world.order(ModelOrdered(at_us=1, job_id=JobId(JOB), epoch=1, model=model, why="the test said so"))
        world.until(lambda: not world.pending)

    world.until(lambda: epochs_up(world))
    hold("a")
    world.start("sleep 600")
    world.started()
    assert read_model(world.folder() / "spool") == "a"
    hold("b")
    assert read_model(world.folder() / "spool") == "b"
    world.kill()
    world.ended()
    hold("c")
    assert read_model(world.folder() / "spool") == "b"


def test_order_is_on_disk_before_it_is_confirmed(world):
    world.until(lambda: epochs_up(world))
    world.start("true")
    (pending,) = world.pending
    assert world.executor.carry_out(pending)
    order = json.loads((world.folder() / "order.json").read_text())
    assert (order["job_id"], order["epoch"], order["leases"]) == (
        JOB,
        1,
        [{"node": "local", "gpus": [0], "milli": 1000, "instance": None}],
    )
    assert order["master_addr"] == "127.0.0.1" and 20_000 <= order["master_port"] < 30_000


def test_an_order_without_processes_is_lost(world):
    """The agent died between the order and the first spawn."""
    world.until(lambda: epochs_up(world))
    world.start("sleep 600")
    world.started()
    world.down()
    kill_agent(world)
    for each in process.find(TAG):
        process.send(each, signal.SIGKILL)
    world.until(lambda: not process.find(TAG))
    world.up()
    ended = world.ended()
    assert ended.outcome is Outcome.LOST and "0 processes" in ended.why


def test_a_terminated_agent_gives_notice_first(world):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True)\n"
    )
    world.start(python(code + "while True: time.sleep(0.1)"))
    world.logged("ready")
    os.kill(world.agent_pid(), signal.SIGTERM)
    assert world.ended().outcome is Outcome.CHECKPOINTED
    world.until(lambda: epochs_up(world) == [1, 2])


def test_shutdown_waits_for_the_last_rank_group(world):
    world.start(python(SLEEPS))
    world.logged("pid=")
    assert not world.executor.shutdown(timeout_s=0.2), "a rank group runs"
    assert process.find(TAG)
    world.kill()
    world.ended()
    assert world.executor.shutdown(timeout_s=20)
    assert world.agent_pid() is None


def test_an_agent_whose_home_is_gone_leaves(world, tmp_path):
    world.start(python(SLEEPS))
    world.logged("pid=")
    world.down()
    world.home.rename(tmp_path / "elsewhere")
    world.until(lambda: not process.find(TAG))
    world.until(lambda: world.agent_pid() is None)
    (tmp_path / "elsewhere").rename(world.home)


def test_torn_last_line_of_the_nodes_own_stream(world):
    world.until(lambda: epochs_up(world))
    world.down()
    kill_agent(world)
    with (world.home / "nodes" / "local" / "1.jsonl").open("a") as file:
        file.write('{"seq": 2, "event": {"kind": "RankGroup')
    world.up()
    world.until(lambda: epochs_up(world) == [1, 2])


@pytest.fixture
def pair(tmp_path):
    nodes = (NodeConfig(name="a", slots=2), NodeConfig(name="b", slots=2))
    made = World(tmp_path / "home", nodes=nodes)
    yield made
    made.close()


LEASES = (Lease(node="a", gpus=(0, 1)), Lease(node="b", gpus=(1,)))


def test_a_gang_over_two_nodes_meets_at_one_address(pair):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NNODES", "MASTER_PORT"]
    pair.start(python(f"import os; print(*(os.environ[name] for name in {names}))"), leases=LEASES)
    assert {event.outcome for event in pair.ended(groups=2)} == {Outcome.FINISHED}
    ports = {json.loads((pair.folder(node=node) / "order.json").read_text())["master_port"] for node in ("a", "b")}
    assert len(ports) == 1
    [port] = ports
    logs = [pair.folder(node=node) / "logs" / f"rank{rank}.log" for node, rank in (("a", 0), ("a", 1), ("b", 2))]
    lines = [log.read_text().splitlines()[-1] for log in logs]
    assert lines == [f"0 3 0 0 2 {port}", f"1 3 1 0 2 {port}", f"2 3 0 1 2 {port}"]


def test_a_command_is_done_when_every_node_confirmed(pair):
    pair.until(lambda: epochs_up(pair, "a") and epochs_up(pair, "b"))
    os.kill(pair.agent_pid("b"), signal.SIGSTOP)
    pair.executor._confirm_s = 0.1
    pair.start(python(SLEEPS), leases=LEASES)
    pair.until((pair.folder(node="a") / "order.json").exists)
    assert pair.pending, "b has not confirmed"
    os.kill(pair.agent_pid("b"), signal.SIGCONT)
    pair.until(lambda: not pair.pending and len(pair.of(RanksStarted)) == 2)
    pair.notice(30)
    assert {event.outcome for event in pair.ended(groups=2)} == {Outcome.KILLED}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_user_at_the_servers_address_is_not_obeyed(world):
    """Another user may have taken the port of a server that was killed."""
    world.start(python(SLEEPS))
    world.logged("pid=")
    world.down()
    code = "import os, socket; os.setuid(65534)\n"
    code += "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    code += "while True: print(len(s.accept()[0].recv(999)), flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as stranger:
        port = stranger.stdout.readline().strip()
        (world.home / "server.json").write_text(json.dumps({"agents": f"http://127.0.0.1:{port}"}))
        assert [stranger.stdout.readline() for _ in range(3)] == ["0\n"] * 3, "it hangs up and sends no token"
        stranger.kill()
    assert process.find(TAG)
    world.up()
    world.kill()
    assert world.ended().why == "the test said so"


def test_a_spec_that_cannot_be_used_fails_its_job_only(world):
    world.start("true", env=["not", "a", "map"])
    assert "its spec cannot be used" in world.ended().why
    world.start("true", epoch=2)
    assert world.ended(epoch=2).outcome is Outcome.FINISHED
    assert epochs_up(world) == [1]


def test_an_order_that_cannot_be_kept_is_not_confirmed_and_comes_again(world):
    world.until(lambda: epochs_up(world))
    (world.home / "attempts").write_text("in the way")
    world.start("true")
    world.executor.wait(0.3)
    world.tick()
    assert world.pending
    (world.home / "attempts").unlink()
    assert world.ended().outcome is Outcome.FINISHED
    assert epochs_up(world) == [1]
