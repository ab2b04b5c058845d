"""Memory of the KV cache, planned against logged: rows of published_kv.csv or of any file with its columns."""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cordee.errors import CordeeError
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.memory.kv import is_linear, kv_bytes_per_token
from cordee.plan.serving.memory.memory import ServingMemory, memory
from cordee.units import GiB
from cordee.workload.model import ModelShape
from serving.models import find_gpu, find_shape

COLUMNS = {"engine", "version", "model", "gpu", "tp", "gpu_memory_utilization", "kv_cache_gib_reported"}
# The first that is found in the column decides; an empty one or "auto" means 16 bits.
WEIGHT_FORMATS = (
    ("nvfp4|fp4 ", "nvfp4"), ("mxfp4", "mxfp4"), ("awq|gptq|int4|w4a16|autoround", "int4"), ("fp8", "fp8"),
    ("int8|w8a8", "int8"), ("fp32|float32", "fp32"), ("bf16|bfloat16|fp16|float16|half|auto|^$", "bf16"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row that can be judged."""

    source: str
    label: str
    case: ServingCase
    logged_gib: float | None
    logged_tokens: int | None
    loaded_gib: float | None
    refused: bool
    context_stated: bool
    version_stated: bool
    fraction_stated: bool


@dataclass(frozen=True)
class Judged:
    """A row with its prediction; errors are (predicted - logged) / logged."""

    row: Row
    found: ServingMemory
    dense: bool
    error: float | None
    error_tokens: float | None
    naive: float | None
    inside: bool | None
    held_out: bool


def read(path: Path) -> tuple[list[Row], Counter[str]]:
    """Return the rows that can be judged, and how many cannot, by reason."""
    rows, skipped = [], Counter[str]()
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = _row(line)
            if isinstance(row, Row):
                rows.append(row)
            else:
                skipped[row] += 1
    return rows, skipped


def _row(line: Mapping[str, str]) -> Row | str:
    note, version = line.get("note") or "", line["version"] or ""
    refused = re.search(r"refused|did not start|does not start", note) is not None
    logged_gib, tokens = _number(line["kv_cache_gib_reported"]), _number(line["kv_tokens_reported"])
    if logged_gib is None and tokens is None and not refused:
        return "nothing logged"
    if line["engine"] not in ("vllm", "sglang"):
        return "an engine or a fork that is not planned"
    if not line["model"] or not line["gpu"]:
        return "no model or no GPU"
    fraction = _number(line["gpu_memory_utilization"])
    shape = find_shape(line["model"])
    if shape is None:
        return f"shape not known: {line['model']}"
    gpu = find_gpu(line["gpu"] + " " + _stated_total(note), _number(line["gpu_memory_gb"]))
    dtype = "mxfp4" if shape.family == "gpt_oss" and not line["dtype"] else line["dtype"].lower()
    weights = next((name for pattern, name in WEIGHT_FORMATS if re.search(pattern, dtype)), None)
    if gpu is None or weights is None:
        return f"GPU or format not known: {line['gpu']}, {line['dtype']}"
    numbers = re.search(r"\d+(?:\.\d+)+", version)
    try:
        # In 0.8, the older engine (V0) could still be chosen.
        engine = find_engine(line["engine"], "0.7" if "V0" in version else numbers[0] if numbers else None)
    except CordeeError as error:
        return error.message
    stated = fraction is not None
    fraction = engine.memory_fraction if fraction is None else fraction
    context = _number(line["max_model_len"])
    limits = engine.limits(line["gpu"], gpu[1], round(context or shape.positions))
    kv = KV[_kv_format(line["kv_dtype"])]
    case = ServingCase(
        shape=shape, gpu=gpu[0], layout=_layout(line, note), weights=WEIGHTS[weights], kv=kv,
        engine=engine, max_sequences=_said(note, "max_num_seqs") or limits[0],
        max_batched_tokens=_said(note, "mbt|max_num_batched_tokens") or limits[1],
        max_context_tokens=round(context or shape.positions), memory_fraction=fraction, visible_bytes=gpu[1],
        eager=re.search(r"\beager\b|enforce_eager", note) is not None,
        draft_weights_bytes=_prediction_bytes(line["model"], shape, round(_number(line["tp"]) or 1)),
    )  # fmt: skip
    label = f"{line['model']} on {line['gpu']} x{line['n_gpus'] or 1}, {line['engine']} {version}"
    loaded = _number(line["weights_gib_reported"])
    if loaded and logged_gib and _contradicts(note, fraction * gpu[1] / GiB, loaded + logged_gib):
        return "its parts are not what gpu_memory_utilization gives"
    return Row(
        line["source_url"], label, case, logged_gib, None if tokens is None else round(tokens), loaded, refused,
        context is not None, numbers is not None or line["engine"] != "vllm", stated,
    )  # fmt: skip


def _contradicts(note: str, usable_gib: float, weights_and_kv_gib: float) -> bool:
    """Return whether the parts that a row lists miss what the engine may use by more than 1.5 GiB."""
    activation, other = (re.search(rf"{name} ([0-9.]+)", note) for name in ("activation", "non_torch"))
    if activation is None or other is None:
        return False
    return abs(usable_gib - weights_and_kv_gib - float(activation[1]) - float(other[1])) > 1.5


def _prediction_bytes(model: str, shape: ModelShape, tp: int) -> int:
    """Return the bytes of a head that predicts further tokens (MTP): a layer and what joins its two inputs, 16 bit."""
    if not re.search(r"\bMTP\b", model):
        return 0
    return round((shape.layer(shape.layers - 1).total + 2 * shape.hidden**2) * 2 / tp)


def _layout(line: Mapping[str, str], note: str) -> ServingLayout:
    size = {axis: round(_number(line.get(axis, "")) or 1) for axis in ("tp", "pp")}
    dp = re.search(r"DP(\d+)", note)
    return ServingLayout(size["tp"], size["pp"], int(dp[1]) if dp else 1, ep=bool(re.search(r"\bEP\b", note)))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _said(note: str, name: str) -> int | None:
    found = re.search(rf"(?:{name})[ =:]+([\d,]+)", note)
    return int(found[1].replace(",", "")) if found else None


def _stated_total(note: str) -> str:
    found = re.search(r"total ([0-9.]+)", note)
    return f"({found[1]} GiB)" if found else ""


def _kv_format(text: str) -> str:
    lowered = text.lower()
    return next((name for name in ("fp8", "int8", "nvfp4") if lowered.startswith(name)), "bf16")


def judge(row: Row) -> Judged:
    """Return the row with its prediction, in GiB, and in tokens where each token takes the same bytes."""
    found = memory(row.case)
    dense = is_linear(row.case.shape)
    logged = row.logged_gib
    per_token = kv_bytes_per_token(row.case, found.stage)
    if logged is None and dense and row.logged_tokens is not None:
        logged = row.logged_tokens / row.case.layout.dp * per_token / GiB
    tokens_error = None
    if dense and row.logged_tokens:
        tokens_error = found.kv_tokens / row.logged_tokens - 1
    if logged is None or logged <= 0:
        return Judged(row, found, dense, None, tokens_error, None, None, _held_out(row))
    naive = row.case.memory_fraction * (row.case.visible_bytes or 0) - found.weights_bytes
    inside = found.kv_low_bytes <= logged * GiB <= found.kv_high_bytes
    error = found.kv_bytes / GiB / logged - 1
    return Judged(row, found, dense, error, tokens_error, naive / GiB / logged - 1, inside, _held_out(row))


def _has_v1(case: ServingCase) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", case.engine.version)))
    return case.engine.name == "vllm" and numbers >= (0, 8)


def _held_out(row: Row) -> bool:
    return row.source not in row.case.engine.memory.fitted_on


def report(path: Path) -> dict[str, Any]:
    """Return errors by source and in all, refusals, coverage of the interval, and what was not judged."""
    rows, skipped = read(path)
    judged, defaulted, broken = list[Judged](), list[Judged](), Counter[str]()
    for row in rows:
        try:
            (judged if row.fraction_stated else defaulted).append(judge(row))
        except CordeeError as error:
            broken[error.message] += 1
    sources = defaultdict(list)
    for each in judged:
        sources[each.row.source].append(each)
    stated = [each for each in judged if each.row.version_stated]
    dense = [each for each in stated if each.dense]
    weights = [
        each.found.weights_bytes / GiB / each.row.loaded_gib - 1
        for each in judged
        if each.row.loaded_gib and "non-torch" not in each.row.label
    ]
    return {
        "rows": len(rows) + sum(skipped.values()),
        "judged": sum(each.error is not None for each in judged),
        "not_judged": dict(skipped + broken),
        "dense": _summary(dense),
        "dense_held_out": _summary(each for each in dense if each.held_out),
        "dense_v1": _summary(each for each in dense if _has_v1(each.row.case)),
        "hybrid": _summary(each for each in stated if not each.dense),
        "assumed": _summary(each for each in judged if not each.row.version_stated),
        "fraction_assumed": {
            "dense": _summary(each for each in defaulted if each.dense),
            "hybrid": _summary(each for each in defaulted if not each.dense),
            "refusals": _refusals(defaulted),
            "within": [(limit, _within(defaulted, limit)) for limit in (0.05, 0.1, 0.2)],
            "details": [_detail(each) for each in defaulted],
        },
        "weights": {"n": len(weights), "median": _median(weights), "worst": _worst(weights)},
        "refusals": _refusals(judged),
        "sources": {source: _summary(each) for source, each in sorted(sources.items())},
        "details": [_detail(each) for each in judged],
    }


def _median(errors: Sequence[float]) -> float | None:
    return median(map(abs, errors)) if errors else None


def _worst(errors: Sequence[float]) -> float | None:
    return max(errors, key=abs) if errors else None


def _within(judged: Sequence[Judged], limit: float) -> int:
    return sum(each.error is not None and abs(each.error) <= limit for each in judged)


def _summary(found: Iterable[Judged]) -> dict[str, Any]:
    with_error = [each for each in found if each.error is not None]
    ours, naive = [each.error or 0.0 for each in with_error], [each.naive or 0.0 for each in with_error]
    return {
        "n": len(with_error),
        "median": _median(ours),
        "worst": _worst(ours),
        "naive_median": _median(naive),
        "naive_worst": _worst(naive),
        "inside": sum(bool(each.inside) for each in with_error),
    }


def _refusals(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how many refusals and starts were foreseen; a start counts where the longest context is stated."""
    refused = [each for each in judged if each.row.refused]
    started = [each for each in judged if not each.row.refused and each.row.context_stated]
    return {
        "refused": len(refused),
        "foreseen": sum(not each.found.fits for each in refused),
        "started": len(started),
        "let_start": sum(each.found.fits for each in started),
        "wrong": [each.row.label for each in refused if each.found.fits]
        + [each.row.label for each in started if not each.found.fits],
    }


def _detail(each: Judged) -> dict[str, Any]:
    found = each.found
    return {
        "source": each.row.source, "row": each.row.label, "dense": each.dense, "logged_gib": each.row.logged_gib,
        "logged_tokens": each.row.logged_tokens, "kv_gib": round(found.kv_bytes / GiB, 3),
        "interval_gib": [round(found.kv_low_bytes / GiB, 2), round(found.kv_high_bytes / GiB, 2)],
        "kv_tokens": found.kv_tokens, "blocks": found.blocks, "error": each.error, "error_tokens": each.error_tokens,
        "naive": each.naive, "inside": each.inside, "weights_gib": round(found.weights_bytes / GiB, 3),
        "loaded_gib": each.row.loaded_gib, "activation_gib": round(found.activation_bytes / GiB, 3),
        "communication_gib": round(found.communication_bytes / GiB, 3), "fits": found.fits, "refused": each.row.refused,
        "refusal": found.refusal, "last_block_waste": found.last_block_waste,
    }  # fmt: skip


def show(found: Mapping[str, Any]) -> None:
    """Print the tables."""
    print(_headline(found) + "\n")
    print(f"{found['rows']} rows, {found['judged']} with an error; errors are (predicted - logged) / logged, %\n")
    print(f"{'rows':46} {'n':>3} {'median':>7} {'worst':>7} {'naive':>7} {'worst':>7} {'inside':>7}")
    names = {"dense": "dense", "dense_held_out": "dense, source not fitted on", "dense_v1": "dense, vLLM 0.8 and later"}
    names |= {"hybrid": "windows or states (GiB)", "assumed": "no version stated: the latest assumed"}
    for key, name in names.items():
        _line(name, found[key])
    for source, summary in found["sources"].items():
        _line(source.removeprefix("https://github.com/"), summary)
    weights = found["weights"]
    print(f"\nweights against loaded: n {weights['n']}, median {_percent(weights['median'])}, ", end="")
    print(f"worst {_percent(weights['worst'])} %")
    refusals = found["refusals"]
    print(f"refused {refusals['refused']}, foreseen {refusals['foreseen']}; ", end="")
    print(f"started {refusals['started']}, let start {refusals['let_start']}")
    for wrong in refusals["wrong"]:
        print(f"  wrong: {wrong}")
    defaulted = found["fraction_assumed"]
    print("\nrows without a stated utilisation, at the engine's default (in no figure above):")
    _line("dense", defaulted["dense"])
    _line("windows or states (GiB)", defaulted["hybrid"])
    within = ", ".join(f"{count} within {100 * limit:.0f} %" for limit, count in defaulted["within"])
    refusals = defaulted["refusals"]
    print(f"{within}; refused {refusals['refused']}, foreseen {refusals['foreseen']}")
    print("\nnot judged: " + ("; ".join(f"{reason} ({n})" for reason, n in found["not_judged"].items()) or "none"))


def _headline(found: Mapping[str, Any]) -> str:
    """Return the figure of sources that no constant comes from, and then that of those they were fitted on."""
    held_out, every = found["dense_held_out"], found["dense"]
    fitted = every["n"] - held_out["n"]
    errors = f"median {_percent(held_out['median'])}, worst {_percent(held_out['worst'])} %"
    others = f"the other {fitted} dense rows are of sources that constants were fitted on"
    return f"held out: {errors} of {held_out['n']} dense rows; {others}"


def _line(name: str, row: Mapping[str, Any]) -> None:
    if row["n"]:
        shown = (_percent(row[key]) for key in ("median", "worst", "naive_median", "naive_worst"))
        print(
            f"{name[-46:]:46} {row['n']:3} "
            + " ".join(f"{value:>7}" for value in shown)
            + f" {row['inside']:>3}/{row['n']}"
        )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
