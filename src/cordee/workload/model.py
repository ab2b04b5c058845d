"""The shape of a transformer and its exact parameter counts, part by part.

A shape comes from a Hugging Face config.json (`families.py`). It holds no batch or GPUs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cordee.workload.layers import LayerKind, Mixed


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). `q_rank` None: queries uncompressed.

    `index_heads` of width `index_dim` choose the tokens that are attended to (DeepSeek-V3.2); 0 without an indexer.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts. The first `first_dense` layers, and those that `every` skips, are dense.

    With a `latent` width, experts work on a projection of the hidden state (Nemotron 3 Super).
    """

    routed: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    first_dense: int = 0
    every: int = 1
    dense_layers: frozenset[int] = frozenset()
    latent: int = 0


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
    """A decoder-only transformer. `positions` is the longest sequence; `learned_positions` have an embedding.

    `mixed` is None where all layers are alike and attend to all tokens. `encoder` counts the parameters of a vision
    or audio encoder beside the decoder; they are part of no other count here. `native_format` names the format in which
    the checkpoint stores its weights (`checkpoint_format.py`). `joined` names matrices that the family's code and
    checkpoint have as one: `qkv` (queries, keys, values), `gate_up`. `tanh_gelu`: its activation is the approximation
    of GELU by tanh, which Hugging Face's code writes out (`gelu_new`). `drops`: its config asks for dropout.
    """

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
    mixed: Mixed | None = None
    encoder: int = 0
    native_format: str = "bf16"
    joined: tuple[str, ...] = ()
    tanh_gelu: bool = False
    drops: bool = False

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of this layer (from 0)."""
        return "full" if self.mixed is None else self.mixed.kinds[layer]

    @property
    def is_uniform(self) -> bool:
        """Return whether all layers are alike in all but their feed-forward block and their window."""
        mixed = self.mixed
        if mixed is None:
            return True
        window = mixed.window
        own_heads = window is not None and bool(window.kv_heads or window.head_dim)
        plain = mixed.norms == 2 and not (mixed.output_gate or mixed.keys_are_values or mixed.kv_shared or own_heads)
        return plain and set(mixed.kinds) <= {"full", "window"}

    def kv_shape(self, kind: LayerKind) -> tuple[int, int]:
        """Return the key-value heads and their width in an attention layer of this kind."""
        window = self.mixed.window if self.mixed is not None and kind == "window" else None
        if window is None:
            return self.kv_heads, self.head_dim
        return window.kv_heads or self.kv_heads, window.head_dim or self.head_dim

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a scale, and a bias in a LayerNorm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def is_expert_layer(self, layer: int) -> bool:
        """Return whether this layer (from 0) has experts in place of its MLP."""
        moe = self.experts
        if self.mixed is not None and self.mixed.blocks_alone:
            return self.kind(layer) == "experts"
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
        """The projections of one full layer's attention with their biases."""
        return self.mixer_parameters("full")

    def mixer_parameters(self, kind: LayerKind) -> int:
        """Return the projections of one layer's attention, or of its recurrence, with their biases."""
        if kind in ("mlp", "experts"):
            return 0
        mixed = self.mixed
        if kind == "recurrent" and mixed is not None and mixed.recurrent is not None:
            return mixed.recurrent.parameters(self.hidden)
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        kv_heads, head_dim = self.kv_shape(kind)
        h, q, kv = self.hidden, self.heads * head_dim, kv_heads * head_dim
        gate = q if mixed is not None and mixed.output_gate else 0
        stored = kv if mixed is not None and mixed.keys_are_values and kind == "full" else 2 * kv
        biases = (q + stored) * self.qkv_bias + h * self.out_bias + self.heads * (mixed is not None and mixed.sinks)
        return h * (q + gate + stored) + q * h + biases

    def _latent_parameters(self, latent: LatentAttention) -> int:
        h, a = self.hidden, self.heads
        key_dim = latent.nope_dim + latent.rope_dim
        q = h * a * key_dim if latent.q_rank is None else latent.q_rank * (h + a * key_dim)
        kv = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * a * (latent.nope_dim + latent.v_dim)
        biases = ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim) * self.qkv_bias + h * self.out_bias
        # The indexer: its queries, its one key with a LayerNorm, and a weight for each head (DeepSeek-V3.2, section 2).
        index = latent.index_heads * (latent.index_dim * (latent.q_rank or h) + h) + latent.index_dim * (h + 2)
        return q + kv + a * latent.v_dim * h + biases + index * (latent.index_heads > 0)

    def mlp_parameters(self, ffn: int) -> int:
        """Return the parameters of one feed-forward block of this width."""
        up = 2 if self.gated else 1
        return (up + 1) * self.hidden * ffn + (up * ffn + self.hidden) * self.mlp_bias

    def layer(self, index: int) -> ParameterCount:
        """Return the parameters of one layer."""
        kind, mixed = self.kind(index), self.mixed
        norms = self.norm_parameters * (2 if mixed is None else mixed.norms)
        if self.qk_norm and kind in ("full", "window"):
            norms += 2 * self.kv_shape(kind)[1]
        if self.latent is not None:
            norms += (self.latent.q_rank or 0) + self.latent.kv_rank
        attention = self.mixer_parameters(kind)
        if mixed is not None and mixed.blocks_alone and kind not in ("mlp", "experts"):
            return ParameterCount(attention=attention, norms=norms)
        moe = self.experts
        if moe is None or not self.is_expert_layer(index):
            return ParameterCount(attention=attention, mlp=self.mlp_parameters(self.ffn), norms=norms)
        shared = self.mlp_parameters(moe.shared_ffn) if moe.shared_ffn else 0
        return ParameterCount(
            attention=attention,
            mlp=shared + self.hidden * moe.shared_gate + 2 * self.hidden * moe.latent,
            experts=moe.routed * self.expert_parameters,
            router=self.hidden * moe.routed + moe.routed * moe.router_bias,
            norms=norms,
        )

    @property
    def expert_parameters(self) -> int:
        """The parameters of one routed expert; 0 without experts."""
        moe = self.experts
        if moe is None:
            return 0
        whole = self.mlp_parameters(moe.ffn)
        return whole * moe.latent // self.hidden if moe.latent else whole

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
        """Return the forward FLOPs of scores and values for one token in one layer, as the mean over the layers.

        Attention is causal, so a token attends to half of the sequence, or to what its window leaves of it.
        """
        if self.latent is not None:
            width = self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim
        else:
            width = 2 * self.head_dim
        return 2 * self._attended_tokens(seq_tokens) * self.heads * width

    def _attended_tokens(self, seq_tokens: int) -> float:
        """Return the tokens that one attends to, as the mean over a sequence and over the layers."""
        if self.mixed is None:
            return seq_tokens / 2
        window = self.mixed.window
        near = seq_tokens / 2
        if window is not None and window.tokens < seq_tokens:
            near = window.tokens / 2 if window.chunked else window.tokens - window.tokens**2 / (2 * seq_tokens)
        tokens = {"full": seq_tokens / 2, "window": near}
        return sum(tokens.get(kind, 0.0) for kind in self.mixed.kinds) / self.layers

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
