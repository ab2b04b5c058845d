"""Engines and their versions as records: defaults, block size, and the memory that they hold beside weights and KV.

The constants of `MemoryRule` are what the logs of engines say; benchmarks/results/serving_accuracy_kv_202611.md has the
measurements, and what each constant misses by.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from cordee.errors import LayoutError
from cordee.near import did_you_mean
from cordee.plan.serving.formats import GGUF
from cordee.units import GiB, MiB

PLANNER = "https://github.com/llm-d-incubation/llm-d-planner/blob/main/docs/"

# Formats of weights: vLLM's and SGLang's --quantization, TensorRT-LLM's checkpoints, llama.cpp's types.
HUGGING_FACE = ("bf16", "fp16", "fp32", "fp8", "fp8-block", "int8", "int8-wo", "int4", "mxfp4", "nvfp4")
_UNTIL_0_8 = ("bf16", "fp16", "fp32", "fp8", "fp8-block", "int8", "int8-wo", "int4")
_UNTIL_0_5 = ("bf16", "fp16", "fp32", "int4")
_GGML = (*GGUF, "bf16", "fp16", "fp32", "mxfp4")


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The run by which an engine learns what a step takes beside weights and KV.

    Attributes:
        sampler_bytes: bytes for each sequence and vocabulary entry when it tries the sampler.
        workspace_bytes: of libraries, allocated by torch, on GPUs with NVLink 4 or later; `small_workspace_bytes` on
            others.
        expert_workspace: buffers of the experts' kernel stay, so that they add to the sampler's run.
        counts_reserved: what the allocator has reserved counts, so that moments of the run add up.
    """

    sampler_bytes: float = 38.0
    workspace_bytes: int = round(0.044 * GiB)
    small_workspace_bytes: int = round(0.012 * GiB)
    expert_workspace: bool = False
    counts_reserved: bool = False


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """The parts of a GPU's memory that an engine counts, and their sizes.

    Attributes:
        covers: what `memory_fraction` is a fraction of and covers: "all" of the GPU's memory, for everything; "static":
            of the memory that is free before the weights, for weights and KV alone; "free": of the memory that is
            free after the weights and a trial run, for KV alone; "none": the cache is as large as the user says.
        non_torch_bytes: of modules and library handles, outside torch's allocator, without the CUDA context, on
            GPUs with NVLink 4 or later; `small_non_torch_bytes` on others.
        communication_bytes: of NCCL and custom reductions with NVLink, on two GPUs and on more; `pcie_bytes` without.
        counts_context: the CUDA context counts as used.
        graphs: "after": graphs are captured from what the fraction leaves; "before": their estimate is subtracted.
        graph_bytes: of all captured graphs, where `capture_bytes` is 0.
        capture_bytes: of one captured graph, and of one of a model with recurrent layers.
        swap_bytes: of pinned host memory for swapped KV blocks.
        spread: half of the interval of the parts that a version changes, as a fraction of them.
        spread_bytes: the same for what is not modelled.
        fitted_on: sources of these constants: a benchmark must not count them as evidence.
    """

    covers: Literal["all", "static", "free", "none"] = "all"
    trial: TrialRun = TrialRun()
    non_torch_bytes: int = round(0.13 * GiB)
    small_non_torch_bytes: int = round(0.03 * GiB)
    communication_bytes: tuple[int, int] = (round(0.41 * GiB), round(1.71 * GiB))
    pcie_bytes: int = round(0.07 * GiB)
    counts_context: bool = False
    graphs: Literal["before", "after"] = "after"
    graph_bytes: int = round(0.5 * GiB)
    capture_bytes: tuple[int, int] = (0, 0)
    swap_bytes: int = 0
    spread: float = 0.12
    spread_bytes: int = round(0.15 * GiB)
    fitted_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine in one range of versions.

    Attributes:
        name: vllm, sglang, tensorrt-llm or llama.cpp.
        version: the first version that behaves so.
        block_tokens: tokens of one KV block.
        memory_fraction: default fraction of the GPU's memory that the engine may use.
        max_sequences: default number of concurrent sequences.
        max_batched_tokens: default number of tokens of one step.
        large: both defaults on a GPU of 70 GiB and more that is no A100, where they differ.
        chunked_prefill: prompts are cut so that a step holds at most `max_batched_tokens`.
        chunks_above: prompts are cut to so many tokens where the longest exceeds 32,768; 0: never.
        memory: what it holds beside weights and KV.
        axes: axes of a layout that it has beside tp.
        apart: pairs of axes that it does not combine.
        grouped_reads: the query heads of a group read a KV head once in decode; otherwise each reads it for itself.
        weights: names of the formats of weights that it serves.
        kv: names of the formats of the KV cache that it has.
    """

    name: str
    version: str
    block_tokens: int
    memory_fraction: float
    max_sequences: int
    max_batched_tokens: int
    large: tuple[int, int] | None = None
    chunked_prefill: bool = True
    chunks_above: int = 0
    memory: MemoryRule = field(default_factory=MemoryRule)
    axes: tuple[str, ...] = ("pp", "dp", "ep")
    apart: tuple[tuple[str, str], ...] = ()
    grouped_reads: bool = True
    weights: tuple[str, ...] = HUGGING_FACE
    kv: tuple[str, ...] = ("bf16", "fp16", "fp32", "fp8")

    @property
    def full_name(self) -> str:
        """The name with the first version that behaves so."""
        return f"{self.name} {self.version}"

    @property
    def versions(self) -> str:
        """The versions that behave so: `0.21 or later`, `0.8 to below 0.17`."""
        later = [engine.version for engine in ENGINES if engine.name == self.name]
        later = later[later.index(self.version) + 1 :]
        return f"{self.version} to below {later[0]}" if later else f"{self.version} or later"

    def limits(self, gpu_name: str, visible_bytes: int, max_context_tokens: int) -> tuple[int, int]:
        """Return the default concurrent sequences and tokens of one step on this GPU.

        Without chunked prefill a step must hold the longest prompt.
        """
        if self.large is not None and visible_bytes >= 70 * GiB and "A100" not in gpu_name.upper():
            return self.large
        if self.chunks_above and max_context_tokens > 32_768:
            return self.max_sequences, self.chunks_above
        tokens = self.max_batched_tokens if self.chunked_prefill else max(self.max_batched_tokens, max_context_tokens)
        return self.max_sequences, tokens


# The older engine (V0). Until 0.6.2 it took what the driver reports as used, with the allocator's unused blocks.
_V0 = MemoryRule(
    non_torch_bytes=round(0.16 * GiB), small_non_torch_bytes=round(0.1 * GiB), pcie_bytes=round(0.15 * GiB),
    communication_bytes=(round(0.15 * GiB), round(0.15 * GiB)), swap_bytes=4 * GiB, spread=0.3, spread_bytes=GiB // 4,
)  # fmt: skip
_V0_RESERVED = replace(_V0, trial=TrialRun(counts_reserved=True), spread_bytes=GiB // 2)
# The first logs of V1 with all parts: 0.11.0 on H100; with tp=4, 1.84 GiB outside torch (0.10.2, Qwen3-Next, H100).
_V1 = MemoryRule(fitted_on=(f"{PLANNER}empirical-vllm-memory-results.md",))
# Version 0.17 samples with less memory: 5.64 GiB became 2.23 for Qwen3-14B. Least squares, 11 models without experts.
_V1_LEAN = replace(
    _V1, trial=TrialRun(sampler_bytes=14.34, workspace_bytes=round(0.073 * GiB), expert_workspace=True),
    fitted_on=(f"{PLANNER}accuracy/vllm-v0.19.0-accuracy-report.md",),
)  # fmt: skip
# From 0.18 on, reductions are fused with norms: 2.08 GiB outside torch with tp=2, 2.13 with tp=4, on H100.
_V1_FUSED = replace(
    _V1_LEAN, non_torch_bytes=round(0.25 * GiB), small_non_torch_bytes=round(0.15 * GiB),
    communication_bytes=(round(1.82 * GiB), round(1.89 * GiB)),
)  # fmt: skip

# Before 0.10 each query head of TensorRT-LLM reads the keys and values of its group, unless TRTLLM_ENABLE_XQA is set
# (docs/source/blogs/XQA-kernel.md: a Llama 70B then has 2.4 times the throughput). Attention copies and experts on
# their own GPUs came with 1.0.
_TENSORRT_LLM_GROUPED = Engine(
    "tensorrt-llm", "0.10", 64, 0.9, 256, 8192, chunked_prefill=False, memory=MemoryRule(covers="free"), axes=("pp",),
    weights=("bf16", "fp16", "fp8", "int8", "int8-wo", "int4"), kv=("bf16", "fp16", "fp8", "int8"),
)  # fmt: skip

# Pipeline stages came with 0.5.1, experts on their own GPUs and data-parallel attention with 0.8: an estimate, since no
# log or test of these versions was read. The axes of other engines are those of their documentation of November 2026.
_OLDEST = Engine("vllm", "0.2.5", 16, 0.9, 256, 2560, chunked_prefill=False, memory=_V0_RESERVED, axes=(),
                 weights=_UNTIL_0_5)  # fmt: skip
_OLDER = replace(_OLDEST, version="0.5.4", max_batched_tokens=2048, chunks_above=512, axes=("pp",), weights=_UNTIL_0_8)

ENGINES = (
    # Before 0.2.5 the memory of NCCL was not counted (pull request 2031).
    replace(
        _OLDEST, version="0.2",
        memory=replace(_V0_RESERVED, communication_bytes=(0, 0), pcie_bytes=0, counts_context=True),
    ),
    _OLDEST,
    # Long contexts are cut into chunks from 0.5.4 on (pull request 6666).
    _OLDER,
    # 0.6.3 and 0.6.4 subtract what lies outside torch twice (pull request 10511).
    replace(
        _OLDER, version="0.6.3", chunks_above=2048,
        memory=replace(_V0, non_torch_bytes=round(0.7 * GiB), small_non_torch_bytes=round(0.7 * GiB)),
    ),
    replace(_OLDER, version="0.6.5", chunks_above=2048, memory=_V0),
    Engine("vllm", "0.8", 16, 0.9, 256, 2048, large=(1024, 8192), memory=_V1),
    Engine("vllm", "0.17", 16, 0.9, 256, 2048, large=(1024, 8192), memory=_V1_LEAN),
    Engine("vllm", "0.18", 16, 0.9, 256, 2048, large=(1024, 8192), memory=_V1_FUSED),
    # From 0.21 on, an estimate of the graphs is subtracted, and the default fraction is 0.92 for it (pull request
    # 38284). Logs have 0.08 GiB for 12 graphs (Qwen2.5-7B), 0.52 for 86 (Qwen3-8B) and 0.76 for 102 (gemma-4-31B): 7
    # MiB each; 18.6 to 23.1 MiB where layers are recurrent (three logs of Qwen3.5).
    Engine(
        "vllm", "0.21", 16, 0.92, 256, 8192, large=(1024, 8192),
        memory=replace(
            _V1_FUSED, graphs="before", capture_bytes=(7 * MiB, 20 * MiB), spread=0.3, spread_bytes=GiB // 3,
            fitted_on=("https://github.com/LMCache/LMCache/issues/3430", "a public start-up log of August 2026"),
        ),
    ),
    Engine("sglang", "0.4", 1, 0.88, 256, 8192, memory=MemoryRule(covers="static")),
    replace(_TENSORRT_LLM_GROUPED, version="0.5", grouped_reads=False),
    _TENSORRT_LLM_GROUPED,
    Engine(
        # Data-parallel attention takes all GPUs of tensor parallelism (enable_attention_dp).
        "tensorrt-llm", "1.0", 32, 0.9, 256, 8192, memory=MemoryRule(covers="free"), apart=(("tp", "dp"),),
        weights=tuple(name for name in HUGGING_FACE if name != "fp32"), kv=("bf16", "fp16", "fp8"),
    ),
    Engine(
        "llama.cpp", "b4000", 1, 1.0, 1, 512, memory=MemoryRule(covers="none", trial=TrialRun(4), graph_bytes=0),
        axes=("pp",), apart=(("tp", "pp"),), weights=_GGML, kv=("bf16", "fp16", "fp32", "int8", "q8_0", "q4_0"),
    ),
)  # fmt: skip
"""Known engines; of one name, the later version stands later."""


def find_engine(name: str, version: str | None = None) -> Engine:
    """Return the record of this engine in this version, or in the latest one.

    Raises:
        LayoutError: no such engine, or a version before the first that is known.
    """
    known = [engine for engine in ENGINES if engine.name == name.lower()]
    if not known:
        names = sorted({engine.name for engine in ENGINES})
        raise LayoutError(f"unknown engine {name!r}", hint=did_you_mean(name, names, listed="known are "))
    if version is None:
        return known[-1]
    older = [engine for engine in known if _ordered(engine.version) <= _ordered(version)]
    if not older:
        raise LayoutError(
            f"{name} {version} is older than {known[0].version}, the first that is known",
            hint=f"name a version from {known[0].version} on",
        )
    return older[-1]


def _ordered(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing.

    >>> _ordered("0.6.4+PR"), _ordered("b4000")
    ((0, 6, 4), (4000,))
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])
