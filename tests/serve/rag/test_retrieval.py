"""The retrieval pipeline on real files: exact, shared, within its limit, and honest about what it could not search."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from rag_world import embed, numbered

from cordee.serve.policy.retrieval import RetrievalRules
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.memory import Memory, Throttle
from cordee.serve.rag.retrieval import Ranked, Retrieval, RetrievalSettings

Change = tuple[str, int | None, int | None, str]


class Running:
    """A pipeline, what it said, and queries by number."""

    def __init__(self, index: RagIndex, partitions: float, **keys: object) -> None:
        self.index, self.said = index, list[Change]()
        self.size = max(each.size_bytes for each in index.catalog.partitions())
        settings = RetrievalSettings(round(partitions * self.size), **keys)  # type: ignore[arg-type]
        self.retrieval = Retrieval(index, settings, lambda *change: self.said.append(change))

    def ask(self, *numbers: int, k: int = 5) -> list[Ranked]:
        vectors = self.index.embedder.embed([f"v {number}" for number in numbers])
        futures: list[Future[Ranked]] = [self.retrieval.submit(each, k) for each in vectors]
        return [each.result(60) for each in futures]

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.retrieval.stop()


def brute(numbers: int, query: int, k: int) -> list[int]:
    vectors = embed([f"v {number}" for number in range(numbers)]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return list(np.argsort(-(vectors @ vectors[query]), kind="stable")[:k])


@pytest.mark.parametrize(
    "rules",
    [
        RetrievalRules(),
        RetrievalRules(together=False),
        RetrievalRules(prefetch=False),
        RetrievalRules(join=False, order=False),
        RetrievalRules(pin=False),
    ],
    ids=str,
)
def test_all_rules_find_what_a_search_over_everything_finds(tmp_path: Path, rules: RetrievalRules) -> None:
    index = numbered(tmp_path)
    with Running(index, 3, rules=rules) as running:
        found = running.ask(*range(0, 40, 3))
        assert running.retrieval.memory.held_bytes <= 3 * running.size
    names = {id_: int(Path(each.document).stem) for id_, each in index.catalog.passages(range(1, 41)).items()}
    for query, each in zip(range(0, 40, 3), found, strict=True):
        assert [names[id_] for id_, _ in each.chunks] == brute(40, query, 5) and not each.not_searched


def test_a_load_serves_all_that_wait(tmp_path: Path) -> None:
    with Running(numbered(tmp_path), 2) as running:
        memory, gate = running.retrieval.memory, threading.Event()
        real = memory.load
        memory.load = lambda partition: (gate.wait(60), real(partition))[1]  # type: ignore[method-assign]
        vectors = running.index.embedder.embed([f"v {number}" for number in range(30)])
        futures = [running.retrieval.submit(each, 3) for each in vectors]
        gate.set()
        assert all(len(each.result(60).chunks) == 3 for each in futures)
        assert memory.loads <= 8 + 1  # Each partition once; the first may have been chosen before the others came.


def test_what_is_popular_stays_in_memory_and_is_said_once(tmp_path: Path) -> None:
    index = numbered(tmp_path)
    with Running(index, 4, probes=1) as running:
        first = running.ask(7)
        for _ in range(10):
            running.ask(7)
        assert running.retrieval.memory.loads == 1 and first[0].chunks
        running.ask(*range(40))
        assert (
            len(running.retrieval.popularity.pinned) <= 2
            and running.retrieval.popularity.pinned <= running.retrieval.memory.sizes.keys()
        )
        pins = [each for each in running.said if each[0] == "pinned"]
        assert pins and all("want some partitions more" in why for *_, why in pins)


def test_damaged_and_missing_partitions_are_named_and_the_rest_is_searched(tmp_path: Path) -> None:
    index = numbered(tmp_path)
    one, other, *_ = index.catalog.partitions()
    index.path_of(one).write_bytes(index.path_of(one).read_bytes()[:-1] + b"x")
    index.path_of(other).unlink()
    with Running(index, 3) as running:
        found, again = running.ask(3, k=40), running.ask(4, 5, k=40)
    for each in (*found, *again):
        problems = {problem.name: problem.why for problem in each.not_searched}
        assert problems[f"partition {other.id}"] == "its file is missing" and len(problems) == 2
        assert "checksum" in problems[f"partition {one.id}"]
        assert len(each.chunks) == 40 - one.vectors - other.vectors
    assert sorted(each[1] for each in running.said if each[0] == "damaged") == [one.id, other.id]


def test_a_partition_that_does_not_fit_is_not_waited_for(tmp_path: Path) -> None:
    with Running(numbered(tmp_path), 0.5) as running:
        (found,) = running.ask(1)
    assert not found.chunks and len(found.not_searched) == 8 and "partitions have" in found.not_searched[0].why


def test_a_slow_disk_is_said_and_answers_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.serve.rag.memory.BLOCK_BYTES", 1)
    index = numbered(tmp_path)
    with Running(index, 3, load_bytes_per_s=20e3, expected_bytes_per_s=1e9) as running:
        (found,) = running.ask(2, k=40)
    assert len(found.chunks) == 40
    (said,) = [each for each in running.said if each[0] == "disk"]
    assert said[1] == 1_000_000_000 and said[2] is not None and said[2] < 200_000 and "the disk is slow" in said[3]


def test_an_addition_and_a_removal_are_seen_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.serve.rag.retrieval.LOOK_S", 0.0)
    index = numbered(tmp_path)
    writer = RagIndex(index.folder)
    with Running(index, 3) as running:
        running.ask(50)
        (tmp_path / "50.txt").write_text("passage v 50")
        writer.add([tmp_path / "50.txt"])
        (added,) = running.ask(50, k=1)
        assert added.chunks[0][1] == pytest.approx(1, abs=1e-5)
        writer.remove([str(tmp_path / "50.txt")])
        (removed,) = running.ask(50, k=1)
        assert removed.chunks[0][1] < 0.99 and any(each[0] == "partitions" for each in running.said)


def test_a_throttle_reads_on_while_its_reader_is_busy() -> None:
    waits = list[float]()
    throttle, now = Throttle(1e6, waits.append), time.monotonic()
    for _ in range(10):
        throttle.take(100_000, now)
    assert 0.9 < waits[-1] <= 1.0  # None was waited, so the last block is due after a second.
    throttle.take(100_000, now + 5)  # Of a read that begins later: what was not used before is lost.
    assert 5.0 < waits[-1] <= 5.1
    late = Throttle(1e6, waits.append)
    for _ in range(10):
        late.take(100_000, now - 2)  # A reader that was held up for 2 s does not wait for a store that was not.
    assert len(waits) == 11


def test_memory_gives_pages_back(tmp_path: Path) -> None:
    index = numbered(tmp_path, 2_000, partitions=2)
    memory = Memory(index, 10**9, Throttle(None))
    for each in index.catalog.partitions():
        memory.arrived(memory.load(each))
    paths = [index.path_of(each) for each in index.catalog.partitions()]
    assert memory.held_bytes == sum(path.stat().st_size for path in paths)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not say what is mapped")
    assert all(str(path) in maps.read_text() for path in paths)
    memory.close()
    assert memory.held_bytes == 0 and not any(str(path) in maps.read_text() for path in paths)
