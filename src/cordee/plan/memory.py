"""Bytes on one GPU of each pipeline stage, part by part; the parts sum to the total.

Sources: states ZeRO (arXiv:1910.02054, section 3); activations Korthikanti et al. 2022 (arXiv:2205.05198, section 4),
without dropout and with the gated MLP, grouped-query and latent attention and the experts that came after it.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

from cordee.plan.layout import Layout, Training, stage_layers
from cordee.units import GB, MiB
from cordee.workload.model import LatentAttention, ModelShape, expert_layers_in

# CUDA context and NCCL's own buffers: 1.3-1.6 GB seen by nvidia-smi on A100 (BigScience's notes).
CONTEXT_BYTES = round(1.6 * GB)
# Reserved over allocated bytes: 1.028-1.093, mean 1.048, in 43 Megatron-LM runs (SimuMax's published measurements).
FRAGMENTATION = 0.048
# Logits of the last stage: bf16 logits, fp32 softmax, and its gradient in bf16 (Megatron-LM's fused loss).
LOGIT_BYTES = 8
BUCKET_BYTES = 25 * MiB


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one GPU of one pipeline stage holds at its peak."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    loss_bytes: int
    buffers_bytes: int
    fragmentation_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.loss_bytes
            + self.buffers_bytes
            + self.fragmentation_bytes
            + self.context_bytes
        )

    def parts(self) -> dict[str, int]:
        """Part by part, by name without the unit."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The stages of a layout; the fullest one decides."""

    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def worst_stage(self) -> int:
        """Its index, the first among equals."""
        totals = [stage.total_bytes for stage in self.stages]
        return totals.index(max(totals))

    @property
    def total_bytes(self) -> int:
        """Peak bytes on the fullest GPU."""
        return self.worst.total_bytes

    def shortfall_bytes(self, wall_bytes: int) -> int:
        """Bytes over the wall; 0 if it fits."""
        return max(0, self.total_bytes - wall_bytes)


def state_bytes(shape: ModelShape, training: Training) -> int:
    """Weights, gradients and optimizer of the whole model, wherever they lie: the bill.

    >>> from cordee.workload.families import shape_from_config
    >>> config = dict(model_type="llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
    ...               num_key_value_heads=8, intermediate_size=28672, vocab_size=128256)
    >>> state_bytes(shape_from_config(config, name="llama-3-70b"), Training(8192, 512))
    1128859303936
    """
    return round(shape.parameters * training.optimizer.bytes_per_parameter)


def rank_memory(shape: ModelShape, layout: Layout, training: Training) -> RankMemory:
    """Peak memory of each stage under 1F1B."""
    per_stage = stage_layers(shape.layers, layout.pp)
    stages = []
    first = 0
    for index, count in enumerate(per_stage):
        stages.append(_stage(shape, layout, training, index, range(first, first + count)))
        first += count
    return RankMemory(tuple(stages))


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, layers: range) -> int:
    """Parameters that one GPU of a stage works with, before ZeRO: matrices are divided over tp, norms are not."""
    experts = expert_layers_in(shape, layers.start, layers.stop)
    total = experts * _layer_parameters(shape, layout.tp, True)
    total += (len(layers) - experts) * _layer_parameters(shape, layout.tp, False)
    last = stage == layout.pp - 1
    if stage == 0:
        total += _share(shape.vocab * shape.hidden, layout.tp) + shape.learned_positions * shape.hidden
    if last:
        # A tied head needs its own copy of the embedding when the two ends are on different stages.
        tied_copy = shape.tied and layout.pp > 1
        head = shape.vocab * shape.hidden if tied_copy else shape.head_parameters
        total += _share(head, layout.tp) + shape.norm_parameters
    return total


@lru_cache(maxsize=4096)
def _layer_parameters(shape: ModelShape, tp: int, expert: bool) -> int:
    index = next((i for i in range(shape.layers) if shape.is_expert_layer(i) == expert), None)
    if index is None:
        return 0
    count = shape.layer(index)
    attention = count.attention
    if shape.latent is None and tp > shape.kv_heads:
        # Key and value heads are copied once there are fewer of them than ranks.
        attention += 2 * shape.hidden * shape.head_dim * (tp - shape.kv_heads)
    return _share(attention, tp) + _share(count.mlp, tp) + _share(count.experts, tp) + count.router + count.norms


def _share(amount: int, ranks: int) -> int:
    return -(-amount // ranks)


def _stage(shape: ModelShape, layout: Layout, training: Training, stage: int, layers: range) -> StageMemory:
    parameters = stage_parameters(shape, layout, stage, layers)
    optimizer, dp = training.optimizer, layout.dp
    weights = parameters * optimizer.weight_bytes / (dp if layout.zero == 3 else 1)
    gradients = parameters * optimizer.gradient_bytes / (dp if layout.zero >= 2 else 1)
    kept = parameters * (optimizer.master_bytes + optimizer.moment_bytes) / (dp if layout.zero >= 1 else 1)
    activations = _stage_activations(shape, layout, training, stage, layers)
    loss = 0.0
    if stage == layout.pp - 1:
        logit_bytes = 10 if training.precision == "fp32" else LOGIT_BYTES
        loss = logit_bytes * training.seq_tokens * layout.micro_batch * shape.vocab / layout.tp
    buffers = _buffers(shape, layout, training)
    allocated = weights + gradients + kept + activations + loss + buffers
    return StageMemory(
        weights_bytes=round(weights),
        gradients_bytes=round(gradients),
        optimizer_bytes=round(kept),
        activations_bytes=round(activations),
        loss_bytes=round(loss),
        buffers_bytes=round(buffers),
        fragmentation_bytes=round(FRAGMENTATION * allocated),
        context_bytes=CONTEXT_BYTES,
    )


def _buffers(shape: ModelShape, layout: Layout, training: Training) -> float:
    """Tensors that live for a moment: gradients on their way, layers gathered for use, buckets for the network.

    The backward pass makes a layer's weight gradients before it adds them to those that are kept. FSDP gathers this
    layer's weights and the next one's.
    """
    weight_bytes = training.optimizer.weight_bytes
    largest = max(_layer_parameters(shape, layout.tp, True), _layer_parameters(shape, layout.tp, False))
    arriving = weight_bytes * largest
    if layout.dp == 1:
        return arriving
    gathered = 2 * weight_bytes * largest if layout.zero == 3 else 0.0
    return arriving + gathered + 2 * BUCKET_BYTES


def _stage_activations(shape: ModelShape, layout: Layout, training: Training, stage: int, layers: range) -> float:
    """Kept activations of all micro-batches in flight, and the working set of one layer under full recomputation."""
    in_flight = min(layout.pp - stage, layout.micro_batches(training.global_batch))
    experts = expert_layers_in(shape, layers.start, layers.stop)
    dense = len(layers) - experts
    of_expert = _layer_activation(shape, layout, training, True) if experts else 0.0
    of_dense = _layer_activation(shape, layout, training, False) if dense else 0.0
    tokens = training.seq_tokens * layout.micro_batch
    split = layout.tp if layout.sp else 1
    boundary = training.activation_bytes * tokens * shape.hidden / split
    if layout.recompute == "full":
        kept = in_flight * len(layers) * boundary + max(of_expert, of_dense)
    else:
        kept = in_flight * (experts * of_expert + dense * of_dense)
    embedded = in_flight * boundary if stage == 0 else 0.0
    # Sequence parallelism gathers the whole sequence before each product: one at a time.
    gathered = training.activation_bytes * tokens * shape.hidden if layout.sp else 0.0
    return kept + embedded + gathered


def _layer_activation(shape: ModelShape, layout: Layout, training: Training, expert: bool) -> float:
    return layer_activation_bytes(
        shape, training, tp=layout.tp, sp=layout.sp, micro_batch=layout.micro_batch, expert=expert,
        scores=not training.flash and layout.recompute == "none",
    )  # fmt: skip


@lru_cache(maxsize=4096)
def layer_activation_bytes(
    shape: ModelShape,
    training: Training,
    *,
    tp: int,
    sp: bool,
    micro_batch: int,
    expert: bool = False,
    scores: bool = False,
) -> float:
    """What one layer keeps of one micro-batch for its backward pass.

    Per token: inputs and outputs of the two norms (4h, divided over tp only with sequence parallelism), queries, keys,
    values, the attention's output, and the MLP's inner widths, which tensor parallelism divides. Without flash
    attention and selective recomputation the scores add 5 bytes per head and pair of tokens.
    """
    tokens = training.seq_tokens * micro_batch
    split = tp if sp else 1
    if shape.latent is not None:
        inner, shared = _latent_widths(shape, shape.latent)
    else:
        kv_heads = max(shape.kv_heads, tp)
        inner, shared = 2 * shape.heads * shape.head_dim + 2 * kv_heads * shape.head_dim, 0
    widths = 3 if shape.gated else 2
    moe = shape.experts
    if expert and moe is not None:
        inner += widths * (moe.ffn * moe.per_token + moe.shared_ffn)
        shared += 2 * shape.hidden * moe.per_token
    else:
        inner += widths * shape.ffn
    per_token = training.activation_bytes * (4 * shape.hidden / split + inner / tp + shared)
    log_sums = 4 * shape.heads / tp
    total = tokens * (per_token + log_sums)
    if scores:
        total += 5 * shape.heads / tp * training.seq_tokens * tokens
    return total


def _latent_widths(shape: ModelShape, latent: LatentAttention) -> tuple[int, int]:
    """Widths that tp divides (the expanded heads), and those every rank has (the compressed ones)."""
    key_dim = latent.nope_dim + latent.rope_dim
    expanded = shape.heads * (2 * key_dim + 2 * latent.v_dim)
    return expanded, (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
