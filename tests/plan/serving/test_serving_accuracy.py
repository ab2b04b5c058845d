"""`benchmarks/serving_accuracy.py`: rows of any file, errors where engines have logged, and what is not judged."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def judged(*files: Path) -> dict:
    """Return the JSON report on these files."""
    command = [sys.executable, str(BENCHMARKS / "serving_accuracy.py"), "--json", *map(str, files)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_logged_caches_of_one_version_are_met(tmp_path: Path) -> None:
    """vLLM 0.15 to 0.19 on H100, 33 runs of 20 models: llm-d-planner's accuracy report."""
    path = BENCHMARKS / "data" / "kv_vllm_0_19.csv"
    report = judged(path)[str(path)]
    assert (report["rows"], report["judged"], report["not_judged"]) == (33, 33, {})
    assert report["dense"]["median"] < 0.002
    assert abs(report["dense"]["worst"]) < 0.03
    assert report["hybrid"]["median"] < 0.02
    assert report["dense"]["inside"] == report["dense"]["n"]
    assert report["refusals"]["wrong"] == []
    # The versions before 0.17 are not what these constants come from.
    assert report["dense_held_out"]["n"] == 2
    assert abs(report["dense_held_out"]["worst"]) < 0.002


def test_rows_are_counted_that_cannot_be_judged(tmp_path: Path) -> None:
    path = BENCHMARKS / "data" / "kv_vllm_0_19.csv"
    header, first = path.read_text().splitlines()[:2]
    rows = [first.replace("Qwen3-14B", "Nobody-7B"), first.replace(",0.95,", ",,"), first.replace(",vllm,", ",other,")]
    copy = tmp_path / "rows.csv"
    copy.write_text("\n".join([header, *rows]) + "\n")
    report = judged(copy)[str(copy)]
    assert report["rows"] == 3
    assert report["judged"] == 0
    assert sum(report["not_judged"].values()) == 2
    # Without a stated utilisation a row is judged at the engine's default, apart from all other figures.
    assert report["fraction_assumed"]["dense"]["n"] == 1
    assert report["dense"]["n"] == report["dense_held_out"]["n"] == 0


SPEED = """source,model,gpu,n_gpus,engine,precision,parallelism,isl,osl,metric,value
blog,Llama-3.3-70B,H100,1,vLLM 0.18,FP8,TP1,512,256,output_throughput_conc1,120
page,LLaMA-7B,H100,1,TensorRT-LLM 0.5,FP8 batch=64 (static),TP1,128,128,output_throughput,9193
page,LLaMA-7B,H100,1,TensorRT-LLM 0.5,FP8 batch=1 (static),TP1,2048,1,ttft,36
page,Mixtral-8x7B,H100,2,TensorRT-LLM 0.9,FP8 batch=1 (static),TP2,2048,1,ttft,89.5
page,LLaMA-70B,A10,1,TensorRT-LLM 0.5,FP8,TP1,128,128,output_throughput,1
"""


def test_claims_above_the_roofline_are_refusals_and_static_batches_have_a_time_per_token(tmp_path: Path) -> None:
    """70 GB of weights pass 3.35 TB/s at most 48 times a second; 64 answers at 9,193 tokens/s take 6.96 ms a token."""
    path = tmp_path / "speed.csv"
    path.write_text(SPEED)
    report = judged(path)[str(path)]
    able = report["feasibility"]
    assert (able["rows"], able["feasible"], able["impossible"], able["below_what_is_claimed"]) == (3, 1, 1, 1)
    assert [each["reason"] for each in able["refused"]] == ["above the nameplate's roofline", "does not fit"]
    assert able["refused"][0]["roofline"] < 48
    assert able["wrongly_refused"] == 1
    (cell,) = (each for each in report["cells"] if "7B" in each["cell"])
    assert report["tpot"]["page"]["rows"] == report["ttft"]["page"]["rows"] == 1
    assert abs(report["ttft"]["page"]["worst"]) < 20
    assert report["not_judged"] == {"experts under a prompt of one repeated token": 1}
    assert abs(report["tpot"]["page"]["worst"] - 100 * (9193 / cell["predicted"] - 1)) < 1e-6
