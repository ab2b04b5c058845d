"""Rehearses pipeline schedules on ranks of this machine (gloo), with timed waits or real products for passes.

`rehearse` starts the ranks and reads what they noted; it imports no torch. Started as a program, this module is one of
the ranks: it builds its stages, runs each schedule, and compares its gradients with those of the whole model.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cordee.errors import ScriptError
from cordee.plan.pipeline import Placement, Table, table_csv, table_of

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Block:
    """What a stage of the rehearsal's model is made of.

    kind: `exact` are small products in double precision; `waits` sleep for the seconds of each pass, times the stage's
    size; `products` are `layers` products of `width` on `rows` rows in each 1/p of the depth.
    """

    kind: str = "exact"
    forward_s: float = 0.0
    inner_s: float = 0.0
    weight_s: float = 0.0
    width: int = 16
    rows: int = 4
    layers: int = 2


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What one schedule did: gradients against the whole model's, and each step's passes, rank by rank.

    A pass is (stage, kind, micro-batch, start, end) in seconds of one clock.
    """

    name: str
    gradient_error: float
    loss_error: float
    steps: tuple[tuple[tuple[tuple[int, str, int, float, float], ...], ...], ...]


def rehearse(
    tables: Sequence[Table],
    *,
    ranks: int,
    torch_names: Sequence[tuple[str, Placement, int]] = (),
    block: Block = Block(),
    steps: int = 1,
    pin: bool = False,
) -> tuple[Rehearsed, ...]:
    """Run tables, then schedules of torch's own by (name, placement, micro-batches), on so many new ranks.

    Raises:
        ScriptError: a rank failed; the message has the end of what it wrote.
    """
    spec = {
        "tables": [{"name": table.name, "shape": table.placement.shape, "chunks": table.placement.chunks,
                    "micro_batches": table.micro_batches, "csv": table_csv(table)} for table in tables],
        "torch": [{"name": name, "shape": place.shape, "chunks": place.chunks, "micro_batches": count}
                  for name, place, count in torch_names],
        "block": asdict(block), "steps": steps, "pin": pin,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cordee-pipeline-") as folder:
        path = Path(folder)
        (path / "spec.json").write_text(json.dumps(spec))
        _start_and_wait(path, ranks)
        said = [json.loads((path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return tuple(_joined([rank[index] for rank in said]) for index in range(len(said[0])))


def _start_and_wait(folder: Path, ranks: int) -> None:
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RES_OPTIONS": "timeout:1 attempts:1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    running = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("wb") as log:
            words = [sys.executable, "-m", "cordee.train.pipeline.rehearse", str(folder)]
            running.append(subprocess.Popen(words, env=env | {"RANK": str(rank)}, stdout=log, stderr=log))
    failed, until_s = None, time.monotonic() + TIMEOUT_S
    try:
        # The first to fail is the one to be heard: the others fail because it is gone.
        while failed is None and any(process.poll() is None for process in running):
            if time.monotonic() > until_s:
                failed = next(rank for rank, process in enumerate(running) if process.poll() is None)
            time.sleep(0.02)
            failed = next((rank for rank, process in enumerate(running) if process.poll()), failed)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if failed is not None:
        lines = (folder / f"rank{failed}.log").read_text(errors="replace").strip().splitlines()
        raise ScriptError(f"rank {failed} of the rehearsal failed: {' | '.join(lines[-3:]) or 'it wrote nothing'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _joined(ranks: Sequence[Mapping[str, Any]]) -> Rehearsed:
    """One schedule from what its ranks said."""
    steps = tuple(
        tuple(
            tuple((int(one[0]), str(one[1]), int(one[2]), float(one[3]), float(one[4])) for one in row) for row in rows
        )
        for rows in zip(*(rank["steps"] for rank in ranks), strict=True)
    )
    errors = [max(float(rank[name]) for rank in ranks) for name in ("gradient_error", "loss_error")]
    return Rehearsed(str(ranks[0]["name"]), errors[0], errors[1], steps)


# --- One rank ---


def main() -> None:
    """Run this rank: every schedule of the spec, in its order."""
    from cordee.train.pipeline.rehearsal_rank import run_rank

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    spec = json.loads((folder / "spec.json").read_text())
    if spec["pin"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    said = run_rank(spec, _table_from)
    (folder / f"rank{rank}.json").write_text(json.dumps(said))


def _table_from(one: Mapping[str, Any], ranks: int) -> Table:
    placement = Placement(one["shape"], ranks, one["chunks"])
    if placement.shape == "two-way":
        # Its stages lie as in a V; that they are two models is what the placement says.
        read = table_of(one["name"], [line.split(",") for line in one["csv"].splitlines()])
        return Table(one["name"], placement, one["micro_batches"], read.cells)
    return table_of(one["name"], [line.split(",") for line in one["csv"].splitlines()])


if __name__ == "__main__":
    main()
