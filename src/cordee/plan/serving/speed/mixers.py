"""Products and scans of a layer's mixer on one GPU: attention of each kind, and recurrent layers.

A recurrent layer computes prompts in chunks: products inside a chunk and states from one chunk to the next (Mamba-2,
arXiv:2405.21060, section 6; gated DeltaNet, arXiv:2412.06464, section 3.2). In decode its states are read and written.
"""

from math import ceil

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.speed.products import peak_flop_per_s
from cordee.workload.layers import LayerKind, Recurrent
from cordee.workload.model import ModelShape

CHUNK_TOKENS = {"mamba2": 256, "delta": 64}
# The convolution, and the four kernels of a chunked scan: decays, states of chunks, their recurrence, outputs.
SCAN_KERNELS = 5


def projections(shape: ModelShape, tp: int, kind: LayerKind) -> list[tuple[float, float]]:
    """Return n and k of the products before and after the mixer of a layer of this kind on one of tp GPUs."""
    mixed, latent = shape.mixed, shape.latent
    if kind == "recurrent" and mixed is not None and mixed.recurrent is not None:
        inner, into = mixed.recurrent.inner, mixed.recurrent.conv_width + mixed.recurrent.inner + mixed.recurrent.gates
        return [(into / tp, shape.hidden), (shape.hidden, inner / tp)]
    heads = ceil(shape.heads / tp)
    if latent is None:
        all_kv_heads, head_dim = shape.kv_shape(kind)
        stored = 1 if mixed is not None and mixed.keys_are_values and kind == "full" else 2
        queries = heads * (2 if mixed is not None and mixed.output_gate else 1)
        wide = (queries + stored * ceil(all_kv_heads / tp)) * head_dim
        return [(wide, shape.hidden), (shape.hidden, heads * head_dim)]
    down = (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
    queried = latent.q_rank or shape.hidden
    found: list[tuple[float, float]] = [
        (down, shape.hidden),
        (heads * (latent.nope_dim + latent.rope_dim), queried),
        (heads * (latent.nope_dim + latent.v_dim), latent.kv_rank),
        (shape.hidden, heads * latent.v_dim),
    ]
    if latent.index_heads:
        # The indexer is on every GPU: its queries, and its key with a weight for each head.
        found += [
            (latent.index_heads * latent.index_dim, queried),
            (latent.index_dim + latent.index_heads, shape.hidden),
        ]
    return found


def scan_flop_per_token(layer: Recurrent) -> float:
    """Return the FLOPs of one token in one layer's chunked scan.

    >>> scan_flop_per_token(Recurrent("mamba2", heads=2, head_dim=64, groups=1, state_dim=128))
    196608.0
    """
    chunk, heads, wide, state = CHUNK_TOKENS[layer.kind], layer.heads, layer.head_dim, layer.state_dim
    if layer.kind == "mamba2":
        # Scores of B and C in each group; in each head their product with values, the chunk's state, and its output.
        return 2.0 * layer.groups * chunk * state + heads * (2.0 * chunk * wide + 4.0 * state * wide)
    # Scores of keys with keys and queries, both corrected factors, their outputs; three products with the state.
    return heads * (2.0 * chunk * (3 * state + 2 * wide) + 6.0 * state * wide)


def scan_s(gpu: Gpu, layer: Recurrent, tp: int, tokens: float) -> float:
    """Return the seconds of one recurrent layer for `tokens` of prompts."""
    if tokens <= 0:
        return 0.0
    states = layer.heads * layer.head_dim * layer.state_dim * layer.state_bytes_per_element
    words = 2 * layer.conv_width + 3 * layer.inner  # the convolution in and out; values, gate and output of the scan
    moved = (tokens * 2 * words + 2 * tokens / CHUNK_TOKENS[layer.kind] * states) / tp
    computed = tokens * scan_flop_per_token(layer) / tp / peak_flop_per_s(gpu, "bf16")
    ideal = max(
        computed / (gpu.efficiency.product_fraction * gpu.board_ratio),
        moved / (gpu.memory_bytes_per_s * gpu.efficiency.memory_fraction),
    )
    return ideal + SCAN_KERNELS * gpu.efficiency.launch_s


def states_s(gpu: Gpu, layer: Recurrent, tp: int, sequences: int) -> float:
    """Return the seconds of one recurrent layer for a token of each sequence: its states are read and written."""
    if not sequences:
        return 0.0
    moved = 2 * sequences * layer.state_bytes() / tp
    return moved / (gpu.memory_bytes_per_s * gpu.efficiency.memory_fraction) + gpu.efficiency.launch_s
