"""Ranks of one job, forked from a process that has imported torch once: `survive_rank.py <folder>`, orders on stdin.

An order is {"env", "world", "out", "steps"} as one JSON line. Answers: {"pids"}, then {"rank", "code"} of each as it
ends. Each rank writes a row a step to <out>.<rank>.jsonl: the step, its samples, the loss of all, and one number of all
the weights that it began with.
"""

import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it: once here, and not in each rank
import torch.distributed as dist
from survive_job import EVERY, GLOBAL_BATCH, HOLD, KEEP, SAMPLES, SEED, STEPS_PER_S
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cordee
from cordee.errors import CordeeError


def run(folder: Path, out: str, steps: int) -> None:
    torch.set_num_threads(1)
    # Ranks add up in another order in each world: in double precision that stays far below what the test allows.
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    inputs = torch.randn(SAMPLES, 7)
    wanted = inputs.sin().sum(1, keepdim=True) + torch.randn(SAMPLES, 1)  # never learned: the weights keep moving
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, wanted)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, eta_min=1e-3)
    sampler = cordee.ElasticBatchSampler(dataset, GLOBAL_BATCH, micro_batch_max=6, seed=SEED, drop_last=False)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": sampler, "n": 0}
    rank = dist.get_rank()
    with (
        Path(f"{out}.{rank}.jsonl").open("a", buffering=1) as diary,
        cordee.job(state, every=EVERY, ram=HOLD, keep=KEEP) as job,
    ):
        batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler))
        for step in job.steps(steps):
            assert state["n"] == step, f"the state is that of step {state['n']}, not of {step}"
            told = torch.zeros(2)
            told[1] = sum((weights.to_local().sin().sum() for weights in model.parameters()), torch.zeros(())).detach()
            taken: list[int] = []
            for micro in range(sampler.micro_batches):
                index, x, y = next(batches)
                model.set_requires_gradient_sync(micro == sampler.micro_batches - 1)
                loss = (model(x) - y).square().mean() / sampler.micro_batches
                loss.backward()
                taken += index.tolist()
                told[0] += loss.detach() / job.world_size
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["n"] += 1
            dist.all_reduce(told)
            if not all(map(math.isfinite, told.tolist())):
                raise ArithmeticError(f"step {step}: {told}")
            job.log(loss=told[0])
            diary.write(json.dumps([step, taken, *told.tolist()]) + "\n")
            if not (folder / "fast").exists():
                time.sleep(1 / STEPS_PER_S)
        weights = [each.full_tensor().flatten().tolist() for each in model.parameters()]  # type: ignore[attr-defined]
        if rank == 0:
            Path(f"{out}.weights").write_text(json.dumps(weights))
    dist.destroy_process_group()


def start(folder: Path, order: dict[str, Any]) -> dict[int, int]:
    """Fork the ranks of an order; which rank each process is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {}
    for rank in range(order["world"]):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order["world"])}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **order["env"]}
            _be_rank(folder, order, rank)
        ranks[pid] = rank
    return ranks


def _be_rank(folder: Path, order: dict[str, Any], rank: int) -> None:
    code = 1
    try:
        log = os.open(f"{order['out']}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run(folder, order["out"], order["steps"])
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except CordeeError as error:
        traceback.print_exc()
        code = error.exit_code
    except BaseException:  # A forked child must never go on in its parent's code.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        ranks = start(folder, json.loads(line))
        print(json.dumps({"pids": sorted(ranks, key=lambda pid: ranks[pid])}), flush=True)
        while ranks:
            pid, status = os.wait()
            print(json.dumps({"rank": ranks.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
