"""Every layout that divides a job, as blocks of arrays: nothing is evaluated here, only enumerated.

A block is one `Layout` whose sizes are arrays of candidates, while its words (schedule, recomputation, ...) and its
pipeline are one for all of them, as the formulas of memory and time want it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TypedDict, TypeVar, Unpack

import numpy as np

from cordee.hardware.arrays import Ints, Mask
from cordee.plan.layout import CONTEXT_KINDS, OFFLOADS, SCHEDULES, ContextKind, Layout, Offload, Recompute
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.rules import Proposal, permitted
from cordee.plan.split import Split, splits
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.model import ModelShape

T = TypeVar("T")
SIZES = ("dp", "tp", "cp", "ep", "etp", "zero", "sp", "shard", "micro_batch")
WIDEST_ANYWHERE = 1 << 30
# Axes in the order in which the loops below fix them: the rules are tested as soon as what they read is known.
_PP = frozenset({"pp"})
_TP = _PP | {"tp"}
_SPLITS = _TP | {"cp", "dp"}
_SCHEDULES = _PP | {"schedule", "vpp", "split"}
_ROWS = _SPLITS | {"zero", "shard", "ep", "etp", "sp", "micro_batch"}


@dataclass(frozen=True, slots=True)
class Choices:
    """The values tried where nothing was asked for. None for a size means every one that divides.

    `ep_alone` does not cut experts by tensor parallelism once they are spread over ranks. ZeRO-2 reduces gradients
    after every micro-batch, of which a pipeline has many: `zero2_in_pipeline` tries it there all the same.
    """

    tp_max: int = WIDEST_ANYWHERE
    cp_max: int = WIDEST_ANYWHERE
    micro_batches: tuple[int, ...] | None = None
    vpp_max: int = WIDEST_ANYWHERE
    hsdp: bool = True
    sp: tuple[bool, ...] = (False, True)
    schedules: tuple[str, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    cp_kinds: tuple[ContextKind, ...] = CONTEXT_KINDS
    offloads: tuple[Offload, ...] = OFFLOADS
    uneven: bool = True
    ep_alone: bool = False
    zero2_in_pipeline: bool = True


ALL_CHOICES = Choices()


class Words(TypedDict, total=False):
    """The fields of a layout that are one for all rows of a block."""

    schedule: str
    vpp: int
    split: Split | None
    cp_kind: ContextKind
    recompute: Recompute
    offload: Offload


@dataclass(frozen=True, slots=True)
class Rows:
    """The sizes of many layouts with the same pipeline; `mesh` numbers those that differ in tp, cp, dp or ZeRO."""

    layout: Layout
    mesh: Ints

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, chosen: Mask | Ints) -> "Rows":
        """Return those rows only."""
        return Rows(
            _with_sizes(self.layout, {name: column[chosen] for name, column in self._columns()}), self.mesh[chosen]
        )

    def with_words(self, **words: Unpack[Words]) -> "Rows":
        """Return the same sizes with other words."""
        return Rows(replace(self.layout, **words), self.mesh)

    def one(self, row: int, experts: bool) -> Layout:
        """Return one row as a plain layout; sizes that are defaults are left out."""
        sizes = {name: int(column[row]) for name, column in self._columns()}
        whole = sizes["shard"] == sizes["dp"] * sizes["cp"]
        same_cut = not experts or sizes["etp"] == sizes["tp"]
        return replace(
            self.layout,
            dp=sizes["dp"],
            tp=sizes["tp"],
            cp=sizes["cp"],
            ep=sizes["ep"],
            etp=None if same_cut else sizes["etp"],
            zero=sizes["zero"],
            sp=bool(sizes["sp"]),
            shard=None if whole else sizes["shard"],
            micro_batch=sizes["micro_batch"],
        )

    def _columns(self) -> Iterator[tuple[str, Ints]]:
        return ((name, getattr(self.layout, name)) for name in SIZES)


@dataclass(frozen=True, slots=True)
class Space:
    """The layouts to search: a model on so many GPUs, as far as they are wanted and tried."""

    shape: ModelShape
    training: Training
    gpus: int
    wanted: LayoutWanted
    choices: Choices

    def permits(self, layout: Layout, known: frozenset[str], tested: frozenset[str] = frozenset()) -> bool | Mask:
        """Return whether the rules hold that the known axes decide, but for those that the tested ones do."""
        return permitted(Proposal(layout, self.shape, self.gpus, self.training), known, tested=tested)


def pipelines(space: Space) -> tuple[int, ...]:
    """Return every pp that divides the GPUs and has a layer for each stage."""
    gpus = space.gpus
    sizes = (pp for pp in chosen(space.wanted.pp, divisors(gpus)) if gpus % pp == 0)
    return tuple(pp for pp in sizes if space.permits(Layout(pp=pp), _PP))


def rows(space: Space, pp: int, *, first_mesh: int = 0) -> Rows | None:
    """Return all sizes at this pp that divide the model and the batch; None if there is none."""
    tables: list[Ints] = []
    meshes = first_mesh
    for tp, cp, dp in _splits(space, pp):
        mesh = Layout(pp=pp, tp=tp, cp=cp, dp=dp)
        cross = np.array(_sequences(space, mesh), dtype=np.int64).reshape(-1, 2)
        if not len(cross):
            continue
        stages: dict[int, int] = {}
        for (zero, shard), (ep, etp) in product(_shardings(space, mesh), _expert_splits(space, mesh)):
            number = stages.setdefault(zero, meshes + len(stages))
            table = np.empty((len(cross), len(SIZES) + 1), dtype=np.int64)
            table[:, :6] = (dp, tp, cp, ep, etp, zero)
            table[:, 6], table[:, 7], table[:, 8], table[:, 9] = cross[:, 0], shard, cross[:, 1], number
            tables.append(table)
        meshes += len(stages)
    if not tables:
        return None
    columns = np.concatenate(tables).T.copy()
    sizes: dict[str, Ints | Mask] = dict(zip(SIZES, columns, strict=False))
    sizes["sp"] = sizes["sp"].astype(np.bool_)
    return Rows(_with_sizes(Layout(pp=pp), sizes), columns[-1])


def _with_sizes(layout: Layout, columns: Mapping[str, Ints | Mask]) -> Layout:
    """Return a block: a layout whose sizes are arrays, which its formulas take as they take numbers."""
    return replace(layout, **columns)  # type: ignore[arg-type]


def ways(space: Space, at: Rows) -> Iterator[Rows]:
    """Yield the rows under each schedule and kind of context parallelism, those only that it can run."""
    kinds = tuple(chosen(space.wanted.cp_kind, space.choices.cp_kinds))
    for schedule, vpp, split in _schedules(space, at.layout.pp):
        for kind in kinds:
            block = at.with_words(schedule=schedule, vpp=vpp, split=split, cp_kind=kind)
            good = np.broadcast_to(space.permits(block.layout, _ROWS | _SCHEDULES | {"cp_kind"}, _SCHEDULES), len(at))
            # Without context parallelism the kinds are one layout, which counts under the first of them.
            kept = block.take(good & ((block.layout.cp > 1) | (kind == kinds[0])))
            if len(kept):
                yield kept


def burdens(wanted: LayoutWanted, choices: Choices) -> tuple[tuple[Recompute, Offload], ...]:
    """Return the ways to buy memory with time, the cheapest first."""
    pairs = product(chosen(wanted.offload, choices.offloads), chosen(wanted.recompute, choices.recomputes))
    return tuple((recompute, offload) for offload, recompute in pairs)


def _schedules(space: Space, pp: int) -> Iterator[tuple[str, int, Split | None]]:
    """Yield schedules with their chunks and the layers of their stages."""
    wanted, shape = space.wanted, space.shape
    if pp == 1 and isinstance(wanted.split, tuple):
        return
    for schedule in chosen(wanted.schedule, ("1f1b",) if pp == 1 else space.choices.schedules):
        chunks = _chunks(shape, pp, space.choices) if find_schedule(schedule).chunks is None else (1,)
        for vpp in chosen(wanted.vpp, chunks):
            layout = Layout(pp=pp, vpp=vpp, schedule=schedule)
            if layout.stages <= shape.layers:
                for split in _stage_splits(space, layout):
                    if space.permits(replace(layout, split=split), _SCHEDULES):
                        yield schedule, vpp, split


def _chunks(shape: ModelShape, pp: int, choices: Choices) -> tuple[int, ...]:
    """Return chunks that are equal, or equal once embedding and head count as layers; two where there are none such."""
    most = min(choices.vpp_max, shape.layers // pp)
    equal = tuple(v for v in range(2, most + 1) if not shape.layers % (pp * v) or not (shape.layers + 2) % (pp * v))
    return equal or ((2,) if most > 1 else ())


def _stage_splits(space: Space, layout: Layout) -> tuple[Split | None, ...]:
    """Return even stages, and uneven ones where nobody asked for a pipeline of this size alone."""
    wanted = space.wanted
    if isinstance(wanted.split, tuple):
        return (wanted.split,)
    every = splits(space.shape.layers, layout.stages)
    may = space.choices.uneven and (wanted.split == "uneven" or (wanted.split is None and wanted.pp is None))
    return every if may else tuple(split for split in every if split is None)


def _splits(space: Space, pp: int) -> Iterator[tuple[int, int, int]]:
    """Yield tp, cp and dp of the GPUs of one stage."""
    wanted, stage_gpus = space.wanted, space.gpus // pp
    for tp in chosen(wanted.tp, (n for n in divisors(stage_gpus) if n <= space.choices.tp_max)):
        if stage_gpus % tp or not space.permits(Layout(pp=pp, tp=tp), _TP, _PP):
            continue
        for cp in chosen(wanted.cp, (n for n in divisors(stage_gpus // tp) if n <= space.choices.cp_max)):
            dp, rest = divmod(stage_gpus, tp * cp)
            if not rest and wanted.dp in (None, dp):
                yield tp, cp, dp


def _sequences(space: Space, mesh: Layout) -> list[tuple[bool, int]]:
    """Return sequence parallelism and micro-batch: as they are tried, or without where the tokens do not divide."""
    wanted, choices = space.wanted, space.choices
    per_rank = space.training.global_batch // mesh.dp
    sizes = chosen(wanted.micro_batch, choices.micro_batches or divisors(per_rank))
    sps = [
        sp
        for sp in chosen(wanted.sp, choices.sp if mesh.tp > 1 else (False,))
        if space.permits(replace(mesh, sp=sp), _SPLITS | {"sp"}, _SPLITS)
    ]
    if not sps and wanted.sp is None:
        sps = [False]
    fitting = [
        size for size in sizes if space.permits(replace(mesh, micro_batch=size), _SPLITS | {"micro_batch"}, _SPLITS)
    ]
    return list(product(sps, fitting))


def _expert_splits(space: Space, mesh: Layout) -> list[tuple[int, int]]:
    """Return ep and etp: experts may be cut as the rest of the model is, or not at all."""
    moe, wanted = space.shape.experts, space.wanted
    found = []
    for ep in chosen(wanted.ep, (1,) if moe is None else divisors(moe.routed)):
        cuts: tuple[int, ...] = (mesh.tp,)
        if moe is not None:
            alone = (1,) if ep > 1 else (mesh.tp,)
            cuts = alone if space.choices.ep_alone else tuple(sorted({1, mesh.tp}))
        for etp in chosen(wanted.etp, cuts):
            if space.permits(replace(mesh, ep=ep, etp=etp), _SPLITS | {"ep", "etp"}, _SPLITS):
                found.append((ep, etp))
    return found


def _shardings(space: Space, mesh: Layout) -> Iterator[tuple[int, int]]:
    """Yield ZeRO stages and the ranks they shard over; what shards over one rank shards nothing."""
    wanted, choices, ranks = space.wanted, space.choices, mesh.data_ranks
    stages = (0, 1, 2, 3) if mesh.pp == 1 or choices.zero2_in_pipeline else (0, 1, 3)
    for zero in chosen(wanted.zero, stages):
        if zero == 0 or ranks == 1:
            shards: Iterable[int] = (ranks,)
            if (zero > 0 and wanted.zero is None) or wanted.shard not in (None, ranks):
                continue
        else:
            narrower = (n for n in divisors(ranks) if n > 1 and (choices.hsdp or n == ranks))
            shards = chosen(wanted.shard, narrower)
        for shard in shards:
            if space.permits(replace(mesh, zero=zero, shard=shard), _SPLITS | {"zero", "shard"}, _SPLITS):
                yield zero, shard


def chosen(wanted: T | None, otherwise: Iterable[T]) -> Iterable[T]:
    """Return the one value that was asked for, or all of them."""
    return otherwise if wanted is None else (wanted,)


def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors, the smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(low + [n // d for d in reversed(low) if d * d != n])
