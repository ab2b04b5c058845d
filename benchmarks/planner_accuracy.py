"""How far the planner is from published measurements: `planner_accuracy.py CSV... [--held-out CSV...]`; time next door.

Errors are (predicted - measured) / measured. Nothing of memory is fitted here: its constants from measurements are the
allocators' reserves and the bytes of contexts, at the top of `plan/buffers.py`.
"""

import argparse
import importlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cordee.hardware.load import load_catalogue
from cordee.plan.memory import RankMemory, rank_memory
from cordee.plan.replay import with_replay
from cordee.units import GB
from published import Published, memory_bytes, read_published


def _states(memory: RankMemory) -> int:
    first = memory.stages[0]
    return first.weights_bytes + first.gradients_bytes + first.optimizer_bytes


def _activations(memory: RankMemory) -> float:
    return max(float(moment.activations_bytes) for moment in memory.timelines[0])


# What only a run that did not go out of memory has.
SPEEDS = {"step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "samples_per_gpu_per_s"}
ADAPTERS = re.compile(r"\bmode (Q?LoRA|LLaMA-Adapter)\b")
# Activations in per cent of those with tensor parallelism and nothing else.
SHARE_METRIC = "activation_mem_pct_of_none"
# What each metric of memory means, and which of the planner's numbers answers it.
LEVELS = {
    "peak_mem_min_rank_gib": ("allocated, emptiest rank", lambda m: min(s.allocated_bytes for s in m.stages)),
    "peak_reserved_gib": ("reserved", lambda m: max(s.held_bytes for s in m.stages)),
    "activation_mem_gib": ("activations, first stage", _activations),
    "model_state_mem_gib": ("states, first stage", _states),
}


def seen(run: Published, memory: RankMemory, metric: str) -> tuple[str, float] | None:
    """The planner's number for a metric of memory; a peak that does not say what it counts is taken as reserved."""
    unit = run.units[metric]
    if metric == SHARE_METRIC:
        plain = rank_memory(run.shape, replace(run.layout, recompute="none", sp=False), run.training)
        return "activations over those of tp alone", _activations(memory) / _activations(plain)
    if metric in LEVELS:
        name, pick = LEVELS[metric]
        return name, float(pick(memory))
    if metric not in ("peak_mem_gb", "peak_mem_gib"):
        return None
    if "nvidia-smi" in unit or "nvidia-smi" in run.note:
        return "nvidia-smi", min(float(max(s.seen_bytes for s in memory.stages)), _room(run))
    if "allocated" in unit:
        return "allocated", float(max(stage.allocated_bytes for stage in memory.stages))
    told = "reserved" if "reserved" in unit else "reserved (not said)"
    return told, min(float(max(stage.held_bytes for stage in memory.stages)), _room(run))


def _room(run: Published) -> float:
    return run.gpu.visible_bytes if run.gpu is not None else float("inf")


def memory_report(runs: Iterable[Published]) -> dict[str, Any]:
    """Per source and kind of number: n, mean absolute error, bias, worst under and over; and what ran out of memory."""
    errors: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    caught = missed = refused = held = 0
    details = []
    unscored: dict[str, int] = defaultdict(int)
    ran: dict[str, list[bool]] = defaultdict(list)
    for run in runs:
        known = run.zero_said and run.recompute_said and run.optimizer_said and not ADAPTERS.search(run.note)
        if run.gpu is not None and known and SPEEDS & set(run.metrics):
            ran[run.source].append(
                rank_memory(run.shape, run.layout, run.training).total_bytes <= run.gpu.visible_bytes
            )
        wanted = [m for m in run.metrics if "mem" in m or m in ("oom", "peak_reserved_gib")]
        why = "" if run.zero_said else "the ZeRO stage is not said"
        why = why if run.optimizer_said else "the optimizer is not said"
        why = "the row contradicts itself (trust 3)" if run.trust > 2 else why
        why = "adapters, which adapters.py scores, or of another kind" if ADAPTERS.search(run.note) else why
        if why:
            unscored[why] += len(wanted)
            continue
        if not wanted:
            continue
        memory = with_replay(rank_memory(run.shape, run.layout, run.training), run.shape, run.layout, run.training)
        for metric in wanted:
            if metric == "oom":
                over = run.gpu is not None and memory.total_bytes > run.gpu.visible_bytes
                caught, missed = caught + over, missed + (not over)
                details.append(_detail(run, memory, "oom", 0.0, float(memory.total_bytes)))
                continue
            answer = seen(run, memory, metric)
            if answer is None:
                unscored[f"no number of ours answers {metric}"] += 1
                continue
            kind, predicted = answer
            value = run.metrics[metric]
            measured = value / 100 if metric == SHARE_METRIC else memory_bytes(metric, value)
            errors[run.source, kind].append((predicted / measured - 1, run.config_id))
            details.append(_detail(run, memory, kind, measured, predicted))
            if kind == "nvidia-smi" and run.gpu is not None:
                fits = memory.total_bytes <= run.gpu.visible_bytes
                held, refused = held + fits, refused + (not fits)
    return {
        "sources": {f"{source}: {kind}": _summary(found) for (source, kind), found in sorted(errors.items())},
        "out_of_memory": {"caught": caught, "missed": missed, "fits_told": held, "falsely_refused": refused},
        "ran": {source: {"n": len(fits), "refused": fits.count(False)} for source, fits in sorted(ran.items())},
        "unscored": dict(unscored),
        "details": details,
    }


def _detail(run: Published, memory: RankMemory, kind: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "config_id": run.config_id,
        "source": run.source,
        "kind": kind,
        "layout": str(run.layout),
        "model": f"{run.shape.name} {run.shape.layers}x{run.shape.hidden}",
        "measured_gb": round(measured / GB, 3),
        "predicted_gb": round(predicted / GB, 3),
        "stage": memory.worst_stage,
        "event": memory.peak_event,
        "parts_gb": {name: round(size / GB, 2) for name, size in memory.worst.parts().items()},
    }


def _summary(errors: Sequence[tuple[float, str]]) -> dict[str, Any]:
    values = [error for error, _ in errors]
    return {
        "n": len(values),
        "mape": sum(map(abs, values)) / len(values),
        "bias": sum(values) / len(values),
        "most_under": min(0.0, *values),
        "most_over": max(0.0, *values),
        "worst": max(errors, key=lambda error: abs(error[0]))[1],
    }


def print_memory(report: dict[str, Any]) -> None:
    """The memory half as a table."""
    print("MEMORY  (predicted - measured) / measured, %")
    print(f"{'source: number':62} {'n':>4} {'MAPE':>6} {'bias':>6} {'under':>6} {'over':>6}  worst")
    for name, row in report["sources"].items():
        shown = (row[key] * 100 for key in ("mape", "bias", "most_under", "most_over"))
        print(f"{name:62} {row['n']:4d} " + " ".join(f"{value:6.2f}" for value in shown) + f"  {row['worst']}")
    told = report["out_of_memory"]
    print(
        f"out of memory: {told['caught']} of {told['caught'] + told['missed']} runs that did are refused; "
        f"{told['falsely_refused']} of {told['fits_told'] + told['falsely_refused']} that ran are refused too"
    )
    print("runs with a speed, whose recomputation, ZeRO stage and optimizer are said, that the planner would refuse:")
    print("  " + "; ".join(f"{source} {row['refused']} of {row['n']}" for source, row in report["ran"].items()))
    print(f"not scored: {_unscored(report['unscored'])}")


def _unscored(told: dict[str, int]) -> str:
    return "; ".join(f"{count} numbers: {why}" for why, count in told.items()) or "none"


def read_all(paths: Iterable[Path]) -> tuple[list[Published], dict[str, int]]:
    """All configurations of several files, and how many cannot be read, by reason."""
    runs: list[Published] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        found, left_out = read_published(path, load_catalogue())
        runs += found
        skipped.update(left_out)
    return runs, dict(skipped)


def main() -> None:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true", help="every memory row, with its peak's parts")
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="files that are scored and never fitted")
    given = parser.parse_args()
    runs, skipped = read_all(given.csv)
    unseen, more = read_all(given.held_out)
    runs, skipped = runs + unseen, dict(Counter(skipped) + Counter(more))
    told: dict[str, Any] = {"configurations": len(runs), "unreadable": skipped}
    time = importlib.import_module("planner_time") if given.only != "memory" else None
    if given.only != "time":
        told["memory"] = memory_report(runs)
    if time is not None:
        told["time"] = time.time_report(runs, {run.source for run in unseen})
    if given.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{len(runs)} configurations; unreadable: {skipped or 'none'}")
    if "memory" in told:
        print_memory(told["memory"])
        for row in told["memory"]["details"] if given.rows else ():
            print(*row.values(), sep=" | ")
    if time is not None:
        time.print_time(told["time"])


if __name__ == "__main__":
    main()
