"""How a model is laid out over GPUs, what is trained with, and whether the two divide."""

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cordee.errors import LayoutError
from cordee.workload.model import ModelShape

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Bytes per parameter in mixed precision: what it reads, adds up, and keeps."""

    name: str
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float

    @property
    def bytes_per_parameter(self) -> float:
        """All state of one parameter.

        >>> OPTIMIZERS["adamw"].bytes_per_parameter, OPTIMIZERS["adamw-8bit"].bytes_per_parameter
        (16.0, 6.0)
        """
        return float(self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes)

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        """What must be written to go on exactly: the master weights (or the weights, if none) and the moments."""
        return float((self.master_bytes or self.weight_bytes) + self.moment_bytes)


# ZeRO, arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes. Megatron-LM keeps fp32 gradients: 18. 8-bit Adam,
# arXiv:2110.02861: one byte for each moment; here without master weights, as it is run when memory is short.
OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", 2, 2, 4, 8),
        Optimizer("adamw-fp32-grads", 2, 4, 4, 8),
        Optimizer("adamw-bf16-moments", 2, 2, 4, 4),
        Optimizer("adamw-8bit", 2, 2, 0, 2),
        Optimizer("sgd-momentum", 2, 2, 4, 4),
    )
}


def find_optimizer(name: str, precision: Precision = "bf16") -> Optimizer:
    """The optimizer of this name; in pure fp32 there is no second copy of the weights.

    Raises:
        LayoutError: no such optimizer.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = (f"did you mean {near[0]}? " if near else "") + "known are " + ", ".join(OPTIMIZERS)
        raise LayoutError(f"unknown optimizer {name!r}", hint=hint)
    found = OPTIMIZERS[name]
    return Optimizer(name, 4, 4, 0, found.moment_bytes) if precision == "fp32" else found


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained with: everything about a step that is neither the model nor its layout."""

    seq_tokens: int
    global_batch: int
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    precision: Precision = "bf16"
    flash: bool = True

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.seq_tokens * self.global_batch

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """The axes of the mesh and what is sharded over them.

    `zero` is the ZeRO stage over `dp`: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights (FSDP). `sp` shards the
    norms' activations over `tp`. `micro_batch` is in sequences, per data-parallel rank.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sp: bool = False
    micro_batch: int = 1
    recompute: Recompute = "none"

    @property
    def gpus(self) -> int:
        """GPUs that it occupies."""
        return self.tp * self.pp * self.dp

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches in one step of each data-parallel rank."""
        return global_batch // (self.dp * self.micro_batch)

    @property
    def mesh(self) -> str:
        """The axes as people write them; those of size 1 go without saying.

        >>> Layout(dp=4, tp=8, pp=2, zero=1).mesh, Layout(dp=64, zero=3).mesh, Layout().mesh
        ('tp8 pp2 dp4 zero1', 'fsdp64', 'dp1')
        """
        data = "fsdp" if self.zero == 3 else "dp"
        sizes = (("tp", self.tp), ("pp", self.pp), (data, self.dp))
        axes = [f"{axis}{size}" for axis, size in sizes if size > 1] or ["dp1"]
        if self.zero in (1, 2) and self.dp > 1:
            axes.append(f"zero{self.zero}")
        return " ".join(axes)

    def __str__(self) -> str:
        how = [f"mb{self.micro_batch}"] if self.micro_batch > 1 else []
        return " ".join([self.mesh, *how] + ([self.recompute] if self.recompute != "none" else []))


@lru_cache(maxsize=1024)
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """How many layers each pipeline stage has. Odd ones go to the middle: the ends hold the embedding and the head.

    >>> stage_layers(80, 4), stage_layers(126, 4), stage_layers(61, 4)
    ((20, 20, 20, 20), (31, 32, 32, 31), (15, 16, 15, 15))
    """
    base, extra = divmod(layers, pp)
    from_the_middle = sorted(range(pp), key=lambda stage: (abs(2 * stage - (pp - 1)), stage))
    favoured = set(from_the_middle[:extra])
    return tuple(base + (stage in favoured) for stage in range(pp))


def validate(layout: Layout, shape: ModelShape, gpus: int, training: Training) -> None:
    """Refuse a layout that does not divide the GPUs, the model or the batch.

    Raises:
        LayoutError: with the numbers that do not divide.
    """
    reason = first_misfit(layout, shape, gpus, training)
    if reason is not None:
        raise LayoutError(reason[0], hint=reason[1])


def first_misfit(layout: Layout, shape: ModelShape, gpus: int, training: Training) -> tuple[str, str] | None:
    """What does not divide, and what to do about it; None if all does."""
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    if layout.gpus != gpus:
        need = f"tp*pp*dp = {tp}*{pp}*{dp} = {layout.gpus} GPUs, but the job has {gpus}"
        whole, rest = divmod(gpus, tp * pp)
        hint = f"with tp={tp} and pp={pp} use dp={whole}" if not rest else f"tp*pp must divide {gpus}"
        return f"layout needs {need}", hint
    if layout.zero not in (0, 1, 2, 3):
        return f"there is no ZeRO stage {layout.zero}", "use zero=0, 1, 2 or 3 (3 is FSDP)"
    if shape.heads % tp:
        divisors = ", ".join(str(n) for n in (1, 2, 4, 8, 16, 32) if shape.heads % n == 0)
        return f"tp={tp} does not divide the {shape.heads} attention heads of {shape.name}", f"use tp of {divisors}"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        return (
            f"tp={tp} neither divides the {shape.kv_heads} key-value heads of {shape.name} nor is a multiple of them",
            f"use a tp that divides {shape.kv_heads}, or a multiple of it",
        )
    ffn = shape.experts.ffn if shape.experts is not None else shape.ffn
    if ffn % tp:
        return f"tp={tp} does not divide the feed-forward width {ffn} of {shape.name}", "use a smaller tp"
    if pp > shape.layers:
        return f"pp={pp} stages need as many layers, but {shape.name} has {shape.layers}", f"use pp <= {shape.layers}"
    if layout.sp and training.seq_tokens % tp:
        return f"sp over tp={tp} does not divide {training.seq_tokens} tokens", "use a sequence that tp divides"
    per_step = dp * layout.micro_batch
    if training.global_batch % per_step:
        sizes = f"dp*micro_batch = {dp}*{layout.micro_batch} = {per_step}"
        message = f"{sizes} does not divide the global batch of {training.global_batch} sequences"
        return message, f"use a global batch that is a multiple of {per_step}"
    return None


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """What someone asked of a layout; None leaves it to the search."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    sp: bool | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None

    def plainest(self, gpus: int) -> Layout:
        """The layout that is nearest to what was asked, to say why it cannot be."""
        tp, pp = self.tp or 1, self.pp or 1
        return Layout(
            dp=self.dp or max(1, gpus // (tp * pp)),
            tp=tp,
            pp=pp,
            zero=self.zero or 0,
            sp=self.sp or False,
            micro_batch=self.micro_batch or 1,
            recompute=self.recompute or "none",
        )


def parse_layout(text: str) -> LayoutWanted:
    """What `tp=8,pp=2` asks for, or `tp8 pp2 dp4 zero1 mb2 full` as it is printed. `fsdp` means dp with ZeRO-3.

    >>> parse_layout("tp=8,pp=2") == LayoutWanted(tp=8, pp=2)
    True
    >>> parse_layout("fsdp64 full") == LayoutWanted(dp=64, zero=3, recompute="full")
    True

    Raises:
        LayoutError: an unknown axis, one that is given twice, or a value that it cannot have.
    """
    wanted: dict[str, str] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        axis, value = _read_part(part, text)
        if axis in wanted:
            raise LayoutError(f"layout {text!r} gives {axis} twice", hint="give each axis once")
        wanted[axis] = value
    if "fsdp" in wanted:
        if "dp" in wanted or "zero" in wanted:
            raise LayoutError(f"layout {text!r} gives fsdp and dp or zero", hint="fsdp=N means dp=N,zero=3")
        wanted |= {"dp": wanted.pop("fsdp"), "zero": "3"}
    numbers = {axis: _size(axis, value) for axis, value in wanted.items() if axis != "recompute"}
    return LayoutWanted(
        dp=numbers.get("dp"),
        tp=numbers.get("tp"),
        pp=numbers.get("pp"),
        zero=numbers.get("zero"),
        sp=bool(numbers["sp"]) if "sp" in numbers else None,
        micro_batch=numbers.get("mb"),
        recompute=next((how for how in RECOMPUTES if how == wanted.get("recompute")), None),
    )


_AXES = ("dp", "fsdp", "tp", "pp", "zero", "sp", "mb", "recompute")


def _read_part(part: str, text: str) -> tuple[str, str]:
    if part in RECOMPUTES:
        return "recompute", part
    match = re.fullmatch(r"([a-z_]+?)=?([0-9]+|none|selective|full)", part)
    if match and match[1] in _AXES and (match[2] in RECOMPUTES) == (match[1] == "recompute"):
        return match[1], match[2]
    near = difflib.get_close_matches(re.split(r"[=0-9]", part)[0], _AXES, n=1, cutoff=0.5)
    hint = (f"did you mean {near[0]}? " if near else "") + "write it as tp=8,pp=2,dp=4,zero=1,mb=1,recompute=full"
    raise LayoutError(f"layout {text!r} has a part that cannot be read: {part!r}", hint=hint)


def _size(axis: str, value: str) -> int:
    if int(value) == 0 and axis not in ("zero", "sp"):
        raise LayoutError(f"{axis}=0 is not a size", hint=f"{axis} must be a whole number from 1")
    return int(value)
