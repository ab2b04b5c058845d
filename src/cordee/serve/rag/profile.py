"""The profile of both stages on this machine, in about a minute, and what it is kept in.

Partitions are loaded out of no cache, searched for one query and for many; the engine answers with passages in its
prompt, alone and several at once, and its memory is taken with one slot and with more.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cordee.errors import InputError
from cordee.serve.policy.rag_forecast import RagProfile
from cordee.serve.rag.answer import Rag
from cordee.serve.rag.enforce import resident_bytes
from cordee.serve.rag.engine import OwnEngine
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.memory import Memory, Throttle
from cordee.serve.rag.partition import drop_pages
from cordee.serve.rag.setup import RagOptions, own_launch, planned, running
from cordee.serve.rag.workload import request
from cordee.storage.sealed import Damaged, seal, unseal

NAME = "profile.json"
LOADS, SEARCHES, QUERIES = 6, 3, 32
AT_ONCE = (1, 2, 4, 8)
ROUNDS = 3
"""Answers of each that runs at once; the median counts."""


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """The load that is profiled: the answers' length, and the passages of a prompt."""

    output_tokens: int = 64
    top: int = 5


def save(index: RagIndex, profile: RagProfile, options: RagOptions) -> Path:
    """Keep a profile beside its index."""
    body = {**asdict(profile), "generation_s": [*map(list, sorted(profile.generation_s.items()))]}
    path = index.folder / NAME
    path.write_bytes(seal({"profile": body, "generator": options.generator, "context": options.context}))
    return path


def load(folder: Path) -> RagProfile | None:
    """Return the profile of an index; None: it has none.

    Raises:
        InputError: it cannot be read.
    """
    try:
        body: dict[str, Any] = unseal((folder / NAME).read_bytes())["profile"]
    except FileNotFoundError:
        return None
    except Damaged as damage:
        raise InputError(f"{folder / NAME}: {damage}", hint="make it again: cordee rag profile") from damage
    table = {int(number): float(seconds) for number, seconds in body["generation_s"]}
    return RagProfile(**{**body, "generation_s": table, "search_s": tuple(body["search_s"])})


def measure(index: RagIndex, options: RagOptions, asked: ProfileLoad, say: Callable[[str], None]) -> RagProfile:
    """Measure both stages.

    Raises:
        InputError: the index has no partition.
    """
    if not index.catalog.partitions():
        raise InputError(f"{index.folder} has no documents", hint="add some: cordee rag add")
    say("loading and searching partitions")
    stages = retrieval(index, options.load_bytes_per_s)
    say("generating answers")
    return asyncio.run(_generation(index, options, asked, stages, say))


def retrieval(index: RagIndex, load_bytes_per_s: float | None = None) -> RagProfile:
    """Return a profile of loads and searches alone."""
    chosen = sorted(index.catalog.partitions(), key=lambda each: -each.size_bytes)[:LOADS]
    memory = Memory(index, sum(each.size_bytes for each in chosen), Throttle(load_bytes_per_s))
    dims = len(chosen[0].centroid)
    queries = np.random.default_rng(0).standard_normal((QUERIES, dims)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    rates, alone, many = list[float](), list[float](), list[float]()
    for each in chosen:
        drop_pages(index.path_of(each))
        began_s = time.monotonic()
        mapped = memory.load(each)
        rates.append(each.size_bytes / (time.monotonic() - began_s))
        mapped.search(queries[:1], 5)  # The first one also finds the pages.
        for size, into in ((1, alone), (QUERIES, many)):
            for _ in range(SEARCHES):
                began_s = time.monotonic()
                mapped.search(queries[:size], 5)
                into.append(time.monotonic() - began_s)
        mapped.close()
    began_s = time.monotonic()
    index.embedder.embed(["how long does one question take?"])
    embed_s = time.monotonic() - began_s
    more_s = max(0.0, (median(many) - median(alone)) / (QUERIES - 1))
    return RagProfile(median(rates), 0.0, (median(alone), more_s), {1: 1.0}, embed_s, process_bytes=resident_bytes())


async def _generation(
    index: RagIndex, options: RagOptions, asked: ProfileLoad, stages: RagProfile, say: Callable[[str], None]
) -> RagProfile:
    engine, slot = await _memory(options, say)
    most = max(AT_ONCE) if options.slots is None else options.slots
    largest = max(each.size_bytes for each in index.catalog.partitions())
    fixed = replace(options, slots=most, memory_bytes=None, enforce=False)
    plan = replace(planned(fixed, index, None), slots=most, partition_bytes=2 * largest)
    async with running(index, fixed, plan, None, "profile", lambda *change: None) as rag:
        table = {}
        for number in [each for each in AT_ONCE if each <= most]:
            say(f"generating {number} answers at once")
            table[number] = await generation_s(rag, number, asked)
    return replace(stages, generation_s=table, engine_bytes=engine, slot_bytes=slot)


async def generation_s(rag: Rag, at_once: int, load: ProfileLoad, questions: Sequence[str] = ()) -> float:
    """Return the seconds of one answer when so many run at once, each with other passages in its prompt."""
    found = questions or [f"question {at_once} {number}" for number in range(at_once * ROUNDS)]
    rag.generator.turnstile.allow(at_once)
    asked = [request(each, load.output_tokens, load.top) for each in found]
    for each in asked:
        await rag.look_up(each)

    async def one(number: int) -> list[float]:
        times = []
        for each in asked[number::at_once]:
            async for _ in rag.stream(each):
                pass
            times.append(each.generation_s)
        return times

    if at_once == 1:
        async for _ in rag.stream(request("warm up", load.output_tokens, 0)):
            pass
    times = await asyncio.gather(*(one(number) for number in range(at_once)))
    return median(sum(each) / len(each) for each in times)


async def _memory(options: RagOptions, say: Callable[[str], None]) -> tuple[int, int]:
    """Return the memory of our own engine without KV cache, and that of one slot; 0, 0 if it is somebody's."""
    launch = own_launch(options, "profile")
    if launch is None:
        return 0, 0
    sizes: Mapping[int, int] = {}
    for slots in (1, 4):
        say(f"starting the engine with {slots} slots")
        own = OwnEngine(launch, slots, None, lambda *change: None)
        await own.start()
        sizes = {**sizes, slots: resident_bytes(own.pid)}
        await asyncio.to_thread(own.end)
    slot = max(0, (sizes[4] - sizes[1]) // 3)
    weights = Path(launch.model).stat().st_size if Path(launch.model).is_file() else 0
    return max(0, sizes[1] - slot) + weights, slot
