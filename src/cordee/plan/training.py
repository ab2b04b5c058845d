"""Training settings: precision, optimizer, framework, loss. Everything of a step but the model and its layout."""

from dataclasses import dataclass, replace
from typing import Literal

from cordee.errors import LayoutError
from cordee.hardware.arrays import Real, Size
from cordee.near import did_you_mean

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Framework = Literal["megatron", "torch", "deepspeed", "internevo"]
Loss = Literal["fused", "chunked", "parallel", "compiled", "eager"]
Attention = Literal["first", "second", "vendor"]
StageName = Literal["dpo", "grpo"]
Reference = Literal["model", "adapters-off", "computed", "none"]
STAGES: tuple[StageName, ...] = ("dpo", "grpo")
REFERENCES: tuple[Reference, ...] = ("model", "adapters-off", "computed", "none")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32", "fp8")
FRAMEWORKS: tuple[Framework, ...] = ("megatron", "torch", "deepspeed", "internevo")
LOSSES: tuple[Loss, ...] = ("fused", "chunked", "parallel", "compiled", "eager")
# The matrices of a dense layer that an adapter can be on; a layer without a gate has no `gate`.
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
# Those of latent attention's, in place of q, k and v.
LATENT = ("q_a", "q_b", "kv_a", "kv_b")
# Parameters of a mixture of experts that are no linear module's in transformers 5, on which peft puts adapters by
# `target_parameters`: a layer's experts as two stacks, and its router.
STACKS = ("experts", "router")
# Matrices that a family's code has as one; an adapter on any of them is one on the whole.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Bytes per parameter in mixed precision: what it reads, adds up, and keeps.

    The moments of a `paged` one are in memory that CUDA moves to the host where the GPU's is short. One that is
    `in_backward` updates each weight as soon as it has a gradient, and drops that.
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    outer_moment_bytes: float | None = None
    paged: bool = False
    in_backward: bool = False

    @property
    def outer_extra_bytes(self) -> float:
        """Bytes by which a parameter of embedding, head or norm exceeds one of a matrix (Muon: AdamW)."""
        return 0.0 if self.outer_moment_bytes is None else self.outer_moment_bytes - self.moment_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """All state of one parameter of a matrix.

        >>> OPTIMIZERS["adamw"].bytes_per_parameter, OPTIMIZERS["adamw-8bit"].bytes_per_parameter
        (16.0, 6.03125)
        """
        return float(self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes)

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        """Bytes to go on exactly: the master weights (or the weights, if none) and the moments."""
        return float((self.master_bytes or self.weight_bytes) + self.moment_bytes)


# ZeRO, arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes. Megatron-LM keeps fp32 gradients: 18;
# DeepSpeed's BF16 optimizer adds fp32 sums to 16-bit ones: 20. 8-bit Adam,
# arXiv:2110.02861: one byte for each moment, and an fp32 constant for each block of 256 (bitsandbytes since 0.44); here
# without master weights, as it is run when memory is short. Pure bf16 is what `model.to(bfloat16)` gives: 2 + 2 + 4.
# Paged: bitsandbytes allocates moments of over 100,000 elements with cudaMallocManaged (`get_state_buffer`).
# Muon (arXiv:2502.16982) keeps one momentum for a matrix, and AdamW's two moments for what is none.
MOMENTS_8BIT = 2 * (1 + 4 / 256)
PURE_BF16 = "adamw-bf16"
OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", 2, 2, 4, 8),
        Optimizer("adamw-fp32-grads", 2, 4, 4, 8),
        Optimizer("adamw-fp32-sums", 2, 6, 4, 8),
        Optimizer("adamw-bf16-moments", 2, 2, 4, 4),
        Optimizer(PURE_BF16, 2, 2, 0, 4),
        Optimizer("adamw-paged", 2, 2, 4, 8, paged=True),
        Optimizer("adamw-8bit", 2, 2, 0, MOMENTS_8BIT),
        Optimizer("adamw-8bit-master", 2, 2, 4, MOMENTS_8BIT),
        Optimizer("adamw-8bit-paged", 2, 2, 0, MOMENTS_8BIT, paged=True),
        Optimizer("muon", 2, 2, 4, 4, outer_moment_bytes=8),
        Optimizer("sgd-momentum", 2, 2, 4, 4),
    )
}


def find_optimizer(name: str, precision: Precision = "bf16") -> Optimizer:
    """Return the optimizer of this name; in pure fp32 there is no second copy of the weights.

    Raises:
        LayoutError: no such optimizer, or one of 16 bits in fp32.
    """
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS, listed="known are ")
        raise LayoutError(f"unknown optimizer {name!r}", hint=hint)
    found = OPTIMIZERS[name]
    if precision == "fp32":
        if name == PURE_BF16:
            raise LayoutError(f"{name} keeps 16-bit weights and moments, not fp32 ones", hint="use adamw")
        return replace(found, weight_bytes=4, gradient_bytes=4, master_bytes=0)
    return found


@dataclass(frozen=True, slots=True)
class Base:
    """A format of frozen matrices: bits of an element, and the bytes of the constants that it is scaled by.

    `keeps_inputs`: its product keeps its input for the backward pass although the weight has no gradient. `head`: the
    output head is in this format too. `copies`: 16-bit matrices that are there at once while a product runs.
    """

    name: str
    bits: int
    block_bytes: float = 0.0  # of constants, for each element
    row_bytes: float = 0.0  # of constants, for each row
    keeps_inputs: bool = False
    head: bool = False
    copies: int = 1

    def matrix_bytes(self, inputs: int, outputs: int) -> float:
        """Return the bytes of one matrix.

        >>> [BASES[name].matrix_bytes(4096, 1024) / (4096 * 1024) for name in ("nf4", "int8", "fp8")]
        [0.5625, 1.0009765625, 1.000244140625]
        """
        return inputs * outputs * (self.bits / 8 + self.block_bytes) + outputs * self.row_bytes


# NF4 has an fp32 constant for each block of 64; doubly quantised one byte, and an fp32 one for 256 blocks (QLoRA,
# section 3). LLM.int8() (arXiv:2208.07339) has an fp32 constant for each row, and bitsandbytes' `MatMul8bitLt` keeps
# its 16-bit input wherever that has a gradient. FP8 has an fp32 constant for each block of 128 x 128 (DeepSeek-V3,
# arXiv:2412.19437, section 3.3.2).
BASES: dict[str, Base] = {
    base.name: base
    for base in (
        Base("bf16", 16),
        Base("nf4", 4, 4 / 64),
        Base("nf4-double", 4, 1 / 64 + 4 / (64 * 256)),
        Base("int8", 8, row_bytes=4.0, keeps_inputs=True),
        Base("fp8", 8, 4 / (128 * 128)),
    )
}


# The formats of bitsandbytes, whose models peft prepares for training.
BITSANDBYTES = ("nf4", "nf4-double", "int8")


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters over frozen weights: LoRA (arXiv:2106.09685), over quantised weights QLoRA (arXiv:2305.14314).

    Each target, one of `LINEARS`, `LATENT`, `STACKS` or `JOINED`, gets two matrices of this rank: rank x (inputs +
    outputs) parameters, for each matrix of a stack.
    `base` is the format of the frozen matrices of the layers, one of `BASES`; embeddings, head, norms and stacks keep
    16 bits.
    With a probability of `dropout` each target has its own copy of its input, and a mask. With `magnitudes` each
    target learns the length of each of its weight's rows apart from its direction: DoRA (arXiv:2402.09353). `joined`:
    queries, keys and values are one product with one adapter, whose outputs are put into their columns (LitGPT's
    `LoRAQKVLinear`).
    `widened`: what of embeddings, head and norms has 16 bits is fp32, and so are hidden states, but where FSDP shards
    the base (peft's `prepare_model_for_kbit_training`).
    """

    rank: int = 16
    targets: tuple[str, ...] = LINEARS
    base: "Base" = BASES["bf16"]
    dropout: float = 0.0
    magnitudes: bool = False
    joined: bool = False
    widened: bool = False

    @property
    def base_bits(self) -> int:
        """Bits of one element of a frozen matrix, without constants."""
        return self.base.bits


@dataclass(frozen=True, slots=True)
class Frozen:
    """Parts of a model that are trained in full but for these: layers by their index, embeddings, the output head."""

    layers: tuple[int, ...] = ()
    embeddings: bool = False
    head: bool = False

    def without_gradient(self, layers: int) -> int:
        """Return how many of a model's layers have nothing to train before them: no backward pass reaches them.

        >>> Frozen((0, 1, 5), embeddings=True).without_gradient(8), Frozen((0, 1, 5)).without_gradient(8)
        (2, 0)
        """
        if not self.embeddings:
            return 0
        return next((index for index in range(layers) if index not in self.layers), layers)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Completions that a stage of reinforcement learning generates, and the GPUs that do so.

    Attributes:
        group: completions of each prompt.
        prompt_tokens: tokens of a prompt.
        completion_tokens: tokens of a completion, on average; the longest fills the sequence.
        updates: optimizer steps on one batch of completions.
        apart: they are generated on GPUs of their own, of which there are `gpus` (None: searched).
        overlap: the next completions are generated while the model is updated with the last ones: one step stale.
        resident: fraction of a GPU's memory that an engine on the same GPUs keeps during updates; 0: it sleeps.
    """

    group: int
    prompt_tokens: int
    completion_tokens: int
    updates: int = 1
    apart: bool = False
    gpus: int | None = None
    overlap: bool = False
    resident: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of training after supervised fine-tuning, which compares the model with what it was: its reference.

    DPO (arXiv:2305.18290) has pairs of sequences, which pass together; GRPO (arXiv:2402.03300) has roll-outs. The
    reference is a frozen copy on the same GPUs (model), the model itself without its adapters (adapters-off), log
    probabilities that were computed before the run (computed), or nothing (none).
    """

    name: StageName
    reference: Reference
    rollouts: Rollouts | None = None

    @property
    def sequences_together(self) -> int:
        """Sequences that one loss compares, so that a micro-batch has a multiple of them."""
        return 2 if self.name == "dpo" else 1

    @property
    def has_copy(self) -> bool:
        """Return whether a second model lies beside the one that is trained."""
        return self.reference == "model"

    @property
    def free_passes(self) -> int:
        """Forward passes without gradients over each sequence of a step: the reference, and the model as it was.

        With more than one update of a batch the policy's log probabilities must be those of the first (GRPO's old
        policy); with one update they are those of the step itself.
        """
        old = self.rollouts is not None and self.rollouts.updates > 1
        return (self.reference in ("model", "adapters-off")) + old


@dataclass(frozen=True, slots=True)
class Tuning:
    """Changes that fine-tuners make to a step beside adapters.

    They are frozen parts, documents packed into a sequence, stages with a reference, and a model's own code.
    `packed_tokens` is the length of a document that a sequence is packed with, as its tokens see it (the mean weighted
    by length): attention does not go beyond it. None: each sequence is one document. `composite_norms`: an RMS norm is
    several kernels, as Hugging Face's models have it, which keep its input in fp32 and what it is scaled to.
    `composite_gelu`: so is the approximation of GELU by tanh (`NewGELUActivation`), whose power autocast makes fp32.
    `flat`: a layer's parameters are one sharded tensor, whose gradient has frozen ones too, and which is whole as
    micro-batches add up (FSDP1 with `use_orig_params`, accumulating in `no_sync`). `regathers`: what sequence
    parallelism gathers for a product is gathered anew in the backward pass, not kept (nanotron's
    `tp_recompute_allgather`; Megatron-LM always).
    `loss_within`: the loss is part of the model's forward pass, as in Hugging Face's models.
    """

    frozen: Frozen | None = None
    packed_tokens: int | None = None
    stage: Stage | None = None
    composite_norms: bool = False
    composite_gelu: bool = False
    flat: bool = False
    regathers: bool = False
    loss_within: bool = False

    @property
    def weighs_outputs(self) -> bool:
        """Return whether experts' outputs are kept, since the router's weights multiply them: transformers' code."""
        return self.loss_within


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a step that belong neither to the model nor to its layout.

    `framework` decides the buffers: Megatron-LM (with Transformer Engine), torch (FSDP2, torchtitan, the
    trainer of this package), DeepSpeed or InternEvo. `imbalance` is the tokens of the fullest expert rank over
    the mean of all ranks; `imbalance_by_ep` has it for each ep, where loads were measured.
    `loss` is a cross-entropy that writes its gradient into the logits (fused, as in Transformer Engine), one with the
    output head in it, so that logits are those of a few tokens at a time (chunked, as Liger has it), one over a
    vocabulary that is divided by tp (parallel, as in Megatron-LM), a plain one through torch.compile, which makes no
    fp32 tensors (compiled), or without it (eager); None is what the framework does by itself.
    `overlap`: traffic runs beside the kernels where it can. `attention` is the generation of fused kernels:
    the first FlashAttention, the second, or the vendor's own; `fused`: norms, rotations and activations are
    one kernel each (written so, or compiled). None is what the framework does by itself.
    With `adapters` everything else is frozen, and `optimizer` is that of the adapters; None trains all parameters.
    """

    seq_tokens: int
    global_batch: int
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    precision: Precision = "bf16"
    flash: bool = True
    dropout: bool = False
    framework: Framework = "torch"
    imbalance: float = 1.0
    imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    overlap: bool = True
    loss: Loss | None = None
    attention: Attention | None = None
    fused: bool | None = None
    adapters: Adapters | None = None
    tuning: Tuning = Tuning()

    def imbalance_at(self, ep: Size) -> Real:
        """Return the imbalance at this ep, a size or an array of sizes."""
        if not self.imbalance_by_ep:
            return self.imbalance
        return sum((ep == size) * factor for size, factor in self.imbalance_by_ep)

    @property
    def keeps_fp32(self) -> bool:
        """Return whether weights and gradients are fp32 and only products 16-bit: torch in mixed precision.

        FSDP2 gathers its fp32 shards in 16 bits, and autocast casts whole weights: 4 + 4 + 8 bytes of state, not
        2 + 2 + 12. An optimizer of 16-bit weights alone keeps those.
        """
        mixed = self.optimizer.weight_bytes == self.optimizer.gradient_bytes == 2 and self.optimizer.master_bytes == 4
        return mixed and self.framework == "torch" and self.adapters is None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.seq_tokens * self.global_batch

    @property
    def sequences_together(self) -> int:
        """Sequences that one loss compares: a micro-batch has a multiple of them."""
        return 1 if self.tuning.stage is None else self.tuning.stage.sequences_together

    @property
    def attended_tokens(self) -> int:
        """Tokens of a document, over which its attention goes: the sequence's, or those of the packed ones."""
        return self.tuning.packed_tokens or self.seq_tokens

    @property
    def loss_kind(self) -> Loss:
        """The kind of loss, asked for or by the framework."""
        return self.loss or ("parallel" if self.framework in ("megatron", "deepspeed") else "eager")

    @property
    def attention_kind(self) -> Attention:
        """The fused attention, asked for or by the framework."""
        return self.attention or ("vendor" if self.framework == "megatron" else "second")

    @property
    def is_fused(self) -> bool:
        """Return whether small operations are fused, asked for or by the framework: only torch does not."""
        return self.framework != "torch" if self.fused is None else self.fused

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2
