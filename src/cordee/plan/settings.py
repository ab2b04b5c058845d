"""Training settings as a user gives them, and the `Training` that they become once model and GPUs are known."""

from dataclasses import dataclass
from typing import Literal

from cordee.errors import LayoutError
from cordee.plan.experts.imbalance import ImbalanceByEp, Loads, imbalance_by_ep
from cordee.plan.states import layer_linears
from cordee.plan.training import (
    FRAMEWORKS,
    LINEARS,
    Adapters,
    Framework,
    Loss,
    Precision,
    Training,
    find_optimizer,
)
from cordee.workload.model import ModelShape

TARGET_TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192
Trained = Literal["full", "lora", "qlora"]
TRAINED: tuple[Trained, ...] = ("full", "lora", "qlora")
TARGETS = {"all": LINEARS, "attention": ("q", "k", "v", "o")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Training settings as a user gives them.

    `seq_tokens` None is the model's own sequence, 8,192 tokens at most; `global_batch` (sequences in a step over all
    GPUs) None is about 4 million tokens. `flash` attention keeps no scores. `framework` None stands for any of torch
    and Megatron-LM, for jobs that do not say which one they use. `loss` None is the framework's own. `expert_loads` are
    the tokens of each expert in each layer, as measured; None counts experts as equally loaded.

    `train` lora or qlora trains adapters of this `rank` on `targets` (all, attention, or names: q,v) over frozen
    weights of `base_bits`: None is 16 for lora and 4 for qlora.
    """

    seq_tokens: int | None = None
    global_batch: int | None = None
    optimizer: str = "adamw"
    precision: Precision = "bf16"
    flash: bool = True
    framework: Framework | None = "torch"
    loss: Loss | None = None
    expert_loads: Loads | None = None
    train: Trained = "full"
    rank: int = 16
    targets: str = "all"
    base_bits: int | None = None

    def training(self, shape: ModelShape, gpus: int) -> Training:
        """Return the training of this model on so many GPUs, with every default filled in.

        Raises:
            LayoutError: an unknown optimizer or framework, a sequence longer than learned positions, a size below 1.
        """
        if gpus < 1:
            raise LayoutError(f"a job needs at least 1 GPU, not {gpus}", hint="write --gpus 64xH100")
        seq = self.seq_tokens if self.seq_tokens is not None else min(shape.positions, LONGEST_DEFAULT_SEQUENCE)
        if seq < 1 or (shape.learned_positions and seq > shape.learned_positions):
            limit = shape.learned_positions or shape.positions
            raise LayoutError(f"{shape.name} cannot train on sequences of {seq} tokens", hint=f"use 1 to {limit}")
        batch = self.global_batch if self.global_batch is not None else default_batch(seq, gpus)
        if batch < 1:
            raise LayoutError(f"a global batch of {batch} sequences is empty", hint="use at least 1")
        framework = self.framework or "torch"
        if framework not in FRAMEWORKS:
            raise LayoutError(f"unknown framework {framework!r}", hint="use " + ", ".join(FRAMEWORKS))
        adapters = self._adapters(shape)
        # peft keeps adapters in fp32 (`autocast_adapter_dtype`), so that they need no second copy.
        optimizer = find_optimizer(self.optimizer, self.precision if adapters is None else "fp32")
        return Training(
            seq, batch, optimizer, self.precision, self.flash, framework=framework, loss=self.loss,
            imbalance_by_ep=self._imbalance_by_ep(shape), adapters=adapters,
        )  # fmt: skip

    def _adapters(self, shape: ModelShape) -> Adapters | None:
        """Return the adapters that are asked for; None where all parameters are trained.

        Raises:
            LayoutError: settings that contradict each other, or a model whose adapters are not planned.
        """
        if self.train == "full":
            if self.base_bits not in (None, 16):
                raise LayoutError(
                    f"a base of {self.base_bits} bits cannot be trained in full", hint="use --train qlora"
                )
            return None
        if self.train not in TRAINED:
            raise LayoutError(f"unknown way to train {self.train!r}", hint="use " + ", ".join(TRAINED))
        bits = self.base_bits or (4 if self.train == "qlora" else 16)
        if bits not in (4, 8, 16) or (self.train == "qlora" and bits == 16):
            raise LayoutError(f"{self.train} cannot have a base of {bits} bits", hint="use 4 or 8, or 16 with lora")
        if shape.experts is not None or shape.latent is not None:
            what = "a mixture of experts" if shape.experts is not None else "latent attention"
            raise LayoutError(f"adapters of {shape.name} are not planned: it has {what}", hint="use a dense model")
        if (self.framework or "torch") != "torch" or self.precision not in ("bf16", "fp16"):
            raise LayoutError(
                f"adapters are planned with torch in 16 bits, not with {self.framework} in {self.precision}",
                hint="leave the framework and the precision out",
            )
        if not 1 <= self.rank <= shape.hidden:
            raise LayoutError(f"rank {self.rank} is not that of an adapter", hint=f"use 1 to {shape.hidden}, say 16")
        return Adapters(self.rank, _targets(self.targets, shape), bits)

    def _imbalance_by_ep(self, shape: ModelShape) -> ImbalanceByEp:
        """Return the imbalance of the placement that `cordee experts` would choose, for each ep."""
        if self.expert_loads is None:
            return ()
        if shape.experts is None:
            raise LayoutError(f"{shape.name} has no experts that loads could be of", hint="leave the expert loads out")
        return imbalance_by_ep(self.expert_loads, shape.experts.routed)


def _targets(text: str, shape: ModelShape) -> tuple[str, ...]:
    """Return the matrices that a text names: all, attention, or q,v."""
    known = tuple(linear.name for linear in layer_linears(shape))
    names = TARGETS.get(text) or tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown and text != "all":
        raise LayoutError(
            f"{shape.name} has no matrix {unknown[0]!r} for an adapter",
            hint=f"use all, attention, or {','.join(known)}",
        )
    return tuple(name for name in known if name in names)


def default_batch(seq_tokens: int, gpus: int) -> int:
    """Return about 4 million tokens in sequences, as a multiple of the GPUs' largest divisor that is not above it."""
    target = max(1, TARGET_TOKENS_PER_STEP // seq_tokens)
    divisor = max(n for n in range(1, min(gpus, target) + 1) if gpus % n == 0)
    return -(-target // divisor) * divisor
