"""How a model is laid out over GPUs, what is trained with, and whether the two divide."""

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from cordee.errors import LayoutError
from cordee.plan.pipeline.schedules import SCHEDULES as RECORDS
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.split import Split, light_ends, read_split, split_text, stage_layers
from cordee.workload.model import ModelShape

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
ContextKind = Literal["ring", "all-gather", "ulysses"]
Offload = Literal["none", "optimizer", "activations", "both"]
Framework = Literal["megatron", "torch", "deepspeed", "internevo"]
Loss = Literal["fused", "parallel", "compiled", "eager"]
Attention = Literal["first", "second", "vendor"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32", "fp8")
SCHEDULES: tuple[str, ...] = tuple(RECORDS)
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "all-gather", "ulysses")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "both")
FRAMEWORKS: tuple[Framework, ...] = ("megatron", "torch", "deepspeed", "internevo")
LOSSES: tuple[Loss, ...] = ("fused", "parallel", "compiled", "eager")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Bytes per parameter in mixed precision: what it reads, adds up, and keeps."""

    name: str
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    outer_moment_bytes: float | None = None

    @property
    def outer_extra_bytes(self) -> float:
        """What a parameter of the embedding, the head or a norm keeps beyond one of a matrix (Muon has AdamW there)."""
        return 0.0 if self.outer_moment_bytes is None else self.outer_moment_bytes - self.moment_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """All state of one parameter of a matrix.

        >>> OPTIMIZERS["adamw"].bytes_per_parameter, OPTIMIZERS["adamw-8bit"].bytes_per_parameter
        (16.0, 6.0)
        """
        return float(self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes)

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        """What must be written to go on exactly: the master weights (or the weights, if none) and the moments."""
        return float((self.master_bytes or self.weight_bytes) + self.moment_bytes)


# ZeRO, arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes. Megatron-LM keeps fp32 gradients: 18;
# DeepSpeed's BF16 optimizer adds fp32 sums to 16-bit ones: 20. 8-bit Adam,
# arXiv:2110.02861: one byte for each moment; here without master weights, as it is run when memory is short.
# Muon (arXiv:2502.16982) keeps one momentum for a matrix, and AdamW's two moments for what is none.
OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", 2, 2, 4, 8),
        Optimizer("adamw-fp32-grads", 2, 4, 4, 8),
        Optimizer("adamw-fp32-sums", 2, 6, 4, 8),
        Optimizer("adamw-bf16-moments", 2, 2, 4, 4),
        Optimizer("adamw-8bit", 2, 2, 0, 2),
        Optimizer("adamw-8bit-master", 2, 2, 4, 2),
        Optimizer("muon", 2, 2, 4, 4, outer_moment_bytes=8),
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
    if precision == "fp32":
        return Optimizer(name, 4, 4, 0, found.moment_bytes, found.outer_moment_bytes)
    return found


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained with: everything about a step that is neither the model nor its layout.

    `framework` says whose buffers there are: Megatron-LM (with Transformer Engine), torch (FSDP2, torchtitan, the
    trainer of this package), DeepSpeed or InternEvo. `imbalance` is the tokens of the fullest expert rank over
    the mean of all ranks; `imbalance_by_ep` has it for each ep, where loads were measured.
    `loss` is a cross-entropy that writes its gradient into the logits (fused, as in Transformer Engine), one over a
    vocabulary that is divided by tp (parallel, as in Megatron-LM), a plain one through torch.compile, which makes no
    fp32 tensors (compiled), or without it (eager); None is what the framework does by itself.
    `overlap` says that traffic runs beside the kernels where it can. `attention` is the generation of fused kernels:
    the first FlashAttention, the second, or the vendor's own; `fused` says that norms, rotations and activations are
    one kernel each (written so, or compiled). None is what the framework does by itself.
    """

    seq_tokens: int
    global_batch: int
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    precision: Precision = "bf16"
    flash: bool = True
    dropout: bool = False
    framework: Framework = "torch"
    imbalance: float = 1.0
    imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    overlap: bool = True
    loss: Loss | None = None
    attention: Attention | None = None
    fused: bool | None = None

    def imbalance_at(self, ep: Any) -> Any:
        """Return the imbalance at this ep, a size or an array of sizes."""
        if not self.imbalance_by_ep:
            return self.imbalance
        return sum((ep == size) * factor for size, factor in self.imbalance_by_ep)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.seq_tokens * self.global_batch

    @property
    def loss_kind(self) -> Loss:
        """The kind of loss, asked for or by the framework."""
        return self.loss or ("parallel" if self.framework in ("megatron", "deepspeed") else "eager")

    @property
    def attention_kind(self) -> Attention:
        """The fused attention, asked for or by the framework."""
        return self.attention or ("vendor" if self.framework == "megatron" else "second")

    @property
    def is_fused(self) -> bool:
        """Whether small operations are fused, asked for or by the framework: torch alone runs them one by one."""
        return self.framework != "torch" if self.fused is None else self.fused

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of the mesh and what is sharded over them.

    `zero` is the ZeRO stage over the data ranks dp*cp: 0 nothing, 1 optimizer, 2 and gradients, 3 and weights (FSDP).
    `shard` ranks hold one whole copy of what is sharded (None: all of dp*cp; fewer is HSDP). `sp` shards the norms'
    activations over `tp`. `micro_batch` is in sequences, per data-parallel rank. Experts are laid out over the same
    GPUs of a stage as `ep` x `etp` x the rest; `etp` None follows `tp`. `split` gives the layers of
    each of the `stages` in the model's order; None divides evenly. `recompute_layers` limits full recomputation to so
    many layers of a rank.

    The sizes dp, tp, zero, sp, micro_batch, cp, ep, etp and shard may be NumPy arrays that broadcast: then this is
    many layouts at once, for the formulas of memory and time; the words, pp, vpp and split are one for all of them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sp: bool = False
    micro_batch: int = 1
    recompute: Recompute = "none"
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    shard: int | None = None
    schedule: str = "1f1b"
    vpp: int = 1
    cp_kind: ContextKind = "ring"
    split: Split | None = None
    recompute_layers: int | None = None
    offload: Offload = "none"

    @property
    def gpus(self) -> int:
        """GPUs that it occupies."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights before ZeRO: data and context parallel together."""
        return self.dp * self.cp

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.data_ranks if self.shard is None else self.shard

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def expert_shard_ranks(self) -> Any:
        """Ranks over which ZeRO shards an expert: no more than `shard`, no more than hold it."""
        return self.expert_data_ranks if self.shard is None else _smaller(self.expert_data_ranks, self.shard)

    @property
    def chunks(self) -> int:
        """Pieces of the model that one rank of the pipeline holds."""
        return RECORDS[self.schedule].chunks or self.vpp

    @property
    def stages(self) -> int:
        """Pieces that the model is cut into. DualPipe runs its stages from both ends: each is held twice."""
        return RECORDS[self.schedule].placement(self.pp, self.vpp).chain_stages

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches in one step of each data-parallel rank."""
        return global_batch // (self.dp * self.micro_batch)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh's axes, outermost first; those of size 1 are left out, except where all are.

        >>> Layout(dp=4, tp=8, pp=2, zero=3).axes, Layout().axes
        ((('pp', 2), ('dp', 4), ('tp', 8)), (('dp', 1),))
        """
        sizes = (("pp", self.pp), ("dp", self.dp), ("cp", self.cp), ("tp", self.tp))
        return tuple((name, size) for name, size in sizes if size > 1) or (("dp", 1),)

    @property
    def mesh(self) -> str:
        """The axes as people write them; those of size 1 go without saying.

        >>> Layout(dp=4, tp=8, pp=2, zero=1).mesh, Layout(dp=64, zero=3).mesh, Layout().mesh
        ('tp8 pp2 dp4 zero1', 'fsdp64', 'dp1')
        >>> Layout(dp=8, tp=2, cp=4, zero=3, shard=8, ep=4, etp=1).mesh
        'tp2 cp4 fsdp8 shard8 ep4 etp1'
        """
        data = "fsdp" if self.zero == 3 else "dp"
        sizes = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), (data, self.dp))
        axes = [f"{axis}{size}" for axis, size in sizes if size > 1] or ["dp1"]
        if self.zero in (1, 2) and self.data_ranks > 1:
            axes.append(f"zero{self.zero}")
        if self.zero == 3 and self.dp == 1 and self.cp > 1:
            axes.append("fsdp1")
        if self.shard is not None and self.shard != self.data_ranks:
            axes.append(f"shard{self.shard}")
        if self.ep > 1:
            axes.append(f"ep{self.ep}")
        if self.etp is not None and self.etp != self.tp:
            axes.append(f"etp{self.etp}")
        return " ".join(axes)

    def __str__(self) -> str:
        how: list[str] = [] if self.schedule in ("1f1b", "interleaved") else [self.schedule]
        how += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        how += [f"split={split_text(self.split)}"] if self.split is not None else []
        how += [self.cp_kind] if self.cp_kind != "ring" else []
        how += [f"mb{self.micro_batch}"] if self.micro_batch > 1 else []
        how += [self.recompute] if self.recompute != "none" else []
        how += [f"offload={self.offload}"] if self.offload != "none" else []
        return " ".join([self.mesh, *how])

    def __lt__(self, other: "Layout") -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[Any, ...]:
        sizes = (self.dp, self.tp, self.pp, self.zero, self.sp, self.micro_batch, self.recompute)
        more = (self.cp, self.ep, self.expert_tp, self.shard_ranks, self.schedule, self.vpp, self.cp_kind, self.offload)
        return (*sizes, *more, self.split or (), self.recompute_layers or 0)


def _smaller(left: Any, right: Any) -> Any:
    """The smaller of two sizes, or of each pair in two arrays, without importing NumPy."""
    return left * (left <= right) + right * (left > right)


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
    tp, pp, dp, cp = layout.tp, layout.pp, layout.dp, layout.cp
    if layout.gpus != gpus:
        sizes = f"tp*pp*dp = {tp}*{pp}*{dp}" if cp == 1 else f"tp*pp*cp*dp = {tp}*{pp}*{cp}*{dp}"
        whole, rest = divmod(gpus, tp * pp * cp)
        with_cp, times_cp = ("", "") if cp == 1 else (f", cp={cp}", "*cp")
        hint = (
            f"with tp={tp}{with_cp} and pp={pp} use dp={whole}" if not rest else f"tp*pp{times_cp} must divide {gpus}"
        )
        return f"layout needs {sizes} = {layout.gpus} GPUs, but the job has {gpus}", hint
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
    if shape.experts is None and shape.ffn % tp:
        return f"tp={tp} does not divide the feed-forward width {shape.ffn} of {shape.name}", "use a smaller tp"
    if pp > shape.layers:
        return f"pp={pp} stages need as many layers, but {shape.name} has {shape.layers}", f"use pp <= {shape.layers}"
    if layout.sp and training.seq_tokens % (tp * cp):
        over = f"tp={tp}" if cp == 1 else f"tp*cp = {tp}*{cp}"
        return f"sp over {over} does not divide {training.seq_tokens} tokens", "use a sequence that tp divides"
    per_step = dp * layout.micro_batch
    if training.global_batch % per_step:
        sizes = f"dp*micro_batch = {dp}*{layout.micro_batch} = {per_step}"
        message = f"{sizes} does not divide the global batch of {training.global_batch} sequences"
        return message, f"use a global batch that is a multiple of {per_step}"
    return (
        _context_misfit(layout, shape, training)
        or _expert_misfit(layout, shape)
        or _schedule_misfit(layout, shape, training)
    )


def _context_misfit(layout: Layout, shape: ModelShape, training: Training) -> tuple[str, str] | None:
    """What keeps the sequence, or the states, from being divided over these ranks."""
    cp, tp = layout.cp, layout.tp
    # Ring and all-gather give each rank a piece from the front and one from the back, so that causal work is even.
    pieces = cp if layout.cp_kind == "ulysses" else 2 * cp
    if cp > 1 and training.seq_tokens % pieces:
        message = f"cp={cp} cuts the sequence into {pieces} pieces, which do not divide {training.seq_tokens} tokens"
        return message, f"use a sequence that is a multiple of {pieces}"
    if cp > 1 and layout.cp_kind == "ulysses" and shape.heads % (tp * cp):
        message = f"ulysses needs tp*cp = {tp}*{cp} = {tp * cp} to divide the {shape.heads} heads of {shape.name}"
        return message, "use a smaller cp, or ring"
    if layout.shard is not None and layout.data_ranks % layout.shard:
        message = f"shard={layout.shard} does not divide the {layout.data_ranks} data ranks (dp*cp)"
        return message, "use a shard that divides dp*cp"
    return None


def _expert_misfit(layout: Layout, shape: ModelShape) -> tuple[str, str] | None:
    ep, etp, moe = layout.ep, layout.expert_tp, shape.experts
    if moe is None:
        return None if ep == 1 else (f"ep={ep} needs experts, but {shape.name} has none", "use ep=1")
    if moe.routed % ep:
        return (
            f"ep={ep} does not divide the {moe.routed} experts of {shape.name}",
            f"use an ep that divides {moe.routed}",
        )
    if moe.ffn % etp:
        return f"etp={etp} does not divide the expert width {moe.ffn} of {shape.name}", "use a smaller etp"
    for ffn in (moe.shared_ffn, shape.ffn if shape.expert_layers < shape.layers else 0):
        if ffn % layout.tp:
            return f"tp={layout.tp} does not divide the feed-forward width {ffn} of {shape.name}", "use a smaller tp"
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % (ep * etp):
        message = f"ep*etp = {ep}*{etp} = {ep * etp} does not divide the tp*cp*dp = {ranks} GPUs of a stage"
        return message, "use an ep whose product with etp divides them"
    return None


def _schedule_misfit(layout: Layout, shape: ModelShape, training: Training) -> tuple[str, str] | None:
    pp, chunks, schedule = layout.pp, layout.chunks, layout.schedule
    if pp == 1 and (chunks > 1 or schedule != "1f1b"):
        return f"{schedule} with {chunks} chunks needs a pipeline, but pp=1", "use pp of 2 or more, or 1f1b"
    if layout.stages > shape.layers:
        message = f"pp={pp} with {chunks} chunks each needs {pp * chunks} layers, but {shape.name} has {shape.layers}"
        return message, "use fewer chunks"
    record = find_schedule(schedule)
    if (layout.vpp > 1) != (record.chunks is None):
        return f"vpp={layout.vpp} does not go with {schedule}", "vpp of 2 or more is for interleaved, and it needs that"
    uneven = _split_misfit(layout, shape)
    if uneven is not None:
        return uneven
    micro_batches = layout.micro_batches(training.global_batch)
    if record.rounds and micro_batches % pp:
        message = f"{schedule} needs micro-batches ({micro_batches}) in multiples of pp={pp}"
        return message, "use a larger global batch, a smaller micro-batch, or 1f1b"
    misfit = record.misfit(pp, micro_batches, layout.vpp)
    return None if misfit is None else (f"{schedule} {misfit[0]}", misfit[1])


def _split_misfit(layout: Layout, shape: ModelShape) -> tuple[str, str] | None:
    """Layers that the stages do not divide are shared out only where the layout says how."""
    stages, layers, split = layout.stages, shape.layers, layout.split
    if split is not None:
        if len(split) == stages and sum(split) == layers and min(split) > 0:
            return None
        message = f"split {split_text(split)} has {sum(split)} layers on {len(split)} stages"
        return message, f"it must have the {layers} layers of {shape.name} on {stages} stages, each with one at least"
    if layers % stages == 0:
        return None
    chunked = f"pp={layout.pp}" if stages == layout.pp else f"pp={layout.pp} with {layout.chunks} chunks each"
    known = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0 and n <= max(64, layout.pp))
    ends = light_ends(layers, stages)
    works = ends if min(ends) > 0 else stage_layers(layers, stages)
    hint = f"stages that do are {known}; uneven ones work with split={split_text(works)}"
    return f"{chunked} does not divide the {layers} layers of {shape.name}", hint


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """What someone asked of a layout; None leaves it to the search.

    Where pp is asked for, stages are uneven only if `split` says so: how, or that they may be.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    sp: bool | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    shard: int | None = None
    vpp: int | None = None
    schedule: str | None = None
    cp_kind: ContextKind | None = None
    offload: Offload | None = None
    split: Split | Literal["even", "uneven"] | None = None

    def plainest(self, gpus: int) -> Layout:
        """The layout that is nearest to what was asked, to say why it cannot be."""
        tp, cp, vpp = self.tp or 1, self.cp or 1, self.vpp or 1
        pp = self.pp or (len(self.split) // vpp if isinstance(self.split, tuple) else 1)
        return Layout(
            dp=self.dp or max(1, gpus // (tp * pp * cp)),
            tp=tp,
            pp=pp,
            zero=self.zero or 0,
            sp=self.sp or False,
            micro_batch=self.micro_batch or 1,
            recompute=self.recompute or "none",
            cp=cp,
            ep=self.ep or 1,
            etp=self.etp,
            shard=self.shard,
            vpp=vpp,
            schedule=self.schedule or ("interleaved" if vpp > 1 else "1f1b"),
            cp_kind=self.cp_kind or "ring",
            offload=self.offload or "none",
            split=self.split if isinstance(self.split, tuple) else None,
        )


def layout_wanted(text: str | None, recompute: Recompute | None, micro_batch: int | None) -> LayoutWanted:
    """Return what a text such as `tp=8,pp=2` asks for, with recomputation and micro-batch where it leaves them open.

    Raises:
        LayoutError: the text cannot be read, or the micro-batch is empty.
    """
    if micro_batch is not None and micro_batch < 1:
        raise LayoutError(f"a micro-batch of {micro_batch} sequences is empty", hint="use at least 1")
    wanted = LayoutWanted() if text is None else parse_layout(text)
    return replace(wanted, recompute=wanted.recompute or recompute, micro_batch=wanted.micro_batch or micro_batch)


def near_ranks(wanted: LayoutWanted, island_gpus: int) -> int:
    """So many neighbouring ranks talk in every layer, and are not divided: experts and tp x cp, else tp x cp, else tp.

    The most that an island of so many GPUs holds; 1 if it holds no group of tp. pp and dp go outward.

    >>> wanted = LayoutWanted(tp=2, cp=2, ep=8, etp=1)
    >>> [near_ranks(wanted, gpus) for gpus in (8, 4, 2, 1)]
    [8, 4, 2, 1]
    """
    tp, cp = wanted.tp or 1, wanted.cp or 1
    experts = (wanted.ep or 1) * (tp if wanted.etp is None else wanted.etp)
    sizes = {tp, tp * cp, *([experts] if experts % (tp * cp) == 0 else [])}
    return max((size for size in sizes if size <= island_gpus), default=1)


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
    numbers = {axis: _size(axis, value) for axis, value in wanted.items() if axis not in (*_WORDS, "split")}
    return LayoutWanted(
        dp=numbers.get("dp"),
        tp=numbers.get("tp"),
        pp=numbers.get("pp"),
        zero=numbers.get("zero"),
        sp=bool(numbers["sp"]) if "sp" in numbers else None,
        micro_batch=numbers.get("mb"),
        recompute=next((how for how in RECOMPUTES if how == wanted.get("recompute")), None),
        cp=numbers.get("cp"),
        ep=numbers.get("ep"),
        etp=numbers.get("etp"),
        shard=numbers.get("shard"),
        vpp=numbers.get("vpp"),
        schedule=next((how for how in SCHEDULES if how == wanted.get("schedule")), None),
        cp_kind=next((how for how in CONTEXT_KINDS if how == wanted.get("cp_kind")), None),
        offload=next((what for what in OFFLOADS if what == wanted.get("offload")), None),
        split=_split_wanted(wanted.get("split")),
    )


def _split_wanted(text: str | None) -> Split | Literal["even", "uneven"] | None:
    said: dict[str | None, Literal["even", "uneven"] | None] = {None: None, "even": "even", "uneven": "uneven"}
    return said[text] if text in said else read_split(str(text))


_WORDS: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTES, "schedule": SCHEDULES, "cp_kind": CONTEXT_KINDS, "offload": OFFLOADS
}  # fmt: skip
_AXES = ("dp", "fsdp", "tp", "pp", "zero", "sp", "mb", "cp", "ep", "etp", "shard", "vpp")


def _read_part(part: str, text: str) -> tuple[str, str]:
    for axis, words in _WORDS.items():
        # Offload shares words with recomputation and is therefore always written out.
        if part in words and axis != "offload":
            return axis, part
        if part.startswith(f"{axis}=") and part.removeprefix(f"{axis}=") in words:
            return axis, part.removeprefix(f"{axis}=")
    if part.startswith("split="):
        return "split", part.removeprefix("split=")
    match = re.fullmatch(r"([a-z_]+?)=?([0-9]+)", part)
    if match and match[1] in _AXES:
        return match[1], match[2]
    near = difflib.get_close_matches(re.split(r"[=0-9]", part)[0], (*_AXES, *_WORDS, "split"), n=1, cutoff=0.5)
    hint = (f"did you mean {near[0]}? " if near else "") + "write it as tp=8,pp=2,dp=4,zero=1,mb=1,recompute=full"
    raise LayoutError(f"layout {text!r} has a part that cannot be read: {part!r}", hint=hint)


def _size(axis: str, value: str) -> int:
    if int(value) == 0 and axis not in ("zero", "sp"):
        raise LayoutError(f"{axis}=0 is not a size", hint=f"{axis} must be a whole number from 1")
    return int(value)
