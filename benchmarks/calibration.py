"""Steps of transformers that a calibration never saw, on this CPU: planned with its tables against measured.

Rounds of calibration and steps alternate, so that both see the same neighbours. Every round's calibration plans every
configuration; its error is that of its plan in each round against the steps of the same round, and of the medians of
both over all rounds. A step's time is the lower quartile of its runs, as a point of the calibration is. Rounds whose
calibration the verb would refuse as too noisy are left out, and counted; if it would refuse all, all count. Times are
CPU seconds of one thread.

    python benchmarks/calibration.py --rounds 2 --limit 40 --json
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cordee.agent.calibration.check import PARTS, quiet
from cordee.agent.calibration.probes import records
from cordee.agent.calibration.session import Wanted, calibrate
from cordee.hardware.catalog import Gpu
from cordee.hardware.load import load_catalogue, load_home
from cordee.plan.layout import Layout
from cordee.plan.settings import Settings
from cordee.plan.step import step_time
from cordee.workload.families import shape_from_config


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "head_dim": hidden // heads, "rope_theta": 10_000.0, "hidden_act": "silu",
    }  # fmt: skip


LLAMA = {"model_type": "llama", "vocab_size": 8192, "tie_word_embeddings": False}
# name: (config, sequences, tokens). None was looked at while the planner's sums were written.
CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama h448 L5": (LLAMA | _sizes(448, 5, 7, 7, 1216), 1, 320),
    "llama h640 L3 GQA": (LLAMA | _sizes(640, 3, 10, 2, 1728), 2, 192),
    "llama h768 L2": (LLAMA | _sizes(768, 2, 12, 12, 2048), 1, 384),
    "llama h320 L10": (LLAMA | _sizes(320, 10, 5, 5, 864), 1, 256),
    "llama h512 L4 tied": (LLAMA | _sizes(512, 4, 8, 4, 1536) | {"tie_word_embeddings": True}, 3, 128),
    "llama h256 L6 vocab 20k": (LLAMA | _sizes(256, 6, 4, 2, 1024) | {"vocab_size": 20_000}, 2, 256),
    "mistral h576 L4": (LLAMA | _sizes(576, 4, 9, 3, 1536) | {"model_type": "mistral", "sliding_window": None}, 1, 448),
    "qwen2 h512 L5": (LLAMA | _sizes(512, 5, 8, 2, 1280) | {"model_type": "qwen2"}, 1, 256),
    "llama h1024 L1 long": (LLAMA | _sizes(1024, 1, 16, 16, 2816) | {"vocab_size": 4096}, 1, 640),
    "llama h384 L8 batch 4": (LLAMA | _sizes(384, 8, 6, 6, 1024), 4, 96),
}

# Five more, written down before pages and cold caches were looked at, with --held-out in place of the ten.
HELD_OUT: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama h256 L4 vocab 32k": (LLAMA | _sizes(256, 4, 4, 4, 704) | {"vocab_size": 32_000}, 1, 384),
    "qwen2 h384 L6 vocab 16k": (
        LLAMA | _sizes(384, 6, 6, 6, 1152) | {"model_type": "qwen2", "vocab_size": 16_384}, 2, 192
    ),
    "llama h768 L3 wide": (LLAMA | _sizes(768, 3, 12, 4, 3072), 1, 512),
    "mistral h512 L6 tied": (
        LLAMA | _sizes(512, 6, 8, 1, 1408)
        | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True}, 6, 64,
    ),
    "llama h192 L12 vocab 12k": (LLAMA | _sizes(192, 12, 3, 3, 512) | {"vocab_size": 12_000}, 1, 192),
}  # fmt: skip


def planned_s(gpu: Gpu, config: dict[str, Any], sequences: int, tokens: int) -> float:
    """Return the seconds of a step by this calibration's tables."""
    shape = shape_from_config(config, name="config")
    settings = Settings(seq_tokens=tokens, global_batch=sequences, precision="fp32")
    return float(step_time(shape, gpu, Layout(micro_batch=sequences), settings.training(shape, 1)).total_s)


def measured_s(config: dict[str, Any], sequences: int, tokens: int, steps: int) -> list[float]:
    """Return the CPU seconds of so many real steps, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        options = [f"--config={path}", f"--seq={tokens}", f"--batch={sequences}", "--layers=0", f"--steps={steps}"]
        return [sum(each[f"{part}_s"] for part in PARTS) for each in records("step", *options)]


def calibrated(limit_s: float) -> tuple[Gpu, dict[str, Any]]:
    """Return the CPU as one calibration has it, and what that cost and knew."""
    wanted = Wanted(
        gpu=None, gpus=0, threads=1, precision="fp32", limit_s=limit_s, storage=None, collectives=False, anyway=True
    )
    before = os.times()
    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(Path(folder), wanted, load_catalogue(), lambda said: None)
        gpu = load_home(Path(folder)).find_gpu(found.name)
    after, how = os.times(), found.quality
    assert how is not None, "it was judged"
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return gpu, {
        "cpu_s": cpu_s, "doubt": how.doubt, "spread": how.spread, "refused": how.is_noisy, "load": found.load,
        "points": how.points,
    }  # fmt: skip


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=40.0, help="CPU seconds of a calibration's sweeps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--held-out", action="store_true", help="the five of HELD_OUT in place of the ten")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    configs = HELD_OUT if given.held_out else CONFIGS
    planned: dict[str, list[float]] = {name: [] for name in configs}
    measured: dict[str, list[float]] = {name: [] for name in configs}
    costs = []
    for _ in range(given.rounds):
        gpu, cost = calibrated(given.limit)
        costs.append(cost)
        for name, (config, sequences, tokens) in configs.items():
            planned[name].append(planned_s(gpu, config, sequences, tokens))
            measured[name].append(quiet(measured_s(config, sequences, tokens, given.steps)))
    accepted = [at for at, cost in enumerate(costs) if not cost["refused"]]
    kept = accepted or list(range(given.rounds))
    rows = [_row(name, [planned[name][at] for at in kept], [measured[name][at] for at in kept]) for name in configs]
    answer = {
        "calibrations": costs,
        "accepted": len(accepted),
        "configs": rows,
        "mape": statistics.mean(abs(row["off"]) for row in rows),
        "within_10_percent": sum(abs(row["off"]) <= 0.1 for row in rows),
        "repeat": statistics.median(row["plans_differ"] for row in rows),
        "measured_repeat": statistics.median(row["measured_differ"] for row in rows),
    }
    print(json.dumps(answer, indent=2) if given.json else _text(answer))


def _row(name: str, planned: list[float], measured: list[float]) -> dict[str, Any]:
    expected, found = statistics.median(planned), statistics.median(measured)
    return {
        "config": name, "planned_s": expected, "measured_s": found, "off": expected / found - 1,
        "off_by_round": [one / other - 1 for one, other in zip(planned, measured, strict=True)],
        "plans_differ": max(planned) / min(planned) - 1, "measured_differ": max(measured) / min(measured) - 1,
    }  # fmt: skip


def _text(answer: dict[str, Any]) -> str:
    lines = [f"{'config':<26}{'planned':>9}{'measured':>10}{'off':>8}{'plans':>8}{'steps':>8}"]
    for row in answer["configs"]:
        lines.append(
            f"{row['config']:<26}{row['planned_s']:>9.3f}{row['measured_s']:>10.3f}{row['off']:>+8.1%}"
            f"{row['plans_differ']:>8.1%}{row['measured_differ']:>8.1%}"
        )
    lines.append(
        f"mean error {answer['mape']:.1%}, {answer['within_10_percent']} of {len(answer['configs'])} within 10 %"
    )
    lines.append(f"repeat to repeat: plans {answer['repeat']:.1%}, steps {answer['measured_repeat']:.1%}")
    for each in answer["calibrations"]:
        lines.append(
            f"a calibration: {each['cpu_s']:.0f} CPU-s, middle point known to {each['doubt']:.1%}, "
            f"load {each['load']:.1f}" + (", refused without --anyway" if each["refused"] else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
