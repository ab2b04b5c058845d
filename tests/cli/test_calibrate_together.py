"""What ranks measured together, in the file of the first rank's device, and what a plan reads of it."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from verbs import run

from cordee.agent.calibration import session, together
from cordee.agent.calibration.probes import Number
from cordee.agent.calibration.session import Wanted, calibrate
from cordee.hardware.calibration import among_ranks
from cordee.hardware.collectives import network_link
from cordee.hardware.load import load_catalogue, load_home
from cordee.hardware.measured import Measured, Sample
from cordee.plan.expect import node_storage_bytes_per_s

ALPHA_S, BYTES_PER_S = 1e-4, 4e8
H100 = load_catalogue().find_gpu("H100")


def across(nodes: int, bytes_per_s: float) -> list[Sample]:
    """All-reduces of a ring by the alpha-beta model: of next to nothing, and of 256 MiB."""
    small = Sample("all-reduce nodes", (float(nodes), 8.0), 8.0, 0, 2 * (nodes - 1) * ALPHA_S, 0, 9)
    seconds = 2 * (nodes - 1) / nodes * 2.0**28 / bytes_per_s
    large = Sample("all-reduce nodes", (float(nodes), 2.0**28), 2.0**28, 0, seconds, 0, 9)
    return [each._replace(seconds=1.1 * each.p25_s, p75_s=1.2 * each.p25_s) for each in (small, large)]


def test_rate_latency_and_decay_of_a_network_come_back() -> None:
    reached = 0.8 * H100.network_bytes_per_s
    samples = [each for nodes in (2, 4, 8) for each in across(nodes, reached * (nodes / 2) ** -0.2)]
    found = among_ranks(samples, {"exposed_fraction": 0.3}, H100)
    assert found["network_fraction"] == pytest.approx(0.8)
    assert found["network_alpha_s"] == pytest.approx(ALPHA_S)
    assert found["network_decay"] == pytest.approx(0.2, abs=1e-3)
    assert found["exposed_fraction"] == 0.3


def test_two_nodes_say_nothing_of_the_decay_and_one_node_nothing_of_a_network() -> None:
    assert "network_decay" not in among_ranks(across(2, 1e10), {}, H100)
    inside = [each._replace(table="all-reduce") for each in across(2, 1e11)]
    assert not any(key.startswith("network") for key in among_ranks(inside, {}, H100))


@pytest.mark.parametrize(
    ("numbers", "bytes_per_s"),
    [
        ({"write_bytes_per_s": 3e9, "read_bytes_per_s": 5e9}, 3e9),
        ({"write_bytes_per_s": 3e9, "node_write_p95_bytes_per_s": 1e9, "node_read_p95_bytes_per_s": 2e9}, 1e9),
    ],
)
def test_a_checkpoint_waits_for_the_slowest_ranks(numbers: dict[str, float], bytes_per_s: float) -> None:
    assert node_storage_bytes_per_s(replace(H100, measured=Measured(numbers=numbers))) == bytes_per_s


def _alone(work: str, *_: str) -> Iterator[Sample | Number]:
    for words in ("product fp32 forward", "copy fp32"):
        at = (64.0, 64.0, 64.0) if "product" in words else (4096.0,)
        yield Sample(words, at, 1e6, 1e-5, 1e-5, 1.01e-5, 9)
    yield Number("memory_bytes", 64e9)
    yield Number("context_bytes", 5e8)


def _many(work: str, *words: str) -> Iterator[Sample | Number]:
    assert work == "together" and "--to" in words
    yield from across(2, BYTES_PER_S)
    yield Number("nodes_together", 2.0)
    yield Number("ranks_together", 2.0)
    yield Number("exposed_fraction", 0.5)
    for way in ("write", "read"):
        yield Number(f"node_{way}_bytes_per_s", 2e9)
        yield Number(f"node_{way}_p95_bytes_per_s", 1e9)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and this process the first of two ranks."""
    monkeypatch.setattr(session, "probe", _alone)
    monkeypatch.setattr(together, "probe", _many)
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path))
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    return tmp_path


def _calibrated_alone(home: Path) -> Path:
    wanted = Wanted(gpu=None, gpus=0, threads=1, precision="fp32", limit_s=1, storage=None, collectives=False)
    path = calibrate(home, wanted, load_home(home), lambda _: None).path
    assert path is not None
    return path


def test_links_are_added_to_the_file_of_the_device_and_stay_when_it_is_calibrated_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _calibrated_alone(home)
    code, out, err = run(capsys, "calibrate", "--cpu", "--to", str(home))
    assert code == 0, err
    assert "2 ranks on 2 nodes" in out and "write 2 GB/s a node by the median, 1 GB/s by the 95th percentile" in out
    for _ in range(2):
        (gpu,) = (each for each in load_home(home).gpus if each.measured is not None)
        assert network_link(gpu).bytes_per_s == pytest.approx(BYTES_PER_S, rel=1e-3)
        assert network_link(gpu).alpha_s == pytest.approx(ALPHA_S)
        assert node_storage_bytes_per_s(gpu) == 1e9
        assert gpu.measured is not None and gpu.measured.find("all-reduce", "nodes") is not None
        assert gpu.measured.find("product", "fp32", "forward") is not None
        _calibrated_alone(home)
    assert len(list((path.parent / "earlier").iterdir())) == 3
    assert tomllib.loads(path.read_text())[gpu.name]["numbers"]["nodes_together"] == 2


def test_the_other_ranks_take_part_and_say_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    code, out, err = run(capsys, "calibrate", "--cpu", "--to", str(home))
    assert (code, out, err) == (0, "", "")
    assert not (home / "hardware").exists()


def test_ranks_of_a_machine_that_was_not_calibrated_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--cpu", "--to", str(home))
    assert code == 35 and "without torchrun" in err


def test_the_answer_is_json_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _calibrated_alone(home)
    code, out, err = run(capsys, "calibrate", "--cpu", "--to", str(home), "--json")
    assert code == 0, err
    assert json.loads(out)["numbers"]["node_write_p95_bytes_per_s"] == 1e9
