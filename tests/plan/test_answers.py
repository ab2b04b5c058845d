"""What a plan answers when asked further: why not, how far it scales, how long a context, how to launch it."""

from dataclasses import replace

import pytest

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Layout, plan_layouts
from cordee.plan.curve import scaling_curve, sizes
from cordee.plan.layout import Training
from cordee.plan.longest import longest_context, longest_contexts
from cordee.plan.memory import peak_bytes
from cordee.plan.search import fewest_gpus_to_train, training_for
from cordee.plan.why import why_not
from cordee.workload.load import load_shape

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
    assert (after.added_fraction or 0) < 0.5
    before = [point for point in curve.points if point.gpus <= curve.knee.gpus]
    assert all((point.added_fraction or 0) >= 0.5 for point in before)
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
