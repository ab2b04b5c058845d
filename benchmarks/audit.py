"""What a record of the audit log costs: a commit and a submission with one and without, in turns in one run.

    python benchmarks/audit.py [--rounds 600] [--database postgresql://...] [--json]

A commit is one event, as a tick writes it. A submission is `POST /v1/jobs` of a job that waits, over loopback. The
records are left out by an act that asks for none, all else is the same.
"""

import argparse
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "control"))

from api_scene import Api
from stage import Scene

from cordee.control.acts import Act, carried_out
from cordee.control.store import sql
from cordee.control.store.sql import SqlStore
from cordee.events import ServerUp


def commits(url: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and CPU seconds of commits of one event: by the server itself, and for somebody."""
    store, found = SqlStore(url), {"without": list[tuple[float, float]](), "with": list[tuple[float, float]]()}
    for at in range(rounds):
        for name, act in (("without", None), ("with", Act(at, who="ada", named="POST /x", address="10.0.0.1"))):
            from_s, from_cpu_s = time.perf_counter(), time.process_time()
            with carried_out(act):
                store.commit([ServerUp(at_us=at)])
            found[name].append((time.perf_counter() - from_s, time.process_time() - from_cpu_s))
    store.close()
    return found


def submissions(folder: Path, url: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and CPU seconds, of client and server together, of submissions."""
    api = Api(folder, scene=Scene(folder, url))
    found = {"without": list[tuple[float, float]](), "with": list[tuple[float, float]]()}
    spec = {"run": ["true"], "gpus": 4, "name": "gpt"}
    for _ in range(rounds):
        for name, times in found.items():
            from_s, from_cpu_s = time.perf_counter(), time.process_time()
            if name == "with":
                api.client.submit(spec, unprotected=True)
            else:
                with patch.object(sql, "append", lambda *_: None):
                    api.client.submit(spec, unprotected=True)
            times.append((time.perf_counter() - from_s, time.process_time() - from_cpu_s))
    api.close()
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--database", help="of PostgreSQL, empty; default: a file of SQLite")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {
            "commit of one event": commits(given.database or f"sqlite:///{folder}/commits.db", given.rounds),
            "submission over HTTP": submissions(folder, given.database or f"sqlite:///{folder}/jobs.db", given.rounds),
        }
    table = {
        what: {
            f"{name}_{unit}": round(1e6 * median(each[at] for each in times))
            for name, times in found.items()
            for at, unit in ((0, "us"), (1, "cpu_us"))
        }
        for what, found in rows.items()
    }
    if given.json:
        print(json.dumps({"host": socket.gethostname(), "rounds": given.rounds, "medians": table}, indent=1))
        return
    for what, row in table.items():
        for unit in ("us", "cpu_us"):
            without, with_one = row[f"without_{unit}"], row[f"with_{unit}"]
            print(f"{what:22} {unit:7} without {without:7,}  with {with_one:7,}  {with_one / without - 1:+.1%}")


if __name__ == "__main__":
    main()
