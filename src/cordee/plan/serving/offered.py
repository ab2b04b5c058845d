"""Smaller formats to offer: those that the engine serves, and whose products the GPU computes."""

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.engine import Engine
from cordee.plan.serving.formats import KV, WEIGHTS, Format
from cordee.plan.serving.speed.products import computed_in

SMALLER = ("fp8", "int8", "nvfp4", "int4", "gguf-q8_0", "gguf-q4_k_m")
SMALLER_KV = ("fp8", "q8_0")


def smaller_weights(engine: Engine, gpu: Gpu, than: Format) -> list[Format]:
    """Return formats of weights with fewer bits, in the order in which they are tried; int8 only in place of fp8."""
    served = [WEIGHTS[name] for name in SMALLER if name in engine.weights and WEIGHTS[name].bits < than.bits]
    found = [each for each in served if each.weight_only or computed_in(gpu, each) == each.products]
    narrow = [each.name for each in found]
    return [each for each in found if each.name != "int8" or "fp8" not in narrow]


def smaller_kv(engine: Engine, than: Format) -> list[Format]:
    """Return formats of the KV cache with fewer bits."""
    return [KV[name] for name in SMALLER_KV if name in engine.kv and KV[name].bits < than.bits]
