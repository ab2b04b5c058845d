"""Readers of families whose layers differ: sliding windows, chunks, linear attention, Mamba."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cordee.errors import ShapeError
from cordee.workload.fields import Fields, decoder, encoder_parameters
from cordee.workload.layers import LayerKind, Mixed, Recurrent, Window
from cordee.workload.model import Experts, ModelShape

KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "attention": "full",
    "mlp": "mlp",
    "moe": "experts",
}
PATTERN: dict[str, LayerKind] = {"M": "recurrent", "*": "full", "-": "mlp", "E": "experts"}


def kinds_of(fields: Fields, layers: int, otherwise: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the kinds that `layer_types` lists, or `otherwise` where the config has no such list.

    Raises:
        ShapeError: a kind that is not known, or a list of another length.
    """
    listed = fields.config.get("layer_types") or fields.config.get("layers_block_type")
    kinds = tuple(otherwise) if listed is None else tuple(_kind(fields, name) for name in listed)
    if len(kinds) != layers:
        raise ShapeError(
            f"{fields.name}: layer_types has {len(kinds)} entries for {layers} layers",
            hint="give one kind for each layer, or leave layer_types out",
        )
    return kinds


def _kind(fields: Fields, name: object) -> LayerKind:
    if name not in KINDS:
        raise ShapeError(
            f"{fields.name}: layer_types has {name!r}", hint=f"known kinds of layers are {', '.join(KINDS)}"
        )
    return KINDS[str(name)]


def every(layers: int, step: int, most: LayerKind, rest: LayerKind = "full") -> tuple[LayerKind, ...]:
    """Return `most` with `rest` in each layer whose number, from 1, is a multiple of `step`.

    >>> every(4, 2, "window")
    ('window', 'full', 'window', 'full')
    """
    return tuple(rest if (index + 1) % step == 0 else most for index in range(layers))


def windowed(fields: Fields, shape: ModelShape, step: int, *, default: int = 0) -> Mixed | None:
    """Return the sliding windows of all layers but each `step`-th; None without a window."""
    tokens = fields.whole("sliding_window", default=default)
    if not tokens:
        return None
    kinds = kinds_of(fields, shape.layers, every(shape.layers, step, "window"))
    return Mixed(kinds, Window(tokens))


def _gemma(fields: Fields) -> ModelShape:
    shape = decoder(fields, str(fields.config["model_type"]))
    return replace(shape, tied=fields.flag("tie_word_embeddings", True), encoder=encoder_parameters(fields))


def _gemma2(fields: Fields) -> ModelShape:
    shape = _gemma(fields)
    mixed = windowed(fields, shape, 2, default=4096)
    return replace(shape, mixed=None if mixed is None else replace(mixed, norms=4))


def _gemma3(fields: Fields) -> ModelShape:
    # Released configs leave out what transformers fills in: 8 heads, 4 key-value heads, head_dim 256, vocab 262,208.
    config = {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, **fields.config,
    }  # fmt: skip
    filled = Fields(config, fields.name)
    shape = _gemma(filled)
    step = filled.whole("sliding_window_pattern", default=6)
    mixed = windowed(filled, shape, step, default=4096)
    return replace(shape, qk_norm=True, mixed=None if mixed is None else replace(mixed, norms=4))


def _gemma4(fields: Fields) -> ModelShape:
    if fields.whole("hidden_size_per_layer_input", default=0):
        raise ShapeError(
            f"{fields.name}: embeddings for each layer (hidden_size_per_layer_input) are not supported",
            hint="Gemma 4's 12B, 26B-A4B and 31B have none",
        )
    own = decoder(fields, "gemma4_text")
    kinds = kinds_of(fields, own.layers, every(own.layers, 6, "window"))
    window = Window(fields.whole("sliding_window"), kv_heads=own.kv_heads, head_dim=own.head_dim)
    experts = None
    if fields.flag("enable_moe_block", False):
        # The MLP stands beside the experts in each layer, so it counts as a shared expert.
        experts = Experts(
            routed=fields.whole("num_experts"), per_token=fields.whole("top_k_experts"),
            ffn=fields.whole("moe_intermediate_size"), shared_ffn=own.ffn,
        )  # fmt: skip
    shared = fields.whole("num_kv_shared_layers", default=0)
    equal = fields.flag("attention_k_eq_v", False)
    mixed = Mixed(kinds, window, kv_shared=shared, norms=4 if experts is None else 7, keys_are_values=equal)
    return replace(
        own,
        kv_heads=fields.whole("num_global_key_value_heads", default=own.kv_heads),
        head_dim=fields.whole("global_head_dim", default=own.head_dim),
        tied=fields.flag("tie_word_embeddings", True),
        qk_norm=True,
        experts=experts,
        mixed=mixed,
        encoder=encoder_parameters(fields),
    )


def _gpt_oss(fields: Fields) -> ModelShape:
    shape = decoder(fields, "gpt_oss")
    experts = Experts(
        routed=fields.whole("num_local_experts"),
        per_token=fields.whole("num_experts_per_tok", "experts_per_token"),
        ffn=shape.ffn,
        router_bias=True,
    )
    kinds = kinds_of(fields, shape.layers, every(shape.layers, 2, "window"))
    mixed = Mixed(kinds, Window(fields.whole("sliding_window", default=128)), sinks=True)
    return replace(shape, qkv_bias=True, out_bias=True, mlp_bias=True, experts=experts, mixed=mixed)


def _llama4(fields: Fields) -> ModelShape:
    """Return the shape of Llama 4: chunked attention but for each fourth layer, experts with one that is shared."""
    shape = decoder(fields, "llama4_text")
    ffn = fields.whole("intermediate_size")
    experts = Experts(
        routed=fields.whole("num_local_experts"), per_token=fields.whole("num_experts_per_tok"), ffn=ffn,
        shared_ffn=ffn, every=max(1, fields.whole("interleave_moe_layer_step", default=1)),
    )  # fmt: skip
    kinds = kinds_of(fields, shape.layers, every(shape.layers, 4, "window"))
    chunk = fields.whole("attention_chunk_size", default=8192)
    mixed = Mixed(kinds, Window(chunk, chunked=True)) if chunk else None
    dense = fields.whole("intermediate_size_mlp", default=ffn)
    return replace(shape, ffn=dense, experts=experts, mixed=mixed, encoder=encoder_parameters(fields))


def _qwen_next(fields: Fields) -> ModelShape:
    """Return the shape of Qwen3-Next or Qwen3.5: three layers of gated DeltaNet, one of gated attention."""
    family = str(fields.config["model_type"])
    experts = None
    config = dict(fields.config)
    if fields.whole("num_experts", default=0):
        experts = Experts(
            routed=fields.whole("num_experts"), per_token=fields.whole("num_experts_per_tok"),
            ffn=fields.whole("moe_intermediate_size"),
            shared_ffn=fields.whole("shared_expert_intermediate_size", default=0), shared_gate=True,
            every=max(1, fields.whole("decoder_sparse_step", default=1)),
            dense_layers=frozenset(fields.config.get("mlp_only_layers") or ()),
        )  # fmt: skip
        config.setdefault("intermediate_size", experts.ffn)
    shape = decoder(Fields(config, fields.name), family)
    step = fields.whole("full_attention_interval", default=4)
    recurrent = Recurrent(
        "delta",
        heads=fields.whole("linear_num_value_heads"),
        head_dim=fields.whole("linear_value_head_dim"),
        groups=fields.whole("linear_num_key_heads"),
        state_dim=fields.whole("linear_key_head_dim"),
        conv=fields.whole("linear_conv_kernel_dim", default=4),
        state_bytes_per_element=2 if fields.config.get("mamba_ssm_dtype") == "bfloat16" else 4,
    )
    kinds = kinds_of(fields, shape.layers, every(shape.layers, step, "recurrent"))
    mixed = Mixed(kinds, recurrent=recurrent, output_gate=fields.flag("attn_output_gate", True))
    return replace(shape, qk_norm=True, experts=experts, mixed=mixed, encoder=encoder_parameters(fields))


def _nemotron_h(fields: Fields) -> ModelShape:
    """Return the shape of Nemotron-H (arXiv:2504.03624): each layer is Mamba-2, attention, an MLP or experts."""
    pattern = fields.config.get("hybrid_override_pattern", "")
    if not isinstance(pattern, str) or set(pattern) - set(PATTERN):
        raise ShapeError(
            f"{fields.name}: hybrid_override_pattern is {pattern!r}",
            hint="it must be a string of M (Mamba), * (attention), - (MLP) and E (experts), one for each layer",
        )
    listed = fields.config.get("layers_block_type") or ()
    config = {"num_hidden_layers": len(pattern or listed), "head_dim": fields.config.get("attention_head_dim")}
    config |= fields.config
    shape = decoder(Fields(config, fields.name), "nemotron_h")
    kinds = kinds_of(fields, shape.layers, [PATTERN[letter] for letter in pattern])
    recurrent = Recurrent(
        "mamba2",
        heads=fields.whole("mamba_num_heads"),
        head_dim=fields.whole("mamba_head_dim"),
        groups=fields.whole("n_groups"),
        state_dim=fields.whole("ssm_state_size"),
        conv=fields.whole("conv_kernel", default=4),
        state_bytes_per_element=4 if fields.config.get("mamba_ssm_cache_dtype") == "float32" else 2,
    )
    experts = None
    if "experts" in kinds:
        experts = Experts(
            routed=fields.whole("n_routed_experts"), per_token=fields.whole("num_experts_per_tok"),
            ffn=fields.whole("moe_intermediate_size"), router_bias=True,
            shared_ffn=fields.whole("moe_shared_expert_intermediate_size", default=0),
            latent=fields.whole("moe_latent_size", default=0),
        )  # fmt: skip
    return replace(shape, gated=False, experts=experts, mixed=Mixed(kinds, recurrent=recurrent, norms=1))


MIXED_FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "qwen3_next": _qwen_next,
    "qwen3_5": _qwen_next,
    "qwen3_5_text": _qwen_next,
    "qwen3_5_moe": _qwen_next,
    "qwen3_5_moe_text": _qwen_next,
    "nemotron_h": _nemotron_h,
}
"""Readers by model_type."""
