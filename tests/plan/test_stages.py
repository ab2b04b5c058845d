"""Preference and RL stages in the plan: sums of a training, a reference and an engine, by hand where that goes."""

from dataclasses import replace

import pytest

from cordee.errors import DoesNotFitError, LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Answer, Request, Settings
from cordee.plan.layout import Layout
from cordee.plan.memory import Moment, rank_memory
from cordee.plan.rollouts import ask_stages, splits, standing_bytes
from cordee.plan.step import step_time
from cordee.plan.training import Stage
from cordee.plan.wanted import parse_layout
from cordee.workload.load import load_shape

LLAMA = load_shape("llama-3-8b")
CATALOGUE = load_catalogue()
H100 = CATALOGUE.find_gpu("H100")


def _request(stage: str, gpus: int = 8, *, layout: str | None = None, **settings: object) -> Request:
    wanted = {} if layout is None else {"layout": parse_layout(layout)}
    return Request(
        shape=LLAMA, gpu=H100, gpus=gpus, stage=stage, search="best", prices=CATALOGUE.prices, **wanted,
        settings=Settings(**({"seq_tokens": 4096, "global_batch": 64} | settings)),  # type: ignore[arg-type]
    )  # fmt: skip


def _asked(stage: str, gpus: int = 8, **more: object) -> Answer:
    return ask_stages(_request(stage, gpus, **more))  # type: ignore[arg-type]


def _moments(stage: str, layout: Layout, **settings: object) -> dict[str, Moment]:
    training = _request(stage, layout.gpus, **settings).case().training
    return {moment.event: moment for moment in rank_memory(LLAMA, layout, training).worst_timeline}


def test_a_batch_of_dpo_is_pairs_of_sequences_that_pass_together() -> None:
    training = _request("dpo").case().training
    assert (training.global_batch, training.sequences_together) == (128, 2)
    best = _asked("dpo").best
    assert best is not None and best.layout.micro_batch % 2 == 0
    with pytest.raises(LayoutError, match="1 sequence has no whole pair"):
        _asked("dpo", layout="fsdp8 mb1")


def test_a_frozen_copy_is_sharded_as_the_weights_are_and_other_references_weigh_nothing() -> None:
    sharded, whole = Layout(dp=8, zero=3, micro_batch=2), Layout(dp=8, zero=2, micro_batch=2)
    for layout, parts in ((sharded, 8), (whole, 1)):
        copy, none = (_moments(f"dpo,reference={kind}", layout)["states"] for kind in ("model", "computed"))
        assert copy.weights_bytes - none.weights_bytes == pytest.approx(2 * LLAMA.parameters / parts)
    off, on = (
        _moments(f"dpo,reference={kind}", Layout(micro_batch=2), train="qlora")["states"]
        for kind in ("adapters-off", "model")
    )
    base = 6_979_321_856 * (0.5 + 4 / 64) + 1_050_939_392 * 2
    assert on.weights_bytes - off.weights_bytes == pytest.approx(base)


def test_the_reference_passes_beside_the_policys_activations_and_logits() -> None:
    layout = Layout(dp=8, zero=3, micro_batch=2)
    found = _moments("dpo", layout)
    logits = 2 * 2 * 4096 * 128_256  # 16 bits, two sequences
    assert found["reference"].loss_bytes == 2 * logits
    assert found["reference"].activations_bytes == found["loss"].activations_bytes > 0
    assert "reference" not in _moments("dpo,reference=computed", layout)


def test_a_pass_without_gradients_takes_as_long_as_a_forward_pass() -> None:
    layout = Layout(dp=8, zero=2, micro_batch=2)
    with_copy, computed = (_request(f"dpo,reference={kind}").case().training for kind in ("model", "computed"))
    step, plain = step_time(LLAMA, H100, layout, with_copy), step_time(LLAMA, H100, layout, computed)
    assert float(plain.reference_s) == 0 and float(step.compute_s) == float(plain.compute_s)
    assert 0.3 < float(step.reference_s / step.compute_s) < 0.36  # one product of three; attention has 1 of 3.5
    assert float(step.total_s - plain.total_s) == pytest.approx(float(step.reference_s))
    # With ZeRO-3 the copy's weights are gathered as well.
    gathered = step_time(LLAMA, H100, Layout(dp=8, zero=3, micro_batch=2), with_copy)
    assert gathered.reference_s > step.reference_s


def test_old_log_probabilities_are_a_second_pass_where_a_batch_has_several_updates() -> None:
    stage = "grpo,reference=model"
    once, twice = (_request(f"{stage}{more}", global_batch=512).case().training for more in ("", ",updates=2"))
    layout = Layout(dp=8, zero=2, micro_batch=1)
    one, two = (step_time(LLAMA, H100, layout, training).reference_s for training in (once, twice))
    assert float(two) == pytest.approx(2 * float(one))


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    answer = _asked("grpo,reference=model,prompt=1024", global_batch=512)
    made, best = answer.rollouts, answer.best
    assert made is not None and best is not None and best.step is not None
    assert made.completions == 512 and made.gpus == made.trainers == made.all_gpus == 8
    assert made.reference_s + made.update_s == pytest.approx(best.step_s)
    assert made.iteration_s == pytest.approx(made.generate_s + made.weights_s + made.reference_s + made.update_s)
    # On the same GPUs the engine has what the training's weights and moments leave.
    alone = _asked("grpo,prompt=1024,rollouts=apart,rollout-gpus=8", 16, global_batch=512).rollouts
    assert alone is not None and alone.kv_tokens > made.kv_tokens
    assert made.engine_bytes <= H100.visible_bytes and standing_bytes(best) > 12 * LLAMA.parameters / 8


def test_shorter_completions_and_more_room_are_generated_sooner() -> None:
    long, short = (_asked(f"grpo,completion={tokens}", global_batch=512).rollouts for tokens in (3584, 512))
    assert long is not None and short is not None and short.generate_s < long.generate_s / 2
    # The longest completion bounds a batch from below, however short the mean is.
    few = _asked("grpo,completion=16", global_batch=8).rollouts
    assert few is not None and few.generate_s > short.generate_s / 100
    slept, stayed = (_asked(f"grpo{more}", global_batch=512).rollouts for more in ("", ",resident=0.3"))
    assert slept is not None and stayed is not None and stayed.generate_s > slept.generate_s
    assert stayed.kv_tokens * stayed.replicas < 0.8 * slept.kv_tokens * slept.replicas


def test_gpus_apart_wait_unless_both_sides_overlap() -> None:
    stage = "grpo,rollouts=apart,rollout-gpus=8"
    taking_turns, at_once = (_asked(f"{stage}{more}", 16, global_batch=512).rollouts for more in ("", ",overlap=yes"))
    assert taking_turns is not None and at_once is not None
    learn_s = at_once.reference_s + at_once.update_s
    assert at_once.iteration_s == max(at_once.generate_s, learn_s) + at_once.weights_s < taking_turns.iteration_s
    assert at_once.idle_fraction < taking_turns.idle_fraction < 0.6


def test_the_split_of_gpus_is_the_one_with_the_most_completions_a_second() -> None:
    stage = "grpo,rollouts=apart,overlap=yes,completion=1000"
    best = _asked(stage, 8, global_batch=512).rollouts
    assert best is not None and best.all_gpus == 8
    for generating in splits(8, None):
        other = _asked(f"{stage},rollout-gpus={generating}", 8, global_batch=512).rollouts
        assert other is None or best.iteration_s <= other.iteration_s * 1.000001
    with pytest.raises(LayoutError, match="leave none that update"):
        splits(8, 8)


def test_an_engine_without_room_is_refused_with_its_numbers() -> None:
    with pytest.raises(DoesNotFitError, match="no engine has room for a completion on 8 x H100"):
        _asked("grpo,resident=0.02")


@pytest.mark.parametrize(
    ("stage", "settings", "says"),
    [
        ("ppo", {}, "unknown stage 'ppo'"),
        ("dpo,group=8", {}, "cannot be read: 'group=8'"),
        ("dpo,reference=adapters-off", {}, "without adapters has none to turn off"),
        ("dpo,reference=none", {}, "DPO compares with a reference"),
        ("grpo,reference=computed", {}, "before these are generated"),
        ("grpo,prompt=4096", {}, "leave no completion"),
        ("grpo,completion=4000", {}, "longer than the longest, 3,584"),
        ("grpo,group=0", {}, "group=0 is not a whole number"),
        ("grpo,group=7", {}, "no whole groups of 7"),
        ("grpo,overlap=yes", {}, "cannot overlap"),
        ("grpo,rollouts=apart,resident=0.3", {}, "keeps nothing"),
        ("grpo,resident=1.5", {}, "no fraction"),
        ("dpo", {"packed_tokens": 512}, "not packed"),
    ],
)
def test_contradictions_are_refused(stage: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        _asked(stage, **settings)


def test_a_stage_keeps_what_it_is_asked() -> None:
    found = _request("dpo,reference=computed", train="lora").parsed_stage()
    assert found == Stage("dpo", "computed")
    with pytest.raises(LayoutError, match="writes no dpo"):
        ask_stages(replace(_request("dpo"), launcher="torchtitan"))
