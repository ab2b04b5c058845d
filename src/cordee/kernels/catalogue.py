"""Names of the kernels, how each is compiled, and the records of what is found out, without importing Triton."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ARCHITECTURES = MappingProxyType({"sm80": 80, "sm90": 90, "sm100": 100})
"""Compute capabilities of A100, H100 and B200, times ten."""

SHARED_BYTES_MAX = MappingProxyType({"sm80": 166_912, "sm90": 232_448, "sm100": 232_448})
"""Shared memory that one block may have: 163 and 227 KiB (CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel as it is compiled: the file and function, argument types, constants and launch options.

    `pointers` and `scalars` are argument types in Triton's words, in the order of the arguments, which begin with the
    pointers. Pointers and sizes are taken to be multiples of 16, as PyTorch's are at sizes that are used.
    `is_product`: it has tensor-core instructions. `shows` is the sentence that the kernel is there for.
    """

    name: str
    module: str
    function: str
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: Mapping[str, int] = field(hash=False)
    warps: int = 4
    stages: int = 3
    is_product: bool = False
    shows: str = ""


def _rows(name: str, module: str, pointers: tuple[str, ...], *scalars: str, shows: str) -> Kernel:
    """Return a kernel over rows of 1,024 columns, one a program."""
    return Kernel(
        name=name,
        module=module,
        function=f"{module}_kernel",
        pointers=pointers,
        scalars=("i32", *scalars),
        constants={"BLOCK": 1024},
        shows=shows,
    )


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="copy",
        module="copy",
        function="copy_kernel",
        pointers=("*fp32", "*fp32"),
        scalars=("i32",),
        constants={"STRIDE": 1, "BLOCK": 1024},
        shows="neighbours read neighbours: one wide load a thread",
    ),
    Kernel(
        name="strided copy",
        module="copy",
        function="copy_kernel",
        pointers=("*fp32", "*fp32"),
        scalars=("i32",),
        constants={"STRIDE": 4, "BLOCK": 1024},
        shows="every fourth element: narrow loads, a sector for each",
    ),
    _rows("softmax", "softmax", ("*fp32", "*fp32"), shows="three passes over a row in one read"),
    _rows("scan", "scan", ("*fp32", "*fp32"), shows="each result depends on all before it"),
    _rows("rms norm", "rms_norm", ("*fp16", "*fp16", "*fp16"), "fp32", shows="a reduction and a product fused"),
    Kernel(
        name="gemm",
        module="gemm",
        function="gemm_kernel",
        pointers=("*fp16", "*fp16", "*fp16"),
        scalars=("i32", "i32", "i32"),
        constants={"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8},
        warps=8,
        is_product=True,
        shows="tiles, so that arithmetic outweighs memory",
    ),
    Kernel(
        name="int4 gemm",
        module="int4_gemm",
        function="int4_gemm_kernel",
        pointers=("*fp16", "*u8", "*fp16", "*fp16"),
        scalars=("i32", "i32", "i32"),
        constants={"GROUP": 128, "BLOCK_M": 16, "BLOCK_N": 64},
        is_product=True,
        shows="a quarter of the bytes for the same product",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel as the compiler made it for one architecture.

    `load_bytes` and `store_bytes` are the widths of its global loads and stores by thread, widest first, with their
    counts; loads that go straight to shared memory (cp.async) are among them. `tensor_core` is the instruction of its
    products, or empty. `spilled_bytes` is local memory a thread: registers that did not suffice.
    """

    kernel: str
    architecture: str
    load_bytes: Mapping[int, int] = field(hash=False)
    store_bytes: Mapping[int, int] = field(hash=False)
    tensor_core: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx_lines: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A kernel's result against the same in fp64: its largest error as a fraction of the bound, which 1 may not exceed.

    `where` is the device, or `interpreter`.
    """

    kernel: str
    dtype: str
    shape: str
    where: str
    error: float

    @property
    def holds(self) -> bool:
        """True if each element lies within the bound that its rounding errors allow."""
        return self.error <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A kernel's median time on a GPU beside PyTorch's for the same, and its traffic and arithmetic.

    `spread` is the distance from the 20th to the 80th percentile over the median. `moved_bytes` counts each input and
    output once; `sector_bytes` what the memory must move when it answers in sectors of 32 bytes.
    """

    kernel: str
    shape: str
    seconds: float
    spread: float
    peer: str
    peer_seconds: float
    moved_bytes: float
    sector_bytes: float
    flop: float
