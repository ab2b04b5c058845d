"""Adapters of mixtures of experts and of latent attention: hand-computed bytes, and what is trained at what time."""

import pytest

from cordee.hardware.load import load_catalogue
from cordee.plan import Settings, Training
from cordee.plan.activations import layer_activation_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory, state_bytes
from cordee.plan.states import all_adapter_parameters, flop_per_token
from cordee.plan.step import step_time
from cordee.workload.load import load_shape

MIXTRAL, DEEPSEEK = load_shape("mixtral-8x7b"), load_shape("deepseek-v3")
FSDP = Layout(dp=8, zero=3)


def _training(**settings: object) -> Training:
    return Settings(seq_tokens=4096, global_batch=8, **settings).training(MIXTRAL, 8)  # type: ignore[arg-type]


def test_a_stack_has_an_adapter_for_each_expert() -> None:
    attention = _training(train="lora", targets="attention").adapters
    every = _training(train="lora").adapters
    assert attention is not None and every is not None and every.targets == ("q", "k", "v", "o", "experts")
    of_attention = 32 * 16 * 2 * (8192 + 5120)
    assert all_adapter_parameters(MIXTRAL, attention) == of_attention
    of_stacks = 32 * 16 * 8 * ((4096 + 2 * 14336) + (14336 + 4096))
    assert all_adapter_parameters(MIXTRAL, every) == of_attention + of_stacks


def test_latent_attention_has_adapters_on_its_compressing_and_expanding_matrices() -> None:
    training = Settings(train="lora", targets="q_a,kv_b", rank=8).training(DEEPSEEK, 64)
    assert training.adapters is not None
    assert all_adapter_parameters(DEEPSEEK, training.adapters) == 61 * 8 * ((7168 + 1536) + (512 + 128 * 256))


def test_experts_over_a_quantised_base_stay_in_16_bits() -> None:
    plain, packed = (state_bytes(MIXTRAL, _training(train="lora", targets="q", base_bits=bits)) for bits in (16, "nf4"))
    matrices = 32 * 2 * 4096 * (4096 + 1024)
    assert plain - packed == matrices * (2 - 0.5 - 4 / 64)


def test_frozen_experts_keep_no_inputs_and_trained_stacks_keep_themselves() -> None:
    frozen, trained = (
        float(layer_activation_bytes(MIXTRAL, FSDP, _training(train="lora", targets=targets), expert=True))
        for targets in ("attention", "all")
    )
    read = 4096 * 2 * 2 * (4096 + 14336)
    stacks = 2 * 8 * 3 * 4096 * 14336
    assert trained - frozen == read + stacks


def test_experts_fewer_than_ranks_are_whole_rows_under_adapters_as_well() -> None:
    training = Settings(seq_tokens=4096, global_batch=32, train="lora", targets="q").training(MIXTRAL, 32)
    held = rank_memory(MIXTRAL, Layout(dp=32, zero=3, recompute="full"), training).worst.weights_bytes
    experts = 2 * MIXTRAL.parameter_count.experts
    assert held == pytest.approx(experts / 8 + (state_bytes(MIXTRAL, training) - experts) / 32, rel=0.01)


def test_gradients_of_frozen_experts_cost_no_time() -> None:
    gpu = load_catalogue().find_gpu("H100")
    whole, experts, attention = (
        float(step_time(MIXTRAL, gpu, FSDP, training).compute_s)
        for training in (_training(), _training(train="lora"), _training(train="lora", targets="attention"))
    )
    assert attention < experts and attention < 0.8 * whole
    flops = [flop_per_token(MIXTRAL, _training(train="lora", targets=each)) for each in ("q", "q,experts")]
    active = 2 * 32 * 3 * 4096 * 14336
    assert flops[1] - flops[0] == 2 * active
