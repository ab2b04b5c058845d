"""What one scheduling cycle costs: CPU time of `decide` on 1,000 nodes of 8 GPUs, 1,000 running and 1,000 waiting jobs.

python benchmarks/schedule_cycle.py [--nodes 1000] [--runs 5] [--json]
"""

import argparse
import json
import platform
import random
import statistics
import time

from cordee.events import (
    AttemptPlaced,
    Event,
    Job,
    JobSubmitted,
    Node,
    NodeUp,
    Outcome,
    RanksStarted,
    ShareEnded,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule import State, decide

S = 1_000_000
HOUR_US = 3600 * S
SIZES = (1, 1, 2, 4, 8, 8, 16, 64)


def submit(name: str, gpus: int, tier: Tier, at_us: int, limit_us: int | None = None) -> JobSubmitted:
    """A protected job."""
    job = Job(job_id=JobId(name), name=name, owner="me", gpus=gpus, tier=tier, protected=True, time_limit_us=limit_us)
    return JobSubmitted(at_us=at_us, job=job, spec="{}")


def full_cluster(nodes: int, tier: Tier) -> State:
    """Racks of 16 nodes, blocks of 4 racks; one job of 8 GPUs on each node."""
    state = State()
    for number in range(nodes):
        domain = (f"block{number // 64}", f"rack{number // 16}")
        node = Node(name=f"n{number:05}", epoch=1, gpu_name="H100", gpus=8, micro_usd_per_gpu_hour=1, domain=domain)
        state.apply(NodeUp(at_us=0, node=node))
        state.apply(submit(f"run{number:05}", 8, tier, number, HOUR_US))
    for event in decide(state, S).events:
        state.apply(event)
        if isinstance(event, AttemptPlaced):
            for lease in event.leases:
                state.apply(RanksStarted(at_us=2 * S, job_id=event.job_id, epoch=1, node=lease.node))
    return state


def free(state: State, jobs: int) -> None:
    """So many running jobs finish."""
    for job_id in sorted(state.attempts)[:jobs]:
        for lease in state.attempts[job_id].held:
            ended: Event = ShareEnded(at_us=4 * S, job_id=job_id, epoch=1, node=lease.node, outcome=Outcome.FINISHED)
            state.apply(ended)


def scenario(name: str, nodes: int) -> State:
    """A state at 5 s."""
    drawn = random.Random(1)
    tier = Tier.PREEMPTIBLE if name == "everybody pushes" else Tier.STANDARD
    if name == "empty cluster, all placed":
        state = full_cluster(nodes, tier)
        free(state, nodes)
        for event in decide(state, 4 * S).events:
            state.apply(event)
        for number in range(nodes):
            state.apply(submit(f"w{number:05}", 8, tier, 3 * S + number))
        return state
    state = full_cluster(nodes, tier)
    if name == "nothing waits":
        return state
    if name == "a gang of 64 waits, 40 free, all have limits":
        state.apply(submit("gang", 64, Tier.STANDARD, 2 * S))
        free(state, 5)
    for number in range(nodes):
        limit_us = drawn.randrange(HOUR_US // 10, HOUR_US) if "limits" in name else None
        state.apply(submit(f"w{number:05}", drawn.choice(SIZES), Tier.STANDARD, 3 * S + number, limit_us))
    if name == "one job ends":
        free(state, 1)
    return state


SCENARIOS = (
    "nothing waits",
    "nothing free",
    "one job ends",
    "a gang of 64 waits, 40 free, all have limits",
    "empty cluster, all placed",
    "everybody pushes",
)


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in SCENARIOS:
        state = scenario(name, args.nodes)
        running, waiting = len(state.attempts), len(state.queue)
        times_s = []
        for _ in range(args.runs):
            start_s = time.process_time()
            decision = decide(state, 5 * S)
            times_s.append(time.process_time() - start_s)
        assert not decision.errors
        rows.append(
            {
                "scenario": name,
                "running": running,
                "waiting": waiting,
                "events": len(decision.events),
                "decide_ms_median": round(statistics.median(times_s) * 1e3, 2),
                "decide_ms_max": round(max(times_s) * 1e3, 2),
            }
        )
    if args.json:
        print(json.dumps({"nodes": args.nodes, "python": platform.python_version(), "rows": rows}))
        return
    print(f"{args.nodes} nodes of 8 GPUs, Python {platform.python_version()}, median of {args.runs} (max), CPU time")
    for row in rows:
        numbers = f"{row['running']:>5} running {row['waiting']:>5} waiting {row['events']:>5} events"
        print(f"{row['scenario']:<46}{numbers}  {row['decide_ms_median']:>7} ms ({row['decide_ms_max']})")


if __name__ == "__main__":
    main()
