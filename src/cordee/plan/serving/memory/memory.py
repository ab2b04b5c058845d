"""Memory of one replica: what lies on its fullest GPU, what is left for the KV cache, and how far that goes.

Nothing here is a run's measurement: bytes of weights and KV follow from the shape, the rest from the engine's rule.
"""

import math
from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.layouts import undivided
from cordee.plan.serving.memory.activations import activation_bytes, has_fast_links
from cordee.plan.serving.memory.graphs import graph_bytes
from cordee.plan.serving.memory.kv import is_linear, kv_bytes, kv_bytes_per_token
from cordee.plan.serving.memory.visible import case_visible_bytes
from cordee.plan.serving.memory.weights import weights_bytes
from cordee.units import GiB, format_gb

ENCODER_SPREAD_BYTES = round(0.7 * GiB)  # a vision encoder's own forward pass is not modelled
CONTEXT_BYTES = round(0.5 * GiB)  # of CUDA itself, on each GPU that a process uses


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """One GPU of the pipeline stage that has room for the fewest tokens.

    Attributes:
        weights_bytes: with the table of rotary positions and a draft model.
        activation_bytes: peak of the trial run.
        graph_bytes: CUDA graphs, whether or not the engine subtracts them before it sizes the cache.
        context_bytes: the CUDA context, modules and library handles.
        communication_bytes: NCCL and custom reductions.
        pinned_host_bytes: page-locked memory of the host, for one GPU.
        kv_bytes: left for the KV cache; negative where the rest exceeds what the engine may use.
        kv_low_bytes: the lower end of the interval of `kv_bytes`, with `kv_high_bytes` its upper end.
        block_bytes: one block in all layers of the stage.
    """

    case: ServingCase
    stage: int
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    context_bytes: int
    communication_bytes: int
    pinned_host_bytes: int
    kv_bytes: int
    kv_low_bytes: int
    kv_high_bytes: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks of the cache on each GPU."""
        return max(0, self.kv_bytes) // self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the replica's cache holds: whole blocks, or full-length sequences where layers differ."""
        return self.tokens_in(self.kv_bytes)

    @property
    def kv_tokens_interval(self) -> tuple[int, int]:
        """The interval of `kv_tokens`."""
        return self.tokens_in(self.kv_low_bytes), self.tokens_in(self.kv_high_bytes)

    def tokens_in(self, size_bytes: int) -> int:
        """Return the tokens of the replica for a cache of this size on each GPU."""
        case, size = self.case, max(0, size_bytes)
        if is_linear(case.shape):
            return size // self.block_bytes * case.engine.block_tokens * case.layout.dp
        longest = case.max_context_tokens
        return int(size / kv_bytes(case, longest, self.stage) * longest) * case.layout.dp

    def sequences(self, length_tokens: int) -> int:
        """Return how many sequences of this length the cache holds concurrently, in whole blocks."""
        one = kv_bytes(self.case, max(1, length_tokens), self.stage)
        return max(0, self.kv_bytes) // one * self.case.layout.dp

    @property
    def longest_context_tokens(self) -> int:
        """The longest sequence that the cache holds alone, in whole blocks."""
        block, low, high = self.case.engine.block_tokens, 0, 1
        while kv_bytes(self.case, high * block, self.stage) <= self.kv_bytes and high * block < 1 << 40:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._holds(middle * block) else (low, middle)
        return low * block

    def _holds(self, tokens: int) -> bool:
        return kv_bytes(self.case, tokens, self.stage) <= self.kv_bytes

    @property
    def starts(self) -> bool:
        """Return whether the engine finds room for at least one block."""
        return self.kv_bytes >= self.block_bytes

    @property
    def fits(self) -> bool:
        """Return whether the engine starts and one sequence of the longest context has room."""
        return self.starts and self._holds(self.case.max_context_tokens)

    @property
    def refusal(self) -> str | None:
        """Return why the engine will not start, with the numbers; None if it starts."""
        if self.fits:
            return None
        left = format_gb(self.kv_bytes)
        if not self.starts:
            weights, trial = format_gb(self.weights_bytes), format_gb(self.activation_bytes)
            return f"{weights} of weights and {trial} of the trial run leave {left} for the KV cache"
        longest = self.case.max_context_tokens
        one = format_gb(kv_bytes(self.case, longest, self.stage))
        return (
            f"a sequence of {longest:,} tokens takes {one} of KV cache, but {left} are left: "
            f"{self.longest_context_tokens:,} tokens"
        )

    @property
    def last_block_waste(self) -> float:
        """The mean fraction of the cache that last blocks leave empty, for sequences of the longest context."""
        block = self.case.engine.block_tokens
        return (block - 1) / 2 / max(block, self.case.max_context_tokens)


def memory(case: ServingCase) -> ServingMemory:
    """Return the memory of the replica's GPU that has room for the fewest tokens.

    Raises:
        LayoutError: tp does not divide the heads, or there are more stages than layers.
    """
    broken = undivided(case.layout, case.shape)
    if broken is not None:
        raise LayoutError(broken[0], hint=broken[1])
    stages = [_stage(case, stage) for stage in range(case.layout.pp)]
    return min(stages, key=lambda each: each.kv_bytes / each.block_bytes)


def _stage(case: ServingCase, stage: int) -> ServingMemory:
    rule = case.engine.memory
    total = case_visible_bytes(case)
    weights = weights_bytes(case, stage) + case.draft_weights_bytes
    activations = activation_bytes(case)
    graphs = graph_bytes(case)
    communication = _communication_bytes(case)
    non_torch = rule.non_torch_bytes if has_fast_links(case.gpu) else rule.small_non_torch_bytes
    others = activations + non_torch + communication
    if rule.covers == "all":
        others += CONTEXT_BYTES * rule.counts_context + graphs * (rule.graphs == "before")
        left = case.memory_fraction * total - weights - others
    elif rule.covers == "static":
        left = case.memory_fraction * (total - CONTEXT_BYTES - communication) - weights
        others = non_torch + communication
    elif rule.covers == "free":
        left = case.memory_fraction * (total - CONTEXT_BYTES - weights - others)
    else:
        left = total - CONTEXT_BYTES - weights - others
    spread = rule.spread * others + rule.spread_bytes + ENCODER_SPREAD_BYTES * (case.shape.encoder > 0)
    spread += case.weights.spread * weights
    return ServingMemory(
        case=case,
        stage=stage,
        weights_bytes=weights,
        activation_bytes=activations,
        graph_bytes=graphs,
        context_bytes=CONTEXT_BYTES + non_torch,
        communication_bytes=communication,
        pinned_host_bytes=pinned_host_bytes(case),
        kv_bytes=math.floor(left),
        kv_low_bytes=math.floor(left - spread),
        kv_high_bytes=math.floor(left + spread),
        block_bytes=max(1, kv_bytes_per_token(case, stage) * case.engine.block_tokens),
    )


def _communication_bytes(case: ServingCase) -> int:
    """Return the bytes of NCCL and of reductions; a pipeline's sends take too little to show in engines' logs."""
    rule, ranks = case.engine.memory, case.layout.tp * case.layout.dp
    if ranks == 1:
        return 0
    return rule.communication_bytes[ranks > 2] if case.gpu.link.startswith("NVLink") else rule.pcie_bytes


def pinned_bytes(size_bytes: int) -> int:
    """Return what torch's pinned allocator takes for one tensor: the next power of two (CachingHostAllocator).

    >>> pinned_bytes(5 * 2**30) == 8 * 2**30
    True
    """
    return 1 << max(0, size_bytes - 1).bit_length() if size_bytes else 0


def pinned_host_bytes(case: ServingCase) -> int:
    """Return the page-locked bytes of one GPU's process: the step's inputs, and the swap space of each layer."""
    blocks = math.ceil(case.max_context_tokens / case.engine.block_tokens)
    inputs = (4 * case.max_sequences * blocks, 4 * case.max_batched_tokens, 8 * case.max_batched_tokens)
    layers = max(1, case.shape.layers // case.layout.pp)
    return sum(map(pinned_bytes, inputs)) + layers * pinned_bytes(case.engine.memory.swap_bytes // layers)


def engine_log(memory: ServingMemory) -> tuple[str, ...]:
    """Return the lines on memory that vLLM will print when it starts, in its units; none for another engine."""
    case = memory.case
    if case.engine.name != "vllm":
        return ()
    tokens = memory.kv_tokens // case.layout.dp
    concurrency = tokens / case.max_context_tokens
    lines = [f"Model loading took {memory.weights_bytes / GiB:.2f} GiB"]
    swapped = case.engine.memory.swap_bytes
    if swapped:  # The older engine logs blocks.
        lines.append(f"# GPU blocks: {memory.blocks}, # CPU blocks: {swapped // memory.block_bytes}")
    else:
        lines.append(f"Available KV cache memory: {memory.kv_bytes / GiB:.2f} GiB")
        # Where layers keep different numbers of tokens, its figure is that of one group of layers.
        lines += [f"GPU KV cache size: {tokens:,} tokens"] if is_linear(case.shape) else []
    return (*lines, f"Maximum concurrency for {case.max_context_tokens:,} tokens per request: {concurrency:.2f}x")
