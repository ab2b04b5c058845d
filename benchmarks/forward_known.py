"""Runs forward with all run times and arrivals known, against what then happened: what `forward` itself gets wrong.

python benchmarks/forward_known.py [--seeds 4] [--json]

Crowded worlds by chance, 300 jobs on 8 nodes of 8 GPUs, through the control plane; where "half", half of the jobs take
120 s to save and cannot within their grace of 30 s. At six moments of each the state is rebuilt from the log and run
forward; for the jobs that wait then, the start that it says is compared with the one that came.
"""

import argparse
import json
import statistics
import time
from itertools import islice
from typing import Any

from cordee.events import AttemptPlaced, CheckpointCommitted, Event
from cordee.ids import JobId
from cordee.schedule.forecast.forward import Arrival, Draw, forward
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.simulate.cluster import cluster
from cordee.simulate.run import Submission, run
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces.job import Tally
from cordee.simulate.workload import Costs, submissions
from cordee.units import US_PER_S
from forward import half

WORLDS = (
    {"load": 1.0, "tiers": (0, 100, 0), "median_s": 5400.0},
    {"load": 1.0, "tiers": (15, 60, 25), "median_s": 5400.0},
    {"load": 1.3, "tiers": (0, 100, 0), "median_s": 3600.0},
)
SIZES = ((1, 50), (2, 15), (4, 15), (8, 15), (16, 5))
MOMENTS = 6
FAR_US = 10**15


def drawn(seed: int, load: float, tiers: tuple[int, int, int], median_s: float, *, halved: bool) -> list[Submission]:
    """The jobs of one world."""
    jobs = (
        Synthetic(jobs=300, sizes=SIZES, median_s=median_s, sigma=1.3, tiers=tiers).at_load(64, load, seed).draw(seed)
    )
    given = submissions(jobs, cluster("8x8"), Tally("chance"), costs=Costs())
    return list(half(given) if halved else given)


def known(state: State, log: tuple[Event, ...], jobs: list[Submission], now_us: int) -> Draw:
    """How long each job still runs, and who comes, as it really was."""
    left_us, arrivals = dict[JobId, int](), list[Arrival]()
    durable = [event for event in log if isinstance(event, CheckpointCommitted)]
    for each in jobs:
        job_id, work, record = each.job.job_id, each.work, state.jobs.get(each.job.job_id)
        if record is None:
            arrivals.append(Arrival(at_us=each.at_us, job=each.job, left_us=work.steps * work.step_us))
        elif not record.phase.ended:
            attempt = state.attempts.get(job_id)
            since_us = now_us if attempt is None else attempt.placed_us
            step = max((one.step for one in durable if one.job_id == job_id and one.at_us <= since_us), default=0)
            start_us = work.start_us if attempt is not None and attempt.epoch > 1 else 0
            left_us[job_id] = max(1, (work.steps - step) * work.step_us - max(0, now_us - since_us - start_us))
    return Draw(left_us=left_us, arrivals=arrivals)


def compared(world: dict[str, Any], seeds: int, *, halved: bool) -> dict[str, Any]:
    """Of all forecasts of one kind of world: how many were right, and by how much the others were off."""
    errors_s, cpu_s, decisions = list[float](), 0.0, 0
    for seed in range(seeds):
        jobs = drawn(seed, **world, halved=halved)
        log = run(cluster("8x8"), jobs).log
        placed = [event for event in log if isinstance(event, AttemptPlaced)]
        for number in range(1, MOMENTS + 1):
            now_us, state = jobs[-1].at_us * number // (MOMENTS + 1), State()
            for event in islice(log, sum(event.at_us <= now_us for event in log)):
                apply(state, event)
            watch = sorted(state.waiting.job_ids())
            if not watch:
                continue
            began_s = time.process_time()
            ahead = forward(Snapshot(state), now_us, known(state, log, jobs, now_us), watch, until_us=FAR_US)
            cpu_s, decisions = cpu_s + time.process_time() - began_s, decisions + ahead.decisions
            for job_id in watch:
                came_us = next(each.at_us for each in placed if each.job_id == job_id and each.at_us >= now_us)
                errors_s.append(abs((ahead.fates[job_id].start_us or FAR_US) - came_us) / US_PER_S)
    return {
        **world,
        "half": halved,
        "forecasts": len(errors_s),
        "right_to_the_second": round(sum(error < 1 for error in errors_s) / len(errors_s), 3),
        "error_s_mean": round(statistics.mean(errors_s)),
        "error_s_p90": round(sorted(errors_s)[len(errors_s) * 9 // 10]),
        "cpu_ms_per_decision": round(1000 * cpu_s / decisions, 3),
    }


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [compared(world, asked.seeds, halved=halved) for halved in (True, False) for world in WORLDS]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
