"""A loop that has a batch ready before its first step, and asks in its warm-up: `ahead_script.py <folder> [killed]`.

It warms up until a timed save of the warm-up is durable, and, if it is to be killed, dies in step 0.
"""

import os
import signal
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset

import cordee


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return int(index)


def main(to: str, *, killed: bool) -> None:
    torch.set_num_threads(1)
    sampler = cordee.ElasticBatchSampler(Numbers(), 6, shuffle=False)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    with cordee.job({"w": torch.zeros(8), "data": sampler}, to=to, every="1s" if killed else 100) as job:
        batches = sampler.batches(loader)
        ready = next(batches)
        tick = threading.Event()
        while killed and job._saving.checkpointer.newest() is None:
            job.safe_point()
            tick.wait(0.01)
        for step in job.steps(4):
            following = next(batches)
            print(step, int(ready[0]), flush=True)
            ready = following
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], killed=sys.argv[2:] == ["killed"])
