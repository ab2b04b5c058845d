"""Compile the kernels without a GPU, and read from the assembly what the compiler made of them."""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from cordee.errors import MissingExtraError
from cordee.kernels.catalogue import ARCHITECTURES, Compiled, Kernel

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    raise MissingExtraError("kernels are written in Triton", hint="pip install 'cordee[kernels]'") from None

# ld.global.v4.b32, ld.global.L1::evict_last.v2.b64: a space, modifiers, a vector, a type of so many bits.
_ACCESS = re.compile(r"\b(ld|st)\.global((?:\.[a-zA-Z_][\w:]*)*)\.[bfsu](8|16|32|64|128)\b")
# cp.async.cg.shared.global [to], [from], 0x10, ...: its third operand is the bytes.
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)")
_TENSOR_CORES = (("tcgen05.mma", "tcgen05.mma"), ("wgmma.mma_async", "wgmma"), ("mma.sync", "mma.sync"))
_RESOURCES = re.compile(r"REG:(\d+).*?LOCAL:(\d+)")


def compile_kernel(kernel: Kernel, architecture: str) -> Compiled:
    """Compile a kernel for `sm80`, `sm90` or `sm100`; neither a GPU nor a driver is needed.

    Raises:
        KeyError: the architecture is none of these.
    """
    capability = ARCHITECTURES[architecture]
    function = getattr(import_module(f"cordee.kernels.{kernel.module}"), kernel.function)
    began = time.perf_counter()
    made = triton.compile(
        ASTSource(function, _signature(kernel, function.arg_names), dict(kernel.constants), _multiples(kernel)),
        target=GPUTarget("cuda", capability, 32),
        # Fused multiply-add, as the C of CUDA has it; Triton's own default differs by version.
        options={"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True},
    )
    seconds = time.perf_counter() - began
    ptx = made.asm["ptx"]
    registers, spilled = _resources(made.asm["cubin"])
    return Compiled(
        kernel=kernel.name,
        architecture=architecture,
        load_bytes=accesses(ptx, "ld"),
        store_bytes=accesses(ptx, "st"),
        tensor_core=next((name for text, name in _TENSOR_CORES if text in ptx), ""),
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=made.metadata.shared,
        ptx_lines=ptx.count("\n"),
        seconds=seconds,
    )


def accesses(ptx: str, operation: str) -> Mapping[int, int]:
    """Return how many bytes a thread moves in one global access, widest first, and how many such accesses there are.

    `operation` is `ld` or `st`.

    >>> accesses("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1 + 0];", "ld")
    {16: 1}
    >>> accesses("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", "ld")
    {16: 1}
    """
    found: Counter[int] = Counter()
    for name, modifiers, bits in _ACCESS.findall(ptx):
        if name == operation:
            vector = re.search(r"\.v([248])", modifiers)
            found[int(bits) // 8 * (int(vector[1]) if vector else 1)] += 1
    if operation == "ld":
        found.update(int(size, 0) for size in _ASYNC_COPY.findall(ptx))
    return dict(sorted(found.items(), reverse=True))


def _signature(kernel: Kernel, names: list[str]) -> dict[str, str]:
    types = [*kernel.pointers, *kernel.scalars]
    plain = [name for name in names if name not in kernel.constants]
    assert len(plain) == len(types), f"{kernel.function} has the arguments {plain}, its entry the types {types}"
    return dict(zip(plain, types, strict=True)) | dict.fromkeys(kernel.constants, "constexpr")


def _multiples(kernel: Kernel) -> dict[tuple[int], list[list[object]]]:
    """Return which arguments are multiples of 16: pointers, and sizes."""
    types = [*kernel.pointers, *kernel.scalars]
    return {(at,): [["tt.divisibility", 16]] for at, each in enumerate(types) if each != "fp32"}


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of local memory of a thread, as cuobjdump of Triton's own wheel reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = _RESOURCES.search(said.stdout + said.stderr)
    assert found, f"cuobjdump said {said.stdout[:200]!r}"
    return int(found[1]), int(found[2])
