"""A knowledge base with its engine, made from options: what lies where in memory, and what keeps it there."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cordee.errors import CatalogueError, DoesNotFitError, InputError, ShapeError
from cordee.events import RagChanged
from cordee.ids import JobId
from cordee.plan.serving.flags import asked_settings
from cordee.plan.serving.formats import KV, find_format
from cordee.plan.serving.memory.kv import sequence_bytes
from cordee.serve.engines.gguf_file import read_shape
from cordee.serve.engines.port import EngineLaunch
from cordee.serve.models import find_model
from cordee.serve.policy.rag_forecast import MemoryPlan, RagProfile, even_arrivals, plan_memory
from cordee.serve.policy.retrieval import RetrievalRules
from cordee.serve.rag.answer import Rag
from cordee.serve.rag.enforce import HEADROOM, available_bytes, limit_cgroup, limit_data, resident_bytes
from cordee.serve.rag.engine import EngineAddress, Generator, OwnEngine
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.retrieval import Retrieval, RetrievalSettings, Say
from cordee.telemetry.stream import StreamWriter
from cordee.units import MiB, format_bytes
from cordee.workload.load import load_shape
from cordee.workload.service import ReplicaSettings

SLOTS, CONTEXT = 4, 4_096
PLANNED_RATE_PER_S, PLANNED_REQUESTS = 1.0, 60
UNPLANNED_BYTES = 256 * MiB
"""Memory of an engine beside weights and KV cache, where no profile says it."""
_SPARE_BYTES = 256 * MiB  # anonymous memory of our own process for what is not planned: requests, texts, vectors


@dataclass(frozen=True, slots=True)
class RagOptions:
    """The options of a knowledge base that is served.

    Attributes:
        generator: a .gguf file or a folder, for an engine of our own; or the URL of an OpenAI API, `#MODEL` behind it.
        memory_bytes: of the engine, its KV cache, our process and the partitions together; None: half of what is free.
        probes: partitions of each query; None: all.
        slots: of an engine of our own; None: as planned.
        context: tokens of each slot.
        load_bytes_per_s: limit of reading partitions; None: none.
        rate_per_s: requests a second for which memory is planned.
        flags: of an engine of our own.
        enforce: let the system keep the limit.
    """

    generator: str
    memory_bytes: int | None = None
    probes: int | None = None
    slots: int | None = None
    context: int = CONTEXT
    load_bytes_per_s: float | None = None
    rate_per_s: float = PLANNED_RATE_PER_S
    flags: dict[str, str | int] = field(default_factory=dict)
    enforce: bool = True
    rules: RetrievalRules = field(default_factory=RetrievalRules)


class Changes:
    """Every change with its reason: in the log of the index, in the replica's spool, and for whoever listens."""

    def __init__(self, folder: Path, heard: Callable[[RagChanged], object] = lambda event: None) -> None:
        spool, self._rank = os.environ.get("CORDEE_SPOOL"), int(os.environ.get("RANK") or 0)
        paths = [folder / "events.jsonl", *([Path(spool) / f"rank{self._rank}-rag.jsonl"] if spool else [])]
        self._writers = [StreamWriter(path) for path in paths if os.access(path.parent, os.W_OK)]
        self._heard = heard

    def __call__(self, what: str, before: int | None, after: int | None, why: str) -> None:
        """Take down a change."""
        event = RagChanged(
            at_us=time.time_ns() // 1000, job_id=JobId(os.environ.get("CORDEE_JOB", "")),
            epoch=int(os.environ.get("CORDEE_EPOCH") or 0), rank=self._rank, what=what, before=before, after=after,
            why=why,
        )  # fmt: skip
        for each in self._writers:
            each.append(event)
        self._heard(event)


def own_launch(options: RagOptions, name: str) -> EngineLaunch | None:
    """Return how our own engine is started; None: the generator is somebody's.

    Raises:
        InputError: there is no such model.
    """
    if options.generator.startswith(("http://", "https://")):
        return None
    settings = ReplicaSettings(service=name, revision=1, engine="llama.cpp", model=options.generator)
    return EngineLaunch(
        model=find_model(settings).path, served_names=(name,), host="127.0.0.1", port=0, context=options.context,
        flags=dict(options.flags), host_cache_bytes=0,
    )  # fmt: skip


def slot_bytes(launch: EngineLaunch) -> int | None:
    """Return the KV cache of one slot by the planner's model of it; None: the model's family is not known to it."""
    path = Path(launch.model)
    try:
        shape = read_shape(path) if path.suffix == ".gguf" else load_shape(launch.model)
    except (ShapeError, CatalogueError):
        return None
    flags = {name: str(value) for name, value in launch.flags.items()}
    kv = asked_settings("llama.cpp", flags).get("kv", "fp16")
    return sequence_bytes(shape, find_format(KV, kv), launch.context or CONTEXT)


def address_of(generator: str) -> EngineAddress:
    """Return the engine of a URL.

    >>> address_of("http://localhost:8000/v1#tiny")
    EngineAddress(url='http://localhost:8000', model='tiny', dialect='command')
    """
    url, _, model = generator.partition("#")
    return EngineAddress(url.rstrip("/").removesuffix("/v1"), model or "default")


def planned(options: RagOptions, index: RagIndex, profile: RagProfile | None) -> MemoryPlan:
    """Return what lies where; without a profile the engine has 4 slots, and a guess of its memory beside their cache.

    Raises:
        DoesNotFitError: the budget is too small for the engine and one partition.
    """
    sizes = {each.id: each.size_bytes for each in index.catalog.partitions()}
    budget, launch = options.memory_bytes or available_bytes() // 2, own_launch(options, "plan")
    slot = slot_bytes(launch) if launch is not None else 0
    if profile is None:
        slots, process = options.slots or SLOTS, resident_bytes()
        engine = 0 if launch is None else Path(launch.model).stat().st_size + UNPLANNED_BYTES + slots * (slot or 0)
        found = MemoryPlan(slots, engine, budget - engine - process, process, 0.0, ())
    else:
        if slot is not None:  # The context may be another one than was profiled.
            profile = replace(profile, slot_bytes=slot)
        given = {} if options.slots is None else {"slots": (options.slots,)}
        arrivals = even_arrivals(options.rate_per_s, PLANNED_REQUESTS)
        plan = plan_memory(profile, sizes, budget, arrivals, _spread(sizes, options.probes, len(arrivals)), **given)
        least = profile.engine_bytes + profile.slot_bytes + profile.process_bytes + max(sizes.values(), default=0)
        if plan is None:
            raise DoesNotFitError(
                f"{format_bytes(budget)} do not hold the engine with one slot, our process and one partition: "
                f"{format_bytes(least)}",
                hint="give more --memory, a smaller model, or build the index with a smaller --partition",
            )
        found = plan
    if sizes and found.partition_bytes < max(sizes.values()):
        raise DoesNotFitError(
            f"{format_bytes(budget)} less the engine's leave {format_bytes(max(0, found.partition_bytes))}, and a "
            f"partition has {format_bytes(max(sizes.values()))}",
            hint="give more --memory, or build the index with a smaller --partition",
        )
    return found


def _spread(sizes: dict[int, int], probes: int | None, number: int) -> list[frozenset[int]] | None:
    """Return the partitions of queries that want `probes` each, all of them as often."""
    if probes is None or probes >= len(sizes):
        return None
    names = sorted(sizes)
    return [frozenset(names[(at * probes + each) % len(names)] for each in range(probes)) for at in range(number)]


@asynccontextmanager
async def running(
    index: RagIndex, options: RagOptions, plan: MemoryPlan, profile: RagProfile | None, name: str, say: Say
) -> AsyncIterator[Rag]:
    """Run both pipelines, and an engine of our own, for the block.

    Raises:
        InputError: there is no such model.
        ReplicaError: the engine does not start.
    """
    launch = own_launch(options, name)
    limit = round(plan.engine_bytes * HEADROOM) + 512 * MiB if options.enforce and profile is not None else None
    own = OwnEngine(launch, plan.slots, limit, say) if launch is not None else None
    settings = RetrievalSettings(
        plan.partition_bytes, options.probes, options.load_bytes_per_s,
        profile.load_bytes_per_s if profile else None, options.rules,
    )  # fmt: skip
    if own is not None:
        await own.start()
    try:
        at_once = own.slots if own is not None else plan.slots
        given = address_of(options.generator) if own is None else None
        generator = Generator(lambda: given or own.address, own, at_once, say)  # type: ignore[union-attr]
        rag = Rag(index, Retrieval(index, settings, say), generator)
        if options.enforce and options.memory_bytes is not None:
            _enforce(options.memory_bytes, own, say)
        await rag.open()
        try:
            yield rag
        finally:
            await rag.close()
    finally:
        if own is not None:
            await asyncio.to_thread(own.end)


def _enforce(budget_bytes: int, own: OwnEngine | None, say: Say) -> None:
    why = limit_cgroup(budget_bytes, [os.getpid(), *([own.pid] if own is not None else [])])
    if not why:
        say("limit", None, budget_bytes, "the cgroup keeps all processes within the budget")
        return
    limit = limit_data(_SPARE_BYTES)
    say("limit", None, limit, f"RLIMIT_DATA keeps this process, and partitions are counted: {why}")


def check_generator(generator: str) -> None:
    """Check a generator before minutes are spent.

    Raises:
        InputError: it is neither a URL nor a model that is here.
    """
    if not generator.startswith(("http://", "https://")) and not Path(generator).expanduser().exists():
        raise InputError(
            f"there is no generator {generator}", hint="give a .gguf file, a folder, or http://HOST:PORT/v1#MODEL"
        )
