"""One rank of a test of saves that fail on one rank alone: `saving_rank.py <folder>`. Prints what each try came to."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import cordee
from cordee.errors import CheckpointError
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.saver import Saver
from cordee.train.job import Job

RANK = int(os.environ["RANK"])
WAIT_S = 30.0


def fail_once(owner: Any, name: str, error: Exception, rank: int) -> None:
    """The next call on this rank raises."""
    real = getattr(owner, name)

    def fails(*_: Any) -> None:
        setattr(owner, name, real)
        raise error

    if rank == RANK:
        setattr(owner, name, fails)


def no_memory(saving: Saver, rank: int) -> None:
    fail_once(saving.checkpointer._captures, "_fill", OSError(12, "Cannot allocate memory"), rank)


def once_pledged(made: Job, ask: Callable[[], None]) -> None:
    """Rank 0 asks; the ranks meet at the end of this step."""
    if RANK == 0:
        ask()
    tick = threading.Event()
    while made._agreement._pledge is None:
        tick.wait(0.005)


def main(to: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with cordee.job({"w": torch.zeros(1000)}, to=to, every=4, grace=f"{WAIT_S:.0f}s") as made:
        saving = made._saving
        found["loaded"] = saving.make_durable(0, lambda: WAIT_S)
        for step in made.steps(1000):
            if step == 0:  # each order: the rank that has no capture asks for one, or is asked by the other
                for number, odd in ((101, 0), (102, 1)):
                    no_memory(saving, odd)
                    found[f"save {number}"] = saving.save(number)
                    found[f"durable {number}"] = saving.make_durable(number, lambda: WAIT_S)
                fail_once(rank_state, "capture", CheckpointError("nobody has counted"), 1)
                found["uncounted"] = [saving.save(103), saving.make_durable(103, lambda: WAIT_S)]
            if step == 3:  # by steps it fails on one rank, and at the same boundary one by time is due
                no_memory(saving, 1)
                once_pledged(made, made._agreement.request)
            if step == 4:
                found["tried"] = [saving.tried_step, saving._last.step]
            if step == 7:  # it fails on one rank, and they leave
                no_memory(saving, 1)
                once_pledged(made, lambda: os.kill(os.getpid(), signal.SIGTERM))
            print(json.dumps({"step": step, **found}), flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    main(sys.argv[1])
