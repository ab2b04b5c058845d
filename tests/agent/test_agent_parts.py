"""The agent's parts by themselves: streams, masks, launches, messages."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.agent import messages, process
from cordee.agent.clock import Clock, MachineClock
from cordee.agent.connection import Connection
from cordee.agent.launch import Assignment, prepare
from cordee.agent.lease import Lease
from cordee.agent.link import Link
from cordee.agent.logs import Masker
from cordee.agent.settings import AgentSettings
from cordee.agent.spools import spool_files
from cordee.agent.uplink import Uplink, UplinkError
from cordee.control.agents import link
from cordee.errors import InputError
from cordee.events import Lease as GpuLease
from cordee.events import RankLeft
from cordee.telemetry.stream import StreamReader, StreamWriter, last_records
from cordee.workload.launcher import launcher_of

PARTS = f"parts-{os.getpid()}.1"  # so that two runs of these tests do not meet


class Line:
    """Keeps what is sent."""

    address = "127.0.0.1"

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def left(step):
    return RankLeft(at_us=1, job_id="job", epoch=1, rank=0, how="finished", step=step)


# -- streams ---------------------------------------------------------------------------------------------


def test_a_stream_is_read_while_it_grows(tmp_path):
    path = tmp_path / "spool" / "rank0.jsonl"
    reader = StreamReader(path)
    assert reader.read(10) == []
    writer = StreamWriter(path)
    assert [writer.append(left(n)) for n in (7, 8, 9)] == [1, 2, 3]
    assert [(record.seq, record.event["step"]) for record in reader.read(2)] == [(1, 7), (2, 8)]
    assert [record.seq for record in reader.read(2)] == [3]
    assert reader.read(2) == []
    writer.close()
    reader.close()


def test_the_spools_of_possible_ranks_and_of_their_uploaders_are_read(tmp_path):
    leases = (GpuLease(node="n", gpus=(0, 1)),)
    order = Assignment(job_id="j", epoch=2, node="n", leases=leases, spec={}, master_addr="h", master_port=9)
    (tmp_path / "spool").mkdir()
    ours, others = ("rank0", "rank1-uploader", "rank1", "rank1-rag", "rank0-drain"), ("rank99999", "rank00", "rankx")
    for name in (*ours, *others, "rank1-other"):
        (tmp_path / "spool" / f"{name}.jsonl").touch()
    found = {(path.stem, scope.rank) for path, scope in spool_files(order, tmp_path)}
    assert found == {("rank0", 0), ("rank1", 1), ("rank1-uploader", 1), ("rank1-rag", 1), ("rank0-drain", 0)}


def test_a_torn_line_counts_when_it_is_whole(tmp_path):
    path = tmp_path / "stream.jsonl"
    whole = json.dumps({"seq": 1, "event": {"kind": "x"}}) + "\n"
    reader = StreamReader(path)
    with path.open("w", buffering=1) as file:
        for part in (whole[:5], whole[5:12]):
            file.write(part)
            file.flush()
            assert reader.read(10) == []
        file.write(whole[12:])
    assert [record.seq for record in reader.read(10)] == [1]
    reader.close()


def test_a_new_writer_replaces_what_a_dead_one_left_half_written(tmp_path):
    path = tmp_path / "stream.jsonl"
    writer = StreamWriter(path)
    writer.append(left(1))
    writer.close()
    reader = StreamReader(path)
    with path.open("a") as file:
        file.write('{"seq": 2, "event": {"kind": "RankLeft", "step": 99')
    assert [record.seq for record in reader.read(10)] == [1]
    writer = StreamWriter(path)
    assert writer.append(left(2)) == 2
    writer.close()
    assert [(record.seq, record.event["step"]) for record in reader.read(10)] == [(2, 2)]
    reader.close()


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(0, 45), st.integers(1, 7), st.integers(0, 3))
def test_a_stream_gives_back_what_was_written(tmp_path_factory, sizes, after, limit, restarts):
    path = tmp_path_factory.mktemp("stream") / "s.jsonl"
    writer = StreamWriter(path)
    for n, size in enumerate(sizes, start=1):
        if n % 5 == restarts:
            writer.close()
            writer = StreamWriter(path)
        assert writer.append(RankLeft(at_us=n, job_id="j", epoch=1, rank=0, how="h" * size * 9, step=size)) == n
    writer.close()
    reader, got = StreamReader(path, after=after), []
    while not reader.at_end:
        records = reader.read(limit)
        assert len(records) <= limit
        got += records
    reader.close()
    assert [(record.seq, record.event["step"]) for record in got] == list(enumerate(sizes, start=1))[after:]


def test_a_line_longer_than_the_readers_window(tmp_path):
    path = tmp_path / "s.jsonl"
    writer = StreamWriter(path)
    writer.append(RankLeft(at_us=1, job_id="j", epoch=1, rank=0, how="h" * 300_000, step=1))
    writer.append(left(2))
    reader = StreamReader(path)
    assert [record.seq for record in reader.read(10)] == [1, 2]
    assert [record.seq for record in last_records(path)] == [2]
    reader.close()
    writer.close()


@pytest.mark.parametrize(
    "junk", ["x" * (7 << 20), ("x" * 1000 + "\n") * 9000], ids=["one long line", "many short lines"]
)
def test_the_end_of_an_attempt_never_overtakes_a_report_behind_junk(tmp_path, junk):
    spool, line = tmp_path / "rank0.jsonl", Line()
    spool.write_text(junk + "\n" + json.dumps({"seq": 1, "event": {"kind": "x"}}) + "\n")
    node = StreamWriter(tmp_path / "1.jsonl")
    node.append(left(1))
    link_ = Link()
    link_.open(line)
    link_.add_rank_source("job.1/rank0", spool, lambda record: record.event)
    link_.add_node_source("node/a/1", partial(StreamReader, tmp_path / "1.jsonl"))
    link_.complete("job.1/")
    link_.welcome({})
    link_.forward()
    assert [message.source for message in line.sent] == ["job.1/rank0", "node/a/1"]
    link_.close()
    node.close()


# -- masks -----------------------------------------------------------------------------------------------


def test_a_value_within_a_value_and_across_chunks():
    masker = Masker({"LONG": "abcdef", "SHORT": "abc", "EMPTY": ""})
    chunks = [b"x abc", b"def y ab", b"c z ab", b"q", b" abc"]
    assert b"".join(map(masker.feed, chunks)) + masker.finish() == b"x [LONG] y [SHORT] z abq [SHORT]"


@given(
    st.text("ab", max_size=40), st.lists(st.integers(0, 40), max_size=6), st.sets(st.text("ab", min_size=1, max_size=5))
)
def test_masking_does_not_depend_on_the_chunks(text, cuts, values):
    secrets = {f"S{n}": value for n, value in enumerate(sorted(values))}
    data, whole, parts = text.encode(), Masker(secrets), Masker(secrets)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    once = whole.feed(data) + whole.finish()
    assert b"".join(map(parts.feed, pieces)) + parts.finish() == once
    assert not any(value.encode() in once.replace(b"[S", b"").replace(b"]", b"") for value in values if "a" not in text)


def test_without_secrets_nothing_is_held_back():
    assert Masker({}).feed(b"half a li") == b"half a li"


# -- launch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "launcher"),
    [
        ("python train.py", None),
        ("torchrun --nproc_per_node=4 train.py", "torchrun"),
        ("/venv/bin/torchrun train.py", "torchrun"),
        ("exec torchrun train.py", "torchrun"),
        ("uv run torchrun train.py", "torchrun"),
        ("A=1 B='x y' torchrun train.py", "torchrun"),
        ("cd src && torchrun train.py", "torchrun"),
        ("pip list; accelerate launch train.py", "accelerate"),
        ("python -m accelerate.commands.launch train.py", "accelerate"),
        ("deepspeed train.py --deepspeed", "deepspeed"),
        ("python3.11 -u -m torch.distributed.run train.py", "torchrun"),
        ("python -m torch.distributed.launch train.py", "torchrun"),
        ("python /venv/bin/torchrun train.py", "torchrun"),
        (["python", "-m", "torch.distributed.run", "train.py"], "torchrun"),
        (["torchrun", "train.py"], "torchrun"),
        ("echo torchrun", None),
        ("python train.py --backend deepspeed", None),
        ("python -m train torchrun", None),
        ("./train.sh", None),
        ("python -c 'import torch; torchrun'", None),
        ("echo 'unbalanced", None),
        ("make data\ntorchrun train.py", "torchrun"),
    ],
)
def test_launch_auto(run, launcher):
    assert launcher_of(run) == launcher


def launched(tmp_path, spec, *, node="b", base=None, secrets=None, real=False, estimate=None):
    leases = (GpuLease(node="a", gpus=(0, 1)), GpuLease(node="b", gpus=(2, 5)))
    order = Assignment(
        job_id="j",
        epoch=3,
        node=node,
        leases=leases,
        spec=spec | {"cwd": str(tmp_path)},
        master_addr="h",
        master_port=9,
        estimate=estimate,
    )
    return prepare(order, folder=tmp_path / "f", base_env=base or {}, secrets=secrets or {}, real_gpus=real, gpus=8)


@pytest.mark.parametrize(
    ("run", "name", "says", "rank"),
    [
        ("true", "rank0.log", "one process, without a GPU (launch: auto)", "0"),
        ("torchrun x", "node.log", "torchrun on this node, without a GPU (launch: auto)", None),
    ],
)
def test_an_attempt_without_gpus_is_one_process_that_sees_none(tmp_path, run, name, says, rank):
    order = Assignment(
        job_id="j",
        epoch=1,
        node="a",
        leases=(GpuLease(node="a", gpus=()),),
        spec={"run": run, "cwd": str(tmp_path), "cpus": 2.5},
        master_addr="h",
        master_port=9,
    )
    made = prepare(order, folder=tmp_path / "f", base_env={}, secrets={}, real_gpus=True, gpus=8)
    [process] = made.processes
    assert (process.log_name, made.says, process.env.get("RANK")) == (name, says, rank)
    assert process.env["CUDA_VISIBLE_DEVICES"] == "" and process.env["OMP_NUM_THREADS"] == "2"
    assert process.env.get("WORLD_SIZE", process.env.get("PET_NPROC_PER_NODE")) == "1"


@pytest.mark.parametrize(
    ("run", "launch", "names", "says"),
    [
        (
            "true",
            "auto",
            ["rank2.log", "rank3.log"],
            "one process per GPU: 2 on this node, 4 in the gang (launch: auto)",
        ),
        (
            "true",
            "node",
            ["node.log"],
            "one process on this node: the command starts the ranks of its 2 GPUs (launch: node)",
        ),
        (
            "torchrun x",
            "auto",
            ["node.log"],
            "one process on this node: torchrun starts the ranks of its 2 GPUs (launch: auto)",
        ),
        (
            "torchrun x",
            "rank",
            ["rank2.log", "rank3.log"],
            "one process per GPU: 2 on this node, 4 in the gang (launch: rank)",
        ),
    ],
)
def test_which_processes_are_started(tmp_path, run, launch, names, says):
    made = launched(tmp_path, {"run": run, "launch": launch}, real=True)
    assert [each.log_name for each in made.processes] == names
    assert made.says == says


def test_the_environment_of_a_rank(tmp_path):
    spec = {"run": "true", "env": {"MINE": "1", "RANK": "evil"}, "on_preempt": {"grace_s": 12.5}}
    spec["checkpoint"] = {"to": "ck", "every_s": 90, "keep": 3, "ram_s": 15}
    spec["on_hang"] = {"report_after_s": 60.0, "restart_after_s": 1800.0}
    base = {"PATH": "/bin", "CORDEE_HOME": "x", "TORCHELASTIC_RUN_ID": "outer", "WORLD_SIZE": "99", "PET_NNODES": "9"}
    made = launched(tmp_path, spec, base=base, secrets={"TOKEN": "v"}, real=True)
    assert dict(made.processes[1].env) == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "2,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8)),
        "MINE": "1",
        "TOKEN": "v",
        "CORDEE_ATTEMPT": "j.3",
        "CORDEE_NODE": "b",
        "CORDEE_JOB": "j",
        "CORDEE_EPOCH": "3",
        "CORDEE_SPOOL": str(tmp_path / "f" / "spool"),
        "CORDEE_PYTHON": sys.executable,
        "CORDEE_CLOUD": "none",
        "CORDEE_GRACE_S": "12.5",
        "CORDEE_HANG_REPORT_S": "60",
        "CORDEE_HANG_RESTART_S": "1800",
        "CORDEE_CHECKPOINT_TO": str(tmp_path / "ck" / "j"),
        "CORDEE_CHECKPOINT_EVERY": "90",
        "CORDEE_CHECKPOINT_KEEP": "3",
        "CORDEE_CHECKPOINT_RAM": "15",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "13",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
        "NNODES": "2",
        "NODE_RANK": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert "'v'" not in repr(made), "a secret must not come out by printing a launch"


def test_ranks_get_the_planned_layout(tmp_path):
    estimate = {"layout": "tp2 fsdp2", "peak_bytes": 7}
    env = launched(tmp_path, {"run": "true"}, estimate=estimate).processes[0].env
    assert env["CORDEE_LAYOUT"] == "tp2 fsdp2"
    assert json.loads(env["CORDEE_ESTIMATE"]) == estimate


def test_a_launcher_gets_torchruns_options_as_environment(tmp_path):
    env = launched(tmp_path, {"run": "torchrun x", "checkpoint": {"to": "s3://b/c/"}}).processes[0].env
    pet = {name: value for name, value in env.items() if "PET_" in name}
    assert pet == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "h",
        "PET_MASTER_PORT": "9",
    }
    assert "RANK" not in env and env["CORDEE_CHECKPOINT_TO"] == "s3://b/c/j"


# -- processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("portable", [False, True])
def test_find_and_send(portable, monkeypatch):
    if portable:
        monkeypatch.setattr(process, "PROC", None)
    child = process.spawn(["/bin/sleep", "600"], env={process.TAG: PARTS, process.NODE: "n"}, cwd="/", output=1)
    try:
        while portable and not Path(f"/proc/{child.pid}/environ").read_bytes():
            assert child.poll() is None, "the program has begun, and the system shows its environment a moment later"
        assert {found.pid for found in process.find(PARTS)} == {child.pid}
        (found,) = process.find(PARTS, node="n")
        assert not process.find(PARTS, node="m")
        assert not process.send(process.Process(found.pid, found.started + 1), signal.SIGKILL), (
            "a later one with that pid"
        )
        assert child.poll() is None
        assert process.notice_targets(child.pid) == {found}
        assert process.send(found, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert not process.find(PARTS, [found])
        assert not process.send(found, signal.SIGTERM)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_begins_a_program_is_looked_at_again(tmp_path, monkeypatch):
    """Within exec(2) a process shows neither arguments nor an environment; a rank was missed, and ran on."""
    kernel_thread = 0x00200000

    def there(pid, environ, cmdline=b"", state="S", flags=0):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {state} 1 1 1 0 -1 {flags} {'0 ' * 12}{pid}00 0 0")
        (tmp_path / str(pid) / "environ").write_bytes(environ)
        (tmp_path / str(pid) / "cmdline").write_bytes(cmdline)

    there(11, b"")
    there(12, b"", flags=kernel_thread)
    there(13, b"", state="Z")
    there(14, b"", cmdline=b"env\0-i\0")
    waits = []

    def wait(pause_s):
        waits.append(pause_s)
        if len(waits) == 3:
            (tmp_path / "11" / "environ").write_bytes(f"A=1\0{process.TAG}={PARTS}\0".encode())

    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(process, "pause", wait)
    assert {found.pid for found in process.find(PARTS)} == {11} and len(waits) == 3
    (tmp_path / "11" / "environ").write_bytes(b"")
    assert not process.find(PARTS) and 3 < len(waits) < 100, "it is not looked at for ever"


# -- messages --------------------------------------------------------------------------------------------

FROM_SERVER = [
    messages.Welcome(epoch=2, marks={"node/n/2": 7}, lease_s=30.0, beat_s=2.0, clock_us=5),
    messages.Refused(why="no", final=True),
    messages.Seen(source="s", seq=1),
    messages.Beat(number=1, clock_us=5),
    messages.Order(number=3, event={"kind": "x"}, spec="{}", meeting=messages.Meeting(address="h", port=5)),
    messages.Order(number=3, event={"kind": "x"}, spec="{}", estimate={"layout": "fsdp4", "step_us": None}),
    messages.Shutdown(now=True),
]
FROM_AGENT = [
    messages.Claim(
        incarnation="i", machine="h/1", epoch=2, epoch_min=2, sources=["s"], clock_us=1, cordee="0", python="3"
    ),
    messages.Records(source="s", seqs=[1, 2], events=[{"kind": "x"}, {"kind": "y"}]),
    messages.Beat(number=1, clock_us=5),
    messages.Confirm(number=3, meeting=messages.Meeting(address="h", port=5)),
    messages.Confirm(number=3),
]


def named(message):
    return type(message).__name__


@pytest.mark.parametrize("message", FROM_SERVER, ids=named)
def test_messages_of_the_server_survive_the_link(message):
    assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize("message", FROM_AGENT, ids=named)
def test_messages_of_an_agent_survive_the_link(message):
    assert link.read(messages.encode(message)) == message


def test_a_printed_order_shows_no_secret():
    assert "hush" not in repr(messages.Order(number=3, event={}, spec="{}", secrets={"TOKEN": "hush"}))


@pytest.mark.parametrize("line", ["", "7", "{}", '{"nothing": {}}', '{"confirm": {}}', '{"confirm": 7}', "\ufffd"])
def test_malformed_messages_are_refused(line):
    for read in (messages.decode, link.read):
        with pytest.raises(ValueError, match="not a message"):
            read(line)


# -- the lease -------------------------------------------------------------------------------------------


def test_a_lease_counts_from_the_sending_of_the_last_answered_beat():
    lease = Lease()
    assert lease.ends_s == math.inf
    lease.welcome(lease_s=30, beat_s=2, claimed_s=100, now_s=100.5)
    assert (lease.next_beat_s, lease.ends_s, lease.notice_s(10), lease.notice_s(60)) == (102.5, 130, 120, 115)
    first, second = lease.beat(103), lease.beat(105)
    assert lease.answered(second) == 105 and lease.ends_s == 135
    assert lease.answered(first) is None and lease.ends_s == 135, "an older answer takes nothing back"
    for at_s in (107, 109, 111):
        assert not lease.unanswered
        lease.beat(at_s)
    assert lease.unanswered
    lease.disconnected()
    assert (lease.next_beat_s, lease.ends_s) == (math.inf, 135)


def test_a_lease_does_not_count_while_no_server_runs():
    lease = Lease()
    lease.no_server(50)
    assert lease.ends_s == math.inf
    lease.welcome(lease_s=30, beat_s=2, claimed_s=100, now_s=100)
    lease.no_server(99)
    assert lease.ends_s == 130
    lease.no_server(125)
    assert lease.ends_s == 155
    lease.lapsed = True
    lease.no_server(200)
    assert lease.ends_s == 155, "what has ended is not extended"


class Reads(MachineClock):
    """A machine whose clocks are read at these times, in seconds, in turn."""

    def __init__(self, *at_s):
        self._at_s = list(at_s)

    def now_us(self):
        return round(self.now_s() * 1e6)

    def now_s(self):
        return self._at_s.pop(0)


def test_a_clock_follows_the_shortest_round_trip(caplog):
    clock = Clock(Reads(1000.2, 1000.2, 1010.3, 1010.3, 1020.001, 1020.001))
    clock.answered(4600_100_000, sent_s=1000.0)
    assert clock.offset_us == 3_600_000_000
    assert "3600.0 s behind the server's" in caplog.text
    clock.answered(5, sent_s=1010.0)
    assert clock.offset_us == 3_600_000_000, "a longer round trip knows less"
    clock.begin()
    clock.answered(1020_000_000, sent_s=1020.0)
    assert clock.offset_us == 0, "a small difference is the network's"


def test_a_machine_that_stalls_while_it_reads_its_clocks_is_not_corrected_by_that():
    clock = Clock(Reads(1000.002, 1060.0))
    clock.answered(1000_001_000, sent_s=1000.0)
    assert clock.offset_us == 0


def test_the_agent_starts_light():
    heavy = {"torch", "pydantic", "fastapi", "sqlalchemy", "numpy", "pynvml", "psutil"}
    code = f"import sys, cordee.agent.agent; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert done.stdout == "[]\n"


def test_no_token_goes_in_clear_to_another_machine(tmp_path):
    AgentSettings(node="a", token="t", servers=("http://192.0.2.1:9",)).write(tmp_path)
    woken = threading.Event()
    connection = Connection(tmp_path, woken.set)
    connection.start()
    assert woken.wait(60)
    [closed, *_] = connection.arrived()
    connection.close()
    assert "is not encrypted" in closed.why and not closed.refused, "which proves nothing about servers"
    with pytest.raises(UplinkError, match="is not encrypted"):
        Uplink(tmp_path).put_log("j", 1, "rank0.log", 0, b"x")


def test_the_folder_of_an_agent_is_for_its_owner(tmp_path):
    AgentSettings(node="a", token="t", servers=("https://s:1",)).write(tmp_path / "a")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "agent.json")] == [0o700, 0o600]


def test_a_home_that_cannot_be_read_does_not_prove_that_no_server_runs(tmp_path):
    settings = AgentSettings(node="a", token="t", home=str(tmp_path))
    assert settings.urls() == ()
    (tmp_path / "server.json").write_text('{"agents": ')
    with pytest.raises(InputError, match="cannot be read"):
        settings.urls()
