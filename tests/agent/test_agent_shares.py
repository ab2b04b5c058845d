"""What becomes of a share, with real processes."""

from agent_world import python

from cordee.events import NodeUp, Outcome


def test_node_is_reported(world):
    (up,) = world.until(lambda: [e for e in world.log if isinstance(e, NodeUp)])
    assert (up.node.name, up.node.epoch, up.node.gpu_name, up.node.gpus) == ("local", 1, "slot", 4)


def test_ranks_get_pytorchs_environment_and_finish(world):
    world.start(
        python(
            "import os; print({k: os.environ[k] for k in ('RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE',"
            "'NODE_RANK','MASTER_ADDR','OMP_NUM_THREADS','CUDA_VISIBLE_DEVICES','CORDEE_ATTEMPT')})"
        ),
        gpus=2,
    )
    started = world.started()
    assert "one process per slot: 2 on this node" in started.launch
    ended = world.ended()
    assert (ended.outcome, ended.failure) == (Outcome.FINISHED, None)
    for rank in (0, 1):
        text = world.log_text(f"rank{rank}.log")
        assert f"'RANK': '{rank}', 'WORLD_SIZE': '2', 'LOCAL_RANK': '{rank}', 'LOCAL_WORLD_SIZE': '2'" in text
        assert (
            "'NODE_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''" in text
        )
        assert "'CORDEE_ATTEMPT': 'job.1'" in text
