"""Adapters as Python: peft's `LoraConfig` and transformers' `BitsAndBytesConfig`."""

from cordee.errors import LayoutError
from cordee.plan.launch_parts import is_mixed, noted, weights_type
from cordee.plan.layout import Layout
from cordee.plan.states import layer_linears
from cordee.plan.training import STACKS, Adapters, Training
from cordee.workload.model import ModelShape

# Names of a layer's matrices in transformers; where a family has none of its own, `q` is `q_proj`.
MODULES = {
    "gpt2": {"qkv": "c_attn", "o": "attn.c_proj", "up": "c_fc", "down": "mlp.c_proj"},
    "opt": {"o": "out_proj", "up": "fc1", "down": "fc2"},
}


def adapters_text(shape: ModelShape, layout: Layout, training: Training, adapters: Adapters) -> str:
    """Return peft's settings, and those of a quantised base.

    Raises:
        LayoutError: adapters, or a base, that peft and bitsandbytes do not have.
    """
    lora = _lora(shape, adapters)
    return lora if adapters.base.bits == 16 else f"{lora}\n\n{_quantised(layout, training, adapters)}"


def adapters_notes(shape: ModelShape, layout: Layout, training: Training, adapters: Adapters) -> list[str]:
    """Return how a script makes the adapters as they are planned."""
    quantised = ", quantization_config=..." * (adapters.base.bits < 16)
    own = "" if is_mixed(training) else ", autocast_adapter_dtype=False"
    base = {"fp16": "float16"}.get(training.precision, weights_type(training))
    again = layout.recompute == "full"
    prepared = f"prepare_model_for_kbit_training(model, use_gradient_checkpointing={again}), which is planned"
    return noted(
        {
            f"from_pretrained(..., dtype=torch.{base}{quantised}), then get_peft_model(model, LoraConfig(...){own})": (
                True
            ),
            f"before get_peft_model: {prepared}": adapters.widened and layout.zero < 3,
            "norms and embeddings stay in 16 bits: no prepare_model_for_kbit_training": (
                adapters.base.bits < 16 and not adapters.widened
            ),
            "while a quantised product runs, two 16-bit matrices are there": adapters.base.copies > 1,
            "transformers 5 has a layer's experts as stacked parameters, which bitsandbytes leaves in 16 bits": (
                adapters.base.bits < 16 and shape.experts is not None
            ),
            "a stack of experts with an adapter is written out, adapter and all, in each forward pass": (
                "experts" in adapters.targets
            ),
            "lora_alpha and the learning rate are yours: no memory depends on them": True,
        }
    )


def _lora(shape: ModelShape, adapters: Adapters) -> str:
    """Return peft's settings; all matrices are found by peft itself.

    Raises:
        LayoutError: adapters, or a base, that peft and bitsandbytes do not have.
    """
    lacking = {
        "bitsandbytes has no FP8 base": adapters.base.name == "fp8",
        "peft has no joined adapter of queries, keys and values, which is LitGPT's": adapters.joined,
        "bitsandbytes leaves the output head in 16 bits": adapters.base.head,
    }
    for reason, applies in lacking.items():
        if applies:
            raise LayoutError(f"--launch trainer cannot write this: {reason}", hint="plan it without --launch")
    every = shape.experts is None and {linear.name for linear in layer_linears(shape)} <= set(adapters.targets)
    named = MODULES.get(shape.family, {"kv_a": "kv_a_proj_with_mqa"})
    modules = [named.get(name, f"{name}_proj") for name in adapters.targets if name not in STACKS]
    arguments: dict[str, object] = {
        "r": adapters.rank, "target_modules": "all-linear" if every else modules, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    parameters = [each for name in STACKS if name in adapters.targets for each in _parameters(shape, name)]
    if parameters:
        arguments["target_parameters"] = parameters
    if adapters.dropout:
        arguments["lora_dropout"] = adapters.dropout
    if adapters.magnitudes:
        arguments["use_dora"] = True
    return "\n".join(["LoraConfig(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


def _parameters(shape: ModelShape, name: str) -> tuple[str, ...]:
    """Return the parameters of a target that is no module, as transformers 5 names them."""
    if name == "router":
        return (f"{'router' if shape.family == 'gpt_oss' else 'gate'}.weight",)
    return "experts.gate_up_proj", "experts.down_proj"


def _quantised(layout: Layout, training: Training, adapters: Adapters) -> str:
    """Return transformers' settings of bitsandbytes; FSDP shards what is stored in one type."""
    if adapters.base.bits == 8:
        arguments: dict[str, object] = {"load_in_8bit": True}
    else:
        arguments = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        arguments["bnb_4bit_use_double_quant"] = adapters.base.name == "nf4-double"
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(training.precision, "float32")
        arguments["bnb_4bit_compute_dtype"] = dtype
        arguments |= {"bnb_4bit_quant_storage": dtype} if layout.zero == 3 else {}
    return "\n".join(["BitsAndBytesConfig(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])
