"""One rank of the gang tests of checkpoints: `checkpoint_rank.py <folder> <act>`. Prints findings as JSON lines."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from cordee.errors import CheckpointError
from cordee.storage.destination import open_blobs
from cordee.storage.generations import Commit
from cordee.storage.manifest import read_manifest
from cordee.train.checkpoint.checkpointer import Checkpointer

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 6


def build() -> dict:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.LayerNorm(65), torch.nn.Linear(65, 10)
    )
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "opt": opt, "sched": torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), "seen": 0}


def train(state: dict, start: int, until: int) -> None:
    for _ in range(start, until):
        x = torch.randn(4, 33)  # From this rank's own generator: a wrong stream after a resume shows in the weights.
        state["opt"].zero_grad()
        state["model"](x).square().mean().backward()
        state["opt"].step()
        state["sched"].step()
        state["seen"] += 4


def full(state: dict) -> str:
    """A digest of all whole tensors of model and optimizer."""
    digest = hashlib.sha256()
    for part in (state["model"].state_dict(), *state["opt"].state_dict()["state"].values()):
        for name, value in part.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    digest.update(repr(state["opt"].state_dict()["param_groups"][0]["lr"]).encode())
    return digest.hexdigest()


def main(to: str, act: str) -> dict:
    state = build()
    ck = Checkpointer(to, rank=RANK, world_size=WORLD, grace_s=8 if act == "faults" else 30)
    if act == "resume":
        loaded = ck.resume(state)
        at_load = full(state)
        if loaded.extras is not None:
            assert loaded.extras["rank"] == RANK
            torch.set_rng_state(loaded.extras["rng"])
            train(state, loaded.step, STEPS)
        seen, final = state["seen"], full(state)
        ck.close()
        back = step_back(to, ck.newest(), state) if loaded.extras is None else None
        found = {"step": loaded.step, "at_load": at_load, "final": final, "seen": seen, "world": loaded.world_size}
        return found | {"back": back}
    ck.open()
    if act == "uninterrupted":
        at_start = full(state)
        capture_while_it_uploads(ck, state)
        torch.manual_seed(100 + RANK)
        train(state, 0, 3)
        saved = ck.save(state, step=3, extras={"rng": torch.get_rng_state(), "rank": RANK})
        at_save = full(state)
        train(state, 3, STEPS)
        got = ck.wait(60)
        ck.close()
        return {
            "at_start": at_start,
            "at_save": at_save,
            "final": full(state),
            "commit": got.generation,
            "bytes": saved.bytes,
        }
    if act == "faults":
        return faults(ck, state)
    raise AssertionError(act)


def step_back(to: str, commit: Commit, state: dict) -> list:
    """One flipped bit in what one rank reads, then in what none does: all of them go back to the generation before."""
    whole = read_manifest(open_blobs(to), commit.manifest)
    (weight, *_), (extras, *_) = whole.tensors["model/0.weight"].shards[-1].pieces, whole.ranks[3].extras
    found = []
    for piece in (weight, extras):
        flip(Path(to) / whole.chunks[piece.chunk].key, piece.offset)
        ck = Checkpointer(to, rank=RANK, world_size=WORLD)
        loaded = ck.resume(state)
        ck.close()
        found.append([loaded.step, [skipped.step for skipped in ck.skipped], full(state)])
        flip(Path(to) / whole.chunks[piece.chunk].key, piece.offset)
    return found


def flip(path: Path, offset: int) -> None:
    """Rank 0 does it, while no rank reads."""
    dist.barrier()
    if RANK == 0:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
    dist.barrier()


def capture_while_it_uploads(ck: Checkpointer, state: dict) -> None:
    """Only rank 0 knows, by its clock, that this capture is for memory; no rank waits for its uploader."""
    os.kill(ck._link.pid, signal.SIGSTOP)
    ck.save(state, step=0, extras={}, reach=1)
    held = ck.save(state, step=0, extras={}, reach=0 if RANK == 0 else None)
    assert held.reach == 0 and ck.status().memory_step == 0
    os.kill(ck._link.pid, signal.SIGCONT)
    ck.wait(60)


def faults(ck: Checkpointer, state: dict) -> dict:
    """Rank 2's uploader dies in the second save; rank 3 dies after its share of the fourth capture is under way."""
    digests, failures = {}, []
    for step in (1, 2, 3):
        train(state, step - 1, step)
        ck.save(state, step=step, extras={"rng": torch.get_rng_state(), "rank": RANK})
        digests[step] = full(state)
        try:
            ck.wait(60)
        except CheckpointError as error:
            failures.append([step, error.message])
        assert ck.has_failed() == ck.any_rank(ck.has_failed()) == (step == 2)
    print(json.dumps({"digests": digests, "failures": failures}), flush=True)
    train(state, 3, 4)
    if RANK == 3:
        ck._hand_over = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    ck.save(state, step=4, extras={})
    try:
        ck.wait(60)
    except CheckpointError as error:
        failures.append([4, error.message])
    return {"digests": digests, "failures": failures}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = main(sys.argv[1], sys.argv[2])
    if sys.argv[2] != "faults":
        dist.barrier()
    print(json.dumps(result), flush=True)
    os._exit(0)  # After a rank has died the group cannot be taken down in order.
