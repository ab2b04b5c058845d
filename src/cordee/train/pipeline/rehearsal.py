"""The ranks of a rehearsal: this program imports torch once, forks a process for each rank, and waits for them.

Each rank builds its stages, runs every schedule, and compares its gradients with those of the whole model.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from cordee.imports import end_uncollected
from cordee.plan.pipeline import ScheduleTable, StagePlacement, table_of
from cordee.train.pipeline.rehearsal_rank import run_rank


def main() -> int:
    """Fork the ranks, and wait for them or for the first that fails."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / "spec.json").read_text())
    running = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(folder, rank, spec)
        running[pid] = rank
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if status:
            # The others would fail too, because it is gone.
            (folder / "failed").write_text(str(rank))
            return 1
    return 0


def _be_rank(folder: Path, rank: int, spec: Mapping[str, object]) -> NoReturn:
    """Run every schedule of the spec, in its order; never return into the code of the parent."""
    code = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["RANK"] = str(rank)
        if spec["pin"]:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        (folder / f"rank{rank}.json").write_text(json.dumps(run_rank(spec, _table_from)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _table_from(one: Mapping[str, Any], ranks: int) -> ScheduleTable:
    placement = StagePlacement(one["shape"], ranks, one["chunks"])
    if placement.shape == "bidirectional":
        # Its stages are placed as in a V; the placement says that they are two models.
        read = table_of(one["name"], [line.split(",") for line in one["csv"].splitlines()])
        return ScheduleTable(one["name"], placement, one["micro_batches"], read.cells)
    return table_of(one["name"], [line.split(",") for line in one["csv"].splitlines()])


if __name__ == "__main__":
    end_uncollected()
    sys.exit(main())
