"""Quality and speed of the scheduler on real traces, beside others: `Control.tick` with store, ledger and metrics on.

python benchmarks/scheduler.py TRACES_FOLDER [--clusters PART,...] [--loads 0.8,1.2] [--most 1500]
    [--policies cordee,las,easy] [--anchors A,B,before,after] [--victims-jobs 8000] [--half A,before,8000] [--json]

Any folder of traces: each virtual cluster of each trace, whose name holds one of the parts (all, if there is none), on
as many nodes of 8 GPUs as make it as full as asked. Each policy's figures, and over those of 2D-LAS and EASY; at the
end a verdict for each target, with the clusters on which the first policy misses it.

Anchors: philly_oct_10k.csv.gz (A) and philly_oct_60k.csv.gz (B), jobs of Microsoft's Philly trace on 80 nodes of 8
GPUs, and philly.csv.gz: what came before B and after it, on as many nodes as make the cluster as full as B does (82 %).

Costs: a checkpoint every 30 minutes, 60 s to restart, 30 s of grace, and a save of 30 s
for each notice that counts as lost. Only sjf, srsf and easy are told how long jobs run. Times are CPU seconds.
"""

import argparse
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cordee.events import Node, Queue, Tier
from cordee.schedule.policy import NAMED, Policy
from cordee.simulate.metrics import Metrics
from cordee.simulate.run import Submission, run
from cordee.simulate.traces import Tally, open_trace
from cordee.simulate.workload import Costs, submissions
from trace_clusters import FEWEST, VirtualCluster, folder_of_traces, virtual_clusters

S = 1_000_000
ANCHORS: dict[str, tuple[str, int, int, int]] = {  # a file, nodes, and the jobs from one second on to another
    "A": ("philly_oct_10k.csv.gz", 80, 0, 1 << 40),
    "B": ("philly_oct_60k.csv.gz", 80, 0, 1 << 40),
    "before": ("philly.csv.gz", 49, 0, 2_295_004),
    "after": ("philly.csv.gz", 34, 6_293_027, 1 << 40),
}
TOLD = ("sjf", "srsf", "easy")
PEERS = (
    ("A", "Tiresias, 2D-LAS, free preemption", 7_751, "its own simulator, run by us"),
    ("A", "2D-LAS with costs, saves in the grace", 7_859, "our bare reference; 25.6 GPU-hours lost"),
    ("A", "EASY, perfect estimates", 8_165, "our bare reference"),
    ("A", "Tiresias, FIFO", 10_017, "its own simulator, run by us"),
    ("B", "2D-LAS, textbook", 11_630, "our bare reference; 409 GPU-hours lost"),
    ("B", "SJF that lets pass what fits", 12_837, "our bare reference; durations known"),
    ("B", "EASY, perfect estimates", 14_356, "our bare reference"),
    ("B", "strict FIFO", 35_839, "our bare reference; nobody waits longer than 179,336 s"),
)
USD_MICRO = 2_990_000
TEAMS = tuple(Queue(name=name, quota_gpus=gpus) for name, gpus in (("large", 320), ("middle", 192), ("small", 64)))
HEADS = (
    ("mean JCT s", 11), ("p99", 11), ("p99 slow", 10), ("away max", 11), ("lost GPU-h", 11), ("lost $", 10),
    ("+ restart", 11), ("preempts", 9), ("jobs/CPU-s", 11),
)  # fmt: skip

RATIOS = (
    ("mean", "jct_s", 0),
    ("p99 slowdown", "slowdown_p99", 0),
    ("away", "away_s_max", 600),
    ("lost", "lost_gpu_hours", 1),
)


def nodes(count: int = 80) -> list[Node]:
    """Of 8 GPUs each."""
    more: dict[str, Any] = {"epoch": 1, "gpu_name": "P100", "gpus": 8, "micro_usd_per_gpu_hour": USD_MICRO}
    return [Node(name=f"n{number:03}", **more) for number in range(count)]


def jobs(folder: Path, anchor: str, *, told: bool) -> list[Submission]:
    """The trace's jobs, all in one queue."""
    tally = Tally(anchor)
    file, count, from_s, until_s = ANCHORS[anchor]
    trace = open_trace(folder / file).jobs(tally)
    pooled = (replace(each, vc="") for each in trace if from_s * S <= each.submit_us < until_s * S)
    return list(submissions(pooled, nodes(count), tally, costs=Costs(), estimates=told))


def on_cluster(each: VirtualCluster, count: int, policies: list[str]) -> list[dict[str, Any]]:
    """One cluster under each policy; its GPUs are all of one kind, whatever the trace says."""
    pooled = [replace(job, vc="", gpu_name=None) for job in each.jobs]
    rows = []
    for name in policies:
        given = submissions(pooled, nodes(count), Tally(each.name), costs=Costs(), estimates=name in TOLD)
        rows.append(one(name, NAMED[name], given, count))
    return rows


def over(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The first policy over 2D-LAS and EASY; where theirs is nearly nothing there is no ratio."""
    named = {row["policy"]: row for row in rows}
    for other in ("las", "easy"):
        if other in named and other != rows[0]["policy"]:
            parts = [
                f"{what} {rows[0][key] / named[other][key]:.2f}" if named[other][key] > least else f"{what} -"
                for what, key, least in RATIOS
            ]
            yield f"{rows[0]['policy']} over {other}: {', '.join(parts)}"


TARGETS: tuple[tuple[str, str, Callable[[dict[str, Any], dict[str, Any]], bool]], ...] = (
    ("mean at most 1.05 of 2D-LAS", "las", lambda own, las: own["jct_s"] <= 1.05 * las["jct_s"]),
    (
        "p99 slowdown at most half of 2D-LAS's, or 1",
        "las",
        lambda own, las: own["slowdown_p99"] <= max(1.0, 0.5 * las["slowdown_p99"]),
    ),
    (
        "longest time away at most half of 2D-LAS's",
        "las",
        lambda own, las: own["away_s_max"] <= 0.5 * las["away_s_max"],
    ),
    ("GPU-hours lost at most 2D-LAS's", "las", lambda own, las: own["lost_gpu_hours"] <= las["lost_gpu_hours"]),
    ("mean not above EASY's", "easy", lambda own, easy: own["jct_s"] <= easy["jct_s"]),
    ("p99 slowdown not above EASY's", "easy", lambda own, easy: own["slowdown_p99"] <= easy["slowdown_p99"]),
    ("1,000 jobs a CPU second, of at least 2,000 jobs", "", lambda own, _: own["jobs_per_cpu_s"] >= 1_000),
)
"""The targets on each cluster: a name, the policy that it is over, and the verdict on our figures and its."""


def missed(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether the first policy misses each target that applies to it here."""
    named = {row["policy"]: row for row in rows}
    own, found = rows[0], {}
    for name, other, reached in TARGETS:
        if (other in named and other != own["policy"]) or (not other and own["jobs"] >= 2_000):
            found[name] = not reached(own, named.get(other, own))
    return found


def verdicts(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """How often the first policy reaches each target, and where it does not."""
    by_cluster = {title: missed(rows) for title, rows in found.items()}
    for name, _, _ in TARGETS:
        where = [title for title, misses in by_cluster.items() if name in misses]
        short = [title.partition(" jobs,")[0].rpartition(": ")[0] + title.partition(" jobs,")[2] for title in where]
        not_there = [each for each, title in zip(short, where, strict=True) if by_cluster[title][name]]
        reached = f"reached on {len(where) - len(not_there)} of {len(where)}" if where else "applies to no cluster here"
        yield f"{name}: {reached}" + "".join(f"\n    not on {each}" for each in not_there)


def one(
    name: str, policy: Policy, submitted: Iterable[Submission], count: int = 80, queues: tuple[Queue, ...] = ()
) -> dict[str, Any]:
    """One run."""
    metrics, submitted = Metrics(), list(submitted)
    begin = time.process_time()
    done = run(nodes(count), submitted, policy=policy, queues=queues, defer_reports=True, sink=metrics.apply)
    cpu_s = time.process_time() - begin
    summary = metrics.summary((done.ledger, done.at_us))
    assert not done.errors and summary.ended == len(submitted), f"{name}: {done.errors} errors, {summary.ended} ended"
    return {
        "policy": name,
        "jobs": len(submitted),
        "jct_s": round(summary.jct_s.mean, 1),
        "jct_s_p99": round(summary.jct_s.p99),
        "slowdown_p99": round(summary.slowdown_p99, 2),
        "away_s_max": round(summary.away_s.max),
        "lost_gpu_hours": round(summary.lost_gpu_hours, 1),
        "lost_usd": round(summary.lost_micro_usd / 1e6, 2),
        "preempted_usd": round(summary.lost_micro_usd / 1e6 + summary.restart_gpu_us / 3.6e9 * USD_MICRO / 1e6, 2),
        "preemptions": summary.preemptions,
        "cpu_s": round(cpu_s, 1),
        "jobs_per_cpu_s": round(len(submitted) / cpu_s),
    }


def tiered(submitted: Iterable[Submission]) -> Iterator[Submission]:
    """Three tiers and three queues by chance of the job's id; half of the jobs cannot save within their grace."""
    for each in halved(submitted):
        drawn = zlib.crc32(each.job.job_id.encode())
        tier = (Tier.PRODUCTION, *[Tier.STANDARD] * 2, *[Tier.PREEMPTIBLE] * 2)[drawn % 5]
        yield replace(each, job=replace(each.job, tier=tier, queue=TEAMS[drawn // 10 % 3].name))


def halved(submitted: Iterable[Submission]) -> Iterator[Submission]:
    """Half of the jobs, by chance of their ids, take 120 s to save and cannot within their grace."""
    for each in submitted:
        save_us = (30 if zlib.crc32(each.job.job_id.encode()) // 5 % 2 else 120) * S
        yield replace(each, job=replace(each.job, save_us=save_us), work=replace(each.work, upload_us=save_us))


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table, and the first policy over others."""
    print(f"\n{title}")
    heads = (f"{head:>{width}}" for head, width in HEADS)
    print(f"{'policy':<14}{''.join(heads)}")
    for row in rows:
        print(
            f"{row['policy']:<14}{row['jct_s']:>11,}{row['jct_s_p99']:>11,}{row['slowdown_p99']:>10,.1f}{row['away_s_max']:>11,}"
            f"{row['lost_gpu_hours']:>11,}{row['lost_usd']:>10,}{row['preempted_usd']:>11,}{row['preemptions']:>9,}{row['jobs_per_cpu_s']:>11,}"
        )
    print(*over(rows), sep="\n", flush=True)


def clusters(args: argparse.Namespace) -> dict[str, Any]:
    """Each virtual cluster of the folder at each load."""
    names, loads = args.policies.split(","), [float(load) for load in filter(None, args.loads.split(","))]
    found = {}
    for each in virtual_clusters(args.traces, args.most) if loads else ():
        if not any(part in each.name for part in args.clusters.split(",")):
            continue
        for count in dict.fromkeys(map(each.nodes, loads)):  # once where two loads need as many nodes
            rows = on_cluster(each, count, names)
            title = f"{each.name}: {len(each.jobs):,} jobs, {count} nodes of 8, load {each.asked_gpus / count / 8:.2f}"
            found[title] = rows
            if not args.json:
                show(title, rows)
    if loads and not found:
        print(f"no virtual cluster of at least {FEWEST} jobs in {args.traces}", file=sys.stderr)
    if found and not args.json:
        print("\ntargets", *verdicts(found), sep="\n")
    return found


def anchors(args: argparse.Namespace) -> dict[str, Any]:
    """The anchors, beside what others say of the same jobs."""
    found = {}
    for anchor in filter(None, args.anchors.split(",")):
        count = ANCHORS[anchor][1]
        rows = [
            one(name, NAMED[name], jobs(args.traces, anchor, told=name in TOLD), count)
            for name in args.policies.split(",")
        ]
        found[anchor] = rows
        if args.json:
            continue
        ran_us = sum(each.work.steps * each.work.step_us for each in jobs(args.traces, anchor, told=False))
        bound_s = ran_us / S / rows[0]["jobs"]
        show(f"{anchor}: {rows[0]['jobs']:,} jobs, {count} nodes of 8; nobody can be below {bound_s:,.0f} s", rows)
        for _, name, jct_s, source in (each for each in PEERS if each[0] == anchor):
            print(f"  {name:<40}{jct_s:>9,} s   {source}")
    return found


def victims(args: argparse.Namespace) -> dict[str, Any]:
    """Whom to preempt."""
    if not args.victims_jobs:
        return {}
    mixed, found = list(tiered(jobs(args.traces, "B", told=False)[: args.victims_jobs])), {}
    for base in ("fit", "cordee"):
        rules = [replace(NAMED[base], victims=rule) for rule in ("dollars", "newest", "lowest")]
        found[base] = [one(rule.victims, rule, mixed, queues=TEAMS) for rule in rules]
        if not args.json:
            turns = "by tier and quota alone" if base == "fit" else "by tier, quota and turn"
            title = f"three tiers, quotas 320, 192, 64; preemption {turns}; the first {len(mixed):,} jobs of B"
            show(title, found[base])
    return found


def half(args: argparse.Namespace) -> dict[str, Any]:
    """Half of the jobs cannot save in their grace: with and without a wait for their checkpoints."""
    found = {}
    for name in filter(None, args.half.split(",")):
        anchor, queues = ("B", TEAMS) if name.isdigit() else (name, ())
        submitted = jobs(args.traces, anchor, told=False)
        slow = list(tiered(submitted[: int(name)]) if name.isdigit() else halved(submitted))
        rules = {"off": replace(NAMED["cordee"], awaits_checkpoint=False), "on": NAMED["cordee"]}
        found[name] = [one(told, rule, slow, ANCHORS[anchor][1], queues) for told, rule in rules.items()]
        if not args.json:
            show(
                f"{name}: half of {len(slow):,} jobs cannot save in their grace; turns wait for checkpoints",
                found[name],
            )
    return found


def main() -> None:
    """Print tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=folder_of_traces)
    parser.add_argument("--clusters", default="", help="those whose names hold one of these; none: all")
    parser.add_argument("--loads", default="0.8,1.2", help="of each cluster; none: no clusters")
    parser.add_argument("--most", type=int, default=1_500, help="jobs of a cluster")
    parser.add_argument("--policies", default="cordee,las,easy")
    parser.add_argument("--anchors", default="")
    parser.add_argument("--victims-jobs", type=int, default=0, help="of anchor B, for the choice of victims")
    parser.add_argument(
        "--half", default="", help="anchors, or how many jobs of B in tiers: turns wait for checkpoints or not"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {part.__name__: part(args) for part in (clusters, anchors, victims, half)}
    if args.json:
        json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
