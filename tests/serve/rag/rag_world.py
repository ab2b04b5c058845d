"""Indexes for tests: vectors that are written as text, so that their embedder needs nothing but the text."""

from pathlib import Path

import numpy as np

from cordee.serve.rag.index import IndexSettings, RagIndex

DIMS = 16


def embed(texts: list[str]) -> np.ndarray:
    """Return the vector that the last word of each text draws: `v 7`, or any other word."""
    return np.stack(
        [np.random.default_rng([*text.rsplit(" ", 1)[-1].encode()]).standard_normal(DIMS) for text in texts]
    )


def numbered(folder: Path, documents: int = 40, *, partitions: int = 8) -> RagIndex:
    """Return an index of documents that are one chunk each, in this number of partitions."""
    docs = folder / "docs"
    docs.mkdir()
    for number in range(documents):
        (docs / f"{number}.txt").write_text(f"passage v {number}")
    size = -(-documents // partitions) * (4 * DIMS + 8)
    index = RagIndex.create(folder / "kb", IndexSettings("rag_world:embed", partition_bytes=size))
    index.add(sorted(docs.iterdir()))
    assert len(index.catalog.partitions()) == partitions
    return index
