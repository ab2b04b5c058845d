"""Contiguous against paged allocation of the cache, on the lengths of a trace of requests."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cordee.plan.serving.memory.paging import Allocator, Contiguous, Paged, pool_use
from cordee.workload.requests import Request

COLUMNS = {"timestamp", "input_length", "output_length"}
POOL_TOKENS = 2_000_000
DECODE_S = 0.3  # for a token: slow enough that requests always wait
SAMPLE = 4000


def read(path: Path) -> list[Request]:
    """Return the requests of a trace, JSON lines or CSV, as Mooncake's: timestamp in milliseconds, two lengths."""
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            rows: Iterable[Mapping[str, Any]] = [json.loads(line) for line in file if line.strip()]
        else:
            rows = list(csv.DictReader(file))
    return [
        Request(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"])) for row in rows
    ]


def sample(seed: int = 0, requests: int = SAMPLE) -> list[Request]:
    """Return lognormal lengths with the means of Mooncake's conversations: 12,035 in, 343 out, 12,031 in 59 minutes."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(59 * 60 / 12_031, requests))
    spread_in, spread_out = 1.2, 0.8
    inputs = rng.lognormal(math.log(12_035) - spread_in**2 / 2, spread_in, requests)
    outputs = rng.lognormal(math.log(343) - spread_out**2 / 2, spread_out, requests)
    return [
        Request(float(at), int(min(max(1, given), 126_000)), int(min(max(1, answer), 7_000)))
        for at, given, answer in zip(arrivals, inputs, outputs, strict=True)
    ]


def compare(requests: list[Request], pool_tokens: int = POOL_TOKENS, decode_s: float = DECODE_S) -> dict[str, Any]:
    """Return the use of the pool under each allocator."""
    longest = max(request.tokens for request in requests)
    pools: dict[str, Allocator] = {
        "contiguous, longest": Contiguous(pool_tokens, "maximum", longest),
        "contiguous, power of two": Contiguous(pool_tokens, "power of two", longest),
        "contiguous, exact": Contiguous(pool_tokens, "exact", longest),
        **{f"paged, {block}": Paged(pool_tokens, block) for block in (16, 128, 512)},
    }
    found = {name: pool_use(requests, pool, pool_tokens, decode_s) for name, pool in pools.items()}
    return {
        name: {
            "used": use.used, "at_once": use.at_once, "waits": use.waits, "fragmented": use.fragmented,
            "makespan_s": use.makespan_s,
        }
        for name, use in found.items()
    }  # fmt: skip


def report(path: Path) -> dict[str, Any]:
    """Return the comparison on a trace."""
    requests = read(path)
    return {"requests": len(requests), "allocators": compare(requests)}


def show(found: Mapping[str, Any]) -> None:
    """Print the comparison as a table."""
    print(f"{found['requests']} requests, pool of {POOL_TOKENS:,} tokens\n")
    print(f"{'allocator':26} {'used':>6} {'at once':>8} {'waits':>7} {'in holes':>9} {'makespan s':>11}")
    for name, row in found["allocators"].items():
        numbers = f"{row['used']:6.1%} {row['at_once']:8.1f} {row['waits']:7} {row['fragmented']:9}"
        print(f"{name:26} {numbers} {row['makespan_s']:11,.0f}")
