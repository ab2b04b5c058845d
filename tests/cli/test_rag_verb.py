"""`cordee rag`: an index from documents to a checked query, as people and programs see it."""

import json
from pathlib import Path

import pytest
from verbs import run

from cordee.errors import CorruptError, InputError
from cordee.serve.rag.index import RagIndex

KEYS = {
    "build": {"index", "documents", "chunks", "unchanged", "refused"},
    "query": {"question", "passages", "not_searched"},
    "passage": {"number", "score", "chunk", "document", "title", "heading", "page", "start", "end", "text"},
    "show": {
        "index", "version", "embedder", "dims", "kind", "partitions", "added", "bytes", "chunks", "removed",
        "documents",
    },
}  # fmt: skip
"""The keys of each document: those that programs read."""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "rope.md").write_text("# Ropes\n\nA rope holds a fall. Its sheath wears.\n")
    (folder / "snow.html").write_text("<title>Snow</title><p>Snow falls in October above the hut.</p>")
    return folder


def test_an_index_from_documents_to_a_checked_query(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kb = str(tmp_path / "kb")
    code, out, err = run(capsys, "rag", "build", kb, str(docs), "--json")
    found = json.loads(out)
    assert code == 0 and found.keys() == KEYS["build"] and found["documents"] == 2, err
    code, out, _ = run(capsys, "rag", "query", kb, "when does snow fall", "--top", "1", "--json")
    answer = json.loads(out)
    assert answer.keys() == KEYS["query"] and answer["passages"][0].keys() == KEYS["passage"]
    assert answer["passages"][0]["title"] == "Snow" and answer["not_searched"] == []
    (docs / "food.txt").write_text("Oats and nuts.")
    (docs / "bad.pdf").write_text("no pdf")
    code, out, err = run(capsys, "rag", "add", kb, str(docs))
    assert code == 0 and "added 1 document with 1 chunk, 2 unchanged, 1 left out" in out and "bad.pdf" in err
    _, out, _ = run(capsys, "rag", "show", kb, "--json")
    shown = json.loads(out)
    assert shown.keys() == KEYS["show"] and [each["chunks"] for each in shown["documents"]] == [1, 1, 1]
    assert run(capsys, "rag", "rm", kb, str(docs / "food.txt"))[1] == "removed 1 document with 1 chunk\n"
    code, out, _ = run(capsys, "rag", "query", kb, "rope sheath")
    assert code == 0 and out.startswith("[1] Ropes") and "Its sheath wears." in out
    code, out, _ = run(capsys, "rag", "verify", kb)
    assert code == 0 and "as they were written" in out


def test_damage_leaves_with_its_code_and_a_query_names_it(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kb = tmp_path / "kb"
    assert run(capsys, "rag", "build", str(kb), str(docs))[0] == 0
    index = RagIndex(kb)
    path = index.path_of(index.catalog.partitions()[0])
    index.close()
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run(capsys, "rag", "verify", str(kb))
    assert code == CorruptError.exit_code and "its checksum does not match" in out and "is damaged" in err
    code, out, err = run(capsys, "rag", "query", str(kb), "rope")
    assert code == 0 and "no passage was found" in out and "not searched: partition 1" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["query", "{t}/none", "x"], "has no index"),
        (["build", "{t}/kb", "{t}/nothing"], "does not exist"),
        (["build", "{t}/kb", "{t}", "--chunk", "100", "--overlap", "60"], "--overlap 60"),
        (["build", "{t}/kb", "{t}", "--partition", "10B"], "smaller than a page"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "rag", *(word.format(t=tmp_path) for word in words))
    assert code == InputError.exit_code and says in err
