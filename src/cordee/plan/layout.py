"""The layout of a model over GPUs: the axes of the mesh, what is sharded over them, and the pipeline's schedule."""

from dataclasses import dataclass
from typing import Literal

from cordee.plan.pipeline.schedules import SCHEDULES as RECORDS
from cordee.plan.split import Split, split_text

Recompute = Literal["none", "selective", "full"]
ContextKind = Literal["ring", "all-gather", "ulysses"]
Offload = Literal["none", "optimizer", "activations", "both"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES: tuple[str, ...] = tuple(RECORDS)
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "all-gather", "ulysses")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "both")


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
    def expert_shard_ranks(self) -> int:
        """Ranks over which ZeRO shards an expert: no more than `shard`, no more than hold it."""
        return self.expert_data_ranks if self.shard is None else _smaller(self.expert_data_ranks, self.shard)

    @property
    def chunks(self) -> int:
        """Pieces of the model that one rank of the pipeline holds."""
        return RECORDS[self.schedule].chunks or self.vpp

    @property
    def stages(self) -> int:
        """Pieces that the model is cut into. DualPipe runs its stages from both ends: each is held twice."""
        return RECORDS[self.schedule].placement(self.pp, self.vpp).model_stages

    def micro_batches(self, global_batch: int) -> int:
        """Return the micro-batches in one step of each data-parallel rank."""
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

    def _key(self) -> tuple[object, ...]:
        sizes = (self.dp, self.tp, self.pp, self.zero, self.sp, self.micro_batch, self.recompute)
        more = (self.cp, self.ep, self.expert_tp, self.shard_ranks, self.schedule, self.vpp, self.cp_kind, self.offload)
        return (*sizes, *more, self.split or (), self.recompute_layers or 0)


def _smaller(left: int, right: int) -> int:
    """Return the smaller of two sizes, or of each pair in two arrays."""
    return left * (left <= right) + right * (left > right)
