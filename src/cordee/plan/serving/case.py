"""One way to serve a model: the shape, the GPU, the layout, the formats and the engine's limits."""

from dataclasses import dataclass

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.engine import Engine
from cordee.plan.serving.formats import Format
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """The GPUs of one replica.

    Attributes:
        tp: tensor-parallel GPUs.
        pp: pipeline stages.
        dp: data-parallel attention inside the replica (each has its own KV cache); the experts span tp * dp GPUs.
        ep: experts are spread whole over tp * dp GPUs; otherwise each expert is cut tp * dp times.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        axes = [f"{name}{size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if size > 1]
        return " ".join([*(axes or ["tp1"]), *(["ep"] if self.ep else [])])


@dataclass(frozen=True, slots=True)
class ServingCase:
    """One replica: a model on its GPUs in an engine.

    Attributes:
        weights: format of the weights.
        kv: format of the KV cache.
        max_sequences: sequences that the engine runs concurrently, at most (vLLM's max_num_seqs).
        max_batched_tokens: tokens of one step, at most (vLLM's max_num_batched_tokens).
        max_context_tokens: longest prompt with its answer (vLLM's max_model_len).
        memory_fraction: fraction of the GPU's memory that the engine may use (vLLM's gpu_memory_utilization).
        visible_bytes: the GPU's memory as CUDA reports it on the machine; None: as its type usually shows.
        eager: no CUDA graphs.
        imbalance: tokens of the fullest expert-parallel GPU over the mean; None: as routing without a balancer has it.
        draft_weights_bytes: of a draft model or of prediction heads, on each GPU.
    """

    shape: ModelShape
    gpu: Gpu
    layout: ServingLayout
    weights: Format
    kv: Format
    engine: Engine
    max_sequences: int
    max_batched_tokens: int
    max_context_tokens: int
    memory_fraction: float
    visible_bytes: int | None = None
    eager: bool = False
    imbalance: float | None = None
    draft_weights_bytes: int = 0

    @property
    def slots(self) -> int:
        """Sequences that the replica runs at the same time, at most: each data-parallel rank has a scheduler."""
        return self.max_sequences * self.layout.dp
