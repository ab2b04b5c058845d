"""The planner's roofline of this CPU: a GPU record whose rates are fitted to a few probes of llama.cpp."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from cordee.hardware.catalog import Gpu
from cordee.hardware.kernels import Kernels
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.speed.speed import Speed
from cordee.workload.model import ModelShape
from cordee.workload.requests import Request
from serving.llama import Load

BATCHED_TOKENS = 512
# Bytes/s of memory, FLOP/s, seconds of a kernel that does nothing, and the part of the FLOP/s that attention reaches.
START = (10e9, 30e9, 20e-6, 0.3)


def cpu(rates: Sequence[float]) -> Gpu:
    """Return this CPU's core as the planner's GPU."""
    bytes_per_s, flop_per_s, launch_s, attention = rates
    plain = load_catalogue().find_gpu("A100")
    efficiency = replace(
        plain.uncalibrated,
        memory_fraction=1.0,
        product_fraction=1.0,
        vendor_attention_fraction=attention,
        launch_s=launch_s,
    )
    return replace(
        plain,
        name="one core",
        aliases=(),
        memory_bytes_per_s=bytes_per_s,
        flop_per_s={"fp32": flop_per_s, "bf16": flop_per_s},
        uncalibrated=efficiency,
        efficiency=efficiency,
        kernels=Kernels(),
    )


def speed(gpu: Gpu, shape: ModelShape, slots: int, slot_tokens: int = 1024) -> Speed:
    """Return the step times of llama.cpp with so many slots."""
    case = ServingCase(
        shape=shape,
        gpu=gpu,
        layout=ServingLayout(),
        weights=WEIGHTS["fp32"],
        kv=KV["fp16"],
        engine=find_engine("llama.cpp"),
        max_sequences=slots,
        max_batched_tokens=BATCHED_TOKENS,
        max_context_tokens=slot_tokens,
        memory_fraction=1.0,
    )
    return Speed(case)


def predicted_cpu_s(gpu: Gpu, shape: ModelShape, load: Load) -> float:
    """Return the CPU seconds that the planner expects of a load: its steps, played through the batching model."""
    requests = [Request(0.0, load.input_tokens, load.output_tokens)] * load.requests
    limits = Limits(max_sequences=load.at_once, max_batched_tokens=BATCHED_TOKENS, kv_tokens=10**9, block_tokens=1)
    return serve(requests, speed(gpu, shape, load.at_once), limits).busy_s


def calibrate(shape: ModelShape, probes: Sequence[Load]) -> tuple[Gpu, float]:
    """Return the core whose rates explain the probes best, and the mean error of log(CPU seconds) that is left.

    Coordinate by coordinate, in steps that shrink: four numbers, and a search that needs no library.
    """
    rates, best = list(START), math.inf

    def error(tried: Sequence[float]) -> float:
        gpu = cpu(tried)
        logs = (math.log(predicted_cpu_s(gpu, shape, each) / each.cpu_s) for each in probes)
        return sum(each * each for each in logs) / len(probes)

    for factor in (3.0, 1.8, 1.3, 1.12, 1.05, 1.02):
        improved = True
        while improved:
            improved = False
            for index, step in itertools.product(range(len(rates)), (factor, 1 / factor)):
                tried = [rate * step if at == index else rate for at, rate in enumerate(rates)]
                found = error(tried)
                if found < best - 1e-6:
                    rates, best, improved = tried, found, True
    return cpu(rates), best
