"""From a Hugging Face config.json to a `ModelShape`: one small reader for each family of models."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cordee.errors import ShapeError
from cordee.workload.model import Experts, LatentAttention, ModelShape

Config = Mapping[str, Any]


def shape_from_config(config: Config, *, name: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ShapeError: an unknown family, a field that is missing or not a positive whole number, sizes that do not divide.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, n=1)
        known = ", ".join(FAMILIES)
        hint = (f"did you mean {near[0]}? " if near else "") + f"known families are {known}"
        raise ShapeError(f"{name}: model_type {family!r} is not a family that Cordee knows", hint=hint)
    shape = FAMILIES[family](_Fields(config, name))
    _check(shape)
    return shape


class _Fields:
    """The fields of a config; an error names the field."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return the first of these fields that is given."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ShapeError(
                    f"{self.name}: {key} is {value!r}", hint=f"{key} must be a whole number that is not negative"
                )
            return value
        if default is None:
            raise ShapeError(
                f"{self.name}: config.json has no {keys[0]}",
                hint=f"add {' or '.join(keys)}: without it the parameters cannot be counted",
            )
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        return default if value is None else bool(value)


def _decoder(fields: _Fields, family: str) -> ModelShape:
    """Return the shape of a decoder such as Llama, Mistral or Qwen."""
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    return ModelShape(
        name=fields.name,
        family=family,
        layers=fields.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", default=heads),
        head_dim=fields.whole("head_dim", default=_per_head(fields.name, hidden, heads)),
        ffn=fields.whole("intermediate_size"),
        vocab=fields.whole("vocab_size"),
        positions=fields.whole("max_position_embeddings", default=8192),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _per_head(name: str, hidden: int, heads: int) -> int:
    if heads == 0 or hidden % heads:
        raise ShapeError(
            f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            hint="give head_dim if the heads have a width of their own",
        )
    return hidden // heads


def _llama(fields: _Fields) -> ModelShape:
    bias = fields.flag("attention_bias", False)
    shape = _decoder(fields, "llama")
    return replace(shape, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: _Fields) -> ModelShape:
    return _decoder(fields, "mistral")


def _mixtral(fields: _Fields) -> ModelShape:
    shape = _decoder(fields, "mixtral")
    experts = Experts(
        routed=fields.whole("num_local_experts"), per_token=fields.whole("num_experts_per_tok"), ffn=shape.ffn
    )
    return replace(shape, experts=experts)


def _qwen2(fields: _Fields) -> ModelShape:
    # Qwen2 always has biases on q, k and v, and none on the output, whatever its config says.
    return replace(_decoder(fields, "qwen2"), qkv_bias=True)


def _qwen2_moe(fields: _Fields) -> ModelShape:
    shared_ffn = fields.whole("shared_expert_intermediate_size")
    experts = replace(_qwen_experts(fields), shared_ffn=shared_ffn, shared_gate=True)
    return replace(_decoder(fields, "qwen2_moe"), qkv_bias=True, experts=experts)


def _qwen3(fields: _Fields) -> ModelShape:
    bias = fields.flag("attention_bias", False)
    return replace(_decoder(fields, "qwen3"), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen3_moe(fields: _Fields) -> ModelShape:
    return replace(_qwen3(fields), family="qwen3_moe", experts=_qwen_experts(fields))


def _qwen_experts(fields: _Fields) -> Experts:
    return Experts(
        routed=fields.whole("num_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        ffn=fields.whole("moe_intermediate_size"),
        every=max(1, fields.whole("decoder_sparse_step", default=1)),
        dense_layers=frozenset(fields.config.get("mlp_only_layers") or ()),
    )


def _deepseek(fields: _Fields) -> ModelShape:
    """Return the shape of DeepSeek V2 or V3: latent attention, a dense start, then routed and shared experts."""
    family = str(fields.config["model_type"])
    heads = fields.whole("num_attention_heads")
    ffn = fields.whole("moe_intermediate_size")
    latent = LatentAttention(
        q_rank=fields.whole("q_lora_rank", default=0) or None,
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        v_dim=fields.whole("v_head_dim"),
    )
    experts = Experts(
        routed=fields.whole("n_routed_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * fields.whole("n_shared_experts", default=0),
        router_bias=family == "deepseek_v3",
        first_dense=fields.whole("first_k_dense_replace", default=0),
        every=max(1, fields.whole("moe_layer_freq", default=1)),
    )
    return ModelShape(
        name=fields.name,
        family=family,
        layers=fields.whole("num_hidden_layers"),
        hidden=fields.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        ffn=fields.whole("intermediate_size"),
        vocab=fields.whole("vocab_size"),
        positions=fields.whole("max_position_embeddings", default=4096),
        tied=fields.flag("tie_word_embeddings", False),
        latent=latent,
        experts=experts,
    )


def _gpt2(fields: _Fields) -> ModelShape:
    hidden = fields.whole("n_embd", "hidden_size")
    heads = fields.whole("n_head", "num_attention_heads")
    positions = fields.whole("n_positions", "max_position_embeddings", default=1024)
    return ModelShape(
        name=fields.name,
        family="gpt2",
        layers=fields.whole("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_per_head(fields.name, hidden, heads),
        ffn=fields.whole("n_inner", default=4 * hidden),
        vocab=fields.whole("vocab_size"),
        positions=positions,
        learned_positions=positions,
        tied=fields.flag("tie_word_embeddings", True),
        gated=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


FAMILIES: dict[str, Callable[[_Fields], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
}


def _check(shape: ModelShape) -> None:
    """Refuse sizes that contradict each other."""
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
    }
    for field, size in sizes.items():
        if size < 1:
            raise ShapeError(f"{shape.name}: {field} is {size}", hint=f"{field} must be at least 1")
    if shape.heads % shape.kv_heads:
        raise ShapeError(
            f"{shape.name}: {shape.heads} attention heads cannot share {shape.kv_heads} key-value heads evenly",
            hint="num_attention_heads must be a multiple of num_key_value_heads",
        )
    moe = shape.experts
    if moe is not None and not 1 <= moe.per_token <= moe.routed:
        raise ShapeError(
            f"{shape.name}: a token passes {moe.per_token} of {moe.routed} experts",
            hint="num_experts_per_tok must lie between 1 and the number of experts",
        )
