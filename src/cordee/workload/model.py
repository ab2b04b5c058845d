"""The shape of a transformer and its exact parameter counts, part by part.

A shape comes from a Hugging Face config.json (`families.py`). It holds no precision, batch or GPUs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). `q_rank` None: queries uncompressed."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts. The first `first_dense` layers, and those that `every` skips, are dense."""

    routed: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    first_dense: int = 0
    every: int = 1
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by part. `experts` are routed ones; shared experts count as `mlp`, since every token passes them."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norms: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return self.embedding + self.attention + self.mlp + self.experts + self.router + self.norms + self.head

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(
            self.embedding + other.embedding,
            self.attention + other.attention,
            self.mlp + other.mlp,
            self.experts + other.experts,
            self.router + other.router,
            self.norms + other.norms,
            self.head + other.head,
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `positions` is the longest sequence; `learned_positions` have an embedding."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    learned_positions: int = 0
    tied: bool = False
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a scale, and a bias in a LayerNorm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def is_expert_layer(self, layer: int) -> bool:
        """Return whether this layer (from 0) has experts in place of its MLP."""
        moe = self.experts
        if moe is None or layer < moe.first_dense or layer in moe.dense_layers:
            return False
        return (layer + 1) % moe.every == 0

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return expert_layers_in(self, 0, self.layers)

    @property
    def embedding_parameters(self) -> int:
        """Token embedding and learned positions, if any."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output projection; 0 if it is tied to the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def attention_parameters(self) -> int:
        """The projections of one layer's attention with their biases."""
        h = self.hidden
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (q + 2 * kv) * self.qkv_bias + h * self.out_bias
        return h * (q + 2 * kv) + q * h + biases

    def _latent_parameters(self, latent: LatentAttention) -> int:
        h, a = self.hidden, self.heads
        key_dim = latent.nope_dim + latent.rope_dim
        q = h * a * key_dim if latent.q_rank is None else latent.q_rank * (h + a * key_dim)
        kv = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * a * (latent.nope_dim + latent.v_dim)
        biases = ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim) * self.qkv_bias + h * self.out_bias
        return q + kv + a * latent.v_dim * h + biases

    def mlp_parameters(self, ffn: int) -> int:
        """Return the parameters of one feed-forward block of this width."""
        up = 2 if self.gated else 1
        return (up + 1) * self.hidden * ffn + (up * ffn + self.hidden) * self.mlp_bias

    def layer(self, index: int) -> ParameterCount:
        """Return the parameters of one layer."""
        norms = 2 * self.norm_parameters
        if self.qk_norm:
            norms += 2 * self.head_dim
        if self.latent is not None:
            norms += (self.latent.q_rank or 0) + self.latent.kv_rank
        attention = self.attention_parameters
        moe = self.experts
        if moe is None or not self.is_expert_layer(index):
            return ParameterCount(attention=attention, mlp=self.mlp_parameters(self.ffn), norms=norms)
        shared = self.mlp_parameters(moe.shared_ffn) if moe.shared_ffn else 0
        return ParameterCount(
            attention=attention,
            mlp=shared + self.hidden * moe.shared_gate,
            experts=moe.routed * self.mlp_parameters(moe.ffn),
            router=self.hidden * moe.routed + moe.routed * moe.router_bias,
            norms=norms,
        )

    @property
    def parameter_count(self) -> ParameterCount:
        """Return all parameters by part."""
        return _parameter_count(self)

    @property
    def parameters(self) -> int:
        """Return the exact number of all parameters."""
        return self.parameter_count.total

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token passes, with only its own routed experts."""
        count = self.parameter_count
        if self.experts is None:
            return count.total
        return count.total - count.experts + count.experts * self.experts.per_token // self.experts.routed

    @property
    def matmul_parameters(self) -> int:
        """Active parameters that multiply every token: all but the embedding; a tied head multiplies too."""
        return self.active_parameters - self.embedding_parameters + self.vocab * self.hidden * self.tied

    def attention_flop_per_token(self, seq_tokens: int) -> float:
        """Return the forward FLOPs of scores and values for one token in one layer: causal, so half of the square."""
        if self.latent is not None:
            width = self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim
        else:
            width = 2 * self.head_dim
        return 2 * seq_tokens * self.heads * width / 2

    def train_flop_per_token(self, seq_tokens: int) -> float:
        """Return the FLOPs of forward and backward passes (three times forward), without recomputation."""
        forward = 2 * self.matmul_parameters + self.layers * self.attention_flop_per_token(seq_tokens)
        return 3 * forward


@lru_cache(maxsize=256)
def _parameter_count(shape: ModelShape) -> ParameterCount:
    total = ParameterCount(
        embedding=shape.embedding_parameters, norms=shape.norm_parameters, head=shape.head_parameters
    )
    for index in range(shape.layers):
        total = total + shape.layer(index)
    return total


@lru_cache(maxsize=65_536)
def expert_layers_in(shape: ModelShape, first: int, end: int) -> int:
    """Return how many of the layers from `first` up to `end` have experts."""
    return sum(shape.is_expert_layer(layer) for layer in range(first, end))
