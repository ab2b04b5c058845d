"""LoRA and QLoRA in the plan: hand-computed bytes, what may not grow, and full training as it was before."""

from dataclasses import replace

import pytest
from asking import planned

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Settings, Training
from cordee.plan.activations import layer_activation_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, rank_memory, state_bytes
from cordee.plan.states import adapter_parameters, flop_per_token
from cordee.plan.step import step_time
from cordee.plan.survive import checkpoint_bytes
from cordee.plan.training import BASES, Adapters
from cordee.plan.wanted import parse_layout
from cordee.workload.load import load_shape

LLAMA = load_shape("llama-3-8b")
# Llama-3-8B: the matrices of its 32 layers, and what stays in 16 bits (embedding, head, norms).
MATRICES, OUTER = 6_979_321_856, 1_050_939_392
ADAPTERS = 41_943_040


def _training(**settings: object) -> Training:
    return Settings(seq_tokens=2048, global_batch=16, **settings).training(LLAMA, 1)  # type: ignore[arg-type]


def _memory(layout: Layout | None = None, **settings: object) -> RankMemory:
    return rank_memory(LLAMA, layout or Layout(), _training(**settings))


def test_the_adapters_of_an_8b_model_are_counted_by_hand() -> None:
    # A layer: q and o 16(4096 + 4096), k and v 16(4096 + 1024), gate, up and down 16(4096 + 14336).
    assert LLAMA.layers * adapter_parameters(LLAMA, Adapters(rank=16)) == ADAPTERS
    assert LLAMA.layers * adapter_parameters(LLAMA, Adapters(8, ("q", "v"))) == 32 * 8 * (8192 + 5120)


@pytest.mark.parametrize(
    ("settings", "element", "each"),
    [
        ({"train": "lora"}, 2, 16),
        ({"train": "lora", "base_bits": "fp8"}, 1 + 4 / 128**2, 16),
        ({"train": "qlora"}, 0.5 + 4 / 64, 16),
        ({"train": "qlora", "optimizer": "adamw-8bit"}, 0.5 + 4 / 64, 10 + 8 / 256),
    ],
)
def test_states_are_a_frozen_base_and_adapters(settings: dict[str, object], element: float, each: float) -> None:
    training = _training(**settings)
    frozen = MATRICES * element + OUTER * 2
    assert state_bytes(LLAMA, training) == frozen + ADAPTERS * each
    worst = rank_memory(LLAMA, Layout(), training).worst
    assert worst.weights_bytes == frozen + 4 * ADAPTERS
    assert (worst.gradients_bytes, worst.optimizer_bytes) == (4 * ADAPTERS, (each - 8) * ADAPTERS)
    assert checkpoint_bytes(LLAMA, training) == ADAPTERS * (each - 4)


def test_peft_makes_what_is_not_quantised_fp32_and_with_it_the_hidden_states() -> None:
    ours, peft = ({"train": "qlora", "model_code": code} for code in (None, "hf"))
    for zero, more in ((1, 2 * OUTER), (3, 0)):  # FSDP shards what is stored in one type
        layout = Layout(dp=4, zero=zero, recompute="full")
        before, after = (_memory(layout, **settings) for settings in (ours, peft))
        assert after.worst.weights_bytes - before.worst.weights_bytes == more
        forward, wide = (next(m for m in each.worst_timeline if m.event == "forward") for each in (before, after))
        hidden = LLAMA.layers * 2048 * LLAMA.hidden * 2
        assert wide.activations_bytes - forward.activations_bytes == (hidden if more else 0)
    for other in ({"train": "lora"}, {"base_bits": "fp8", "train": "lora"}, {"quantize_head": True},
                  {"optimizer": "adamw-bf16"}):  # fmt: skip
        adapters = _training(**{**peft, **other}).adapters
        assert adapters is not None and not adapters.widened


def test_double_quantisation_is_smaller() -> None:
    training = _training(train="qlora")
    assert training.adapters is not None
    double = replace(training, adapters=replace(training.adapters, base=BASES["nf4-double"]))
    saved = state_bytes(LLAMA, training) - state_bytes(LLAMA, double)
    assert saved == pytest.approx(MATRICES * (4 / 64 - 1 / 64 - 4 / (64 * 256)), abs=1)


def test_zero_shards_adapters_and_the_base_as_its_stage_says() -> None:
    whole = _memory(train="qlora").worst
    one, three = (_memory(Layout(dp=4, zero=zero), train="qlora").worst for zero in (1, 3))
    assert one.weights_bytes == whole.weights_bytes and one.optimizer_bytes * 4 == whole.optimizer_bytes
    assert three.weights_bytes == pytest.approx(whole.weights_bytes / 4, abs=1)
    assert three.gradients_bytes * 4 == whole.gradients_bytes


def test_fsdp2_that_stays_gathered_holds_a_shard_of_the_base_and_all_of_it_gathered() -> None:
    """ZeRO-2 of torch shards frozen weights and adapters as well: on two ranks it needs half of them more."""
    for train in ("lora", "qlora"):
        base = _memory(train=train).worst.weights_bytes
        two = _memory(Layout(dp=2, zero=2), train=train)
        assert two.worst.weights_bytes == pytest.approx(base / 2, abs=1)
        at_loss, step = (next(m for m in two.worst_timeline if m.event == event) for event in ("loss", "step"))
        before = next(m for m in _memory(Layout(dp=2, zero=0), train=train).worst_timeline if m.event == "loss")
        assert at_loss.buffers_bytes - before.buffers_bytes == pytest.approx(base, rel=0.05)
        assert step.buffers_bytes < 0.1 * base


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    """Qwen3 8B: 40 heads of 128 in fp32, and a statistic of each; a norm that is trained keeps a scaled copy too."""
    shape = load_shape("qwen3-8b")
    bare = replace(shape, qk_norm=False)
    for settings, each in (
        ({"train": "lora"}, 4),
        ({"model_code": "hf"}, 6),
        ({"model_code": "torchtitan"}, 2),
        ({"framework": "megatron"}, 2),
    ):
        training = Settings(seq_tokens=2048, global_batch=8, **settings).training(shape, 8)  # type: ignore[arg-type]
        for layout in (Layout(dp=8, zero=3), Layout(dp=4, tp=2)):
            if layout.tp > 1 and training.adapters is not None:
                continue
            with_norms, without = (layer_activation_bytes(found, layout, training) for found in (shape, bare))
            assert with_norms - without == pytest.approx(2048 * 40 * (128 * each + 4) / layout.tp)


def test_a_layer_keeps_what_its_norms_attention_activation_and_adapters_read() -> None:
    """Tokens x (two fp32 norm inputs; q, k, v and output; gate, silu, up; fp32 log-sums; adapters' inputs; ranks)."""

    def kept(targets: str, train: str = "lora", zero: int = 0) -> float:
        layout = Layout(recompute="none", dp=1 + (zero > 0), zero=zero)
        timeline = _memory(layout, train=train, targets=targets).worst_timeline
        found = next(moment for moment in timeline if moment.event == "loss").activations_bytes
        return float(found) + 2048 * 4 * h  # nothing before the first norm has a gradient

    h, kv, f = 4096, 1024, 14336
    plain = 2 * 4 * h + 2 * (2 * h + 2 * kv) + 2 * 3 * f + 4 * 32
    # Over quantised weights, and with FSDP2: one input for all that read it.
    for shared in ({"train": "qlora"}, {"zero": 3}):
        assert kept("q,v", **shared) == 32 * 2048 * (plain + 2 * h + 2 * 16 * 2)
        assert kept("o", **shared) == 32 * 2048 * (plain + 2 * 16)
        assert kept("all", **shared) == 32 * 2048 * (plain + 2 * (h + h + f) + 2 * 16 * 7)
    # Under autocast: a copy for each.
    assert kept("q,v") == 32 * 2048 * (plain + 2 * 2 * h + 2 * 16 * 2)
    assert kept("all") == 32 * 2048 * (plain + 2 * (6 * h + f) + 2 * 16 * 7)
    full = _memory(Layout(recompute="full"), train="lora").worst_timeline
    assert next(moment for moment in full if moment.event == "forward").activations_bytes == 32 * 2048 * 2 * h


def test_memory_grows_with_rank_and_targets_and_shrinks_with_the_base() -> None:
    totals = [_memory(train="lora", rank=rank).total_bytes for rank in (4, 16, 64, 256)]
    assert totals == sorted(totals) and len(set(totals)) == 4
    on = [_memory(train="lora", targets=targets).total_bytes for targets in ("q,v", "attention", "all")]
    assert on == sorted(on)
    ways = [{"train": "qlora"}, {"train": "lora", "base_bits": 8}, {"train": "lora"}, {}]
    bases = [_memory(**settings).total_bytes for settings in ways]
    assert bases == sorted(bases) and len(set(bases)) == 4


def test_frozen_weights_have_no_gradient_products_and_quantised_ones_are_read_again() -> None:
    gpu = load_catalogue().find_gpu("H100")
    full, lora, qlora = (
        step_time(LLAMA, gpu, Layout(), _training(train=train, targets="all" if train == "full" else "q,v")).compute_s
        for train in ("full", "lora", "qlora")
    )
    assert 2 / 3 < float(lora / full) < 0.85 and lora < qlora < 1.2 * lora
    everywhere = step_time(LLAMA, gpu, Layout(), _training(train="lora", targets="all")).compute_s
    assert lora < everywhere < full
    whole = flop_per_token(LLAMA, _training())
    assert flop_per_token(LLAMA, _training(train="lora")) == whole - 2 * LLAMA.matmul_parameters + 6 * ADAPTERS


def test_the_answer_fits_a_small_gpu_and_says_what_would_help() -> None:
    gpu = load_catalogue().find_gpu("RTX-3090")
    assert planned(LLAMA, gpu, 1, train="qlora", seq_tokens=4096, global_batch=8).fits
    assert not planned(LLAMA, gpu, 1, seq_tokens=4096, global_batch=8).fits
    lora = planned(LLAMA, gpu, 1, train="lora", seq_tokens=8192, global_batch=8)
    assert not lora.fits
    changes = [remedy.change for remedy in lora.remedies]
    assert any(change.startswith("--seq") for change in changes), changes
    assert all(remedy.candidate.fits and remedy.training.adapters for remedy in lora.remedies)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("llama-3-8b", {"train": "lora", "targets": "q,w"}, "no matrix 'w'"),
        ("gpt2", {"train": "lora", "targets": "gate"}, "no matrix 'gate'"),
        ("llama-3-8b", {"train": "lora", "rank": 0}, "rank 0"),
        ("llama-3-8b", {"train": "qlora", "base_bits": 16}, "base of 16 bits"),
        ("llama-3-8b", {"base_bits": 4}, "cannot be trained in full"),
        ("llama-3-8b", {"train": "mora"}, "unknown way to train"),
        ("llama-3-8b", {"train": "dora", "base_bits": "int3"}, "unknown base of int3"),
        ("llama-3-8b", {"train": "lora", "framework": "megatron"}, "with torch in bf16 or fp16"),
        ("llama-3-8b", {"train": "lora", "precision": "fp8"}, "with torch in bf16 or fp16"),
        ("mixtral-8x7b", {"train": "dora"}, "no DoRA on experts"),
        ("mixtral-8x7b", {"train": "lora", "targets": "q,router", "lora_dropout": 0.1}, "no dropout on router"),
        ("mixtral-8x7b", {"train": "lora", "targets": "gate"}, "no matrix 'gate'"),
        ("deepseek-v3", {"train": "lora", "targets": "k"}, "no matrix 'k'"),
        ("deepseek-v3", {"train": "lora", "targets": "o", "fused_qkv": True}, "no queries, keys and values to join"),
        ("llama-3-8b", {"lora_dropout": 0.1}, "--lora-dropout is a setting of adapters"),
        ("llama-3-8b", {"rank": 8}, "--rank is a setting of adapters"),
        ("llama-3-8b", {"targets": "q"}, "--targets is a setting of adapters"),
        ("llama-3-8b", {"train": "lora", "lora_dropout": 1.5}, "no probability"),
        ("llama-3-8b", {"train": "lora", "quantize_head": True}, "not quantised"),
        ("llama-3-8b", {"train": "qlora", "dequantized": 3}, "3 dequantised matrices"),
        ("llama-3-8b", {"train": "lora", "fsdp_version": 3}, "no FSDP 3"),
        ("llama-3-8b", {"train": "dora", "fused_qkv": True}, "no DoRA"),
        ("llama-3-8b", {"compiled": True, "framework": "megatron"}, "brings its own kernels"),
    ],
)
def test_what_is_not_planned_is_refused(model: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Settings(**settings).training(load_shape(model), 1)  # type: ignore[arg-type]


def test_what_implementations_do_differently_can_be_asked() -> None:
    asked = _training(
        train="qlora", lora_dropout=0.05, fused_qkv=True, quantize_head=True, dequantized=2, fsdp_version=1
    )
    plain = _training(train="qlora")
    assert plain.adapters is not None and asked.adapters is not None
    base = replace(BASES["nf4"], head=True, copies=2)
    assert asked.adapters == replace(plain.adapters, dropout=0.05, joined=True, base=base)
    assert asked.tuning == replace(plain.tuning, flat=True)


def test_compiled_layers_are_fused_and_their_loss_has_no_fp32_logits() -> None:
    compiled, hf = (Settings(compiled=True, model_code=code).training(LLAMA, 1) for code in (None, "hf"))
    assert compiled.is_fused and compiled.loss_kind == "compiled" and not compiled.tuning.composite_norms
    assert hf.is_fused and hf.loss_kind == "eager" and not hf.tuning.composite_norms
    assert Settings(compiled=True, loss="chunked").training(LLAMA, 1).loss_kind == "chunked"


def test_an_int8_base_has_a_constant_for_each_row_and_keeps_the_inputs_of_its_products() -> None:
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    training = _training(train="lora", base_bits=8)
    assert state_bytes(LLAMA, training) == MATRICES + 4 * rows + OUTER * 2 + 16 * ADAPTERS

    def kept(base: str) -> float:
        timeline = _memory(Layout(recompute="none"), train="lora", targets="q", base_bits=base).worst_timeline
        return float(next(moment for moment in timeline if moment.event == "loss").activations_bytes)

    # `q` reads the first norm's output in any case; the second norm's and down's input are kept for int8 alone.
    assert kept("int8") - kept("fp8") == 32 * 2048 * 2 * (4096 + 14336)


def test_a_joined_product_stays_whole_with_the_outputs_of_its_adapter() -> None:
    training, plain = _training(train="lora"), Adapters(8, ("q", "v"))

    def kept(adapters: Adapters) -> float:
        # FSDP2: adapters are gathered in 16 bits.
        return float(layer_activation_bytes(LLAMA, Layout(dp=2, zero=3), replace(training, adapters=adapters)))

    joined = replace(plain, joined=True)
    # Queries and keys before their rotation, and what the adapter adds to queries and values: 16 bits, 2,048 tokens.
    assert kept(joined) - kept(plain) == 2 * 2048 * ((4096 + 1024) + (4096 + 1024))
    # One copy of the input and one mask for the two of them, in place of the norm's output.
    assert kept(replace(joined, dropout=True)) - kept(joined) == 2048 * 4096 * (3 - 2)


def test_a_quantised_head_is_smaller_and_in_16_bits_while_its_product_runs() -> None:
    training = replace(
        _training(train="qlora"), loss="fused"
    )  # an eager one has larger tensors of its own at that time
    assert training.adapters is not None
    whole = replace(training, adapters=replace(training.adapters, base=replace(BASES["nf4"], head=True, copies=2)))
    head = LLAMA.vocab * LLAMA.hidden
    assert state_bytes(LLAMA, training) - state_bytes(LLAMA, whole) == head * (2 - 0.5625)
    at_loss = [
        next(moment for moment in rank_memory(LLAMA, Layout(), one).worst_timeline if moment.event == "loss")
        for one in (training, whole)
    ]
    assert at_loss[1].buffers_bytes - at_loss[0].buffers_bytes == 2 * 2 * head


def test_flat_parameters_have_a_whole_gradient_while_micro_batches_add_up() -> None:
    layout = Layout(dp=4, zero=3)
    training = _training(train="lora")
    flat = replace(training, tuning=replace(training.tuning, flat=True))
    gradients = [rank_memory(LLAMA, layout, one).worst.gradients_bytes for one in (training, flat)]
    assert gradients[1] - gradients[0] == 2 * (MATRICES + OUTER)
    at_once = replace(flat, global_batch=4)
    assert max(m.gradients_bytes for m in rank_memory(LLAMA, layout, at_once).worst_timeline) == pytest.approx(
        (2 * (MATRICES + OUTER) + 4 * ADAPTERS) / 4
    )


def test_dora_adds_lengths_and_two_outputs_and_after_dropout_a_16_bit_matrix_of_a_quantised_base() -> None:
    outputs = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    assert adapter_parameters(LLAMA, Adapters(16, magnitudes=True)) * 32 == ADAPTERS + 32 * outputs

    def kept(**settings: object) -> float:
        timeline = _memory(Layout(recompute="none"), **settings).worst_timeline
        return float(next(moment for moment in timeline if moment.event == "loss").activations_bytes)

    more = 32 * 2048 * 2 * 2 * outputs
    assert kept(train="dora") - kept(train="lora") == more
    assert kept(train="dora", base_bits=4) - kept(train="qlora") == more
    training = _training(train="dora", base_bits=4)
    assert training.adapters is not None
    dropped = replace(training, adapters=replace(training.adapters, dropout=True))
    plain = replace(dropped, adapters=replace(training.adapters, dropout=True, magnitudes=False))
    dora, lora = (layer_activation_bytes(LLAMA, Layout(), each) for each in (dropped, plain))
    assert 32 * (dora - lora) == more + 2 * MATRICES
    gpu = load_catalogue().find_gpu("H100")
    lora, dora = (step_time(LLAMA, gpu, Layout(), _training(train=train)).compute_s for train in ("lora", "dora"))
    assert 1.4 < float(dora / lora) < 2


def test_activations_of_adapters_may_wait_on_the_host() -> None:
    gpu = load_catalogue().find_gpu("RTX-4090")
    wanted = {"train": "lora", "seq_tokens": 2048, "global_batch": 8, "recompute": "full"}
    here = planned(LLAMA, gpu, 1, layout="dp1 mb1", **wanted)
    away = planned(LLAMA, gpu, 1, layout="dp1 mb1 offload=activations", **wanted)
    assert away.fits and away.nearest.peak_bytes < here.nearest.peak_bytes
    assert away.nearest.step is not None and away.nearest.step.offload_s > 0


def test_adapters_stay_on_data_parallel_ranks() -> None:
    gpu = load_catalogue().find_gpu("H100")
    with pytest.raises(LayoutError, match="data-parallel ranks only"):
        planned(LLAMA, gpu, 8, train="lora", layout="tp=8")
    answer = planned(LLAMA, gpu, 8, train="lora")
    assert answer.fits and {(c.layout.tp, c.layout.pp) for c in answer.layouts.fitting} == {(1, 1)}


# State, fullest GPU and step as the planner gave them before it knew adapters. Since then 8-bit moments have constants,
# and torch's eager gates, gradients, gathered layers and fp32 weights are those of its traces.
BEFORE = [
    ("llama-3-8b", "H100", 8, "fsdp8", {}, (128484179968, 78493327561, 61.83674986648399)),
    ("llama-3-8b", "H100", 8, "dp8 zero1 full", {"framework": "megatron", "optimizer": "adamw-fp32-grads"},
     (144544702464, 76981666337, 64.9709698843089)),
    ("llama-3-70b", "H100", 64, "tp8 pp4 dp2 zero1 selective", {"framework": "megatron"},
     (1128859303936, 88672084853, 69.85049562914675)),
    ("llama-3-70b", "H100", 64, "fsdp16 tp4 selective", {"precision": "fp8"},
     (1128859303936, 63431422822, 55.837555878876344)),
    ("gpt2", "A10", 1, "dp1", {"optimizer": "adamw-8bit", "seq_tokens": 512, "global_batch": 8},
     (750527592, 2005518492, 0.22225850161705418)),
    ("mixtral-8x7b", "H100", 64, "dp32 pp2 ep8 zero1", {"optimizer": "muon"},
     (561483153408, 154820882235, 15.35854632257902)),
    ("deepseek-v3", "H100", 512, "dp64 pp8 ep64 zero1 full offload=optimizer", {"framework": "megatron"},
     (10736422707200, 34809748914, 23.873406581253136)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "kind", "gpus", "text", "settings", "known"), BEFORE)
def test_full_training_is_what_it_was(
    model: str, kind: str, gpus: int, text: str, settings: dict[str, object], known: tuple[int, int, float]
) -> None:
    shape, gpu = load_shape(model), load_catalogue().find_gpu(kind)
    training = Settings(train="full", **settings).training(shape, gpus)  # type: ignore[arg-type]
    layout = parse_layout(text).plainest(gpus)
    memory, step = rank_memory(shape, layout, training), step_time(shape, gpu, layout, training)
    assert (state_bytes(shape, training), memory.total_bytes) == known[:2]
    # The model of time is refitted and moves, adapters or not: half or twice would be a fault.
    assert 0.6 < float(step.total_s) / known[2] < 1.6
