"""What a plan answers when asked further: why not, how far it scales, how long a context, how to launch it."""

import json
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Layout, parse_layout, plan_layouts
from cordee.plan.curve import scaling_curve, sizes
from cordee.plan.launch import LAUNCHERS, first_to_launch, launch_settings
from cordee.plan.layout import SCHEDULES, Training
from cordee.plan.longest import longest_context, longest_contexts
from cordee.plan.memory import peak_bytes
from cordee.plan.search import fewest_gpus_to_train, training_for
from cordee.plan.why import why_not
from cordee.workload.load import load_shape
from cordee.workload.spec import parse_spec

CATALOGUE = load_catalogue()
H100 = CATALOGUE.find_gpu("H100")
L70, V3, GPT2 = (load_shape(name) for name in ("llama-3-70b", "deepseek-v3", "gpt2"))
PLAN = plan_layouts(L70, H100, 64, price=CATALOGUE.price(H100, "on-demand"))


def test_what_does_not_divide_says_so() -> None:
    why = why_not(PLAN, "tp=8,pp=3")
    assert why.ground == "does not divide" and why.candidate is None
    assert "tp*pp*dp = 8*3*2 = 48 GPUs, but the job has 64" in why.says
    assert "must divide 64" in why.hint


def test_what_does_not_fit_says_by_how_much_where_and_what_would() -> None:
    why = why_not(PLAN, "dp=64,zero=0")
    assert why.ground == "does not fit" and why.candidate is not None
    assert why.candidate.shortfall_bytes > 1000e9
    for word in ("dp64", "TB", "stage 0", "optimizer", "80 GB"):
        assert word in why.says
    assert "fits" in why.hint and "fsdp64" in why.hint


def test_what_is_slower_says_where_the_time_goes() -> None:
    why = why_not(PLAN, "fsdp64")
    assert why.ground == "slower" and why.candidate is not None and PLAN.best is not None
    assert why.candidate.step is not None and PLAN.best.step is not None
    more = why.candidate.step.total_s - PLAN.best.step.total_s
    assert more > 0 and sum(seconds for _, seconds in why.more_s) == pytest.approx(more)
    spans = [abs(seconds) for _, seconds in why.more_s]
    assert spans == sorted(spans, reverse=True)


def test_the_best_is_told_as_such_and_any_layout_of_the_plan_can_be_asked_for() -> None:
    assert PLAN.best is not None
    exact = str(PLAN.best.layout)
    assert why_not(PLAN, exact).ground == "the best"
    for candidate in PLAN.fitting[1:5]:
        assert why_not(PLAN, str(candidate.layout)).ground in ("slower", "the best")
    for candidate in PLAN.rejected[:3]:
        # A stage of 0 and one micro-batch go without saying, and what is not said is searched.
        layout = candidate.layout
        exact = f"{layout} 1f1b" + (" zero0" if layout.zero == 0 else "")
        assert why_not(PLAN, exact).ground == "does not fit", exact
    with pytest.raises(LayoutError, match="cannot be read"):
        why_not(PLAN, "tq=8")


def test_where_nothing_fits_the_answer_is_a_remedy() -> None:
    none = plan_layouts(L70, H100, 4)
    why = why_not(none, "tp=4")
    assert why.ground == "does not fit" and why.best is None and why.hint
    offloaded = why_not(plan_layouts(L70, H100, 8), "tp=8,offload=optimizer")
    assert offloaded.ground == "the best" and offloaded.best is None
    assert offloaded.candidate is not None and offloaded.candidate.fits


def test_sizes_of_a_curve() -> None:
    assert sizes(8, 512) == (8, 16, 32, 64, 128, 256, 512)
    assert sizes(6, 20) == (6, 12, 20)
    assert sizes(8, 8) == (8,)
    for first, last in ((64, 8), (0, 8)):
        with pytest.raises(LayoutError, match="empty range"):
            sizes(first, last)


def test_a_curve_has_a_point_for_each_size_and_a_knee_where_gpus_stop_to_pay() -> None:
    training = training_for(GPT2, 512, seq_tokens=1024, global_batch=64)
    curve = scaling_curve(GPT2, H100, sizes(1, 64), training)
    assert [point.gpus for point in curve.points] == [1, 2, 4, 8, 16, 32, 64]
    assert curve.knee is not None and curve.smallest is not None and curve.smallest.gpus == 1
    after = next(point for point in curve.points if point.gpus > curve.knee.gpus)
    assert (after.added_share or 0) < 0.5
    before = [point for point in curve.points if point.gpus <= curve.knee.gpus]
    assert all((point.added_share or 0) >= 0.5 for point in before)
    for point in curve.points:
        if point.candidate is not None and point.candidate.step is not None:
            assert point.tokens_per_s == pytest.approx(training.tokens_per_step / point.candidate.step.total_s)


def test_what_is_too_small_has_no_layout_and_the_fewest_is_said() -> None:
    training = training_for(L70, 64, framework="megatron")
    curve = scaling_curve(L70, H100, sizes(4, 64), training)
    assert [point.candidate is None for point in curve.points[:2]] == [True, True]
    assert curve.smallest is not None and curve.smallest.gpus == 16
    fewest = fewest_gpus_to_train(L70, H100, training, 1, 64)
    assert fewest is not None and fewest[0] == 16 and fewest[1].gpus == 16
    assert fewest_gpus_to_train(L70, H100, training, 1, 8) is None


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    found = longest_contexts(PLAN, 3)
    assert found and [f.seq_tokens for f in found] == sorted((f.seq_tokens for f in found), reverse=True)
    for each in found:
        assert 0 < each.peak_bytes <= H100.memory_bytes
        layout, step = each.layout, 256 * each.layout.tp
        longer = Training(each.seq_tokens + step, layout.dp * 2 * layout.pp)
        assert float(peak_bytes(L70, layout, longer)) > H100.memory_bytes * 0.99
    lean = {f.layout: f.seq_tokens for f in found}
    for layout, tokens in lean.items():
        if layout.recompute == "none":
            assert lean[replace(layout, recompute="full")] > tokens


def test_learned_positions_and_the_wall_bound_the_context() -> None:
    plan = plan_layouts(GPT2, H100, 1, seq_tokens=512)
    assert longest_context(plan, Layout()).seq_tokens == 1024
    none = plan_layouts(L70, H100, 8)
    assert longest_context(none, Layout(dp=8)).seq_tokens == 0


LAYOUTS = st.builds(
    Layout, dp=st.sampled_from([1, 2, 8]), tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3), sp=st.booleans(), micro_batch=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]), schedule=st.sampled_from(SCHEDULES),
    cp_kind=st.sampled_from(["ring", "all-gather", "ulysses"]), vpp=st.just(1),
    offload=st.sampled_from(["none", "optimizer", "activations", "both"]),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(LAYOUTS, st.sampled_from(sorted(LAUNCHERS)))
def test_every_launcher_says_every_axis_of_a_layout(layout: Layout, launcher: str) -> None:
    layout = replace(layout, vpp=4) if layout.schedule == "interleaved" else layout
    training = Training(4096, 64)
    said = launch_settings(launcher, L70, layout, training)
    if launcher == "megatron":
        assert f"--tensor-model-parallel-size {layout.tp} " in said.text
        assert f"--pipeline-model-parallel-size {layout.pp} " in said.text
        assert f"--context-parallel-size {layout.cp} " in said.text
        assert ("--use-distributed-optimizer" in said.text) == (layout.zero > 0)
        assert ("--sequence-parallel" in said.text) == layout.sp
        assert all(line.startswith("--") for line in said.text.replace("\\\n", "\n").splitlines())
    elif launcher == "torchtitan":
        told = tomllib.loads(said.text)
        mesh = told["parallelism"]
        degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
        others = ("context_parallel_degree", "pipeline_parallel_degree")
        product = 1
        for name in (*degrees, *others):
            product *= mesh[name]
        assert product == layout.gpus
        assert told["activation_checkpoint"]["mode"] == layout.recompute
        assert told["training"]["global_batch_size"] == 64
    elif launcher == "deepspeed":
        told = json.loads(said.text)
        ranks = layout.dp
        accumulated = told["train_micro_batch_size_per_gpu"] * told["gradient_accumulation_steps"] * ranks
        assert accumulated == told["train_batch_size"] == 64
        assert told["zero_optimization"]["stage"] == layout.zero
    else:
        spec = parse_spec(said.text)
        assert spec.gpus == layout.gpus and spec.model is not None and spec.model.layout is not None
        asked = parse_layout(spec.model.layout)
        assert asked.plainest(layout.gpus).mesh == layout.mesh


def test_the_fastest_that_a_launcher_can_run_is_launched() -> None:
    layouts = [candidate.layout for candidate in PLAN.fitting]
    for launcher in LAUNCHERS:
        launch = first_to_launch(launcher, L70, layouts, PLAN.training)
        assert launch.cannot == () and launch.layout in [str(layout) for layout in layouts]
    dual = Layout(dp=4, tp=2, pp=8, zero=1, sp=True, schedule="dualpipe")
    only = first_to_launch("megatron", L70, [dual], PLAN.training)
    assert any("dualpipe" in each for each in only.cannot)
    with pytest.raises(LayoutError, match="unknown launcher 'nemo'"):
        launch_settings("nemo", L70, dual, PLAN.training)


def test_experts_offload_and_hsdp_reach_megatrons_flags() -> None:
    layout = Layout(
        dp=16, tp=4, pp=4, zero=1, sp=True, ep=8, etp=1, shard=8, recompute="full", offload="optimizer", vpp=2,
        schedule="interleaved",
    )  # fmt: skip
    text = launch_settings("megatron", V3, layout, Training(4096, 256)).text
    for flag in (
        "--expert-model-parallel-size 8", "--expert-tensor-parallel-size 1", "--num-distributed-optimizer-instances 2",
        "--recompute-granularity full", "--optimizer-cpu-offload", "--num-virtual-stages-per-pipeline-rank 2",
    ):  # fmt: skip
        assert flag in text


def test_a_notebook_shows_the_layouts_and_a_table_makes_a_frame() -> None:
    html = PLAN._repr_html_()
    assert html.count("<svg") == 1 and "<table>" in html and "llama-3-70b" in html
    assert PLAN.best is not None and str(PLAN.best.layout) in html
    rows = PLAN.table()
    assert len(rows) == len(PLAN.fitting) + len(PLAN.rejected)
    assert rows[0]["layout"] == str(PLAN.best.layout) and rows[0]["fits"] and isinstance(rows[0]["step_s"], float)
    assert rows[-1]["step_s"] is None and rows[-1]["shortfall_bytes"] > 0
    none = plan_layouts(L70, H100, 8)._repr_html_()
    assert "<svg" in none and "<table>" not in none


def test_every_step_has_an_interval_around_it() -> None:
    for candidate in PLAN.fitting:
        assert candidate.step is not None and candidate.step_interval_s is not None
        low, high = candidate.step_interval_s
        assert low < candidate.step.total_s < high
