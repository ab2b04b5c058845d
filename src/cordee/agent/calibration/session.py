"""One calibration: probes, their quality, who else was there, and the entry that is written."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cordee.agent.calibration import files
from cordee.agent.calibration.fingerprint import CPU, device_name, fingerprint
from cordee.agent.calibration.neighbours import Neighbour, Neighbours, load, on_gpu
from cordee.agent.calibration.probes import Found, Number, probe
from cordee.errors import CatalogueError, NoisyError
from cordee.hardware.calibration import (
    DOUBT_MAX,
    POINT_DOUBT_MAX,
    Quality,
    bus_bytes_per_s,
    entry,
    memory_bytes_per_s,
    peak_flop_per_s,
    quality,
)
from cordee.hardware.catalog import Catalogue, Gpu
from cordee.hardware.measured import Refused, Sample, Table
from cordee.storage.speed import storage_speed

LIMIT_S, LIMIT_GPU_S = 40.0, 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The device to calibrate: a GPU by its index, or the CPU with so many threads.

    Attributes:
        gpu: index; None: the CPU.
        gpus: GPUs of this machine, which have collectives among them.
        threads: of the CPU.
        precision: of products, beside fp8 where the device has it.
        limit_s: seconds for the sweeps.
        storage: the folder whose speed is measured; None: none.
        collectives: among the ranks of this machine.
        anyway: keep what is too noisy.
    """

    gpu: int | None
    gpus: int
    threads: int
    precision: str
    limit_s: float
    storage: Path | None
    collectives: bool
    anyway: bool = False


@dataclass(slots=True)
class Calibration:
    """The measurements of one device.

    Attributes:
        name: as it is planned with.
        precision: of its products.
        fingerprint: what the numbers hold for.
        samples: of the device's own work, then those of collectives.
        numbers: single ones.
        refused: what the device or its software cannot do.
        fractions: of the nameplate.
        tables: what is planned with.
        quality: how still the device was.
        others: who else was there.
        load: processes that wanted a core in the last minute.
        path: the file; None: it was not written.
    """

    name: str
    precision: str
    fingerprint: dict[str, str]
    samples: list[Sample] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    fractions: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    quality: Quality | None = None
    others: tuple[Neighbour, ...] = ()
    load: float = 0.0
    path: Path | None = None


def calibrate(home: Path, wanted: Wanted, catalogue: Catalogue, said: Callable[[str], None]) -> Calibration:
    """Measure a device, and write what was found to Cordee's home.

    Args:
        home: Cordee's home.
        wanted: what to measure.
        catalogue: knows the GPU's nameplate.
        said: is told what is measured now.

    Raises:
        CatalogueError: the GPU is not known, so that its nameplate and links are not.
        NoisyError: others used the device; nothing was written.
        MissingExtraError, ScriptError: the probes do not run.
    """
    marks = fingerprint(wanted.gpu, wanted.threads)
    gpu = _known(catalogue, marks) if wanted.gpu is not None else None
    found = Calibration(device_name(marks) if gpu is None else gpu.name, wanted.precision, marks)
    around = Neighbours()
    for each in _measured(wanted, files.known_reference_s(home, found.name, marks), said):
        if isinstance(each, Number):
            found.numbers[each.name] = each.value
        elif isinstance(each, Refused):
            found.refused.append(each)
        else:
            found.samples.append(each)
    own = [each for each in found.samples if each.table not in _COLLECTIVES]
    found.quality = quality(own)
    found.others, found.load = _others(around, wanted), load()
    if found.quality.is_noisy and not wanted.anyway:
        raise _noisy(found)
    if wanted.storage is not None:
        said(f"storage: {wanted.storage}")
        found.numbers |= storage_speed(wanted.storage)
    found.fractions, found.numbers, found.tables = entry(found.samples, wanted.precision, gpu, found.numbers)
    found.path = _write(home, found, gpu, wanted)
    return found


_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")


def _known(catalogue: Catalogue, marks: dict[str, str]) -> Gpu:
    try:
        return catalogue.find_gpu(marks.get("gpu", "GPU"))
    except CatalogueError as error:
        hint = f"describe it in gpus.toml of Cordee's home first, with its nameplate; {error.hint}"
        raise CatalogueError(error.message, hint=hint) from None


def _measured(wanted: Wanted, known_s: float | None, said: Callable[[str], None]) -> Iterator[Found]:
    where = [] if wanted.gpu is None else ["--gpu", str(wanted.gpu)]
    said("products, attention, small operations, optimizer, host")
    options = ["--threads", str(wanted.threads), "--dtype", wanted.precision, "--limit", f"{wanted.limit_s:g}"]
    known = [] if known_s is None else ["--known", f"{known_s:g}"]
    yield from probe("device", *where, *options, *known)
    ranks = wanted.gpus if wanted.gpu is not None else _cpu_ranks(wanted.threads)
    if wanted.collectives and ranks > 1:
        said(f"collectives among {ranks} ranks")
        yield from probe("collectives", *where, "--ranks", str(ranks))


def _cpu_ranks(threads: int) -> int:
    """Return how many ranks of so many threads have cores of their own."""
    return max(1, (os.cpu_count() or 1) // threads)


def _others(around: Neighbours, wanted: Wanted) -> tuple[Neighbour, ...]:
    """Return who else is busy here: on the GPU, if there is anybody, else on the cores."""
    there = on_gpu(wanted.gpu) if wanted.gpu is not None else ()
    return there or around.busy()


def _noisy(found: Calibration) -> NoisyError:
    how = found.quality
    assert how is not None, "it was judged"
    who = ", ".join(f"{each.name} ({each.pid}) {each.has}" for each in found.others) or "nobody that can be seen"
    return NoisyError(
        f"{found.name} is too noisy to plan with: {how.points} points are known to {how.doubt:.1%} in the median "
        f"({DOUBT_MAX:.0%} at most), {how.poor} of them no better than to {POINT_DOUBT_MAX:.0%}; "
        f"load {found.load:.1f} on {os.cpu_count()} cores",
        hint=f"beside it were {who}; run it when they are done, or longer (--limit), or keep it with --anyway",
    )


def _write(home: Path, found: Calibration, gpu: Gpu | None, wanted: Wanted) -> Path:
    as_of = datetime.now(UTC).date().isoformat()
    source = f"cordee calibrate on {found.fingerprint['host']}"
    memory_bytes = round(found.numbers["memory_bytes"])
    if gpu is not None:
        facts = files.gpu_facts(gpu, memory_bytes, source, as_of)
    else:
        assert found.fingerprint["device"] == CPU, "a GPU has a nameplate"
        facts = files.cpu_facts(
            memory_bytes=memory_bytes,
            memory_bytes_per_s=memory_bytes_per_s(found.tables, wanted.precision),
            flop_per_s={wanted.precision: peak_flop_per_s(found.tables, wanted.precision)},
            ranks=_cpu_ranks(wanted.threads),
            link_bytes_per_s=bus_bytes_per_s(found.samples) or _NO_LINK,
            source=source,
            as_of=as_of,
        )
    how = found.quality
    assert how is not None, "it was judged"
    numbers = found.numbers | {"doubt": how.doubt, "points_spread": how.spread, "load": found.load}
    marks = found.fingerprint | {"index": str(wanted.gpu or 0), "count": str(max(1, wanted.gpus))}
    before = files.kept_together(home, found.name)
    parts: dict[str, dict[str, Any]] = {
        "fingerprint": marks,
        "efficiency": before.get("efficiency", {}) | found.fractions,
        "numbers": before.get("numbers", {}) | numbers,
        "tables": before.get("tables", {}) | files.table_values(found.tables),
    }
    return files.write(home, found.name, facts, parts)


_NO_LINK = 1e9  # bytes a second, where no collective was measured: nobody plans several ranks by it
