"""How long a person waits at the front door: import, help, a plan, and from submission to the first rank.

Peers in the same run: a bare interpreter (the floor of every Python tool), a bare process start, and torchrun on the
same script.

    python benchmarks/front_door.py [--runs 7] [--json]
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cordee.client import Client

CORDEE = [sys.executable, "-m", "cordee"]
RANK = "import time, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(time.time_ns()))"


def cpu_and_wall_s(command: list[str], env: dict[str, str] | None = None) -> tuple[float, float]:
    """CPU seconds of the finished process tree, and wall seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(env or {})})
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def run(command: list[str]) -> None:
    """Run it to its end, quietly."""
    subprocess.run(command, check=True, capture_output=True)


def start_s(start: Callable[[Path], None], folder: Path) -> float:
    """Seconds from the call of `start` to the first line of the rank's program."""
    stamp = folder / f"{time.time_ns()}"
    before_ns = time.time_ns()
    start(stamp)
    deadline_s = time.monotonic() + 60
    while not (stamp.exists() and stamp.read_text()):
        assert time.monotonic() < deadline_s, "the rank did not start within a minute"
        time.sleep(0.002)
    return (int(stamp.read_text()) - before_ns) / 1e9


def starts(runs: int) -> dict[str, list[float]]:
    """Seconds to the first line of a rank: bare process, Cordee on an idle machine, torchrun."""
    out: dict[str, list[float]] = {"bare process": [], "cordee submit": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder, home = Path(scratch), Path(scratch) / "home"
        env = {**os.environ, "CORDEE_HOME": str(home)}
        subprocess.run([*CORDEE, "up", "--slots", "2"], check=True, capture_output=True, env=env)
        script = folder / "rank.py"
        script.write_text(RANK)
        try:
            client = Client(home=home)

            def submit(stamp: Path) -> None:
                client.submit({"run": [sys.executable, str(script), str(stamp)], "gpus": "1"})

            for _ in range(runs):
                out["bare process"].append(
                    start_s(lambda stamp: run([sys.executable, str(script), str(stamp)]), folder)
                )
                out["cordee submit"].append(start_s(submit, folder))
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
            for _ in range(min(runs, 3)):
                out["torchrun"].append(start_s(lambda stamp: run([*torchrun, str(script), str(stamp)]), folder))
        finally:
            subprocess.run([*CORDEE, "down"], check=False, capture_output=True, env=env)
    return out


def main() -> None:
    """Measure, print a table, and with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import cordee": [sys.executable, "-c", "import cordee"],
        "cordee --help": [*CORDEE, "--help"],
        "cordee plan": [*CORDEE, "plan", "llama-3-70b", "--gpus", "64xH100"],
    }
    rows: dict[str, dict[str, float]] = {}
    for name, command in commands.items():
        measured = [cpu_and_wall_s(command) for _ in range(args.runs + 1)][1:]
        for what, values in zip(("cpu_s", "wall_s"), zip(*measured, strict=True), strict=True):
            spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            rows[f"{name}, {what}"] = spread
    for name, values_s in starts(args.runs).items():
        spread = {"min": min(values_s), "median": statistics.median(values_s), "max": max(values_s)}
        rows[f"to the first line of a rank: {name}, wall_s"] = spread
    if args.json:
        print(json.dumps({"python": platform.python_version(), "runs": args.runs, "rows": rows}))
        return
    print(f"{'':52}{'min':>8}{'median':>8}{'max':>8}   (seconds)")
    for name, row in rows.items():
        print(f"{name:52}{row['min']:8.3f}{row['median']:8.3f}{row['max']:8.3f}")


if __name__ == "__main__":
    main()
