"""The blocks hold every layout that divides, each once, and nothing else."""

from dataclasses import replace
from itertools import product

import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan.layout import CONTEXT_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, Layout
from cordee.plan.optimum import Case, count
from cordee.plan.rules import first_misfit
from cordee.plan.space import ALL_CHOICES, Choices, Space, burdens, divisors, pipelines, rows, ways
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.load import load_shape

GPT2, V2, L8 = (load_shape(name) for name in ("gpt2", "deepseek-v2", "llama-3-8b"))
H100 = load_catalogue().find_gpu("H100")
NOTHING = LayoutWanted()


def _all_layouts(shape, training: Training, gpus: int, wanted: LayoutWanted, choices: Choices) -> list[Layout]:
    found = []
    experts = shape.experts is not None
    space = Space(shape, training, gpus, wanted, choices)
    for pp in pipelines(space):
        at = rows(space, pp)
        for block in [] if at is None else ways(space, at):
            for recompute, offload in burdens(wanted, choices):
                words = block.with_words(recompute=recompute, offload=offload)
                found += [words.one(row, experts) for row in range(len(words))]
    return found


def _uneven(layers: int, stages: int, ends: bool) -> tuple[int, ...] | None:
    """The odd layers of a pipeline in its middle; with `ends` the embedding and the head are layers."""
    if stages == 1 or (not ends and layers % stages == 0):
        return None
    base, extra = divmod(layers + 2 * ends, stages)
    order = sorted(range(stages), key=lambda stage: (abs(stage - (stages - 1) / 2), stage))
    counts = [base + (stage in order[:extra]) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts) if layers % stages or len(set(counts)) > 1 else None


def _by_hand(shape, training: Training, gpus: int) -> set[str]:
    """Every layout of a dense model by looping over all axes; what is the same layout is written the same way."""
    found = set()
    sizes = divisors(gpus)
    for tp, pp, cp in product(sizes, sizes, sizes):
        dp = gpus // (tp * pp * cp)
        if tp * pp * cp * dp != gpus:
            continue
        micro_batches = range(1, training.global_batch + 1)
        shards = [n for n in divisors(dp * cp) if n > 1] or [1]
        for zero, shard, sp, size, schedule, kind in product(
            range(4), shards, (False, True), micro_batches, SCHEDULES, CONTEXT_KINDS
        ):
            redundant = (
                (zero > 0 and dp * cp == 1) or (zero == 0 and shard != shards[-1]) or (sp and tp == 1)
                or (cp == 1 and kind != "ring") or training.global_batch % (dp * size)
            )  # fmt: skip
            if redundant:
                continue
            whole = None if shard == dp * cp else shard
            chunks = range(2, shape.layers // pp + 1)
            for vpp, ends in product(chunks if schedule == "interleaved" else (1,), (False, True)):
                layout = Layout(
                    dp=dp, tp=tp, pp=pp, zero=zero, sp=sp, micro_batch=size, cp=cp, shard=whole,
                    schedule=schedule, vpp=vpp, cp_kind=kind,
                )  # fmt: skip
                split = _uneven(shape.layers, layout.stages, ends)
                if vpp > 1 and shape.layers % layout.stages and (shape.layers + 2) % layout.stages:
                    continue
                layout = replace(layout, split=split)
                if (not ends or split) and first_misfit(layout, shape, gpus, training) is None:
                    found.add(repr(layout))
    return found


@pytest.mark.parametrize(("gpus", "batch", "seq"), [(1, 3, 64), (4, 8, 64), (6, 12, 48), (8, 16, 64)])
def test_the_space_is_what_loops_over_all_axes_find(gpus: int, batch: int, seq: int) -> None:
    training = Training(seq, batch)
    choices = Choices(recomputes=("none",), offloads=("none",))
    found = [repr(layout) for layout in _all_layouts(GPT2, training, gpus, NOTHING, choices)]
    assert len(found) == len(set(found))
    assert set(found) == _by_hand(GPT2, training, gpus)


@pytest.mark.parametrize(("shape", "gpus", "batch"), [pytest.param(V2, 8, 8, marks=pytest.mark.soak), (L8, 12, 24)])
def test_every_layout_of_the_space_divides_and_stands_once(shape, gpus: int, batch: int) -> None:
    training = Training(1024, batch)
    found = _all_layouts(shape, training, gpus, NOTHING, ALL_CHOICES)
    assert len({repr(layout) for layout in found}) == len(found)
    assert len(found) == count(Case(shape, H100, gpus, training), NOTHING, ALL_CHOICES)
    for layout in found:
        assert first_misfit(layout, shape, gpus, training) is None, layout
    assert {layout.recompute for layout in found} == set(RECOMPUTES)
    assert {layout.offload for layout in found} == set(OFFLOADS)
    assert {layout.schedule for layout in found} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        (LayoutWanted(tp=2, pp=4), lambda layout: (layout.tp, layout.pp) == (2, 4)),
        (LayoutWanted(cp=2, cp_kind="ulysses"), lambda layout: (layout.cp, layout.cp_kind) == (2, "ulysses")),
        (LayoutWanted(zero=3, shard=2), lambda layout: layout.zero == 3 and layout.shard_ranks == 2),
        (LayoutWanted(schedule="zb-v"), lambda layout: layout.schedule == "zb-v" and layout.pp > 1),
        (LayoutWanted(pp=4), lambda layout: layout.split is None),
        (LayoutWanted(split="even"), lambda layout: layout.split is None),
        (LayoutWanted(pp=4, split=(7, 9, 9, 7)), lambda layout: layout.split == (7, 9, 9, 7)),
        (LayoutWanted(pp=4, split="uneven", vpp=1), lambda layout: layout.split in (None, (7, 9, 9, 7))
         or layout.schedule in ("zb-v", "dualpipev")),
        (LayoutWanted(vpp=2), lambda layout: layout.vpp == 2 and layout.schedule == "interleaved"),
        (LayoutWanted(micro_batch=3, sp=False), lambda layout: layout.micro_batch == 3 and not layout.sp),
        (
            LayoutWanted(recompute="full", offload="both"),
            lambda layout: (layout.recompute, layout.offload) == ("full", "both"),
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_all_that_is_tried(wanted: LayoutWanted, holds) -> None:
    found = _all_layouts(L8, Training(1024, 24), 8, wanted, ALL_CHOICES)
    assert found and all(holds(layout) for layout in found)


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    found = _all_layouts(V2, Training(1024, 16), 16, LayoutWanted(pp=1), Choices(offloads=("none",)))
    assert {layout.ep for layout in found} == {1, 2, 4, 8, 16}
    alone = _all_layouts(V2, Training(1024, 16), 16, LayoutWanted(pp=1), Choices(offloads=("none",), ep_alone=True))
    assert all(layout.expert_tp == 1 for layout in alone if layout.ep > 1)


def test_what_cannot_be_leaves_nothing() -> None:
    training = Training(1024, 16)
    assert _all_layouts(L8, training, 8, LayoutWanted(tp=3), ALL_CHOICES) == []
    assert _all_layouts(L8, training, 8, LayoutWanted(zero=7), ALL_CHOICES) == []
    assert _all_layouts(L8, training, 8, LayoutWanted(micro_batch=5), ALL_CHOICES) == []
