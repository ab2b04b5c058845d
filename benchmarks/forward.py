"""Start and end forecasts against what then happened, on a trace in the simulator.

python benchmarks/forward.py TRACE [--cluster 80x8] [--sample 60] [--draws 20] [--half] [--json]

The trace is run once through the control plane. Of the jobs that were placed at once, and of those that had to wait, so
many are taken, evenly over the trace; at their submission the state is rebuilt from the log so far, and start and end
are forecast as the service does it: nothing of the future is told, run times are learnt from jobs that ended before.
Then the log goes on and says what became of them. "with arrivals" takes as many submissions to
come as the last days had; "none arrive" takes none; "like others" is the naive answer: the waits (and the times from
submission to end) of the 100 jobs before it that are known. With --half, half of the jobs take 120 s to save and cannot
within their grace of 30 s: decisions rest on when their checkpoints are durable.

Coverage: how many came between p10 and p90 (80 % is right). Error: of p50, absolute, median over jobs.
"""

import argparse
import json
import platform
import statistics
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cordee.control.forecast import Spread, forecast
from cordee.events import AttemptPlaced, Event, JobEnded, JobSubmitted
from cordee.ids import JobId
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.simulate.cluster import cluster
from cordee.simulate.run import Submission, run
from cordee.simulate.traces import open_trace
from cordee.simulate.traces.job import Tally
from cordee.simulate.workload import Costs, submissions
from cordee.units import US_PER_S, format_duration

WAYS = ("with arrivals", "none arrive", "like others")
SEED = 1


@dataclass(frozen=True, slots=True)
class Told:
    """One forecast by one way; `cpu_s` is what it took."""

    way: str
    job_id: JobId
    at_us: int
    start: Spread
    end: Spread
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Truth:
    """What became of a job."""

    submitted_us: int
    start_us: int
    end_us: int


def truths(log: tuple[Event, ...]) -> dict[JobId, Truth]:
    """Of every job: when it was submitted, placed first, and ended."""
    submitted, placed, found = dict[JobId, int](), dict[JobId, int](), dict[JobId, Truth]()
    for event in log:
        if isinstance(event, JobSubmitted):
            submitted[event.job.job_id] = event.at_us
        elif isinstance(event, AttemptPlaced):
            placed.setdefault(event.job_id, event.at_us)
        elif isinstance(event, JobEnded):
            job_id = event.job_id
            found[job_id] = Truth(submitted[job_id], placed[job_id], event.at_us)
    return found


def told(log: tuple[Event, ...], sample: set[JobId], asked: argparse.Namespace) -> Iterator[Told]:
    """The forecasts, as the log is read."""
    state = State()
    submitted: dict[JobId, int] = {}
    waits, lives = deque[int](maxlen=100), deque[int](maxlen=100)
    for event in log:
        apply(state, event)
        if isinstance(event, AttemptPlaced) and event.epoch == 1:
            waits.append(event.at_us - submitted[event.job_id])
        elif isinstance(event, JobEnded):
            lives.append(event.at_us - submitted[event.job_id])
        if not isinstance(event, JobSubmitted):
            continue
        job_id, at_us = event.job.job_id, event.at_us
        submitted[job_id] = at_us
        if job_id not in sample:
            continue
        yield Told(WAYS[2], job_id, at_us, _like(waits, at_us), _like(lives, at_us), 0.0)
        for way in WAYS[:2]:
            began_s = time.process_time()
            snapshot = Snapshot(state)
            comes = way == WAYS[0]
            how = {"seed": SEED, "draws": asked.draws, "grain": asked.grain, "budget_s": None}
            found = forecast(snapshot, at_us, [job_id], arrivals=comes, **how)[job_id]
            yield Told(way, job_id, at_us, found.start, found.end, time.process_time() - began_s)


def half(jobs: Iterable[Submission]) -> Iterator[Submission]:
    """Half of the jobs, by chance of their ids, cannot save within their grace."""
    for each in jobs:
        if zlib.crc32(each.job.job_id.encode()) // 5 % 2:
            yield each
        else:
            yield replace(
                each, job=replace(each.job, save_us=120 * US_PER_S), work=replace(each.work, upload_us=120 * US_PER_S)
            )


def chosen(truth: dict[JobId, Truth], waited: bool, count: int) -> list[JobId]:
    """So many jobs of one sort, evenly over the trace after its first tenth, which nothing could be learnt from."""
    jobs = [job_id for job_id, each in truth.items() if (each.start_us > each.submitted_us) is waited]
    jobs = sorted(jobs, key=lambda job_id: (truth[job_id].submitted_us, job_id))[len(jobs) // 10 :]
    return jobs[:: max(1, len(jobs) // max(1, count))][:count]


def _like(past: deque[int], at_us: int) -> Spread:
    ordered = sorted(past)
    return Spread(*(at_us + ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)))


def figures(answers: list[Told], truth: dict[JobId, Truth], which: str) -> dict[str, Any]:
    """How good these forecasts of `start` or `end` are."""
    inside, errors_s, actual_s, widths_s = 0, [], [], []
    for each in answers:
        spread: Spread = getattr(each, which)
        came_us: int = getattr(truth[each.job_id], f"{which}_us")
        early = spread.p10_us is None or came_us < spread.p10_us
        inside += not early and (spread.p90_us is None or came_us <= spread.p90_us)
        actual_s.append((came_us - each.at_us) / US_PER_S)
        if spread.p50_us is not None:
            errors_s.append(abs(came_us - spread.p50_us) / US_PER_S)
        if spread.p90_us is not None and spread.p10_us is not None:
            widths_s.append((spread.p90_us - spread.p10_us) / US_PER_S)
    return {
        "jobs": len(answers),
        "coverage": round(inside / len(answers), 3) if answers else None,
        "error_s_median": round(statistics.median(errors_s), 1) if errors_s else None,
        "actual_s_median": round(statistics.median(actual_s), 1) if actual_s else None,
        "width_s_median": round(statistics.median(widths_s), 1) if widths_s else None,
        "without_p50": len(answers) - len(errors_s),
        "cpu_s_median": round(statistics.median(each.cpu_s for each in answers), 3) if answers else None,
        "cpu_s_max": round(max(each.cpu_s for each in answers), 3) if answers else None,
    }


def main() -> None:
    """Run, forecast, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--cluster", default="80x8")
    parser.add_argument("--limit", type=int, help="jobs of the trace")
    parser.add_argument("--sample", type=int, default=60, help="jobs of each sort that are forecast")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--grain", type=float, default=0.02)
    parser.add_argument("--half", action="store_true", help="half of the jobs cannot save within their grace")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    began_s = time.process_time()
    tally = Tally(str(asked.trace))
    nodes = cluster(asked.cluster)
    jobs = submissions(open_trace(asked.trace).jobs(tally), nodes, tally, costs=Costs(), limit=asked.limit)
    log = run(nodes, half(jobs) if asked.half else jobs, defer_reports=True).log
    truth, ran_s = truths(log), time.process_time() - began_s
    samples = {name: set(chosen(truth, name == "waited", asked.sample)) for name in ("placed at once", "waited")}
    answers = list(told(log, set().union(*samples.values()), asked))
    rows = []
    for name, which in (("waited", "start"), ("waited", "end"), ("placed at once", "start"), ("placed at once", "end")):
        for way in WAYS:
            kept = [each for each in answers if each.way == way and each.job_id in samples[name]]
            rows.append({"jobs_that": name, "of": which, "way": way, **figures(kept, truth, which)})
    waited = sum(each.start_us > each.submitted_us for each in truth.values())
    result = {
        "trace": asked.trace.name,
        "cluster": asked.cluster,
        "draws": asked.draws,
        "grain": asked.grain,
        "half": asked.half,
        "jobs_run": len(truth),
        "jobs_waited": waited,
        "run_cpu_s": round(ran_s, 1),
        "python": platform.python_version(),
        "rows": rows,
    }
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{asked.trace.name} on {asked.cluster}: {len(truth)} jobs, {waited} of which waited; {asked.draws} draws")
    print("| jobs | of | forecast | n | in p10..p90 | p10..p90 | error of p50 | came after | CPU s median, max |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = [
            "-" if row[key] is None else format_duration(row[key])
            for key in ("width_s_median", "error_s_median", "actual_s_median")
        ]
        share = "-" if row["coverage"] is None else f"{row['coverage']:.0%}"
        cells = [row["jobs_that"], row["of"], row["way"], str(row["jobs"]), share, *times]
        print("| " + " | ".join(cells) + f" | {row['cpu_s_median']}, {row['cpu_s_max']} |")


if __name__ == "__main__":
    main()
