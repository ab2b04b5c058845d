"""A tiny training that is rehearsed; its argument names what is wrong with it."""

import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import cordee


def main(argv: list[str]) -> None:
    """Train on 1 rank or several."""
    fault = " ".join(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    if "gang" in fault:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = cordee.ElasticBatchSampler(data, 8, micro_batch_max=8, seed=1)
    state = {"model": model, "optimizer": optimizer, "data": sampler}
    if "forgets" in fault:
        del state["optimizer"]
    with cordee.job(state) as job:
        batches = sampler.batches(DataLoader(data, batch_sampler=sampler))
        for step in job.steps(50):
            x, y = next(batches)
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            job.log(loss=loss)
            print(f"step {step}", flush=True)
            if "ignores" in fault and step == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.set_wakeup_fd(-1)
    raise AssertionError("a rehearsal runs no line after the loop")


if __name__ == "__main__":
    main(sys.argv[1:])
