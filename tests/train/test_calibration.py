"""The probes on this CPU: what they measure is what torch does, and they end when they know it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from cordee.hardware.measured import Sample, tables_of
from cordee.train.calibration import cases as listed
from cordee.train.calibration.__main__ import main
from cordee.train.calibration.cases import EXTENTS, Maker, cases
from cordee.train.calibration.memory import measure_sustained
from cordee.train.calibration.pace import WAIT_S, Pace
from cordee.train.calibration.sweeps import measure
from cordee.train.calibration.timing import SWEEPS_MIN, Case, CudaDevice, Device

TINY = replace(
    EXTENTS["cpu"], rows=(1,), tokens=(16, 32), sides=(16, 64), edge=(16, 64), elements=(1 << 12,), sequences=(16,),
    head_dims=(16,), attended=16, logits=(1 << 14,), parameters=(1 << 18, 1 << 19),
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setitem(EXTENTS, "cpu", TINY)
    before = torch.get_num_threads()
    yield Device(1)
    torch.set_num_threads(before)


class Clockwork(Device):
    """A device whose runs take as long as they are told."""

    def __init__(self, times: Iterator[float]) -> None:
        self._times = times

    def cool(self) -> None:
        """Its runs know no caches."""

    def seconds(self, run: object, times: int = 1) -> float:
        return next(self._times)


def test_a_steady_case_ends_after_the_least_sweeps() -> None:
    case = Case("copy fp32", (8.0,), 8.0, lambda: None)
    found = list(measure([case], Clockwork(iter([1.0] * 100)), 1e9))
    assert [each.runs for each in found] == [SWEEPS_MIN] and found[0].seconds == 1.0 and found[0].doubt == 0


def test_an_unsteady_case_is_repeated_until_its_median_is_known() -> None:
    noisy = iter([1.0, 0.9, 1.1, 1.0, 1.2, 0.8] * 100)
    (found,) = measure([Case("copy fp32", (8.0,), 8.0, lambda: None)], Clockwork(noisy), 1e9)
    assert found.runs > SWEEPS_MIN and found.doubt <= 0.015 and found.seconds == pytest.approx(1.0)


def test_a_limit_ends_what_does_not_settle_and_its_doubt_says_so() -> None:
    noisy = iter([1.0, 0.2, 3.0, 1.5] * 100)
    (found,) = measure([Case("copy fp32", (8.0,), 8.0, lambda: None)], Clockwork(noisy), 0.0)
    assert found.runs == SWEEPS_MIN and found.doubt > 0.1


class Guest(Device):
    """A device whose work has its own seconds, times how slow the device is just now."""

    def __init__(self, slow: Iterator[float]) -> None:
        self._slow = slow

    def cool(self) -> None:
        """Its work knows no caches."""

    def seconds(self, run: object, times: int = 1) -> float:
        return next(self._slow)


def _paced(slow: Iterator[float], known_s: float | None = None) -> tuple[Sample, dict[str, float]]:
    """Measure one case, whose every run is followed by a look at the reference (three runs of it)."""
    device, case = Guest(slow), Case("product fp32 forward", (8.0,), 8.0, lambda: None)
    pace = Pace(device, [case], known_s, pause=lambda seconds: None)
    (found,) = measure([case], device, 1e9, pace)
    return found, pace.numbers()


def test_runs_while_the_device_was_slower_are_repeated() -> None:
    slow = chain([1.0] * 20, [1.3] * 40, repeat(1.0))
    found, numbers = _paced(slow)
    assert (found.p75_s, found.runs) == (1.0, SWEEPS_MIN)
    assert numbers["slowed_fraction"] == pytest.approx(0.3) and numbers["repeated_runs"] > 0 < numbers["waited_s"]


def test_where_the_device_gets_faster_all_runs_before_are_repeated() -> None:
    found, numbers = _paced(chain([1.3] * 20, repeat(1.0)))
    assert (found.p75_s, found.runs) == (1.0, SWEEPS_MIN)
    assert numbers["repeated_runs"] > 1 and not numbers["waited_s"]


def test_a_device_that_stays_slower_than_in_its_earlier_calibration_is_measured_and_told() -> None:
    found, numbers = _paced(repeat(1.3), known_s=1.0)
    assert found.seconds == 1.3 and numbers["waited_s"] == WAIT_S
    assert numbers["slower_than_before"] == pytest.approx(0.3) and numbers["repeated_runs"] == 0


def test_every_case_of_a_cpu_runs_and_its_tables_are_whole(tiny: Device) -> None:
    every = cases(Maker(tiny, "fp32"))
    assert len({(each.table, each.at) for each in every}) == len(every)
    samples = []
    for case in every:
        case.sample(tiny)
        case.found = [1e-3] * SWEEPS_MIN
        samples.append(case.result())
    assert set(tables_of(samples)) == {each.table for each in every}
    names = {each.table for each in every}
    assert {"pages fresh", "pages kept"} <= names
    assert {"product fp32 inner", "attention fp32 backward", "norm fp32 backward", "adamw-fused", "edge fp32"} <= names


def test_a_sample_begins_with_cold_caches_and_its_runs_write_elsewhere_each(tiny: Device) -> None:
    cooled: list[int] = []
    told: list[int] = []
    made: list[int] = []

    class Cold(Device):
        def cool(self) -> None:
            cooled.append(len(made))

    def run() -> torch.Tensor:
        found = torch.ones(1 << 12)
        made.append(found.data_ptr())
        return found

    case = Case("copy fp32", (8.0,), 8.0, run, before=told.append)
    case.sample(Cold(1))
    assert told == [1, 1, case.times] and cooled == [0, 1, 2] and case.times > 1
    assert len(set(made[-case.times :])) == case.times


def test_backward_cases_compute_the_gradients_of_their_forward_ones(tiny: Device) -> None:
    by_table = {each.table: each for each in cases(Maker(tiny, "fp32"))}
    for name in ("norm", "gate", "rotate", "attention", "loss"):
        backward = by_table[f"{name} fp32 backward"]
        assert backward.before is not None
        backward.before(1)
        gradients = backward.run()
        assert isinstance(gradients, tuple) and all(torch.isfinite(each).all() for each in gradients)
        result = by_table[f"{name} fp32 forward"].run()
        assert isinstance(result, torch.Tensor) and torch.isfinite(result).all()


def test_the_eager_norm_is_torchs() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    ours = listed._norm(x, weight)
    assert torch.allclose(ours, torch.nn.functional.rms_norm(x, (32,), weight, 1e-6), atol=1e-6)


def test_the_process_prints_samples_and_numbers(tiny: Device, capsys: pytest.CaptureFixture[str]) -> None:
    main(["device", "--limit", "0", "--threads", "1"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    numbers = {each["number"]: each["value"] for each in records if "number" in each}
    assert numbers["memory_bytes"] > numbers["context_bytes"] > 1e8
    samples = [Sample(**(each | {"at": tuple(each["at"])})) for each in records if "table" in each]
    assert len(samples) == len(cases(Maker(tiny, "fp32"))) and all(each.seconds > 0 for each in samples)


@pytest.mark.gpu
def test_a_gpu_is_measured_by_events_and_its_rates_are_below_its_nameplate() -> None:
    device = CudaDevice(0)
    every = cases(Maker(device, "bf16"))
    some = [each for each in every if each.table == "product bf16 forward" and each.at[0] == 4096]
    found = list(measure(some, device, 20.0))
    assert found and all(1e11 < each.work / each.seconds < 5e15 for each in found)


@pytest.mark.gpu
def test_a_gpu_under_load_says_what_it_keeps_and_what_it_draws() -> None:
    found = {each["number"]: each["value"] for each in measure_sustained(CudaDevice(0), 2.0)}
    assert 0.3 < found["sustained_fraction"] < 1.2
    assert 50 < found["sustained_watts"] < 3000 and 200 < found["sustained_mhz"] < 5000


def test_real_steps_run_a_few_layers_of_a_users_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Device
) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64,
        "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    main(["step", "--config", str(path), "--seq", "8", "--layers", "2", "--steps", "2"])
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(steps) == 2 and all(min(each.values()) > 0 for each in steps)
    path.write_text(json.dumps(config | {"model_type": "not-a-model"}))
    with pytest.raises(SystemExit) as ended:
        main(["step", "--config", str(path), "--seq", "8"])
    assert ended.value.code == 10 and "not-a-model" in capsys.readouterr().err
