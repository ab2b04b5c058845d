"""What a decision waits for the interpreter's lock: a thread commits twice while others compute.

    python benchmarks/turns.py [--seconds 3] [--json]

The tick releases the lock with each statement, and gets it back after a turn of each thread that wants it too.
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
from pathlib import Path

THREADS = (0, 8, 40)
TURNS_S = (0.005, 0.001)
COMMITS, ROWS = 2, 3


def _compute(ends: threading.Event) -> None:
    while not ends.is_set():
        json.loads(json.dumps(list(range(100))))


def turn_ms(threads: int, turn_s: float, seconds: float) -> list[float]:
    """Return the times of commits beside so many threads, of which each holds the lock for `turn_s` at most."""
    ends, found = threading.Event(), list[float]()
    sys.setswitchinterval(turn_s)
    others = [threading.Thread(target=_compute, args=(ends,), daemon=True) for _ in range(threads)]
    for each in others:
        each.start()
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(Path(folder) / "turns.db", isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE rows (number INTEGER)")
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s or not found:
            from_s = time.perf_counter()
            for _ in range(COMMITS):
                database.execute("BEGIN IMMEDIATE")
                for number in range(ROWS):
                    database.execute("INSERT INTO rows VALUES (?)", (number,))
                database.execute("COMMIT")
            found.append(1e3 * (time.perf_counter() - from_s))
        database.close()
    ends.set()
    for each in others:
        each.join()
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for threads, turn_s in itertools.product(THREADS, TURNS_S):
        found = turn_ms(threads, turn_s, given.seconds)
        p50, most = round(statistics.median(found), 1), round(max(found), 1)
        rows.append({"threads": threads, "turn_ms": 1e3 * turn_s, "n": len(found), "p50_ms": p50, "max_ms": most})
    for row in rows:
        print(json.dumps(row) if given.json else "  ".join(f"{name} {value:g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
