"""The intervals of memory beside published peaks: `memory_intervals.py CSV... [--json]`.

The files are those of `planner_accuracy.py`. For each kind of plan: the fifth and ninety-fifth percentile of
(measured - planned) / planned, and the part of the runs that lie within `plan/memory_interval.py`'s interval. Planned
is what the search plans, without a replay.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from adapters import score
from cordee.plan.memory import rank_memory
from cordee.plan.memory_interval import RESIDUALS
from planner_accuracy import ADAPTERS, read_all, seen
from published import memory_bytes

# Sources that ran a kind's own framework; ms-swift and nanotron only resemble one.
KINDS = {
    "torchtitan benchmarks": "torch",
    "SimuMax B200 v1.2 real runs": "megatron",
    "Zero Bubble PP Table 4": "megatron",
    "BigScience BLOOM prequel layout search": "deepspeed",
    "InternEvo memory table": "internevo",
    "LitGPT resource tables": "adapters",
    "torchtune README tables": "adapters",
}


def residuals(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Return (measured - planned) / planned of all runs: of reserved peaks, with adapters of allocated ones."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in read_all(paths)[0]:
        if run.source not in KINDS or run.trust > 2 or ADAPTERS.search(run.note):
            continue
        memory = rank_memory(run.shape, run.layout, run.training)
        for metric, value in run.metrics.items():
            kind, planned = seen(run, memory, metric) or ("", 0.0)
            if kind.startswith(("reserved", "nvidia-smi")):
                found[KINDS[run.source]].append(memory_bytes(metric, value) / planned - 1)
    for row in score(paths):
        if row.error is not None and row.source in KINDS:
            found[KINDS[row.source]].append(1 / (1 + row.error) - 1)
    return found


def report(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return the percentiles of each kind, and how many of its runs lie within its interval and above it."""
    told = {}
    for kind, values in found.items():
        ends, known = quantiles(values, n=20, method="inclusive"), RESIDUALS[kind]  # type: ignore[index]
        within = sum(known.low <= each <= known.high for each in values)
        told[kind] = {
            "n": len(values), "low": ends[0], "high": ends[-1], "known_low": known.low, "known_high": known.high,
            "covered": within / len(values), "above": sum(each > known.high for each in values),
        }  # fmt: skip
    return told


def main() -> None:
    """Read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    told = report(residuals(given.csv))
    if given.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{'kind':12}{'runs':>5}{'5 %':>9}{'95 %':>9}   {'in the plan':16}{'covered':>8}{'above':>6}")
    for kind, row in told.items():
        known = f"{row['known_low']:+.1%} {row['known_high']:+.1%}"
        found = f"{row['n']:5}{row['low']:+9.1%}{row['high']:+9.1%}"
        print(f"{kind:12}{found}   {known:16}{row['covered']:8.0%}{row['above']:6}")


if __name__ == "__main__":
    main()
