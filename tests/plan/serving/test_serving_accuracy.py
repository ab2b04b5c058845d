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
    assert sum(report["not_judged"].values()) == 3
