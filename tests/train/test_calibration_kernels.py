"""Probes of narrow formats and of Triton's kernels: what a GPU's list has, and the numbers of what can run here."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_calibration import TINY

from cordee.hardware.measured import tables_of
from cordee.plan.kernels import TILES
from cordee.train.calibration import quantised
from cordee.train.calibration.beyond import beyond
from cordee.train.calibration.cases import EXTENTS, Maker
from cordee.train.calibration.sweeps import measure
from cordee.train.calibration.timing import SWEEPS_MIN, Case, CudaDevice, Device, able

KERNELS = ("copy", "strided", "softmax", "scan", "norm")


class LikeCuda(Device):
    """A GPU to the list of cases, whose tensors are the CPU's."""

    kind = "cuda"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setitem(EXTENTS, "cuda", replace(TINY, rows=(1, 8), elements=(1 << 10, 1 << 12), edge=(16, 128)))
    return Maker(LikeCuda(torch.get_num_threads()), "bf16")


def test_fp8_products_are_those_of_their_matrices(make: Maker) -> None:
    found, refused = able(list(quantised.fp8_products(make)))
    assert not refused, "torch's CPU multiplies fp8"
    outputs, inputs, tokens = 16, 16, make.extent.tokens[0]
    x, g, w = (make.tensor(*size).to(quantised.FP8).double() for size in
               ((tokens, inputs), (tokens, outputs), (outputs, inputs)))  # fmt: skip
    wanted = {"forward": x @ w.t(), "inner": g @ w, "weight": g.t() @ x}
    for name, expected in wanted.items():
        case = next(
            each for each in found if each.table == f"product fp8 {name}" and each.at == (tokens, outputs, inputs)
        )
        assert case.work == 2 * tokens * outputs * inputs
        result = case.run()
        assert isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16
        assert torch.allclose(result.double(), expected, rtol=2**-7, atol=1e-2)
    assert set(tables_of([_timed(each) for each in found])) == {f"product fp8 {name}" for name in wanted}


def _timed(case: Case):  # type: ignore[no-untyped-def]
    case.found = [1e-3] * SWEEPS_MIN
    return case.result()


def test_a_dequantised_matrix_is_the_one_that_was_packed(make: Maker) -> None:
    runs = {each.table: each.run for each in quantised.dequantised(make) if isinstance(each, Case)}
    weight = make.tensor(64, 64).float()
    found = runs["dequantise int8 bf16"]()
    assert isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16
    # Half of a step of the row's scale, and the rounding of the result to bf16.
    half_step = weight.abs().amax(1, keepdim=True) / 127 / 2
    assert ((found.float() - weight).abs() <= 1.01 * half_step + weight.abs() * 2**-7).all()


def test_what_is_missing_is_refused_by_name_and_the_rest_stays(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    found, refused = beyond(make)
    assert {each.what for each in refused} == {"Triton kernels", "dequantise nf4"}
    assert all("import of" in each.why for each in refused)
    tables = {each.table for each in found}
    assert tables == {f"product fp8 {each}" for each in ("forward", "inner", "weight")} | {"dequantise int8 bf16"}


def test_what_fails_on_this_device_is_refused_once_with_its_reason() -> None:
    def unable() -> None:
        raise RuntimeError("only supported since capability 8.9\nException raised from somewhere")

    good = Case("copy fp32", (8.0,), 8.0, lambda: None, optional=True)
    found, refused = able([good, *(Case("product fp8", (n,), n, unable, optional=True) for n in (1.0, 2.0))])
    assert found == [good]
    assert refused == [("product fp8", "only supported since capability 8.9")]


def test_a_cpu_has_dequantisation_in_16_bits_alone() -> None:
    device = Device(torch.get_num_threads())
    assert beyond(Maker(device, "fp32")) == ([], [])


INTERPRETED = """
import sys; sys.path[:0] = {path!r}
from dataclasses import replace
import torch
from test_calibration import TINY
from test_calibration_kernels import LikeCuda
from cordee.train.calibration import fused
from cordee.train.calibration.cases import EXTENTS, Maker
EXTENTS["cuda"] = replace(TINY, rows=(1, 8), elements=(1 << 10, 1 << 12), edge=(16, 128))
make = Maker(LikeCuda(1), "fp16")  # tl.dot of bf16 gives wrong numbers in the interpreter
listed = list(fused.fused(make))
for each in listed:
    print(each.table, *each.at, sep="|")
runs = {{(each.table, each.at): each.run() for each in listed if each.at[0] != 256 * 128}}
x, rows, weight = make.tensor(4096), make.tensor(4, 1024), make.tensor(1024)
wanted = {{
    "copy": x, "strided": x[::4], "softmax": rows.double().softmax(1), "scan": rows.double().cumsum(1),
    "norm": torch.nn.functional.rms_norm(rows.double(), (1024,), weight.double(), 1e-6),
}}
for name, expected in wanted.items():
    found = runs[f"triton-{{name}} fp16", (float(expected.numel()),)]
    assert torch.allclose(found.double(), expected.double(), rtol=2e-3, atol=2e-2), name
a = make.tensor(128, 128).double()
assert torch.allclose(runs["triton-tile fp16", (64.0 * 64,)].double(), a @ a, rtol=2e-3, atol=2e-2)
for count in (1.0, 8.0):
    four, sixteen = (runs[f"triton-int4{{name}} fp16", (count,)] for name in ("", "-beside"))
    assert torch.allclose(four.double(), sixteen.double(), rtol=1e-2, atol=0.1), count
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
def test_the_kernels_are_in_a_gpus_list_and_compute_what_pytorch_does() -> None:
    # In the interpreter, for their numbers: it decides at Triton's import, hence a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(path=sys.path)], capture_output=True, text=True, check=False,
        timeout=300, env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    listed = [line.split("|") for line in done.stdout.splitlines()]
    assert {words[0] for words in listed} == {
        *(f"triton-{name} fp16" for name in KERNELS), "triton-tile fp16", "triton-int4 fp16", "triton-int4-beside fp16"
    }  # fmt: skip
    tiles = {float(words[1]) for words in listed if words[0] == "triton-tile fp16"}
    assert tiles == {float(height * width) for height, width, _ in TILES}


def test_nf4_is_bitsandbytes_own(make: Maker) -> None:
    pytest.importorskip("bitsandbytes")
    runs = {each.table: each.run for each in quantised.dequantised(make) if isinstance(each, Case)}
    weight, found = make.tensor(64, 64), runs["dequantise nf4 bf16"]()
    assert isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16 and found.shape == weight.shape
    # Sixteen levels of a block's largest number: the widest gap between two is 0.31 of it (QLoRA, appendix E).
    assert ((found - weight).abs() <= 0.16 * weight.abs().max()).all()


@pytest.mark.gpu
def test_a_gpu_measures_its_kernels_and_says_what_it_cannot() -> None:
    device = CudaDevice(0)
    found, refused = beyond(Maker(device, "bf16"))
    assert {f"triton-{name} bf16" for name in KERNELS} <= {each.table for each in found}
    eight = torch.cuda.get_device_capability() >= (8, 9)
    assert eight == ("product fp8 forward" in {each.table for each in found})
    assert eight == (not any(each.what.startswith("product fp8") for each in refused))
    some = [each for each in found if each.table in ("triton-copy bf16", "product fp8 forward") and each.work > 1e8]
    assert all(each.work / each.seconds > 1e10 for each in measure(some, device, 20.0))
