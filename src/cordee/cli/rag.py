"""`cordee rag`: a knowledge base on this machine, built, changed, checked, asked and served."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cordee.cli import rag_serve, terminal
from cordee.cli.rag_text import (
    ChangeDocument,
    IndexDocument,
    ProblemDocument,
    RetrievedDocument,
    change_line,
    document_table,
    passages_text,
)
from cordee.errors import CorruptError, InputError
from cordee.units import MiB, format_bytes, parse_bytes, plural

if TYPE_CHECKING:
    from cordee.serve.rag.index import RagIndex

rag = typer.Typer(no_args_is_help=True, help="Build, change, check, ask and serve a knowledge base.")

Folder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")]
Paths = Annotated[
    list[Path], typer.Argument(metavar="DOCUMENTS...", help="Files or folders: text, Markdown, HTML, PDF.")
]


@rag.command()
def build(
    index: Folder,
    documents: Paths,
    *,
    embedder: Annotated[
        str, typer.Option(metavar="NAME", help="builtin, MODULE:FUNCTION, a folder of a transformers model, or a URL.")
    ] = "builtin",
    kind: Annotated[Literal["flat", "ivf"], typer.Option(help="Exact, or in lists: faster, and approximate.")] = "flat",
    partition: Annotated[str, typer.Option(metavar="SIZE", help="Size of a partition's file.")] = f"{64}MiB",
    chunk: Annotated[int, typer.Option(min=40, metavar="CHARS", help="Characters of a chunk, at most.")] = 800,
    overlap: Annotated[
        int, typer.Option(min=0, metavar="CHARS", help="Characters that it repeats from the one before.")
    ] = 100,
    as_json: terminal.Json = False,
) -> None:
    """Make an index of documents in a new folder."""
    from cordee.serve.rag.documents import find_files
    from cordee.serve.rag.index import IndexSettings, RagIndex

    if not 0 <= overlap < chunk // 2:
        raise InputError(f"--overlap {overlap} is no less than half of --chunk {chunk}", hint="give a smaller one")
    size = parse_bytes(partition)
    if size < MiB // 256:
        raise InputError(f"--partition {partition} is smaller than a page", hint="give some MiB: 64MiB")
    files = find_files(documents)
    if not files:
        raise InputError("there are no documents in these folders", hint="text, Markdown, HTML and PDF are read")
    made = RagIndex.create(index, IndexSettings(embedder, kind, size, chunk, overlap))
    _add(made, files, as_json=as_json)


@rag.command()
def add(index: Folder, documents: Paths, *, as_json: terminal.Json = False) -> None:
    """Add documents; those that have changed are replaced, the others stay."""
    from cordee.serve.rag.documents import find_files

    with _opened(index) as found:
        _add(found, find_files(documents), as_json=as_json)


@rag.command()
def rm(
    index: Folder,
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENTS...", help="Names, as `cordee rag show` has them.")
    ],
    *,
    as_json: terminal.Json = False,
) -> None:
    """Remove documents."""
    with _opened(index) as found:
        done = ChangeDocument.of(found.remove(documents), index)
    if as_json:
        terminal.print_json(done)
    else:
        print(f"removed {plural(done.documents, 'document')} with {plural(done.chunks, 'chunk')}")


@rag.command()
def show(index: Folder, *, as_json: terminal.Json = False) -> None:
    """Show an index: its documents, partitions and settings."""
    with _opened(index) as found:
        document = IndexDocument.of(found)
    if as_json:
        terminal.print_json(document)
        return
    console = terminal.stdout()
    console.print(document_table(document))
    added = f", {document.added} of them added since" if document.added else ""
    parts = f"{plural(document.partitions, 'partition')}{added}, {format_bytes(document.bytes)} of vectors"
    print(f"{plural(len(document.documents), 'document')}, {plural(document.chunks, 'chunk')}; {parts}")
    print(f"embedder {document.embedder} ({document.dims} dimensions), {document.kind}; version {document.version}")


@rag.command()
def verify(index: Folder, *, as_json: terminal.Json = False) -> None:
    """Check each partition and each chunk by its checksum; exit with 52 if something has changed."""
    with _opened(index) as found:
        number = len(found.catalog.partitions())
        problems = [ProblemDocument(name=each.name, why=each.why) for each in found.verify()]
    if as_json:
        terminal.print_json(problems)
    else:
        for each in problems:
            print(f"{each.name}: {each.why}")
    if problems:
        raise CorruptError(
            f"{plural(len(problems), 'part')} of {index} are damaged" if len(problems) > 1 else f"{index} is damaged",
            hint="its documents are untouched: build it again in a new folder",
        )
    if not as_json:
        print(f"{index}: {plural(number, 'partition')} and all chunks are as they were written")


@rag.command()
def query(
    index: Folder,
    question: Annotated[str, typer.Argument(help="A question, or some words.")],
    *,
    top: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 5,
    probes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Nearest partitions to search.", show_default="all")
    ] = None,
    as_json: terminal.Json = False,
) -> None:
    """Print the passages that are nearest to a question, without generating an answer."""
    with _opened(index) as found:
        (answer,) = found.query([question], top, probes)
    document = RetrievedDocument.of(question, answer)
    if as_json:
        terminal.print_json(document)
    else:
        terminal.stdout().print(passages_text(document), end="")
    for each in document.not_searched:
        terminal.stderr().print(f"not searched: {each.name}: {each.why}", highlight=False, markup=False)


rag.command()(rag_serve.profile)
rag.command()(rag_serve.serve)


@contextmanager
def _opened(folder: Path) -> "Iterator[RagIndex]":
    from cordee.serve.rag.index import RagIndex

    found = RagIndex(folder)
    try:
        yield found
    finally:
        found.close()


def _add(index: "RagIndex", files: Sequence[Path], *, as_json: bool) -> None:
    seen: Callable[[int], None]
    with terminal.progress("reading documents", len(files), quiet=as_json) as seen:
        done = ChangeDocument.of(index.add(files, seen), index.folder)
    if as_json:
        terminal.print_json(done)
    else:
        print(change_line(done))
    for each in done.refused:
        terminal.stderr().print(f"left out: {each.why}", highlight=False, markup=False)
