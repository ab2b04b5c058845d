"""The files of a job as they were submitted: names, modes and the BLAKE3 of each content, and a copy made from them.

A tree is a blob itself, whose digest the job holds. `content.py` stores the blobs; `folder.py` reads a folder.
"""

import json
import os
import posixpath
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from blake3 import blake3

from cordee.errors import InputError
from cordee.storage.listing import folders_of
from cordee.storage.sealed import canonical

_VERSION = 2
_VERSIONS = (1, _VERSION)  # the first has no links
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
        branch: of that commit; None: none.
        changed: number of files that differ from the commit, with those that git does not track.
        below: the folder in which the job starts, relative to the root; empty: the root.
        inode: of the root, by which a node knows that it has this folder; None: copies have no links into it.
        links: what lies in the root beside the files, and is linked into copies on a node that has the root.
    """

    root: str
    files: tuple[TreeFile, ...]
    program: str | None = None
    import_paths: tuple[str, ...] = ()
    commit: str | None = None
    diff: str | None = None
    branch: str | None = None
    changed: int = 0
    below: str = ""
    inode: int | None = None
    links: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Return the digest of the files alone: the same wherever they lay, and whatever lay beside them."""
        rows = [_row(file) for file in self.files]
        return digest_of(canonical({"files": rows, "below": self.below, "program": self.program}))

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
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return canonical({"version": _VERSION, **own, "files": [_row(file) for file in self.files]})

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
            lists = {name: tuple(found.get(name, ())) for name in ("import_paths", "links")}
            tree = cls(**found | lists | {"files": rows})
            _check_types(tree)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{len(data)} bytes that are not a tree of files: {error}") from None
        if version not in _VERSIONS:
            raise InputError(f"a tree of files of version {version}, not {_VERSION}", hint="upgrade this Cordee")
        _check(tree)
        return tree

    def lay_out(self, read: Callable[[str], bytes], folder: Path) -> None:
        """Make a fresh writable copy; a copy that is there is replaced.

        Args:
            read: returns the verified content of a digest.
            folder: of the copy.
        """
        if not folder.is_dir() or any(folder.iterdir()):  # one that is empty may be the caller's own, as `.` is
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        made = {PurePosixPath(".")}
        # Links come last: on a disk that ignores case, a file below "Lib" would be written through a link "lib".
        for file in sorted(self.files, key=lambda each: each.kind == "link"):
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
        (folder / self.below).mkdir(parents=True, exist_ok=True)
        if self.has_root():
            for each in self.links:
                if os.path.lexists(os.path.join(self.root, each)):  # noqa: PTH118
                    (folder / each).symlink_to(os.path.join(self.root, each))  # noqa: PTH118

    def has_root(self) -> bool:
        """Return whether this machine has the submitter's folder, and not another one of its name."""
        try:
            return self.inode is not None and os.stat(self.root).st_ino == self.inode  # noqa: PTH116
        except OSError:
            return False


def digest_of(data: bytes) -> str:
    """Return the name of a content: its BLAKE3 in hex."""
    return str(blake3(data).hexdigest())


def _row(file: TreeFile) -> tuple[str, str, int, str]:
    return file.path, file.kind, file.size_bytes, file.content


def _check_types(tree: Tree) -> None:
    """Raise TypeError if a value of a tree is not of its type, as JSON gives them."""
    optional = (tree.program, tree.commit, tree.diff, tree.branch)
    texts = [tree.root, tree.below, *tree.import_paths, *tree.links, *(each for each in optional if each is not None)]
    texts += [text for file in tree.files for text in (file.path, file.kind, file.content)]
    counts = [tree.changed, *([] if tree.inode is None else [tree.inode]), *(file.size_bytes for file in tree.files)]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r:.100} is no text")
    for count in counts:
        if type(count) is not int or count < 0:
            raise TypeError(f"{count!r:.100} is no number of bytes or files")
    for file in tree.files:
        if file.kind not in get_args(Kind):
            raise TypeError(f"{file.kind!r:.100} is no kind of file")
    if tree.diff is not None and not _is_digest(tree.diff):
        raise TypeError(f"{tree.diff!r:.100} is no digest of a diff")


def _check(tree: Tree) -> None:
    """Raise InputError if a copy of the tree could write outside its folder."""
    links = {file.path for file in tree.files if file.kind == "link"} | set(tree.links)
    names = [*(file.path for file in tree.files), *tree.links]
    seen = set(names)
    folders = folders_of(names) - {""}
    if len(seen) < len(names) or folders & links:
        raise InputError("a file of the tree would not lie in its copy, or lies there twice")
    for name in names:
        odd = name in ("", ".", "..") or name.startswith(("/", "../")) or "\0" in name
        if odd or posixpath.normpath(name) != name:
            raise InputError(f"the tree's file {name!r} would not lie in its copy, or lies there twice")
    below = PurePosixPath(tree.below)
    if below.is_absolute() or ".." in below.parts or {str(below), *map(str, below.parents)} & links:
        raise InputError(f"the tree's folder {tree.below!r} would not lie in its copy")
    if folders & seen:
        raise InputError(f"the tree's file {min(folders & seen)!r} is a folder too")
    for file in tree.files:
        if file.kind != "link" and not _is_digest(file.content):
            raise InputError(f"the tree's file {file.path!r} has no digest")


def _is_digest(text: str) -> bool:
    return len(text) == DIGEST_CHARS and set(text) <= set("0123456789abcdef")
