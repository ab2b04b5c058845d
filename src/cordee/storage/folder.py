"""Read a folder as a tree: what git tracks, and what it does not ignore, without what .cordeeignore names."""

import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import InputError
from cordee.storage.captured import CapturedIndex
from cordee.storage.listing import IGNORE_FILE, beside, commit_of, listed
from cordee.storage.tree import Kind, Tree, TreeFile, digest_of
from cordee.units import MB, format_bytes, plural

LIMIT_BYTES = 100 * MB
FILES_MAX = 50_000
_LARGEST = 5  # files that a refusal names
_PARTS = {"log", "chunks", "manifests"}  # folders of a job's checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesWanted:
    """Which files of a folder are read, and what the tree says beside them.

    Attributes:
        without: files and folders to leave out, such as those of checkpoints.
        only: the files to read, relative to the folder; None: those of the rules.
        linked: what is left out becomes links in copies on the same machine: so what cannot be read is left out too,
            and the largest files that git does not track if all are too large.
        below: the folder in which the job starts, relative to the root.
        program: recorded in the tree.
        import_paths: recorded in the tree.
        home: keeps what the files held, so that only those that changed are read again; None: all are read.
    """

    without: Sequence[Path] = ()
    only: Collection[str] | None = None
    linked: bool = False
    below: str = ""
    program: str | None = None
    import_paths: Sequence[str] = ()
    home: Path | None = None


@dataclass(frozen=True, slots=True)
class CapturedFiles:
    """A tree, where the content of each digest is, and the files that were left out because of their size."""

    tree: Tree
    contents: Mapping[str, Path | bytes]
    too_large: Mapping[str, int]


def capture(root: Path, wanted: FilesWanted = FilesWanted()) -> CapturedFiles:
    """Return the tree of a folder, and where its contents are.

    Raises:
        InputError: the files are too many or too large, one cannot be read, or git cannot list them.
    """
    root = root.resolve()
    found, tracked = _found(root, wanted)
    too_large = _over_limit(root, found, tracked, linked=wanted.linked)
    contents: dict[str, Path | bytes] = {}
    files = []
    index = CapturedIndex(wanted.home, root)
    for path, status in found.items():
        if path in too_large:
            continue
        try:
            file = _read(root, path, status, index)
        except FileNotFoundError:
            continue  # it has gone meanwhile
        except OSError as error:
            if wanted.linked:
                continue
            hint = f"name it in {IGNORE_FILE} if the job does not need it"
            raise InputError(f"{root / path} cannot be read: {error.strerror}", hint=hint) from error
        files.append(file)
        if file.kind != "link":
            contents[file.content] = root / path
    index.keep()
    at = commit_of(root, None if wanted.only is not None else {file.path for file in files})
    if at.diff:
        contents[digest_of(at.diff)] = at.diff
    untracked = 0 if at.commit is None else len({file.path for file in files} - tracked)
    tree = Tree(
        root=str(root),
        files=tuple(files),
        program=wanted.program,
        import_paths=tuple(wanted.import_paths),
        commit=at.commit,
        diff=digest_of(at.diff) if at.diff else None,
        branch=at.branch,
        changed=at.changed + untracked,
        below=wanted.below,
        inode=root.stat().st_ino if wanted.linked else None,
        links=beside(root, [file.path for file in files]) if wanted.linked else (),
    )
    return CapturedFiles(tree, contents, too_large)


def _found(root: Path, wanted: FilesWanted) -> tuple[dict[str, os.stat_result], set[str]]:
    """Return the status of each file to read, by path, and the paths that git tracks."""
    apart = [path.resolve() for path in wanted.without]
    inside = {path.relative_to(root).as_posix() for path in apart if path.is_relative_to(root)}
    names = dict(listed(root)) if wanted.only is None else dict.fromkeys(wanted.only, True)
    if len(names) > FILES_MAX:
        _refuse_number(root, names)
    checkpoints = set(_folders_of_checkpoints(names))
    found: dict[str, os.stat_result] = {}
    for path in sorted(names):
        if path in inside or _within(path, inside) or _within(path, checkpoints):
            continue
        try:
            status = os.lstat(f"{root}/{path}")
        except OSError:
            continue  # it has gone meanwhile
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):  # a socket or a pipe has no content
            found[path] = status
    return found, {path for path, tracked in names.items() if tracked}


def _folders_of_checkpoints(names: Mapping[str, bool]) -> Iterator[str]:
    """Yield the folders that look like those of a job's checkpoints, none of which git tracks."""
    parts: dict[str, set[str]] = {}
    for path, tracked in names.items():
        if tracked:
            continue
        above = path.split("/")
        for at, name in enumerate(above[:-1]):
            if name in _PARTS and at:
                parts.setdefault("/".join(above[:at]), set()).add(name)
    yield from (folder for folder, its in parts.items() if its >= _PARTS)


def _within(path: str, folders: Collection[str]) -> bool:
    above = path.rpartition("/")[0] if folders else ""
    while above:
        if above in folders:
            return True
        above = above.rpartition("/")[0]
    return False


def _read(root: Path, path: str, status: os.stat_result, index: CapturedIndex) -> TreeFile:
    whole = root / path
    if stat.S_ISLNK(status.st_mode):
        return TreeFile(path, "link", 0, _target(root, whole))
    kind: Kind = "program" if status.st_mode & 0o100 else "file"
    known = index.digest(path, status)
    if known is not None:
        return TreeFile(path, kind, status.st_size, known)
    read_ns = time.time_ns()
    data = read_regular(whole)
    digest = digest_of(data)
    if len(data) == status.st_size:
        index.note(path, status, digest, read_ns)
    return TreeFile(path, kind, len(data), digest)


def read_regular(path: Path) -> bytes:
    """Return the content of a file; one that has become a pipe is not waited for.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{path} is no file any more")
        return file.read()


def _target(root: Path, link: Path) -> str:
    """Return the target of a link as it holds in a copy: relative inside the folder, absolute outside."""
    written = os.readlink(link)  # noqa: PTH115
    target = Path(os.path.normpath(link.parent / written))
    if target.is_relative_to(root):
        return os.path.relpath(target, link.parent)
    return str(target)


def _over_limit(
    root: Path, found: Mapping[str, os.stat_result], tracked: Collection[str], *, linked: bool
) -> dict[str, int]:
    """Return the files to leave out so that the rest is within the limit, with their sizes: the largest first.

    Raises:
        InputError: the files are too large, and none may be left out.
    """
    sizes = {path: status.st_size for path, status in found.items()}
    total = sum(sizes.values())
    if total <= LIMIT_BYTES:
        return {}
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))
    out: dict[str, int] = {}
    for path in largest if linked else ():
        if total - sum(out.values()) <= LIMIT_BYTES:
            break
        if path not in tracked:
            out[path] = sizes[path]
    if total - sum(out.values()) <= LIMIT_BYTES:
        return out
    named = ", ".join(f"{path} ({format_bytes(sizes[path])})" for path in largest[:_LARGEST])
    raise InputError(
        f"{root} has {plural(len(sizes), 'file')} with {format_bytes(total)}, and a job's files may be {FILES_MAX:,} "
        f"with {format_bytes(LIMIT_BYTES)}; the largest: {named}",
        hint=_hint(root, linked=linked),
    )


def _refuse_number(root: Path, names: Collection[str]) -> None:
    counts: dict[str, int] = {}
    for path in names:
        top = path.partition("/")[0]
        counts[top] = counts.get(top, 0) + 1
    most = sorted(counts, key=lambda name: (-counts[name], name))[:_LARGEST]
    named = ", ".join(f"{name} ({counts[name]:,})" for name in most)
    raise InputError(
        f"{root} has {len(names):,} files, and a job's files may be {FILES_MAX:,}; most are in: {named}",
        hint=_hint(root, linked=True),
    )


def _hint(root: Path, *, linked: bool) -> str:
    name = f"name what the job does not need in {root / IGNORE_FILE}, in the language of .gitignore"
    return f"{name} (on the same machine, copies have links to it); or --live runs in the folder" if linked else name
