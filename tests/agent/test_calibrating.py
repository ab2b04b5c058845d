"""A calibration on this machine around its probes: fingerprint, neighbours, refusal, the file, and plans with it."""

import itertools
import json
import os
import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cordee.agent.calibration import files, session
from cordee.agent.calibration.fingerprint import cpu_name, device_name, fingerprint, same_device
from cordee.agent.calibration.neighbours import busiest, command, cpu_seconds
from cordee.agent.calibration.probes import Number, probe
from cordee.agent.calibration.session import Wanted, calibrate
from cordee.errors import CatalogueError, DestinationError, NoisyError, ScriptError
from cordee.hardware.load import load_catalogue, load_home
from cordee.hardware.measured import Sample
from cordee.planning import find_gpu, gpus_here
from cordee.storage.speed import storage_speed

CPU_WANTED = Wanted(
    gpu=None, gpus=0, threads=1, precision="fp32", limit_s=1.0, storage=None, collectives=True
)  # fmt: skip


def fake(noise: float) -> Iterator[Sample | Number]:
    """What a CPU of 100 GFLOP/s measures, with so much noise."""
    sizes = (64.0, 1024.0)
    for m, n, k in itertools.product(sizes, sizes, sizes):
        for each in ("forward", "inner", "weight"):
            yield _sample(f"product fp32 {each}", (m, n, k), 2 * m * n * k, 2 * m * n * k / 1e11, noise)
    yield _sample("copy fp32", (4096.0,), 4096.0, 4096 * 8 / 2e10, noise)
    yield Number("memory_bytes", 64e9)
    yield Number("context_bytes", 5e8)


def _sample(table: str, at: tuple[float, ...], work: float, seconds: float, noise: float) -> Sample:
    return Sample(table, at, work, seconds * (1 + noise / 2), seconds, seconds * (1 + noise), 9)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    _probes(monkeypatch, noise=0.02)


def _probes(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    def stand_in(work: str, *_: str) -> Iterator[Sample | Number]:
        if work == "device":
            yield from fake(noise)
        else:
            yield _sample("all-reduce", (2.0, 8192.0), 8192.0, 4e-4, 0.0)
            yield _sample("all-reduce", (2.0, 2.0**24), 2.0**24, 2.0**24 / 1e9, 0.0)

    monkeypatch.setattr(session, "probe", stand_in)
    monkeypatch.setattr(session, "_cpu_ranks", lambda threads: 2)


def test_a_calibration_becomes_a_device_that_plans_are_made_for(quiet: None, tmp_path: Path) -> None:
    said: list[str] = []
    found = calibrate(tmp_path, CPU_WANTED, load_catalogue(), said.append)
    assert found.path is not None and found.path.parent == tmp_path / "hardware"
    assert said == ["products, attention, small operations, optimizer, host", "collectives among 2 ranks"]
    catalogue = load_home(tmp_path)
    gpu = catalogue.find_gpu(found.name)
    assert gpu.is_synchronous and gpu.memory_bytes == 64_000_000_000
    assert gpu.flop_per_s == {"fp32": pytest.approx(1e11)} and gpu.gpus_per_node == gpu.island_gpus == 2
    assert gpu.link_bytes_per_s == pytest.approx(1e9) and gpu.efficiency.island_alpha_s == pytest.approx(2e-4)
    assert gpu.memory_bytes_per_s == pytest.approx(2e10)
    assert gpus_here("here", catalogue) == f"1x{found.name}" and gpus_here("2xhere", catalogue) == f"2x{found.name}"
    assert gpus_here("8xH100", catalogue) == "8xH100"
    one, two, four = (find_gpu(catalogue, f"{ranks}x{found.name}", ranks, found.name) for ranks in (1, 2, 4))
    assert one.visible_bytes == 64_000_000_000 and two.visible_bytes == 32_000_000_000  # two ranks share the host's
    assert four.visible_bytes == two.visible_bytes  # and four are on two hosts


def test_a_noisy_one_is_refused_with_who_else_is_there_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _probes(monkeypatch, noise=0.9)
    with pytest.raises(NoisyError, match=r"known to \d+\.\d% in the median \(5% at most\).*load") as raised:
        calibrate(tmp_path, CPU_WANTED, load_catalogue(), lambda said: None)
    assert "beside it were" in str(raised.value.hint) and raised.value.exit_code == 81
    assert not (tmp_path / "hardware").exists()
    kept = calibrate(tmp_path, Wanted(**(_fields(CPU_WANTED) | {"anyway": True})), load_catalogue(), lambda said: None)
    assert kept.quality is not None and kept.quality.is_noisy and kept.path is not None and kept.path.exists()


def _fields(wanted: Wanted) -> dict[str, object]:
    return {name: getattr(wanted, name) for name in Wanted.__dataclass_fields__}


def test_an_earlier_file_is_kept_and_a_changed_fingerprint_is_told(quiet: None, tmp_path: Path) -> None:
    found = calibrate(tmp_path, CPU_WANTED, load_catalogue(), lambda said: None)
    assert [each.changed for each in files.kept(tmp_path, socket.gethostname())] == [()]
    assert found.path is not None
    before = found.path.read_text()
    torch = fingerprint(None, 1)["torch"]
    assert torch in before
    calibrate(tmp_path, CPU_WANTED, load_catalogue(), lambda said: None)
    assert (tmp_path / "hardware" / "earlier" / f"{found.path.stem}.001.toml").read_text() == before
    found.path.write_text(before.replace(f'torch = "{torch}"', 'torch = "1.0"'))
    (kept,) = files.kept(tmp_path, socket.gethostname())
    assert kept.changed == (f"torch 1.0 -> {torch}",) and kept.name == found.name
    assert files.kept(tmp_path, "another-host") == ()


def test_here_needs_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"nothing on .* is calibrated"):
        gpus_here("here", load_home(tmp_path))


def test_a_fingerprint_names_the_cpu_and_its_threads(tmp_path: Path) -> None:
    marks = fingerprint(None, 3)
    assert marks["device"] == "cpu" and marks["threads"] == "3" and marks["cpu"] == cpu_name()
    assert same_device(marks) == marks
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\n")
    assert device_name({"cpu": cpu_name(info), "threads": "8"}) == "cpu-amd-epyc-7763-8t"


def test_busy_neighbours_are_named_the_busiest_first() -> None:
    before = {1: ("init", 5.0), 2: ("trainer", 10.0)}
    after = {1: ("init", 5.1), 2: ("trainer", 19.0), 10**9: ("late", 2.0), 3: ("ours", 9.0)}
    found = busiest(before, after, 10.0, ours={3})
    assert [(each.pid, each.has) for each in found] == [(2, "90% of a core"), (10**9, "20% of a core")]
    assert found[1].name == "late"  # its command is not known
    name, seconds = cpu_seconds()[os.getpid()]
    assert name and seconds > 0 and Path(sys.executable).name.startswith("python") and "python" in command(os.getpid())


def test_storage_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.storage.speed.BYTES", 8 << 20)
    speed = storage_speed(tmp_path)
    assert speed["write_bytes_per_s"] > 0 and speed["read_bytes_per_s"] > 0 and not list(tmp_path.iterdir())
    with pytest.raises(DestinationError, match="cannot be measured"):
        storage_speed(tmp_path / "nowhere")


def test_a_probe_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho \'{"number": "context_bytes", "value": 5.0}\'\necho boom >&2\nexit 3\n')
    script.chmod(0o755)
    found = probe("device", python=str(script))
    assert next(found) == Number("context_bytes", 5.0)
    with pytest.raises(ScriptError, match="exit code 3: boom"):
        next(found)


def test_a_file_is_toml_that_any_reader_takes(quiet: None, tmp_path: Path) -> None:
    found = calibrate(tmp_path, CPU_WANTED, load_catalogue(), lambda said: None)
    assert found.path is not None
    every = tomllib.loads(found.path.read_text())
    assert list(every) == [found.name] and every[found.name]["fingerprint"]["host"] == socket.gethostname()
    assert json.dumps(every) and found.path.stat().st_size < 20_000
