"""Measured kernel tables of AIConfigurator's wheel (Apache-2.0) -> src/cordee/hardware/data/kernels/GPU.csv.

`reduce_kernels.py FOLDER`, where FOLDER is `systems/data` of the unpacked wheel. It needs pandas and pyarrow, which
Cordee does not: run it in an environment of its own with PYTHONPATH=src.

At each point of a grid the fastest engine's median is taken (for experts the median of tuned engines), as a percentage
of the nameplate roofline of `plan/serving`. Weight-only int4 that the wheel lacks is bf16 times the quoted speed-ups of
speedups.toml.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from cordee.hardware.catalog import Gpu
from cordee.hardware.kernels import Grid
from cordee.hardware.load import load_catalogue, load_speedups
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.speed.attention import Attention, decode_roofline_s, prefill_roofline_s
from cordee.plan.serving.speed.grouped import Grouped, grouped_roofline_s
from cordee.plan.serving.speed.products import roofline_s

FOLDERS = {
    "A100-80": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "B300": "b300_sxm",
    "GB300": "gb300",
    "L40S": "l40s",
}
WEIGHT_NAMES = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8-block",
    "int4_wo": "int4",
    "int8_wo": "int8-wo",
    "sq": "int8",
    "nvfp4": "nvfp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
}
KV_NAMES = {"bfloat16": "bf16", "fp8": "fp8"}
TOKENS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
WIDTHS = (256, 1024, 2048, 4096, 8192, 16384, 65536)
DEPTHS = (256, 1024, 2048, 4096, 8192, 16384)
OCCUPANCY = (1, 8, 32, 128, 512, 2048)
DIMS = (64, 128, 256)
PROMPTS = (16, 64, 256, 1024, 4096, 16384)
GROUPS = (1, 8)
ROWS = (1, 8, 32, 128, 512, 2048, 8192)
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
PAIRS = (1 / 64, 1 / 8, 1, 4, 16, 64, 256, 2048)
EXPERTS = (1, 4, 16, 64, 256)
EXPERT_WEIGHTS = (2**18, 2**21, 2**23, 2**25, 2**27)
SPREADS = (1, 8)
FALLBACK = 0.45  # an engine slower than this part of the fastest, by the median of common points, ran without tuning
BYTES = (256, 4096, 16384, 65536, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)


def tables(folder: Path, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each engine's newest table of this name, with latency in seconds."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*/*/*/{name}.parquet")):
        found[f"{path.parts[-3]} {path.parts[-2]}"] = path
    for engine, path in found.items():
        table = pd.read_parquet(path)
        for column, otherwise in (("window_size", 0), ("step", 0), ("kernel_source", "")):
            table[column] = table.get(column, otherwise)
        yield engine, table.assign(latency=table.latency / 1e3)


def fill(points: pd.DataFrame, axes: Sequence[Sequence[float]], *, radius: float = 0.5) -> Grid:
    """Return the grid of `percent` at (a, b, c), each the median of the nearest measured points in logarithms."""
    names = ["a", "b", "c", "d"][: len(axes)]
    logs = np.log2(points[names].to_numpy(dtype=float).clip(min=1e-3))
    percent = np.log(points.percent.to_numpy())
    mesh = np.array(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T
    values = []
    for at in np.log2(mesh):
        distance = np.abs(logs - at).sum(axis=1)
        near = distance <= max(distance.min() + radius - 0.49, radius)
        values.append(float(np.exp(np.median(percent[near]))))
    return Grid(tuple(tuple(map(float, axis)) for axis in axes), tuple(values))


def best(found: list[pd.DataFrame], keys: list[str], *, of_engines: str = "max") -> pd.DataFrame:
    """Return the fastest engine's median at each point, or the median of all that are tuned."""
    medians = [table.groupby(keys, as_index=False).percent.median() for table in found if len(table)]
    fastest = pd.concat(medians).groupby(keys, as_index=False).percent.max()
    tuned = []
    for table in medians:
        both = table.merge(fastest, on=keys)
        if (both.percent_x / both.percent_y).median() >= FALLBACK:
            tuned.append(table)
    return pd.concat(tuned).groupby(keys, as_index=False).percent.agg(of_engines)


def products(gpu: Gpu, folder: Path) -> Iterator[tuple[str, str, Grid]]:
    tables_ = [table for _, table in tables(folder, "gemm_perf")]
    for raw, name in WEIGHT_NAMES.items():
        found = []
        for table in tables_:
            rows = table[(table.gemm_dtype == raw) & table.m.isin(TOKENS) & (table.n <= 65536) & (table.k <= 16384)]
            ideal = [roofline_s(gpu, WEIGHTS[name], m, n, k) for m, n, k in zip(rows.m, rows.n, rows.k, strict=True)]
            found.append(rows.assign(a=rows.m, b=rows.n, c=rows.k, percent=100 * np.array(ideal) / rows.latency))
        if any(len(table) for table in found):
            yield "product", name, fill(best(found, ["a", "b", "c"]), (TOKENS, WIDTHS, DEPTHS))


def quoted(gpu: Gpu, plain: Grid) -> Iterator[tuple[str, str, Grid]]:
    """Yield weight-only int4 as bf16 divided by the quoted speed-ups, which are of one square product."""
    chips = {"H100": "H200", "H200": "H200", "L40S": "L40S"}
    for row in load_speedups():
        if row.format == "int4" and row.gpu == chips.get(gpu.name):
            values = []
            for (m, n, k), percent in zip(mesh(plain), plain.values, strict=True):
                seconds = roofline_s(gpu, WEIGHTS["bf16"], m, n, k) * 100 / percent / row.at(m)
                values.append(100 * roofline_s(gpu, WEIGHTS["int4"], m, n, k) / seconds)
            yield "product", "int4", Grid(plain.axes, tuple(values))
            return


def mesh(grid: Grid) -> list[tuple[float, float, float]]:
    return [(a, b, c) for a in grid.axes[0] for b in grid.axes[1] for c in grid.axes[2]]


def prefill(gpu: Gpu, folder: Path) -> Iterator[tuple[str, str, Grid]]:
    for raw, name in KV_NAMES.items():
        found = []
        for _, table in tables(folder, "context_attention_perf"):
            rows = table[(table.kv_cache_dtype == raw) & (table.window_size == 0) & (table.isl > 8) & (table.step == 0)]
            percent = [
                100 * row.batch_size * prefill_roofline_s(gpu, plain(row), KV[name], row.isl, 0) / row.latency
                for row in rows.itertuples()
            ]
            found.append(
                rows.assign(a=rows.num_heads * rows.batch_size, b=rows.head_dim, c=rows.isl, percent=np.array(percent))
            )
        if any(len(table) for table in found):
            yield "prefill", name, fill(best(found, ["a", "b", "c"]), (OCCUPANCY, DIMS, PROMPTS))


def plain(row: object) -> Attention:
    heads, dim = int(row.num_heads), int(row.head_dim)  # type: ignore[attr-defined]
    kv_heads = int(row.num_key_value_heads) or heads  # type: ignore[attr-defined]
    return Attention(heads, kv_heads, dim, dim, 2 * kv_heads * dim)


def decode(gpu: Gpu, folder: Path) -> Iterator[tuple[str, str, Grid]]:
    for raw, name in KV_NAMES.items():
        found = []
        for _, table in tables(folder, "generation_attention_perf"):
            rows = table[(table.kv_cache_dtype == raw) & (table.window_size == 0) & (table.step >= 63)]
            heads = rows.num_key_value_heads.where(rows.num_key_value_heads > 0, rows.num_heads)
            percent = [
                100
                * decode_roofline_s(gpu, plain(row), KV[name], row.batch_size, row.batch_size * (row.step + row.isl))
                / row.latency
                for row in rows.itertuples()
            ]
            found.append(
                rows.assign(
                    a=rows.num_heads / heads,
                    b=heads * rows.batch_size,
                    c=rows.step + 1,
                    d=rows.head_dim,
                    percent=np.array(percent),
                )
            )
        if any(len(table) for table in found):
            yield "decode", name, fill(best(found, ["a", "b", "c", "d"]), (GROUPS, ROWS, CONTEXTS, DIMS))


def latent(gpu: Gpu, folder: Path) -> Iterator[tuple[str, str, Grid]]:
    """Yield DeepSeek's attention: rank 512, 64 rotated elements, keys of 192 and values of 128 elements."""
    for raw, name in KV_NAMES.items():
        long, short = [], []
        for _, table in tables(folder, "context_mla_perf"):
            rows = table[(table.kv_cache_dtype == raw) & (table.isl > 8) & (table.step == 0)]
            percent = [
                100
                * row.batch_size
                * prefill_roofline_s(gpu, Attention(row.num_heads, row.num_heads, 192, 128, 576), KV[name], row.isl, 0)
                / row.latency
                for row in rows.itertuples()
            ]
            long.append(rows.assign(a=rows.num_heads * rows.batch_size, b=192, c=rows.isl, percent=np.array(percent)))
        for _, table in tables(folder, "generation_mla_perf"):
            rows = table[(table.kv_cache_dtype == raw) & (table.step >= 63)]
            percent = [
                100
                * decode_roofline_s(
                    gpu,
                    Attention(row.num_heads, 1, 576, 512, 576),
                    KV[name],
                    row.batch_size,
                    row.batch_size * (row.step + row.isl),
                )
                / row.latency
                for row in rows.itertuples()
            ]
            short.append(rows.assign(a=rows.num_heads, b=rows.batch_size, c=rows.step + 1, percent=np.array(percent)))
        if any(len(table) for table in long):
            yield "latent_prefill", name, fill(best(long, ["a", "b", "c"]), (OCCUPANCY, (192,), PROMPTS))
        if any(len(table) for table in short):
            yield "latent_decode", name, fill(best(short, ["a", "b", "c"]), ((16, 128), ROWS, CONTEXTS))


def experts(gpu: Gpu, folder: Path) -> Iterator[tuple[str, str, Grid]]:
    tables_ = [table for _, table in tables(folder, "moe_perf")]
    by_name: dict[str, list[pd.DataFrame]] = {}
    for raw, name in WEIGHT_NAMES.items():
        for table in tables_:
            rows = table[(table.moe_dtype == raw) & ~table.kernel_source.str.contains("nongated")]
            even = rows[rows.distribution == "balanced"]
            rows = even if len(even) else rows[rows.distribution == "power_law_1.01"]
            percent, weights = [], []
            for row in rows.itertuples():
                group = Grouped(
                    row.num_experts / row.moe_ep_size,
                    row.num_experts,
                    row.topk,
                    row.hidden_size,
                    row.inter_size / row.moe_tp_size,
                )
                weights.append(group.weights)
                percent.append(100 * grouped_roofline_s(gpu, WEIGHTS[name], group, row.num_tokens) / row.latency)
            rows = rows.assign(
                a=rows.num_tokens * rows.topk / rows.num_experts,
                b=rows.num_experts / rows.moe_ep_size,
                c=np.array(weights),
                d=rows.moe_ep_size,
                percent=np.array(percent),
            )
            if len(rows):
                by_name.setdefault(name, []).append(rows)
    for name, found in by_name.items():
        keys = ["a", "b", "c", "d", "hidden_size", "topk"]
        yield (
            "experts",
            name,
            fill(best(found, keys, of_engines="median"), (PAIRS, EXPERTS, EXPERT_WEIGHTS, SPREADS), radius=1.0),
        )


def sums(folder: Path) -> Iterator[tuple[str, str, Grid]]:
    """Yield the microseconds of an all-reduce of 16-bit words inside an island."""
    found = []
    for _, table in tables(folder, "custom_allreduce_perf"):
        rows = table[table.num_gpus <= 8]
        size = 2.0 * rows.message_size  # the tables count 16-bit elements: int8 takes half of half's time at one size
        found.append(pd.DataFrame({"a": rows.num_gpus, "b": size, "percent": 1e6 * rows.latency}))
    for _, table in tables(folder, "nccl_perf"):
        rows = table[(table.op_name == "all_reduce") & (table.nccl_dtype == "half") & (table.num_gpus <= 8)]
        found.append(pd.DataFrame({"a": rows.num_gpus, "b": 2.0 * rows.message_size, "percent": 1e6 * rows.latency}))
    if not any(len(table) for table in found):
        return
    fastest = pd.concat(found).groupby(["a", "b"], as_index=False).percent.min()
    ranks = sorted(fastest.a.unique())
    yield "all_reduce", "bf16", fill(fastest[fastest.percent > 0], (ranks, BYTES))


def written(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> None:
    root = Path(sys.argv[1])
    out = Path("src/cordee/hardware/data/kernels")
    catalogue = load_catalogue()
    for name, folder in FOLDERS.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        gpu, path = catalogue.find_gpu(name), root / folder
        engines = sorted({engine for engine, _ in tables(path, "gemm_perf")})
        rows = [
            "# kernel;format;axes;percent of the nameplate roofline, or microseconds (all_reduce)",
            f"# aiconfigurator_core 0.12.0 (PyPI, Apache-2.0), systems/data/{folder}: {', '.join(engines)}",
            "# 2026-11, by benchmarks/serving/reduce_kernels.py",
        ]
        makers: tuple[Callable[[Gpu, Path], Iterator[tuple[str, str, Grid]]], ...]
        makers = (products, prefill, decode, latent, experts)
        grids = [grid for maker in makers for grid in maker(gpu, path)] + list(sums(path))
        if ("product", "int4") not in {(kernel, each) for kernel, each, _ in grids}:
            bf16 = next(grid for kernel, each, grid in grids if (kernel, each) == ("product", "bf16"))
            grids += quoted(gpu, bf16)
        for kernel, each, grid in grids:
            axes = [" ".join(f"{at:g}" for at in axis) for axis in grid.axes]
            rows.append(";".join([kernel, each, *axes, " ".join(written(value) for value in grid.values)]))
        (out / f"{name}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(name, len(grids), "grids", (out / f"{name}.csv").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
