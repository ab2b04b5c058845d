"""A tiny model with random weights as GGUF, and llama.cpp as a server in this process: CPU time by requests at once.

Needs the packages `gguf` and `xllamacpp`.
"""

import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cordee.workload.model import ModelShape

SHAPE = ModelShape(
    name="tiny-5m", family="llama", layers=6, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=2048,
    positions=4096, tied=True,
)  # fmt: skip
SEED = 7


def write_gguf(path: Path, shape: ModelShape = SHAPE, kind: str = "F32") -> None:
    """Write the shape with random weights in this GGML type; the vocabulary is made of names that mean nothing."""
    import gguf

    rng = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(shape.name)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(code) for code in range(33, 127)]
    names = ["<end>", *letters, *(f"{letters[i % 94]}{letters[i // 94]}" for i in range(shape.vocab - 95))]
    writer.add_token_list(names)
    writer.add_token_types([3] + [1] * (shape.vocab - 1))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    quantised = None if kind == "F32" else gguf.GGMLQuantizationType[kind]

    def add(name: str, *dims: int, scale: float = 0.02) -> None:
        values = (rng.standard_normal(dims) * scale).astype(np.float32)
        if quantised is None or len(dims) == 1:
            writer.add_tensor(name, values if len(dims) > 1 else np.ones(dims, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)

    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    add("token_embd.weight", shape.vocab, shape.hidden, scale=1.0)
    add("output_norm.weight", shape.hidden)
    for layer in range(shape.layers):
        add(f"blk.{layer}.attn_norm.weight", shape.hidden)
        add(f"blk.{layer}.attn_q.weight", heads, shape.hidden)
        add(f"blk.{layer}.attn_k.weight", kv, shape.hidden)
        add(f"blk.{layer}.attn_v.weight", kv, shape.hidden)
        add(f"blk.{layer}.attn_output.weight", shape.hidden, heads)
        add(f"blk.{layer}.ffn_norm.weight", shape.hidden)
        add(f"blk.{layer}.ffn_gate.weight", shape.ffn, shape.hidden)
        add(f"blk.{layer}.ffn_up.weight", shape.ffn, shape.hidden)
        add(f"blk.{layer}.ffn_down.weight", shape.hidden, shape.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Load:
    """So many requests at once, each of so many tokens, and the CPU seconds of them all."""

    at_once: int
    requests: int
    input_tokens: int
    output_tokens: int
    cpu_s: float

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens of answers a CPU-second."""
        return self.requests * self.output_tokens / self.cpu_s


class Llama:
    """One llama.cpp server on one thread, with as many slots as requests may run at once."""

    def __init__(self, path: Path, *, slots: int, slot_tokens: int, saved: Path | None = None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = slots * slot_tokens
        params.n_parallel = slots
        params.n_batch = params.n_ubatch = 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_threads_http = 2
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.warmup = False
        params.cache_ram_mib = 0
        params.verbosity = -1
        if saved is not None:
            params.slot_save_path = f"{saved}/"
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.slots = slots
        self._server = xllamacpp.Server(params)
        self._random = random.Random(SEED)

    def draw(self, tokens: int) -> list[int]:
        """Return a random prompt."""
        return [self._random.randrange(100, 2000) for _ in range(tokens)]

    def complete(self, prompt: list[int], output_tokens: int, *, cached: bool = False) -> dict[str, Any]:
        """Answer one request, with the KV cache that its slot still has if `cached`."""
        asked = {
            "prompt": prompt, "n_predict": output_tokens, "ignore_eos": True, "cache_prompt": cached,
            "temperature": 0.0, "samplers": ["temperature"],
        }  # fmt: skip
        answers: list[Any] = []
        self._server.handle_completions(json.dumps(asked), answers.append)
        last = answers[-1]
        return dict(json.loads(last) if isinstance(last, str | bytes) else last)

    def slot(self, action: str, name: str) -> None:
        """Save the only slot's KV cache to a file, or restore it."""
        body = json.dumps({"filename": name}).encode()
        url = f"{self._server.listening_address}/slots/0?action={action}"
        asked = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            answer.read()

    def load(self, requests: int, input_tokens: int, output_tokens: int) -> Load:
        """Return the CPU time of requests that are all sent at the start, so that no slot waits for a client."""
        prompts = [self.draw(input_tokens) for _ in range(requests)]
        with ThreadPoolExecutor(requests) as clients:
            began = time.process_time()
            done = list(clients.map(lambda prompt: self.complete(prompt, output_tokens), prompts))
            cpu_s = time.process_time() - began
        generated = {int(each["usage"]["completion_tokens"]) for each in done}
        assert generated == {output_tokens}, f"asked for {output_tokens} tokens, got {generated}"
        return Load(self.slots, requests, input_tokens, output_tokens, cpu_s)
