"""Documents to an index on disk, and back out of it: exact, incremental, checked."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import BusyError, InputError
from cordee.serve.rag import index as index_module
from cordee.serve.rag.catalog import Partition
from cordee.serve.rag.documents import Document, chunks, find_files, read_document
from cordee.serve.rag.embed import HashedWords, open_embedder
from cordee.serve.rag.index import IndexSettings, RagIndex, probed
from cordee.serve.rag.merge import BestChunks
from cordee.serve.rag.partition import MappedPartition, encode, read_vectors

TOPICS = {
    "rope": "A rope holds the fall of a climber. Rope length and sheath decide how a rope wears.",
    "anchor": "An anchor joins two bolts with a sling. The anchor must hold in every direction.",
    "weather": "Clouds from the west bring rain by noon. Weather in the mountains changes within an hour.",
    "food": "Oats, nuts and dried fruit make a light meal. Food for two days weighs a kilogram.",
}


def write_topics(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in TOPICS.items():
        (folder / f"{name}.md").write_text(f"# About {name}\n\n{text}\n")
    return find_files([folder])


def small(folder: Path, **keys: object) -> RagIndex:
    return RagIndex.create(folder, IndexSettings(partition_bytes=4_200, chunk_chars=60, overlap_chars=10, **keys))  # type: ignore[arg-type]


def test_formats_become_text(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    page = tmp_path / "page.html"
    page.write_text("<html><head><title>Knots</title><script>var x</script></head><body><h2>Bowline</h2><p>A &amp; B"
                    "<br>next</p><style>p{}</style></body></html>")  # fmt: skip
    found = read_document(page)
    assert found == Document("Knots", "## Bowline\n\nA & B\nnext")
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(InputError, match="cannot be read as PDF"):
        read_document(tmp_path / "bad.pdf")
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "blank.pdf")
    with pytest.raises(InputError, match="1 pages and no text"):
        read_document(tmp_path / "blank.pdf")
    (tmp_path / "two.pdf").write_bytes(two_pages())
    pdf = read_document(tmp_path / "two.pdf")
    assert "first page" in pdf.text and pdf.page_at(pdf.text.index("second")) == 2
    with pytest.raises(InputError, match="no format"):
        find_files([Path(__file__)])


def two_pages() -> bytes:
    """Return a PDF of two pages with a line of text each, written by hand."""
    parts = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R 4 0 R]/Count 2>>"]
    font = b"<</Font<</F 7 0 R>>>>"
    parts += [
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Resources%s/Contents %d 0 R>>" % (font, at) for at in (5, 6)
    ]
    for text in (b"the first page", b"the second page"):
        stream = b"BT /F 12 Tf 10 50 Td (%s) Tj ET" % text
        parts.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
    parts.append(b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(out)
    size = len(parts) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        size,
        table,
        size,
        start,
    )


@settings(max_examples=60, deadline=None)
@given(st.text("ab .\n#", max_size=400), st.integers(20, 90))
def test_chunks_cover_a_text_in_order(text: str, most: int) -> None:
    found = list(chunks(Document("t", text), most_chars=most, overlap_chars=most // 4))
    covered = set[int]()
    for each in found:
        assert text[each.start : each.end].strip() == each.text and len(each.text) <= most
        covered |= set(range(each.start, each.end))
    assert all(text[at].isspace() for at in set(range(len(text))) - covered)
    assert [each.start for each in found] == sorted({each.start for each in found})


def test_words_that_are_shared_bring_texts_together() -> None:
    made = HashedWords()
    made.fit(TOPICS.values())
    again = open_embedder("builtin", made.state)
    texts = [*TOPICS.values(), "which anchor holds with two bolts?", ""]
    vectors = again.embed(texts)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    scores = vectors[:4] @ vectors[4]
    assert list(TOPICS)[int(scores.argmax())] == "anchor" and np.sort(scores)[-2] < 0.6 * scores.max()
    assert np.array_equal(vectors, HashedWords(made.state).embed(texts))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_search_over_partitions_is_one_over_all(data: st.DataObject) -> None:
    # Whole numbers, so that scores are exact and equal ones occur.
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    number, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    vectors = rng.integers(-2, 3, (number, 3)).astype(np.float32)
    queries = rng.integers(-2, 3, (3, 3)).astype(np.float32)
    part_of = rng.integers(0, data.draw(st.integers(1, 6)), number)
    gone = set(rng.choice(number, data.draw(st.integers(0, number // 2)), replace=False).tolist())
    ids, best = np.arange(number), [BestChunks(k) for _ in queries]
    with TemporaryDirectory() as folder:
        for part in rng.permutation(np.unique(part_of)):
            rows = part_of == part
            path, blob = Path(folder, f"{part}.faiss"), encode("flat", vectors[rows], ids[rows])
            path.write_bytes(blob)
            removed = tuple(sorted(gone & set(ids[rows].tolist())))
            mapped = MappedPartition(path, Partition(1, "", len(blob), "", int(rows.sum()), False, vectors[0], removed))
            found = mapped.search(queries, k)
            for each, scores, of in zip(best, found.scores, found.ids, strict=True):
                each.add(scores, of)
            mapped.close()
    alive = [at for at in range(number) if at not in gone]
    for query, each in zip(queries, best, strict=True):
        scores = {at: float(vectors[at] @ query) for at in alive}
        expected = sorted(scores.values(), reverse=True)[:k]
        ranked = each.ranked()
        assert [score for _, score in ranked] == expected
        assert all(scores[id_] == score for id_, score in ranked) and len({id_ for id_, _ in ranked}) == len(ranked)
        above = {at for at, score in scores.items() if score > expected[-1]} if expected else set()
        assert above <= {id_ for id_, _ in ranked}


def test_partitions_with_lists_keep_their_vectors(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((5_000, 8), dtype=np.float32)
    ids = np.arange(5_000) * 2
    (tmp_path / "a").write_bytes(encode("ivf", vectors, ids))
    again, order = read_vectors(tmp_path / "a")
    assert np.array_equal(again, vectors) and np.array_equal(order, ids)


def test_an_index_is_built_added_to_and_removed_from(tmp_path: Path) -> None:
    files = write_topics(tmp_path / "docs")
    index = small(tmp_path / "kb")
    done = index.add(files)
    assert (done.documents, done.refused) == (4, ()) and done.chunks >= 8
    assert len(index.catalog.partitions()) > 1 and not index.verify()
    (found,) = index.query(["rain and clouds by noon"], 2)
    assert found.passages[0][0].document.endswith("weather.md") and not found.not_searched
    assert index.add(files).unchanged == 4

    (tmp_path / "docs" / "weather.md").write_text("# About weather\n\nSnow falls above 2000 metres in October.\n")
    (tmp_path / "docs" / "broken.pdf").write_bytes(b"no pdf")
    changed = index.add(find_files([tmp_path / "docs"]))
    assert (changed.documents, changed.unchanged) == (1, 3) and "broken.pdf" in changed.refused[0][0]
    texts = [each.text for each, _ in index.query(["rain and clouds by noon"], 20)[0].passages]
    assert not any("rain by noon" in text for text in texts) and any("Snow falls" in text for text in texts)
    assert index.remove([str(files[0])]).documents == 1
    with pytest.raises(InputError, match="no document nowhere"):
        index.remove(["nowhere"])
    assert not index.verify()
    reopened = RagIndex(tmp_path / "kb")
    assert reopened.catalog.counts()[0] == 3
    assert reopened.query(["snow in october"], 1)[0].passages[0][0].text.endswith("October.")


def test_many_additions_are_clustered_anew_with_the_same_answers(tmp_path: Path) -> None:
    index = small(tmp_path / "kb")
    index.add(write_topics(tmp_path / "docs"))
    for number in range(index_module.ADDED_MAX):
        path = tmp_path / f"more{number}.txt"
        path.write_text(f"Note {number} about rope number {number} and its sheath.")
        index.add([path])
    assert sum(each.added for each in index.catalog.partitions()) == index_module.ADDED_MAX
    before = [(each.text, round(score, 5)) for each, score in index.query(["rope sheath"], 6)[0].passages]
    (tmp_path / "last.txt").write_text("Nothing of interest here.")
    index.add([tmp_path / "last.txt"])
    assert not any(each.added for each in index.catalog.partitions()) and not index.verify()
    after = [(each.text, round(score, 5)) for each, score in index.query(["rope sheath"], 6)[0].passages]
    assert after == before
    named = {each.key for each in index.catalog.partitions()}
    assert {f"partitions/{path.name}" for path in (tmp_path / "kb" / "partitions").iterdir()} == named


def test_damage_is_found_and_named_and_the_rest_is_searched(tmp_path: Path) -> None:
    index = small(tmp_path / "kb")
    index.add(write_topics(tmp_path / "docs"))
    one, other, *_ = index.catalog.partitions()
    data = bytearray(index.path_of(one).read_bytes())
    data[len(data) // 2] ^= 1
    index.path_of(one).write_bytes(data)
    index.path_of(other).unlink()
    index.catalog._run("UPDATE chunks SET text = text || '!' WHERE id = (SELECT max(id) FROM chunks)")
    found = {each.name: each.why for each in index.verify()}
    assert "does not match" in found[f"partition {one.id}"] and found[f"partition {other.id}"] == "its file is missing"
    assert any(name.startswith("chunk ") for name in found)
    (answer,) = index.query(["anything"], 50)
    assert {each.name for each in answer.not_searched} == {f"partition {one.id}", f"partition {other.id}"}
    assert answer.passages


def test_two_writers_exclude_each_other_and_a_killed_one_leaves_no_trace(tmp_path: Path) -> None:
    files = write_topics(tmp_path / "docs")
    index = small(tmp_path / "kb")
    (tmp_path / "kb" / "partitions").mkdir()
    (tmp_path / "kb" / "partitions" / "half.faiss").write_bytes(b"of a killed writer")
    with index._writing(), pytest.raises(BusyError):
        RagIndex(tmp_path / "kb").add(files)
    index.add(files)
    assert not (tmp_path / "kb" / "partitions" / "half.faiss").exists()
    with pytest.raises(InputError, match="not empty"):
        RagIndex.create(tmp_path / "docs", IndexSettings())
    with pytest.raises(InputError, match="no index"):
        RagIndex(tmp_path / "docs")


def test_the_users_function_embeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_embedder.py").write_text(
        "def embed(texts):\n    return [[len(text), text.count('e'), 1.0] for text in texts]\n"
        "def broken(texts):\n    return [[float('nan')]] * len(texts)\n"
    )
    monkeypatch.chdir(tmp_path)
    index = small(tmp_path / "kb", embedder="own_embedder:embed")
    index.add(write_topics(tmp_path / "docs"))
    assert index.query(["e" * 50], 1)[0].passages
    with pytest.raises(InputError, match="not finite"):
        open_embedder("own_embedder:broken").embed(["a"])
    with pytest.raises(InputError, match="no embedder"):
        open_embedder("no such thing")


def test_queries_go_to_the_nearest_partitions_and_to_all_added_ones() -> None:
    made = [Partition(at, "", 1, "", 1, at == 3, np.eye(4, dtype=np.float32)[at]) for at in range(4)]
    query = np.array([[0, 0.9, 0.1, 0]], np.float32)
    assert probed(made, query, 1) == [{1, 3}] and probed(made, query, None) == [{0, 1, 2, 3}]
