"""Tables of `cordee kernels`."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from cordee.cli import terminal
from cordee.hardware.catalog import Gpu
from cordee.kernels.catalogue import SHARED_BYTES_MAX, Checked, Compiled, Measured
from cordee.units import format_bytes

_BAR = 10


def compiled_table(found: Sequence[Compiled]) -> Table:
    """Return what the compiler made: a row for each kernel and architecture."""
    numbers = ("REGS", "SHARED")
    table = terminal.table("KERNEL", "FOR", "LOADS", "TENSOR CORE", *numbers, right=numbers)
    named = ""
    if any(each.spilled_bytes for each in found):
        table.caption = "!: spills into local memory"
    for each in found:
        table.add_row(
            Text("" if each.kernel == named else each.kernel, style="bold"),
            each.architecture,
            _accesses(each.load_bytes),
            Text(each.tensor_core, style="green"),
            Text(f"{each.registers}!" if each.spilled_bytes else str(each.registers)),
            _shared(each),
        )
        named = each.kernel
    return table


def _accesses(counts: Mapping[int, int]) -> str:
    """Return accesses by their width, the widest first.

    >>> _accesses({16: 6, 8: 12})
    '6x16 12x8 B'
    """
    return " ".join(f"{count}x{size}" for size, count in counts.items()) + " B" if counts else "-"


def _shared(compiled: Compiled) -> str:
    """Return the shared memory of a block, and which part it is of what one may have."""
    most = SHARED_BYTES_MAX[compiled.architecture]
    return (
        f"{format_bytes(compiled.shared_bytes)} {compiled.shared_bytes / most:3.0%}" if compiled.shared_bytes else "-"
    )


def checked_table(found: Sequence[Checked]) -> Table:
    """Return the errors of each kernel as parts of what its rounding errors allow."""
    table = terminal.table("KERNEL", "DTYPE", "SHAPE", "ERROR", "OF THE BOUND", "", right=("ERROR",))
    for each in found:
        sign, style = ("holds", "green") if each.holds else ("does not hold", "bold red")
        bar = "█" * min(_BAR, round(_BAR * each.error))
        table.add_row(
            Text(each.kernel, style="bold"),
            each.dtype,
            each.shape,
            f"{each.error:.1%}",
            f"{bar:·<{_BAR}}",
            Text(sign, style=style),
        )
    return table


def measured_table(found: Sequence[Measured], gpu: Gpu) -> Table:
    """Return times beside PyTorch's, and how near each comes to its roof on this GPU."""
    numbers = ("TIME", "REACHES", "PYTORCH")
    table = terminal.table("KERNEL", "SHAPE", "TIME", "REACHES", "OF ITS ROOF", "BOUND BY", "PYTORCH", right=numbers)
    for each in found:
        roof, bound = roof_seconds(each, gpu)
        fraction = roof / each.seconds
        bar = "█" * min(_BAR, round(_BAR * fraction))
        by_flop = bound == "arithmetic"
        reaches = (
            f"{each.flop / each.seconds / 1e12:.0f} TFLOP/s"
            if by_flop
            else f"{format_bytes(each.moved_bytes / each.seconds)}/s"
        )
        table.add_row(
            Text(each.kernel, style="bold"),
            each.shape,
            f"{each.seconds * 1e6:,.0f} us",
            reaches,
            f"{bar:·<{_BAR}} {fraction:.0%}",
            bound,
            f"{each.peer_seconds / each.seconds:.2f}x",
        )
    return table


def roof_seconds(measured: Measured, gpu: Gpu) -> tuple[float, str]:
    """Return the least time that a GPU's memory and tensor cores allow, and which of them decides.

    Williams, Waterman and Patterson, doi:10.1145/1498765.1498785.
    """
    memory = measured.sector_bytes / gpu.memory_bytes_per_s
    arithmetic = measured.flop / gpu.peak_flop_per_s("fp16") if measured.flop else 0.0
    return (arithmetic, "arithmetic") if arithmetic > memory else (memory, "memory")
