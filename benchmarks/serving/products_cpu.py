"""Products with int8 weights on one core, by the number of tokens: unpacked in the kernel, before it, or not at all."""

import time
import warnings
from collections.abc import Callable

import torch

SIZE = 4096
FINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
Product = Callable[[torch.Tensor], torch.Tensor]


def products() -> dict[str, Product]:
    """Return the ways to multiply by the same weight, float32 first."""
    torch.manual_seed(7)
    plain = torch.nn.Linear(SIZE, SIZE, bias=False)
    weight = plain.weight.detach()
    scale = weight.abs().amax(1) / 127
    packed = (weight / scale[:, None]).round().to(torch.int8)

    def before(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, packed.to(torch.float32)) * scale

    def inside(x: torch.Tensor) -> torch.Tensor:
        return (packed.to(torch.float32)[None] * x[:, None, :]).sum(-1) * scale

    ways: dict[str, Product] = {"float32": plain, "unpacked before": before}
    ways["unpacked inside"] = torch.compile(inside, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.nn.Sequential(plain)
        ways["8 bits throughout"] = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, torch.qint8)
    return ways


def measure(sizes: tuple[int, ...] = FINE, repeats: int = 9) -> dict[str, list[float]]:
    """Return the CPU seconds of each way by tokens, the least of some repeats."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    ways = products()
    found: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for tokens in sizes:
            x = torch.randn(tokens, SIZE)
            for name, way in ways.items():
                way(x)
                found[name].append(min(_cpu_s(way, x) for _ in range(repeats)))
    return found


def _cpu_s(way: Product, x: torch.Tensor) -> float:
    began_s, calls = time.process_time(), 0
    while (spent_s := time.process_time() - began_s) < 0.04 or not calls:
        way(x)
        calls += 1
    return spent_s / calls
