"""Documents of several formats as text, and text as chunks that are embedded and cited."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from cordee.errors import InputError, MissingExtraError

CHUNK_CHARS, OVERLAP_CHARS = 800, 100
HINT = "text (.txt), Markdown (.md), HTML (.html) and PDF (.pdf) are read"
_TEXT, _MARKDOWN, _HTML = (".txt", ".text", ".rst"), (".md", ".markdown"), (".html", ".htm", ".xhtml")
SUFFIXES = (*_TEXT, *_MARKDOWN, *_HTML, ".pdf")

_SILENT = frozenset(("script", "style", "template", "noscript", "svg", "head"))
_HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6"))
_BLOCKS = _HEADINGS | {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "footer", "form"),
    *("header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
}
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_BREAKS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s"), re.compile(r"\s"))
"""Where a text may be cut, the best places first: paragraphs, lines, sentences, words."""


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a file, with the offsets at which its pages begin; a text without pages has none."""

    title: str
    text: str
    pages: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """Return the page of an offset, counted from 1; None: it has no pages.

        >>> Document("a", "one two", (0, 4)).page_at(5)
        2
        """
        return sum(start <= offset for start in self.pages) if self.pages else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a document's text, from `start` to `end`; `heading` is the last one before its end."""

    text: str
    start: int
    end: int
    heading: str = ""
    page: int | None = None


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and in folders those that can be read, sorted; hidden ones are left out.

    Raises:
        InputError: a path does not exist, or a named file is of another format.
    """
    found = dict[Path, None]()
    for path in paths:
        if path.is_dir():
            inner = (each for each in sorted(path.rglob("*")) if each.suffix.lower() in SUFFIXES and each.is_file())
            shown = [each for each in inner if not any(part[0] == "." for part in each.relative_to(path).parts)]
            found |= dict.fromkeys(shown)
        elif not path.exists():
            raise InputError(f"{path} does not exist", hint="name files or folders of documents")
        elif path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} has no format that can be read", hint=HINT)
        else:
            found[path] = None
    return list(found)


def read_document(path: Path) -> Document:
    """Return the text of a file.

    Raises:
        InputError: it has another format, or cannot be read.
        MissingExtraError: it is a PDF, and pypdf is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path} has no format that can be read", hint=HINT)
    if suffix == ".pdf":
        return _read_pdf(path)
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if suffix in _HTML:
        reader = _HtmlText()
        reader.feed(text)
        reader.close()
        return Document(reader.title.strip() or path.stem, reader.text())
    headings = _HEADING.search(text) if suffix in _MARKDOWN else None
    return Document(headings[1] if headings else path.stem, text)


def _read_pdf(path: Path) -> Document:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a PDF, and pypdf is not installed", hint="pip install 'cordee[rag]'"
        ) from error
    try:
        reader = PdfReader(path)
        parts = [page.extract_text() or "" for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else None) or path.stem
    except (PyPdfError, OSError, ValueError, KeyError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as PDF: {error}", hint="it is damaged or encrypted") from error
    if not any(part.strip() for part in parts):
        raise InputError(
            f"{path} has {len(parts)} pages and no text", hint="scanned pages need OCR before they are added"
        )
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += len(part) + 1
    return Document(str(title), "\n".join(parts), tuple(starts))


class _HtmlText(HTMLParser):
    """The text of a page: blocks become lines, headings lines as in Markdown, and scripts are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._parts: list[str] = []
        self._silent = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        if tag in _SILENT:
            self._silent += 1
        elif tag in _HEADINGS:
            self._parts.append(f"\n\n{'#' * int(tag[1])} ")
        elif tag in _BLOCKS:
            self._parts.append("\n\n" if tag == "p" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if tag in _SILENT:
            self._silent = max(0, self._silent - 1)
        elif tag in _BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._silent:
            self._parts.append(re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Return the lines, without spaces around them and with one empty line at most between two."""
        lines = "".join(self._parts).split("\n")
        return re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip() for line in lines)).strip()


def chunks(document: Document, *, most_chars: int = CHUNK_CHARS, overlap_chars: int = OVERLAP_CHARS) -> Iterator[Chunk]:
    """Yield chunks of at most `most_chars`, cut at paragraphs, else at lines, sentences or words.

    >>> [each.text for each in chunks(Document("", "one two. three four. five"), most_chars=12, overlap_chars=0)]
    ['one two.', 'three four.', 'five']
    """
    assert 0 <= overlap_chars < most_chars // 2, "a chunk brings more than its overlap"
    text, start = document.text, 0
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(text)]
    while start < len(text):
        end = len(text) if len(text) - start <= most_chars else _cut(text, start, start + most_chars)
        body = text[start:end]
        if body.strip():
            before = [name for at, name in headings if at < end]
            first = start + len(body) - len(body.lstrip())
            yield Chunk(body.strip(), start, end, before[-1] if before else "", document.page_at(first))
        if end >= len(text):
            return
        start = _word_start(text, max(start + 1, end - overlap_chars), end)


def _cut(text: str, start: int, limit: int) -> int:
    """Return the end of a chunk: behind the last of the best breaks in its second half."""
    for pattern in _BREAKS:
        places = [found.end() for found in pattern.finditer(text, start + (limit - start) // 2, limit)]
        if places:
            return places[-1]
    return limit


def _word_start(text: str, at: int, end: int) -> int:
    """Return the first start of a word from `at` on, or `end`."""
    while at < end and not (text[at - 1].isspace() and not text[at].isspace()):
        at += 1
    return at
