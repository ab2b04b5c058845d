"""The files of a job as they were submitted: names, modes and the BLAKE3 of each content, and a copy made from them.

A tree is a blob itself, whose digest the job holds. `content.py` stores the blobs; `folder.py` reads a folder.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from blake3 import blake3

from cordee.errors import InputError
from cordee.storage.sealed import canonical

_VERSION = 1
DIGEST_CHARS = 64

Kind = Literal["file", "program", "link"]
"""A file, one that may be executed, or a symbolic link."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a tree; `content` is its digest, or the target of a link."""

    path: str
    kind: Kind
    size_bytes: int
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The files below one folder.

    Attributes:
        root: the submitter's folder.
        files: sorted by path.
        program: the file that the first word of the job's command named there; None if it is not known.
        import_paths: folders below the root from which the submitter's environment imports (editable installs).
        commit: the commit of git that was checked out; None: none was.
        diff: digest of the changes since that commit; None: there are none.
    """

    root: str
    files: tuple[TreeFile, ...]
    program: str | None = None
    import_paths: tuple[str, ...] = ()
    commit: str | None = None
    diff: str | None = None

    @property
    def digests(self) -> dict[str, int]:
        """Size in bytes of each distinct content, by digest; that of the diff is not part of a copy."""
        return {file.content: file.size_bytes for file in self.files if file.kind != "link"}

    @property
    def size_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """Return the tree as a blob."""
        return canonical({"version": _VERSION, **asdict(self), "files": [list(_row(file)) for file in self.files]})

    @classmethod
    def decode(cls, data: bytes) -> "Tree":
        """Return the tree in a blob.

        Raises:
            InputError: it is none, or one of its files would lie outside its copy.
        """
        try:
            found = json.loads(data)
            version = found.pop("version")
            rows = tuple(TreeFile(*row) for row in found.pop("files"))
            tree = cls(**found | {"files": rows, "import_paths": tuple(found["import_paths"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{len(data)} bytes that are not a tree of files: {error}") from None
        if version != _VERSION:
            raise InputError(f"a tree of files of version {version}, not {_VERSION}", hint="upgrade this Cordee")
        _check(tree)
        return tree

    def lay_out(self, read: Callable[[str], bytes], folder: Path) -> None:
        """Make a fresh writable copy; a copy that is there is replaced.

        Args:
            read: returns the verified content of a digest.
            folder: of the copy.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = {PurePosixPath(".")}
        for file in self.files:
            parent = PurePosixPath(file.path).parent
            if parent not in made:
                (folder / parent).mkdir(parents=True, exist_ok=True)
                made.add(parent)
            path = folder / file.path
            if file.kind == "link":
                path.symlink_to(file.content)
                continue
            path.write_bytes(read(file.content))
            if file.kind == "program":
                path.chmod(path.stat().st_mode | 0o111)


def digest_of(data: bytes) -> str:
    """Return the name of a content: its BLAKE3 in hex."""
    return str(blake3(data).hexdigest())


def _row(file: TreeFile) -> tuple[str, str, int, str]:
    return file.path, file.kind, file.size_bytes, file.content


def _check(tree: Tree) -> None:
    """Raise InputError if a copy of the tree could write outside its folder."""
    links = {file.path for file in tree.files if file.kind == "link"}
    seen: set[str] = set()
    for file in tree.files:
        path = PurePosixPath(file.path)
        parents = {str(parent) for parent in path.parents}
        outside = path.is_absolute() or ".." in path.parts or str(path) != file.path or "\0" in file.path
        if outside or not path.parts or file.path in seen or parents & links:
            raise InputError(f"the tree's file {file.path!r} would not lie in its copy, or lies there twice")
        if file.kind != "link" and not _is_digest(file.content):
            raise InputError(f"the tree's file {file.path!r} has no digest")
        seen.add(file.path)


def _is_digest(text: str) -> bool:
    return len(text) == DIGEST_CHARS and set(text) <= set("0123456789abcdef")
