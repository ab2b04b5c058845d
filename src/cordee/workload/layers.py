"""Layers that differ inside one model: sliding windows, chunks, and recurrent layers that keep a state of fixed size.

A model whose layers are all alike has none of this. See `model.py` for the shape that holds it.
"""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "window", "recurrent", "mlp", "experts"]
"""`full` attends to all tokens, `window` to the last ones; `mlp` and `experts` have no mixer (Nemotron-H)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Attention to the last `tokens` tokens, or to those of the same chunk; its heads where they are its own."""

    tokens: int
    chunked: bool = False
    kv_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a state for each sequence: Mamba-2 (arXiv:2405.21060) or gated DeltaNet (arXiv:2412.06464).

    Attributes:
        heads: heads of the values; `head_dim` is their width.
        groups: groups of B and C in Mamba-2, heads of the keys in DeltaNet; `state_dim` is their width.
        conv: taps of the causal convolution before the recurrence.
        state_bytes_per_element: bytes of one element of the recurrent state.
    """

    kind: Literal["mamba2", "delta"]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv: int = 4
    state_bytes_per_element: int = 4

    @property
    def inner(self) -> int:
        """Width of the values."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: the values and both groups."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def gates(self) -> int:
        """Columns of the input projection beside values and groups: steps, or decays and write strengths."""
        return self.heads if self.kind == "mamba2" else 2 * self.heads

    def parameters(self, hidden: int) -> int:
        """Return the parameters of one layer: projections, convolution, decays and the norm before the output."""
        decays = (3 if self.kind == "mamba2" else 2) * self.heads
        taps = self.conv_width * (self.conv + (self.kind == "mamba2"))
        norm = self.inner if self.kind == "mamba2" else self.head_dim
        return hidden * (self.conv_width + self.inner + self.gates) + taps + decays + norm + self.inner * hidden

    def state_bytes(self, conv_element_bytes: int = 2) -> int:
        """Return the bytes of one sequence's state in one layer.

        >>> Recurrent("delta", heads=48, head_dim=128, groups=16, state_dim=128).state_bytes()
        3207168
        """
        recurrent = self.heads * self.head_dim * self.state_dim * self.state_bytes_per_element
        return recurrent + (self.conv - 1) * self.conv_width * conv_element_bytes


@dataclass(frozen=True, slots=True)
class Mixed:
    """The kinds of a model's layers, in order, and what its kinds need.

    Attributes:
        kv_shared: so many of the last layers read the keys and values of an earlier layer and store none.
        norms: norms of one layer.
        output_gate: the queries' projection also makes a gate of the attention's output.
        sinks: each head has a learned logit beside its scores (gpt-oss).
        keys_are_values: full layers have no projection of values of their own (the cache still holds both).
    """

    kinds: tuple[LayerKind, ...]
    window: Window | None = None
    recurrent: Recurrent | None = None
    kv_shared: int = 0
    norms: int = 2
    sinks: bool = False
    output_gate: bool = False
    keys_are_values: bool = False

    @property
    def blocks_alone(self) -> bool:
        """Return whether a layer is a mixer or a feed-forward block, never both."""
        return "mlp" in self.kinds or "experts" in self.kinds
