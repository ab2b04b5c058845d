"""`cordee kernels`: numbers in Triton's interpreter, assembly from Triton's compiler, a roofline from given times."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from verbs import run

import cordee
from cordee.cli.kernels_text import compiled_table, measured_table, roof_seconds
from cordee.errors import InputError, MissingExtraError
from cordee.hardware.load import load_catalogue
from cordee.kernels.catalogue import ARCHITECTURES, KERNELS, SHARED_BYTES_MAX, Compiled, Measured

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")
FOLDER = Path(cordee.__file__).parent / "kernels"
TENSOR_CORE = {"sm80": "mma.sync", "sm90": "wgmma", "sm100": "tcgen05.mma"}  # PTX ISA


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    code, out, err = run(capsys, "kernels", *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, list)
    return found


def test_the_numbers_lie_within_what_rounding_allows(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys, "--check")
    assert [(each["kernel"], each["dtype"]) for each in found] == [
        (kernel.name, dtype) for kernel in KERNELS for dtype in ("float32", "float16")
    ]
    for each in found:
        assert each["where"] == "interpreter" and each["error"] <= 1, each
        # A bound that nothing comes near would show nothing.
        exact = "copy" in str(each["kernel"])
        assert each["error"] == 0 if exact else each["dtype"] == "float32" or each["error"] > 0.3, each


def test_a_wrong_kernel_is_beyond_its_bound() -> None:
    """The check itself is tried: a product that leaves out the last row of its depth."""
    script = """
import cordee.kernels.check as c
right = c.gemm
c.gemm = lambda a, b, block: right(a[:, :-1].contiguous(), b[:-1].contiguous(), block)
print(*(each.holds for each in c.check(["gemm"])))
"""
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "False"]


def test_the_compiler_makes_wide_loads_and_tensor_core_products(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys, "copy", "strided copy", "gemm", "int4 gemm")
    assert len(found) == 4 * len(ARCHITECTURES)
    for each in found:
        architecture = str(each["architecture"])
        loads, stores = each["load_bytes"], each["store_bytes"]
        assert isinstance(loads, dict) and isinstance(stores, dict)
        assert each["spilled_bytes"] == 0 and each["shared_bytes"] <= SHARED_BYTES_MAX[architecture], each
        assert max(map(int, stores)) == 16, each
        match each["kernel"]:
            case "copy":
                assert loads == {"16": 2} and each["tensor_core"] == "", each
            case "strided copy":
                # The same bytes for each of 128 threads, in eight loads of one element.
                assert loads == {"4": 8}, each
            case "gemm":
                assert each["tensor_core"] == TENSOR_CORE[architecture] and set(loads) == {"16"}, each
                assert each["shared_bytes"] >= 2 * (128 + 128) * 64 * 2, "two stages of both tiles"
            case "int4 gemm":
                assert each["tensor_core"] == "mma.sync" and "16" in loads, each


@pytest.mark.soak
def test_every_kernel_is_compiled_for_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys)
    assert len(found) == len(KERNELS) * len(ARCHITECTURES)
    assert all(each["spilled_bytes"] == 0 for each in found)


@pytest.mark.gpu
def test_kernels_reach_their_roof(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Measured(**each) for each in answers(capsys)]
    assert len(found) == len(KERNELS) + 7
    copied = next(each for each in found if each.kernel == "copy")
    assert copied.seconds <= 1.1 * copied.peer_seconds


def test_no_kernel_is_longer_than_a_screen() -> None:
    assert {kernel.module for kernel in KERNELS} | {"packing"} <= {path.stem for path in FOLDER.glob("*.py")}
    for kernel in KERNELS:
        text = (FOLDER / f"{kernel.module}.py").read_text()
        assert text.count("\n") < 60 and f"def {kernel.function}(" in text


def test_four_bits_are_packed_and_unpacked() -> None:
    torch = pytest.importorskip("torch")
    packing = import_module("cordee.kernels.packing")
    weight = torch.randn(256, 10, generator=torch.Generator().manual_seed(0))
    packed, scales = packing.pack(weight, group=64)
    assert packed.shape == (128, 10) and packed.dtype == torch.uint8 and scales.shape == (4, 10)
    off = (packing.unpack(packed, scales, group=64) - weight).abs().reshape(4, 64, 10)
    assert (off <= scales[:, None] * 0.5001).all(), "a half step at most"
    # What is stored comes back as it is.
    again, _ = packing.pack(packing.unpack(packed, scales, group=64), group=64)
    assert torch.equal(again, packed)
    assert (packing.unpack(*packing.pack(torch.zeros(64, 2), group=64), group=64) == 0).all()
    with pytest.raises(ValueError, match="250 rows do not divide"):
        packing.pack(weight[:250], group=64)


def measured(kernel: str, seconds: float, moved: float, flop: float = 0.0, sectors: float | None = None) -> Measured:
    return Measured(
        kernel=kernel,
        shape="of a test",
        seconds=seconds,
        spread=0.01,
        peer="torch",
        peer_seconds=2 * seconds,
        moved_bytes=moved,
        sector_bytes=moved if sectors is None else sectors,
        flop=flop,
    )


def test_the_roof_is_that_of_memory_or_of_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = load_catalogue().find_gpu("H100")
    # By hand: 3.35 GB at 3.35 TB/s; 989.4 TFLOP at 989.4 TFLOP/s, its bytes in a hundredth of that.
    assert roof_seconds(measured("copy", 1.0, 3.35e9), gpu) == (pytest.approx(1e-3), "memory")
    assert roof_seconds(measured("strided copy", 1.0, 1e9, sectors=3.35e9), gpu) == (pytest.approx(1e-3), "memory")
    assert roof_seconds(measured("gemm", 2.0, 3.35e10, 989.4e12), gpu) == (pytest.approx(1.0), "arithmetic")
    from cordee.cli import terminal

    terminal.stdout().print(measured_table([measured("gemm", 2.0, 3.35e10, 989.4e12)], gpu))
    out = capsys.readouterr().out
    assert "495 TFLOP/s" in out and "█████····· 50%" in out and "2.00x" in out


def test_spilled_registers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from cordee.cli import terminal

    fine = Compiled(
        kernel="gemm",
        architecture="sm80",
        load_bytes={16: 24, 4: 1},
        store_bytes={16: 8},
        tensor_core="mma.sync",
        registers=255,
        spilled_bytes=0,
        shared_bytes=65_536,
        ptx_lines=1,
        seconds=1.0,
    )
    terminal.stdout().print(compiled_table([fine]))
    assert "24x16 1x4 B" in (out := capsys.readouterr().out) and "65.5 kB 39%" in out and "255!" not in out
    terminal.stdout().print(compiled_table([fine, replace(fine, spilled_bytes=48)]))
    assert "255!" in (out := capsys.readouterr().out) and "spills" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["conv"], "there is no kernel 'conv'"),
        (["--arch", "sm70"], "there is no architecture 'sm70'"),
        (["--check", "--arch", "sm90"], "--check does not compile"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "kernels", *words)
    assert code == InputError.exit_code and says in err


def test_without_triton_its_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; from cordee.kernels.__main__ import main; main(['compile', 'copy'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == MissingExtraError.exit_code and "cordee[kernels]" in done.stderr
