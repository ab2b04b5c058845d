"""Traces of real models' steps: against published peaks, against real tensors, and few layers against all of them."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cordee.errors import InputError, ScriptError
from cordee.plan.allocator import ROUND_BYTES
from cordee.train.trace_memory import titan
from cordee.train.trace_memory.answer import Traced
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.trace import trace
from cordee.units import GiB
from cordee.workload.load import load_config

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own, of fake tensors

SMALL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
DEEP = SMALL | {"num_hidden_layers": 8}


def _small(**given: Any) -> Question:
    return Question(**{"config": SMALL, "code": "torchtitan", "seq_tokens": 512} | given)


@pytest.mark.parametrize(("ranks", "published_gib"), [(8, 82.4), pytest.param(128, 67.0, marks=pytest.mark.soak)])
def test_the_reserved_peak_that_torchtitan_published_is_met(ranks: int, published_gib: float) -> None:
    # pytorch/torchtitan@31a17bf benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, FSDP2, eager, local batch 2,
    # selective checkpoint of operators; the memory it logs is max_reserved in GiB.
    question = Question(
        config=load_config("llama-3.1-8b"), code="torchtitan", seq_tokens=8192, micro_batch=2, fsdp=ranks,
        recompute="selective",
    )  # fmt: skip
    found = trace(question)
    assert found.parameters == 8_030_261_248 and found.layers == 32 and found.layers_recorded == 6
    assert found.peak.phase == "loss"
    assert abs(found.reserve.reserved_bytes / GiB / published_gib - 1) < 0.02
    assert found.allocated_bytes < found.reserve.needed_bytes < found.reserve.reserved_bytes


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": 8},
        pytest.param({"code": "hf", "fsdp": 8, "recompute": "full"}, marks=pytest.mark.soak),
        pytest.param({"fsdp": 4, "replicas": 2, "recompute": "selective", "micro_batches": 2}, marks=pytest.mark.soak),
        pytest.param({"fsdp": 2, "recompute": "full"}, marks=pytest.mark.soak),
        pytest.param({"weights": "autocast"}, marks=pytest.mark.soak),
        pytest.param({"code": "hf", "weights": "bf16"}, marks=pytest.mark.soak),
    ],
    ids=["fsdp", "transformers", "hsdp", "full", "one-gpu", "transformers-one-gpu"],
)
def test_a_repeated_layer_is_every_layer(given: dict[str, Any]) -> None:
    few, every = trace(_small(config=DEEP, **given)), trace(_small(config=DEEP, **given), whole=True)
    assert (few.layers_recorded, every.layers_recorded) == (6, 8)
    assert few.moments == every.moments
    assert few.reserve == every.reserve
    assert (few.parameters, few.events) == (every.parameters, every.events)


def test_a_rank_holds_its_part_and_a_replica_changes_nothing() -> None:
    two, eight, replicated = trace(_small(fsdp=2)), trace(_small(fsdp=8)), trace(_small(fsdp=8, replicas=4))
    parameters = eight.parameters
    for found, ranks in ((two, 2), (eight, 8)):
        states = found.moments[0]
        # fp32 weights and two moments, each tensor rounded up by torch's allocator; rotations are a buffer.
        assert states.parts["optimizer"] == pytest.approx(8 * parameters / ranks, abs=200 * ROUND_BYTES)
        assert states.parts["weights"] == pytest.approx(4 * parameters / ranks + 512 * 32 * 8, abs=200 * ROUND_BYTES)
        assert states.parts["gradients"] == 0
    assert eight.moments == replicated.moments


def test_there_are_no_gradients_at_the_first_loss_and_all_of_them_at_the_second() -> None:
    (first,), (second,) = (
        [moment for moment in trace(_small(fsdp=8, micro_batches=count)).moments if moment.phase == "loss"]
        for count in (1, 2)
    )
    parameters = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768 + 2 * 256) + 2 * 2048 * 256 + 256
    assert first.parts["gradients"] == 0
    assert second.parts["gradients"] == pytest.approx(4 * parameters / 8, abs=200 * ROUND_BYTES)


def test_an_eager_gate_keeps_four_inner_widths() -> None:
    narrow, wide = (
        trace(_small(config=SMALL | {"intermediate_size": inner}, weights="autocast")) for inner in (768, 1024)
    )
    more = _at(wide, "loss")["activations"] - _at(narrow, "loss")["activations"]
    # gate, its silu, up and their product, two bytes each, a token and layer. Autocast keeps weights in 16 bits.
    weights = 2 * 3 * 256 * 256 * 2
    assert more == 2 * 4 * 256 * 512 * 2 + weights


def test_a_function_is_traced_by_its_name_and_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    found = trace(Question(function="traced_models:perceptron", micro_batch=1024, weights="fp32"))
    matrix, rows = 512 * 512 * 4, 1024 * 512 * 4
    assert found.parameters == 2 * 512 * 512
    assert _at(found, "states") | {"buffers": 0} == _parts(weights=2 * matrix, optimizer=4 * matrix)
    assert _at(found, "step")["gradients"] == 2 * matrix
    # Nothing repeats, so that the loss counts as forward. A ReLU keeps its result, and its input is gone when the
    # second product has one: never more than two tensors of rows, and the sum.
    assert _at(found, "forward")["activations"] + _at(found, "forward")["temporaries"] == 2 * rows + ROUND_BYTES


def test_code_that_reads_a_value_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    with pytest.raises(InputError, match="does not run on fake tensors") as refused:
        trace(Question(function="traced_models:reads_a_value"))
    assert "no values" in str(refused.value.hint)
    with pytest.raises(ScriptError, match="cannot be loaded"):
        trace(Question(function="traced_models:nowhere"))


def test_a_compiled_layer_keeps_three_inner_widths_and_its_loss_two_words_a_logit() -> None:
    eager, narrow, wide = (
        trace(_small(config=SMALL | {"intermediate_size": inner}, compiled=is_compiled, weights="bf16"))
        for inner, is_compiled in ((768, False), (768, True), (1024, True))
    )
    # gate, up and their product: silu is computed again. An eager one keeps silu as well (4 widths).
    more = _at(wide, "loss")["activations"] - _at(narrow, "loss")["activations"]
    assert more == 2 * 3 * 256 * 512 * 2
    # 16-bit logits and their gradient, where the eager loss has fp32 ones.
    logit_bytes = [_at(each, "loss")["loss"] / (512 * 2048) for each in (eager, narrow)]
    assert logit_bytes == [pytest.approx(12), pytest.approx(4)]
    assert [moment.phase for moment in narrow.moments] == [moment.phase for moment in eager.moments]
    assert _at(narrow, "states") == _at(eager, "states") and _at(narrow, "step") == _at(eager, "step")


def test_code_that_does_not_compile_whole_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    with pytest.raises(InputError, match="does not compile whole") as refused:
        trace(Question(function="traced_models:reads_a_value_in_a_layer", weights="fp32", compiled=True))
    assert "--compile" in str(refused.value.hint)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++ on a CPU")
def test_what_is_kept_is_what_inductor_keeps() -> None:
    """The real compiler, on real tensors, saves the same tensors for the backward pass as the traced graphs do."""
    from cordee.train.trace_memory.compiled import compiled, refusing  # a second of imports

    decoder = titan.build(SMALL, 512).bfloat16()
    layer, x = decoder.layers[0], torch.randn(1, 512, 256, dtype=torch.bfloat16, requires_grad=True)

    def saved(function: Callable[..., torch.Tensor]) -> list[str]:
        found: dict[int, str] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = f"{tensor.dtype} {tuple(tensor.shape)}"
            return tensor

        with refusing(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(x, decoder.rotations).sum().backward()
        return sorted(found.values())

    assert saved(compiled(layer.forward)) == saved(torch.compile(layer.forward, fullgraph=True, dynamic=False))


def _at(found: Traced, phase: str) -> dict[str, int]:
    return next(dict(moment.parts) for moment in found.moments if moment.phase == phase)


def _parts(**given: int) -> dict[str, int]:
    return (
        dict.fromkeys(("weights", "gradients", "optimizer", "activations", "loss", "buffers", "temporaries"), 0) | given
    )


def test_torch_is_left_as_it_was() -> None:
    import torch.nn.functional as F

    before = (F.rms_norm, F.scaled_dot_product_attention, torch.Tensor.pow, torch.UntypedStorage.resize_)
    trace(_small())
    assert before == (F.rms_norm, F.scaled_dot_product_attention, torch.Tensor.pow, torch.UntypedStorage.resize_)
    assert not torch.distributed.is_initialized() and torch.get_default_dtype() == torch.float32
