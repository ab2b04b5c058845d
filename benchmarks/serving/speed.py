"""Throughput that engines were measured at, against the planner: the speed part of `serving_accuracy.py`.

A row is one cell of a vendor's table: a model, GPUs, an engine, a layout, tokens in and out. Rows that name a workload
and no lengths are held against a lower bound only; rows above the nameplate's roofline count as refusals.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from cordee.errors import CordeeError
from cordee.hardware.catalog import Gpu
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS, find_format
from cordee.plan.serving.memory.kv import kv_bytes_per_token
from cordee.plan.serving.memory.memory import memory
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.speed.speed import Speed
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape
from cordee.workload.requests import Request
from serving import latency
from serving.models import find_shape

COLUMNS = {"source", "model", "gpu", "engine", "precision", "parallelism", "isl", "osl", "metric", "value"}
THROUGHPUT = re.compile(r"(total_)?output_throughput(_per_gpu)?(_conc(?P<concurrency>\d+))?")
PEERS = (
    "AIConfigurator, 18 vLLM rows (others' measurement): TTFT 601 % median, ITL 18-19 %, e2e 15-21 %;"
    " Vidur, 5 rows of Llama 2 7B: TTFT 15-20 %, e2e 14-15 %"
)
# Requests of one run, by tokens in and out (TensorRT-LLM, perf-overview.md, "Preparing a dataset").
RUNS = {
    (128, 128): 30000,
    (128, 4096): 1500,
    (1000, 2000): 1500,
    (2048, 2048): 1500,
    (5000, 500): 1500,
    (20000, 2000): 1000,
    (8192, 1024): 1500,
    (1024, 8192): 1500,
    (32768, 1024): 1000,
    (1024, 32768): 1000,
}
USUAL_RUN = 3000


@dataclass(frozen=True)
class Row:
    """One measured cell; `value` is tokens a second of all GPUs."""

    source: str
    name: str
    case: ServingCase
    input_tokens: int
    output_tokens: int
    value: float
    batch: int | None
    concurrency: int | None


@dataclass(frozen=True)
class Judged:
    """A row with its prediction; None where the planner says that it does not fit."""

    row: Row
    predicted: float | None
    ideal: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return math.nan if self.predicted is None else self.predicted / self.row.value - 1

    @property
    def tpot(self) -> latency.Latency | None:
        """The seconds of one token of a static batch, its prompts included."""
        row = self.row
        if row.batch is None or self.predicted is None:
            return None
        rates = (row.value, self.predicted, self.ideal)
        return latency.Latency(row.source, row.name, *(row.batch / rate for rate in rates))

    @property
    def refusal(self) -> str | None:
        """Why no such GPUs can have done what the row says; None where they can."""
        if self.row.value > self.ideal:
            return "above the nameplate's roofline"
        return "does not fit" if self.predicted is None else None


def report(path: Path) -> dict[str, Any]:
    """Return the errors by source, the constant line beside them, and what was not judged."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    judged, left, bounds, firsts = [], defaultdict[str, int](int), [], []
    for line in lines:
        row = read(line)
        if isinstance(row, latency.Latency):
            firsts.append(row)
            continue
        if isinstance(row, Row):
            judged.append(Judged(row, predict(row), ideal_tokens_per_s(row)))
        elif row == "a workload's name in place of lengths":
            bounds += bound(line)
            left[row] += 1
        else:
            left[row] += 1
    possible = [each for each in judged if each.row.value <= each.ideal]
    return {
        "rows": len(lines),
        "ttft": latency.summary(firsts),
        "tpot": latency.summary([each.tpot for each in possible if each.tpot is not None]),
        "feasibility": feasibility(judged),
        "sources": {name: summary(rows) for name, rows in by_source(possible).items()},
        "bounds": bounds_summary(bounds),
        "not_judged": dict(left),
        "peers": PEERS,
        "cells": [cell(each) for each in possible],
    }


def feasibility(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how many rows were found feasible, and the refused ones: the reason, and what the planner expects.

    A row above the roofline is refused rightly whatever the planner says; the planner must not expect it either.
    """
    refused = [each for each in judged if each.refusal is not None]
    impossible = [each for each in judged if each.row.value > each.ideal]
    return {
        "rows": len(judged),
        "feasible": len(judged) - len(refused),
        "impossible": len(impossible),
        "below_what_is_claimed": sum(each.predicted is None or each.predicted < each.row.value for each in impossible),
        "wrongly_refused": sum(each.refusal == "does not fit" for each in judged),
        "refused": [
            {
                "cell": each.row.name, "claimed": each.row.value, "roofline": each.ideal, "predicted": each.predicted,
                "reason": each.refusal,
            }
            for each in refused
        ],
    }  # fmt: skip


def by_source(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Return the cells of each source."""
    found = defaultdict[str, list[Judged]](list)
    for each in judged:
        found[each.row.source].append(each)
    return dict(found)


def summary(rows: Sequence[Judged]) -> dict[str, Any]:
    """Return errors in percent; the constant line is the best fraction of each row's roofline for the whole source."""
    fitting = [each for each in rows if each.predicted is not None]
    errors = [abs(each.error) for each in fitting] or [math.nan]
    fraction = best_constant([(each.ideal, each.row.value) for each in rows])
    constant = [abs(fraction * each.ideal / each.row.value - 1) for each in rows]
    return {
        "rows": len(rows),
        "feasible": len(fitting),
        "mean": 100 * mean(errors),
        "median": 100 * median(errors),
        "worst": 100 * max(errors),
        "bias": 100 * median(each.error for each in fitting) if fitting else math.nan,
        "constant_mean": 100 * mean(constant),
        "constant_median": 100 * median(constant),
        "constant_fraction": fraction,
    }


def best_constant(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the fraction of the roofline with the least mean absolute error in percent, in hindsight."""
    candidates = [measured / ideal for ideal, measured in pairs]
    return min(candidates, key=lambda fraction: sum(abs(fraction * ideal / value - 1) for ideal, value in pairs))


def read(line: dict[str, str]) -> Row | latency.Latency | str:
    """Return a row, or why it is not judged."""
    metric = THROUGHPUT.fullmatch(line["metric"])
    first = latency.METRIC.fullmatch(line["metric"]) is not None and line["isl"].isdigit()
    if metric is None and not first:
        workload = re.match(r"(e2e|ttft|itl)_", line["metric"])
        return "a workload's name in place of lengths" if workload else f"metric {line['metric']}"
    if not (line["isl"].isdigit() and line["osl"].isdigit()):
        return "no tokens in and out"
    shape, gpu = older_shape(line["model"]) or find_shape(line["model"]), find_gpu(line["gpu"])
    if shape is None or gpu is None:
        return f"unknown {'model ' + line['model'] if shape is None else 'GPU ' + line['gpu']}"
    batch = re.search(r"batch=(\d+)", line["precision"])
    if batch and shape.experts is not None:  # gptSessionBenchmark fills its prompts with the padding token
        return "experts under a prompt of one repeated token"
    name = f"{line['model']} {line['gpu']} {line['parallelism']} {line['precision']} {line['isl']}/{line['osl']}"
    try:
        case = read_case(line, shape, gpu)
    except CordeeError as error:
        return str(error).splitlines()[0]
    if metric is None:
        return latency.first_token(line, name, case) or "a TTFT without its batch"
    value = float(line["value"].replace(",", "")) * (case.layout.gpus if "per_gpu" in line["metric"] else 1)
    return Row(
        line["source"],
        name,
        case,
        int(line["isl"]),
        int(line["osl"]),
        value,
        int(batch[1]) if batch else None,
        int(metric["concurrency"]) if metric["concurrency"] else None,
    )


def older_shape(name: str) -> ModelShape | None:
    """Return the shape of a model of 2021 to 2023 that the catalogue knows by its successor, or not at all."""
    llama = re.fullmatch(r"llama-(7|13|70)b", name.lower())
    if llama:
        return load_shape(f"llama-2-{llama[1]}b")
    if name.lower() == "falcon-180b":
        # tiiuae/falcon-180B, config.json; attention and feed-forward block in parallel
        return ModelShape("falcon-180b", "falcon", 80, 14848, 232, 8, 64, 59392, 65024, 2048, gated=False, norm="layer")
    if name.lower().startswith("gpt-j"):
        # EleutherAI/gpt-j-6b, config.json
        return ModelShape("gpt-j-6b", "gptj", 28, 4096, 16, 16, 256, 16384, 50400, 2048, gated=False, norm="layer")
    return None


def find_gpu(name: str) -> Gpu | None:
    """Return the catalogue's GPU, or None."""
    try:
        return load_catalogue().find_gpu(name)
    except CordeeError:
        return None


def read_case(line: dict[str, str], shape: ModelShape, gpu: Gpu) -> ServingCase:
    """Return the case of a row with the engine's defaults.

    TensorRT-LLM's tables run models with experts with data-parallel attention, and its benchmark leaves 5 % of the free
    memory (perf-overview.md, "Running the benchmark").
    """
    name, *stated = line["engine"].lower().split()
    version = next((word for word in stated if re.fullmatch(r"\d+(\.\d+)+", word)), None)
    engine = find_engine(name, version)
    if "TRTLLM_ENABLE_XQA=1" in (line.get("note") or ""):  # an option until 0.9, later the default
        engine = replace(engine, grouped_reads=True)
    vendor = engine.name == "tensorrt-llm"
    layout = read_layout(line["parallelism"], spreads="dp" in engine.axes and vendor and shape.experts is not None)
    precision = line["precision"].split()[0].lower() if line["precision"] else "fp16"
    weights = {"fp4": "nvfp4", "fp8": "fp8", "fp16": "fp16", "bf16": "bf16"}.get(precision, precision)
    if shape.name.startswith("gpt-oss"):
        weights = "mxfp4"
    form = find_format(WEIGHTS, weights)
    if shape.latent is not None:  # nvidia/DeepSeek-*-NVFP4 excludes attention; DeepSeek's own FP8 has blocks
        form = replace(form, keeps_mixers=True) if weights == "nvfp4" else WEIGHTS["fp8-block"]
    narrow = precision in ("fp4", "fp8") and vendor and not (weights == "mxfp4" and precision == "fp8")
    tokens = int(line["isl"]) + int(line["osl"]) if line["isl"].isdigit() and line["osl"].isdigit() else 4096
    sequences, batched = engine.limits(gpu.name, gpu.memory_bytes, tokens)
    return ServingCase(
        shape=shape,
        gpu=gpu,
        layout=layout,
        weights=form,
        kv=KV["fp8" if narrow else "fp16"],
        engine=engine,
        max_sequences=sequences,
        max_batched_tokens=batched,
        max_context_tokens=tokens,
        memory_fraction=0.95 if vendor else engine.memory_fraction,
    )


def read_layout(text: str, *, spreads: bool) -> ServingLayout:
    """Return the layout that `TP8`, `TP2,PP2` or `DEP4` means; `spreads`: attention of each GPU on its own."""
    sizes = {axis: int(float(size)) for axis, size in re.findall(r"(DEP|TP|PP|EP|DP)(\d+(?:\.\d+)?)", text.upper())}
    tp, pp = sizes.get("TP", 1), sizes.get("PP", 1)
    if "DEP" in sizes:
        return ServingLayout(dp=sizes["DEP"], pp=pp, ep=True)
    if spreads and tp > 1:
        return ServingLayout(dp=tp, pp=pp, ep=True)
    return ServingLayout(tp=tp, pp=pp, dp=sizes.get("DP", 1), ep="EP" in sizes)


def tuned(case: ServingCase, input_tokens: int, output_tokens: int, fitting: int) -> ServingCase:
    """Return the limits that TensorRT-LLM's benchmark sets by tokens in and out (its bench/build/tuning.py)."""
    sequences = min(fitting, 4096) / case.layout.pp
    tokens = min(sequences * (1 + input_tokens / output_tokens), 32768)
    return replace(
        case,
        max_sequences=max(64, math.ceil(sequences / 32) * 32),
        max_batched_tokens=max(2048, math.ceil(tokens / 256) * 256, input_tokens),
    )


def predict(row: Row) -> float | None:
    """Return the tokens of answers a second that the planner expects; None where nothing fits."""
    case, length = row.case, row.input_tokens + row.output_tokens
    if row.batch is not None:
        return static_tokens_per_s(row)
    try:
        fitting = memory(case).sequences(length)
    except CordeeError:
        return None
    if fitting < 1:
        return None
    run = RUNS.get((row.input_tokens, row.output_tokens), USUAL_RUN)
    if case.engine.name == "tensorrt-llm" and row.concurrency is None:
        case = tuned(case, row.input_tokens, row.output_tokens, fitting)
    sequences = min(fitting, case.max_sequences * (1 if case.engine.name == "tensorrt-llm" else case.layout.dp))
    limits = Limits(
        max_sequences=min(sequences, row.concurrency or sequences),
        max_batched_tokens=case.max_batched_tokens * case.layout.dp,
        kv_tokens=fitting * (length + case.engine.block_tokens),
        block_tokens=case.engine.block_tokens,
        reserves_output=case.engine.name == "tensorrt-llm",
    )
    requests = [Request(0.0, row.input_tokens, row.output_tokens)] * min(run, 40 * limits.max_sequences)
    return serve(requests, Speed(case), limits).output_tokens_per_s


def static_tokens_per_s(row: Row) -> float:
    """Return the rate of one batch that begins and ends together: the prompts in one step, then a step a token."""
    assert row.batch is not None, "a static batch has a size"
    speed, batch = Speed(row.case), row.batch
    seconds = speed.step_s([(row.input_tokens, 0)] * batch)
    middle = batch * (row.input_tokens + row.output_tokens / 2)
    seconds += (row.output_tokens - 1) * speed.decode_s(batch, middle)
    return batch * row.output_tokens / seconds


def ideal_tokens_per_s(row: Row) -> float:
    """Return the rate by bytes and FLOPs of the nameplate alone: what a constant efficiency is a fraction of."""
    case, shape = row.case, row.case.shape
    gpus, gpu = case.layout.gpus, case.gpu
    peak = gpus * gpu.flop_per_s.get(case.weights.products, gpu.flop_per_s["bf16"])
    length = row.input_tokens + row.output_tokens
    flop = 2.0 * shape.matmul_parameters * length / row.output_tokens
    try:
        batch = row.batch or row.concurrency or max(1, min(memory(case).sequences(length), 4096))
    except CordeeError:
        batch = 64
    cache = kv_bytes_per_token(case) * case.layout.tp * (row.input_tokens + row.output_tokens / 2)
    bytes_s = gpus * gpu.memory_bytes_per_s
    weights = shape.parameters * case.weights.bits / 8
    return 1 / (flop / peak + cache / bytes_s + weights / batch / bytes_s)


def bound(line: dict[str, str]) -> list[tuple[str, float]]:
    """Return the metric and the planner's figure for a lone request over the measured one: it should not exceed 1."""
    shape, gpu = find_shape(line["model"]), find_gpu(line["gpu"])
    if shape is None or gpu is None or line["metric"] != "itl_mean":
        return []
    try:
        case = read_case(line, shape, gpu)
    except CordeeError:
        return []
    return [("itl_mean", Speed(case).decode_s(1, 500) / (float(line["value"]) / 1000))]


def bounds_summary(found: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return how many measured figures lie above the planner's for a lone request, and how far."""
    ratios = [ratio for _, ratio in found]
    if not ratios:
        return {}
    return {"rows": len(ratios), "above": sum(ratio <= 1 for ratio in ratios), "median_ratio": median(ratios)}


def cell(each: Judged) -> dict[str, Any]:
    """Return one row for the table of cells."""
    return {
        "source": each.row.source,
        "cell": each.row.name,
        "measured": each.row.value,
        "predicted": each.predicted,
        "error": None if each.predicted is None else 100 * each.error,
    }


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    latency.show(found["ttft"], "TTFT")
    if not found["ttft"]:
        print("TTFT: no row states it with its tokens and its batch")
    latency.show(found["tpot"], "time per token, prompts included,")
    able = found["feasibility"]
    print(f"feasible: {able['feasible']} of {able['rows']} rows, {able['wrongly_refused']} wrongly refused; ", end="")
    print(f"{able['impossible']} above the roofline, {able['below_what_is_claimed']} of these not expected either\n")
    print("| source | rows | feasible | mean % | median % | worst % | bias % | constant line: mean % | median % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, row in found["sources"].items():
        keys = ("mean", "median", "worst", "bias", "constant_mean", "constant_median")
        figures = " | ".join(f"{row[key]:.1f}" for key in keys)
        print(f"| {name} | {row['rows']} | {row['feasible']} | {figures} |")
    if found["bounds"]:
        bounds = found["bounds"]
        print(f"\nlone-request bound: {bounds['above']} of {bounds['rows']} measured ITL lie above it,", end=" ")
        print(f"median ratio {bounds['median_ratio']:.2f}")
    print("\nnot judged: " + "; ".join(f"{reason} ({count})" for reason, count in found["not_judged"].items()))
    print("published errors of peers: " + found["peers"])


Report = Callable[[Path], dict[str, Any]]
