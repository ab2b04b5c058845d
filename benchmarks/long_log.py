"""Start-up by the length of the log, with and without a snapshot; size of snapshot and segments; the longest commit.

    python benchmarks/long_log.py [--json] [EVENTS ...]

The log is that of 64 nodes of 8 GPUs, on each of which one job follows the other, with 24 events a job.
"""

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from cordee.control.fold import Fold
from cordee.control.snapshots import newest_fold
from cordee.control.store.sql import SqlStore
from cordee.event_json import encode
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    Lease,
    Measured,
    Node,
    NodeUp,
    Outcome,
    RanksEnded,
    RanksStarted,
    Reported,
    Restored,
    ServerUp,
    SpanClass,
)
from cordee.ids import JobId
from cordee.schedule import Policy

S = 1_000_000
NODES, GPUS = 64, 8
SPEC = json.dumps({"name": "train", "run": "torchrun train.py --config large", "resources": {"gpus": GPUS}})


def log() -> Iterator[Event]:
    """Yield events without end."""
    yield ServerUp(at_us=0)
    for number in range(NODES):
        node = Node(name=f"n{number}", epoch=1, gpu_name="H100", gpus=GPUS, micro_usd_per_gpu_hour=3_000_000)
        yield NodeUp(at_us=1, node=node)
    round_us = 0
    while True:
        lives = [_life(round_us // S * NODES + number, number, round_us) for number in range(NODES)]
        yield from sorted((event for life in lives for event in life), key=lambda event: event.at_us)
        round_us += 4000 * S


def _life(serial: int, number: int, from_us: int) -> Iterator[Event]:
    at_us, node = from_us + number, f"n{number}"
    ids = {"job_id": JobId(f"train-{serial:08x}"), "epoch": 1}
    job = Job(job_id=ids["job_id"], name="train", owner=f"user{serial % 20}", gpus=GPUS, protected=True)
    yield JobSubmitted(at_us=at_us + 2, job=job, spec=SPEC)
    lease = Lease(node=node, gpus=tuple(range(GPUS)))
    yield AttemptPlaced(at_us=at_us + S, leases=(lease,), **ids)
    yield RanksStarted(at_us=at_us + 2 * S, node=node, launch="one process per GPU", **ids)
    yield Restored(at_us=at_us + 20 * S, step=0, generation=None, **ids)
    for span in range(12):
        begin_us = at_us + (30 + 300 * span) * S
        spans = {"span": SpanClass.USEFUL, "from_us": begin_us, "first_step": span * 300, "steps": 300}
        yield Reported(at_us=begin_us + 300 * S, tokens=10**6, loss=2.5, **spans, **ids)
        if span % 3 == 2:
            sizes = {"size_bytes": 10**9, "stall_us": S, "upload_us": 2 * S}
            yield CheckpointCommitted(at_us=begin_us + 301 * S, step=300 * (span + 1), generation=span, **sizes, **ids)
    yield Measured(at_us=at_us + 3640 * S, rank=0, step=3600, peak_bytes=6 * 10**10, step_us=S, mfu=0.4, **ids)
    yield RanksEnded(at_us=at_us + 3650 * S, node=node, outcome=Outcome.FINISHED, **ids)
    yield AttemptEnded(at_us=at_us + 3651 * S, outcome=Outcome.FINISHED, why="", **ids)
    yield JobEnded(at_us=at_us + 3652 * S, job_id=ids["job_id"], state="done", why="finished")


def write(path: Path, count: int) -> None:
    """Write a database with a log of this many events."""
    SqlStore(f"sqlite:///{path}").close()
    connection = sqlite3.connect(path)

    def rows() -> Iterator[tuple[object, ...]]:
        for number, event in enumerate(islice(log(), count), start=1):
            body = encode(event)
            job_id = event.job.job_id if isinstance(event, JobSubmitted) else getattr(event, "job_id", None)
            yield number, event.at_us, body["kind"], job_id, json.dumps(body)

    connection.executemany("insert into log values (?, ?, ?, ?, ?)", rows())
    connection.commit()
    connection.close()


def timed(action: Callable[[], Fold]) -> tuple[float, Fold]:
    """Return the seconds of an action, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def started(url: str) -> Fold:
    """Return the fold as a server that starts makes it."""
    store = SqlStore(url)
    fold = newest_fold(store, Policy())
    fold.apply(store.events(fold.number))
    store.close()
    return fold


def size(path: Path) -> int:
    """Return the bytes of the database without free pages."""
    copy = path.with_suffix(".copy")
    copy.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("vacuum into ?", (str(copy),))
    connection.close()
    return copy.stat().st_size


class Commits(threading.Thread):
    """Commits beside the process that makes a snapshot, ten a second; `longest` of them in seconds."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._store, self._last = SqlStore(url), threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._last.wait(0.1):
            began = time.perf_counter()
            self._store.commit([ServerUp(at_us=10**15)])
            self.seconds.append(time.perf_counter() - began)

    def end(self) -> list[float]:
        """Stop, and return the seconds of each commit, ascending."""
        self._last.set()
        self.join()
        self._store.close()
        return sorted(self.seconds)


def measure(count: int, folder: Path, tail: int) -> dict[str, object]:
    """Measure one length of log; the snapshot is `tail` events behind its end."""
    path = folder / f"{count}.db"
    url = f"sqlite:///{path}"
    write(path, count)
    raw = size(path)
    full_s, whole = timed(lambda: started(url))
    ended = whole.ended_jobs()
    through = max(0, count - tail)
    before = Fold(Policy())
    before.apply(islice(enumerate(log(), start=1), through))
    retired = before.ended_jobs()
    jobs = len(whole.state.jobs)
    commits = Commits(url)
    commits.start()
    began = time.perf_counter()
    task = json.dumps({"database": url, "through": through, "retire": retired})
    done = subprocess.run(
        [sys.executable, "-m", "cordee.control.snapshots"], input=task, capture_output=True, text=True, check=True
    )
    made_s = time.perf_counter() - began
    seconds = commits.end()
    quick_s, again = timed(lambda: started(url))
    whole.retire(retired)
    assert again.state.snapshot()["jobs"].keys() == whole.state.snapshot()["jobs"].keys()
    connection = sqlite3.connect(path)
    sums = "coalesce(sum(last - first + 1), 0), sum(length(body))"
    kept, body = connection.execute(f"select {sums} from segments").fetchone()
    text = connection.execute("select sum(length(body)) from log").fetchone()[0]
    connection.close()
    return {
        "events": count,
        "jobs": jobs,
        "ended": len(ended),
        "replay_s": round(full_s, 2),
        "start_s": round(quick_s, 2),
        "tail": tail,
        "made": json.loads(done.stdout.splitlines()[-1]),
        "made_s": round(made_s, 1),
        "longest_commit_ms": round(seconds[-1] * 1e3, 1),
        "median_commit_ms": round(seconds[len(seconds) // 2] * 1e3, 1),
        "commits": len(seconds),
        "database_bytes": raw,
        "with_segments_bytes": size(path),
        "events_in_segments": kept,
        "segment_bytes": body,
        "log_text_bytes": text,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--tail", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp())
    try:
        for count in args.events:
            found = measure(count, folder, min(args.tail, count // 2))
            print(json.dumps(found) if args.json else "  ".join(f"{key} {value}" for key, value in found.items()))
            sys.stdout.flush()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
