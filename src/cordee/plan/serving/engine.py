"""Engines and their versions as records: defaults, block size, and the memory that they hold beside weights and KV."""

from dataclasses import dataclass


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
        chunked_prefill: prompts are cut so that a step holds at most `max_batched_tokens`.
    """

    name: str
    version: str
    block_tokens: int
    memory_fraction: float
    max_sequences: int
    max_batched_tokens: int
    chunked_prefill: bool = True
