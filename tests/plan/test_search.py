"""Which layouts fit, which do not, and what would help where none does."""

import pytest
from asking import planned
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import CatalogueError, DoesNotFitError, LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Answer, Layout, parse_layout
from cordee.plan.memory import rank_memory
from cordee.plan.rules import first_misfit
from cordee.plan.search import fewest_gpus_to_hold
from cordee.plan.step import model_flop_fraction, step_time
from cordee.plan.training import Training
from cordee.units import GB, format_bytes
from cordee.workload.load import load_shape

CATALOGUE = load_catalogue()
H100, A10, L40S = (CATALOGUE.find_gpu(name) for name in ("H100", "A10", "L40S"))
L70, L405, V3, GPT2 = (load_shape(name) for name in ("llama-3-70b", "llama-3-405b", "deepseek-v3", "gpt2"))
PRICE = CATALOGUE.price(H100, "on-demand")


def _admitted(*about, **settings) -> Answer:
    """Ask as admission does: for the one best layout, in the buffers of any framework."""
    return planned(*about, search="best", framework=None, **settings)


def test_llama_3_70b_on_64_h100() -> None:
    plan = planned(L70, H100, 64, price=PRICE)
    assert round(plan.state_bytes / 1e12, 3) == 1.129
    assert plan.fewest_gpus_to_hold == 14
    assert plan.fitting and plan.rejected and not plan.remedies
    assert plan.best is plan.fitting[0]
    assert (plan.training.seq_tokens, plan.training.global_batch) == (8192, 512)
    plain = next(c for c in plan.rejected if c.layout.mesh == "dp64")
    assert plain.peak_bytes > plan.state_bytes and plain.step is None
    assert plain.shortfall_bytes == plain.peak_bytes - H100.visible_bytes


def test_each_mesh_stands_once_fits_before_misfits_best_before_worse() -> None:
    plan = planned(L70, H100, 64, price=PRICE)
    candidates = [*plan.fitting, *plan.rejected]
    meshes = [candidate.layout.mesh for candidate in candidates]
    assert len(set(meshes)) == len(meshes)
    steps = [candidate.step.total_s for candidate in plan.fitting if candidate.step is not None]
    assert len(steps) == len(plan.fitting) and steps == sorted(steps)
    assert all(candidate.fits and candidate.shortfall_bytes == 0 for candidate in plan.fitting)
    short = [candidate.shortfall_bytes for candidate in plan.rejected]
    assert min(short) > 0 and short == sorted(short)


def test_speed_mfu_and_dollars_belong_together() -> None:
    best = planned(L70, H100, 64, price=PRICE).best
    assert best is not None and best.step is not None and PRICE is not None
    assert best.tokens_per_s == pytest.approx(8192 * 512 / best.step.total_s)
    assert best.tokens_per_s is not None and best.usd_per_billion_tokens is not None
    hours = 1e9 / best.tokens_per_s / 3600
    assert best.usd_per_billion_tokens == pytest.approx(hours * 64 * PRICE.usd_per_gpu_hour)
    flop = L70.train_flop_per_token(8192) * best.tokens_per_s
    assert best.mfu == pytest.approx(flop / (64 * 989.4e12))
    assert 0.2 < best.mfu < 0.7


def test_405b_with_8_bit_adam_needs_29_gpus_only_to_hold_it() -> None:
    plan = planned(L405, H100, 256, optimizer="adamw-8bit")
    assert (round(plan.state_bytes / 1e12, 3), plan.fewest_gpus_to_hold) == (2.448, 29)
    assert fewest_gpus_to_hold(H100.visible_bytes, H100) == 1
    assert fewest_gpus_to_hold(H100.visible_bytes + 1, H100) == 2


def test_a_model_with_experts_and_latent_attention_is_planned() -> None:
    plan = planned(V3, H100, 1024)
    assert plan.best is not None
    assert plan.fewest_gpus_to_hold == 127


def test_where_nothing_fits_each_remedy_fits_and_says_how() -> None:
    plan = planned(L70, H100, 8)
    assert plan.best is None and plan.rejected
    assert [remedy.change for remedy in plan.remedies] == [
        "--gpus 16xH100",
        "offload to the host on the same 8 GPUs",
        "--optimizer adamw-8bit on the same 8 GPUs",
        "--train qlora on the same 8 GPUs",
    ]
    # 16 bytes a parameter of each GPU's eighth and activations go to the host; 8-bit states are 6.03 bytes in all.
    more, host, less, adapted = (remedy.because for remedy in plan.remedies)
    assert more == "1.36 TB for 1.129 TB of state"
    assert host == "165.3 GB a GPU on the host, 1.323 TB a node"
    assert less == "425.5 GB of state instead of 1.129 TB"
    assert adapted == "46 GB of state: adapters over 4-bit weights"
    for remedy in plan.remedies:
        asked = f"offload={remedy.candidate.layout.offload}"
        train = "qlora" if remedy.training.adapters else "full"
        name = "adamw" if train == "qlora" else remedy.training.optimizer.name
        again = planned(L70, H100, remedy.gpus, optimizer=name, layout=asked, train=train)
        assert again.best is not None and again.best.layout == remedy.candidate.layout


def test_a_shorter_sequence_may_be_the_remedy() -> None:
    plan = planned(L70, H100, 16, seq_tokens=4_194_304, optimizer="adamw-8bit")
    assert "--seq" in " ".join(remedy.change for remedy in plan.remedies)


def test_asked_for_in_part_the_rest_is_searched() -> None:
    plan = planned(L70, H100, 64, layout="tp=8,pp=2")
    assert {(c.layout.tp, c.layout.pp, c.layout.dp) for c in (*plan.fitting, *plan.rejected)} == {(8, 2, 4)}
    one = planned(L70, H100, 64, layout="tp8 pp2 dp4 zero1 1f1b mb1 full")
    assert [str(c.layout) for c in (*one.fitting, *one.rejected)] == ["tp8 pp2 dp4 zero1 full"]
    small = planned(L70, H100, 64, micro_batch=1, recompute="full")
    assert {(c.layout.micro_batch, c.layout.recompute) for c in small.fitting} == {(1, "full")}


@pytest.mark.parametrize(
    ("layout", "gpus", "says"),
    [
        ("tp=8,pp=3,dp=2", 64, "tp*pp = 24 does not divide 64 GPUs"),
        ("tp=3", 48, "tp=3 does not divide the 64 attention heads of llama-3-70b"),
        ("pp=128", 128, "pp=128 stages need as many layers, but llama-3-70b has 80"),
        ("mb=7", 8, "does not divide the global batch"),
        ("zero=7", 8, "there is no ZeRO stage 7"),
    ],
)
def test_a_layout_that_does_not_divide_says_so(layout: str, gpus: int, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        planned(L70, H100, gpus, layout=layout)
    assert says in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"gpus": 0}, LayoutError, "at least 1 GPU"),
        ({"gpus": 10_007}, LayoutError, "does not divide the global batch of 512"),
        ({"gpus": 8, "seq_tokens": 0}, LayoutError, "sequences of 0 tokens"),
        ({"gpus": 8, "global_batch": 0}, LayoutError, "global batch of 0"),
        ({"gpus": 8, "optimizer": "adam"}, LayoutError, "unknown optimizer"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        planned(L70, H100, **arguments)


def test_learned_positions_limit_the_sequence() -> None:
    with pytest.raises(LayoutError, match="gpt2 cannot train on sequences of 2048 tokens"):
        planned(GPT2, A10, 1, seq_tokens=2048)
    with pytest.raises(CatalogueError, match="has no fp9 units"):
        planned(GPT2, A10, 1, precision="fp9")  # type: ignore[arg-type]


def test_admission_takes_what_fits_and_refuses_with_a_layout_that_would() -> None:
    assert _admitted(L70, H100, 64).fits
    refused = _admitted(L70, H100, 64, layout="dp=64,zero=0")
    assert not refused.fits and refused.nearest.shortfall_bytes > 1000 * GB
    assert refused.suggestion is not None and refused.suggestion.fits
    error = refused.error()
    assert isinstance(error, DoesNotFitError)
    assert error.message.startswith("llama-3-70b does not fit 64 x H100: dp64 mb8 full needs 1.6")
    assert "which has 85 GB" in error.message
    assert error.hint == f"layout {refused.suggestion.layout} fits with {format_bytes(refused.suggestion.peak_bytes)}"


def test_a_pipeline_that_only_megatron_lms_buffers_hold_is_admitted() -> None:
    # torch makes 512 tensors to receive gradients into; Megatron-LM one.
    verdict = _admitted(L70, H100, 16, layout="tp=8,pp=2")
    assert verdict.fits and not planned(L70, H100, 16, layout="tp=8,pp=2").fitting


def test_a_split_fixes_its_pipeline() -> None:
    with pytest.raises(LayoutError, match=r"tp\*pp = 56 does not divide 64 GPUs"):
        planned(L70, H100, 64, layout="tp=8,split=10-12x5-10")
    assert planned(L70, H100, 56, layout="tp=8,split=10-12x5-10").best is not None


def test_less_than_a_node_may_be_enough() -> None:
    plan = planned(load_shape("llama-3-8b"), H100, 1)
    assert plan.best is None and plan.remedies[0].change == "--gpus 2xH100"
    assert str(plan.remedies[0]).endswith("GB on the fullest GPU, tight (170 GB for 128.5 GB of state)")
    assert "on the same 1 GPU" in plan.remedies[1].change


def test_admission_names_what_would_help_where_no_layout_does() -> None:
    refused = _admitted(L70, H100, 8)
    assert refused.suggestion is None
    assert (refused.error().hint or "").startswith("--gpus 16xH100: ")
    tiny = _admitted(L405, A10, 1, seq_tokens=1024)
    assert not tiny.fits and tiny.error().hint


def test_tensor_parallelism_stays_inside_the_fast_link() -> None:
    assert max(c.layout.tp for c in planned(L70, H100, 64).fitting) == 8
    without = planned(L70, L40S, 64)
    assert max(c.layout.tp for c in (*without.fitting, *without.rejected)) == 8


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([L70, GPT2, load_shape("mixtral-8x7b"), load_shape("qwen3-30b-a3b")]),
    st.sampled_from([1, 2, 4, 6, 8, 12, 24, 48]),
    st.sampled_from([512, 1024]),
)
def test_every_layout_in_a_plan_divides_and_its_verdict_is_its_memory(shape, gpus: int, seq: int) -> None:
    plan = planned(shape, H100, gpus, seq_tokens=seq)
    for candidate in (*plan.fitting, *plan.rejected):
        layout = candidate.layout
        assert first_misfit(layout, shape, gpus, plan.training) is None
        assert candidate.peak_bytes == rank_memory(shape, layout, plan.training).total_bytes
        assert candidate.fits == (candidate.peak_bytes <= H100.visible_bytes)
    assert plan == planned(shape, H100, gpus, seq_tokens=seq)


def test_step_time_parts_are_where_they_belong() -> None:
    training = Training(8192, 512)
    plain = step_time(L70, H100, Layout(dp=64, zero=3), training)
    assert plain.tensor_s == plain.bubble_s == plain.pipeline_s == plain.recompute_s == 0
    piped = step_time(L70, H100, Layout(dp=1, tp=8, pp=8, sp=True), training)
    assert piped.data_s == 0 and piped.tensor_s > 0
    one = (piped.total_s - piped.optimizer_s - piped.bubble_s) / 512
    # The bubble is the work of the other stages; the one that sets the pace has the head as well.
    assert 6 * one < piped.bubble_s < 7 * one
    again = step_time(L70, H100, Layout(dp=64, zero=3, recompute="full"), training)
    assert again.compute_s == plain.compute_s
    assert 0.25 < again.recompute_s / plain.compute_s < 1 / 3
    kept, redone = (
        step_time(L70, H100, Layout(dp=8, tp=8, sp=True, zero=1, recompute=how), training) for how in ("none", "full")
    )
    assert redone.tensor_s == pytest.approx(1.5 * kept.tensor_s)
    network_bound = step_time(L70, L40S, Layout(dp=64, zero=3), training)
    assert network_bound.data_s > plain.data_s
    assert model_flop_fraction(L70, H100, training, 64, plain.total_s) == pytest.approx(
        L70.train_flop_per_token(8192) * 8192 * 512 / (64 * 989.4e12 * plain.total_s)
    )


def test_parsed_layouts_fill_in_from_the_gpus() -> None:
    assert parse_layout("tp=8,pp=2").plainest(64) == Layout(dp=4, tp=8, pp=2)
