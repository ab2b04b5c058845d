"""From a Hugging Face config.json to a `ModelShape`: one small reader for each family of models."""

from collections.abc import Callable
from dataclasses import replace

from cordee.errors import ShapeError
from cordee.workload.checkpoint_format import native_format
from cordee.workload.families_mixed import MIXED_FAMILIES, every, kinds_of
from cordee.workload.fields import Config, Fields, decoder, encoder_parameters, per_head
from cordee.workload.layers import LayerKind, Mixed, Window
from cordee.workload.model import Experts, LatentAttention, ModelShape


def shape_from_config(config: Config, *, name: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ShapeError: an unknown family, a field that is missing or not a positive whole number, sizes that do not divide.
    """
    family = config.get("model_type")
    if family is None:
        raise ShapeError(
            f"{name}: no model_type, so that its family is unknown", hint="give a Hugging Face config.json"
        )
    if family not in FAMILIES:
        traced = "`cordee plan MODEL --gpus 8xH100 --trace` finds the memory of training any model of transformers; "
        hint = traced + f"planned are {', '.join(FAMILIES)}"
        raise ShapeError(f"{name}: model_type {family!r} is not a family with formulas", hint=hint)
    shape = replace(FAMILIES[family](Fields(config, name)), native_format=native_format(config))
    _check(shape)
    return shape


def _llama(fields: Fields) -> ModelShape:
    bias = fields.flag("attention_bias", False)
    shape = decoder(fields, "llama")
    return replace(shape, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: Fields) -> ModelShape:
    shape = decoder(fields, str(fields.config["model_type"]))
    window = fields.whole("sliding_window", default=0)
    mixed = Mixed(every(shape.layers, 1, "window", "window"), Window(window)) if window else None
    return replace(shape, mixed=mixed, encoder=encoder_parameters(fields))


def _phi3(fields: Fields) -> ModelShape:
    return replace(_mistral(fields), joined=("qkv", "gate_up"))


def _mixtral(fields: Fields) -> ModelShape:
    shape = _mistral(fields)
    experts = Experts(
        routed=fields.whole("num_local_experts"), per_token=fields.whole("num_experts_per_tok"), ffn=shape.ffn
    )
    return replace(shape, experts=experts)


def _qwen2(fields: Fields) -> ModelShape:
    # Qwen2 always has biases on q, k and v, and none on the output, whatever its config says.
    return replace(_sliding(fields, decoder(fields, "qwen2")), qkv_bias=True, encoder=encoder_parameters(fields))


def _sliding(fields: Fields, shape: ModelShape) -> ModelShape:
    """Add the windows of Qwen 2 and 3: in the layers from `max_window_layers` on, where `use_sliding_window` is set."""
    window = fields.whole("sliding_window", default=0)
    if not window or not fields.flag("use_sliding_window", False):
        return shape
    first = min(shape.layers, fields.whole("max_window_layers", default=28))
    otherwise: list[LayerKind] = ["full" if index < first else "window" for index in range(shape.layers)]
    kinds = kinds_of(fields, shape.layers, otherwise)
    return replace(shape, mixed=Mixed(kinds, Window(window)))


def _qwen2_moe(fields: Fields) -> ModelShape:
    shared_ffn = fields.whole("shared_expert_intermediate_size")
    experts = replace(_qwen_experts(fields), shared_ffn=shared_ffn, shared_gate=True)
    return replace(decoder(fields, "qwen2_moe"), qkv_bias=True, experts=experts)


def _qwen3(fields: Fields) -> ModelShape:
    bias = fields.flag("attention_bias", False)
    shape = _sliding(fields, decoder(fields, "qwen3"))
    return replace(shape, qkv_bias=bias, out_bias=bias, qk_norm=True, encoder=encoder_parameters(fields))


def _qwen3_moe(fields: Fields) -> ModelShape:
    return replace(_qwen3(fields), family="qwen3_moe", experts=_qwen_experts(fields))


def _qwen_experts(fields: Fields) -> Experts:
    return Experts(
        routed=fields.whole("num_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        ffn=fields.whole("moe_intermediate_size"),
        every=max(1, fields.whole("decoder_sparse_step", default=1)),
        dense_layers=frozenset(fields.config.get("mlp_only_layers") or ()),
    )


def _minimax_m2(fields: Fields) -> ModelShape:
    # Norms of queries and keys span all heads here; the difference is some thousand parameters a layer.
    shape = decoder(fields, "minimax_m2")
    experts = Experts(
        routed=fields.whole("num_local_experts"), per_token=fields.whole("num_experts_per_tok"), ffn=shape.ffn,
        router_bias=True,
    )  # fmt: skip
    return replace(shape, qk_norm=True, experts=experts)


def _glm4_moe(fields: Fields) -> ModelShape:
    shape = decoder(fields, "glm4_moe")
    ffn = fields.whole("moe_intermediate_size")
    experts = Experts(
        routed=fields.whole("n_routed_experts"), per_token=fields.whole("num_experts_per_tok"), ffn=ffn,
        shared_ffn=ffn * fields.whole("n_shared_experts", default=0), router_bias=True,
        first_dense=fields.whole("first_k_dense_replace", default=0),
    )  # fmt: skip
    bias = fields.flag("attention_bias", False)
    return replace(shape, qkv_bias=bias, qk_norm=fields.flag("use_qk_norm", False), experts=experts)


def _deepseek(fields: Fields) -> ModelShape:
    """Return the shape of DeepSeek V2 or V3 and their kin: latent attention, a dense start, then experts."""
    family = str(fields.config["model_type"])
    heads = fields.whole("num_attention_heads")
    ffn = fields.whole("moe_intermediate_size")
    latent = LatentAttention(
        q_rank=fields.whole("q_lora_rank", default=0) or None,
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        v_dim=fields.whole("v_head_dim"),
        index_heads=fields.whole("index_n_heads", default=0),
        index_dim=fields.whole("index_head_dim", default=0),
    )
    experts = Experts(
        routed=fields.whole("n_routed_experts"),
        per_token=fields.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * fields.whole("n_shared_experts", default=0),
        router_bias=family != "deepseek_v2",
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


def _opt(fields: Fields) -> ModelShape:
    config = {"intermediate_size": fields.config.get("ffn_dim"), **fields.config}
    shape = decoder(Fields(config, fields.name), "opt")
    return replace(
        shape, learned_positions=shape.positions + 2, tied=True, gated=False, norm="layer", qkv_bias=True,
        out_bias=True, mlp_bias=True,
    )  # fmt: skip


def _gpt2(fields: Fields) -> ModelShape:
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
        head_dim=per_head(fields.name, hidden, heads),
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
        joined=("qkv",),
        tanh_gelu=fields.config.get("activation_function", "gelu_new") == "gelu_new",
        drops=fields.config.get("resid_pdrop", 0.1) > 0,
    )


FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "llama": _llama,
    "granite": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_vl": _qwen2,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_text": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "minimax_m2": _minimax_m2,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
    "gpt2": _gpt2,
    "opt": _opt,
    **MIXED_FAMILIES,
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
