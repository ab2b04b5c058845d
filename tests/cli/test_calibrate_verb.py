"""`cordee calibrate` and the plans that follow it, on this CPU."""

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from verbs import run

from cordee.account.drift import WEEK_US, WeekOfSteps
from cordee.agent.calibration import session
from cordee.agent.calibration.probes import Number
from cordee.cli import calibrate, terminal
from cordee.hardware.measured import Refused, Sample

MONDAY_US = 1_793_577_600_000_000  # 2 November 2026
SMALL = ("norm", "rotate", "gate", "loss", "embedding", "softmax")


def _probed(work: str, *_: str) -> Iterator[Sample | Number | Refused]:
    """What a CPU of 100 GFLOP/s measures whose small operations take a nanosecond an element."""
    sizes = (64.0, 512.0, 2048.0)
    for at in itertools.product(sizes, sizes, sizes):
        for each in ("forward", "inner", "weight"):
            yield _sample(f"product fp32 {each}", at, 2 * at[0] * at[1] * at[2], 1e11)
    for each in ("forward", "backward"):
        yield _sample(f"attention fp32 {each}", (64.0, 512.0), 1e9, 3e10)
        for name in SMALL:
            yield _sample(f"{name} fp32 {each}", (4096.0,), 4096.0, 1e9)
    for name in ("add fp32", "turn fp32", "copy fp32"):
        yield _sample(name, (4096.0,), 4096.0, 2e9)
    yield _sample("adamw-fused", (1e6,), 1e6, 5e8)
    yield Number("memory_bytes", 64e9)
    yield Number("context_bytes", 5e8)
    yield Number("sustained_fraction", 1.0)
    yield Number("sustained_watts", 640.4)
    yield Number("sustained_mhz", 1755.0)
    yield Refused("dequantise nf4", "No module named 'bitsandbytes'")


def _sample(table: str, at: tuple[float, ...], work: float, rate: float) -> Sample:
    seconds = work / rate
    return Sample(table, at, work, seconds * 1.01, seconds, seconds * 1.02, 9)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "probe", _probed)
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path))
    return tmp_path


def test_calibrated_then_planned(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "calibrate", "--cpu", "--alone")
    assert code == 0, err
    assert "under load the board draws 640 W at 1,755 MHz, and products keep 100% of the first rate" in out
    assert "not measured: dequantise nf4: No module named 'bitsandbytes'" in out
    assert "products" in out and "100.0 GFLOP/s" in out and "--gpus here --precision fp32" in out
    name = next((home / "hardware").glob("*.toml")).stem
    words = ("plan", "llama-3.2-1b", "--gpus", "here", "--precision", "fp32", "--seq", "512", "--batch", "1")
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    planned = json.loads(out)
    assert planned["gpu"]["name"] == name
    # 1.24e9 parameters at 100 GFLOP/s: 6 FLOP each for 512 tokens, and as much again for attention, loss and update.
    step_s = planned["layouts"][0]["step_s"]
    assert 38 < step_s < 60


def test_a_calibration_begins_with_the_reference_of_the_one_before_and_says_what_moved(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"reference_s": 2e-3, "slowed_fraction": 0.3, "waited_s": 12.0, "repeated_runs": 31.0}
    asked: list[tuple[str, ...]] = []

    def paced(work: str, *options: str) -> Iterator[Sample | Number | Refused]:
        asked.append(options)
        yield from _probed(work)
        yield from (Number(name, value) for name, value in found.items())

    monkeypatch.setattr(session, "probe", paced)
    _, out, _ = run(capsys, "calibrate", "--cpu", "--alone")
    assert "--known" not in asked[0]
    assert "a product took up to 30% longer for a while: 31 runs repeated, 12 s waited" in out
    found |= {"slower_than_before": 0.29, "slowed_fraction": 0.0, "waited_s": 0.0, "repeated_runs": 0.0}
    _, out, _ = run(capsys, "calibrate", "--cpu", "--alone")
    assert asked[1][-2:] == ("--known", "0.002")
    assert "takes 29% longer than in the calibration before" in out and "for a while" not in out
    found["slower_than_before"] = -0.2
    _, out, _ = run(capsys, "calibrate", "--cpu", "--alone")
    assert "took 25% longer in the calibration before: its plans were too slow" in out


def test_what_is_kept_is_shown_with_what_has_changed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--show")
    assert code == 35 and "run cordee calibrate" in err
    assert run(capsys, "calibrate", "--cpu", "--alone", "--json")[0] == 0
    code, out, _ = run(capsys, "calibrate", "--show", "--json")
    (kept,) = json.loads(out)
    assert code == 0 and kept["changed"] == []
    path = Path(kept["path"])
    path.write_text(path.read_text().replace(f'torch = "{kept["fingerprint"]["torch"]}"', 'torch = "1.0"'))
    code, out, _ = run(capsys, "calibrate", "--show")
    assert code == 0 and "torch 1.0 ->" in out and "run cordee calibrate again" in out
    code, _, err = run(capsys, "plan", "llama-3.2-1b", "--gpus", "here", "--precision", "fp32", "--seq", "512")
    assert code == 0 and "is stale: torch 1.0 ->" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cpu", "--threads", "4096"), "4096 threads are more than"),
        (("--cpu", "--precision", "int3"), "products are not measured in 'int3'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    code, _, err = run(capsys, "calibrate", *words)
    assert code == 10 and says in err


def test_an_uncalibrated_machine_is_told_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "llama-3.2-1b", "--gpus", "here")
    assert code == 14 and "hint: cordee calibrate " in err


def test_a_check_puts_real_steps_beside_the_plan(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "calibrate", "--cpu", "--alone", "--json")[0] == 0
    asked: list[str] = []

    def steps(work: str, *options: str) -> Iterator[dict[str, float]]:
        asked.extend((work, *options))
        for update_s in (0.2, 0.1, 0.3):
            yield {"forward_s": 1.0, "backward_s": 2.0, "update_s": update_s}

    monkeypatch.setattr("cordee.agent.calibration.check.records", steps)
    config = home / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ("calibrate", "--check", str(config), "--seq", "512", "--layers", "2", "--steps", "3")
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    checked = json.loads(out)
    assert asked[0] == "step" and {"--seq=512", "--layers=2", "--steps=3", "--dtype=fp32"} <= set(asked)
    parts = {each["part"]: each for each in checked["parts"]}
    measured = [parts[name]["measured_s"] for name in ("forward", "backward", "update", "step")]
    assert measured == pytest.approx([1.0, 2.0, 0.15, 3.15])  # lower quartiles
    sums = [parts[name]["planned_s"] for name in ("forward", "backward", "update")]
    assert checked["layers"] == 2 and sum(sums) <= parts["step"]["planned_s"] < 1.3 * sum(
        sums
    )  # the host is beside them
    code, out, _ = run(capsys, *words)
    assert code == 0 and "MEASURED" in out and "this one is not" in out


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "head_dim": 16, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10_000.0,
}  # fmt: skip


def test_the_history_names_the_gpus_whose_steps_have_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weeks = (
        WeekOfSteps("H100", MONDAY_US, 5, 1.04, None),
        WeekOfSteps("H100", MONDAY_US + WEEK_US, 4, 1.3, 0.25),
    )
    monkeypatch.setattr(calibrate, "weeks_of_steps", lambda events: weeks)
    monkeypatch.setattr(terminal, "connect", lambda home: nullcontext(SimpleNamespace(events=lambda: iter(()))))
    code, out, _ = run(capsys, "calibrate", "--history")
    assert code == 0 and "2026-11-02" in out and "1.30" in out
    assert "steps on H100 take 25% longer than before the week of 2026-11-09" in out
    code, out, _ = run(capsys, "calibrate", "--history", "--json")
    assert [row["over_plan"] for row in json.loads(out)] == [1.04, 1.3]
    monkeypatch.setattr(calibrate, "weeks_of_steps", lambda events: ())
    assert "no job has both planned and measured" in run(capsys, "calibrate", "--history")[1]
