"""The plan against traces of real code, and traces against published peaks: `traced_memory.py [--json]`.

Each trace is a process of its own: Llama's code as torchtitan writes it, or transformers', as rank 0 of N fake ranks.
Errors are (plan - trace) / trace, and (trace - published) / published. Nothing is fitted. `at least` are the fewest
bytes with which a replay goes through, of the trace's tensors and of the formulas'; `constant` is what the search takes
in their place, 4.8 % above what is allocated.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory
from cordee.plan.replay import is_replayed, with_replay
from cordee.plan.settings import Settings
from cordee.train.trace_memory.answer import Traced
from cordee.train.trace_memory.question import Question
from cordee.units import GiB
from cordee.workload.load import load_config, load_shape
from cordee.workload.tuning import Trained


@dataclass(frozen=True)
class Case:
    """A model on so many ranks of FSDP2, or of DDP with `zero` 0 and 1.

    `published` is max_memory_reserved in GiB, where somebody measured it.
    """

    model: str
    ranks: int
    recompute: str = "none"
    seq_tokens: int = 8192
    micro_batch: int = 1
    accumulated: int = 1
    code: str = "torchtitan"
    replicas: int = 1
    published: float | None = None
    train: Trained = "full"
    targets: str = "all"
    zero: Literal[0, 1, 2, 3] = 3


# Published: pytorch/torchtitan@31a17bf benchmarks/llama3_h100_202412_torchtitan.md, its two eager rows of FSDP2.
CASES = (
    Case("llama-3.1-8b", 8, "selective", micro_batch=2, published=82.4),
    Case("llama-3.1-8b", 128, "selective", micro_batch=2, published=67.0),
    Case("llama-3.1-8b", 8, "full", seq_tokens=32768),
    Case("llama-3.1-8b", 8),
    Case("llama-3.1-8b", 64),
    Case("llama-3.1-8b", 8, replicas=2),
    Case("llama-3.1-8b", 8, accumulated=2),
    Case("llama-3-70b", 64, "full"),
    Case("llama-3-70b", 64),
    Case("llama-3-405b", 512, "full"),
    Case("qwen2.5-7b", 8),
    Case("llama-3.1-8b", 8, code="hf"),
    Case("llama-3.1-8b", 64, "full", code="hf"),
    Case("qwen2.5-7b", 8, code="hf"),
    Case("llama-3.1-8b", 8, seq_tokens=2048, accumulated=2, zero=0),
    Case("llama-3.1-8b", 8, seq_tokens=2048, zero=1),
    Case("llama-3.1-8b", 8, "selective", accumulated=2, zero=1),
    Case("llama-3.1-8b", 8, "full", seq_tokens=2048, accumulated=2, zero=1),
    Case("llama-3.1-8b", 8, seq_tokens=2048, zero=2),
    Case("llama-3.1-8b", 8, seq_tokens=2048, accumulated=2, code="hf", zero=1),
    Case("llama-3-8b", 2, "full", seq_tokens=2048, accumulated=8, code="hf", train="qlora"),
    Case("llama-3-8b", 8, seq_tokens=4096, micro_batch=2, code="hf", train="qlora"),
    Case("llama-3-8b", 8, seq_tokens=4096, micro_batch=2, code="hf", train="lora"),
    Case("llama-3-8b", 8, "full", seq_tokens=4096, micro_batch=2, code="hf", train="lora"),
    Case("mistral-7b", 8, "full", seq_tokens=4096, micro_batch=4, code="hf", train="qlora"),
    Case("qwen2.5-0.5b", 8, seq_tokens=2048, code="hf", train="lora"),
    Case("llama-3-70b", 8, "full", seq_tokens=4096, code="hf", train="qlora"),
    Case("mixtral-8x7b", 8, "full", seq_tokens=4096, code="hf"),
    Case("mixtral-8x7b", 8, seq_tokens=4096, code="hf"),
    Case("mixtral-8x7b", 32, seq_tokens=4096, micro_batch=2, code="hf"),
    Case("mixtral-8x7b", 12, "full", seq_tokens=4096, code="hf"),
    Case("mixtral-8x7b", 8, seq_tokens=4096, code="hf", train="lora", targets="attention"),
    Case("mixtral-8x7b", 8, "full", seq_tokens=4096, code="hf", train="lora", targets="attention"),
    Case("mixtral-8x7b", 8, seq_tokens=4096, code="hf", train="qlora", targets="attention"),
    Case("mixtral-8x7b", 8, "full", seq_tokens=4096, code="hf", train="lora"),
    Case("qwen3-30b-a3b", 8, seq_tokens=4096, code="hf", train="lora", targets="attention"),
    Case("qwen3-30b-a3b", 8, "full", seq_tokens=4096, code="hf", train="lora"),
    Case("llama-3.1-8b", 8, "full", seq_tokens=2048),
    Case("llama-3.1-8b", 8, "full", seq_tokens=1024, accumulated=2),
    Case("llama-3.2-1b", 8, "full", seq_tokens=1024),
    Case("llama-3.2-1b", 8, code="hf"),
)


def compare(case: Case) -> dict[str, Any]:
    """One case: what was planned, traced and published, in GiB, and the errors."""
    shape, gpus = load_shape(case.model), case.ranks * case.replicas
    settings = Settings(
        seq_tokens=case.seq_tokens, global_batch=gpus * case.micro_batch * case.accumulated, model_code=case.code,
        train=case.train, targets=case.targets,
    )  # fmt: skip
    question = Question(
        config=load_config(case.model), code=case.code, seq_tokens=case.seq_tokens, micro_batch=case.micro_batch,
        micro_batches=min(2, case.accumulated), adapters=settings.adapters(shape), recompute=case.recompute,
        zero=case.zero, fsdp=case.ranks if case.zero >= 2 else 1,
        replicas=case.replicas * (1 if case.zero >= 2 else case.ranks),
        weights="mixed" if case.zero >= 2 else "autocast",
    )  # fmt: skip
    argv = [sys.executable, "-m", "cordee.train.trace_memory"]
    said = subprocess.run(
        argv, input=json.dumps(question.document()), capture_output=True, text=True, check=True
    ).stdout
    traced = Traced.read(json.loads(said))
    layout = Layout(
        dp=gpus, zero=case.zero, recompute=case.recompute, micro_batch=case.micro_batch,
        shard=case.ranks if case.replicas > 1 else None,
    )  # fmt: skip
    training = settings.training(shape, gpus)
    formulas = rank_memory(shape, layout, training)
    planned = with_replay(formulas, shape, layout, training).worst
    return {
        "model": case.model, "train": case.train, "targets": case.targets, "layout": str(layout),
        "tokens": case.seq_tokens, "code": case.code, "accumulated": case.accumulated, "peak": traced.peak.phase,
        "traced_allocated_gib": traced.allocated_bytes / GiB, "planned_allocated_gib": planned.allocated_bytes / GiB,
        "allocated_error": planned.allocated_bytes / traced.allocated_bytes - 1,
        "traced_needed_gib": traced.reserve.needed_bytes / GiB, "planned_needed_gib": planned.reserved_bytes / GiB,
        "needed_error": planned.reserved_bytes / traced.reserve.needed_bytes - 1,
        "is_replayed": is_replayed(shape, layout, training),
        "constant_error": formulas.worst.reserved_bytes / traced.reserve.needed_bytes - 1,
        "traced_reserved_gib": traced.reserve.reserved_bytes / GiB, "planned_reserved_gib": planned.held_bytes / GiB,
        "reserved_error": planned.held_bytes / traced.reserve.reserved_bytes - 1,
        "published_reserved_gib": case.published,
        "trace_error": None if case.published is None else traced.reserve.reserved_bytes / GiB / case.published - 1,
        "cpu_s": traced.cpu_s,
    }  # fmt: skip


def main() -> None:
    """Compare all cases, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="models with this in their name, or lora, qlora")
    given = parser.parse_args()
    rows = [compare(case) for case in CASES if given.only in f"{case.model} {case.train}"]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    columns = (
        ("allocated", 10), ("plan", 8), ("off", 8), ("reserved", 10), ("plan", 8), ("off", 8), ("at least", 10),
        ("plan", 8), ("off", 8), ("constant", 10), ("published", 10), ("trace off", 10), ("CPU-s", 7),
    )  # fmt: skip
    print(f"{'model':13}{'layout':26}{'tokens':>7} {'code':11}" + "".join(f"{name:>{wide}}" for name, wide in columns))
    for row in rows:
        name = row["layout"] + (f" x{row['accumulated']}" if row["accumulated"] > 1 else "")
        name += "" if row["train"] == "full" else f" {row['train']} {row['targets']}"
        print(
            f"{row['model']:13}{name:26}{row['tokens']:7d} {row['code']:11}"
            f"{row['traced_allocated_gib']:10.2f}{row['planned_allocated_gib']:8.2f}{row['allocated_error']:+8.2%}"
            f"{row['traced_reserved_gib']:10.2f}{row['planned_reserved_gib']:8.2f}{row['reserved_error']:+8.2%}"
            f"{row['traced_needed_gib']:10.2f}{row['planned_needed_gib']:8.2f}{row['needed_error']:+8.2%}"
            f"{row['constant_error']:+10.2%}"
            + ("" if row["published_reserved_gib"] is None else
               f"{row['published_reserved_gib']:10.1f}{row['trace_error']:+10.2%}").ljust(20)
            + f"{row['cpu_s']:7.1f}"
        )  # fmt: skip


if __name__ == "__main__":
    main()
