"""Training settings as a user gives them, and the `Training` that they become once model and GPUs are known."""

import re
from dataclasses import dataclass, replace
from typing import get_args

from cordee.errors import LayoutError
from cordee.near import meant
from cordee.plan.experts.imbalance import ImbalanceByEp, Loads, imbalance_by_ep
from cordee.plan.states import layer_linears
from cordee.plan.training import (
    BASES,
    BITSANDBYTES,
    FRAMEWORKS,
    JOINED,
    LATENT,
    LINEARS,
    PURE_BF16,
    STACKS,
    Adapters,
    Base,
    Framework,
    Frozen,
    Loss,
    Optimizer,
    Precision,
    Training,
    Tuning,
    find_optimizer,
)
from cordee.workload.model import ModelShape
from cordee.workload.tuning import Trained, Tuned

TARGET_TOKENS_PER_STEP = 4 * 2**20
ADAPTED_SEQUENCES_PER_STEP = 16
LONGEST_DEFAULT_SEQUENCE = 8192
TRAINED = get_args(Trained)
# What `base_bits` may say, and the format of the frozen matrices that it means.
BASE_BITS = {"16": "bf16", "8": "int8", "4": "nf4"} | {name: name for name in BASES}
TARGETS = {"all": (*LINEARS, *LATENT, "experts"), "attention": ("q", "k", "v", "o", *LATENT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Tuned):
    """Training settings as a user gives them; those of a fine-tuner and of an implementation are `Tuned`'s.

    `seq_tokens` None is the model's own sequence, 8,192 tokens at most; `global_batch` (sequences in a step over all
    GPUs) None is about 4 million tokens, and 16 sequences or more with adapters. `flash` attention keeps no scores.
    `framework` None stands for any of torch and Megatron-LM, for jobs that do not say which one they use. `loss` None
    is the framework's own. `expert_loads` are the tokens of each expert in each layer, as measured; None counts experts
    as equally loaded.
    """

    seq_tokens: int | None = None
    global_batch: int | None = None
    optimizer: str = "adamw"
    precision: Precision = "bf16"
    flash: bool = True
    framework: Framework | None = "torch"
    loss: Loss | None = None
    expert_loads: Loads | None = None

    def training(self, shape: ModelShape, gpus: int) -> Training:
        """Return the training of this model on so many GPUs, with every default filled in.

        Raises:
            LayoutError: an unknown optimizer or framework, a sequence longer than learned positions, a size below 1.
        """
        if gpus < 1:
            raise LayoutError(f"a job needs at least 1 GPU, not {gpus}", hint="write --gpus 64xH100")
        seq = self.sequence(shape)
        if seq < 1 or (shape.learned_positions and seq > shape.learned_positions):
            limit = shape.learned_positions or shape.positions
            raise LayoutError(f"{shape.name} cannot train on sequences of {seq} tokens", hint=f"use 1 to {limit}")
        adapted = self.train != "full"
        batch = self.global_batch if self.global_batch is not None else default_batch(seq, gpus, adapted=adapted)
        if batch < 1:
            raise LayoutError(f"a global batch of {batch} sequences is empty", hint="use at least 1")
        framework = self.framework or "torch"
        if framework not in FRAMEWORKS:
            raise LayoutError(f"unknown framework {framework!r}", hint="use " + ", ".join(FRAMEWORKS))
        adapters = self.adapters(shape)
        optimizer = replace(self.optimizer_of(adapters), in_backward=self.optimizer_in_backward)
        eager = self.model_code == "hf" and not self.compiled
        tuning = Tuning(
            self._frozen(shape, seq), self._packed(seq), composite_norms=eager, flat=self.fsdp_version == 1,
            composite_gelu=eager and shape.tanh_gelu,
            loss_within=self.model_code == "hf" or (adapters is not None and self.model_code is None),
        )  # fmt: skip
        return Training(
            seq, batch, optimizer, self.precision, self.flash, framework=framework, loss=self._loss(framework),
            imbalance_by_ep=self._imbalance_by_ep(shape), adapters=adapters, fused=True if self.compiled else None,
            dropout=self.model_code == "hf" and shape.drops, tuning=tuning,
        )  # fmt: skip

    def _loss(self, framework: Framework) -> Loss | None:
        """Return the loss that is asked for; a compiled one where layers are compiled and nothing is asked.

        Raises:
            LayoutError: a framework that brings its own kernels.
        """
        if not self.compiled:
            return self.loss
        if framework != "torch":
            raise LayoutError(f"{framework} brings its own kernels", hint="leave --compile out, or the framework")
        return self.loss or ("eager" if self.model_code == "hf" else "compiled")

    def sequence(self, shape: ModelShape) -> int:
        """Return the tokens of a sequence: as asked, or the model's own."""
        return self.seq_tokens if self.seq_tokens is not None else min(shape.positions, LONGEST_DEFAULT_SEQUENCE)

    def _frozen(self, shape: ModelShape, seq: int) -> Frozen | None:
        """Return what is frozen; None where everything is trained, or all but adapters.

        Raises:
            LayoutError: the text cannot be read, or nothing would be left to train.
        """
        if self.freeze is None:
            return None
        if self.train != "full":
            raise LayoutError(f"{self.train} freezes the whole model already", hint="leave --freeze out")
        if shape.experts is not None or shape.latent is not None:
            raise LayoutError(f"frozen layers of {shape.name} are not planned", hint="use a dense model")
        return parse_frozen(self.freeze, shape)

    def _packed(self, seq: int) -> int | None:
        packed = self.packed_tokens
        if packed is not None and (not 1 <= packed <= seq or not self.flash):
            raise LayoutError(
                f"documents of {packed} tokens cannot be packed into sequences of {seq}",
                hint=f"use 1 to {seq} tokens, with fused attention",
            )
        return packed

    def optimizer_of(self, adapters: Adapters | None) -> Optimizer:
        """Return the optimizer; peft keeps adapters in fp32 (`autocast_adapter_dtype`): they need no second copy."""
        in_fp32 = adapters is not None and self.optimizer != PURE_BF16
        return find_optimizer(self.optimizer, "fp32" if in_fp32 else self.precision)

    def adapters(self, shape: ModelShape | None) -> Adapters | None:
        """Return the adapters that are asked for, None where all parameters are trained; of a model without formulas.

        Raises:
            LayoutError: settings that contradict each other, or a model whose adapters are not planned.
        """
        self._refuse_unlike_any_adapter()
        if self.train == "full":
            if self.base_bits is not None and BASE_BITS.get(str(self.base_bits)) != "bf16":
                raise LayoutError(f"a base of {self._base_text} cannot be trained in full", hint="use --train qlora")
            return None
        if self.train not in TRAINED:
            raise LayoutError(f"unknown way to train {self.train!r}", hint="use " + ", ".join(TRAINED))
        base = self._base()
        if (self.framework or "torch") != "torch" or self.precision not in ("bf16", "fp16"):
            raise LayoutError(
                f"adapters are planned with torch in bf16 or fp16, not with {self.framework or 'torch'} in "
                f"{self.precision}",
                hint="leave the framework and the precision out",
            )
        most = 2**16 if shape is None else shape.hidden
        if not 1 <= self.rank <= most:
            raise LayoutError(f"rank {self.rank} is not that of an adapter", hint=f"use 1 to {most}, say 16")
        if base.bits == 16 and (self.quantize_head or self.dequantized != 1):
            raise LayoutError("a base of 16 bits is not quantised", hint="give --base-bits 4 or 8, or --train qlora")
        if self.fused_qkv and self.train == "dora":
            raise LayoutError("a fused product of queries, keys and values has no DoRA", hint="use --train lora")
        if self.fused_qkv and shape is not None and "qkv" in shape.joined:
            raise LayoutError(f"{shape.name} has one matrix of them in any code", hint="leave --fused-qkv out")
        if self.fused_qkv and shape is not None and shape.latent is not None:
            raise LayoutError(f"{shape.name} has no queries, keys and values to join", hint="leave --fused-qkv out")
        base = replace(base, head=base.head or self.quantize_head, copies=max(base.copies, self.dequantized))
        mixture = shape is not None and shape.experts is not None
        targets = _targets(self.targets, shape)
        self._refuse_on_stacks(targets)
        return Adapters(
            self.rank, targets, base, dropout=self.lora_dropout, magnitudes=self.train == "dora",
            joined=self.fused_qkv, widened=self._is_prepared_by_peft(base) and not mixture,
        )  # fmt: skip

    def _refuse_on_stacks(self, targets: tuple[str, ...]) -> None:
        """Refuse what peft's adapters on parameters, which those of experts and routers are, do not do.

        Raises:
            LayoutError: DoRA, or dropout.
        """
        what = "DoRA" if self.train == "dora" else "dropout" if self.lora_dropout else None
        stacks = [name for name in targets if name in STACKS]
        if what is not None and stacks:
            raise LayoutError(
                f"peft has no {what} on {' and '.join(stacks)}, which are stacked parameters",
                hint="add --targets attention",
            )

    def _base(self) -> Base:
        """Return the format of the frozen matrices: of 4 bits for qlora, else of 16, where none is asked for.

        Raises:
            LayoutError: an unknown format, or one of 16 bits for qlora.
        """
        name = str(self.base_bits or (4 if self.train == "qlora" else 16))
        if name not in BASE_BITS:
            hint = meant(name, BASE_BITS) + "use 4 (nf4), 8 (int8), nf4-double or fp8, or 16 with lora and dora"
            raise LayoutError(f"unknown base of {self._base_text}", hint=hint)
        base = BASES[BASE_BITS[name]]
        if self.train == "qlora" and base.bits == 16:
            raise LayoutError(f"a base of {self._base_text} is lora's, not qlora's", hint="use --train lora")
        return base

    def _is_prepared_by_peft(self, base: Base) -> bool:
        """Return whether peft makes what is not quantised fp32: transformers' code over bitsandbytes' formats."""
        plain = not base.head and self.optimizer != PURE_BF16
        return self.model_code == "hf" and base.name in BITSANDBYTES and plain

    def _refuse_unlike_any_adapter(self) -> None:
        """Refuse what no implementation of adapters does, and settings of adapters where everything is trained.

        Raises:
            LayoutError: with what to write instead.
        """
        if not 0 <= self.lora_dropout < 1:
            raise LayoutError(f"a dropout of {self.lora_dropout:g} is no probability", hint="use 0 to below 1: 0.05")
        if self.dequantized not in (1, 2):
            raise LayoutError(f"{self.dequantized} dequantised matrices at once are not planned", hint="use 1 or 2")
        if self.fsdp_version not in (1, 2):
            raise LayoutError(f"there is no FSDP {self.fsdp_version}", hint="use 1 or 2")
        plain = Settings()
        given = {
            "--rank": self.rank != plain.rank, "--targets": self.targets != plain.targets,
            "--lora-dropout": self.lora_dropout > 0, "--fused-qkv": self.fused_qkv,
            "--quantize-head": self.quantize_head, "--dequantized": self.dequantized != 1,
            "--fsdp-version": self.fsdp_version != 2,
        }  # fmt: skip
        wrong = next((flag for flag, is_given in given.items() if is_given and self.train == "full"), None)
        if wrong is not None:
            raise LayoutError(f"{wrong} is a setting of adapters", hint="add --train lora or qlora, or leave it out")

    @property
    def _base_text(self) -> str:
        return f"{self.base_bits} bits" if str(self.base_bits).isdecimal() else str(self.base_bits)

    def _imbalance_by_ep(self, shape: ModelShape) -> ImbalanceByEp:
        """Return the imbalance of the placement that `cordee experts` would choose, for each ep."""
        if self.expert_loads is None:
            return ()
        if shape.experts is None:
            raise LayoutError(f"{shape.name} has no experts that loads could be of", hint="leave the expert loads out")
        return imbalance_by_ep(self.expert_loads, shape.experts.routed)


def _targets(text: str, shape: ModelShape | None) -> tuple[str, ...]:
    """Return the matrices that a text names: all, attention, or q,v."""
    known = LINEARS if shape is None else _known_targets(shape)
    names = TARGETS.get(text) or tuple(name.strip() for name in text.split(","))
    parts = [part for name in known for part in (name, *JOINED.get(name, ()))]
    unknown = [name for name in names if name not in parts]
    if unknown and text not in TARGETS:
        raise LayoutError(
            f"{'a model' if shape is None else shape.name} has no matrix {unknown[0]!r} for an adapter",
            hint=f"use all, attention, or {','.join(known)}",
        )
    return tuple(name for name in known if {name, *JOINED.get(name, ())} & set(names))


def _known_targets(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the matrices that an adapter can be on.

    Of a mixture these are the attention's and the stacks: peft understands the MLP's names as those of its experts.
    """
    linears = layer_linears(shape, shape.experts is not None)
    apart = TARGETS["attention"] + STACKS
    names = (
        each.name for each in linears if shape.experts is None or {each.name, *JOINED.get(each.name, ())} & set(apart)
    )
    return tuple(dict.fromkeys(names))


def parse_frozen(text: str, shape: ModelShape) -> Frozen:
    """Read `embeddings,head,0..15`: parts of a model by name, layers by index, both ends of a range included.

    >>> from cordee.workload.load import load_shape
    >>> parse_frozen("embeddings, 0..2, 5", load_shape("llama-3.1-8b"))
    Frozen(layers=(0, 1, 2, 5), embeddings=True, head=False)

    Raises:
        LayoutError: a word that is none, a layer that the model has not, or nothing left to train.
    """
    words = [word.strip() for word in text.split(",")]
    layers: set[int] = set()
    for word in words:
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word)
        if match is None and word not in ("embeddings", "head"):
            raise LayoutError(f"cannot freeze {word!r}", hint="write it as embeddings,head,0..15")
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise LayoutError(f"layers {word} are none", hint=f"write the lower one first: {last}..{first}")
            layers |= set(range(first, last + 1))
    if layers and max(layers) >= shape.layers:
        raise LayoutError(f"{shape.name} has no layer {max(layers)}", hint=f"its layers are 0 to {shape.layers - 1}")
    ends = ("embeddings" in words, "head" in words)
    if shape.tied and ends[0] != ends[1]:
        raise LayoutError(f"embeddings and head of {shape.name} are one matrix", hint="freeze both, or neither")
    if len(layers) == shape.layers and all(ends):
        raise LayoutError(f"nothing of {shape.name} would be trained", hint="freeze less")
    return Frozen(tuple(sorted(layers)), *ends)


def default_batch(seq_tokens: int, gpus: int, *, adapted: bool = False) -> int:
    """Return about 4 million tokens in sequences, as a multiple of the GPUs' largest divisor that is not above it.

    With adapters 16 sequences (QLoRA, arXiv:2305.14314, table 9), and a multiple of the GPUs, one for each at least.
    """
    if adapted:
        return -(-ADAPTED_SEQUENCES_PER_STEP // gpus) * gpus
    target = max(1, TARGET_TOKENS_PER_STEP // seq_tokens)
    divisor = max(n for n in range(1, min(gpus, target) + 1) if gpus % n == 0)
    return -(-target // divisor) * divisor
