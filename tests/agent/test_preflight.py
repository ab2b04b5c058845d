"""Preflights of `preflight: full`: a product and an all-reduce before the ranks, and who is at fault if they fail."""

import json
import os
import stat

import pytest
from agent_world import World, python

from cordee.agent import preflight
from cordee.agent.launch import Assignment
from cordee.agent.preflight import Preflight
from cordee.control.engines.local import NodeConfig
from cordee.events import Lease, NodeUp, Outcome
from cordee.hardware.load import load_catalogue

H100 = load_catalogue().find_gpu("H100")


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "home", nodes=(NodeConfig(name="local", slots=2),))
    (made.home / "train.py").write_text("")
    yield made
    made.close()


def interpreter(folder, script):
    """Write a program that is named python, and prints what the probe would, or does something else."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_ranks_start_after_a_product_an_all_reduce_and_a_look_at_the_destination(world, tmp_path):
    code = "import os; print('port', os.environ['MASTER_PORT'], flush=True)"
    world.start(python(code), gpus=2, preflight="full", checkpoint={"to": str(tmp_path / "kept")})
    said = world.started().launch
    assert "; preflight: " in said and " GFLOP/s or more; all-reduce on this node " in said
    assert f"checkpoints to {tmp_path}" in said and not list((tmp_path / "home").glob(".cordee-doctor*"))
    end = world.ended()
    assert (end.outcome, end.node_fault) == (Outcome.FINISHED, False)


def test_a_product_that_fails_takes_its_gpu_out_of_use_and_no_rank_starts(world, tmp_path):
    ranks = [{"cuda": False, "flop_per_s": 1e11}, {"cuda": False, "failed": "flop_per_s", "why": "an illegal address"}]
    program = interpreter(tmp_path, f"echo '{json.dumps({'ranks': ranks})}'; exit 1")
    world.start([program, "train.py"], gpus=2, preflight="full")
    end = world.ended()
    assert end.outcome is Outcome.LOST and end.node_fault
    assert end.why == "local: preflight: GPU 1: its product failed: an illegal address"
    nodes = [(at, event.node) for at, event in enumerate(world.log) if isinstance(event, NodeUp)]
    assert nodes[-1][1].unavailable == (1,) and nodes[-1][0] < world.log.index(end)
    assert nodes[-1][1].unavailable_why == ("preflight: its product failed: an illegal address",)


def test_an_interpreter_without_torch_is_told_and_the_job_runs(world, tmp_path):
    program = interpreter(tmp_path, 'test "$1" = train.py || { echo "No module named torch" >&2; exit 1; }')
    world.start([program, "train.py"], gpus=1, preflight="full")
    assert f"no product, no all-reduce: {program}: No module named torch" in world.started().launch
    assert world.ended().outcome is Outcome.FINISHED


def test_a_preflight_ends_with_its_attempt(world, tmp_path):
    program = interpreter(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    world.start([program, "train.py"], gpus=1, preflight="full")
    world.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    world.kill()
    end = world.ended()
    assert end.outcome is Outcome.KILLED and not end.node_fault
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def judged(*ranks):
    order = Assignment(job_id="a-b", epoch=1, node="n", leases=(Lease(node="n", gpus=(3, 5)),), spec={},
                       master_addr="n", master_port=1)  # fmt: skip
    found = Preflight(order)
    preflight._judge(found, [{"cuda": True, **rank} for rank in ranks], H100, real=True)
    return found


FAST = H100.peak_flop_per_s("bf16") * H100.matmul_fraction
GOOD = {"flop_per_s": FAST, "local_bytes_per_s": 0.8 * H100.link_bytes_per_s}


def test_who_is_at_fault():
    good = judged(GOOD, GOOD)
    assert not good.problem and "all-reduce on this node" in good.says
    slow = judged(GOOD, {"flop_per_s": FAST / 2})
    assert slow.is_nodes_fault and list(slow.gpus) == [5] and "product" in slow.gpus[5]
    dead = judged(GOOD, {})
    assert dead.gpus == {5: "its product failed: its process died"}
    link = judged(GOOD, GOOD | {"local_bytes_per_s": 0.1 * H100.link_bytes_per_s})
    assert link.is_nodes_fault and not link.gpus and link.node.startswith("all-reduce ")
    hung = judged(GOOD, GOOD | {"failed": "local_bytes_per_s", "why": "no answer"})
    assert hung.node == "its all-reduce on this node failed: no answer"
    between = judged(GOOD, GOOD | {"failed": "bytes_per_s", "why": "timed out"})
    assert not between.is_nodes_fault and between.problem == "the all-reduce failed: timed out"
    narrow = judged(*[GOOD | {"bytes_per_s": 0.1 * H100.network_bytes_per_s}] * 2)
    assert not narrow.problem and "expected" in narrow.says, "the network is nobody's fault: it is said"
    other = judged(*[{"cuda": False, "failed": "flop_per_s", "why": "Torch not compiled with CUDA enabled"}] * 2)
    assert not other.problem and "not built with CUDA" in other.says


def test_a_destination_that_cannot_be_written_is_not_the_nodes_fault(tmp_path):
    (tmp_path / "file").write_text("")
    found = preflight._destination(str(tmp_path / "file"))
    assert found.state == "bad" and preflight._destination(str(tmp_path / "new" / "deep")).state != "bad"
    assert not (tmp_path / "new").exists()
