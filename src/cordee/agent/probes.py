"""A node's GPUs at work: a short product and an all-reduce, against what the catalogue promises of them."""

import json
import subprocess
import sys
from collections.abc import Iterator

from cordee.agent.findings import Finding, State, by_gpu
from cordee.errors import CatalogueError
from cordee.hardware.catalog import Catalogue, Gpu
from cordee.units import format_bytes

LIMIT_S = 90.0
OK, POOR = 0.8, 0.6  # of what large products reach on this GPU
LINK_OK, LINK_POOR = 0.5, 0.25  # of the link's nameplate, which an all-reduce of 256 MiB among few GPUs does not reach


def probe_findings(gpu_name: str, gpus: int, catalogue: Catalogue, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Yield the findings of a product on each GPU and of an all-reduce among them; on CPU slots (0 GPUs) on the CPU."""
    try:
        gpu = catalogue.find_gpu(gpu_name) if gpus else None
    except CatalogueError:
        gpu = None
    yield from _product(_run("product", gpus, limit_s), gpu, gpus)
    if gpus == 1:
        yield Finding("all-reduce", "ok", "one GPU: nothing to reduce with")
    else:
        yield _reduce(_run("reduce", gpus, limit_s), gpu)


def _run(work: str, gpus: int, limit_s: float) -> dict[str, list[float] | float] | str:
    """Return what the probe printed, or why it printed nothing."""
    argv = [sys.executable, "-m", "cordee.train.probe", work, "--gpus", str(gpus)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return f"failed with exit code {done.returncode}: {last.strip()[:120]}"
    found: dict[str, list[float] | float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _product(found: dict[str, list[float] | float] | str, gpu: Gpu | None, gpus: int) -> Iterator[Finding]:
    name = "product"
    if isinstance(found, str):
        yield _failed(name, found)
        return
    speeds = found["flop_per_s"]
    assert isinstance(speeds, list), "one number a GPU"
    if not gpus:
        yield Finding("product on the CPU", "ok", f"{speeds[0] / 1e9:.0f} GFLOP/s, fp32")
        return
    yield from by_gpu((index, graded_product(speed, gpu)) for index, speed in enumerate(speeds))


def graded_product(speed: float, gpu: Gpu | None) -> Finding:
    """Return the finding of one GPU's product, by its FLOP/s in bf16; None: the catalogue does not know the GPU."""
    name, figure = "product", f"{speed / 1e12:.0f} TFLOP/s, bf16"
    if gpu is None:
        return Finding(name, "ok", figure, "not in the catalogue")
    wanted = gpu.peak16_flop_per_s * gpu.matmul_fraction
    state: State = "ok" if speed >= OK * wanted else "warn" if speed >= POOR * wanted else "bad"
    hint = (
        "" if state == "ok" else "look at its clocks, its power limit and its neighbours: nvidia-smi -q -d CLOCK,POWER"
    )
    return Finding(name, state, figure, f"{wanted / 1e12:.0f}, {OK:.0%} of it or more", hint)


def _reduce(found: dict[str, list[float] | float] | str, gpu: Gpu | None) -> Finding:
    name = "all-reduce"
    if isinstance(found, str):
        return _failed(name, found)
    speed = found["bytes_per_s"]
    assert isinstance(speed, float), "one number for all"
    if gpu is None:
        return Finding(name, "ok", f"{format_bytes(speed)}/s a rank")
    return graded_link(speed, gpu.link_bytes_per_s, gpu.link)


def graded_link(speed: float, wanted: float, link: str) -> Finding:
    """Return the finding of an all-reduce, by the bytes a second that each rank sends over a link of this speed."""
    name, figure = "all-reduce", f"{format_bytes(speed)}/s a rank"
    state: State = "ok" if speed >= LINK_OK * wanted else "warn" if speed >= LINK_POOR * wanted else "bad"
    hint = "" if state == "ok" else "look at its links and its topology: nvidia-smi nvlink -s, nvidia-smi topo -m"
    return Finding(name, state, figure, f"{format_bytes(wanted)}/s ({link}), {LINK_OK:.0%} of it or more", hint)


def _failed(name: str, why: str) -> Finding:
    return Finding(
        name, "bad", why, "an answer", f"python -m cordee.train.probe {name.rsplit('-', 1)[-1]} --gpus N shows all"
    )
