"""How far the planner is from published memory of LoRA and QLoRA runs: `adapters.py FILE... [--json]`.

Files have the columns of `published_training.csv`; the rows are those whose note says `mode LoRA` or `mode QLoRA`, the
rank and the targets. Errors are (predicted - measured) / measured; nothing is fitted to these rows.
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cordee.hardware.load import load_catalogue
from cordee.plan.memory import rank_memory
from cordee.plan.training import BASES, LINEARS, Adapters, Optimizer, Training, find_optimizer
from published import Published, memory_bytes, read_published

# Metrics of memory, and the planner's total that each is held against.
TOTALS = {"peak_mem_gib": "allocated_bytes", "peak_reserved_gib": "held_bytes"}


@dataclass(frozen=True)
class Scored:
    """One configuration: the error of its memory (None if it ran out), and whether the planner refuses it."""

    config_id: str
    source: str
    error: float | None
    refused: bool
    measured_gib: float | None
    predicted_gib: float


def score(paths: Sequence[Path]) -> list[Scored]:
    """Return every run with adapters and a memory, or one that ran out of it."""
    catalogue, found = load_catalogue(), []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            told = {row["config_id"]: row for row in csv.DictReader(file)}
        for run in read_published(path, catalogue)[0]:
            if re.search(r"\bmode Q?LoRA\b", run.note) and {*TOTALS, "oom"} & {*run.metrics}:
                row = told[run.config_id]
                found.append(_score(run, _training(run, row["dtype"], row["framework"])))
    return found


def _score(run: Published, training: Training) -> Scored:
    layout = replace(run.layout, offload="activations") if re.search(r"\boffload\b", run.note) else run.layout
    memory = rank_memory(run.shape, layout, training)
    assert run.gpu is not None, f"{run.gpu_type} is not in the catalogue"
    refused = memory.total_bytes > run.gpu.visible_bytes
    metric = next((name for name in TOTALS if name in run.metrics), None)
    if metric is None:
        return Scored(run.config_id, run.source, None, refused, None, memory.total_bytes / 2**30)
    measured = memory_bytes(metric, run.metrics[metric])
    predicted = getattr(memory.worst, TOTALS[metric])
    error = (predicted - measured) / measured
    return Scored(run.config_id, run.source, error, refused, measured / 2**30, predicted / 2**30)


def _training(run: Published, dtype: str, framework: str) -> Training:
    """The row's training with its adapters. Targets that are not said are all; pure 16-bit runs have 16-bit adapters.

    torchtune trains in pure bf16, its NF4 is doubly quantised (torchao's `to_nf4`), and its loss goes over the output
    in chunks, so that fp32 logits are those of one chunk: as a fused loss.

    Lightning Fabric makes logits fp32 (`HalfPrecision.convert_output`), of which the loss keeps log-probabilities: 8
    bytes. It quantises every linear layer, by bitsandbytes 0.41 with this torch: weights come back in fp16 before they
    are bf16, and products keep their inputs. Its FSDP is the first. LitGPT's `finetune/lora.py` has a dropout of 0.05.
    """
    note, pure = run.note, "bf16-true" in dtype or "torchtune" in framework
    fabric = "Lightning Fabric" in framework
    rank = re.search(r"\br=(\d+)", note)
    on = re.search(r" on ([\w/, ]+?)[;,]? (?:\d|samples|longest)|all linear", note)
    text = on[0] if on else ""
    names = LINEARS if not on or "all linear" in text else ("q", "v") if "q,v" in text else ("q", "k", "v")
    double = "nf4-dq" in dtype or "torchtune" in framework
    four = re.search("nf4|int4", dtype) or "QLoRA nf4" in note
    base = BASES[("nf4-double" if double else "nf4") if four else "int8" if "int8" in dtype else "bf16"]
    adapters = Adapters(
        rank=int(rank[1]) if rank else 8,
        targets=tuple(name for name in names if name != "gate" or run.shape.gated),
        base=replace(base, keeps_inputs=True, head=True, copies=2) if fabric and four else base,
        dropout=fabric,
        joined=fabric,
    )
    optimizer = Optimizer("adamw in 16 bits", 2, 2, 0, 4) if pure else find_optimizer("adamw", "fp32")
    return replace(
        run.training,
        adapters=adapters,
        optimizer=optimizer,
        precision="bf16",
        flash="eager attention" not in framework,
        loss="fused" if "torchtune" in framework else "parallel" if fabric else run.training.loss,
        tuning=replace(run.training.tuning, flat=fabric),
    )


def report(rows: Sequence[Scored]) -> dict[str, Any]:
    """Errors by source and of all, and the verdicts on what ran and what ran out of memory."""
    sources: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.error is not None:
            sources[row.source].append(row.error)
            sources["all"].append(row.error)
    ran = [row for row in rows if row.error is not None]
    out = [row for row in rows if row.error is None]
    return {
        "sources": {name: _summary(errors) for name, errors in sources.items()},
        "ran": {"n": len(ran), "refused": [row.config_id for row in ran if row.refused]},
        "out_of_memory": {"n": len(out), "refused": sum(row.refused for row in out)},
        "details": [vars(row) for row in rows],
    }


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "n": len(sizes),
        "median": median(sizes),
        "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        "bias": median(errors),
        "most_under": min(errors),
        "most_over": max(errors),
    }


def main() -> None:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    told = report(score(given.files))
    if given.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{'source':34} {'n':>3} {'median':>7} {'p90':>7} {'bias':>7} {'under':>7} {'over':>7}  (absolute errors, %)")
    for name, row in told["sources"].items():
        shown = (row[key] * 100 for key in ("median", "p90", "bias", "most_under", "most_over"))
        print(f"{name:34} {row['n']:3} " + " ".join(f"{value:7.1f}" for value in shown))
    ran, out = told["ran"], told["out_of_memory"]
    print(f"{len(ran['refused'])} of {ran['n']} runs that ran are refused: {', '.join(ran['refused']) or 'none'}")
    print(f"{out['refused']} of {out['n']} runs that ran out of memory are refused")


if __name__ == "__main__":
    main()
