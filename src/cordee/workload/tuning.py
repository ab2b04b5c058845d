"""Fine-tuning, and an implementation's own ways: one list for `cordee plan`, notebooks and job files."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

Trained = Literal["full", "lora", "qlora", "dora"]
ModelCode = Literal["hf", "torchtitan"]
_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Adapters over a frozen base, frozen parts, packed documents, and the implementation's own ways.

    `train` lora, qlora or dora trains adapters of this `rank` on `targets` (all, attention, or names: q,v) over frozen
    weights of `base_bits` (4, 8, 16, or a format by its name): None is 16 bits, and 4 for qlora.
    Implementations differ by `lora_dropout` before the adapters; by `fused_qkv`, one product with one adapter; by
    `quantize_head`, an output head in the base's format; by the `dequantized` 16-bit matrices that are there at once
    while a quantised product runs; by `fsdp_version` 1 with one flat gradient for a layer, frozen parameters included.

    `freeze` names what is not trained: embeddings, head, and layers: `embeddings,0..15`. `packed_tokens` is the length
    of the documents that sequences are packed with: attention does not go beyond one. `optimizer_in_backward` updates
    a weight as soon as its gradient is there.

    `model_code` hf has RMS norms of several kernels. `compiled`: layers go through torch.compile, each by itself, and,
    but for hf, whose loss is in the model, the loss too.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    train: Trained = "full"
    rank: _Positive = 16
    targets: str = "all"
    base_bits: _Positive | str | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    fused_qkv: bool = False
    quantize_head: bool = False
    dequantized: _Positive = 1
    fsdp_version: _Positive = 2
    freeze: str | None = None
    packed_tokens: _Positive | None = None
    optimizer_in_backward: bool = False
    model_code: ModelCode | None = None
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSpec(Tuned):
    """The section `model.tune` of a job: what is tuned, and a `stage` with a reference, as `cordee plan --stage`."""

    stage: str | None = None


def tuned(given: Any) -> dict[str, Any]:
    """Return what is tuned, by the names of `Tuned`: of a job's section, or of the settings of a plan."""
    return {field.name: getattr(given, field.name) for field in fields(Tuned)}
