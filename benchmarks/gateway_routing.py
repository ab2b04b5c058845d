"""The gateway's decisions in simulated time: `gateway_routing.py [--trace FILE] [--json] [--seed N]`.

Prefix hits, balance and time to first token of the router beside round robin, the hash of two blocks and the longest
match, on four replicas of 7,500 blocks; two tenants of which one sends ten times as much; the CPU of one decision.
FILE is a trace of requests as Mooncake's (JSON lines with `hash_ids`); without it a synthetic one is drawn.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from cordee.serve.policy.admit import Capacity
from cordee.serve.policy.dispatch import Ask, Dispatcher, Tenant, Tenants, Ticket
from cordee.serve.policy.limits import Prices
from cordee.serve.policy.route import prefix_blocks
from cordee.workload.request_files import load_requests
from cordee.workload.requests import Request
from serving.conversations import conversations, hit_rate
from serving.fleet import Baseline, Fleet, LongestMatch, Played, TwoBlockHash, fleet

REPLICAS, BLOCKS, WIDTH = 4, 7_500, 32
OPEN = Capacity(400_000, 256)
POLICIES: dict[str, Callable[[], Baseline | None]] = {
    "cordee": lambda: None,
    "round robin": lambda: Baseline(BLOCKS),
    "hash of two blocks": lambda: TwoBlockHash(BLOCKS),
    "longest match": lambda: LongestMatch(BLOCKS),
}


def play(trace: tuple[Request, ...], policy: Baseline | None, *, closed: bool) -> dict[str, float]:
    """Return what one policy does: `closed`, 32 requests are open at a time; else they come at their times."""
    # The peers hold nothing back: what they route waits in the engine.
    capacity = (
        Capacity(prefill_tokens=1 << 60)
        if closed
        else OPEN
        if policy is None
        else replace(OPEN, prefill_tokens=1 << 60)
    )
    played = fleet(REPLICAS, blocks=BLOCKS, capacity=capacity)
    if policy is not None:
        played.dispatcher.router = policy
    if closed:
        waiting = iter(trace)
        for _ in range(WIDTH):
            _next(played, waiting)
        played.on_end = lambda _: _next(played, waiting)
    else:
        for each in trace:
            _at(played, int(each.arrival_s * 1e6), Played(each))
    played.run()
    ttft = np.array([each.first_us - each.arrival_us for each in played.done]) / 1e6
    misses = [each.miss_tokens for each in played.replicas.values()]
    requests = [each.requests for each in played.replicas.values()]
    return {
        "hit": sum(each.cached_blocks for each in played.done) / sum(len(each.request.blocks) for each in played.done),
        "requests_max_over_mean": max(requests) / float(np.mean(requests)),
        "miss_max_over_mean": max(misses) / float(np.mean(misses)),
        "ttft_s_p50": float(np.median(ttft)),
        "ttft_s_p99": float(np.percentile(ttft, 99)),
        "span_s": played.now_us / 1e6,
        "answered": len(played.done),
    }


def _next(played: Fleet, waiting: Iterator[Request]) -> None:
    request = next(waiting, None)
    if request is not None:
        _at(played, played.now_us, Played(request))


def _at(played: Fleet, at_us: int, each: Played) -> None:
    played.at(at_us, lambda: played.send(each))


def light_tenant(*, both: bool, seed: int, seconds: int = 240) -> dict[str, float]:
    """Return what a tenant of 2 requests a second gets of two replicas, alone or beside 20 a second of another one."""
    rng = random.Random(seed)
    tenants = Tenants([Tenant("light"), Tenant("heavy")])
    played = fleet(2, blocks=2_000, capacity=Capacity(300_000, 64), tenants=tenants, prices=Prices())
    rates = {"light": 2.0, "heavy": 20.0 if both else 0.0}
    for tenant, rate in rates.items():
        at_s = rng.expovariate(rate) if rate else seconds
        while at_s < seconds:
            tokens = max(64, int(rng.lognormvariate(7.6, 0.8)))
            request = Request(at_s, tokens, max(1, int(rng.lognormvariate(5.3, 0.8))), (), 512)
            _at(played, int(at_s * 1e6), Played(request, tenant))
            at_s += rng.expovariate(rate)
    played.run(until_us=seconds * 1_000_000)
    light = [each.first_us - each.arrival_us for each in played.done if each.tenant == "light"]
    return {
        "light_ttft_s_p50": float(np.median(light)) / 1e6,
        "light_ttft_s_p99": float(np.percentile(light, 99)) / 1e6,
        "light_done": len(light),
        "waiting": played.dispatcher.queue.size,
    }


def backlogged(weight: float, *, seed: int, seconds: int = 240) -> dict[str, float]:
    """Return the served cost of two tenants that both keep waiting: one sends 20 requests a second, one 200."""
    rng = random.Random(seed)
    tenants = Tenants([Tenant("light", weight), Tenant("heavy", 1.0)])
    played = fleet(2, blocks=2_000, capacity=Capacity(300_000, 64), tenants=tenants, prices=Prices())
    for tenant, rate, middle in (("light", 20.0, 7.6), ("heavy", 200.0, 6.6)):
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            request = Request(
                at_s, max(64, int(rng.lognormvariate(middle, 0.8))), max(1, int(rng.lognormvariate(5.3, 0.8)))
            )
            _at(played, int(at_s * 1e6), Played(request, tenant))
            at_s += rng.expovariate(rate)
    played.run(until_us=seconds * 1_000_000)
    cost = {"light": 0, "heavy": 0}
    prices = Prices()
    for each in played.done:
        cost[each.tenant] += prices.cost_pico_usd(each.request.input_tokens, 0, each.request.output_tokens)
    ratio = cost["light"] / cost["heavy"] / weight
    return {"weight": weight, "served_over_weight": ratio, "refused": len(played.refused)}


def decision_us(replicas: int = 8, tokens: int = 12_000, requests: int = 4_000) -> dict[str, float]:
    """Return CPU microseconds of a request's decisions, from its text to its end, with 64 open at a time."""
    dispatcher = Dispatcher({f"r{index}": Capacity(400_000, 256) for index in range(replicas)}, Tenants([Tenant("t")]))
    rng = random.Random(0)
    texts = [rng.randbytes(4 * tokens) for _ in range(200)]
    began = time.process_time()
    for text in texts:
        prefix_blocks(text)
    hashed = (time.process_time() - began) / len(texts) * 1e6
    blocks = [prefix_blocks(text) for text in texts]
    open_tickets: list[Ticket] = []
    began = time.process_time()
    for number in range(requests):
        dispatcher.submit(Ask("t", tokens, 300, blocks[number % len(blocks)], f"s{number % 500}"), number)
        for ticket in dispatcher.dispatch(number):
            dispatcher.first_token(ticket)
            open_tickets.append(ticket)
        if len(open_tickets) > 64:
            dispatcher.finish(open_tickets.pop(0), input_tokens=tokens, cached_tokens=0, output_tokens=300)
    return {"hash_us": hashed, "decide_us": (time.process_time() - began) / requests * 1e6}


def main() -> None:
    """Print the tables, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    trace = load_requests(options.trace) if options.trace else conversations(seed=options.seed)
    result = {
        "trace": {
            "source": str(options.trace) if options.trace else f"synthetic, seed {options.seed}",
            "requests": len(trace),
            "input_tokens_mean": float(np.mean([each.input_tokens for each in trace])),
            "output_tokens_mean": float(np.mean([each.output_tokens for each in trace])),
            "hit_of_one_pool": {
                str(blocks): hit_rate(trace, blocks)
                for blocks in (2_930, BLOCKS, 10_000, REPLICAS * BLOCKS, 50_000, None)
            },
        },
        "closed": {name: play(trace, make(), closed=True) for name, make in POLICIES.items()},
        "open": {name: play(trace, make(), closed=False) for name, make in POLICIES.items()},
        "light_alone": light_tenant(both=False, seed=options.seed),
        "light_beside_heavy": light_tenant(both=True, seed=options.seed),
        "backlogged": [backlogged(weight, seed=options.seed) for weight in (1.0, 3.0)],
        "cpu": decision_us(),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, section in result.items():
        print(name)
        for key, value in section.items() if isinstance(section, dict) else enumerate(section):
            print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
