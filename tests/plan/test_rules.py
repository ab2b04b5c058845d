"""Each rule of a layout: one layout that breaks it and no rule before it, and the same verdict for a block."""

from dataclasses import replace

import numpy as np
import pytest

from cordee.plan.layout import Layout
from cordee.plan.rules import RULES, Proposal, first_misfit, permitted
from cordee.plan.training import OPTIMIZERS, Adapters, Frozen, Stage, Training, Tuning
from cordee.workload.load import load_shape

L70, MOE = load_shape("llama-3-70b"), load_shape("mixtral-8x7b")
DENSE = replace(L70, heads=24, kv_heads=24)
SHARED = replace(load_shape("deepseek-v2"), heads=8, kv_heads=8)
BROKEN = {
    "the axes fill the GPUs": (L70, Layout(dp=3), 4),
    "ZeRO has stages 0 to 3": (L70, Layout(dp=4, zero=4), 4),
    "tp divides the attention heads": (L70, Layout(tp=3), 3),
    "tp divides the key-value heads, or copies them evenly": (replace(L70, kv_heads=6), Layout(tp=4), 4),
    "tp divides the feed-forward width": (DENSE, Layout(tp=3), 3),
    "adapters are trained on data-parallel ranks": (L70, Layout(tp=8), 8),
    "frozen layers are on data-parallel ranks": (L70, Layout(tp=8), 8),
    "an optimizer in the backward pass sees each gradient once": (L70, Layout(dp=4, zero=3), 4),
    "each stage has a layer": (L70, Layout(pp=81), 81),
    "sequence parallelism divides the tokens": (replace(L70, heads=60, kv_heads=60, ffn=60), Layout(tp=5, sp=True), 5),
    "the data ranks divide the batch": (L70, Layout(dp=3), 3),
    "a micro-batch has whole pairs": (L70, Layout(dp=4), 4),
    "context parallelism divides the sequence": (L70, Layout(cp=3), 3),
    "ulysses divides the heads": (L70, Layout(cp=128, cp_kind="ulysses"), 128),
    "sharding groups divide the data ranks": (L70, Layout(dp=4, zero=3, shard=3), 4),
    "expert parallelism needs experts": (L70, Layout(dp=2, ep=2), 2),
    "ep divides the experts": (MOE, Layout(dp=16, ep=16), 16),
    "etp divides an expert's width": (MOE, Layout(dp=4, etp=3), 4),
    "tp divides the shared experts' width": (replace(SHARED, ffn=2**14), Layout(tp=8), 8),
    "experts divide the GPUs of a stage": (MOE, Layout(dp=4, ep=8), 4),
    "schedules and chunks need a pipeline": (L70, Layout(schedule="zb-h1"), 1),
    "each chunk has a layer": (L70, Layout(pp=64, schedule="interleaved", vpp=2), 64),
    "vpp is for the interleaved schedule": (L70, Layout(pp=2, vpp=2), 2),
    "a split has every layer": (L70, Layout(pp=2, split=(40, 39)), 2),
    "stages divide the layers, unless a split says how": (L70, Layout(pp=3), 3),
    "interleaved passes fill the pipeline": (L70, Layout(pp=5, dp=512, schedule="interleaved", vpp=2), 2560),
    "micro-batches fill a schedule of two directions": (L70, Layout(pp=4, dp=128, schedule="dualpipev"), 512),
    "a schedule of two halves has even ones": (L70, Layout(pp=5, dp=32, schedule="dualpipe"), 160),
}
TRAINED = {
    "adapters are trained on data-parallel ranks": Training(8192, 512, adapters=Adapters()),
    "frozen layers are on data-parallel ranks": Training(8192, 512, tuning=Tuning(Frozen((0,)))),
    "an optimizer in the backward pass sees each gradient once": Training(
        8192, 512, replace(OPTIMIZERS["adamw-bf16"], in_backward=True)
    ),
    "a micro-batch has whole pairs": Training(8192, 512, tuning=Tuning(stage=Stage("dpo", "model"))),
}


def _shape(name: str):
    shape = BROKEN[name][0]
    if name == "tp divides the shared experts' width":
        assert shape.experts is not None
        return replace(shape, experts=replace(shape.experts, shared_ffn=12))
    return shape


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_layout_that_breaks_the_rule_is_refused_by_it(name: str) -> None:
    _, layout, gpus = BROKEN[name]
    at = Proposal(layout, _shape(name), gpus, TRAINED.get(name, Training(8192, 512)))
    rule = next(rule for rule in RULES if rule.applies(at) and not rule.holds(at))
    assert rule.name == name
    assert first_misfit(layout, at.shape, gpus, at.training) == (rule.message(at), rule.hint(at))
    assert at.shape.name in rule.message(at) or any(char.isdigit() for char in rule.message(at))


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_block_is_judged_as_its_layouts_are(name: str) -> None:
    _, layout, gpus = BROKEN[name]
    sizes = {axis: np.array([getattr(layout, axis), 1]) for axis in ("dp", "tp", "cp", "ep", "zero", "micro_batch")}
    block = replace(layout, **sizes)  # type: ignore[arg-type]
    rule = next(rule for rule in RULES if rule.name == name)
    good = permitted(Proposal(block, _shape(name), gpus, TRAINED.get(name, Training(8192, 512))), rule.axes)
    assert not np.broadcast_to(good, 2)[0]


def test_every_rule_has_an_example() -> None:
    assert list(BROKEN) == [rule.name for rule in RULES]
    assert len(set(BROKEN)) == len(RULES)
