"""The catalogue of an index, in SQLite: documents, the text of chunks, and which files the partitions are.

A change of the index is one transaction: files of partitions are written before it, and removed after it. So a reader
sees the index before a change or after it, and a killed writer leaves nothing but files that nobody names.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from cordee.errors import InputError

FORMAT = 1
NAME = "catalogue.db"
_SQL_VARIABLES = 500

_SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, title TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, bytes INTEGER NOT NULL, xxh3 TEXT NOT NULL,
    vectors INTEGER NOT NULL, added INTEGER NOT NULL, centroid BLOB NOT NULL
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL REFERENCES documents, partition INTEGER NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, heading TEXT NOT NULL, page INTEGER, text TEXT NOT NULL,
    xxh3 TEXT NOT NULL
);
CREATE INDEX chunks_of_document ON chunks (document);
CREATE INDEX chunks_of_partition ON chunks (partition);
CREATE TABLE removed (chunk INTEGER PRIMARY KEY, partition INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Partition:
    """One file of vectors.

    Attributes:
        added: it was added after the index was built, and has not been merged into the others.
        removed: chunks of it that no document has any more; a search leaves them out.
    """

    id: int
    key: str
    size_bytes: int
    xxh3: str
    vectors: int
    added: bool
    centroid: npt.NDArray[np.float32]
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk as an answer cites it."""

    chunk: int
    document: str
    title: str
    heading: str
    page: int | None
    start: int
    end: int
    text: str
    intact: bool


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A chunk on its way into the catalogue."""

    id: int
    start: int
    end: int
    heading: str
    page: int | None
    text: str


class Catalog:
    """The catalogue of one index; threads may use it at once."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        """Open it.

        Raises:
            InputError: there is none, or one of a later format.
        """
        path = folder / NAME
        if not create and not path.is_file():
            raise InputError(f"{folder} has no index", hint=f"make one: cordee rag build {folder} DOCUMENTS...")
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30.0)
        self._db.execute("PRAGMA synchronous=FULL")
        if create:
            self._db.executescript(f"PRAGMA journal_mode=WAL; BEGIN; {_SCHEMA} COMMIT;")
            self.set("format", FORMAT)
            self.set("version", 0)
        try:
            found = self.get("format")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path} is no catalogue: {error}", hint="build the index again") from error
        if found != FORMAT:
            raise InputError(f"{path} has format {found}, and this version reads {FORMAT}", hint="upgrade cordee")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make all changes of the block at once, and count a version; on an error none of them."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.set("version", self.version() + 1)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # Settings.

    def set(self, name: str, value: Any) -> None:
        """Keep a setting: bytes as they are, all else as JSON."""
        data = value if isinstance(value, bytes) else json.dumps(value)
        self._run("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, data))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting."""
        found = self._run("SELECT value FROM settings WHERE name = ?", (name,))
        if not found:
            return default
        value = found[0][0]
        return value if isinstance(value, bytes) else json.loads(value)

    def version(self) -> int:
        """Return the number of changes."""
        return int(self.get("version"))

    # Documents and chunks.

    def documents(self) -> dict[str, tuple[int, str]]:
        """Return id and digest of each document by name."""
        return {name: (id_, digest) for id_, name, digest in self._run("SELECT id, name, digest FROM documents")}

    def sources(self) -> list[tuple[str, str, int]]:
        """Return name, title and number of chunks of each document, by name."""
        sql = (
            "SELECT name, title, (SELECT count(*) FROM chunks c WHERE c.document = d.id) FROM documents d ORDER BY name"
        )
        return [(name, title, count) for name, title, count in self._run(sql)]

    def counts(self) -> tuple[int, int]:
        """Return the numbers of documents and of chunks."""
        found = self._run("SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM chunks)")[0]
        return int(found[0]), int(found[1])

    def next_chunk(self) -> int:
        """Return the first id that no chunk has or had."""
        found = self._run("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        return int(found[0][0]) + 1 if found else 1

    def add_document(self, name: str, title: str, digest: str) -> int:
        """Add a document, and return its id."""
        return int(self._run("INSERT INTO documents (name, title, digest) VALUES (?, ?, ?) RETURNING id",
                             (name, title, digest))[0][0])  # fmt: skip

    def add_chunks(self, document: int, partition_of: dict[int, int], rows: Iterable[ChunkRow]) -> None:
        """Add the chunks of a document, each with its partition."""
        values = (
            (
                row.id,
                document,
                partition_of[row.id],
                row.start,
                row.end,
                row.heading,
                row.page,
                row.text,
                _sum(row.text),
            )
            for row in rows
        )
        with self._lock:
            self._db.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def remove_document(self, id_: int) -> int:
        """Remove a document and its chunks; return their number."""
        self._run("INSERT INTO removed SELECT id, partition FROM chunks WHERE document = ?", (id_,))
        count = self._run("SELECT count(*) FROM chunks WHERE document = ?", (id_,))[0][0]
        self._run("DELETE FROM chunks WHERE document = ?", (id_,))
        self._run("DELETE FROM documents WHERE id = ?", (id_,))
        return int(count)

    def passages(self, ids: Sequence[int]) -> dict[int, Passage]:
        """Return chunks by id; those that were removed meanwhile are left out."""
        found: dict[int, Passage] = {}
        for at in range(0, len(ids), _SQL_VARIABLES):
            part = list(map(int, ids[at : at + _SQL_VARIABLES]))
            marks = ",".join("?" * len(part))
            rows = self._run(
                "SELECT c.id, d.name, d.title, c.heading, c.page, c.start, c.stop, c.text, c.xxh3 FROM chunks c "
                f"JOIN documents d ON d.id = c.document WHERE c.id IN ({marks})", part,
            )  # fmt: skip
            for id_, name, title, heading, page, start, end, text, check in rows:
                found[id_] = Passage(id_, name, title, heading, page, start, end, text, _sum(text) == check)
        return found

    def damaged_chunks(self) -> list[tuple[int, str]]:
        """Return id and document of each chunk whose text is not what was written."""
        rows = self._run("SELECT c.id, d.name, c.text, c.xxh3 FROM chunks c JOIN documents d ON d.id = c.document")
        return [(id_, name) for id_, name, text, check in rows if _sum(text) != check]

    # Partitions.

    def partitions(self) -> list[Partition]:
        """Return the partitions by id."""
        with self._lock:
            gone: dict[int, list[int]] = {}
            for chunk, partition in self._run("SELECT chunk, partition FROM removed ORDER BY chunk"):
                gone.setdefault(partition, []).append(chunk)
            rows: list[tuple[Any, ...]] = self._run(
                "SELECT id, key, bytes, xxh3, vectors, added, centroid FROM partitions ORDER BY id"
            )
        return [
            Partition(
                id_,
                key,
                size,
                xxh3,
                vectors,
                bool(added),
                np.frombuffer(centroid, np.float32),
                tuple(gone.get(id_, ())),
            )
            for id_, key, size, xxh3, vectors, added, centroid in rows
        ]

    def dims(self) -> int:
        """Return the dimensions of the vectors; 0: there are none yet."""
        found = self._run("SELECT length(centroid) FROM partitions LIMIT 1")
        return found[0][0] // 4 if found else 0

    def chunk_counts(self) -> dict[int, int]:
        """Return the number of chunks by partition."""
        return dict(self._run("SELECT partition, count(*) FROM chunks GROUP BY partition"))

    def add_partition(
        self, key: str, data: bytes, vectors: int, centroid: npt.NDArray[np.float32], *, added: bool
    ) -> int:
        """Add a partition whose file is written, and return its id."""
        values = (
            key,
            len(data),
            xxhash.xxh3_128_hexdigest(data),
            vectors,
            added,
            centroid.astype(np.float32).tobytes(),
        )
        sql = (
            "INSERT INTO partitions (key, bytes, xxh3, vectors, added, centroid) VALUES (?, ?, ?, ?, ?, ?) RETURNING id"
        )
        return int(self._run(sql, values)[0][0])

    def replace_partitions(self, old: Iterable[int], partition_of: dict[int, int]) -> None:
        """Forget partitions whose chunks that are left went to others."""
        with self._lock:
            self._db.executemany(
                "UPDATE chunks SET partition = ? WHERE id = ?", ((to, id_) for id_, to in partition_of.items())
            )
            for id_ in old:
                self._db.execute("DELETE FROM partitions WHERE id = ?", (id_,))
                self._db.execute("DELETE FROM removed WHERE partition = ?", (id_,))

    def _run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def _sum(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass")))
