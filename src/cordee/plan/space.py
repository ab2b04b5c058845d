"""Every layout that divides a job, as blocks of arrays: nothing is judged here, only counted out.

A block is one `Layout` whose sizes are arrays of candidates, while its words (schedule, recomputation, ...) and its
pipeline are one for all of them, as the formulas of memory and time want it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cordee.plan.layout import (
    CONTEXT_KINDS,
    OFFLOADS,
    SCHEDULES,
    ContextKind,
    Layout,
    LayoutWanted,
    Offload,
    Recompute,
    Training,
)
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.split import Split, splits
from cordee.workload.model import ModelShape

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
SIZES = ("dp", "tp", "cp", "ep", "etp", "zero", "sp", "shard", "micro_batch")
WIDEST_ANYWHERE = 1 << 30


@dataclass(frozen=True, slots=True)
class Choices:
    """What is tried where nothing was asked for. None for a size means every one that divides.

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


EVERYTHING = Choices()


@dataclass(frozen=True, slots=True)
class Rows:
    """The sizes of many layouts with the same pipeline; `mesh` numbers those that differ in tp, cp, dp or ZeRO."""

    layout: Layout
    mesh: Ints

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, chosen: Mask | Ints) -> "Rows":
        """Those rows only."""
        kept: dict[str, Any] = {name: column[chosen] for name, column in self._columns()}
        return Rows(replace(self.layout, **kept), self.mesh[chosen])

    def saying(self, **words: Any) -> "Rows":
        """The same sizes with other words."""
        return Rows(replace(self.layout, **words), self.mesh)

    def one(self, row: int, experts: bool) -> Layout:
        """One of them as a plain layout; what goes without saying is left out."""
        sizes = {name: int(column[row]) for name, column in self._columns()}
        whole = sizes["shard"] == sizes["dp"] * sizes["cp"]
        alike = not experts or sizes["etp"] == sizes["tp"]
        plain: dict[str, Any] = sizes | {"sp": bool(sizes["sp"]), "shard": None if whole else sizes["shard"]}
        return replace(self.layout, **(plain | {"etp": None if alike else sizes["etp"]}))

    def _columns(self) -> Iterator[tuple[str, Ints]]:
        return ((name, getattr(self.layout, name)) for name in SIZES)


def pipelines(shape: ModelShape, gpus: int, wanted: LayoutWanted) -> tuple[int, ...]:
    """Every pp that divides the GPUs and has a layer for each stage."""
    return tuple(pp for pp in chosen(wanted.pp, divisors(gpus)) if gpus % pp == 0 and pp <= shape.layers)


def rows(
    shape: ModelShape,
    training: Training,
    gpus: int,
    pp: int,
    *,
    wanted: LayoutWanted,
    choices: Choices,
    first_mesh: int = 0,
) -> Rows | None:
    """All sizes at this pp that divide the model and the batch; None if there is none."""
    tables: list[Ints] = []
    meshes = first_mesh
    for tp, cp, dp in _splits(shape, gpus // pp, wanted, choices):
        if training.global_batch % dp:
            continue
        per_rank = training.global_batch // dp
        sizes = choices.micro_batches or divisors(per_rank)
        fit = [size for size in chosen(wanted.micro_batch, sizes) if per_rank % size == 0]
        sps = [sp for sp in _sequence_parallel(tp, wanted, choices) if not sp or training.seq_tokens % (tp * cp) == 0]
        if not sps and wanted.sp is None:
            sps = [False]
        stages: dict[int, int] = {}
        for (zero, shard), (ep, etp) in product(
            _shardings(dp * cp, pp, wanted, choices), _expert_splits(shape, tp, cp * dp, wanted, choices)
        ):
            mesh = stages.setdefault(zero, meshes + len(stages))
            cross = np.array(list(product(sps, fit)), dtype=np.int64).reshape(-1, 2)
            table = np.empty((len(cross), len(SIZES) + 1), dtype=np.int64)
            table[:, :6] = (dp, tp, cp, ep, etp, zero)
            table[:, 6], table[:, 7], table[:, 8], table[:, 9] = cross[:, 0], shard, cross[:, 1], mesh
            tables.append(table)
        meshes += len(stages)
    if not tables:
        return None
    columns = np.concatenate(tables).T.copy()
    layout = Layout(pp=pp, **{name: columns[index] for index, name in enumerate(SIZES)})
    layout = replace(layout, sp=layout.sp.astype(bool))  # type: ignore[attr-defined]
    return Rows(layout, columns[-1]) if len(columns[-1]) else None


def ways(shape: ModelShape, training: Training, at: Rows, wanted: LayoutWanted, choices: Choices) -> Iterator[Rows]:
    """The rows under each schedule and kind of context parallelism, those only that it can run."""
    pp = at.layout.pp
    for schedule, vpp, split in _schedules(shape, pp, wanted, choices):
        for kind in chosen(wanted.cp_kind, choices.cp_kinds):
            block = at.saying(schedule=schedule, vpp=vpp, split=split, cp_kind=kind)
            kept = block.take(_runs(shape, training, block.layout, first=kind == _first(wanted, choices)))
            if len(kept):
                yield kept


def burdens(wanted: LayoutWanted, choices: Choices) -> tuple[tuple[Recompute, Offload], ...]:
    """How memory can be bought with time, the cheapest way first."""
    pairs = product(chosen(wanted.offload, choices.offloads), chosen(wanted.recompute, choices.recomputes))
    return tuple((recompute, offload) for offload, recompute in pairs)


def _first(wanted: LayoutWanted, choices: Choices) -> ContextKind:
    return next(iter(chosen(wanted.cp_kind, choices.cp_kinds)))


def _runs(shape: ModelShape, training: Training, layout: Any, *, first: bool) -> Mask:
    """What `layout.first_misfit` asks of schedule and context parallelism, for all rows at once.

    Without context parallelism its kinds are the same layout: it counts once, under the first kind.
    """
    pp, micro_batches = layout.pp, training.global_batch // (layout.dp * layout.micro_batch)
    cp = layout.cp
    if layout.cp_kind == "ulysses":
        good = (training.seq_tokens % cp == 0) & (shape.heads % (layout.tp * cp) == 0)
    else:
        good = training.seq_tokens % (2 * cp) == 0
    good = (good & (cp > 1)) | ((cp == 1) & first)
    schedule = find_schedule(layout.schedule)
    if schedule.rounds:
        good &= micro_batches % pp == 0
    if schedule.fills:
        good &= micro_batches >= 2 * pp
    if schedule.even:
        good &= (micro_batches % 2 == 0) & (pp % 2 == 0)
    return np.asarray(good, dtype=np.bool_)


def _schedules(
    shape: ModelShape, pp: int, wanted: LayoutWanted, choices: Choices
) -> Iterator[tuple[str, int, Split | None]]:
    """Schedules with their chunks and the layers of their stages."""
    if pp == 1:
        if wanted.schedule in (None, "1f1b") and wanted.vpp in (None, 1) and not isinstance(wanted.split, tuple):
            yield "1f1b", 1, None
        return
    for schedule in chosen(wanted.schedule, choices.schedules):
        open_chunks = find_schedule(schedule).chunks is None
        chunks = _chunks(shape, pp, choices) if open_chunks else (1,)
        for vpp in chosen(wanted.vpp, chunks):
            stages = Layout(pp=pp, vpp=vpp, schedule=schedule).stages
            if (vpp > 1) == open_chunks and stages <= shape.layers:
                for split in _stage_splits(shape.layers, stages, wanted, choices):
                    yield schedule, vpp, split


def _chunks(shape: ModelShape, pp: int, choices: Choices) -> tuple[int, ...]:
    """Chunks that are equal, or equal once embedding and head count as layers; two where there are none such."""
    most = min(choices.vpp_max, shape.layers // pp)
    equal = tuple(v for v in range(2, most + 1) if not shape.layers % (pp * v) or not (shape.layers + 2) % (pp * v))
    return equal or ((2,) if most > 1 else ())


def _stage_splits(layers: int, stages: int, wanted: LayoutWanted, choices: Choices) -> tuple[Split | None, ...]:
    """Even stages, and uneven ones where nobody asked for a pipeline of this size alone."""
    if isinstance(wanted.split, tuple):
        fits = len(wanted.split) == stages and sum(wanted.split) == layers
        return (wanted.split,) if fits else ()
    every = splits(layers, stages)
    may = choices.uneven and (wanted.split == "uneven" or (wanted.split is None and wanted.pp is None))
    return every if may else tuple(split for split in every if split is None)


def _splits(
    shape: ModelShape, stage_gpus: int, wanted: LayoutWanted, choices: Choices
) -> Iterator[tuple[int, int, int]]:
    """tp, cp and dp of the GPUs of one stage."""
    for tp in chosen(wanted.tp, (n for n in divisors(stage_gpus) if n <= choices.tp_max)):
        if stage_gpus % tp or not _divides_model(shape, tp):
            continue
        for cp in chosen(wanted.cp, (n for n in divisors(stage_gpus // tp) if n <= choices.cp_max)):
            dp, rest = divmod(stage_gpus, tp * cp)
            if not rest and wanted.dp in (None, dp):
                yield tp, cp, dp


def _divides_model(shape: ModelShape, tp: int) -> bool:
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        return False
    moe = shape.experts
    if moe is None:
        return shape.ffn % tp == 0
    dense = shape.ffn if shape.expert_layers < shape.layers else 0
    return moe.shared_ffn % tp == 0 and dense % tp == 0


def _expert_splits(
    shape: ModelShape, tp: int, others: int, wanted: LayoutWanted, choices: Choices
) -> list[tuple[int, int]]:
    """ep and etp: experts may be cut as the rest of the model is, or not at all."""
    moe = shape.experts
    if moe is None:
        return [(1, wanted.etp or tp)] if wanted.ep in (None, 1) else []
    found = []
    for ep in chosen(wanted.ep, divisors(moe.routed)):
        cuts = ((1,) if ep > 1 else (tp,)) if choices.ep_alone else sorted({1, tp})
        for etp in chosen(wanted.etp, cuts):
            if (tp * others) % (ep * etp) == 0 and moe.routed % ep == 0 and moe.ffn % etp == 0:
                found.append((ep, etp))
    return found


def _shardings(ranks: int, pp: int, wanted: LayoutWanted, choices: Choices) -> Iterator[tuple[int, int]]:
    """ZeRO stages and the ranks they shard over; what shards over one rank shards nothing."""
    stages = (0, 1, 2, 3) if pp == 1 or choices.zero2_in_pipeline else (0, 1, 3)
    for zero in chosen(wanted.zero, stages):
        if not 0 <= zero <= 3:
            continue
        if zero == 0 or ranks == 1:
            if (zero == 0 or wanted.zero is not None) and wanted.shard in (None, ranks):
                yield zero, ranks
            continue
        narrower = (n for n in divisors(ranks) if n > 1 and (choices.hsdp or n == ranks))
        for shard in chosen(wanted.shard, narrower):
            if ranks % shard == 0:
                yield zero, shard


def _sequence_parallel(tp: int, wanted: LayoutWanted, choices: Choices) -> Iterable[bool]:
    return chosen(wanted.sp, choices.sp if tp > 1 else (False,))


def chosen(wanted: T | None, otherwise: Iterable[T]) -> Iterable[T]:
    """The one value that was asked for, or all of them."""
    return otherwise if wanted is None else (wanted,)


def divisors(n: int) -> tuple[int, ...]:
    """All of them, the smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(low + [n // d for d in reversed(low) if d * d != n])
