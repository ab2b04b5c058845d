"""Layouts: how they are written, and that what does not divide says so with its numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import LayoutError
from cordee.plan.layout import Layout
from cordee.plan.rules import validate
from cordee.plan.split import light_ends, read_split, split_text, splits, stage_layers
from cordee.plan.training import OPTIMIZERS, Training, find_optimizer
from cordee.plan.wanted import LayoutWanted, parse_layout
from cordee.workload.load import load_shape

LLAMA = load_shape("llama-3-70b")
TRAINING = Training(8192, 512)


def test_bytes_for_one_parameter() -> None:
    sizes = {name: optimizer.bytes_per_parameter for name, optimizer in OPTIMIZERS.items()}
    assert sizes == {
        "adamw": 16, "adamw-fp32-grads": 18, "adamw-fp32-sums": 20, "adamw-bf16-moments": 12, "adamw-8bit": 6.03125,
        "adamw-8bit-master": 10.03125, "adamw-8bit-paged": 6.03125, "adamw-bf16": 8, "adamw-paged": 16,
        "muon": 12, "sgd-momentum": 12,
    }  # fmt: skip
    assert OPTIMIZERS["adamw"].checkpoint_bytes_per_parameter == 12
    assert OPTIMIZERS["adamw-8bit"].checkpoint_bytes_per_parameter == 4.03125
    assert find_optimizer("adamw", "fp32").bytes_per_parameter == 16
    assert find_optimizer("adamw", "fp32").checkpoint_bytes_per_parameter == 12


def test_an_unknown_optimizer_has_a_hint_with_the_likely_name() -> None:
    with pytest.raises(LayoutError, match="unknown optimizer 'adam8bit'") as caught:
        find_optimizer("adam8bit")
    assert "did you mean adamw-8bit?" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("layout", "gpus", "says", "hint"),
    [
        (Layout(dp=2, tp=8, pp=3), 64, "tp*pp = 24 does not divide 64 GPUs", "tp*pp that divides 64: 1, 2, 4"),
        (Layout(dp=2, tp=8, pp=2), 64, "tp*pp*dp = 8*2*2 = 32 GPUs, but the job has 64", "use dp=4"),
        (Layout(tp=3), 3, "tp=3 does not divide the 64 attention heads", "1, 2, 4, 8, 16, 32"),
        (Layout(pp=81), 81, "pp=81 stages need as many layers, but llama-3-70b has 80", "pp <= 80"),
        (Layout(dp=3), 3, "dp*micro_batch = 3*1 = 3 does not divide the global batch of 512", "multiple of 3"),
        (Layout(dp=4, zero=4), 4, "no ZeRO stage 4", "0, 1, 2 or 3"),
    ],
)
def test_what_does_not_divide_says_so_with_its_numbers(layout: Layout, gpus: int, says: str, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        validate(layout, LLAMA, gpus, TRAINING)
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


def test_key_value_heads_and_widths_must_divide_too() -> None:
    qwen = load_shape("qwen2-7b")  # 28 heads, 4 key-value heads
    with pytest.raises(LayoutError, match="tp=7 neither divides the 4 key-value heads"):
        validate(Layout(tp=7), qwen, 7, TRAINING)
    validate(Layout(tp=4), qwen, 4, TRAINING)
    with pytest.raises(LayoutError, match="sp over tp=8 does not divide 1001 tokens"):
        validate(Layout(tp=8, sp=True), LLAMA, 8, Training(1001, 512))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tp=8,pp=2", LayoutWanted(tp=8, pp=2)),
        ("tp8 pp2 dp4 zero1 mb2 full", LayoutWanted(dp=4, tp=8, pp=2, zero=1, micro_batch=2, recompute="full")),
        ("fsdp=64", LayoutWanted(dp=64, zero=3)),
        ("sp=0, recompute=selective", LayoutWanted(sp=False, recompute="selective")),
    ],
)
def test_layouts_are_read_as_they_are_written_and_printed(text: str, wanted: LayoutWanted) -> None:
    assert parse_layout(text) == wanted


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("tq=8", "'tq=8'", "did you mean tp?"),
        ("tp=", "'tp='", "write it as"),
        ("tp=-1", "'tp=-1'", "write it as"),
        ("tp=0", "tp=0 is not a size", "from 1"),
        ("tp=8,tp=4", "gives tp twice", "once"),
        ("fsdp=8,dp=8", "gives fsdp and dp or zero", "dp=N,zero=3"),
        ("recompute=some", "'recompute=some'", ""),
        ("tp=full", "'tp=full'", ""),
        ("", "''", "write it as"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, says: str, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_divided_and_the_ends_get_no_more(layers: int, pp: int) -> None:
    if pp > layers:
        return
    stages = stage_layers(layers, pp)
    assert sum(stages) == layers and len(stages) == pp
    assert max(stages) - min(stages) <= 1
    if pp > 2:
        assert stages[0] <= max(stages[1:-1]) and stages[-1] <= max(stages[1:-1])


@given(
    st.builds(
        Layout,
        dp=st.integers(2, 64),
        tp=st.sampled_from([1, 2, 4, 8]),
        pp=st.integers(1, 8),
        zero=st.integers(1, 3),
        micro_batch=st.integers(1, 8),
        recompute=st.sampled_from(["none", "selective", "full"]),
    )
)
def test_what_is_printed_can_be_asked_for(layout: Layout) -> None:
    asked = parse_layout(str(layout)).plainest(layout.gpus)
    assert asked == layout


@given(st.lists(st.integers(1, 99), min_size=1, max_size=64))
def test_a_split_that_is_printed_can_be_read(stages: list[int]) -> None:
    assert read_split(split_text(tuple(stages))) == tuple(stages)
    layout = Layout(pp=len(stages), split=tuple(stages))
    assert parse_layout(str(layout)).split == tuple(stages)


@given(st.integers(1, 200), st.integers(2, 64))
def test_every_split_holds_all_layers_and_no_stage_is_empty(layers: int, stages: int) -> None:
    if stages > layers:
        return
    for split in splits(layers, stages):
        shared = split or stage_layers(layers, stages)
        assert sum(shared) == layers and len(shared) == stages and min(shared) >= 1
        assert split is not None or layers % stages == 0


def test_llama_405b_and_bloom_have_a_layer_less_at_both_ends() -> None:
    assert light_ends(126, 16) == (7, *[8] * 14, 7)
    assert light_ends(70, 12) == (5, *[6] * 10, 5)


@pytest.mark.parametrize(
    ("layout", "message", "hint"),
    [
        (Layout(dp=8, pp=7), "pp=7 does not divide the 80 layers of llama-3-70b", "split=10-12x5-10"),
        (Layout(dp=8, pp=7, split=(20, 60)), "split 20-60 has 80 layers on 2 stages", "on 7 stages"),
        (Layout(dp=8, pp=7, split=(10, *[12] * 6)), "split 10-12x6 has 82 layers on 7 stages", "the 80 layers"),
        (
            Layout(dp=14, pp=4, schedule="interleaved", vpp=3), "pp=4 with 3 chunks each does not divide the 80 layers",
            "1, 2, 4, 5, 8, 10, 16, 20, 40; uneven ones work with split=5-7x10-5",
        ),
    ],
)  # fmt: skip
def test_stages_that_layers_do_not_divide_want_a_split(layout: Layout, message: str, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        validate(layout, LLAMA, 56, Training(8192, 560))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["split=", "split=0-80", "split=a", "split=8-", "split=8x0"])
def test_a_split_that_cannot_be_read_says_how_to_write_one(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert "split=7-8x14-7" in (caught.value.hint or "")
