"""The profile of both stages on this machine, in about a minute, and what it is kept in.

Partitions are loaded out of no cache, searched for one query and for many; the engine answers with passages in its
prompt, alone and several at once, and its memory is taken with one slot and with more.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cordee.errors import InputError
from cordee.serve.engines.port import EngineLaunch
from cordee.serve.policy.rag_forecast import RagProfile
from cordee.serve.rag.answer import Rag
from cordee.serve.rag.enforce import resident_bytes
from cordee.serve.rag.engine import OwnEngine
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.memory import Memory, Throttle
from cordee.serve.rag.partition import drop_pages
from cordee.serve.rag.setup import RagOptions, own_launch, planned, running, slot_bytes
from cordee.serve.rag.workload import request
from cordee.storage.sealed import Damaged, seal, unseal
from cordee.telemetry.host import cpu_milli
from cordee.units import plural

NAME = "profile.json"
LOADS, QUERIES = 6, 8
AT_ONCE = (1, 2, 4, 8)
ROUNDS, LEAST_S, PROMPTS = 3, 2.0, 8
"""Answers of each that runs at once, the time that they take together, at least, and the prompts that it has."""


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """The load that is profiled: the answers' length, and the passages of a prompt."""

    output_tokens: int = 64
    top: int = 5


def save(index: RagIndex, profile: RagProfile, options: RagOptions) -> Path:
    """Keep a profile beside its index."""
    body = {**asdict(profile), "generation_s": [*map(list, sorted(profile.generation_s.items()))]}
    path = index.folder / NAME
    path.write_bytes(seal({"profile": body, "generator": _full(options.generator)}))
    return path


def load(folder: Path, generator: str) -> RagProfile | None:
    """Return the profile of an index with this generator; None: it has none.

    Raises:
        InputError: it cannot be read.
    """
    path = folder / NAME
    try:
        found = unseal(path.read_bytes())
        if found["generator"] != _full(generator):
            return None
        body: dict[str, Any] = found["profile"]
        table = {int(number): float(seconds) for number, seconds in body["generation_s"]}
        return RagProfile(**{**body, "generation_s": table, "search_s": tuple(body["search_s"])})
    except FileNotFoundError:
        return None
    except Damaged as damage:
        raise InputError(f"{path}: {damage}", hint="make it again: cordee rag profile") from damage
    except (KeyError, TypeError, ValueError) as error:
        hint = "make it again: cordee rag profile"
        raise InputError(f"{path} is the profile of another version of cordee", hint=hint) from error


def _full(generator: str) -> str:
    return generator if "://" in generator else str(Path(generator).expanduser().resolve())


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
    """Return a profile of loads and searches alone.

    A search counts as it is in the pipeline: the first one after a load, which also maps the pages.
    """
    chosen = sorted(index.catalog.partitions(), key=lambda each: -each.size_bytes)[:LOADS]
    memory = Memory(index, sum(each.size_bytes for each in chosen), Throttle(load_bytes_per_s))
    dims = len(chosen[0].centroid)
    queries = np.random.default_rng(0).standard_normal((QUERIES, dims)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    rates, cores = list[float](), list[float]()
    searches: dict[int, list[float]] = {1: [], QUERIES: []}
    for each, size in product(chosen, searches):
        drop_pages(index.path_of(each))
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        mapped = memory.load(each)
        took_s = time.monotonic() - began_s
        rates.append(each.size_bytes / took_s)
        cores.append((time.thread_time() - began_cpu_s) / took_s)
        began_s = time.monotonic()
        mapped.search(queries[:size], 5)
        searches[size].append(time.monotonic() - began_s)
        mapped.close()
    index.embed(["the first question of all"])
    began_s = time.monotonic()
    index.embed(["how long does one question take?"])
    embed_s = time.monotonic() - began_s
    one_s, all_s = median(searches[1]), median(searches[QUERIES])
    return RagProfile(
        median(rates), (one_s, max(0.0, (all_s - one_s) / (QUERIES - 1))), {1: 1.0}, embed_s, cpu_milli() / 1000,
        min(1.0, median(cores)), process_bytes=resident_bytes(),
    )  # fmt: skip


def sample(index: RagIndex, number: int) -> list[str]:
    """Return texts of the index, evenly from all over it."""
    last = index.catalog.next_chunk() - 1
    ids = [1 + (each * 7919) % last for each in range(number)]
    found = index.catalog.passages(ids)
    texts = [found[id_].text for id_ in ids if id_ in found] or ["anything"]
    return [texts[at % len(texts)] for at in range(number)]


async def _generation(
    index: RagIndex, options: RagOptions, asked: ProfileLoad, stages: RagProfile, say: Callable[[str], None]
) -> RagProfile:
    engine, slot = await _memory(options, say)
    most = max(AT_ONCE) if options.slots is None else options.slots
    largest = max(each.size_bytes for each in index.catalog.partitions())
    fixed = replace(options, slots=most, memory_bytes=None, enforce=False)
    plan = replace(planned(fixed, index, None), slots=most, partition_bytes=2 * largest)
    async with running(index, fixed, plan, None, "profile", lambda *change: None) as rag:
        table, cores = await generation(rag, [each for each in AT_ONCE if each <= most], asked, say)
    return replace(stages, generation_s=table, engine_cores=cores, engine_bytes=engine, slot_bytes=slot)


async def generation(
    rag: Rag, numbers: Sequence[int], load: ProfileLoad, say: Callable[[str], None]
) -> tuple[dict[int, float], float]:
    """Return the seconds of an answer by the number at once, and the cores that the engine and we use meanwhile."""
    table, began_s, began_cpu_s = {}, time.monotonic(), rag.generator.cpu_s()
    for number in numbers:
        say(f"generating {plural(number, 'answer')} at once")
        table[number] = await generation_s(rag, number, load)
    return table, (rag.generator.cpu_s() - began_cpu_s) / (time.monotonic() - began_s)


async def generation_s(rag: Rag, at_once: int, load: ProfileLoad) -> float:
    """Return the seconds of one answer when so many run at once.

    The questions are texts from all over the index, so that each prompt has other passages: one that begins like the
    last one is not computed again.
    """
    rag.generator.turnstile.allow(at_once)
    asked = [request(each, load.output_tokens, load.top) for each in sample(rag.index, at_once * PROMPTS)]
    await asyncio.gather(*(rag.look_up(each) for each in asked))

    async def one(number: int) -> float:
        times = list[float]()
        for each in cycle(asked[number::at_once]):
            async for _ in rag.stream(each):
                pass
            times.append(each.generation_s)
            if len(times) >= ROUNDS and sum(times) >= LEAST_S:
                break
        return sum(times) / len(times)

    if at_once == 1:
        async for _ in rag.stream(request("warm up", load.output_tokens, 0)):
            pass
    return median(await asyncio.gather(*(one(number) for number in range(at_once))))


async def _memory(options: RagOptions, say: Callable[[str], None]) -> tuple[int, int]:
    """Return the memory of our own engine without KV cache, and that of one slot; 0, 0 if it is somebody's.

    The planner knows a slot's cache from the shape of the model; where it does not know that, four slots are measured.
    """
    launch = own_launch(options, "profile")
    if launch is None:
        return 0, 0
    weights = Path(launch.model).stat().st_size if Path(launch.model).is_file() else 0
    one, slot = await _resident(launch, 1, say), slot_bytes(launch)
    if slot is None:
        slot = max(0, (await _resident(launch, 4, say) - one) // 3)
    return max(0, one - slot) + weights, slot


async def _resident(launch: EngineLaunch, slots: int, say: Callable[[str], None]) -> int:
    say(f"starting the engine with {plural(slots, 'slot')}")
    own = OwnEngine(launch, slots, None, lambda *change: None)
    await own.start()
    try:
        return resident_bytes(own.pid)
    finally:
        await asyncio.to_thread(own.end)
