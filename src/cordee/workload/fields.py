"""The fields of a config.json with checks, and the reader that most families start from."""

from collections.abc import Mapping
from typing import Any

from cordee.errors import ShapeError
from cordee.workload.model import ModelShape

Config = Mapping[str, Any]


class Fields:
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


def decoder(fields: Fields, family: str) -> ModelShape:
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
        head_dim=fields.whole("head_dim", default=0) or per_head(fields.name, hidden, heads),
        ffn=fields.whole("intermediate_size"),
        vocab=fields.whole("vocab_size"),
        positions=round(fields.whole("max_position_embeddings", default=8192) * _stretch(fields)),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _stretch(fields: Fields) -> float:
    """Return by how much linear or dynamic scaling of rotary positions lengthens the longest sequence.

    Other kinds (yarn, llama3, longrope) already count in max_position_embeddings.
    """
    scaling = fields.config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in ("linear", "dynamic"):
        return 1.0
    factor = scaling.get("factor", 1.0)
    if not isinstance(factor, int | float) or factor < 1:
        raise ShapeError(f"{fields.name}: rope_scaling has factor {factor!r}", hint="it must be a number of at least 1")
    return float(factor)


def per_head(name: str, hidden: int, heads: int) -> int:
    if heads == 0 or hidden % heads:
        raise ShapeError(
            f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            hint="give head_dim if the heads have a width of their own",
        )
    return hidden // heads


def encoder_parameters(fields: Fields) -> int:
    """Return the parameters of the vision encoder, from the sizes of its `vision_config`; 0 without one.

    Layers have four projections and an MLP. What merges patches into tokens counts, embeddings of patches do not: the
    sum is within 5 % of what the checkpoints of Qwen2.5-VL, Qwen3-VL and Mistral Small hold.
    """
    config = fields.config.get("vision_config")
    if not isinstance(config, Mapping):
        return 0
    vision = Fields(config, f"{fields.name}, vision_config")
    layers = vision.whole("depth", "num_hidden_layers", default=0)
    hidden = vision.whole("embed_dim", "hidden_size", default=0)
    ffn = vision.whole("intermediate_size", default=4 * hidden)
    products = 3 if config.get("model_type") in ("qwen2_5_vl", "pixtral", "gemma4_vision") else 2
    merged = hidden * vision.whole("spatial_merge_size", default=1) ** 2
    out = vision.whole("out_hidden_size", default=fields.whole("hidden_size", default=0))
    return layers * (4 * hidden * hidden + products * hidden * ffn) + merged * merged + merged * out
