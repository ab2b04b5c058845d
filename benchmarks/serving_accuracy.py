"""How far the serving planner is from what engines logged: `serving_accuracy.py CSV... [--json]`.

A CSV with the columns of published_kv.csv is judged for memory; a trace of requests (JSON lines or CSV with timestamp,
input_length and output_length) is served with both ways to allocate the cache. Without a file, a seeded sample is.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving import kv, paging, speed


def judge(path: Path) -> dict[str, Any]:
    """Return the report on one file, by the columns that it has."""
    if path.suffix == ".jsonl":
        return {"kind": "paging", **paging.report(path)}
    with path.open(newline="", encoding="utf-8") as file:
        columns = set(csv.DictReader(file).fieldnames or ())
    if columns >= kv.COLUMNS:
        return {"kind": "kv", **kv.report(path)}
    if columns >= paging.COLUMNS:
        return {"kind": "paging", **paging.report(path)}
    if columns >= speed.COLUMNS:
        return {"kind": "speed", **speed.report(path)}
    raise SystemExit(
        f"{path}: the columns are neither of published_kv.csv, nor of published_serving.csv, nor of requests"
    )


SHOW = {"kv": kv.show, "paging": paging.show, "speed": speed.show}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table for each file, or all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    reports = {str(path): judge(path) for path in options.files}
    if not options.files:
        requests = paging.sample()
        reports["a seeded sample"] = {
            "kind": "paging",
            "requests": len(requests),
            "allocators": paging.compare(requests),
        }
    if options.json:
        print(json.dumps(reports, indent=2))
        return
    for path, report in reports.items():
        print(f"# {path}\n")
        SHOW[report["kind"]](report)


if __name__ == "__main__":
    main()
