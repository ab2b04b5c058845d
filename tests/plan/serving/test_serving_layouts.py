"""Layouts of a replica: what is asked for, and the rules."""

import pytest

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.layouts import ANY_SERVING_LAYOUT, layouts, misfit, parse_serving_layout
from cordee.workload.load import load_shape

H100 = load_catalogue().find_gpu("H100")


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3", "qwen2.5-7b"])
def test_every_layout_keeps_the_rules_and_is_read_back_as_it_is_printed(name: str) -> None:
    shape = load_shape(name)
    found = layouts(shape, H100, 16, ANY_SERVING_LAYOUT)
    assert ServingLayout() in found and len(set(found)) == len(found)
    for each in found:
        assert each.gpus <= 16 and misfit(each, shape, H100, 16) is None
        wanted = parse_serving_layout(str(each))
        assert wanted.allows(each) and wanted.plainest == each


@pytest.mark.parametrize(
    ("model", "layout", "message", "hint"),
    [
        ("llama-3-8b", "tp=3", "tp=3 does not divide the 32 attention heads", "use tp of 1, 2, 4, 8"),
        ("qwen2.5-7b", "tp=7", "tp=7 neither divides the 4 KV heads nor is a multiple of them", "use tp of 1, 2, 4"),
        ("llama-3-8b", "tp=8,pp=4", "tp*pp*dp = 8*4*1 = 32 GPUs, but there are 16", "give more GPUs"),
        ("llama-3-70b", "tp=16", "tp=16 is more than the 8 GPUs that NVLink 4 joins", "use pp between nodes"),
        ("llama-3-8b", "dp=2", "dp=2 within a replica is for mixtures of experts", "a replica of its own"),
        ("llama-3-8b", "tp=2,ep", "has no experts to spread", "leave ep out"),
        ("mixtral-8x7b", "tp=8,dp=2,ep", "tp*dp = 16 does not divide the 8 experts", "fewer GPUs"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused_with_what_would_do(
    model: str, layout: str, message: str, hint: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        layouts(load_shape(model), H100, 16, parse_serving_layout(layout))
    assert message in refused.value.message
    assert refused.value.hint is not None and hint in refused.value.hint


@pytest.mark.parametrize(
    ("text", "hint"), [("tb=2", "did you mean tp?"), ("tp", "tp=2,pp=1,dp=1"), ("tp=0", "whole number from 1")]
)
def test_a_layout_that_cannot_be_read_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(LayoutError) as refused:
        parse_serving_layout(text)
    assert refused.value.hint is not None and hint in refused.value.hint
