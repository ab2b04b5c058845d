"""How fast the whole space of layouts is searched.

`python benchmarks/planner_search.py [--json] [--sub-spaces N] [--prove]`.

The full cross product for GPT-3 175B on 1,024 A100s: the count is printed before anything is pruned, then the proven
optimum, what was weighed and timed, and the seconds on one core. Beside it the same answer by brute force on random
sub-spaces of about 10^5 candidates, and what one evaluation costs. `--prove` looks at
every candidate of the large space.
"""

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from cordee.hardware.load import load_catalogue
from cordee.plan.layout import OFFLOADS, RECOMPUTES, SCHEDULES
from cordee.plan.memory import peak_bytes
from cordee.plan.optimum import Case, brute_force, count, optimum
from cordee.plan.space import ALL_CHOICES
from cordee.plan.step import step_time
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.load import load_shape

SEED, EVALUATIONS = 7, 50


def the_large_space(quiet: bool, prove: bool) -> dict[str, Any]:
    """GPT-3 175B on 1,024 A100s, 1,536 sequences of 2,048 tokens: everything that divides."""
    case = Case(load_shape("gpt-3-175b"), load_catalogue().find_gpu("A100-80"), 1024, Training(2048, 1536))
    candidates = count(case, LayoutWanted(), ALL_CHOICES)
    if not quiet:
        print(f"GPT-3 175B on 1,024 x A100-80: {candidates:,} candidates", flush=True)
    started, cpu = time.perf_counter(), time.process_time()
    best, tally = optimum(case, LayoutWanted(), ALL_CHOICES)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    assert best is not None and best.seconds is not None, "GPT-3 175B fits 1,024 A100s"
    proof: dict[str, Any] = {}
    if prove:
        cpu = time.process_time()
        sure = brute_force(case, LayoutWanted(), ALL_CHOICES)
        proof = {"same": sure is not None and sure.seconds == best.seconds, "brute_cpu_s": time.process_time() - cpu}
    return proof | {
        "candidates": candidates,
        "weighed": tally.weighed,
        "timed": tally.timed,
        "wall_s": seconds,
        "cpu_s": cpu_s,
        "layout": str(best.layout),
        "step_s": best.seconds,
        "peak_bytes": best.peak_bytes,
        "microseconds_a_candidate": seconds / candidates * 1e6,
    }


def one_evaluation() -> dict[str, float]:
    """Memory and time of one layout, as a plan of one judges it: milliseconds, median and worst."""
    case = Case(load_shape("gpt-3-175b"), load_catalogue().find_gpu("A100-80"), 1024, Training(2048, 1536))
    best, _ = optimum(case, LayoutWanted(tp=8), ALL_CHOICES)
    assert best is not None, "something divides"
    taken = []
    for _ in range(EVALUATIONS):
        started = time.perf_counter()
        peak_bytes(case.shape, best.layout, case.training)
        step_time(case.shape, case.gpu, best.layout, case.training)
        taken.append((time.perf_counter() - started) * 1e3)
    return {"median_ms": statistics.median(taken), "worst_ms": max(taken)}


def against_brute_force(number: int) -> list[dict[str, Any]]:
    """The pruned answer and that of looking at every candidate."""
    draw = random.Random(SEED)
    catalogue = load_catalogue()
    found: list[dict[str, Any]] = []
    while len(found) < number:
        name = draw.choice(["gpt-3-175b", "llama-3-70b", "llama-3-405b", "mixtral-8x7b", "deepseek-v3"])
        gpu = catalogue.find_gpu(draw.choice(["A100-80", "H100", "B200"]))
        case = Case(load_shape(name), gpu, draw.choice([64, 128, 512, 1024]), Training(2048, draw.choice([256, 1536])))
        wanted = LayoutWanted(tp=draw.choice([None, 2, 8]), zero=draw.choice([None, 1, 3]))
        choices = replace(
            ALL_CHOICES,
            schedules=tuple(draw.sample(SCHEDULES, draw.randint(2, 8))),
            recomputes=("none", *draw.sample(RECOMPUTES[1:], draw.randint(1, 2))),
            offloads=("none", *draw.sample(OFFLOADS[1:], draw.randint(1, 3))),
        )
        candidates = count(case, wanted, choices)
        if not 50_000 <= candidates <= 200_000:
            continue
        started = time.perf_counter()
        pruned, _ = optimum(case, wanted, choices)
        between = time.perf_counter()
        sure = brute_force(case, wanted, choices)
        done = time.perf_counter()
        assert pruned is not None and sure is not None, "something divides"
        found.append(
            {
                "case": f"{name} on {case.gpus} x {gpu.name}",
                "candidates": candidates,
                "same": pruned.seconds == sure.seconds,
                "step_s": pruned.seconds,
                "pruned_s": between - started,
                "brute_s": done - between,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sub-spaces", type=int, default=5)
    parser.add_argument("--prove", action="store_true")
    args = parser.parse_args()
    large, one = the_large_space(quiet=args.json, prove=args.prove), one_evaluation()
    spaces = against_brute_force(args.sub_spaces)
    told = {
        "python": platform.python_version(), "numpy": np.__version__, "large": large, "one": one, "sub_spaces": spaces
    }  # fmt: skip
    if args.json:
        print(json.dumps(told, indent=2))
        return
    print(f"  proven optimum  {large['layout']}: {large['step_s']:.2f} s a step, {large['peak_bytes'] / 1e9:.1f} GB")
    print(f"  in              {large['wall_s']:.1f} s wall, {large['cpu_s']:.1f} s of one core")
    print(f"  weighed         {large['weighed']:,} and timed {large['timed']:,} under more than the lightest burden")
    if args.prove:
        print(f"  brute force     {large['brute_cpu_s']:.1f} s of one core, same answer: {large['same']}")
    print(f"one evaluation (memory and time): {one['median_ms']:.2f} ms median, {one['worst_ms']:.2f} ms worst")
    print("random sub-spaces       candidates  pruned   brute force  same answer")
    for row in spaces:
        times = f"{row['pruned_s']:>6.2f} s {row['brute_s']:>9.2f} s"
        print(f"  {row['case']:<29} {row['candidates']:>7,} {times}  {row['same']}")
    if not (large.get("same", True) and all(row["same"] for row in spaces)):
        raise SystemExit("the pruned search missed an optimum")


if __name__ == "__main__":
    main()
