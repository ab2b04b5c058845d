"""How well experts are placed, and how few of them have to move: against DeepSeek's EPLB as its README describes it.

`python benchmarks/experts.py FOLDER [--json] [--effort N] [--prove]`.

FOLDER holds pairs `TASK_first_half.csv`, `TASK_second_half.csv`: tokens of each expert (columns) in each layer (rows).
Balance is mean over max of the GPUs' loads, averaged over layers. A plan is made on the first half and judged on it,
then served on the second half; then the second half's loads come and few slots may move. Synthetic loads of 58 layers
x 256 experts, from a fixed seed, show the CPU time and the hierarchical policy. CPU is that of the whole call.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cordee.errors import InputError
from cordee.plan.experts import ExpertPlacement, Fleet, MoveCosts, balance_bound, checked_loads, plan_experts, rebalance
from cordee.plan.experts.moves import aligned
from cordee.plan.experts.prove import least_max_of_pairs

Floats, Ints = NDArray[np.float64], NDArray[np.int64]

SHAPES = ((8, 9), (16, 5), (32, 3), (48, 2))
"""GPUs and slots of each: real loads of 64 experts."""
MOVED = 0.13
SEED, DRAWS, TIMES = 7, 10_000, 5
SYNTHETIC = (
    Fleet(32, 288, nodes=4, groups=8), Fleet(32, 288), Fleet(144, 288), Fleet(320, 320), Fleet(320, 640)
)  # fmt: skip


def eplb(loads: Floats, fleet: Fleet) -> ExpertPlacement:
    """DeepSeek's algorithm from its README's description (github.com/deepseek-ai/EPLB), layer by layer.

    Global: each redundant replica to the expert with the largest load per replica; then the replicas, heaviest
    first, each to the GPU with the least load that has a free slot. Hierarchical, if groups divide over nodes: first
    pack the groups onto nodes in the same way, then do the above within each node.
    """
    experts = loads.shape[1]
    rows = []
    for load in loads:
        if fleet.groups > 1 and fleet.groups % fleet.nodes == 0:
            members = np.arange(experts).reshape(fleet.groups, -1)
            held = _pack(load[members].sum(axis=1), fleet.nodes)
            parts = [members[groups].ravel() for groups in held]
        else:
            parts = [np.arange(experts)]
        slots: list[list[int]] = []
        for part in parts:
            slots += _replicate_and_pack(load, part, fleet.replicas // len(parts), fleet.gpus // len(parts))
        rows.append(slots)
    return ExpertPlacement(fleet, np.array(rows), experts)


def _replicate_and_pack(load: Floats, part: Ints, replicas: int, gpus: int) -> list[list[int]]:
    count = np.ones(len(part))
    for _ in range(replicas - len(part)):
        count[np.argmax(load[part] / count)] += 1
    expert = np.repeat(part, count.astype(int))
    share = np.repeat(load[part] / count, count.astype(int))
    return [[int(expert[at]) for at in held] for held in _pack(share, gpus)]


def _pack(weights: Floats, bins: int) -> list[list[int]]:
    """Heaviest first, each to the lightest bin that is not full; bins hold equally many."""
    held: list[list[int]] = [[] for _ in range(bins)]
    load = [0.0] * bins
    for at in np.argsort(-weights, kind="stable"):
        free = [index for index in range(bins) if len(held[index]) < len(weights) // bins]
        chosen = min(free, key=lambda index: load[index])
        held[chosen].append(int(at))
        load[chosen] += float(weights[at])
    return held


def cpu_ms(call: Callable[[], Any]) -> tuple[Any, float]:
    """The answer, and the median CPU milliseconds of some calls."""
    taken = []
    for _ in range(TIMES):
        started = time.process_time()
        answer = call()
        taken.append((time.process_time() - started) * 1e3)
    return answer, float(np.median(taken))


def significance(gain: Floats) -> tuple[float, float]:
    """Bootstrap over layers: the interval that holds the mean gain with 95 %."""
    draw = np.random.default_rng(SEED).integers(0, len(gain), (DRAWS, len(gain)))
    low, high = np.quantile(gain[draw].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def pairs(folder: Path) -> list[tuple[str, Floats, Floats]]:
    """(task, first half, second half) of each pair in the folder."""
    found = []
    for path in sorted(folder.glob("*_first_half.csv")):
        task = path.name.removesuffix("_first_half.csv")
        other = folder / f"{task}_second_half.csv"
        if not other.exists():
            raise InputError(f"{path} has no {other.name} beside it", hint="give both halves of each task")
        first, second = (checked_loads(np.loadtxt(each, delimiter=",", ndmin=2)) for each in (path, other))
        if first.shape != second.shape:
            shapes = f"{first.shape[0]} x {first.shape[1]} and {second.shape[0]} x {second.shape[1]}"
            raise InputError(f"the halves of {task} are {shapes}", hint="both need the same layers and experts")
        found.append((task, first, second))
    if not found:
        raise InputError(f"{folder} has no *_first_half.csv", hint="give a folder with pairs of loads")
    return found


def one_task(task: str, first: Floats, second: Floats, fleet: Fleet, *, effort: float, prove: bool) -> dict[str, Any]:
    """One task on one fleet: in sample, out of sample, and moved."""
    base, base_ms = cpu_ms(lambda: eplb(first, fleet))
    plan, plan_ms = cpu_ms(lambda: plan_experts(first, fleet, effort=effort))
    bound = balance_bound(first, fleet)
    if prove:
        least = least_max_of_pairs(first, fleet, plan.gpu_loads(first).max(axis=1))
        bound = first.sum(axis=1) / fleet.gpus / least
    in_base, in_plan = base.balance(first), plan.balance(first)
    out_base, out_plan = base.balance(second), plan.balance(second)
    # Whether to move at all, by the noise test; then what few moves reach if the counts are taken as they are.
    asked = rebalance(second, plan, moved_fraction_max=MOVED)
    forced, moves_ms = cpu_ms(
        lambda: rebalance(second, plan, MoveCosts(horizon_s=1e9), moved_fraction_max=MOVED, trust=True)
    )  # fmt: skip
    fresh_base, fresh = eplb(second, fleet), plan_experts(second, fleet, effort=effort)
    return {
        "task": task,
        "gpus": fleet.gpus,
        "slots": fleet.slots,
        "in_eplb": float(in_base.mean()),
        "in_cordee": float(in_plan.mean()),
        "bound": float(bound.mean()),
        "layers_worse_than_eplb": int((in_plan < in_base - 1e-12).sum()),
        "out_eplb": float(out_base.mean()),
        "out_cordee": float(out_plan.mean()),
        "out_gain": float((out_plan - out_base).mean()),
        "out_gain_95": significance(out_plan - out_base),
        "cpu_ms_eplb": base_ms,
        "cpu_ms_cordee": plan_ms,
        "answer": asked.sentence,
        "layers_beyond_noise": asked.layers_beyond_noise,
        "few_moves": float(forced.balance_found.mean()),
        "few_moves_fraction": forced.moved_slots / plan.slots.size,
        "few_moves_cpu_ms": moves_ms,
        "fresh_eplb": float(fresh_base.balance(second).mean()),
        "fresh_eplb_moved_fraction": float((fresh_base.slots != base.slots).mean()),
        "fresh_cordee_moved_fraction": float((aligned(plan.slots, fresh.slots) != plan.slots).mean()),
    }


def synthetic(effort: float) -> list[dict[str, Any]]:
    """58 layers x 256 experts: log-normal loads, then each load times e to a normal of 0.2: CPU, balance, moves."""
    rows = []
    for sigma in (0.5, 1.0):
        draw = np.random.default_rng(SEED)
        first = np.round(1000 * draw.lognormal(0, sigma, (58, 256))) + 1
        second = np.round(first * draw.lognormal(0, 0.2, first.shape))
        for fleet in SYNTHETIC:
            started = time.process_time()
            base = eplb(first, fleet)
            base_ms = (time.process_time() - started) * 1e3
            plan, plan_ms = cpu_ms(lambda: plan_experts(first, fleet, effort=effort))  # noqa: B023
            moved, moved_ms = cpu_ms(lambda: rebalance(second, plan, moved_fraction_max=MOVED))  # noqa: B023
            in_base, in_plan = base.balance(first), plan.balance(first)
            rows.append(
                {
                    "sigma": sigma,
                    "gpus": fleet.gpus,
                    "slots": fleet.slots,
                    "policy": "hierarchical" if fleet.domains > 1 else "global",
                    "in_eplb": float(in_base.mean()),
                    "in_cordee": float(in_plan.mean()),
                    "bound": float(balance_bound(first, fleet).mean()),
                    "layers_worse_than_eplb": int((in_plan < in_base - 1e-12).sum()),
                    "cpu_ms_eplb": base_ms,
                    "cpu_ms_cordee": plan_ms,
                    "drifted": float(moved.balance_before.mean()),
                    "few_moves": float(moved.balance_found.mean()),
                    "few_moves_fraction": moved.moved_slots / plan.slots.size,
                    "few_moves_cpu_ms": moved_ms,
                    "drifted_bound": float(balance_bound(second, fleet).mean()),
                }
            )
    return rows


def told(real: list[dict[str, Any]], made: list[dict[str, Any]]) -> None:
    """The tables."""
    print("in sample: planned and judged on the first half         out of sample: served on the second half")
    print("task        GPUs x slots  EPLB   Cordee  bound  worse   EPLB   Cordee  gain, points (95 %)     CPU ms, both")
    for row in real:
        low, high = (100 * each for each in row["out_gain_95"])
        print(
            f"{row['task']:<12}{row['gpus']:>4} x {row['slots']:<5}{row['in_eplb']:>8.4f}{row['in_cordee']:>8.4f}"
            f"{row['bound']:>8.4f}{row['layers_worse_than_eplb']:>5}{row['out_eplb']:>9.4f}{row['out_cordee']:>8.4f}"
            f"{100 * row['out_gain']:>7.2f} ({low:+.2f} to {high:+.2f})"
            f"{row['cpu_ms_eplb']:>10.0f}{row['cpu_ms_cordee']:>6.0f}"
        )
    for gpus, slots in SHAPES:
        gains = [100 * row["out_gain"] for row in real if (row["gpus"], row["slots"]) == (gpus, slots)]
        print(f"  {gpus} x {slots}: mean gain over tasks {np.mean(gains):+.2f} points")
    print("\nthe second half's loads have come: few moves (at most 13 % of slots, counts taken as they are)")
    print("task        GPUs x slots  balance  moved  CPU ms   EPLB anew: balance  moved   with the noise test")
    for row in real:
        print(
            f"{row['task']:<12}{row['gpus']:>4} x {row['slots']:<5}{row['few_moves']:>9.4f}"
            f"{row['few_moves_fraction']:>7.1%}{row['few_moves_cpu_ms']:>7.0f}{row['fresh_eplb']:>19.4f}{row['fresh_eplb_moved_fraction']:>8.1%}"
            f"   {row['layers_beyond_noise']} layers: {row['answer'].split(':')[0]}"
        )
    print(
        "\nsynthetic, 58 layers x 256 experts       in sample                      CPU ms        after drift, few moves"
    )
    print(
        "sigma GPUs x slots              EPLB  Cordee   bound worse    EPLB Cordee    from      to   bound moved CPU ms"
    )
    for row in made:
        print(
            f"{row['sigma']:<5}{row['gpus']:>6} x {row['slots']:<3}{row['policy']:<13}{row['in_eplb']:>9.4f}"
            f"{row['in_cordee']:>8.4f}{row['bound']:>8.4f}{row['layers_worse_than_eplb']:>5}{row['cpu_ms_eplb']:>9.0f}"
            f"{row['cpu_ms_cordee']:>7.0f}{row['drifted']:>9.4f}{row['few_moves']:>8.4f}{row['drifted_bound']:>8.4f}"
            f"{row['few_moves_fraction']:>7.1%}{row['few_moves_cpu_ms']:>7.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--effort", type=float, default=1.0, help="search for replica counts at two slots a GPU")
    parser.add_argument("--prove", action="store_true", help="the tighter bound at two slots a GPU; needs scipy")
    args = parser.parse_args()
    try:
        tasks = pairs(args.folder)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    real = [
        one_task(task, first, second, Fleet(gpus, gpus * slots), effort=args.effort, prove=args.prove)
        for gpus, slots in SHAPES
        for task, first, second in tasks
    ]
    made = synthetic(args.effort)
    if args.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        print(json.dumps({**versions, "effort": args.effort, "real": real, "synthetic": made}, indent=2))
        return
    told(real, made)


if __name__ == "__main__":
    main()
