"""Texts and tables of `cordee rag`, and its documents."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from cordee.cli import terminal
from cordee.units import format_bytes, format_latency, plural

if TYPE_CHECKING:
    from cordee.serve.policy.rag_forecast import AnswerLatency, MemoryPlan, RagProfile
    from cordee.serve.rag.index import Change, RagIndex, Retrieved
    from cordee.serve.rag.predict import Prediction


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


class MemoryDocument(BaseModel):
    """The memory of a budget by what lies in it; `tried_slots` are those that fit, with the mean latency expected."""

    slots: int
    engine_bytes: int
    partition_bytes: int
    process_bytes: int
    latency_s: float
    tried_slots: dict[int, float]

    @classmethod
    def of(cls, plan: "MemoryPlan") -> "MemoryDocument":
        """Return the document of a plan."""
        return cls(
            slots=plan.slots, engine_bytes=plan.engine_bytes, partition_bytes=plan.partition_bytes,
            process_bytes=plan.process_bytes, latency_s=plan.latency_s, tried_slots=dict(plan.tried),
        )  # fmt: skip


class LatencyDocument(BaseModel):
    """Seconds of requests: their mean by what they were spent on, and the 99th percentile of the whole."""

    mean_s: float
    p99_s: float
    wait_s: float
    retrieval_s: float
    generation_s: float

    @classmethod
    def of(cls, found: "list[AnswerLatency]") -> "LatencyDocument":
        """Return the document of some latencies."""
        totals = sorted(each.total_s for each in found)
        number = len(found)
        return cls(
            mean_s=sum(totals) / number,
            p99_s=totals[max(0, -(-99 * number // 100) - 1)],
            wait_s=sum(each.wait_s for each in found) / number,
            retrieval_s=sum(each.retrieval_s for each in found) / number,
            generation_s=sum(each.generation_s for each in found) / number,
        )


class RateDocument(BaseModel):
    """The latency at one rate, predicted and measured; `off` is the measured mean over the predicted one, less one."""

    rate_per_s: float
    requests: int
    predicted: LatencyDocument
    measured: LatencyDocument | None
    off: float | None


class ProfileDocument(BaseModel):
    """Both stages as measured, the division of memory, and latencies."""

    profile: str
    load_bytes_per_s: float
    search_s: float
    search_more_s: float
    embed_s: float
    generation_s: dict[int, float]
    cores: float
    load_cores: float
    engine_cores: float
    engine_bytes: int
    slot_bytes: int
    memory: MemoryDocument
    rates: list[RateDocument]

    @classmethod
    def of(cls, made: "RagProfile", plan: "MemoryPlan", rates: "list[Prediction]", path: Path) -> "ProfileDocument":
        """Return the document of a profile."""
        rows = []
        for each in rates:
            predicted = LatencyDocument.of(each.predicted)
            measured = LatencyDocument.of(each.measured) if each.measured else None
            off = measured.mean_s / predicted.mean_s - 1 if measured else None
            rows.append(
                RateDocument(
                    rate_per_s=each.rate_per_s, requests=len(each.predicted), predicted=predicted, measured=measured,
                    off=off,
                )
            )  # fmt: skip
        return cls(
            profile=str(path), load_bytes_per_s=made.load_bytes_per_s, search_s=made.search_s[0],
            search_more_s=made.search_s[1], embed_s=made.embed_s, generation_s=dict(made.generation_s),
            cores=made.cores, load_cores=made.load_cores, engine_cores=made.engine_cores,
            engine_bytes=made.engine_bytes, slot_bytes=made.slot_bytes, memory=MemoryDocument.of(plan), rates=rows,
        )  # fmt: skip


def memory_line(found: MemoryDocument) -> str:
    """Return the division of the memory in a line."""
    slots, engine = plural(found.slots, "slot"), format_bytes(found.engine_bytes)
    parts, own = format_bytes(found.partition_bytes), format_bytes(found.process_bytes)
    return f"memory: engine with {slots} {engine}, partitions {parts}, our process {own}"


def profile_lines(found: ProfileDocument) -> list[str]:
    """Return the stages as they were measured."""
    answers = ", ".join(f"{number} at once {format_latency(s)}" for number, s in found.generation_s.items())
    tried = ", ".join(f"{slots}: {format_latency(s)}" for slots, s in found.memory.tried_slots.items())
    more = format_latency(found.search_more_s)
    return [
        f"load: {found.load_bytes_per_s / 1e6:,.0f} MB/s of partitions, checksums included",
        f"search: a partition in {format_latency(found.search_s)}, for each further query {more}",
        f"question: embedded in {format_latency(found.embed_s)}",
        f"answer: {answers}",
        f"processor: of {found.cores:g} cores a load uses {found.load_cores:.1f}, and answers {found.engine_cores:.1f}",
        memory_line(found.memory),
        f"mean latency by slots: {tried}" if tried else "",
    ]


def forecast_table(rates: list[RateDocument]) -> Table:
    """Return latencies of N requests by rate, predicted and measured: whole ones, and the means of their parts."""
    heads = ("RATE", "N", "", "MEAN", "P99", "WAIT", "SEARCH", "ANSWER", "OFF")
    rows = terminal.table(*heads, right=tuple(each for each in heads if each))
    for each in rates:
        for name, latency in (("predicted", each.predicted), ("measured", each.measured)):
            if latency is None:
                continue
            off = "" if each.off is None or name == "predicted" else f"{100 * each.off:+.0f} %"
            parts = (latency.mean_s, latency.p99_s, latency.wait_s, latency.retrieval_s, latency.generation_s)
            rows.add_row(f"{each.rate_per_s:g}/s", str(each.requests), name, *map(format_latency, parts), off)
    return rows
