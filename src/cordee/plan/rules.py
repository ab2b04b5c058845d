"""The rules of a layout, in one table: what must divide, what a schedule needs, which axes go together.

A rule names the axes that it reads. The search tests it on whole blocks of layouts as soon as these axes are known; for
one layout the first rule that does not hold gives the message. A new rule is one entry here and its test.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cordee.errors import LayoutError
from cordee.hardware.arrays import Mask
from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import PipelineSchedule, find_schedule
from cordee.plan.split import light_ends, split_text, stage_layers
from cordee.plan.training import Training
from cordee.units import plural
from cordee.workload.model import Experts, ModelShape


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout, or a block of them whose sizes are arrays, for a model on so many GPUs."""

    layout: Layout
    shape: ModelShape
    gpus: int
    training: Training

    @property
    def experts(self) -> Experts:
        """The model's experts, for rules that apply to such models only."""
        assert self.shape.experts is not None, "the rule applies to models with experts"
        return self.shape.experts

    @property
    def dense_ffn(self) -> int:
        """Feed-forward width of the layers without experts; 0 if there is none."""
        has_dense = self.shape.experts is None or self.shape.expert_layers < self.shape.layers
        return self.shape.ffn if has_dense else 0

    @property
    def schedule(self) -> PipelineSchedule:
        """The record of the layout's schedule."""
        return find_schedule(self.layout.schedule)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step of each data-parallel rank."""
        return self.layout.micro_batches(self.training.global_batch)

    @property
    def pieces(self) -> int:
        """Pieces of a sequence: ring and all-gather give each rank one from the front and one from the back."""
        return self.layout.cp if self.layout.cp_kind == "ulysses" else 2 * self.layout.cp


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """One condition on a layout; where it does not apply, it holds."""

    name: str
    axes: frozenset[str]
    holds: Callable[[Proposal], bool | Mask]
    message: Callable[[Proposal], str]
    hint: Callable[[Proposal], str]
    applies: Callable[[Proposal], bool | Mask] = lambda at: True


def _axes(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _moe(at: Proposal) -> bool:
    return at.shape.experts is not None


RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "the axes fill the GPUs",
        _axes("tp pp cp dp"),
        holds=lambda at: at.layout.gpus == at.gpus,
        message=lambda at: _gpus_message(at.layout, at.gpus),
        hint=lambda at: _dp_hint(at.layout, at.gpus),
    ),
    LayoutRule(
        "ZeRO has stages 0 to 3",
        _axes("zero"),
        holds=lambda at: (at.layout.zero >= 0) & (at.layout.zero <= 3),
        message=lambda at: f"there is no ZeRO stage {at.layout.zero}",
        hint=lambda at: "use zero=0, 1, 2 or 3 (3 is FSDP)",
    ),
    LayoutRule(
        "tp divides the attention heads",
        _axes("tp"),
        holds=lambda at: at.shape.heads % at.layout.tp == 0,
        message=lambda at: f"tp={at.layout.tp} does not divide the {at.shape.heads} attention heads of {at.shape.name}",
        hint=lambda at: "use tp of " + ", ".join(str(n) for n in (1, 2, 4, 8, 16, 32) if at.shape.heads % n == 0),
    ),
    LayoutRule(
        "tp divides the key-value heads, or copies them evenly",
        _axes("tp"),
        holds=lambda at: (at.shape.kv_heads % at.layout.tp == 0) | (at.layout.tp % at.shape.kv_heads == 0),
        message=lambda at: (
            f"tp={at.layout.tp} neither divides the {at.shape.kv_heads} key-value heads of {at.shape.name} "
            "nor is a multiple of them"
        ),
        hint=lambda at: f"use a tp that divides {at.shape.kv_heads}, or a multiple of it",
    ),
    LayoutRule(
        "tp divides the feed-forward width",
        _axes("tp"),
        holds=lambda at: at.dense_ffn % at.layout.tp == 0,
        message=lambda at: (
            f"tp={at.layout.tp} does not divide the feed-forward width {at.dense_ffn} of {at.shape.name}"
        ),
        hint=lambda at: "use a smaller tp",
    ),
    LayoutRule(
        "adapters are trained on data-parallel ranks",
        _axes("tp pp ep"),
        applies=lambda at: at.training.adapters is not None,
        holds=lambda at: (at.layout.tp == 1) & (at.layout.pp == 1) & (at.layout.ep == 1),
        message=lambda at: (
            f"adapters are planned on data-parallel ranks only, not with tp={at.layout.tp}, pp={at.layout.pp}"
            + f", ep={at.layout.ep}" * (at.layout.ep > 1)
        ),
        hint=lambda at: "use tp=1,pp=1,ep=1, with fsdp=N for a model that is larger than one GPU",
    ),
    LayoutRule(
        "frozen layers are on data-parallel ranks",
        _axes("tp pp cp"),
        applies=lambda at: at.training.tuning.frozen is not None,
        holds=lambda at: (at.layout.tp == 1) & (at.layout.pp == 1),
        message=lambda at: (
            f"frozen layers are planned on data-parallel ranks only, not with tp={at.layout.tp}, pp={at.layout.pp}"
        ),
        hint=lambda at: "use tp=1,pp=1, with fsdp=N for a model that is larger than one GPU",
    ),
    LayoutRule(
        "an optimizer in the backward pass sees each gradient once",
        _axes("dp micro_batch pp zero"),
        applies=lambda at: at.training.optimizer.in_backward,
        holds=lambda at: (at.micro_batches == 1) & (at.layout.pp == 1) & ((at.layout.dp == 1) | (at.layout.zero == 3)),
        message=lambda at: (
            f"an optimizer in the backward pass has no gradients to add up: {at.training.global_batch} sequences are "
            f"{at.micro_batches} micro-batches with dp={at.layout.dp}, micro_batch={at.layout.micro_batch}"
        ),
        hint=lambda at: "use --batch dp x micro-batch, on one GPU or with fsdp",
    ),
    LayoutRule(
        "each stage has a layer",
        _axes("pp"),
        holds=lambda at: at.layout.pp <= at.shape.layers,
        message=lambda at: f"pp={at.layout.pp} stages need as many layers, but {at.shape.name} has {at.shape.layers}",
        hint=lambda at: f"use pp <= {at.shape.layers}",
    ),
    LayoutRule(
        "sequence parallelism divides the tokens",
        _axes("sp tp cp"),
        applies=lambda at: at.layout.sp,
        holds=lambda at: at.training.seq_tokens % (at.layout.tp * at.layout.cp) == 0,
        message=lambda at: f"sp over {_tp_cp(at.layout)} does not divide {at.training.seq_tokens} tokens",
        hint=lambda at: "use a sequence that tp divides",
    ),
    LayoutRule(
        "the data ranks divide the batch",
        _axes("dp micro_batch"),
        holds=lambda at: at.training.global_batch % (at.layout.dp * at.layout.micro_batch) == 0,
        message=lambda at: (
            f"dp*micro_batch = {at.layout.dp}*{at.layout.micro_batch} = {at.layout.dp * at.layout.micro_batch} "
            f"does not divide the global batch of {at.training.global_batch} sequences"
        ),
        hint=lambda at: f"use a global batch that is a multiple of {at.layout.dp * at.layout.micro_batch}",
    ),
    LayoutRule(
        "a micro-batch has whole pairs",
        _axes("micro_batch"),
        applies=lambda at: at.training.sequences_together > 1,
        holds=lambda at: at.layout.micro_batch % at.training.sequences_together == 0,
        message=lambda at: (
            f"a micro-batch of {plural(at.layout.micro_batch, 'sequence')} has no whole pair "
            "of a chosen and a rejected one"
        ),
        hint=lambda at: "use an even --micro-batch: 2 sequences are one pair",
    ),
    LayoutRule(
        "context parallelism divides the sequence",
        _axes("cp cp_kind"),
        applies=lambda at: at.layout.cp > 1,
        holds=lambda at: at.training.seq_tokens % at.pieces == 0,
        message=lambda at: (
            f"cp={at.layout.cp} cuts the sequence into {at.pieces} pieces, which do not divide "
            f"{at.training.seq_tokens} tokens"
        ),
        hint=lambda at: f"use a sequence that is a multiple of {at.pieces}",
    ),
    LayoutRule(
        "ulysses divides the heads",
        _axes("tp cp cp_kind"),
        applies=lambda at: (at.layout.cp > 1) & (at.layout.cp_kind == "ulysses"),
        holds=lambda at: at.shape.heads % (at.layout.tp * at.layout.cp) == 0,
        message=lambda at: (
            f"ulysses needs tp*cp = {at.layout.tp}*{at.layout.cp} = {at.layout.tp * at.layout.cp} to divide the "
            f"{at.shape.heads} heads of {at.shape.name}"
        ),
        hint=lambda at: "use a smaller cp, or ring",
    ),
    LayoutRule(
        "sharding groups divide the data ranks",
        _axes("shard dp cp"),
        holds=lambda at: at.layout.data_ranks % at.layout.shard_ranks == 0,
        message=lambda at: f"shard={at.layout.shard} does not divide the {at.layout.data_ranks} data ranks (dp*cp)",
        hint=lambda at: "use a shard that divides dp*cp",
    ),
    LayoutRule(
        "expert parallelism needs experts",
        _axes("ep"),
        applies=lambda at: not _moe(at),
        holds=lambda at: at.layout.ep == 1,
        message=lambda at: f"ep={at.layout.ep} needs experts, but {at.shape.name} has none",
        hint=lambda at: "use ep=1",
    ),
    LayoutRule(
        "ep divides the experts",
        _axes("ep"),
        applies=_moe,
        holds=lambda at: at.experts.routed % at.layout.ep == 0,
        message=lambda at: f"ep={at.layout.ep} does not divide the {at.experts.routed} experts of {at.shape.name}",
        hint=lambda at: f"use an ep that divides {at.experts.routed}",
    ),
    LayoutRule(
        "etp divides an expert's width",
        _axes("tp etp"),
        applies=_moe,
        holds=lambda at: at.experts.ffn % at.layout.expert_tp == 0,
        message=lambda at: (
            f"etp={at.layout.expert_tp} does not divide the expert width {at.experts.ffn} of {at.shape.name}"
        ),
        hint=lambda at: "use a smaller etp",
    ),
    LayoutRule(
        "tp divides the shared experts' width",
        _axes("tp"),
        applies=_moe,
        holds=lambda at: at.experts.shared_ffn % at.layout.tp == 0,
        message=lambda at: (
            f"tp={at.layout.tp} does not divide the feed-forward width {at.experts.shared_ffn} of {at.shape.name}"
        ),
        hint=lambda at: "use a smaller tp",
    ),
    LayoutRule(
        "experts divide the GPUs of a stage",
        _axes("tp cp dp ep etp"),
        applies=_moe,
        holds=lambda at: _stage_gpus(at.layout) % (at.layout.ep * at.layout.expert_tp) == 0,
        message=lambda at: (
            f"ep*etp = {at.layout.ep}*{at.layout.expert_tp} = {at.layout.ep * at.layout.expert_tp} does not divide "
            f"the tp*cp*dp = {plural(_stage_gpus(at.layout), 'GPU')} of a stage"
        ),
        hint=lambda at: "use an ep whose product with etp divides them",
    ),
    LayoutRule(
        "schedules and chunks need a pipeline",
        _axes("pp schedule vpp"),
        applies=lambda at: at.layout.pp == 1,
        holds=lambda at: at.layout.chunks == 1 and at.layout.schedule == "1f1b",
        message=lambda at: f"{at.layout.schedule} with {at.layout.chunks} chunks needs a pipeline, but pp=1",
        hint=lambda at: "use pp of 2 or more, or 1f1b",
    ),
    LayoutRule(
        "each chunk has a layer",
        _axes("pp schedule vpp"),
        holds=lambda at: at.layout.stages <= at.shape.layers,
        message=lambda at: (
            f"pp={at.layout.pp} with {at.layout.chunks} chunks each needs {at.layout.stages} layers, but "
            f"{at.shape.name} has {at.shape.layers}"
        ),
        hint=lambda at: "use fewer chunks",
    ),
    LayoutRule(
        "vpp is for the interleaved schedule",
        _axes("schedule vpp"),
        holds=lambda at: (at.layout.vpp > 1) == (at.schedule.chunks is None),
        message=lambda at: f"vpp={at.layout.vpp} does not go with {at.layout.schedule}",
        hint=lambda at: "vpp of 2 or more is for interleaved, and it needs that",
    ),
    LayoutRule(
        "a split has every layer",
        _axes("pp schedule vpp split"),
        applies=lambda at: at.layout.split is not None,
        holds=lambda at: _is_whole(at.layout, at.shape),
        message=lambda at: (
            f"split {split_text(at.layout.split or ())} has {sum(at.layout.split or ())} layers on "
            f"{plural(len(at.layout.split or ()), 'stage')}"
        ),
        hint=lambda at: (
            f"it must have the {at.shape.layers} layers of {at.shape.name} on {at.layout.stages} stages, "
            "each with one at least"
        ),
    ),
    LayoutRule(
        "stages divide the layers, unless a split says how",
        _axes("pp schedule vpp split"),
        applies=lambda at: at.layout.split is None,
        holds=lambda at: at.shape.layers % at.layout.stages == 0,
        message=lambda at: f"{_stages(at.layout)} does not divide the {at.shape.layers} layers of {at.shape.name}",
        hint=lambda at: _split_hint(at.layout, at.shape.layers),
    ),
    LayoutRule(
        "interleaved passes fill the pipeline",
        _axes("pp schedule dp micro_batch"),
        applies=lambda at: at.schedule.rounds,
        holds=lambda at: at.micro_batches % at.layout.pp == 0,
        message=lambda at: (
            f"{at.schedule.name} needs micro-batches ({at.micro_batches}) in multiples of pp={at.layout.pp}"
        ),
        hint=lambda at: "use a larger global batch, a smaller micro-batch, or 1f1b",
    ),
    LayoutRule(
        "micro-batches fill a schedule of two directions",
        _axes("pp schedule dp micro_batch"),
        applies=lambda at: at.schedule.fills,
        holds=lambda at: at.micro_batches >= 2 * at.layout.pp,
        message=lambda at: (
            f"{at.schedule.name} needs at least 2 x {at.layout.pp} ranks = {2 * at.layout.pp} micro-batches, "
            f"not {at.micro_batches}"
        ),
        hint=lambda at: "use a larger global batch or a smaller micro-batch",
    ),
    LayoutRule(
        "a schedule of two halves has even ones",
        _axes("pp schedule dp micro_batch"),
        applies=lambda at: at.schedule.even,
        holds=lambda at: (at.layout.pp % 2 == 0) & (at.micro_batches % 2 == 0),
        message=lambda at: (
            f"{at.schedule.name} needs an even number of ranks and of micro-batches, not {at.layout.pp} and "
            f"{at.micro_batches}"
        ),
        hint=lambda at: "use dualpipev",
    ),
)


def first_misfit(layout: Layout, shape: ModelShape, gpus: int, training: Training) -> tuple[str, str] | None:
    """Return the message and the hint of the first rule that does not hold; None if all do."""
    at = Proposal(layout, shape, gpus, training)
    broken = next((rule for rule in RULES if rule.applies(at) and not rule.holds(at)), None)
    return None if broken is None else (broken.message(at), broken.hint(at))


def validate(layout: Layout, shape: ModelShape, gpus: int, training: Training) -> None:
    """Refuse a layout that does not divide the GPUs, the model or the batch.

    Raises:
        LayoutError: with the numbers that do not divide.
    """
    misfit = first_misfit(layout, shape, gpus, training)
    if misfit is not None:
        raise LayoutError(misfit[0], hint=misfit[1])


def permitted(at: Proposal, known: frozenset[str], *, tested: frozenset[str] = frozenset()) -> bool | Mask:
    """Return whether the rules that read only `known` axes hold, for each layout of a block.

    Rules that read only `tested` axes were tested before and are passed over.
    """
    good: bool | Mask = True
    for rule in RULES:
        if rule.axes <= known and not rule.axes <= tested:
            applies = rule.applies(at)
            if applies is not False:
                good = good & (np.logical_not(applies) | rule.holds(at))
    return good


def _stage_gpus(layout: Layout) -> int:
    return layout.tp * layout.cp * layout.dp


def _gpus_message(layout: Layout, gpus: int) -> str:
    """Return why the axes do not fill the GPUs: no dp would, or this one does not."""
    with_cp, times_cp = ("", "") if layout.cp == 1 else ("*cp", f"*{layout.cp}")
    of_a_copy = layout.tp * layout.pp * layout.cp
    if gpus % of_a_copy:
        return f"tp*pp{with_cp} = {of_a_copy} does not divide {plural(gpus, 'GPU')}"
    sizes = f"{layout.tp}*{layout.pp}{times_cp}*{layout.dp}"
    return f"layout needs tp*pp{with_cp}*dp = {sizes} = {plural(layout.gpus, 'GPU')}, but the job has {gpus}"


def _dp_hint(layout: Layout, gpus: int) -> str:
    whole, rest = divmod(gpus, layout.tp * layout.pp * layout.cp)
    with_cp, times_cp = ("", "") if layout.cp == 1 else (f", cp={layout.cp}", "*cp")
    if rest:
        fitting = [str(size) for size in range(1, gpus + 1) if gpus % size == 0]
        return f"use a tp*pp{times_cp} that divides {gpus}: {', '.join(fitting)}"
    return f"with tp={layout.tp}{with_cp} and pp={layout.pp} use dp={whole}"


def _tp_cp(layout: Layout) -> str:
    return f"tp={layout.tp}" if layout.cp == 1 else f"tp*cp = {layout.tp}*{layout.cp}"


def _stages(layout: Layout) -> str:
    if layout.stages == layout.pp:
        return f"pp={layout.pp}"
    return f"pp={layout.pp} with {layout.chunks} chunks each"


def _is_whole(layout: Layout, shape: ModelShape) -> bool:
    split = layout.split or ()
    return len(split) == layout.stages and sum(split) == shape.layers and min(split) > 0


def _split_hint(layout: Layout, layers: int) -> str:
    stages = layout.stages
    known = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0 and n <= max(64, layout.pp))
    ends = light_ends(layers, stages)
    works = ends if min(ends) > 0 else stage_layers(layers, stages)
    return f"stages that do are {known}; uneven ones work with split={split_text(works)}"
