"""Cases of serving as tests write them: a model and a GPU, then whatever differs from an engine's defaults."""

from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape


def served(
    model: str | ModelShape, gpu: str = "H100", *, tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False,
    weights: str = "bf16", kv: str = "bf16", version: str = "0.11.0", engine: str = "vllm", context: int = 16_000,
    fraction: float = 0.9, **other: int,
) -> ServingCase:  # fmt: skip
    """Return the case; other arguments are fields of `ServingCase`."""
    record = find_engine(engine, version)
    found = load_catalogue().find_gpu(gpu)
    sequences, tokens = record.limits(found.name, found.visible_bytes, context)
    return ServingCase(
        shape=load_shape(model) if isinstance(model, str) else model, gpu=found,
        layout=ServingLayout(tp, pp, dp, ep), weights=WEIGHTS[weights], kv=KV[kv], engine=record,
        max_sequences=other.pop("max_sequences", sequences), max_batched_tokens=other.pop("max_batched_tokens", tokens),
        max_context_tokens=context, memory_fraction=fraction, **other,
    )  # fmt: skip
