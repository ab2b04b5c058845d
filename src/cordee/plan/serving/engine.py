"""Engines and their versions as records: defaults, block size, and the memory that they hold beside weights and KV.

The constants of `MemoryRule` are what the logs of engines say; benchmarks/results/serving_accuracy_kv_202611.md has the
measurements, and what each constant misses by.
"""

import difflib
import re
from dataclasses import dataclass, field
from typing import Literal

from cordee.errors import LayoutError
from cordee.units import GiB


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """The parts of a GPU's memory that an engine counts, and their sizes.

    Attributes:
        covers: what `memory_fraction` is a part of and covers: "all" of the GPU's memory, for everything; "static":
            of the memory that is free before the weights, for weights and KV alone; "free": of the memory that is
            free after the weights and a trial run, for KV alone; "none": the cache is as large as the user says.
        sampler_bytes: bytes for each sequence and vocabulary entry in the trial run of the sampler.
        workspace_bytes: of libraries, allocated by torch in the trial run.
        non_torch_bytes: of modules and library handles, outside torch's allocator, without the CUDA context.
        communication_bytes: of NCCL and custom reductions, from two GPUs on.
        counts_context: the CUDA context counts as used.
        graphs: "after": graphs are captured from what the fraction leaves; "before": their estimate is subtracted.
        graph_bytes: of all captured graphs.
        swap_bytes: of pinned host memory for swapped KV blocks.
        spread: half of the interval of the parts that a version changes, as a part of them.
        spread_bytes: the same for what is not modelled.
    """

    covers: Literal["all", "static", "free", "none"] = "all"
    sampler_bytes: float = 38.0
    workspace_bytes: int = round(0.044 * GiB)
    non_torch_bytes: int = round(0.13 * GiB)
    communication_bytes: int = round(0.41 * GiB)
    counts_context: bool = False
    graphs: Literal["before", "after"] = "after"
    graph_bytes: int = round(0.5 * GiB)
    swap_bytes: int = 0
    spread: float = 0.25
    spread_bytes: int = round(0.15 * GiB)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine in one range of versions.

    Attributes:
        name: vllm, sglang, tensorrt-llm or llama.cpp.
        version: the first version that behaves so.
        block_tokens: tokens of one KV block.
        memory_fraction: default part of the GPU's memory that the engine may use.
        max_sequences: default number of sequences at once.
        max_batched_tokens: default number of tokens of one step.
        large: both defaults on a GPU of 70 GiB and more that is no A100, where they differ.
        chunked_prefill: prompts are cut so that a step holds at most `max_batched_tokens`.
        memory: what it holds beside weights and KV.
    """

    name: str
    version: str
    block_tokens: int
    memory_fraction: float
    max_sequences: int
    max_batched_tokens: int
    large: tuple[int, int] | None = None
    chunked_prefill: bool = True
    memory: MemoryRule = field(default_factory=MemoryRule)

    def limits(self, gpu_name: str, visible_bytes: int, max_context_tokens: int) -> tuple[int, int]:
        """Return the default sequences at once and tokens of one step on this GPU.

        Without chunked prefill a step must hold the longest prompt.
        """
        if self.large is not None and visible_bytes >= 70 * GiB and "A100" not in gpu_name.upper():
            return self.large
        tokens = self.max_batched_tokens if self.chunked_prefill else max(self.max_batched_tokens, max_context_tokens)
        return self.max_sequences, tokens


_VLLM_V1 = {"block_tokens": 16, "memory_fraction": 0.9, "max_sequences": 256, "max_batched_tokens": 2048}

ENGINES = (
    # Before 0.2.5 the memory of NCCL was not counted (pull request 2031).
    Engine(
        "vllm", "0.2", 16, 0.9, 256, 2560, chunked_prefill=False,
        memory=MemoryRule(communication_bytes=0, counts_context=True, swap_bytes=4 * GiB, spread_bytes=GiB // 2),
    ),
    Engine(
        "vllm", "0.2.5", 16, 0.9, 256, 2560, chunked_prefill=False,
        memory=MemoryRule(counts_context=True, swap_bytes=4 * GiB, spread_bytes=GiB // 2),
    ),
    Engine(
        "vllm", "0.6.5", 16, 0.9, 256, 2048, chunked_prefill=False,
        memory=MemoryRule(non_torch_bytes=round(0.35 * GiB), swap_bytes=4 * GiB, spread_bytes=GiB // 2),
    ),
    Engine("vllm", "0.8", 16, 0.9, 256, 2048, large=(1024, 8192)),
    Engine("vllm", "0.21", 16, 0.9, 256, 2048, large=(1024, 8192), memory=MemoryRule(graphs="before")),
    Engine("sglang", "0.4", 1, 0.88, 256, 8192, memory=MemoryRule(covers="static")),
    Engine("tensorrt-llm", "1.0", 32, 0.9, 256, 8192, memory=MemoryRule(covers="free")),
    Engine("llama.cpp", "b4000", 1, 1.0, 1, 512, memory=MemoryRule(covers="none", sampler_bytes=4, graph_bytes=0)),
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
        near = difflib.get_close_matches(name.lower(), names, n=1)
        did_you_mean = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"unknown engine {name!r}", hint=f"{did_you_mean}known are {', '.join(names)}")
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
