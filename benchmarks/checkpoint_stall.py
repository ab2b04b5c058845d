"""What a checkpoint costs the loop, and when it is durable, beside what this machine can do at best.

The limits are measured in the same run, save by save: a copy of the same tensors into warm memory, and one write of the
same bytes with fsync.

    python benchmarks/checkpoint_stall.py [--saves 9] [--mb 200] [--json]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cordee.train.checkpoint import Checkpointer


def seconds(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def write_durably(path: Path, data: memoryview) -> None:
    """One buffered write with fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def measure(saves: int, mb: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each save and of its limits; first saves, which plan, are apart: with new memory, and with
    memory that was made beforehand."""
    torch.set_num_threads(1)
    width = 1024
    layers = max(1, round(mb * 1e6 / (3 * 4 * width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()] + list(model.parameters())
    tensors = [tensor.detach() for tensor in tensors]
    warm = [torch.empty_like(tensor).zero_() for tensor in tensors]
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    blob = memoryview(bytearray(os.urandom(1 << 20) * (n_bytes >> 20)))
    state = {"model": model, "optimizer": optimizer}
    out: dict[str, list[float]] = {
        "first save": [],
        "first save, prepared": [],
        "stall": [],
        "memcpy": [],
        "durable": [],
        "write and fsync": [],
    }
    checkpointer = Checkpointer(str(folder / "to"), rank=0, world_size=1, keep=2)
    try:
        checkpointer.open()
        for step in range(1, saves + 2):
            out["memcpy"].append(seconds(lambda: [new.copy_(old) for new, old in zip(warm, tensors, strict=True)]))
            started = time.perf_counter()
            checkpointer.save(state, step=step, extras={})
            stall_s = time.perf_counter() - started
            checkpointer.wait(600)
            out["stall"].append(stall_s)
            out["durable"].append(time.perf_counter() - started)
            out["write and fsync"].append(seconds(lambda: write_durably(folder / "raw", blob)))
            with torch.no_grad():  # frozen tensors would be stored once only
                torch._foreach_add_(tensors, 1e-3)
    finally:
        checkpointer.close()
    for again in range(3):
        for name in ("first save", "first save, prepared"):
            fresh = Checkpointer(str(folder / f"{name}{again}"), rank=0, world_size=1)
            try:
                fresh.open()
                if name != "first save":
                    fresh.prepare(state)  # As a job does after its first step, beside the next ones.
                    fresh._buffers.settle()
                out[name].append(seconds(lambda fresh=fresh: fresh.save(state, step=1, extras={})))
                fresh.wait(600)
            finally:
                fresh.close()
    for name in ("stall", "memcpy", "durable", "write and fsync"):
        out[name] = out[name][1:]
    return out


def main() -> None:
    """Measure, print a table, and with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = measure(args.saves, args.mb, Path(folder))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    ratios = {
        "stall over memcpy": medians["stall"] / medians["memcpy"],
        "durable over write and fsync": medians["durable"] / medians["write and fsync"],
    }
    if args.json:
        print(
            json.dumps({"torch": torch.__version__, "python": platform.python_version(), "s": rows, "ratios": ratios})
        )
        return
    print(f"{'':28}{'min':>9}{'median':>9}{'max':>9}   (ms)")
    for name, values in rows.items():
        print(f"{name:28}{min(values) * 1e3:9.1f}{medians[name] * 1e3:9.1f}{max(values) * 1e3:9.1f}")
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:18.2f}")


if __name__ == "__main__":
    main()
