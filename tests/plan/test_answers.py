"""What a plan answers when asked further: why not, how far it scales, how long a context, how to launch it."""

from dataclasses import replace

import pytest
from asking import asked, planned

import cordee
from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Layout, Settings, ask, ask_curve
from cordee.plan.curve import sizes
from cordee.plan.longest import longest_context, longest_contexts
from cordee.plan.memory import peak_bytes
from cordee.plan.optimum import Case
from cordee.plan.search import fewest_gpus_to_train
from cordee.plan.training import Training
from cordee.workload.load import load_shape

CATALOGUE = load_catalogue()
H100 = CATALOGUE.find_gpu("H100")
L70, V3, GPT2 = (load_shape(name) for name in ("llama-3-70b", "deepseek-v3", "gpt2"))
PLAN = planned(L70, H100, 64, price=CATALOGUE.price(H100, "on-demand"))


def test_what_does_not_divide_says_so() -> None:
    why = PLAN.why_not("tp=8,pp=3")
    assert why.ground == "does not divide" and why.candidate is None
    assert "tp*pp = 24 does not divide 64 GPUs" in why.message
    assert "that divides 64: 1, 2, 4, 8, 16, 32, 64" in why.hint


def test_what_does_not_fit_says_by_how_much_where_and_what_would() -> None:
    why = PLAN.why_not("dp=64,zero=0")
    assert why.ground == "does not fit" and why.candidate is not None
    assert why.candidate.shortfall_bytes > 1000e9
    for word in ("dp64", "TB", "stage 0", "optimizer", "85 GB"):
        assert word in why.message
    assert "fits" in why.hint and "fsdp64" in why.hint


def test_what_is_slower_says_where_the_time_goes() -> None:
    why = PLAN.why_not("fsdp64")
    assert why.ground == "slower" and why.candidate is not None and PLAN.best is not None
    assert why.candidate.step is not None and PLAN.best.step is not None
    more = why.candidate.step.total_s - PLAN.best.step.total_s
    assert more > 0 and sum(seconds for _, seconds in why.more_s) == pytest.approx(more)
    spans = [abs(seconds) for _, seconds in why.more_s]
    assert spans == sorted(spans, reverse=True)


def test_why_not_knows_the_best_layout_and_every_layout_of_the_plan() -> None:
    assert PLAN.best is not None
    exact = str(PLAN.best.layout)
    assert PLAN.why_not(exact).ground == "the best"
    for candidate in PLAN.fitting[1:5]:
        assert PLAN.why_not(str(candidate.layout)).ground in ("slower", "the best")
    for candidate in PLAN.rejected[:3]:
        # A stage of 0 and one micro-batch go without saying, and what is not said is searched.
        layout = candidate.layout
        exact = f"{layout} 1f1b" + (" zero0" if layout.zero == 0 else "")
        assert PLAN.why_not(exact).ground == "does not fit", exact
    with pytest.raises(LayoutError, match="cannot be read"):
        PLAN.why_not("tq=8")


def test_where_nothing_fits_the_answer_is_a_remedy() -> None:
    none = planned(L70, H100, 4)
    why = none.why_not("tp=4")
    assert why.ground == "does not fit" and why.best is None and why.hint
    offloaded = planned(L70, H100, 8).why_not("fsdp=8,mb=4,full,offload=both")
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
    training = Settings(seq_tokens=1024, global_batch=64).training(GPT2, 512)
    curve = ask_curve(asked(GPT2, H100, 64, seq_tokens=1024, global_batch=64), 1)
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
    request = asked(L70, H100, 64, framework="megatron")
    training, curve = request.case().training, ask_curve(request, 4)
    assert [point.candidate is None for point in curve.points[:2]] == [True, True]
    assert curve.smallest is not None and curve.smallest.gpus == 16
    fewest = fewest_gpus_to_train(Case(L70, H100, 64, training))
    assert fewest is not None and fewest[0] == 16 and fewest[1].gpus == 16
    assert fewest_gpus_to_train(Case(L70, H100, 8, training)) is None


def test_a_curve_falls_back_to_another_framework_as_a_plan_does() -> None:
    small = replace(H100, visible_fraction=1.0)
    request = asked(L70, small, 16, framework=None, seq_tokens=20480)
    assert ask(request).layouts.case.training.framework == "megatron"
    assert ask_curve(request, 16).training.framework == "megatron"
    assert not ask_curve(asked(L70, small, 16, framework="torch", seq_tokens=20480), 16).fits


def test_an_exhaustive_curve_searches_as_widely_as_an_exhaustive_plan() -> None:
    request = replace(asked(GPT2, H100, 2, seq_tokens=1024, global_batch=8), search="everything")
    best, point = ask(request).best, ask_curve(request, 2).points[0].candidate
    assert best is not None and point is not None
    # Layouts that take the same time to the last digit may be tied.
    assert point.step_s == best.step_s


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    found = longest_contexts(PLAN.layouts, PLAN.request.layout, 3)
    assert found and [f.seq_tokens for f in found] == sorted((f.seq_tokens for f in found), reverse=True)
    for each in found:
        assert 0 < each.peak_bytes <= H100.visible_bytes
        layout, step = each.layout, 256 * each.layout.tp * each.layout.cp
        longer = Training(each.seq_tokens + step, layout.dp * 2 * layout.pp)
        assert float(peak_bytes(L70, layout, longer)) > H100.visible_bytes * 0.99
    lean = {f.layout: f.seq_tokens for f in found}
    for layout, tokens in lean.items():
        if layout.recompute == "none":
            assert lean[replace(layout, recompute="full")] > tokens


def test_learned_positions_and_the_gpus_memory_bound_the_context() -> None:
    plan = planned(GPT2, H100, 1, seq_tokens=512)
    assert longest_context(plan.layouts.case, Layout()).seq_tokens == 1024
    none = planned(L70, H100, 8)
    assert longest_context(none.layouts.case, Layout(dp=8)).seq_tokens == 0


def test_a_notebook_shows_the_layouts_and_a_table_makes_a_frame() -> None:
    assert repr(PLAN).endswith(f": {PLAN.summary}>") and len(repr(PLAN)) < 200, "what a console shows"
    html = PLAN._repr_html_()
    assert "<table>" in html and "llama-3-70b" in html and "<html" not in html and "body{" not in html
    for part in ("Memory over the step", "Layouts", "Checkpoints and interruptions"):
        assert part in html
    assert PLAN.best is not None and str(PLAN.best.layout) in html
    rows = PLAN.table()
    assert len(rows) == len(PLAN.fitting) + len(PLAN.rejected)
    assert rows[0]["layout"] == str(PLAN.best.layout) and rows[0]["fits"] and isinstance(rows[0]["step_s"], float)
    assert rows[-1]["step_s"] is None and rows[-1]["shortfall_bytes"] > 0
    none = planned(L70, H100, 8)._repr_html_()
    assert "<svg" in none and "<table>" not in none


def test_every_step_has_an_interval_around_it() -> None:
    for candidate in PLAN.fitting:
        assert candidate.step is not None and candidate.step_interval_s is not None
        low, high = candidate.step_interval_s
        assert low < candidate.step.total_s < high


def test_the_estimate_is_the_answer_in_the_units_of_events() -> None:
    assert PLAN.best is not None and PLAN.best.step is not None
    estimate = PLAN.estimate()
    assert (estimate.layout, estimate.gpus) == (str(PLAN.best.layout), 64)
    assert estimate.allocated_bytes < estimate.peak_bytes <= estimate.gpu_memory_bytes == H100.visible_bytes
    assert estimate.step_us is not None and estimate.step_us_low is not None and estimate.step_us_high is not None
    assert estimate.step_us_low < estimate.step_us < estimate.step_us_high
    tokens_per_s = estimate.tokens_per_step / estimate.step_us * 1e6
    assert estimate.mfu_at(tokens_per_s) == pytest.approx(estimate.mfu, rel=1e-4)
    assert estimate.save_us == round(PLAN.survival.checkpoint_s * 1e6)
    assert planned(L70, H100, 8).estimate().step_us is None


def test_a_notebook_plans_by_name() -> None:
    answer = cordee.plan("llama-3-8b", "8xH100", tokens="1B", precision="fp8")
    assert answer.training.precision == "fp8" and answer.run is not None and answer.run.tokens == 1e9
    assert cordee.plan.ask is not None  # it is still the package
