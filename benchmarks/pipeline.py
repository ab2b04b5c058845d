"""Pipeline schedules: published figures, how far each is from the best, and predicted bubbles beside real ones.

`python benchmarks/pipeline.py [--only figures,gradients,waits,products] [--unit SECONDS] [--steps N] [--json]`

figures: bubbles and activations of the named schedules, the proven bound, the search. gradients: every schedule of
torch and every table of ours on 2 and on 4 gloo ranks against the model without a pipeline. waits: 4 ranks whose passes
are timed waits, bubble measured against predicted. products: the same with real products on 2 ranks, each on a core of
its own. Predictions take the passes and the runtime's overheads from every other step, and are compared with the median
of the steps between them. Products need a machine without other work.
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from typing import Any

from cordee.plan.pipeline import (
    SCHEDULES,
    PassTimes,
    ScheduleTable,
    StagePlacement,
    best_order,
    build,
    makespan_bound_s,
    timeline,
)
from cordee.plan.pipeline.compare import compare, overlap_break_even
from cordee.plan.pipeline.measured import measure, overheads, replayed
from cordee.train.pipeline.rehearse import RehearsalResult, StageModel, rehearse

EQUAL = PassTimes(1.0, 1.0, 1.0)
SIZES = ((8, 20), (16, 32))
PARTS = ("figures", "gradients", "waits", "products")
# The passes of a larger model are seldom equal: what the search is worth where no named schedule was made for them.
UNEQUAL = PassTimes(1.0, 1.2, 0.8)


def figures() -> dict[str, Any]:
    """Every named schedule at two sizes with and without overlap, and orders that were searched."""
    rows, found = [], []
    for ranks, count in SIZES:
        for both_s in (3.0, 2.6):
            costs = replace(EQUAL, overlapped_s=both_s)
            for schedule in SCHEDULES:
                if both_s != 3.0 and not schedule.startswith("dualpipe"):
                    continue
                run = timeline(build(schedule, ranks, count), costs)
                bound_s = makespan_bound_s(run.table.placement, count, costs)
                rows.append({
                    "ranks": ranks, "micro_batches": count, "schedule": schedule, "overlapped": both_s,
                    "bubble": run.bubble_s, "apart": run.bubble_without_barrier_s, "peak": run.peak,
                    "step": run.makespan_s, "bound": bound_s, "over": run.makespan_s / bound_s - 1,
                })  # fmt: skip
    for costs in (EQUAL, UNEQUAL, replace(EQUAL, latency_s=0.2)):
        for place in (
            StagePlacement("line", 8),
            StagePlacement("loop", 8, 2),
            StagePlacement("v", 8, 2),
            StagePlacement("bidirectional", 8, 2),
        ):
            for memory in (None, 12.0, 9.0, 8.0, 6.0):
                known = [build(name, 8, 20) for name in SCHEDULES if build(name, 8, 20).placement == place]
                started = time.process_time()
                best = best_order(place, 20, costs, memory, known=known)
                cpu_s = time.process_time() - started
                assert best is not None, "six activations are room for a step"
                found.append({
                    "shape": place.shape, "inner": costs.inner_s, "latency": costs.latency_s, "memory": memory,
                    "step": best.timeline.makespan_s, "bound": best.bound_s, "over": best.gap,
                    "peak": best.timeline.peak, "cpu_s": cpu_s,
                })  # fmt: skip
    even = {f"{ranks}x{count}": overlap_break_even(ranks, count, EQUAL)
            for ranks, count in ((4, 16), (8, 20), (8, 32), (16, 64))}  # fmt: skip
    started = time.process_time()
    compare(8, 20, EQUAL, search=False)
    return {"named": rows, "found": found, "break_even": even, "compare_cpu_s": time.process_time() - started}


def gradients() -> list[dict[str, Any]]:
    """Every schedule, torch's by its name and ours as tables, on 2 and on 4 ranks."""
    said = []
    for ranks in (2, 4):
        count = 2 * ranks
        line, loop, vee = StagePlacement("line", ranks), StagePlacement("loop", ranks, 2), StagePlacement("v", ranks, 2)
        searched = best_order(vee, count, PassTimes(1, 1.3, 0.6), 1.25 * ranks)
        assert searched is not None, "there is room"
        tables = [*(build(schedule, ranks, count) for schedule in SCHEDULES), searched.timeline.table]
        names = [("GPipe", line, count), ("1F1B", line, count), ("LoopedBFS", loop, count),
                 ("Interleaved1F1B", loop, count), ("InterleavedZeroBubble", loop, count),
                 ("ZBVZeroBubble", vee, count), ("DualPipeV", vee, count)]  # fmt: skip
        for index, one in enumerate(rehearse(tables, ranks=ranks, torch_names=names)):
            said.append({"ranks": ranks, "schedule": one.name, "by": "table" if index < len(tables) else "torch",
                         "gradient_error": one.gradient_error, "loss_error": one.loss_error})  # fmt: skip
    return said


def waits(unit_s: float, steps: int) -> list[dict[str, Any]]:
    """Four ranks whose passes wait."""
    names: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipev")
    tables = [build(name, 4, 8) for name in names]
    model = StageModel("waits", unit_s, unit_s, unit_s)
    return [
        _against(table, one)
        for table, one in zip(tables, rehearse(tables, ranks=4, stage_model=model, steps=steps), strict=True)
    ]


def products(steps: int) -> list[dict[str, Any]]:
    """Two ranks, each on its own core, with real products."""
    names: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")
    tables = [build(name, 2, 6) for name in names]
    model = StageModel("products", width=512, rows=1024, layers=8)
    ran = rehearse(tables, ranks=2, stage_model=model, steps=steps, pin=True)
    return [_against(table, one) for table, one in zip(tables, ran, strict=True)]


def _against(table: ScheduleTable, one: RehearsalResult) -> dict[str, Any]:
    """The passes of every other step predict the steps between them; the first step of all warms up."""
    before, after = one.steps[1::2], one.steps[2::2]
    over = overheads(table.placement, before)
    runs = [replayed(table, step, over) for step in before]
    said_s, said_step_s = (
        statistics.median(each) for each in zip(*((run.bubble_s, run.makespan_s) for run in runs), strict=True)
    )
    bubbles = sorted(measure(step, over).bubble_s for step in after)
    bubble_s, step_s = statistics.median(bubbles), statistics.median(measure(step, over).makespan_s for step in after)
    # What a step's own passes should have made it wait: the prediction without the machine's changes between steps.
    own = statistics.median(measure(step, over).bubble_s / replayed(table, step, over).bubble_s - 1 for step in after)
    return {
        "off_own_passes": own,
        "schedule": table.name, "ranks": table.placement.ranks, "micro_batches": table.micro_batches,
        "bubble_s_predicted": said_s, "bubble_s_measured": bubble_s, "off": bubble_s / said_s - 1,
        "bubble_s_spread": [bubbles[0], bubbles[-1]], "step_s_predicted": said_step_s, "step_s_measured": step_s,
        "before_s": over.before_s, "arrival_s": over.arrival_s, "gradient_error": one.gradient_error,
    }  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    if "figures" in report:
        print("ranks  m  schedule     F&B   bubble  apart   peak   step  bound   over")
        for row in report["figures"]["named"]:
            print(
                f"{row['ranks']:>5} {row['micro_batches']:>3} {row['schedule']:<12} {row['overlapped']:.1f} "
                f"{row['bubble']:8.2f} {row['apart']:6.2f} {row['peak']:6.1f} {row['step']:6.1f} {row['bound']:6.1f} "
                f"{row['over']:6.1%}"
            )
        print("\nsearched, 8 ranks, 20 micro-batches\nshape    I    latency memory   step  bound   over   peak  CPU-s")
        for row in report["figures"]["found"]:
            memory = "any" if row["memory"] is None else f"{row['memory']:g}"
            print(
                f"{row['shape']:<8} {row['inner']:.1f} {row['latency']:6.1f} {memory:>6} {row['step']:8.2f} "
                f"{row['bound']:6.2f} {row['over']:6.2%} {row['peak']:6.1f} {row['cpu_s']:6.2f}"
            )
        print("break-even", {key: f"{value:.1%}" for key, value in report["figures"]["break_even"].items()})
    for row in report.get("gradients", ()):
        print(f"{row['ranks']} ranks {row['by']:<6} {row['schedule']:<22} gradients off by {row['gradient_error']:.1e}")
    for part in ("waits", "products"):
        for row in report.get(part, ()):
            low, high = row["bubble_s_spread"]
            said_ms, ran_ms = row["bubble_s_predicted"] * 1e3, row["bubble_s_measured"] * 1e3
            print(
                f"{part:<9} {row['ranks']} ranks {row['schedule']:<12} bubble {said_ms:7.1f} ms predicted, "
                f"{ran_ms:7.1f} measured "
                f"({row['off']:+.1%}; own passes {row['off_own_passes']:+.1%}; {low * 1e3:.0f} to {high * 1e3:.0f}), "
                f"step {row['step_s_predicted']:.3f} and {row['step_s_measured']:.3f} s"
            )


def main() -> None:
    """Run what is answer for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--unit", type=float, default=0.15, help="seconds of a pass that waits")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = args.only.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    report: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if "figures" in parts:
        report["figures"] = figures()
    if "gradients" in parts:
        report["gradients"] = gradients()
    if "waits" in parts:
        report["waits"] = waits(args.unit, args.steps)
    if "products" in parts:
        report["products"] = products(args.steps)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


if __name__ == "__main__":
    main()
