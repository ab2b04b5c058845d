"""What a decision waits for the interpreter's lock: a thread commits twice while others compute.

    python benchmarks/turns.py [--seconds 3] [--json]

The tick releases the lock with each statement, and gets it back after a turn of each thread that wants it too. With
*gives way* the others wait while it commits: each at its next place to do so, which it reaches after `--stretch` ms.
"""

import argparse
import itertools
import json
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from cordee.control.precedence import Precedence

THREADS = (0, 8, 40)
TURNS_S = (0.005, 0.001)
COMMITS, ROWS = 2, 3
PAUSE_S = 0.02


def _compute(ends: threading.Event, precedence: Precedence | None, stretch_s: float) -> None:
    while not ends.is_set():
        until_s = time.thread_time() + stretch_s
        while time.thread_time() < until_s:
            json.loads(json.dumps(list(range(100))))
        if precedence is not None:
            precedence.give_way()


def turn_ms(
    threads: int, turn_s: float, seconds: float, precedence: Precedence | None = None, stretch_s: float = 0.002
) -> list[float]:
    """Return the times of commits beside so many threads, of which each holds the lock for `turn_s` at most."""
    ends, found = threading.Event(), list[float]()
    sys.setswitchinterval(turn_s)
    given = (ends, precedence, stretch_s)
    others = [threading.Thread(target=_compute, args=given, daemon=True) for _ in range(threads)]
    for each in others:
        each.start()
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(Path(folder) / "turns.db", isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE rows (number INTEGER)")
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s or not found:
            from_s = time.perf_counter()
            with precedence or nullcontext():
                for _ in range(COMMITS):
                    database.execute("BEGIN IMMEDIATE")
                    for number in range(ROWS):
                        database.execute("INSERT INTO rows VALUES (?)", (number,))
                    database.execute("COMMIT")
            found.append(1e3 * (time.perf_counter() - from_s))
            time.sleep(PAUSE_S)
        database.close()
    ends.set()
    for each in others:
        each.join()
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--stretch", type=float, default=2.0, help="ms that a thread computes before it gives way")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for threads, turn_s, gives_way in itertools.product(THREADS, TURNS_S, (False, True)):
        precedence = Precedence() if gives_way else None
        found = turn_ms(threads, turn_s, given.seconds, precedence, given.stretch / 1e3)
        p50, most = round(statistics.median(found), 1), round(max(found), 1)
        case = {"threads": threads, "turn_ms": 1e3 * turn_s, "gives_way": gives_way}
        rows.append({**case, "n": len(found), "p50_ms": p50, "max_ms": most})
    for row in rows:
        print(json.dumps(row) if given.json else "  ".join(f"{name} {value:g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
