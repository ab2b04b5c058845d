"""Training settings as a user gives them, and the `Training` that they become once model and GPUs are known."""

from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.plan.experts.imbalance import ImbalanceByEp, Loads, imbalance_by_ep
from cordee.plan.training import FRAMEWORKS, Framework, Loss, Precision, Training, find_optimizer
from cordee.workload.model import ModelShape

TARGET_TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Training settings as a user gives them.

    `seq_tokens` None is the model's own sequence, 8,192 tokens at most; `global_batch` (sequences in a step over all
    GPUs) None is about 4 million tokens. `flash` attention keeps no scores. `framework` None stands for any of torch
    and Megatron-LM, for jobs that do not say which one they use. `loss` None is the framework's own. `expert_loads` are
    the tokens of each expert in each layer, as measured; None counts experts as equally loaded.
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
        optimizer = find_optimizer(self.optimizer, self.precision)
        return Training(
            seq, batch, optimizer, self.precision, self.flash, framework=framework, loss=self.loss,
            imbalance_by_ep=self._imbalance_by_ep(shape),
        )  # fmt: skip

    def _imbalance_by_ep(self, shape: ModelShape) -> ImbalanceByEp:
        """Return the imbalance of the placement that `cordee experts` would choose, for each ep."""
        if self.expert_loads is None:
            return ()
        if shape.experts is None:
            raise LayoutError(f"{shape.name} has no experts that loads could be of", hint="leave the expert loads out")
        return imbalance_by_ep(self.expert_loads, shape.experts.routed)


def default_batch(seq_tokens: int, gpus: int) -> int:
    """Return about 4 million tokens in sequences, as a multiple of the GPUs' largest divisor that is not above it."""
    target = max(1, TARGET_TOKENS_PER_STEP // seq_tokens)
    divisor = max(n for n in range(1, min(gpus, target) + 1) if gpus % n == 0)
    return -(-target // divisor) * divisor
