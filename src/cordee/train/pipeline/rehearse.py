"""Rehearse pipeline schedules on ranks of this machine (gloo), with timed waits or real products for passes.

This module starts the ranks and reads their results; it imports no torch. The ranks are `rehearsal.py`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cordee.errors import ScriptError
from cordee.plan.pipeline import ScheduleTable, StagePlacement, table_csv
from cordee.telemetry.host import free_port

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class StageModel:
    """A stage of the model that is rehearsed.

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
class RehearsalResult:
    """The outcome of one schedule: its error against the whole model, and the passes by step and rank.

    A pass is (stage, kind, micro-batch, start, end) in seconds of one clock.
    """

    name: str
    gradient_error: float
    loss_error: float
    steps: tuple[tuple[tuple[tuple[int, str, int, float, float], ...], ...], ...]


def rehearse(
    tables: Sequence[ScheduleTable],
    *,
    ranks: int,
    torch_names: Sequence[tuple[str, StagePlacement, int]] = (),
    stage_model: StageModel = StageModel(),
    steps: int = 1,
    pin: bool = False,
) -> tuple[RehearsalResult, ...]:
    """Run tables, then schedules of torch's own by (name, placement, micro-batches), on `ranks` new ranks.

    Raises:
        ScriptError: a rank failed; the message has the end of what it wrote.
    """
    spec = {
        "tables": [{"name": table.name, "shape": table.placement.shape, "chunks": table.placement.chunks,
                    "micro_batches": table.micro_batches, "csv": table_csv(table)} for table in tables],
        "torch": [{"name": name, "shape": place.shape, "chunks": place.chunks, "micro_batches": count}
                  for name, place, count in torch_names],
        "stage_model": asdict(stage_model), "steps": steps, "pin": pin,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cordee-pipeline-") as folder:
        path = Path(folder)
        (path / "spec.json").write_text(json.dumps(spec))
        _start_and_wait(path, ranks)
        reports = [json.loads((path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return tuple(_joined([rank[index] for rank in reports]) for index in range(len(reports[0])))


def _start_and_wait(folder: Path, ranks: int) -> None:
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RES_OPTIONS": "timeout:1 attempts:1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = [sys.executable, "-m", "cordee.train.pipeline.rehearsal", str(folder), str(ranks)]
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ScriptError(
            f"the rehearsal did not end within {TIMEOUT_S:.0f} s: {_end_of(folder / 'rank0.log')}"
        ) from None
    finally:
        with suppress(ProcessLookupError):  # the ranks are of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        failed = folder / "failed"
        if not failed.exists():
            raise ScriptError(f"the rehearsal did not start: {_end_of(folder / 'start.log')}")
        rank = failed.read_text()
        raise ScriptError(f"rank {rank} of the rehearsal failed: {_end_of(folder / f'rank{rank}.log')}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return " | ".join(lines[-3:]) or "it wrote nothing"


def _joined(ranks: Sequence[Mapping[str, Any]]) -> RehearsalResult:
    """Join the records of all ranks of one schedule."""
    steps = tuple(
        tuple(
            tuple((int(one[0]), str(one[1]), int(one[2]), float(one[3]), float(one[4])) for one in row) for row in rows
        )
        for rows in zip(*(rank["steps"] for rank in ranks), strict=True)
    )
    errors = [max(float(rank[name]) for rank in ranks) for name in ("gradient_error", "loss_error")]
    return RehearsalResult(str(ranks[0]["name"]), errors[0], errors[1], steps)
