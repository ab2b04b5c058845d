"""Texts and tables of `cordee rag`, and its documents."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from cordee.cli import terminal
from cordee.units import plural

if TYPE_CHECKING:
    from cordee.serve.rag.index import Change, RagIndex, Retrieved


class ProblemDocument(BaseModel):
    """Something that could not be read or searched, and why."""

    name: str
    why: str


class ChangeDocument(BaseModel):
    """A change of an index: documents and chunks that came or went."""

    index: str
    documents: int
    chunks: int
    unchanged: int
    refused: list[ProblemDocument]

    @classmethod
    def of(cls, done: "Change", index: Path) -> "ChangeDocument":
        """Return the document of a change."""
        refused = [ProblemDocument(name=name, why=why) for name, why in done.refused]
        return cls(
            index=str(index), documents=done.documents, chunks=done.chunks, unchanged=done.unchanged, refused=refused
        )


class SourceDocument(BaseModel):
    """One document of an index."""

    name: str
    title: str
    chunks: int


class IndexDocument(BaseModel):
    """An index; `bytes` are those of its partitions' files."""

    index: str
    version: int
    embedder: str
    dims: int
    kind: str
    partitions: int
    added: int
    bytes: int
    chunks: int
    removed: int
    documents: list[SourceDocument]

    @classmethod
    def of(cls, index: "RagIndex") -> "IndexDocument":
        """Return the document of an index."""
        partitions = index.catalog.partitions()
        return cls(
            index=str(index.folder),
            version=index.catalog.version(),
            embedder=index.settings.embedder,
            dims=len(partitions[0].centroid) if partitions else 0,
            kind=index.settings.kind,
            partitions=len(partitions),
            added=sum(each.added for each in partitions),
            bytes=sum(each.size_bytes for each in partitions),
            chunks=index.catalog.counts()[1],
            removed=sum(len(each.removed) for each in partitions),
            documents=[
                SourceDocument(name=name, title=title, chunks=count) for name, title, count in index.catalog.sources()
            ],
        )


class PassageDocument(BaseModel):
    """One passage that was found, with its score: the cosine of its vector and the question's."""

    number: int
    score: float
    chunk: int
    document: str
    title: str
    heading: str
    page: int | None
    start: int
    end: int
    text: str


class RetrievedDocument(BaseModel):
    """The passages for a question, and the partitions that were not searched."""

    question: str
    passages: list[PassageDocument]
    not_searched: list[ProblemDocument]

    @classmethod
    def of(cls, question: str, found: "Retrieved") -> "RetrievedDocument":
        """Return the document of an answer."""
        passages = [
            PassageDocument(
                number=number, score=round(score, 6), chunk=each.chunk, document=each.document, title=each.title,
                heading=each.heading, page=each.page, start=each.start, end=each.end, text=each.text,
            )
            for number, (each, score) in enumerate(found.passages, 1)
        ]  # fmt: skip
        missing = [ProblemDocument(name=each.name, why=each.why) for each in found.not_searched]
        return cls(question=question, passages=passages, not_searched=missing)


def change_line(done: ChangeDocument) -> str:
    """Return a change in a line."""
    parts = [f"added {plural(done.documents, 'document')} with {plural(done.chunks, 'chunk')}"]
    if done.unchanged:
        parts.append(f"{done.unchanged:,} unchanged")
    if done.refused:
        parts.append(f"{len(done.refused):,} left out")
    return f"{done.index}: {', '.join(parts)}"


def document_table(found: IndexDocument) -> Table:
    """Return the documents, one a row."""
    rows = terminal.table("DOCUMENT", "TITLE", "CHUNKS", right=("CHUNKS",), folds=("DOCUMENT", "TITLE"))
    for each in found.documents:
        rows.add_row(each.name, each.title, f"{each.chunks:,}")
    return rows


def passages_text(found: RetrievedDocument) -> Text:
    """Return the passages under their sources."""
    out, width = Text(), min(terminal.stdout().width, 100)
    for each in found.passages:
        out.append(f"[{each.number}] ", "bold")
        out.append(f"{each.title}", "bold")
        page = f", page {each.page}" if each.page else ""
        heading = f" > {each.heading}" if each.heading and each.heading != each.title else ""
        out.append(f"{heading}{page}  {each.document}  {each.score:.3f}\n", "dim")
        lines = textwrap.wrap(" ".join(each.text.split()), width - 4)
        out.append(textwrap.indent("\n".join(lines), "    ") + "\n\n")
    return out if found.passages else Text("no passage was found\n")
