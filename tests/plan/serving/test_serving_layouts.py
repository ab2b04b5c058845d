"""Layouts of a replica: what is asked for, and the rules."""

import re

import pytest

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.layouts import (
    ANY_SERVING_LAYOUT,
    check_formats,
    layouts,
    misfit,
    missing_axes,
    parse_serving_layout,
)
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
    ("engine", "version", "layout", "message"),
    [
        (
            "llama.cpp",
            None,
            "dp=8,ep",
            "llama.cpp b4000 has no data-parallel attention (dp8) and no expert parallelism",
        ),
        ("llama.cpp", None, "tp=2,pp=2", "llama.cpp b4000 has no tp and pp together"),
        ("tensorrt-llm", None, "tp=2,dp=4,ep", "has no tp and dp together"),
        ("vllm", "0.6.5", "tp=8,ep", "vllm 0.6.5 has no expert parallelism"),
    ],
)
def test_an_engine_plans_only_layouts_that_it_has(engine: str, version: str | None, layout: str, message: str) -> None:
    record, shape = find_engine(engine, version), load_shape("deepseek-v3")
    with pytest.raises(LayoutError, match=re.escape(message)) as refused:
        layouts(shape, H100, 16, parse_serving_layout(layout), record)
    assert refused.value.hint is not None and "vllm" in refused.value.hint
    for each in layouts(shape, H100, 16, ANY_SERVING_LAYOUT, record):
        assert not missing_axes(each, record)


def test_an_engine_refuses_formats_that_it_lacks_and_names_its_own() -> None:
    check_formats(find_engine("vllm"), [WEIGHTS["fp8-block"]], [KV["fp8"]])
    with pytest.raises(LayoutError, match="does not serve weights in fp8-block") as refused:
        check_formats(find_engine("llama.cpp"), [WEIGHTS["fp8-block"]], [KV["bf16"]])
    assert refused.value.hint is not None and "gguf-q8_0" in refused.value.hint and "vllm" in refused.value.hint
    with pytest.raises(LayoutError, match="does not serve a KV cache in q8_0"):
        check_formats(find_engine("vllm"), [WEIGHTS["bf16"]], [KV["q8_0"]])


@pytest.mark.parametrize(
    ("text", "hint"), [("tb=2", "did you mean tp?"), ("tp", "tp=2,pp=1,dp=1"), ("tp=0", "whole number from 1")]
)
def test_a_layout_that_cannot_be_read_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(LayoutError) as refused:
        parse_serving_layout(text)
    assert refused.value.hint is not None and hint in refused.value.hint
