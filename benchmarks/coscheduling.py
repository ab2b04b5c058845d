"""A day of requests and a trace of jobs on one simulated cluster, against two clusters; and how exact the play is.

python benchmarks/coscheduling.py --jobs FILE --requests FILE|synthetic [--cluster 20x8xH100]
    [--rate 40/s] [--from 24h] [--targets 0.8,0.9,1.0] [--exact 6x8,8x8,8x20,12x14] [--only together,exact] [--json]

`--exact` lists replicas x hour of the day: the first quarter of that hour is played request by request. Times are CPU
seconds.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cordee.planning import serving_request
from cordee.serve.policy.scale import ScaleRules
from cordee.simulate.cluster import cluster
from cordee.simulate.compare import CachedJobs, Scenario
from cordee.simulate.policies import POLICIES
from cordee.simulate.services.arrivals import SYNTHETIC, Arrivals, SyntheticDay, read_arrivals
from cordee.simulate.services.cluster_run import Together
from cordee.simulate.services.exact import ExactPlay
from cordee.simulate.services.fluid import FluidPlay
from cordee.simulate.services.replica import replica_model
from cordee.simulate.services.service import ServicePlan
from cordee.simulate.services.together import compare
from cordee.simulate.traces import open_trace
from cordee.units import US_PER_S, parse_duration_s, parse_rate_per_s

USD_MICRO = 2_990_000
MODEL, GPUS, TTFT, TPOT, CONTEXT = "qwen3-32b", 2, "2s", "50ms", "16384"
QUARTER_S = 900.0


def prepared(arrivals: Arrivals, gpu: str) -> FluidPlay:
    """Return the service of all figures here."""
    request = serving_request(
        MODEL,
        f"{GPUS}x{gpu}",
        input_tokens=arrivals.mean_input,
        output_tokens=arrivals.mean_output,
        ttft=TTFT,
        tpot=TPOT,
        context=CONTEXT,
    )
    model = replica_model(request, prefixes=bool(arrivals.traced))
    return FluidPlay(model, arrivals.shorter_than(model.limits.max_context_tokens), most=80)


def together(play: FluidPlay, options: argparse.Namespace, target: float) -> dict[str, Any]:
    """Return the comparison at this load that the scaling policy aims at."""
    opened = open_trace(options.jobs)
    start_us = round(parse_duration_s(options.start) * US_PER_S)
    scenario = Scenario(
        jobs=CachedJobs(opened.jobs),
        name=opened.path.name,
        nodes=cluster(options.cluster, micro_usd_per_gpu_hour=USD_MICRO, price_source="assumed: $2.99 a GPU-hour"),
        window_us=(start_us, None),
    )
    slo = play.model.slo
    assert slo.ttft_s is not None and slo.tpot_s is not None
    rules = ScaleRules(
        min_replicas=1,
        max_replicas=80,
        target=target,
        ttft_us=round(slo.ttft_s * US_PER_S),
        tpot_us=round(slo.tpot_s * US_PER_S),
    )
    plan = ServicePlan(
        name="chat",
        gpus=GPUS,
        gpu_name=None,
        load_us=90 * US_PER_S,
        drain_us=30 * US_PER_S,
        kv_tokens=play.model.limits.kv_tokens,
        rules=rules,
    )
    began_s = time.process_time()
    answer = compare(Together(scenario=scenario, play=play, service=plan, policy=POLICIES["cordee"]))
    return {"target": target, "cpu_s": time.process_time() - began_s} | asdict(replace(answer, samples=()))


def exact(play: FluidPlay, replicas: int, hour: float) -> dict[str, Any]:
    """Return a quarter of an hour played by requests and by slots."""
    part = play.arrivals.part(hour * 3600, hour * 3600 + QUARTER_S)
    began_s = time.process_time()
    whole = ExactPlay(play.model, part)
    whole.advance(hour * 3600, hour * 3600 + QUARTER_S, range(replicas))
    whole.finish()
    whole_s, began_s = time.process_time() - began_s, time.process_time()
    found, slo = whole.outcomes, play.model.slo
    ttft, tpot = (np.array([getattr(each, name) for each in found]) for name in ("ttft_s", "tpot_s"))
    quick = play.restart()
    first = round(hour * 3600 / play.slot_s)
    states = [quick.advance(slot, replicas) for slot in range(first, first + round(QUARTER_S / play.slot_s))]
    ttfts, tpots = quick.percentiles(0.5, 0.99)
    return {
        "replicas": replicas,
        "hour": hour,
        "requests": len(found),
        "attained": [
            float(np.mean((ttft <= (slo.ttft_s or np.inf)) & (tpot <= (slo.tpot_s or np.inf)))),
            sum(each.attained for each in states) / sum(each.requests for each in states),
        ],
        "ttft_p50_s": [float(np.median(ttft)), ttfts[0]],
        "ttft_p99_s": [float(np.percentile(ttft, 99)), ttfts[1]],
        "tpot_p50_s": [float(np.median(tpot)), tpots[0]],
        "tpot_p99_s": [float(np.percentile(tpot, 99)), tpots[1]],
        "cpu_s": [whole_s, time.process_time() - began_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--requests", default=SYNTHETIC)
    parser.add_argument("--cluster", default="20x8xH100")
    parser.add_argument("--rate", default="40/s")
    parser.add_argument("--from", dest="start", default="24h")
    parser.add_argument("--targets", default="0.8,0.9,1.0")
    parser.add_argument("--exact", default="6x8,8x8,8x20,12x14")
    parser.add_argument("--only", default="together,exact")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.requests == SYNTHETIC:
        arrivals = SyntheticDay(per_s=parse_rate_per_s(options.rate)).draw(0)
    else:
        arrivals = read_arrivals(Path(options.requests))
    play = prepared(arrivals, options.cluster.rsplit("x", 1)[-1])
    found: dict[str, Any] = {"requests": arrivals.name, "count": arrivals.count}
    if "exact" in options.only:
        pairs = [pair.split("x") for pair in options.exact.split(",")]
        found["exact"] = [exact(play, int(replicas), float(hour)) for replicas, hour in pairs]
    if "together" in options.only:
        found["together"] = [together(play, options, float(each)) for each in options.targets.split(",")]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """As tables."""
    for row in found.get("exact", ()):
        pairs = [f"{100 * by:.2f} {100 * slots:.2f} %" for by, slots in [row["attained"]]]
        names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
        pairs += [f"{1000 * by:.1f} {1000 * slots:.1f} ms" for by, slots in (row[name] for name in names)]
        print(f"| {row['replicas']} | {row['hour']:g} | {row['requests']:,} | {' | '.join(pairs)} |")
    for answer in found.get("together", ()):
        for name in ("one", "two", "enough"):
            each = answer[name]
            if each is not None:
                serving, training = each["serving"], each["training"]
                print(
                    f"| {answer['target']:g} | {name} | {each['gpus']} | ${each['micro_usd'] / 1e6:,.0f} | "
                    f"{serving['attained']:.2%} | {serving['worst_hour']:.2%} | {serving['replicas_mean']:.1f} | "
                    f"{serving['gpu_hours']:,.0f} | ${serving['usd_per_mtok']:.3f} | "
                    f"{training['useful_gpu_hours']:,.0f} | {training['goodput']:.2%} | {each['idle_gpu_hours']:,.0f} |"
                )
        print(f"{answer['cpu_s']:.0f} CPU s")


if __name__ == "__main__":
    main()
