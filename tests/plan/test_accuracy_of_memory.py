"""The accuracy benchmark's memory half on a table of three rows: what it reads, what it scores, what it leaves out."""

import csv
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cordee.hardware.load import load_catalogue

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Megatron-LM 0.14 on 8 B200s: MooreThreads/SimuMax 4dcaae5, docs/b200/b200_release_v1.2_summary.json.
LLAMA = {
    "config_id": "one", "source": "a lab", "trust": "1", "model": "Llama-70B, 12 layers", "layers": "12",
    "hidden": "8192", "ffn": "28672", "heads": "64", "kv_heads": "8", "head_dim": "128", "vocab": "128256",
    "seq_len": "4096", "arch_note": "swiglu,rmsnorm,untied", "gpu_type": "B200-SXM", "n_gpus": "8",
    "gpus_per_node": "8", "tp": "2", "pp": "1", "dp": "4", "cp": "1", "ep": "1", "zero_stage": "1",
    "sequence_parallel": "yes", "pp_schedule": "none", "recompute": "none", "microbatch": "1", "global_batch": "16",
    "dtype": "bf16", "framework": "Megatron-LM 0.14 + TE 2.11", "metric": "peak_mem_gib", "value": "60.68",
    "unit": "GiB max_memory_allocated", "primary": "1", "note": "fused CE",
}  # fmt: skip
COLUMNS = [
    *LLAMA, "source_ref", "verified", "params_b", "n_experts", "top_k", "moe_ffn", "n_shared", "vpp", "etp",
    "grad_accum",
]  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    import planner_accuracy  # A script beside the package: importable only from here.

    return planner_accuracy


def _report(benchmark: ModuleType, path: Path, *rows: dict[str, str]) -> dict:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    runs, _ = benchmark.read_published(path, load_catalogue())
    return benchmark.memory_report(runs)


def test_a_measured_peak_is_met(benchmark: ModuleType, tmp_path: Path) -> None:
    reserved = LLAMA | {"metric": "peak_reserved_gib", "value": "62.53", "unit": "GiB"}
    found = _report(benchmark, tmp_path / "rows.csv", LLAMA, reserved)["sources"]
    assert set(found) == {"a lab: allocated", "a lab: reserved"}
    assert found["a lab: allocated"]["mape"] < 0.005
    assert found["a lab: reserved"]["mape"] < 0.02


def test_recomputation_is_read_from_flops_where_a_word_names_no_tensors(benchmark: ModuleType, tmp_path: Path) -> None:
    fsdp = {"tp": "1", "dp": "8", "zero_stage": "3 (FSDP)", "recompute": "selective", "framework": "PyTorch FSDP"}
    told = [LLAMA | fsdp | {"metric": name, "value": value} for name, value in (("mfu", "36"), ("hfu", "42"))]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(told)
    [run], _ = benchmark.read_published(tmp_path / "rows.csv", load_catalogue())
    assert (run.layout.recompute, run.layout.recompute_layers) == ("full", 6)


def test_no_name_decides(benchmark: ModuleType, tmp_path: Path) -> None:
    renamed = LLAMA | {"config_id": "two", "source": "another", "model": "x", "source_ref": "y"}
    found = _report(benchmark, tmp_path / "rows.csv", LLAMA, renamed)["sources"]
    assert found["a lab: allocated"]["mape"] == found["another: allocated"]["mape"]


def test_what_ran_out_of_memory_is_counted_and_what_is_not_said_is_not_scored(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    over = LLAMA | {"config_id": "two", "layers": "80", "metric": "oom", "value": "1", "unit": ""}
    vague = LLAMA | {"config_id": "three", "zero_stage": "see flags"}
    found = _report(benchmark, tmp_path / "rows.csv", over, vague)
    assert (found["out_of_memory"]["caught"], found["out_of_memory"]["missed"]) == (1, 0)
    assert found["sources"] == {}
    assert found["unscored"] == {"the ZeRO stage is not said": 1}


def test_torchtitans_published_peaks(benchmark: ModuleType) -> None:
    # Twenty peaks of Llama 3.1 8B to 405B under FSDP, TP, PP and CP; the file names the tables they come from.
    runs, unread = benchmark.read_published(BENCHMARKS / "data" / "torchtitan_memory.csv", load_catalogue())
    assert len(runs) == 20 and not unread
    (found,) = benchmark.memory_report(runs)["sources"].values()
    assert found["n"] == 20 and found["mape"] < 0.05
    assert all(run.gpu is not None and run.gpu.memory_bytes in (96_000_000_000, 141_000_000_000) for run in runs)
