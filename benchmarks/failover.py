"""Two servers over one PostgreSQL: how long a change of leaders takes, and how many commits a second a database makes.

Fail-over: two real servers, their agents and ranks. Each round kills (SIGKILL) or freezes (SIGSTOP) the leader around
the start of a job, and submits another job to whichever server leads. `leads` is the time from there to the new
leader's ServerUp, `decides` to its placement of that job. In the end each job has run once, the log has no gap, and the
gang that ran through all rounds was never restarted; otherwise the script fails.

Commits: one tick's work (two reports of one stream, then a decision of three events), as two transactions and as one.

python benchmarks/failover.py [--rounds 20] [--commits 300] [--json]
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "control")]

from pair import Pair

from cordee.control.store.leader import Lead
from cordee.control.store.sql import SqlStore
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    Lease,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId
from postgres import Postgres

Figures = dict[str, float]


def change_leaders(postgres: Postgres, rounds: int) -> dict[str, Figures]:
    """Return the times of rounds that kill and freeze in turn."""
    draw = random.Random(1953)
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), postgres.database())
        try:
            for number in range(rounds):
                done = pair.play("freeze" if number % 2 else "kill", draw)
                print(f"{done.how}: leads {done.leads_s:.3f} s, decides {done.decides_s:.3f} s", file=sys.stderr)
            pair.end()
        finally:
            pair.close()
    found = {}
    for how in ("kill", "freeze"):
        for what in ("leads_s", "decides_s"):
            times = sorted(getattr(each, what) for each in pair.rounds if each.how == how)
            if times:
                found[f"{how}, {what}"] = {"n": len(times), "p50": statistics.median(times), "max": times[-1]}
    return found


def _life(number: int) -> tuple[Sequence[Event], Sequence[Event]]:
    """Return the reports and the decision of one tick, in the life of a job."""
    job_id, epoch = JobId("gpt-abcdef"), number + 1
    reports = [
        RanksStarted(at_us=number, job_id=job_id, epoch=epoch, node="local"),
        RanksEnded(at_us=number, job_id=job_id, epoch=epoch, node="local", outcome=Outcome.CHECKPOINTED),
    ]
    decision = [
        AttemptEnded(at_us=number, job_id=job_id, epoch=epoch, outcome=Outcome.CHECKPOINTED, why="it was preempted"),
        JobEnded(at_us=number, job_id=job_id, state="done", why=""),
        AttemptPlaced(at_us=number, job_id=job_id, epoch=epoch + 1, leases=(Lease(node="local", gpus=(0, 1, 2, 3)),)),
    ]
    return reports, decision


def commits(store: SqlStore, count: int, *, together: bool) -> Figures:
    """Return what a tick's transactions take."""
    job = Job(job_id=JobId("gpt-abcdef"), name="gpt", owner="ada", gpus=4)
    store.commit([JobSubmitted(at_us=0, job=job, spec="{}"), _life(-1)[1][2]])
    times, cpu_s = [], time.process_time()
    for number in range(count):
        reports, decision = _life(number)
        marks = [("node/local/1", number + 1)]
        began_s = time.perf_counter()
        if together:
            store.commit([*reports, *decision], seen=marks)
        else:
            store.commit(reports, seen=marks)
            store.commit(decision)
        times.append(time.perf_counter() - began_s)
    each = 1 if together else 2
    return {
        "ticks_per_s": count / sum(times),
        "commits_per_s": each * count / sum(times),
        "p50_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * sorted(times)[int(0.99 * count)],
        "cpu_ms": 1e3 * (time.process_time() - cpu_s) / count,
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commits", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, dict[str, Figures]] = {"commits": {}, "failover": {}}
    durable = Postgres(Path(tempfile.mkdtemp(prefix="cordee-postgres-")), settings=())
    try:
        for together in (False, True) if args.commits else ():
            name = "one transaction" if together else "two transactions"
            with tempfile.TemporaryDirectory() as folder:
                store = SqlStore(f"sqlite:///{folder}/cordee.db")
                found["commits"][f"SQLite, {name}"] = commits(store, args.commits, together=together)
                store.close()
            database = durable.database()
            SqlStore(database).close()
            lead = Lead(database, url="http://127.0.0.1")
            assert lead.wait(5)
            store = SqlStore(database, lead=lead)
            found["commits"][f"PostgreSQL, {name}"] = commits(store, args.commits, together=together)
            store.close()
            lead.close()
        if args.rounds:
            found["failover"] = change_leaders(durable, args.rounds)
    finally:
        durable.close()
    if args.json:
        print(json.dumps(found | {"load": os.getloadavg()[0]}))
        return
    for kind, rows in found.items():
        for name, figures in rows.items():
            print(f"{kind:10} {name:32}", "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
