"""Latencies of rows that state their tokens and their batch: the first token of a prompt, and each token of a batch."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.speed.products import computed_in, peak_flop_per_s
from cordee.plan.serving.speed.speed import Speed

METRIC = re.compile(r"ttft(_mean)?")
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Latency:
    """One measured latency: seconds as measured, as predicted, and at the nameplate's rates."""

    source: str
    name: str
    measured_s: float
    predicted_s: float
    ideal_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one, in percent."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def first_token(line: Mapping[str, str], name: str, case: ServingCase) -> Latency | None:
    """Return the time to the first token of a batch of prompts that start together; None of another row."""
    batch = re.search(r"batch=(\d+)", line["precision"])
    if METRIC.fullmatch(line["metric"]) is None or batch is None or not line["isl"].isdigit():
        return None
    tokens, prompts = int(line["isl"]), int(batch[1])
    predicted_s = Speed(case).step_s([(tokens, 0)] * prompts)
    measured_s = float(line["value"].replace(",", "")) * UNITS[line.get("unit") or "ms"]
    return Latency(line["source"], name, measured_s, predicted_s, ideal_s(case, tokens * prompts))


def ideal_s(case: ServingCase, tokens: int) -> float:
    """Return the seconds of so many tokens of prompts at the nameplate's rates, each weight read once."""
    gpus, gpu, shape = case.layout.gpus, case.gpu, case.shape
    flop_s = gpus * peak_flop_per_s(gpu, computed_in(gpu, case.weights))
    read_s = shape.parameters * case.weights.bits / 8 / (gpus * gpu.memory_bytes_per_s)
    return max(2.0 * shape.matmul_parameters * tokens / flop_s, read_s)


def summary(rows: Sequence[Latency]) -> dict[str, Any]:
    """Return errors in percent by source, beside the best constant multiple of each row's nameplate time."""
    groups = defaultdict[str, list[Latency]](list)
    for row in rows:
        groups[row.source].append(row)
    return {name: _errors(found) for name, found in groups.items()}


def _errors(rows: Sequence[Latency]) -> dict[str, Any]:
    errors = [row.error for row in rows]
    slowdown = best_constant([(row.ideal_s, row.measured_s) for row in rows])
    constant = [100 * abs(slowdown * row.ideal_s / row.measured_s - 1) for row in rows]
    return {
        "rows": len(rows),
        **{name: of([abs(error) for error in errors]) for name, of in STATISTICS.items()},
        "worst": max(errors, key=abs),
        "bias": median(errors),
        **{f"constant_{name}": of(constant) for name, of in STATISTICS.items()},
        "cells": [[row.name, row.measured_s, row.predicted_s, row.error] for row in rows],
    }


STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": mean, "median": median}


def best_constant(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the multiple of the ideal with the least mean absolute error in percent, in hindsight."""
    candidates = [measured / ideal for ideal, measured in pairs]
    return min(candidates, key=lambda times: sum(abs(times * ideal / value - 1) for ideal, value in pairs))


def show(found: Mapping[str, Any], what: str) -> None:
    """Print one line for each source."""
    for name, row in found.items():
        errors = f"mean {row['mean']:.1f}, median {row['median']:.1f}, worst {row['worst']:+.1f} %"
        constant = f"constant line: mean {row['constant_mean']:.1f}, median {row['constant_median']:.1f} %"
        print(f"{what} of {row['rows']} rows: {errors}; {constant} ({name})")
