"""The outcome of rank groups, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from agent_world import DEADLINE_S, JOB, TAG, python

from cordee.agent import process
from cordee.agent.clock import Clock
from cordee.agent.launch import Assignment
from cordee.agent.rank_group import STILL_S_MAX, RankGroup
from cordee.events import Lease, NodeUp, Outcome, RankBehind, RankLeft, RanksEnded
from cordee.storage.rescue import RESCUE_S_MAX

IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(60)
"""

LEAVES = """
import os, signal, sys, time
from pathlib import Path
from cordee.telemetry.stream import StreamWriter
from cordee.events import RankLeft
rank = int(os.environ["RANK"])
writer = StreamWriter(Path(os.environ["CORDEE_SPOOL"]) / f"rank{rank}.jsonl")
def leave(*_):
    writer.append(RankLeft(at_us=5, job_id=os.environ["CORDEE_JOB"], epoch=int(os.environ["CORDEE_EPOCH"]),
                           rank=rank, how=sys.argv[1], step=7))
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True:
    time.sleep(0.1)  # a handler that comes just before a sleep waits for its end
"""


def test_node_is_reported(world):
    (up,) = world.until(lambda: [e for e in world.log if isinstance(e, NodeUp)])
    assert (up.node.name, up.node.epoch, up.node.gpu_name, up.node.gpus) == ("local", 1, "slot", 4)


def test_ranks_get_pytorchs_environment_and_finish(world):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"]
    names += ["OMP_NUM_THREADS", "CORDEE_ATTEMPT", "CORDEE_CHECKPOINT_TO", "CORDEE_GRACE_S"]
    world.start(
        python(f"import os; print(' '.join(f'{{k}}={{os.environ[k]}}' for k in {names}))"),
        gpus=2,
        checkpoint={"to": "/ckpt", "every_s": "auto", "keep": 2},
    )
    assert "one process per slot: 2 on this node" in world.started().launch
    ended = world.ended()
    assert (ended.outcome, ended.failure) == (Outcome.FINISHED, None)
    for rank in (0, 1):
        text = world.log_text(f"rank{rank}.log")
        assert (
            f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1" in text
        )
        assert f"CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 CORDEE_ATTEMPT={TAG}" in text
        assert f"CORDEE_CHECKPOINT_TO=/ckpt/{JOB} CORDEE_GRACE_S=30" in text
    order = json.loads((world.folder() / "order.json").read_text())
    assert order["omp_num_threads"] == 1 and order["launch"].startswith("one process per slot")


def test_first_failure_ends_the_others_at_once_with_its_last_lines(world):
    fails = "print('\\n'.join(map(str, range(100)))); raise SystemExit(3)"
    world.start(python(f"import os, time\nif os.environ['RANK'] == '1':\n    {fails}\ntime.sleep(600)"), gpus=3)
    ended = world.ended()
    assert (ended.outcome, ended.why) == (Outcome.FAILED, "rank 1 exited with 3")
    assert (ended.failure.rank, ended.failure.exit_code, ended.failure.signal) == (1, 3, None)
    assert ended.failure.tail == tuple(str(n) for n in range(60, 100))
    assert not process.find(TAG)


UPLOADER_AND_OTHER = """
import os, signal, subprocess, sys, time
wait = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\\nopen(sys.argv[2], 'w').close()"
for name in ("uploader", "other"):
    env = os.environ | ({"CORDEE_UPLOADER": "1"} if name == "uploader" else {})
    subprocess.Popen([sys.executable, "-c", wait, "go", f"{name}-done"], env=env)
print("ready", flush=True)
time.sleep(600)
"""


def test_an_uploader_may_store_the_captures_of_its_dead_trainer(world):
    """Ranks and their other processes end at once; the attempt ends when the uploader has ended."""
    world.start(python(UPLOADER_AND_OTHER))
    world.logged("ready")
    (rank,) = [each for each in process.find(TAG) if not has_parent_in(each, process.find(TAG))]
    process.send(rank, signal.SIGKILL)
    world.until(lambda: len(process.find(TAG)) == 1, "the end of all but the uploader")
    assert not world.of(RanksEnded)
    (world.home / "go").touch()
    assert world.ended().outcome is Outcome.LOST
    assert (world.home / "uploader-done").exists() and not (world.home / "other-done").exists()


def test_the_deadline_ends_an_uploader_too(world):
    world.start(python(UPLOADER_AND_OTHER))
    world.logged("ready")
    world.kill()
    world.until(lambda: len(process.find(TAG)) == 1, "the end of all but the uploader")
    world.notice(0.1)
    assert world.ended().outcome is Outcome.KILLED
    assert not process.find(TAG) and not (world.home / "uploader-done").exists()


def test_an_uploader_that_stands_still_is_not_waited_for(tmp_path):
    job = f"still-{os.getpid()}"
    order = Assignment(
        job_id=job,
        epoch=1,
        node="local",
        leases=(Lease(node="local", gpus=(0,)),),
        spec={},
        master_addr="",
        master_port=0,
    )
    env = os.environ | {"CORDEE_ATTEMPT": order.tag, "CORDEE_NODE": "local", "CORDEE_DRAIN": "1"}  # of version 0.1.0
    stopped, busy = [subprocess.Popen(python("while True: pass"), env=env) for _ in range(2)]
    try:
        group = RankGroup(order, tmp_path, Clock(), process)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(group.processes()) < 2:
            assert time.monotonic() < deadline_s
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        group.kill("the test said so", 0.0)
        assert not group.tick(0.0) and not group.tick(STILL_S_MAX - 1)
        worked = process.worked(process.identify(busy.pid))
        while process.worked(process.identify(busy.pid)) == worked:
            assert time.monotonic() < deadline_s
        group.tick(STILL_S_MAX)
        assert stopped.wait(DEADLINE_S) == -signal.SIGKILL and busy.poll() is None
        group.tick(RESCUE_S_MAX)
        assert busy.wait(DEADLINE_S) == -signal.SIGKILL and group.tick(RESCUE_S_MAX + 1)
    finally:
        for each in (stopped, busy):
            each.kill()
            each.wait()


def has_parent_in(each, others):
    return int((process.PROC / str(each.pid) / "stat").read_text().split()[3]) in {other.pid for other in others}


def test_rank_killed_from_outside_is_lost(world):
    world.start(python("import os, time; print(f'pid={os.getpid()}', flush=True); time.sleep(600)"), gpus=2)
    world.logged("pid=", "rank1.log")
    os.kill(int(world.log_text("rank1.log").partition("pid=")[2]), signal.SIGKILL)
    ended = world.ended()
    assert (ended.outcome, ended.failure.rank, ended.failure.signal) == (Outcome.LOST, 1, signal.SIGKILL)
    assert not process.find(TAG)


@pytest.mark.parametrize(
    ("how", "code", "outcome"),
    [
        ("checkpointed", 75, Outcome.CHECKPOINTED),
        ("checkpointed", 0, Outcome.CHECKPOINTED),
        ("checkpointed", 1, Outcome.CHECKPOINTED),
        ("finished", 0, Outcome.FINISHED),
        ("finished", 75, Outcome.CHECKPOINTED),
        ("aborted", 1, Outcome.KILLED),
        ("finished", 1, Outcome.FAILED),
    ],
)
def test_the_record_of_leaving_says_the_outcome(world, how, code, outcome):
    world.start([sys.executable, "-c", LEAVES, how, str(code)])
    world.logged("ready")
    world.notice(30)
    assert world.ended().outcome is outcome
    assert world.of(RankLeft) == [RankLeft(at_us=5, job_id=JOB, epoch=1, rank=0, how=how, step=7)]
    kinds = [type(event).__name__ for event in world.log]
    assert kinds.index("RankLeft") < kinds.index("RanksEnded")


def test_script_without_handler_dies_of_the_notice(world):
    world.start(python("import time; print('ready', flush=True); time.sleep(600)"), gpus=2)
    world.logged("ready", "rank0.log")
    world.logged("ready", "rank1.log")
    world.notice(30)
    ended = world.ended()
    assert (ended.outcome, ended.why) == (Outcome.KILLED, "it left on notice without a checkpoint")


def test_one_that_dies_of_the_notice_leaves_the_others_their_grace(world):
    saves = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('saving', flush=True), "
    saves += "open(os.environ['CORDEE_SPOOL'] + '/go').read(), sys.exit(75)))\n"
    code = f"import os, time\nif os.environ['RANK'] == '0':\n    exec({saves!r})\n"
    code += "print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    world.start(python(code), gpus=2)
    world.logged("ready", "rank0.log")
    world.logged("ready", "rank1.log")
    go = world.folder() / "spool" / "go"
    os.mkfifo(go)
    world.notice(30)
    world.logged("saving", "rank0.log")
    world.until(lambda: len(process.find(TAG)) == 1)
    go.open("w").close()
    ended = world.ended()
    assert (ended.outcome, ended.why) == (Outcome.KILLED, "it left on notice without a checkpoint")


HUNG = """
import os, sys
from pathlib import Path
from cordee.telemetry.stream import StreamWriter
from cordee.events import Behind, RankBehind, RankLeft
rank = int(os.environ["RANK"])
mine = {"at_us": 1, "job_id": os.environ["CORDEE_JOB"], "epoch": int(os.environ["CORDEE_EPOCH"]), "step": 7}
spool = Path(os.environ["CORDEE_SPOOL"])
writer = StreamWriter(spool / f"rank{rank}.jsonl")
if rank == 0:
    writer.append(RankBehind(**mine, rank=1, how=Behind.STUCK, since_us=0, where="train.py:5 in load"))
writer.append(RankLeft(**mine, rank=rank, how="hung"))
while not any("hung" in file.read_text() for file in spool.glob("rank0.jsonl")):
    os.sched_yield()
sys.exit(60)
"""


def test_a_gang_that_ended_itself_since_nothing_went_on_is_lost_and_not_failed(world):
    world.start(python(HUNG), gpus=2)
    ended = world.ended()
    assert ended.outcome is Outcome.LOST
    assert ended.why.startswith("rank 1 stood still in step 7, train.py:5 in load; ")
    assert [event.rank for event in world.of(RankBehind)] == [1], "the server hears of it"


def test_script_that_ignores_sigterm_is_killed_after_its_grace(world):
    world.start(python(IGNORES), on_preempt={"grace_s": 0.3})
    world.logged("ready")
    world.notice(0.3)
    ended = world.ended()
    assert (ended.outcome, ended.why) == (Outcome.KILLED, "it did not leave within its grace period of 0.3 s")
    assert not process.find(TAG)


def test_grace_is_kept_without_a_server(world):
    world.start(python(IGNORES), on_preempt={"grace_s": 0.3})
    world.logged("ready")
    world.notice(0.3)
    world.tick()
    assert not world.pending, "the notice was confirmed"
    world.down()
    world.until(lambda: not process.find(TAG))
    world.up()
    assert world.ended().outcome is Outcome.KILLED


NOTICES = """
import signal, sys, time
def handler(*_):
    print("notice", flush=True)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(75))
    signal.setitimer(signal.ITIMER_REAL, 0.3)  # time enough for a second notice to show
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "wrap",
    [
        "{command}",
        "cd . && {command}",
        "true; {command}; exit $?",
        "X=1 sh -c '{command}; exit $?'",
        "exec {command}",
        "({command})",
        "{command} 2>&1 | cat; exit 75",
    ],
)
def test_one_notice_through_shells(world, wrap):
    (world.home / "notices.py").write_text(NOTICES)
    world.start(wrap.format(command=f"{sys.executable} notices.py"))
    world.logged("ready")
    world.notice(30)
    assert world.ended().outcome is Outcome.CHECKPOINTED
    assert world.log_text("rank0.log").count("notice") == 1


def test_shell_with_a_trap_gets_the_notice_itself(world):
    world.start("trap 'echo trapped; exit 75' TERM; echo ready; while :; do read x < fifo; done")
    os.mkfifo(world.home / "fifo")
    world.logged("ready")
    world.notice(30)
    assert world.ended().outcome is Outcome.CHECKPOINTED
    assert "trapped" in world.log_text("rank0.log")


def test_notice_given_twice_is_one_notice(world):
    (world.home / "notices.py").write_text(NOTICES)
    world.start([sys.executable, "notices.py"])
    world.logged("ready")
    world.notice(30)
    world.notice(30)
    assert world.ended().outcome is Outcome.CHECKPOINTED
    assert world.log_text("rank0.log").count("notice") == 1


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(f"daemon={os.getpid()}", flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("last", "outcome"), [("", Outcome.FINISHED), ("time.sleep(600)", Outcome.KILLED)])
def test_a_daemon_of_a_rank_ends_with_its_rank_group(world, last, outcome):
    world.start(python(DAEMON + last))
    world.logged("daemon=")
    daemon = int(world.log_text("rank0.log").partition("daemon=")[2].split()[0])
    if last:
        world.kill()
    assert world.ended().outcome is outcome
    assert daemon not in {each.pid for each in process.find(TAG)}, "it runs no longer"
    world.until(lambda: process.identify(daemon) is None)  # the agent reaps it after its report


def test_a_process_that_overwrote_its_environment_is_found_by_descent():
    code = "import os, time; os.execve('/bin/sleep', ['sleep', '600'], {})"
    child = process.spawn(["/bin/sleep", "600"], env={process.TAG: "no.1"}, cwd="/", output=1)
    other = process.spawn(python(code), env={process.TAG: "no.1"}, cwd="/", output=1)
    known = [process.identify(each.pid) for each in (child, other)]
    try:
        assert process.find("no.1", known) == set(known)
    finally:
        for each in (child, other):
            each.kill()
            each.wait()
    assert not process.find("no.1", known)


def test_secrets_are_masked_in_every_file_and_event(world):
    secret = "hf_" + "abcdefghij"
    (world.home / "secrets").mkdir()
    (world.home / "secrets" / "HF_TOKEN").write_text(secret + "\n")
    code = (
        "import os, sys\nfor c in os.environ['HF_TOKEN']: sys.stdout.write(c); sys.stdout.flush()\nprint(); sys.exit(1)"
    )
    world.start(python(code), secrets=["HF_TOKEN"])
    ended = world.ended()
    assert (ended.outcome, ended.failure.tail[-1]) == (Outcome.FAILED, "[HF_TOKEN]")
    holders = [path for path in world.home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holders == [world.home / "secrets" / "HF_TOKEN"]


@pytest.fixture
def exported(monkeypatch):
    """A secret in the shell that starts the server; comes before the world."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij")


def test_a_secret_in_the_servers_own_shell_is_for_who_declares_it(exported, world):
    (world.home / "secrets").mkdir()
    (world.home / "secrets" / "HF_TOKEN").write_text("hf_abcdefghij\n")
    show = python("import os; print('I have', os.environ.get('HF_TOKEN'))")
    world.start(show)
    world.start(show, epoch=2, secrets=["HF_TOKEN"])
    world.ended(epoch=1)
    world.ended(epoch=2)
    assert "I have None" in world.log_text("rank0.log")
    assert "I have [HF_TOKEN]" in world.log_text("rank0.log", epoch=2)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"run": "python missing.py"}, "the script missing.py is not in"),
        ({"run": [sys.executable, "missing.py"]}, "the script missing.py is not in"),
        ({"run": ["no-such-program-here"]}, "the program no-such-program-here is not there"),
        ({"run": "true", "cwd": "/no/such/folder"}, "the job's folder /no/such/folder is not there"),
        ({"run": "true", "secrets": ["ABSENT"]}, "the secret ABSENT is not in"),
        ({"run": ["/dev/null"]}, "/dev/null cannot be started"),
        ({"run": []}, "is [], not a command"),
    ],
)
def test_group_that_cannot_start_gives_the_reason(world, spec, why):
    world.start(**spec)
    ended = world.ended()
    assert ended.outcome is Outcome.FAILED
    assert why in ended.why


def test_a_spool_holds_only_what_a_rank_may_say(world):
    left = {"kind": "RankLeft", "at_us": 1, "job_id": JOB, "epoch": 1, "rank": 0, "how": "x", "step": 1}
    events = [left | {"job_id": "other"}, {"kind": "ServerShuttingDown", "at_us": 1}, left | {"at_us": "1"}, left]
    lines = [json.dumps({"seq": seq, "event": event}) + "\n" for seq, event in enumerate(events, start=1)]
    text = "".join([*lines[:2], "no json\n", *lines[2:], '{"seq": 5, "ev'])
    code = f"import os; open(os.environ['CORDEE_SPOOL'] + '/rank0.jsonl', 'w').write({text!r})"
    world.start(python(code))
    assert world.ended().outcome is Outcome.FINISHED
    assert world.of(RankLeft) == [RankLeft(at_us=1, job_id=JOB, epoch=1, rank=0, how="x", step=1)]
    assert world.committed[f"{TAG}/rank0"] == 4


def test_many_records_arrive_once_and_in_order(world):
    code = """
import os
from pathlib import Path
from cordee.telemetry.stream import StreamWriter
from cordee.events import RankLeft
writer = StreamWriter(Path(os.environ['CORDEE_SPOOL']) / 'rank0.jsonl')
for n in range(5000):
    writer.append(RankLeft(at_us=n, job_id=os.environ['CORDEE_JOB'], epoch=1, rank=0, how='finished', step=n))
"""
    world.start(python(code))
    world.ended()
    assert [event.step for event in world.of(RankLeft)] == list(range(5000))
    world.until((world.folder() / "ended.json").exists, "the agent hears that its report is committed")
