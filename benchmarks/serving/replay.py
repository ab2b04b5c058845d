"""Replay a trace of requests through one replica: `replay.py TRACE [--model llama-3-8b] [--gpu H100] [--limit N]`.

It prints latencies, what the prefix cache found, the same with two replicas of which one has the prompts, and the
seconds that the replay took.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.memory import memory
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.queueing.disaggregated import Replicas, serve_apart, transfer_s
from cordee.plan.serving.speed.speed import Speed
from cordee.workload.load import load_shape
from cordee.workload.request_files import load_requests


def main() -> None:
    """Print the replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    shape, gpu, engine = load_shape(options.model), load_catalogue().find_gpu(options.gpu), find_engine("vllm")
    case = ServingCase(
        shape, gpu, ServingLayout(), WEIGHTS["bf16"], KV["bf16"], engine, 256, 8192, shape.positions, 0.9
    )
    limits = Limits(256, 8192, memory(case).kv_tokens, engine.block_tokens, prefix_caching=True)
    requests, speed = load_requests(options.trace, limit=options.limit), Speed(case)
    began = time.perf_counter()
    served = serve(requests, speed, limits)
    print(f"{len(requests)} requests in {time.perf_counter() - began:.1f} s of this machine")
    print(f"TTFT {served.ttft}\nTPOT {served.tpot}\ne2e {served.e2e}")
    prompts = sum(each.input_tokens for each in requests)
    print(f"refused {served.refused}, preemptions {served.preemptions}, cached {served.cached_tokens / prompts:.1%}")
    pool = Replicas(1, speed, limits)
    apart = serve_apart(requests, pool, pool, lambda tokens: transfer_s(gpu, kv_bytes(case, tokens), 1))
    print(f"one replica for prompts and one for answers: TTFT {apart.ttft}\nTPOT {apart.tpot}")


if __name__ == "__main__":
    main()
