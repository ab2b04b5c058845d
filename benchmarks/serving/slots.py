"""KV offload on this machine: llama.cpp's slot files through a reader of limited bandwidth, against a new prefill."""

import time
from dataclasses import dataclass
from pathlib import Path

from serving.llama import Llama

CHUNK_BYTES = 64 * 1024
STEPS = 8


@dataclass(frozen=True)
class Crossing:
    """One length: seconds of both ways, and the bandwidth at which they take as long.

    Times are CPU seconds, but for the reader's, which sleeps: there it is the clock's.
    """

    tokens: int
    file_bytes: int
    recompute_s: float
    restore_s: float
    bytes_per_s: float
    same_answer: bool


def read_limited(path: Path, to: Path, bytes_per_s: float) -> float:
    """Copy a file at no more than a bandwidth (a token bucket of one chunk); return the seconds it took."""
    began_s = time.monotonic()
    moved = 0
    with path.open("rb") as source, to.open("wb") as sink:
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            moved += len(chunk)
            early_s = moved / bytes_per_s - (time.monotonic() - began_s)
            if early_s > 0:
                time.sleep(early_s)
    return time.monotonic() - began_s


def crossing(model: Path, folder: Path, tokens: int) -> Crossing:
    """Find the bandwidth at which restoring a prompt of so many tokens takes as long as computing it."""
    folder.mkdir(exist_ok=True)
    llama = Llama(model, slots=1, slot_tokens=tokens + 64, saved=folder)
    prompt, other = llama.draw(tokens), llama.draw(16)
    llama.complete(llama.draw(tokens), 1)
    plain = [_cpu_s(llama, prompt, cached=False) for _ in range(3)]
    expected = llama.complete(prompt, 8)["choices"][0]["text"]
    llama.complete(prompt, 1, cached=True)
    llama.slot("save", "far")
    far, near = folder / "far", folder / "near"
    recompute_s, size = min(plain), far.stat().st_size

    def restored_s(bytes_per_s: float) -> tuple[float, float]:
        llama.complete(other, 1)
        read_s = read_limited(far, near, bytes_per_s)
        began_s = time.process_time()
        llama.slot("restore", "near")
        load_s = time.process_time() - began_s
        return read_s + load_s + _cpu_s(llama, prompt, cached=True), load_s

    low, high = (size / recompute_s * factor for factor in (0.25, 4.0))
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        took_s, load_s = restored_s(middle)
        low, high = (middle, high) if took_s > recompute_s else (low, middle)
    same = llama.complete(prompt, 8, cached=True)["choices"][0]["text"] == expected
    return Crossing(tokens, size, recompute_s, load_s, (low * high) ** 0.5, same)


def _cpu_s(llama: Llama, prompt: list[int], *, cached: bool) -> float:
    began_s = time.process_time()
    answer = llama.complete(prompt, 1, cached=cached)
    computed = answer["timings"]["prompt_n"]
    assert computed == (1 if cached else len(prompt)), f"{computed} tokens of the prompt were computed"
    return time.process_time() - began_s
