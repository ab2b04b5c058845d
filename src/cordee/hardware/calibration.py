"""From samples of probes to a device's entry in a file of own GPUs: tables, fractions of the nameplate, single numbers.

Pure: `agent/calibration/` runs the probes and writes the file, `load.py` reads it again.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cordee.hardware.catalog import Gpu
from cordee.hardware.measured import Sample, Table, left_out, tables_of

DOUBT_MAX = 0.05
"""The largest middle doubt (standard error of a median) of a calibration's points: a plan sums a dozen of them."""
POINT_DOUBT_MAX = 0.1

# Fractions of large sizes are taken from the upper half of what was measured, since the nameplate has no small ones.
_FRACTIONS = {
    "product_fraction": ("product {} forward",),
    "attention_fraction": ("attention {} forward",),
    "vendor_attention_fraction": ("attention-vendor {} forward", "attention {} forward"),
}
# Bytes that are read and written once: eager copies, and rows in one kernel, which fused frameworks have.
_MOVED = {"stream_fraction": ("copy {}",), "memory_fraction": ("triton-norm {}", "softmax {} forward")}
# What a plan still misses by where every table is measured: the order of kernels, caches, the allocator. Ours, by
# benchmarks/calibration.py on a CPU.
MODEL_SPREAD = 0.06


@dataclass(frozen=True, slots=True)
class Quality:
    """The stillness of a device while it was measured.

    Attributes:
        points: what was measured.
        spread: of the middle point, the distance between the quartiles of its runs over their median.
        doubt: of the middle point, the standard error of its median.
        worst_doubt: of the worst one, `worst`.
        poor: points whose doubt is above POINT_DOUBT_MAX.
    """

    points: int
    spread: float
    doubt: float
    worst_doubt: float
    worst: str
    poor: int

    @property
    def is_noisy(self) -> bool:
        """Return whether its numbers should not be planned with."""
        return self.doubt > DOUBT_MAX or self.poor > self.points // 5


def quality(samples: Sequence[Sample]) -> Quality:
    """Return the stillness of the device while these were measured."""
    assert samples, "probes measure something"
    worst = max(samples, key=lambda each: each.doubt)
    at = " x ".join(f"{size:g}" for size in worst.at)
    return Quality(
        points=len(samples),
        spread=statistics.median(each.spread for each in samples),
        doubt=statistics.median(each.doubt for each in samples),
        worst_doubt=worst.doubt,
        worst=f"{worst.table} at {at}",
        poor=sum(each.doubt > POINT_DOUBT_MAX for each in samples),
    )


def entry(
    samples: Sequence[Sample],
    precision: str,
    gpu: Gpu | None,
    numbers: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, float], dict[str, Table]]:
    """Return the fractions of the nameplate, the single numbers, and the tables that samples give.

    Args:
        samples: of one device.
        precision: of the products whose fractions count.
        gpu: the device as the catalogue has it; None: it has no nameplate, so what is reached is its peak.
        numbers: that are measured already (context, storage, links).
    """
    tables = tables_of(samples)
    own = dict(numbers) | _edges(tables, precision) | _host(tables) | _copies(tables) | _kernels(tables, precision)
    fractions = _fractions(tables, precision, gpu) | _links(samples, gpu) | {"portable_fraction": 1.0}
    if (exposed := own.get("exposed_fraction")) is not None:
        fractions["exposed_fraction"] = exposed
    if (issue := own.get("issue_s")) is not None:
        fractions["host_s"] = issue
    fractions["spread"] = round(math.hypot(MODEL_SPREAD, _between_points(tables)), 4)
    return fractions, own, tables


def _fractions(tables: Mapping[str, Table], precision: str, gpu: Gpu | None) -> dict[str, float]:
    """Return the fractions of the peaks that large products, attention and traffic reach."""
    peak = _peak(tables, precision) if gpu is None else gpu.peak16_flop_per_s
    found = {}
    for key, names in _FRACTIONS.items():
        table = next((tables[name.format(precision)] for name in names if name.format(precision) in tables), None)
        if table is not None and peak:
            found[key] = round(table.best / peak, 4)
    if (grouped := tables.get(f"grouped {precision}")) is not None:
        plain = tables[f"product {precision} forward"].best
        found["grouped_fraction"] = round(min(1.0, grouped.best / plain), 4)
    if gpu is not None and "fp8" in gpu.flop_per_s and (eight := tables.get("product fp8 forward")) is not None:
        found["product8_fraction"] = round(eight.best / gpu.flop_per_s["fp8"], 4)
    rate = memory_bytes_per_s(tables, precision) if gpu is None else gpu.memory_bytes_per_s
    for key, names in _MOVED.items():
        table = next((tables[name.format(precision)] for name in names if name.format(precision) in tables), None)
        if table is not None and rate:
            found[key] = round(min(1.0, 2 * _item(precision) * table.rates[-1] / rate), 4)
    return found


def _peak(tables: Mapping[str, Table], precision: str) -> float:
    table = tables.get(f"product {precision} forward")
    return 0.0 if table is None else table.best


def peak_flop_per_s(tables: Mapping[str, Table], precision: str) -> float:
    """Return the rate of the fastest product that was measured: the peak of a device without a nameplate."""
    return _peak(tables, precision)


def memory_bytes_per_s(tables: Mapping[str, Table], precision: str) -> float:
    """Return the bytes a second that the largest copy reads and writes."""
    table = tables.get(f"copy {precision}")
    return 0.0 if table is None else 2 * _item(precision) * table.rates[-1]


def _item(precision: str) -> int:
    return {"fp8": 1, "fp32": 4}.get(precision, 2)


def _edges(tables: Mapping[str, Table], precision: str) -> dict[str, float]:
    """Return what products lose whose rows are no multiple of a cache line (8 more), or of 16 bytes (1 more)."""
    table = tables.get(f"edge {precision}")
    if table is None:
        return {}
    by_more = {round(at) - 1: rate for at, rate in zip(table.axes[0], table.rates, strict=True)}
    return {
        "unaligned_fraction": round(min(1.0, by_more[8] / by_more[0]), 4),
        "odd_fraction": round(min(1.0, by_more[1] / by_more[0]), 4),
    }


def _kernels(tables: Mapping[str, Table], precision: str) -> dict[str, float]:
    """Return what strided reads leave of a copy's rate, and the rows up to which products with 4-bit weights gain."""
    found = {}
    whole, strided = (tables.get(f"triton-{name} {precision}") for name in ("copy", "strided"))
    if whole is not None and strided is not None:
        found["strided_fraction"] = round(strided.rates[-1] / whole.rates[-1], 4)
    narrow, wide = (tables.get(f"triton-int4{name} {precision}") for name in ("", "-beside"))
    if narrow is not None and wide is not None:
        each = zip(narrow.axes[0], narrow.rates, wide.rates, strict=True)
        found["int4_rows"] = max((rows for rows, four, sixteen in each if four > sixteen), default=0.0)
    return found


def _host(tables: Mapping[str, Table]) -> dict[str, float]:
    """Return the seconds in which the host issues one recorded operation."""
    table = tables.get("issue recorded")
    return {} if table is None else {"issue_s": 1 / table.rates[0]}


def _copies(tables: Mapping[str, Table]) -> dict[str, float]:
    """Return the bytes a second of the slower direction of large pinned copies between host and device."""
    both = [tables[name].rates[-1] for name in ("to-device pinned", "to-host pinned") if name in tables]
    return {"host_bytes_per_s": min(both)} if both else {}


def _links(samples: Sequence[Sample], gpu: Gpu | None) -> dict[str, float]:
    """Return latency and rate of an all-reduce among the ranks of one node, by the alpha-beta model of a ring.

    Its quiet runs count, the lower quartile: of two ranks on a shared host one waits for the other's turn.
    """
    found = sorted((each for each in samples if each.table == "all-reduce"), key=lambda each: each.at)
    if len(found) < 2:
        return {}
    ranks, latency = found[0].at[0], found[0].p25_s
    alpha = latency / (2 * (ranks - 1))
    rate = bus_bytes_per_s(samples)
    fractions = {"island_alpha_s": alpha}
    if rate is not None:
        fractions["island_fraction"] = 1.0 if gpu is None else round(min(1.0, rate / gpu.link_bytes_per_s), 4)
    return fractions


def among_ranks(samples: Sequence[Sample], numbers: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    """Return the fractions that ranks measured together give: of the links inside a node, and of the network.

    The network's rate is what one GPU has of it while all others of its node send too: `network_fraction` of the
    nameplate between two nodes, above 1 where the network is faster than it says, and `network_decay`, the power by
    which it falls with the islands that meet. Latencies are by the alpha-beta model of a ring.
    """
    found = _links(samples, gpu)
    if (exposed := numbers.get("exposed_fraction")) is not None:
        found["exposed_fraction"] = exposed
    across = sorted((each for each in samples if each.table == "all-reduce nodes"), key=lambda each: each.at)
    if not across:
        return found
    rates = {each.at[0]: _bus_bytes_per_s(each) for each in across}  # of each number of nodes the largest size's
    first = across[0]
    found["network_alpha_s"] = first.p25_s / (2 * (first.at[0] - 1))
    found["network_fraction"] = round(rates[first.at[0]] / gpu.network_bytes_per_s, 4)
    logs = [(math.log(nodes / first.at[0]), math.log(rates[first.at[0]] / rate)) for nodes, rate in rates.items()]
    if (squares := sum(more * more for more, _ in logs)) > 0:
        found["network_decay"] = round(max(0.0, sum(more * lost for more, lost in logs) / squares), 4)
    return found


def is_of_many(key: str) -> bool:
    """Return whether a key of a calibration's file is of what several ranks measured together."""
    return key.startswith(("network_", "node_")) or key.endswith((" nodes", "_together"))


def bus_bytes_per_s(samples: Sequence[Sample]) -> float | None:
    """Return the bytes a second that each rank sends in the largest all-reduce: 2(N-1)/N of them (NCCL's busbw)."""
    largest = max((each for each in samples if each.table == "all-reduce"), key=lambda each: each.at, default=None)
    return None if largest is None else _bus_bytes_per_s(largest)


def _bus_bytes_per_s(sample: Sample) -> float:
    ranks = sample.at[0]
    return 2 * (ranks - 1) / ranks * sample.work / sample.p25_s


def _between_points(tables: Mapping[str, Table]) -> float:
    """Return the standard deviation of the logarithm by which sizes between the points are missed.

    A point that is left out lies in a gap of twice the width; a curve without kinks misses a quarter of that in one of
    the ordinary width.
    """
    logs = [math.log(ratio) for table in tables.values() if len(table.rates) > 2 for ratio in left_out(table)]
    return math.sqrt(sum(each * each for each in logs) / len(logs)) / 4 if logs else 0.0


def document(name: str, facts: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the TOML of one device: its facts, and its tables of numbers."""
    lines = [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in facts.items())]
    for part, values in parts.items():
        lines += ["", f"[{name}.{part}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else _value(key)


def _value(value: Any) -> str:
    """Return a value as TOML: numbers with four or five digits, since more were not measured."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.5g}" if value != round(value) or abs(value) >= 1e15 else str(round(value)) + ".0"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(_value(each) for each in value) + "]"
