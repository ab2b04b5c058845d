"""Two versions of the code against each other: simulations and scheduling cycles, in alternating pairs.

python benchmarks/pairs.py BEFORE AFTER TRACES_FOLDER [--only crowded,trace,cycle] [--pairs 7] [--opcodes] [--json]

BEFORE and AFTER are checkouts. Each run is a process of its own, and the order changes from pair to pair. Times are
CPU seconds, user and system, of the work without imports. With --opcodes the executed bytecodes of one run are counted,
by which two versions can be told apart on a busy machine; they do not show what happens inside C.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

WORLDS = 12


def crowded(traces: Path, worlds: int) -> dict[str, float]:
    """Simulate crowded worlds: 40 jobs on 6 nodes, with reclaims."""
    from crowded_world import crowded as world

    world(0)
    return measured(lambda: [world(seed) for seed in range(1, 1 + worlds)])


def trace(traces: Path, worlds: int) -> dict[str, float]:
    """Run `cordee simulate` for the first 2,500 jobs of a trace on 80 nodes of 8 GPUs, under four policies."""
    from cordee.cli.main import main as cordee

    os.environ["COLUMNS"] = "200"
    given = ["simulate", str(traces / "philly_oct_10k.csv.gz"), "--cluster", "80x8"]

    def simulate(jobs: int) -> None:
        sys.argv = ["cordee", *given, "--policy", "2d-las,easy,srsf,no-notice", "--jobs", str(jobs)]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            cordee()

    simulate(10)  # The command imports what it needs when it runs.
    return measured(lambda: simulate(2500))


def cycle(traces: Path, worlds: int) -> dict[str, float]:
    """Schedule on 400 nodes, in the mix of `scheduler_cycle.py`."""
    from scheduler_cycle import measure

    found: dict[str, Any] = {}
    figures = measured(lambda: found.update(measure(400, 50, 1500)))
    return figures | {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"]}


WORK = {"crowded": crowded, "trace": trace, "cycle": cycle}


def measured(action: Callable[[], object]) -> dict[str, float]:
    """Return the CPU seconds of an action."""
    began_s = cpu_s()
    action()
    return {"cpu_s": cpu_s() - began_s}


def cpu_s() -> float:
    """Return the CPU seconds that this process and its children have used."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


def counted(action: Callable[[], object]) -> int:
    """Return the number of bytecodes that an action executes."""
    count = 0

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def called(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    sys.settrace(called)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def run(checkout: Path, given: argparse.Namespace, work: str, *, opcodes: bool = False) -> dict[str, float]:
    """Return the figures of one run, in a process of its own, with the code of a checkout."""
    folders = [checkout / name for name in ("src", "tests", "tests/simulate", "benchmarks")]
    command = [sys.executable, str(Path(__file__).resolve()), ".", ".", str(given.traces), "--child", work]
    done = subprocess.run(
        [*command, *(["--opcodes"] if opcodes else [])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compared(given: argparse.Namespace, work: str) -> list[dict[str, Any]]:
    """Return a row for each figure of one kind of work."""
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(given.pairs):
        order = (given.before, given.after) if number % 2 == 0 else (given.after, given.before)
        found = {checkout: run(checkout, given, work) for checkout in order}
        pairs.append((found[given.before], found[given.after]))
        print(work, number + 1, *pairs[-1], file=sys.stderr, flush=True)
    rows = []
    for figure in pairs[0][0]:
        ratios = sorted(after[figure] / before[figure] for before, after in pairs)
        sides = [statistics.median(pair[side][figure] for pair in pairs) for side in (0, 1)]
        rows.append(row(work, figure, *sides, statistics.median(ratios), (ratios[0], ratios[-1])))
    if given.opcodes and work == "crowded":
        counts = [run(checkout, given, work, opcodes=True)["opcodes"] for checkout in (given.before, given.after)]
        rows.append(row(work, "opcodes", *counts, counts[1] / counts[0], None))
    return rows


def row(
    work: str, figure: str, before: float, after: float, ratio: float, spread: tuple[float, float] | None
) -> dict[str, Any]:
    """Return the medians of both sides, the median of the pairs' ratios, and the smallest and largest ratio."""
    return {"work": work, "figure": figure, "before": before, "after": after, "ratio": ratio, "spread": spread}


def main() -> None:
    """Run the pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("before", "after", "traces"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", default=",".join(WORK))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--opcodes", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.before, given.after, given.traces = (each.resolve() for each in (given.before, given.after, given.traces))
    if given.child:
        del sys.path[0]  # The folder of this file holds the benchmarks of one version only.
        action = WORK[given.child]
        figures = {"opcodes": counted(lambda: action(given.traces, 2))} if given.opcodes else None
        print(json.dumps(figures or action(given.traces, WORLDS)))
        return
    rows = [each for work in given.only.split(",") for each in compared(given, work)]
    if given.json:
        print(json.dumps({"python": platform.python_version(), "pairs": given.pairs, "rows": rows}, indent=1))
        return
    print("| work | figure | before | after | after / before | smallest to largest |")
    print("|---|---|---|---|---|---|")
    for each in rows:
        spread = "" if each["spread"] is None else "{:.3f} to {:.3f}".format(*each["spread"])
        numbers = f"{each['before']:,.2f} | {each['after']:,.2f} | {each['ratio']:.3f}"
        print(f"| {each['work']} | {each['figure']} | {numbers} | {spread} |")


if __name__ == "__main__":
    main()
