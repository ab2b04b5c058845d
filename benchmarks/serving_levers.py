"""Public figures of serving's economics, computed again, and crossovers of the levers by GPU, length, rate and batch.

python benchmarks/serving_levers.py CSV [--requests FILE] [--json]

CSV has the columns of published_serving.csv; its rows of a vendor's Llama-3.1-405B in FP8 on 8 H100 and of DeepSeek's
day are read. FILE is a trace of requests as Mooncake's (JSON lines or CSV): its hour profile is added.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from cordee.hardware.load import load_catalogue, load_speedups
from cordee.plan.serving.ask import ask
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.layouts import parse_serving_layout
from cordee.plan.serving.levers.offload import KV_LEVELS, break_even_bytes_per_s
from cordee.plan.serving.levers.quantise import find_crossovers
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.price.hours import hour_profile
from cordee.plan.serving.price.price import DAY_S, PhaseRates, TokenMix, TokenPrices, replica_s
from cordee.plan.serving.request import ServingRequest, Slo, Traffic
from cordee.plan.serving.speed.speed import Speed
from cordee.workload.load import load_shape
from serving import paging
from serving.loaded import loaded_price, margin

NODE_USD_PER_HOUR = 16.0  # 8 GPUs at $2
FLAT = TokenPrices(2.8, 2.8, 2.8)
OUTPUT_ONLY = TokenPrices(0.0, 0.0, 2.8)
R1 = TokenPrices(0.55, 0.14, 2.19)
CACHED_FRACTION = 342 / 608  # billions of input tokens
LENGTHS = (256, 1024, 4096, 16_384, 65_536)
RATES = (1.0, 10.0, 100.0)
GPUS = 128


def identities(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Return DeepSeek's day as computed and as reported, and Llama-405B's price by shape of requests."""
    day = {
        row["metric"]: float(row["value"]) for row in rows if row["source"].startswith("deepseek-ai/open-infra-index")
    }
    rates = PhaseRates(day["input_throughput_per_node_prefill"], day["output_throughput_per_node_decode"])
    inputs, outputs = day["input_tokens_24h"], day["output_tokens_24h"]
    nodes = replica_s(rates, TokenMix(inputs, outputs)) / DAY_S
    revenue = R1.usd(TokenMix(inputs, outputs, CACHED_FRACTION * inputs))
    llama = []
    for row in rows:
        if (row["model"], row["gpu"], row["precision"]) == ("Llama-3.1-405B", "H100", "FP8"):
            mix = TokenMix(float(row["isl"]), float(row["osl"]))
            price = loaded_price(float(row["value"]), mix, NODE_USD_PER_HOUR)
            busy = [price.busy_fraction_needed(each) for each in (FLAT, OUTPUT_ONLY)]
            llama.append([row["isl"], row["osl"], price.output_usd, price.blended_usd, *busy])
    cost = nodes * NODE_USD_PER_HOUR * 24
    return {
        "deepseek": {
            "nodes": (nodes, day["avg_nodes"]),
            "cost_usd": (cost, day["cost_per_day"]),
            "revenue_usd": (revenue, day["revenue_per_day_at_R1_price"]),
            "margin": (margin(revenue, cost), margin(day["revenue_per_day_at_R1_price"], day["cost_per_day"])),
        },
        "llama_405b": llama,
    }


def case(model: str, gpu: str, tp: int) -> ServingCase:
    """Return a replica in vLLM with its default limits."""
    shape, engine = load_shape(model), find_engine("vllm")
    return ServingCase(
        shape, load_catalogue().find_gpu(gpu), ServingLayout(tp=tp), WEIGHTS["bf16"], KV["bf16"], engine,
        1024, 8192, min(shape.positions, 8192), engine.memory_fraction,
    )  # fmt: skip


def offload() -> list[list[Any]]:
    """Return the break-even bandwidth of Llama-3.1-70B on 4 H100 by length."""
    held = case("llama-3.1-70b", "H100", 4)
    speed, gpus = Speed(held), held.layout.gpus
    rows = []
    for tokens in LENGTHS:
        size, took_s = kv_bytes(held, tokens) * gpus, speed.prefill_s(tokens)
        restored = (level.restore_s(size) for level in KV_LEVELS)
        rows.append([tokens, size, took_s, break_even_bytes_per_s(size, took_s), *restored])
    return rows


def layouts() -> list[str]:
    """Return the best layout of Llama-3.1-8B on H100s by rate and by time per output token."""
    shape, gpu = load_shape("llama-3.1-8b"), load_catalogue().find_gpu("H100")
    found = []
    for rate in RATES:
        for tpot_s in (0.005, 0.010, 0.050):
            traffic = Traffic(input_tokens=1000, output_tokens=1000, rate_per_s=rate)
            slo = Slo(tpot_s=tpot_s, statistic="mean")
            each = ask(
                ServingRequest(
                    shape=shape,
                    gpu=gpu,
                    gpus=GPUS,
                    engine=find_engine("vllm"),
                    traffic=traffic,
                    slo=slo,
                    layout=parse_serving_layout("pp=1,dp=1"),
                )
            )
            found.append(f"{rate:g} requests/s, {1000 * tpot_s:g} ms a token: {each.summary}")
    return found


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with chosen.csv.open(newline="", encoding="utf-8") as file:
        found = identities(list(csv.DictReader(file)))
    gpus = [gpu.name for gpu in load_catalogue().gpus]
    found["quantisation"] = [str(row) for gpu in gpus for row in find_crossovers(load_speedups(), gpu)]
    found["offload"], found["layouts"] = offload(), layouts()
    if chosen.requests is not None:
        read = paging.read(chosen.requests)
        found["hour_profile"] = hour_profile((each.arrival_s, each.tokens) for each in read)
    print(json.dumps(found, indent=2) if chosen.json else _text(found))


def _text(found: dict[str, Any]) -> str:
    lines = ["| DeepSeek's day | computed | reported |", "|---|---|---|"]
    lines += [f"| {name} | {mine:,.2f} | {its:,.2f} |" for name, (mine, its) in found["deepseek"].items()]
    lines += ["", "| in | out | $/M output | $/M blended | pays at $2.8 from | on output alone |", "|" + "---|" * 6]
    for isl, osl, output, blended, flat, alone in found["llama_405b"]:
        lines.append(f"| {isl} | {osl} | {output:.2f} | {blended:.2f} | {flat:.0%} busy | {alone:.0%} |")
    levels = " | ".join(level.name for level in KV_LEVELS)
    lines += ["", f"| tokens | KV | recompute | break-even | {levels} |", "|" + "---|" * (4 + len(KV_LEVELS))]
    for tokens, size, took_s, needed, *restore_s in found["offload"]:
        restored = " | ".join(f"{1000 * each:.1f} ms" for each in restore_s)
        row = f"| {tokens} | {size / 1e9:.2f} GB | {1000 * took_s:.0f} ms | {needed / 1e9:.1f} GB/s | {restored} |"
        lines.append(row)
    lines += ["", *found["layouts"], "", *found["quantisation"]]
    if "hour_profile" in found:
        lines += ["", "load by hour: " + ", ".join(f"{load:.2f}" for load in found["hour_profile"])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
