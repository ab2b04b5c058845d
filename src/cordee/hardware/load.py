"""The one reader of the hardware facts. Called from floor 5 up; everything below takes the values as arguments."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cordee.errors import CatalogueError
from cordee.events import MigProfile
from cordee.hardware.catalog import (
    PRICED,
    Capacity,
    Catalogue,
    ChipEfficiency,
    CpuPrice,
    Gpu,
    HostDraw,
    PowerDraw,
    Price,
    Source,
)
from cordee.hardware.kernels import Grid, Kernels
from cordee.hardware.mig import MigFacts, MigTable
from cordee.hardware.power import MEAN_BUILDING, POWER, Electricity, PowerGrid, host_of
from cordee.hardware.speedups import Speedups
from cordee.near import did_you_mean
from cordee.units import GB, GiB, parse_bytes, parse_bytes_per_s

_DATA = Path(__file__).parent / "data"


def load_catalogue(prices_path: Path | None = None, gpu_files: Sequence[Path] = ()) -> Catalogue:
    """Return the GPUs and prices that Cordee ships, with the user's files of GPUs and `prices.toml` laid over them.

    Args:
        prices_path: the user's prices.
        gpu_files: those of `own_gpu_files`; a later one may describe a GPU of an earlier one anew.

    Raises:
        CatalogueError: a file is missing or is not TOML; a GPU lacks a fact, or is like none that is known; a price
            names an unknown GPU or capacity.
    """
    shipped = _shipped()
    for path in gpu_files:
        shipped = _with_own(shipped, path)
    if prices_path is None:
        return shipped
    table = _read_toml(prices_path)
    cpu = _cpu_price(table.pop("cpu"), str(prices_path)) if "cpu" in table else None
    if "electricity" in table:
        load_electricity(prices_path)  # raises if it cannot be read
        del table["electricity"]
    own = _read_prices(table, shipped, str(prices_path))
    replaced = {(price.gpu, price.capacity) for price in own}
    kept = tuple(p for p in shipped.prices if (p.gpu, p.capacity) not in replaced)
    return Catalogue(gpus=shipped.gpus, prices=kept + own, cpu=cpu)


def load_home(home: Path) -> Catalogue:
    """Return the catalogue of a Cordee home: with its `gpus.toml` and its `prices.toml`, where they are.

    Raises:
        CatalogueError: as `load_catalogue`.
    """
    prices = home / "prices.toml"
    return load_catalogue(prices if prices.exists() else None, own_gpu_files(home))


def own_gpu_files(home: Path) -> tuple[Path, ...]:
    """Return the files of a home that describe GPUs: `gpus.toml`, and what calibrations wrote, `hardware/*.toml`."""
    gpus = home / "gpus.toml"
    return (*([gpus] if gpus.exists() else []), *sorted((home / "hardware").glob("*.toml")))


_OWN_EXAMPLE = (
    'write [L4] like = "L40S", memory = "24GB", memory_bandwidth = "300GB/s", '
    'dense_tflops = { bf16 = 121, fp16 = 121 }, source = "the vendor\'s datasheet", as_of = "2026-11"'
)
_OWN_FACTS = ("memory", "memory_bandwidth", "dense_tflops", "source", "as_of")
_ALL_FACTS = ("chip", "link", "link_per_direction", "matmul", "node")
# Part of the binary nameplate (80 GB read as 80 GiB) that cards show of which nobody said it.
USUAL_VISIBLE = 0.985
_BESIDE = ("like", "units", "efficiency", "numbers", "fingerprint", "tables", "watts", "host_watts")


def _with_own(catalogue: Catalogue, path: Path) -> Catalogue:
    """Return the catalogue with the GPUs of a user's file over it.

    A GPU has its memory and speed, and the rest of the one that it is `like`, if it names one. `efficiency` lies over
    the fractions of its chip, key by key; `numbers`, `tables` and `fingerprint` are those of a calibration. What was
    measured on the GPU that it is like counts for it only if it has the same name.
    """
    every, chips = _read_toml(_DATA / "gpus.toml"), _read_toml(_DATA / "efficiency.toml")
    found: dict[str, Gpu] = {gpu.name: gpu for gpu in catalogue.gpus}
    for name, facts in _read_toml(path).items():
        where = f"{path}: {name}"
        if not isinstance(facts, dict):
            raise CatalogueError(f"{where} is {facts!r}, not a table", hint=_OWN_EXAMPLE)
        needed = _OWN_FACTS if "like" in facts else (*_OWN_FACTS, *_ALL_FACTS)
        missing = [key for key in needed if key not in facts]
        if missing:
            missing = missing if "like" in facts or "chip" in facts else ["like", *missing[: -len(_ALL_FACTS)]]
            raise CatalogueError(f"{where} lacks {', '.join(missing)}", hint=_OWN_EXAMPLE)
        model = every[_shipped().find_gpu(str(facts["like"])).name] if "like" in facts else {}
        model = {key: value for key, value in model.items() if key != "visible"}  # its own memory is another
        unknown = sorted(set(facts) - {*_BESIDE, *_OWN_FACTS, *_ALL_FACTS, "aliases", "visible", *model})
        if unknown:
            raise CatalogueError(f"{where} has unknown {', '.join(unknown)}", hint=_OWN_EXAMPLE)
        own = {key: value for key, value in facts.items() if key not in ("like", *_BESIDE[2:])}
        before = found.get(name)
        # Its spellings go on to mean it; kernels that were measured on others count for none of these.
        kept = {"aliases": list(before.aliases) if before is not None else []}
        try:
            gpu = _gpu(
                name, model | kept | own, chips, before.kernels if before and "fingerprint" in facts else Kernels()
            )
            found[name] = replace(_calibrated(gpu, facts), draw=_own_draw(name, facts, before))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CatalogueError(f"{where} cannot be read: {error}", hint=_OWN_EXAMPLE) from None
    return Catalogue(gpus=tuple(found.values()), prices=catalogue.prices, cpu=catalogue.cpu)


def _own_draw(name: str, facts: Mapping[str, Any], before: Gpu | None) -> PowerDraw | None:
    """Return the watts of a user's file, over those that an earlier file or the catalogue has of this name."""
    kept = None if before is None else before.draw
    for key in ("watts", "host_watts"):
        value = facts.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 100_000:
            raise ValueError(f"{key} = {value!r} are no watts")
    known = kept or POWER.get(name)
    if not facts.keys() & {"watts", "host_watts"}:
        return kept
    if "watts" not in facts and known is None:
        raise ValueError("host_watts without watts of its board")
    source = _source(dict(facts))
    like = name if known is not None else _shipped().find_gpu(str(facts["like"])).name if "like" in facts else ""
    host = known.host if known is not None else host_of(like)
    if "host_watts" in facts:
        host = HostDraw(float(facts["host_watts"]), str(source))
    if "watts" in facts or known is None:
        return PowerDraw(float(facts["watts"]), source, host)
    return replace(known, host=host)


def _calibrated(gpu: Gpu, facts: Mapping[str, Any]) -> Gpu:
    """Return a GPU with what the file has of its efficiency and of measured tables."""
    measured = None
    if "fingerprint" in facts:
        from cordee.hardware.measured import Measured, Table  # it imports numpy, and agents start without it

        tables = {
            key: Table(tuple(tuple(map(float, axis)) for axis in each["axes"]), tuple(map(float, each["rates"])))
            for key, each in facts.get("tables", {}).items()
        }
        numbers = {key: float(value) for key, value in facts.get("numbers", {}).items()}
        measured = Measured(tables, numbers, dict(facts["fingerprint"]), str(facts["as_of"]))
    fractions = {key: float(value) for key, value in facts.get("efficiency", {}).items()}
    if measured is not None:  # its memory is what CUDA showed
        gpu = replace(gpu, visible_fraction=1.0)
    if fractions.keys() & {"product_fraction", "product8_fraction"}:  # of this very board
        gpu = replace(gpu, board_ratio=1.0)
    return replace(gpu, efficiency=replace(gpu.efficiency, **fractions), measured=measured)  # type: ignore[arg-type]


@cache
def _shipped() -> Catalogue:
    tables = _read_toml(_DATA / "efficiency.toml")
    every = _read_toml(_DATA / "gpus.toml")
    kernels, mig = _measured(every), _mig(_read_toml(_DATA / "mig.toml"))
    gpus = tuple(replace(_gpu(name, facts, tables, kernels[name]), mig=mig.get(name)) for name, facts in every.items())
    bare = Catalogue(gpus=gpus, prices=())
    return Catalogue(gpus=gpus, prices=_read_prices(_read_toml(_DATA / "prices.toml"), bare, "prices.toml"))


def _mig(table: dict[str, Any]) -> dict[str, MigTable]:
    """Return the MIG profiles by the GPU's name, each with the placements of the way that it is divided."""
    divisions = table.pop("placements")
    found = {}
    for gpu, facts in table.items():
        placed, profiles = divisions[facts.get("placements", "eighths")], []
        for key, shape in placed["profiles"].items():
            if key not in facts:
                continue
            own = facts[key]
            slices = {name: shape[name] for name in ("size", "compute", "instances")}
            profile = MigProfile(name=own["name"], starts=tuple(shape["starts"]), **slices)
            memory_bytes = parse_bytes(own["memory"]) if "memory" in own else None
            profiles.append(MigFacts(profile, shape["id"], memory_bytes, own.get("sms")))
        sources = facts["source"], facts["as_of"], str(_source(placed))
        found[gpu] = MigTable(gpu, placed["slices"], placed["compute"], tuple(profiles), *sources)
    return found


@cache
def load_speedups() -> tuple[Speedups, ...]:
    """Return the measured speed-ups of products in formats over bf16."""
    table = _read_toml(_DATA / "speedups.toml")
    source = _source(table)
    found = []
    for gpu, engines in table.items():
        if not isinstance(engines, dict):
            continue
        for engine, versions in engines.items():
            for version, formats in versions.items():
                for name, ratios in formats.items():
                    by_batch = ratios if isinstance(ratios, dict) else dict(zip(table["batches"], ratios, strict=True))
                    batches = tuple(int(batch) for batch in by_batch)
                    found.append(Speedups(gpu, engine, version, name, batches, tuple(by_batch.values()), source))
    return tuple(found)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CatalogueError(f"{path} does not exist", hint="give the path of a prices.toml or gpus.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CatalogueError(f"{path} cannot be read: {error}", hint="it must be a TOML file") from None


def _source(facts: dict[str, Any]) -> Source:
    return Source(title=str(facts["source"]), as_of=str(facts["as_of"]))


def _measured(gpus: Mapping[str, dict[str, Any]]) -> dict[str, Kernels]:
    """Return the measured kernels of each GPU: its own, else those of the first GPU with the same chip."""
    found: dict[str, Kernels] = {}
    for path in sorted((_DATA / "kernels").glob("*.csv")):
        grids = {}
        lines = path.read_text(encoding="utf-8").splitlines()
        _, title, when, *_ = (line.strip("# ") for line in lines)  # The first comment names the columns.
        for row in (line for line in lines if not line.startswith("#")):
            kernel, each, *axes, values = row.split(";")
            grids[kernel, each] = Grid(tuple(_numbers(axis) for axis in axes), _numbers(values))
        found[path.stem] = Kernels(f"{title} ({when.partition(',')[0]})", grids, path.stem)
    chips = {gpus[name]["chip"]: kernels for name, kernels in reversed(found.items())}
    return {name: found.get(name, chips.get(facts["chip"], Kernels())) for name, facts in gpus.items()}


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split())


def _gpu(name: str, facts: dict[str, Any], tables: dict[str, Any], kernels: Kernels) -> Gpu:
    node = facts["node"]
    plain, fitted = _efficiencies(facts, tables)
    memory_bytes = parse_bytes(facts["memory"])
    visible_bytes = parse_bytes(facts["visible"]) if "visible" in facts else memory_bytes / GB * GiB * USUAL_VISIBLE
    return Gpu(
        name=name,
        aliases=tuple(facts["aliases"]),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=parse_bytes_per_s(facts["memory_bandwidth"]),
        flop_per_s={dtype: tera * 1e12 for dtype, tera in facts["dense_tflops"].items()},
        link=facts["link"],
        link_bytes_per_s=parse_bytes_per_s(facts["link_per_direction"]),
        matmul_fraction=facts["matmul"]["fraction"],
        gpus_per_node=node["gpus"],
        island_gpus=node["island_gpus"],
        network_bytes_per_s=parse_bytes_per_s(node["network_per_gpu"]),
        source=_source(facts),
        matmul_source=_source(facts["matmul"]),
        node_source=_source(node),
        uncalibrated=plain,
        efficiency=fitted,
        kernels=kernels,
        visible_fraction=visible_bytes / memory_bytes,
        board_ratio=facts["board"]["ratio"] if "board" in facts else 1.0,
    )


def _efficiencies(facts: dict[str, Any], tables: dict[str, Any]) -> tuple[ChipEfficiency, ChipEfficiency]:
    """Return the uncalibrated table of a GPU's chip, and the calibrated one, the same where nothing was fitted.

    What was measured of this very card lies over both.
    """
    chip = find_chip(facts["chip"], tables["chips"])
    assumed = {key: value for key, value in tables["assumed"].items() if key not in ("source", "as_of")}
    ceiling = facts["matmul"]["fraction"]
    own = {key: value for key, value in chip.items() if key not in ("calibrated", "source", "as_of")}
    fractions = {"product_fraction": ceiling, "product8_fraction": ceiling} | assumed | own
    source = _source(chip)
    if "units" in facts:  # cards with one chip may have different parts of it enabled
        fractions["units"], source = facts["units"]["enabled"], _source(facts["units"])
    card = dict(facts.get("efficiency", {}))
    measured = [_source(card)] if card else []
    card = {key: value for key, value in card.items() if key not in ("source", "as_of")}
    plain = ChipEfficiency(**(fractions | card), source=measured[0] if measured else source)
    if "calibrated" not in chip:
        return plain, plain
    fitted = dict(chip["calibrated"])
    source, names, software = _source(fitted), tuple(fitted.pop("fitted_on")), tuple(fitted.pop("software"))
    if measured:
        source = Source(f"{source.title}; {measured[0].title}", source.as_of)
    numbers = {key: value for key, value in fitted.items() if key not in ("source", "as_of")} | card
    return plain, ChipEfficiency(**(fractions | numbers), source=source, fitted_on=names, software=software)


def find_chip(name: str, chips: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the efficiency of this chip.

    Raises:
        CatalogueError: efficiency.toml has no such chip.
    """
    if name not in chips:
        raise CatalogueError(f"unknown chip {name!r}", hint=did_you_mean(name, chips, listed="known are "))
    return chips[name]


def _read_prices(table: dict[str, Any], catalogue: Catalogue, where: str) -> tuple[Price, ...]:
    prices = []
    for written, by_capacity in table.items():
        name = catalogue.find_gpu(written).name
        if not isinstance(by_capacity, dict):
            raise CatalogueError(f"{where}: {written} is {by_capacity!r}, not a table", hint=f"write {_example(name)}")
        prices += [_price(name, capacity, facts, where) for capacity, facts in by_capacity.items()]
    return tuple(prices)


def _cpu_price(facts: Any, where: str) -> CpuPrice:
    example = '[cpu] usd_per_core_hour = 0.04, source = "our contract", as_of = "2026-03"'
    try:
        usd, source = facts["usd_per_core_hour"], _source(facts)
    except (KeyError, TypeError) as error:
        raise CatalogueError(f"{where}: cpu lacks {error}", hint=f"write {example}") from None
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 <= usd < 10_000:
        raise CatalogueError(f"{where}: a CPU core costs {usd!r} dollars an hour", hint=f"write {example}")
    return CpuPrice(float(usd), source)


def load_electricity(prices_path: Path | None = None) -> Electricity:
    """Return what electricity costs and emits: the world's grid, or what the `[electricity]` of a prices.toml says.

    Raises:
        CatalogueError: the file is missing or is no TOML, or it names an unknown grid or a value that is none.
    """
    grids = {name: PowerGrid(name, float(row["g_co2e_per_kwh"]), _source(row)) for name, row in _grids().items()}
    table = {} if prices_path is None else _read_toml(prices_path)
    if "electricity" not in table:
        return Electricity(grid=grids["world"])
    where, facts = f"{prices_path}: electricity", table["electricity"]
    if not isinstance(facts, dict) or (unknown := sorted(set(facts) - _ELECTRICITY)):
        what = f"has unknown {', '.join(unknown)}" if isinstance(facts, dict) else f"is {facts!r}, not a table"
        raise CatalogueError(f"{where} {what}", hint=_OWN_ELECTRICITY)
    numbers = {key: value for key, value in facts.items() if key not in ("grid", "source", "as_of")}
    for key, value in numbers.items():
        least = 1 if key == "building_factor" else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 10_000:
            raise CatalogueError(f"{where} has {key} = {value!r}", hint=_OWN_ELECTRICITY)
    if numbers and not {"source", "as_of"} <= facts.keys():
        raise CatalogueError(f"{where} lacks the source of its numbers, or its date", hint=_OWN_ELECTRICITY)
    name = str(facts.get("grid", "world"))
    grams = numbers.pop("g_co2e_per_kwh", None)
    if grams is None and name not in grids:
        raise CatalogueError(f"{where}: unknown grid {name!r}", hint=did_you_mean(name, grids, listed="known are "))
    grid = (
        grids[name] if grams is None else PowerGrid(str(facts.get("grid", "your grid")), float(grams), _source(facts))
    )
    building = _source(facts) if "building_factor" in numbers else MEAN_BUILDING
    return Electricity(**numbers, building_source=building, grid=grid)


_ELECTRICITY = {"grid", "g_co2e_per_kwh", "building_factor", "usd_per_kwh", "source", "as_of"}
_OWN_ELECTRICITY = (
    'write [electricity] grid = "France", or g_co2e_per_kwh = 21.7, building_factor = 1.1, '
    'usd_per_kwh = 0.12, source = "our supplier", as_of = "2026-03"'
)


@cache
def _grids() -> dict[str, Any]:
    return _read_toml(_DATA / "grids.toml")


def _example(gpu_name: str) -> str:
    return f'[{gpu_name}.on-demand] usd_per_gpu_hour = 2.10, source = "our contract", as_of = "2026-03"'


def _price(gpu_name: str, capacity: str, facts: Any, where: str) -> Price:
    example = _example(gpu_name)
    known: dict[str, Capacity] = {name: name for name in PRICED}
    if capacity not in known:
        raise CatalogueError(f"{where}: {gpu_name} has unknown capacity {capacity!r}", hint=f"write {example}")
    try:
        usd, source = facts["usd_per_gpu_hour"], _source(facts)
    except (KeyError, TypeError) as error:
        raise CatalogueError(f"{where}: {gpu_name}.{capacity} lacks {error}", hint=f"write {example}") from None
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 <= usd < 10_000:
        raise CatalogueError(f"{where}: {gpu_name}.{capacity} costs {usd!r} dollars an hour", hint=f"write {example}")
    return Price(gpu=gpu_name, capacity=known[capacity], usd_per_gpu_hour=float(usd), source=source)
