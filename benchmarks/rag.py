"""Questions at four rates against an index larger than its memory: serial, batches, asynchronous with LRU, and ours.

    python benchmarks/rag.py [--json] [--systems serial,batches,async,ours,...] [--rates 0.4,2,4,8]
        [--seeds 1,2] [--folder DIR] [--records FILE]

16 partitions of 16 MiB, 4 of which fit into memory; the store gives 256 MB/s, so that one scan takes a second, as 256
GB at 0.87 GB/s take five minutes (RAGDoll, arXiv 2504.15302). Each query wants all partitions, and gets the same
passages from each system. The engine is llama.cpp with the tiny model. Same arrivals (Poisson, one seed) for all
systems; before each run the page cache of the index is dropped.

- serial: one request after the other, as the paper's baseline.
- batches: all that wait, 16 at most: retrieval for all, then generation for all.
- async: 8 retrieval workers with an LRU of partitions, in which a load that goes on is shared; continuous batching.
- ours; and ours without one part each: join, prefetch, order, share (one query a search), overlap (of the pipelines).

RLIMIT_DATA keeps this process and the engine within their memory. What is predicted comes from a profile that is
measured just before the runs of a rate.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import rag_corpus  # noqa: E402
from cordee.demo import tiny_model  # noqa: E402
from cordee.serve.policy.rag_forecast import AnswerLatency, MemoryPlan, RagProfile, RagSetup, forecast  # noqa: E402
from cordee.serve.policy.retrieval import RetrievalRules  # noqa: E402
from cordee.serve.rag import profile as profiles  # noqa: E402
from cordee.serve.rag.answer import Asked, FoundPassages, Rag  # noqa: E402
from cordee.serve.rag.catalog import Partition  # noqa: E402
from cordee.serve.rag.index import IndexSettings, RagIndex  # noqa: E402
from cordee.serve.rag.memory import Memory, Throttle  # noqa: E402
from cordee.serve.rag.merge import BestChunks  # noqa: E402
from cordee.serve.rag.partition import Found, MappedPartition, drop_pages  # noqa: E402
from cordee.serve.rag.setup import RagOptions, running  # noqa: E402
from cordee.serve.rag.workload import Played, answer, request  # noqa: E402
from cordee.units import MiB  # noqa: E402

PARTITIONS, PARTITION_BYTES, FIT = 16, 16 * MiB, 4
STORE_BYTES_PER_S = 256e6
SLOTS, CONTEXT, TOP, OUTPUT_TOKENS = 4, 1024, 5, 48
WINDOW_S, LEAST = 15.0, 10
BATCH, WORKERS = 16, 8
BUDGET_BYTES = 512 * MiB
PARTS = {
    "ours": RetrievalRules(),
    "no join": RetrievalRules(join=False),
    "no prefetch": RetrievalRules(prefetch=False),
    "no order": RetrievalRules(order=False),
    "no share": RetrievalRules(together=False),
}
SYSTEMS = ("serial", "batches", "async", *PARTS, "no overlap")


@dataclass(frozen=True)
class Row:
    """One run; seconds are means over its requests, but for p99."""

    system: str
    rate_per_s: float
    seed: int
    requests: int
    mean_s: float
    p99_s: float
    wait_s: float
    retrieval_s: float
    generation_s: float
    recall: float
    loads: int
    predicted: AnswerLatency | None = None
    stages: "Stages | None" = None


@dataclass
class Stages:
    """The seconds of each load, and the queries and seconds of each search of a run; and of its requests."""

    loads: list[float] = field(default_factory=list)
    searches: list[tuple[int, float]] = field(default_factory=list)
    requests: list[AnswerLatency] = field(default_factory=list)
    profile: RagProfile | None = None


@contextmanager
def watched() -> Iterator[Stages]:
    """Time the loads and searches of a block."""
    found, load, search = Stages(), Memory.load, MappedPartition.search

    def loaded(memory: Memory, partition: Partition) -> MappedPartition:
        began_s = time.monotonic()
        mapped = load(memory, partition)
        found.loads.append(time.monotonic() - began_s)
        return mapped

    def searched(mapped: MappedPartition, queries: np.ndarray, k: int) -> Found:
        began_s = time.monotonic()
        out = search(mapped, queries, k)
        found.searches.append((len(queries), time.monotonic() - began_s))
        return out

    Memory.load, MappedPartition.search = loaded, searched  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        Memory.load, MappedPartition.search = load, search  # type: ignore[method-assign]


def build(folder: Path) -> RagIndex:
    """Return the index, made if it is not there."""
    kb = folder / "kb"
    if (kb / "catalogue.db").exists():
        return RagIndex(kb)
    rows = PARTITIONS * (PARTITION_BYTES // (4 * rag_corpus.DIMS + 8))
    rag_corpus.write(folder / "corpus.txt", rows)
    chars = rag_corpus.LINE_CHARS
    index = RagIndex.create(kb, IndexSettings("rag_corpus:embed", "flat", PARTITION_BYTES, chars, 0))
    index.add([folder / "corpus.txt"])
    return index


class LruRetrieval:
    """The baseline's store: partitions by their last use; a query that wants one that is being loaded waits for it."""

    def __init__(self, index: RagIndex, limit_bytes: int) -> None:
        self.index, self.memory = index, Memory(index, limit_bytes, Throttle(STORE_BYTES_PER_S))
        self._held: OrderedDict[int, MappedPartition] = OrderedDict()
        self._users: dict[int, int] = {}
        self._coming: set[int] = set()
        self._turn = threading.Condition()

    @contextmanager
    def _partition(self, id_: int):  # type: ignore[no-untyped-def]
        memory, size = self.memory, self.memory.partitions[id_].size_bytes
        with self._turn:
            while id_ in self._coming or (id_ not in self._held and not self._room(size)):
                self._turn.wait()
            load = id_ not in self._held
            self._users[id_] = self._users.get(id_, 0) + 1
            if load:
                self._coming.add(id_)
            else:
                self._held.move_to_end(id_)
        if load:
            mapped = memory.load(memory.partitions[id_])
            with self._turn:
                self._held[id_] = mapped
                self._coming.discard(id_)
                self._turn.notify_all()
        yield self._held[id_]
        with self._turn:
            self._users[id_] -= 1
            self._turn.notify_all()

    def _room(self, size: int) -> bool:
        sizes = self.memory.sizes
        while sum(sizes[each] for each in (*self._held, *self._coming)) + size > self.memory.limit_bytes:
            leaves = next((each for each in self._held if not self._users.get(each)), None)
            if leaves is None:
                return False
            self._held.pop(leaves).close()
        return True

    def search(self, vectors: np.ndarray) -> list[list[tuple[int, float]]]:
        """Search all partitions, one after the other, for these queries."""
        best = [BestChunks(TOP) for _ in vectors]
        for id_ in sorted(self.memory.partitions):
            with self._partition(id_) as mapped:
                found = mapped.search(vectors, TOP)
            for each, scores, ids in zip(best, found.scores, found.ids, strict=True):
                each.add(scores, ids)
        return [each.ranked() for each in best]

    def close(self) -> None:
        """Give all up."""
        for each in self._held.values():
            each.close()


def asked(question: str) -> Asked:
    return request(question, OUTPUT_TOKENS, TOP)


async def generate(
    rag: Rag, lru: LruRetrieval, each: Asked, ranked: list[tuple[int, float]], times: tuple[float, ...]
) -> Played:
    """Generate the answer of a request whose passages are found."""
    came, began, ended = times
    passages = await asyncio.to_thread(lru.index.passages, ranked)
    each.found = FoundPassages(passages, (), began - came, ended - began)
    each.passages, each.wait_s = passages, began - came
    async for _ in rag.stream(each):
        pass
    return Played(each.latency, tuple(passage.chunk for passage, _ in passages))


async def play_serial(
    rag: Rag, lru: LruRetrieval, arrivals: Sequence[float], questions: Sequence[str], most: int
) -> list[Played]:
    """Take up to `most` requests that wait: retrieval for all of them, then generation for all."""
    start, out, at = time.monotonic(), list[Played](), 0
    while at < len(arrivals):
        await asyncio.sleep(max(0.0, start + arrivals[at] - time.monotonic()))
        now = time.monotonic()
        ready = [each for each in range(at, min(len(arrivals), at + most)) if start + arrivals[each] <= now] or [at]
        vectors = rag.index.embedder.embed([questions[each] for each in ready])
        found = await asyncio.to_thread(lru.search, vectors)
        ended = time.monotonic()
        works = [
            generate(rag, lru, asked(questions[each]), ranked, (start + arrivals[each], now, ended))
            for each, ranked in zip(ready, found, strict=True)
        ]
        out += await asyncio.gather(*works)
        at += len(ready)
    return out


async def play_async(rag: Rag, lru: LruRetrieval, arrivals: Sequence[float], questions: Sequence[str]) -> list[Played]:
    """Search with a pool of workers, and let the engine batch what comes."""
    start, loop, pool = time.monotonic(), asyncio.get_running_loop(), ThreadPoolExecutor(WORKERS)

    def search(question: str) -> tuple[float, list[tuple[int, float]], float]:
        began = time.monotonic()
        return began, lru.search(rag.index.embedder.embed([question]))[0], time.monotonic()

    async def one(at: float, question: str) -> Played:
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        began, ranked, ended = await loop.run_in_executor(pool, search, question)
        return await generate(rag, lru, asked(question), ranked, (start + at, began, ended))

    found = await asyncio.gather(*(one(at, each) for at, each in zip(arrivals, questions, strict=True)))
    pool.shutdown()
    return list(found)


async def play_ours(rag: Rag, arrivals: Sequence[float], questions: Sequence[str], *, overlap: bool) -> list[Played]:
    """Let both pipelines go on; without `overlap` a request's generation ends before the next one's retrieval."""
    start, alone, gate = time.monotonic(), asyncio.Lock(), asyncio.Event()
    gate.set()
    waiting: list[tuple[float, str, asyncio.Future[Played]]] = []

    async def batch() -> None:
        async with alone:
            taken, waiting[:] = waiting[:], []
            began = time.monotonic()
            works = [asked(question) for _, question, _ in taken]
            await asyncio.gather(*(rag.look_up(each) for each in works))

            async def go_on(each: Asked, came: float, done: "asyncio.Future[Played]") -> None:
                async for _ in rag.stream(each):
                    pass
                assert each.found is not None
                latency = replace(each.latency, wait_s=each.wait_s + began - came)
                done.set_result(Played(latency, tuple(passage.chunk for passage, _ in each.found.passages)))

            await asyncio.gather(*(go_on(each, came, done) for each, (came, _, done) in zip(works, taken, strict=True)))

    async def one(at: float, question: str) -> Played:
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        if overlap:
            return await answer(rag, asked(question))
        done: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        waiting.append((start + at, question, done))
        await batch()
        return await done

    return list(await asyncio.gather(*(one(at, each) for at, each in zip(arrivals, questions, strict=True))))


def recall(index: RagIndex, questions: Sequence[str], found: Sequence[Played]) -> float:
    """Return the fraction of the passages of a plain search over all partitions that were found, for some questions."""
    some = range(0, len(questions), max(1, len(questions) // 8))
    exact = index.query([questions[at] for at in some], TOP)
    pairs = zip(some, exact, strict=True)
    hits = [len({p.chunk for p, _ in each.passages} & set(found[at].chunks)) for at, each in pairs]
    return sum(hits) / (TOP * len(hits))


def means(found: Sequence[AnswerLatency]) -> AnswerLatency:
    """Return the mean of each part."""
    return AnswerLatency(*map(mean, zip(*map(astuple, found), strict=True)))


def workload(index: RagIndex, rate: float, seed: int) -> tuple[list[float], list[str]]:
    """Return arrivals and questions, the same for all systems."""
    rng = np.random.default_rng((seed, round(1000 * rate)))
    number = max(LEAST, round(rate * WINDOW_S))
    arrivals = np.cumsum(rng.exponential(1 / rate, number)).tolist()
    passages = rng.integers(0, index.catalog.counts()[1], number)
    return arrivals, [f"{rag_corpus.line(int(each)).strip()}?" for each in passages]


async def run(index: RagIndex, model: Path, profile: RagProfile, system: str, rate: float, seed: int) -> Row:
    """Return one run."""
    arrivals, questions = workload(index, rate, seed)
    for each in index.catalog.partitions():
        drop_pages(index.path_of(each))
    limit = FIT * max(each.size_bytes for each in index.catalog.partitions())
    rules = PARTS.get(system, RetrievalRules(join=system != "no overlap"))
    options = RagOptions(str(model), BUDGET_BYTES, None, SLOTS, CONTEXT, STORE_BYTES_PER_S, rate, FLAGS, True, rules)
    plan = MemoryPlan(SLOTS, 0, limit, 0, 0.0, ())
    with watched() as stages:
        async with running(index, options, plan, profile, "bench", lambda *change: None) as rag:
            if system in ("serial", "batches", "async"):
                lru = LruRetrieval(index, limit)
                if system == "async":
                    found = await play_async(rag, lru, arrivals, questions)
                else:
                    found = await play_serial(rag, lru, arrivals, questions, 1 if system == "serial" else BATCH)
                lru.close()
            else:
                found = await play_ours(rag, arrivals, questions, overlap=system != "no overlap")
    predicted = None
    if system == "ours":
        sizes = {each.id: each.size_bytes for each in index.catalog.partitions()}
        predicted = means(forecast(profile, RagSetup(sizes, limit, SLOTS), arrivals))
    stages.requests, stages.profile = [each.latency for each in found], profile
    totals = sorted(each.latency.total_s for each in found)
    parts = astuple(means(stages.requests))
    p99 = totals[max(0, -(-99 * len(totals) // 100) - 1)]
    return Row(
        system, rate, seed, len(found), mean(totals), p99, *parts, recall(index, questions, found), len(stages.loads),
        predicted, stages,
    )  # fmt: skip


FLAGS: dict[str, str | int] = {**tiny_model.FLAGS}


def measure(index: RagIndex, model: Path) -> RagProfile:
    """Return the profile of both stages for this workload."""
    options = RagOptions(str(model), None, None, SLOTS, CONTEXT, STORE_BYTES_PER_S, 1.0, FLAGS, False)
    stages = profiles.retrieval(index, STORE_BYTES_PER_S)
    plan = MemoryPlan(SLOTS, 0, 2 * max(each.size_bytes for each in index.catalog.partitions()), 0, 0.0, ())

    async def work() -> RagProfile:
        async with running(index, options, plan, None, "bench", lambda *change: None) as rag:
            load = profiles.ProfileLoad(OUTPUT_TOKENS, TOP)
            table, cores = await profiles.generation(rag, (1, 2, SLOTS), load, lambda text: None)
        return replace(stages, generation_s=table, engine_cores=cores)

    return asyncio.run(work())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rates", default="0.4,2,4,8")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--folder", type=Path, help="keep the index there (default: a temporary one)")
    parser.add_argument("--records", type=Path, help="add a line of JSON for each run to this file")
    given = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        index, model = build(folder), folder / "tiny" / "tiny.gguf"
        if not model.exists():
            tiny_model.build(model.parent)
        rows = []
        for seed, rate in product(map(int, given.seeds.split(",")), map(float, given.rates.split(","))):
            profile = measure(index, model)
            for system in given.systems.split(","):
                row = asyncio.run(run(index, model, profile, system, rate, seed))
                rows.append(row)
                if not given.json:
                    print(text_of(row), flush=True)
                if given.records:
                    with given.records.open("a") as out:
                        print(json.dumps(asdict(row)), file=out)
        if given.json:
            print(json.dumps([*map(asdict, rows)]))


def text_of(row: Row) -> str:
    """Return a run in a line, and what was predicted of it in another one."""
    name = f"{row.rate_per_s:4g}/s seed {row.seed} {row.system:11s}"
    out = (
        f"{name} n={row.requests:3d} mean {row.mean_s:6.2f} p99 {row.p99_s:6.2f} wait {row.wait_s:6.2f} "
        f"retrieval {row.retrieval_s:5.2f} generation {row.generation_s:5.2f} "
        f"recall {row.recall:.3f} loads {row.loads:4d}"
    )
    if (each := row.predicted) is not None:
        out += (
            f"\n{name} predicted  {each.total_s:6.2f} ({row.mean_s / each.total_s - 1:+4.0%})  wait {each.wait_s:6.2f} "
            f"retrieval {each.retrieval_s:5.2f} generation {each.generation_s:5.2f}"
        )
    return out


if __name__ == "__main__":
    main()
