"""Questions to a trace, as plain values that travel to a process of their own. No torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cordee.plan.training import Adapters, Base

ModelCode = Literal["hf", "torchtitan", "megatron"]
MODEL_CODES: tuple[ModelCode, ...] = ("hf", "torchtitan", "megatron")
Weights = Literal["mixed", "autocast", "bf16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One rank of a step.

    `config` is a Hugging Face config.json; `function`, a `module:function`, is asked instead of it where it is given.
    `fsdp` ranks share one copy of the state, `replicas` such groups have the same (HSDP). `zero` 3 is FSDP2, 2 the same
    with weights that stay gathered until the backward pass; with 0 and 1 (fsdp=1) replicas are those of DDP, whose
    moments ZeRO-1 divides. `tp` ranks divide each layer's matrices, with `sp` the sequence between them as well.
    With `adapters` all other parameters are frozen.
    `weights`: fp32 ones that FSDP2 gathers in 16 bits (mixed; on one rank under autocast), fp32 ones under autocast,
    16-bit ones alone, fp32 alone.
    `compiled`: each layer goes through torch.compile by itself, and torchtitan's loss as well.
    `micro_batches` is 1 or 2: with the second one there are gradients when the loss is.
    """

    config: dict[str, Any] = field(default_factory=dict)
    function: str | None = None
    code: ModelCode = "hf"
    seq_tokens: int = 2048
    micro_batch: int = 1
    micro_batches: int = 1
    fsdp: int = 1
    replicas: int = 1
    zero: Literal[0, 1, 2, 3] = 3
    tp: int = 1
    sp: bool = False
    adapters: Adapters | None = None
    weights: Weights = "mixed"
    recompute: Literal["none", "selective", "full"] = "none"
    attention: Literal["sdpa", "eager"] = "sdpa"
    compiled: bool = False

    @property
    def ranks(self) -> int:
        """All ranks of the world."""
        return self.replicas * self.fsdp * self.tp

    @property
    def is_replicated(self) -> bool:
        """Return whether every data rank has whole weights and gradients: DDP, with ZeRO-1 as well."""
        return self.zero < 2 and self.replicas > 1

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: dict[str, Any]) -> "Question":
        """Return the question of a document."""
        adapters = document.get("adapters")
        if adapters is not None:
            base, targets = Base(**adapters["base"]), tuple(adapters["targets"])
            adapters = Adapters(**adapters | {"base": base, "targets": targets})
        return cls(**document | {"adapters": adapters})
