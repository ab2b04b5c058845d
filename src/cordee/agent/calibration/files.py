"""A calibration's file: `hardware/<device>.toml` in Cordee's home, one device a file, with those before it kept.

The file is one of own GPUs, as `gpus.toml` is: `hardware/load.py` reads both alike.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cordee.agent.calibration.fingerprint import CPU, same_device
from cordee.hardware.calibration import document, is_of_many
from cordee.hardware.catalog import Gpu
from cordee.hardware.measured import Table, stale

FOLDER, EARLIER = "hardware", "earlier"
PARTS = ("fingerprint", "efficiency", "numbers", "tables")


@dataclass(frozen=True, slots=True)
class Kept:
    """One device in a calibration's file, what has changed since, and the seconds of its reference product."""

    name: str
    path: Path
    as_of: str
    fingerprint: Mapping[str, str]
    changed: tuple[str, ...]
    reference_s: float | None = None


def write(home: Path, name: str, facts: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the entry of a device; the file that was there goes to `hardware/earlier/`, under its day."""
    folder, path = home / FOLDER, _path(home, name)
    (folder / EARLIER).mkdir(parents=True, exist_ok=True)
    if path.exists():
        number = 1 + sum(each.name.startswith(f"{path.stem}.") for each in (folder / EARLIER).iterdir())
        path.rename(folder / EARLIER / f"{path.stem}.{number:03}.toml")
    written = path.with_suffix(".tmp")
    written.write_text(document(name, facts, parts), encoding="utf-8")
    return written.replace(path)


def _path(home: Path, name: str) -> Path:
    return home / FOLDER / f"{name.replace(' ', '-').lower()}.toml"


def add(path: Path, name: str, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Lay numbers, fractions and tables over those of a device in its file; all else stays, and the file before too."""
    facts = dict(tomllib.loads(path.read_text(encoding="utf-8"))[name])
    merged = {part: facts.pop(part, {}) | dict(parts.get(part, {})) for part in PARTS}
    write(path.parent.parent, name, facts, merged)


def kept_together(home: Path, name: str) -> dict[str, dict[str, Any]]:
    """Return what is kept that several ranks measured together, which one device by itself does not measure again."""
    try:
        facts = tomllib.loads(_path(home, name).read_text(encoding="utf-8"))[name]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError):
        return {}
    return {
        part: {key: value for key, value in facts.get(part, {}).items() if is_of_many(key)}
        for part in ("efficiency", "numbers", "tables")
    }


def table_values(tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return tables as they stand in the file."""
    return {name: {"axes": table.axes, "rates": table.rates} for name, table in sorted(tables.items())}


def gpu_facts(gpu: Gpu, memory_bytes: int, source: str, as_of: str) -> dict[str, Any]:
    """Return the facts of a GPU of the catalogue: as its nameplate has them, with the memory that its driver shows."""
    return {
        "like": gpu.name,
        "memory": f"{memory_bytes / 1e9:.4f}GB",
        "memory_bandwidth": f"{gpu.memory_bytes_per_s / 1e9:g}GB/s",
        "dense_tflops": {dtype: rate / 1e12 for dtype, rate in gpu.flop_per_s.items()},
        "source": source,
        "as_of": as_of,
    }


def cpu_facts(
    *, memory_bytes: int, memory_bytes_per_s: float, flop_per_s: Mapping[str, float], ranks: int,
    link_bytes_per_s: float, source: str, as_of: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts of a CPU, which no catalogue has: its peaks are what was reached."""
    seen = {"source": source, "as_of": as_of}
    link = f"{link_bytes_per_s / 1e9:.5g}GB/s"
    return {
        "chip": "CPU",
        "memory": f"{memory_bytes / 1e9:.4f}GB",
        "memory_bandwidth": f"{memory_bytes_per_s / 1e9:.4g}GB/s",
        "dense_tflops": {dtype: rate / 1e12 for dtype, rate in flop_per_s.items()},
        "link": "gloo",
        "link_per_direction": link,
        "matmul": {"fraction": 1.0, **seen},
        "node": {"gpus": ranks, "island_gpus": ranks, "network_per_gpu": link, **seen},
        **seen,
    }


def known_reference_s(home: Path, name: str, marks: Mapping[str, str]) -> float | None:
    """Return the seconds of the reference product in the calibration that is kept of this device, if it still holds."""
    here = (each for each in kept(home, marks["host"]) if each.name == name)
    return next((each.reference_s for each in here if not stale(each.fingerprint, marks)), None)


def kept(home: Path, host: str) -> tuple[Kept, ...]:
    """Return the calibrations of this host's devices, GPUs first, with what has changed since each."""
    found = []
    for path in sorted((home / FOLDER).glob("*.toml")):
        try:
            every = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue  # whoever plans with it is told; here it is only not this host's
        for name, facts in every.items():
            marks = facts.get("fingerprint", {}) if isinstance(facts, dict) else {}
            if marks.get("host") == host:
                changed = stale(marks, same_device(marks))
                reference_s = facts.get("numbers", {}).get("reference_s")
                found.append(Kept(name, path, str(facts.get("as_of", "")), marks, changed, reference_s))
    return tuple(sorted(found, key=lambda each: each.fingerprint.get("device") == CPU))
