"""The simulator held against another one, its speed, its determinism, and a million jobs on 100,000 GPUs.

python benchmarks/simulator.py TRACES_FOLDER [--only speed,determinism,fidelity,million] [--policy cordee,fifo,...]
    [--fewest 2000] [--most 10000] [--load 0.8] [--jobs 1000000] [--json]

Speed and determinism: any folder of traces, each virtual cluster with enough jobs on as many nodes of 8 GPUs as make
it as full as asked. Fidelity: philly.csv.gz and philly_vc_nodes.csv.gz. Times are CPU seconds of one core.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from cordee.event_json import encode
from cordee.schedule.policy import NAMED
from cordee.simulate.cluster import OutageRate, cluster, random_outages, vc_clusters
from cordee.simulate.compare import CachedJobs, Scenario, count_jobs, simulate
from cordee.simulate.policies import POLICIES, NamedPolicy
from cordee.simulate.run import run
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally, open_trace
from cordee.simulate.workload import Costs, submissions
from trace_clusters import folder_of_traces, virtual_clusters

S = 1_000_000
DAY_US = 86_400 * S
USD_MICRO = 2_990_000
TARGET = 1_000  # jobs a CPU second, of `cordee`
HELIOS = {"fifo": 104.9, "sjf": 62.7}  # mean queue in seconds, of the authors' simulator on the same rows
PEERS = (
    ("HeliosArtifact, FIFO", 681, "68,503 jobs, 11 virtual clusters, 2,816 GPUs; run by us"),
    ("Alibaba PAI 2020, SJF", 385, "20,000 jobs, 6,500 GPUs; its authors' log"),
    ("Tiresias, 2D-LAS", 181, "10,000 jobs, 640 GPUs; run by us"),
    ("FGD, packing only", 8, "pods tried in a second, 6,212 GPUs; run by us"),
    ("Gavel, as in Sia's repository", 3.8, "160 jobs, 64 GPUs; run by us"),
)


def fidelity(traces: Path) -> list[dict[str, Any]]:
    """Philly, October and November 2017: each virtual cluster by itself, none is preempted, so none restarts."""
    vcs = vc_clusters(traces / "philly_vc_nodes.csv.gz")
    from_us = 2_293_200 * S
    scenario = Scenario(
        jobs=CachedJobs(open_trace(traces / "philly.csv.gz").jobs),
        name="philly",
        nodes=cluster(f"{sum(vcs.values())}x8"),
        vcs=tuple(vcs.items()),
        window_us=(from_us, from_us + 61 * DAY_US),
    )
    _, total = count_jobs(scenario)
    rows = []
    for name, theirs in HELIOS.items():
        rules = replace(NAMED["fifo"], order=name)
        result, cpu_s = timed(lambda rules=rules, name=name: simulate(scenario, _named(name, rules)))
        ours = result.summary.wait_s.mean
        rows.append(
            {
                "policy": name,
                "jobs": total,
                "queue_s_mean": ours,
                "helios_queue_s_mean": theirs,
                "difference": ours / theirs - 1,
                "jct_s_mean": result.summary.jct_s.mean,
                "jct_s_p99": result.summary.jct_s.p99,
                "cpu_s": cpu_s,
                "jobs_per_cpu_s": total / cpu_s,
            }
        )
    return rows


def _named(name: str, rules: Any) -> NamedPolicy:
    return NamedPolicy(name=name, description="strict", policy=rules, estimates=name == "sjf")


def speed(traces: Path, policies: list[str], fewest: int, most: int, load: float) -> list[dict[str, Any]]:
    """The first jobs of each cluster: production tick, store in memory, ledger and metrics on."""
    rows = []
    for each in virtual_clusters(traces, most):
        if len(each.jobs) < fewest:
            continue
        nodes = cluster(f"{each.nodes(load)}x8", micro_usd_per_gpu_hour=USD_MICRO)
        pooled = [replace(job, vc="", gpu_name=None) for job in each.jobs]
        for name in policies:
            scenario = Scenario(jobs=CachedJobs(lambda _, jobs=pooled: iter(jobs)), name=each.name, nodes=nodes)
            result, cpu_s = timed(lambda scenario=scenario, name=name: simulate(scenario, POLICIES[name]))
            summary = result.summary
            rows.append(
                {
                    "cluster": each.name,
                    "nodes": len(nodes),
                    "load": each.asked_gpus / len(nodes) / 8,
                    "policy": name,
                    "jobs": len(pooled),
                    "cpu_s": cpu_s,
                    "jobs_per_cpu_s": len(pooled) / cpu_s,
                    "events": result.events,
                    "jct_s_mean": summary.jct_s.mean,
                    "away_s_max": summary.away_s.max,
                    "preemptions": summary.preemptions,
                    "lost_gpu_hours": summary.lost_gpu_hours,
                    "errors": result.errors,
                }
            )
    return rows


def determinism(traces: Path) -> dict[str, Any]:
    """The digest of a log by two interpreters with different hash seeds."""
    digests = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, __file__, str(traces), "--digest"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(done.stdout.strip())
    return {"same": digests[0] == digests[1], "events": int(digests[0].split()[0]), "digests": digests}


def digest(traces: Path) -> str:
    """Of the first 1,000 jobs of each of three clusters, with failures."""
    text, events = hashlib.sha256(), 0
    for each in islice(virtual_clusters(traces, 1_000), 3):
        nodes = cluster(f"{each.nodes(0.8)}x8", micro_usd_per_gpu_hour=USD_MICRO)
        pooled = [replace(job, vc="", gpu_name=None) for job in each.jobs]
        given = submissions(pooled, nodes, Tally(each.name), costs=Costs())
        failing = random_outages(nodes, OutageRate(per_node_day=0.02, back_us=3600 * S), 7)
        log = run(nodes, given, failing, defer_reports=True).log
        events += len(log)
        for event in log:
            text.update(json.dumps(encode(event)).encode())
    return f"{events} {text.hexdigest()}"


def million(jobs: int) -> dict[str, Any]:
    """A synthetic trace on 12,500 nodes of 8, at four fifths of what they hold."""
    nodes = cluster("12500x8", micro_usd_per_gpu_hour=USD_MICRO)
    drawn = Synthetic(jobs=jobs, diurnal=0.5).at_load(100_000, 0.8, 1)

    def draw(tally: Tally) -> Any:
        for job in drawn.draw(1):
            tally.jobs += 1
            yield job

    result, cpu_s = timed(lambda: simulate(Scenario(jobs=draw, name="synthetic", nodes=nodes), POLICIES["cordee"]))
    return {
        "jobs": jobs,
        "gpus": 100_000,
        "days": result.summary.makespan_s / 86_400,
        "cpu_s": cpu_s,
        "jobs_per_cpu_s": jobs / cpu_s,
        "events": result.events,
        "ended": result.summary.ended,
        "preemptions": result.summary.preemptions,
        "memory_bytes_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "errors": result.errors,
    }


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its CPU seconds."""
    began = time.process_time()
    given = action()
    return given, time.process_time() - began


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=folder_of_traces)
    parser.add_argument("--only", default="speed,determinism")
    parser.add_argument("--policy", default="cordee,2d-las,easy,fifo")
    parser.add_argument("--fewest", type=int, default=2_000, help="jobs of a cluster whose speed is measured")
    parser.add_argument("--most", type=int, default=10_000, help="jobs of it, the first ones")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.digest:
        print(digest(given.traces))
        return
    wanted = given.only.split(",")
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    if "fidelity" in wanted:
        found["fidelity"] = fidelity(given.traces)
    if "speed" in wanted:
        found["speed"] = speed(given.traces, given.policy.split(","), given.fewest, given.most, given.load)
        found["peers"] = [{"name": name, "jobs_per_cpu_s": rate, "what": what} for name, rate, what in PEERS]
    if "determinism" in wanted:
        found["determinism"] = determinism(given.traces)
    if "million" in wanted:
        found["million"] = million(given.jobs)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """As tables."""
    for row in found.get("fidelity", ()):
        print(
            f"| {row['policy']} | {row['jobs']:,} | {row['queue_s_mean']:.2f} s | {row['helios_queue_s_mean']} s | "
            f"{row['difference']:+.2%} | {row['jct_s_mean']:,.0f} s | {row['cpu_s']:.1f} | "
            f"{row['jobs_per_cpu_s']:,.0f} |"
        )
    if "speed" in found:
        _show_targets(found["speed"])
    for row in found.get("speed", ()):
        print(
            f"| {row['cluster']}, {row['nodes']} nodes, load {row['load']:.2f} | {row['policy']} | {row['jobs']:,} | "
            f"{row['cpu_s']:.1f} | {row['jobs_per_cpu_s']:,.0f} | "
            f"{row['jct_s_mean']:,.0f} s | {row['away_s_max']:,.0f} s | {row['preemptions']:,} | "
            f"{row['lost_gpu_hours']:,.1f} | {row['errors']} |"
        )
    if "peers" in found:
        print("\n| another simulator | jobs a CPU second | of |\n|---|---|---|")
    for row in found.get("peers", ()):
        print(f"| {row['name']} | {row['jobs_per_cpu_s']:,} | {row['what']} |")
    if "determinism" in found:
        events = found["determinism"]["events"]
        same = found["determinism"]["same"] if events else "not shown, the folder has no virtual cluster of enough jobs"
        print(f"same bytes under two hash seeds ({events:,} events): {same}")
    if "million" in found:
        row = found["million"]
        rate, peak = row["jobs_per_cpu_s"], row["memory_bytes_peak"] / 1e9
        print(f"{row['jobs']:,} jobs on {row['gpus']:,} GPUs: {row['cpu_s']:,.0f} CPU s, {rate:,.0f} jobs a CPU second")
        print(f"{row['events']:,} events, {row['ended']:,} jobs ended, {peak:.1f} GB at most")


def _show_targets(rows: list[dict[str, Any]]) -> None:
    """Show the target and the clusters that miss it, and the head of the table."""
    if not rows:
        print("speed: the folder has no virtual cluster of at least --fewest jobs")
        return
    ours = [row for row in rows if row["policy"] == "cordee"]
    slow = [row for row in ours if row["jobs_per_cpu_s"] < TARGET]
    print(f"{TARGET:,} jobs a CPU second: reached on {len(ours) - len(slow)} of {len(ours)}")
    for row in slow:
        print(f"    not on {row['cluster']}, {row['jobs_per_cpu_s']:,.0f}")
    heads = ("cluster", "policy", "jobs", "CPU s", "jobs a CPU second", "mean JCT", "longest time away", "preemptions")
    print(f"| {' | '.join((*heads, 'GPU-hours lost', 'errors'))} |\n{'|---' * 10}|")


if __name__ == "__main__":
    main()
