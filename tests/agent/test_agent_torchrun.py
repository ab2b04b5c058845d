"""Real torchrun; its workers do not import torch, since only signals and exits matter here."""

import sys

import pytest
from agent_world import TAG

from cordee.agent import process
from cordee.events import Outcome, RankLeft

pytest.importorskip("torch")

WORKER = """
import os, signal, sys
from pathlib import Path
rank = int(os.environ["RANK"])
def leave(*_):
    print(f"notice to {rank}", flush=True)
    if sys.argv[1] == "saves":
        from cordee.telemetry.stream import StreamWriter
        from cordee.events import RankLeft
        writer = StreamWriter(Path(os.environ["CORDEE_SPOOL"]) / f"rank{rank}.jsonl")
        job = os.environ["CORDEE_JOB"]
        writer.append(RankLeft(at_us=5, job_id=job, epoch=1, rank=rank, how="checkpointed", step=7))
    if sys.argv[1] != "stays":
        sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} pid={os.getpid()}", flush=True)
if sys.argv[1] == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""


def start(world, how, **spec):
    (world.home / "worker.py").write_text(WORKER)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "worker.py", how]
    world.start(run, gpus=2, **spec)
    assert "one process on this node: torchrun starts the ranks of its 2 slots" in world.started().launch


def test_one_notice_per_rank_through_torchrun_and_the_records_give_the_outcome(world):
    start(world, "saves")
    for rank in (0, 1):
        world.logged(f"rank {rank} of 2", "node.log")
    world.notice(30)
    ended = world.ended()
    assert ended.outcome is Outcome.CHECKPOINTED, "torchrun itself exits with 1"
    assert sorted(event.rank for event in world.of(RankLeft)) == [0, 1]
    text = world.log_text("node.log")
    assert [text.count(f"notice to {rank}") for rank in (0, 1)] == [1, 1]


def test_torchruns_workers_in_sessions_of_their_own_are_killed_after_the_grace(world):
    start(world, "stays", on_preempt={"grace_s": 1})
    for rank in (0, 1):
        world.logged(f"rank {rank} of 2", "node.log")
    assert len(process.find(TAG)) >= 3
    world.notice(1)
    assert world.ended().outcome is Outcome.KILLED
    assert not process.find(TAG)


def test_a_worker_of_torchrun_killed_from_outside_is_lost(world):
    start(world, "killed")
    ended = world.ended()
    assert (ended.outcome, ended.failure.rank, ended.failure.signal) == (Outcome.LOST, 1, 9)
    assert "Root Cause" in "\n".join(ended.failure.tail)
