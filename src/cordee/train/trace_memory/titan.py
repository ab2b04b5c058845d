"""A dense decoder written out as torchtitan writes it: fused norms, complex rotations, fused attention, eager gate."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cordee.errors import ShapeError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Attention(nn.Module):
    """Grouped-query attention with rotations; Qwen2 adds biases, Qwen3 norms of queries and keys."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool, norms: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim) if norms else None
        self.k_norm = nn.RMSNorm(head_dim) if norms else None

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Attend, causally."""
        batch, tokens, _ = x.shape
        # With tensor parallelism a rank has fewer heads: their number follows from the width.
        q, k, v = (each(x).view(batch, tokens, -1, self.head_dim) for each in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotated(q, rotations), _rotated(k, rotations)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).contiguous().view(batch, tokens, -1))


def _rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    as_complex = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(as_complex * rotations.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class FeedForward(nn.Module):
    """A gated MLP of three products."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate and project."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, attention: Attention, feed_forward: FeedForward, hidden: int) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = nn.RMSNorm(hidden)
        self.ffn_norm = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Add both."""
        h = x + self.attention(self.attention_norm(x), rotations)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, config: Mapping[str, Any], seq_tokens: int) -> None:
        super().__init__()
        family = config.get("model_type", "llama")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        vocab = config["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocab, hidden)
        self.register_buffer("rotations", torch.empty(seq_tokens, head_dim // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(
            Block(
                Attention(hidden, heads, kv_heads, head_dim, bias=family == "qwen2", norms=family == "qwen3"),
                FeedForward(hidden, config["intermediate_size"]),
                hidden,
            )
            for _ in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden)
        self.output = nn.Linear(hidden, vocab, bias=False)
        if config.get("tie_word_embeddings"):
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.rotations)
        return self.output(self.norm(h))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss, from logits in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def build(config: Mapping[str, Any], seq_tokens: int) -> Decoder:
    """Return the decoder of a config.json.

    Raises:
        ShapeError: a family that torchtitan's plain model is not.
    """
    family = config.get("model_type", "llama")
    if family not in FAMILIES:
        hint = f"use --model-code hf; this code knows {', '.join(FAMILIES)}"
        raise ShapeError(f"{family} cannot be written as torchtitan's Llama", hint=hint)
    return Decoder(config, seq_tokens)
