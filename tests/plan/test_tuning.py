"""What fine-tuners change in a step: frozen layers, pages, updates in the backward pass, chunked losses, packing."""

from dataclasses import replace

import pytest
from asking import planned

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Settings, Training
from cordee.plan.layout import Layout
from cordee.plan.memory import Moment, rank_memory, state_bytes
from cordee.plan.offload import host_bytes
from cordee.plan.optimum import Case, brute_force, optimum
from cordee.plan.search import default_choices
from cordee.plan.states import flop_per_token
from cordee.plan.step import step_time
from cordee.plan.survive import checkpoint_bytes
from cordee.plan.wanted import ANY_LAYOUT
from cordee.workload.load import load_shape

LLAMA = load_shape("llama-3-8b")
LAYER, EMBEDDING = 218_112_000, 128_256 * 4096  # a layer: q and o 4096^2, k and v 4096 x 1024, 3 x 4096 x 14336, norms
H100 = load_catalogue().find_gpu("H100")


def _training(seq: int = 2048, batch: int = 1, **settings: object) -> Training:
    return Settings(seq_tokens=seq, global_batch=batch, **settings).training(LLAMA, 1)  # type: ignore[arg-type]


def _moments(layout: Layout | None = None, **settings: object) -> dict[str, Moment]:
    timeline = rank_memory(LLAMA, layout or Layout(), _training(**settings)).worst_timeline
    return {moment.event: moment for moment in timeline}


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw-bf16", 8), ("adamw-8bit", 6 + 8 / 256), ("adamw-8bit-paged", 6 + 8 / 256)]
)
def test_bytes_of_a_parameter(optimizer: str, each: float) -> None:
    assert state_bytes(LLAMA, _training(optimizer=optimizer)) == round(LLAMA.parameters * each)
    # Adapters are fp32 with peft, and 16-bit where the model is pure bf16.
    lora = _training(optimizer=optimizer, train="lora")
    states = state_bytes(LLAMA, lora) - 2 * LLAMA.parameters
    assert states == pytest.approx(41_943_040 * (8 if optimizer == "adamw-bf16" else each + 4), abs=1)


def test_paged_moments_need_no_gpu_memory_but_the_host_s_and_time_where_they_do_not_fit() -> None:
    plain, paged = (_training(optimizer=f"adamw-8bit{page}") for page in ("", "-paged"))
    moments = LLAMA.parameters * 2 * (1 + 4 / 256)
    less = [rank_memory(LLAMA, Layout(), training).worst.allocated_bytes for training in (plain, paged)]
    assert less[0] - less[1] == pytest.approx(moments, rel=1e-6)
    assert host_bytes(LLAMA, Layout(), paged) == pytest.approx(moments) and host_bytes(LLAMA, Layout(), plain) == 0
    small = replace(H100, memory_bytes=48 * 10**9)
    roomy, short = (step_time(LLAMA, gpu, Layout(), paged) for gpu in (H100, small))
    assert float(roomy.offload_s) == 0 < float(short.offload_s) <= 2 * moments / 25e9 + 1e-9
    assert float(step_time(LLAMA, small, Layout(), plain).offload_s) == 0


def test_an_optimizer_in_the_backward_pass_has_one_gradient_at_a_time() -> None:
    own, before = _moments(optimizer="adamw-bf16", optimizer_in_backward=True), _moments(optimizer="adamw-bf16")
    assert {moment.gradients_bytes for moment in own.values()} == {0}
    assert before["step"].allocated_bytes - own["step"].allocated_bytes == 2 * LLAMA.parameters
    # The largest matrix beside an activation-free backward pass: 2 x 4096 x 14336 instead of a whole layer's.
    fewer = before["backward"].buffers_bytes - own["backward"].buffers_bytes
    assert fewer == 2 * (LAYER - 4096 * 14336)
    with pytest.raises(LayoutError, match="no gradients to add up: 4 sequences are 4 micro-batches"):
        planned(LLAMA, H100, 1, global_batch=4, micro_batch=1, optimizer_in_backward=True, layout="mb1")


def test_one_gpu_of_24_gb_trains_8b_in_full() -> None:
    answer = planned(
        LLAMA, load_catalogue().find_gpu("RTX-4090"), 1, seq_tokens=2048, global_batch=1, loss="chunked",
        optimizer="adamw-8bit-paged", optimizer_in_backward=True,
    )  # fmt: skip
    assert answer.fits and answer.fewest_gpus_to_hold == 1 and answer.fewest_gpus_to_train is not None


def test_frozen_layers_have_no_gradient_and_the_first_ones_no_backward_pass() -> None:
    training = _training(freeze="embeddings,0..15")
    frozen = 16 * LAYER + EMBEDDING
    assert state_bytes(LLAMA, training) == 2 * frozen + 16 * (LLAMA.parameters - frozen)
    assert checkpoint_bytes(LLAMA, training) == 2 * frozen + 12 * (LLAMA.parameters - frozen)
    none = Layout(recompute="none")
    whole, half, last = (_moments(none, freeze=text) for text in (None, "embeddings,0..15", "16..31"))
    assert half["forward"].activations_bytes * 2 == whole["forward"].activations_bytes
    assert half["step"].gradients_bytes == 4 * (LLAMA.parameters - frozen)  # torch's are fp32
    # The last layers are passed by every gradient: their norms, attention and activation keep what they need.
    assert half["forward"].activations_bytes < last["forward"].activations_bytes <= whole["forward"].activations_bytes
    seconds = [
        float(step_time(LLAMA, H100, Layout(), _training(freeze=text)).compute_s)
        for text in (None, "16..31", "embeddings,0..15")
    ]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[0] / 2
    layer = 2 * (LAYER - 2 * 4096) + LLAMA.attention_flop_per_token(2048)
    saved = flop_per_token(LLAMA, _training()) - flop_per_token(LLAMA, training)
    assert saved == pytest.approx(16 * 2 * layer)
    again = _moments(Layout(recompute="full"), freeze="embeddings,0..15")["forward"].activations_bytes
    assert again == 16 * 2 * 2048 * 4096


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("llama-3-8b", {"freeze": "0..32"}, "no layer 32"),
        ("llama-3-8b", {"freeze": "norms"}, "cannot freeze 'norms'"),
        ("llama-3-8b", {"freeze": "5..2"}, "layers 5..2 are none"),
        ("llama-3-8b", {"freeze": "embeddings,head,0..31"}, "nothing of llama-3-8b would be trained"),
        ("llama-3-8b", {"freeze": "0", "train": "lora"}, "freezes the whole model already"),
        ("gpt2", {"freeze": "embeddings"}, "are one matrix"),
        ("mixtral-8x7b", {"freeze": "0"}, "not planned"),
        ("llama-3-8b", {"packed_tokens": 9000}, "cannot be packed"),
        ("llama-3-8b", {"packed_tokens": 100, "flash": False}, "cannot be packed"),
        ("llama-3-8b", {"optimizer": "adamw-bf16", "precision": "fp32"}, "16-bit weights"),
    ],
)
def test_contradictions_are_refused(model: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Settings(**settings).training(load_shape(model), 1)  # type: ignore[arg-type]


def test_a_chunked_loss_never_has_all_logits() -> None:
    chunked, fused = (_moments(loss=kind, train="lora")["loss"] for kind in ("chunked", "fused"))
    # 128,256 / 4,096 is 31.3: chunks of 2,048 / 32 = 64 tokens, and the gradient of the hidden states.
    assert chunked.loss_bytes == 2 * (64 * 128_256 + 2048 * 4096) < fused.loss_bytes / 8
    trained = _moments(loss="chunked")["loss"].loss_bytes
    assert trained == chunked.loss_bytes + 2 * EMBEDDING
    assert _moments(loss="chunked", freeze="head")["loss"].loss_bytes == chunked.loss_bytes


def test_packed_documents_attend_to_themselves() -> None:
    long, packed, short = (
        flop_per_token(LLAMA, _training(seq=seq, packed_tokens=packed))
        for seq, packed in ((8192, None), (8192, 1024), (1024, None))
    )
    assert long > packed == short
    seconds = [
        float(step_time(LLAMA, H100, Layout(), _training(8192, packed_tokens=n)).compute_s) for n in (None, 1024)
    ]
    assert seconds[1] < seconds[0]
    assert state_bytes(LLAMA, _training(8192, packed_tokens=1024)) == state_bytes(LLAMA, _training(8192))


def test_the_search_with_paged_moments_finds_what_brute_force_finds() -> None:
    small = replace(H100, memory_bytes=20 * 10**9)
    training = _training(batch=8, optimizer="adamw-8bit-paged", loss="chunked")
    case = Case(LLAMA, small, 2, training)
    winner, _ = optimum(case, ANY_LAYOUT, default_choices(case))
    best = brute_force(case, ANY_LAYOUT, default_choices(case))
    assert winner is not None and best is not None and winner.seconds == best.seconds is not None
    assert float(step_time(LLAMA, small, best.layout, training).offload_s) > 0
