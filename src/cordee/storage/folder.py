"""Read a folder as a tree: what git tracks, and what it neither tracks nor ignores, without what .cordeeignore names.

git reads the ignore rules, also in a folder that is no repository; submodules and nested repositories are read too.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cordee.errors import InputError
from cordee.storage.tree import Tree, TreeFile, digest_of
from cordee.units import MB, format_bytes, plural

IGNORE_FILE = ".cordeeignore"
LIMIT_BYTES = 100 * MB
FILES_MAX = 50_000
_LARGEST = 5  # files that a refusal names
_GIT_S_MAX = 60
_NEVER = ("__pycache__/", "*.pyc", ".venv/", "venv/", ".ipynb_checkpoints/")  # unless git tracks them


def read_folder(
    root: Path, *, without: Sequence[Path] = (), program: str | None = None, import_paths: Sequence[str] = ()
) -> tuple[Tree, dict[str, Path | bytes]]:
    """Return the tree of a folder, and where the content of each digest is.

    Args:
        root: the folder.
        without: files and folders to leave out, such as those of checkpoints.
        program: recorded in the tree.
        import_paths: recorded in the tree.

    Raises:
        InputError: the files are too many or too large, or git cannot list them.
    """
    root = root.resolve()
    apart = [path.resolve() for path in without]
    found = {path: (root / path).lstat() for path in sorted(set(_listed(root))) if not _below(root / path, apart)}
    _check_limits(root, {path: status.st_size for path, status in found.items()})
    contents: dict[str, Path | bytes] = {}
    files = []
    for path, status in found.items():
        file = _read(root, path, status)
        files.append(file)
        if file.kind != "link":
            contents[file.content] = root / path
    commit, diff = _commit(root)
    if diff:
        contents[digest_of(diff)] = diff
    tree = Tree(
        root=str(root),
        files=tuple(files),
        program=program,
        import_paths=tuple(import_paths),
        commit=commit,
        diff=digest_of(diff) if diff else None,
    )
    return tree, contents


def _read(root: Path, path: str, status: os.stat_result) -> TreeFile:
    whole = root / path
    if stat.S_ISLNK(status.st_mode):
        return TreeFile(path, "link", 0, _target(root, whole))
    try:
        data = whole.read_bytes()
    except OSError as error:
        raise InputError(
            f"{whole} cannot be read: {error.strerror}", hint=f"name it in {IGNORE_FILE} if the job does not need it"
        ) from error
    return TreeFile(path, "program" if status.st_mode & 0o100 else "file", len(data), digest_of(data))


def _target(root: Path, link: Path) -> str:
    """Return the target of a link as it holds in a copy: relative inside the folder, absolute outside."""
    written = os.readlink(link)  # noqa: PTH115
    target = Path(os.path.normpath(link.parent / written))
    if target.is_relative_to(root):
        return os.path.relpath(target, link.parent)
    return str(target)


def _below(path: Path, apart: Sequence[Path]) -> bool:
    return any(path.is_relative_to(each) for each in apart)


def _check_limits(root: Path, sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total <= LIMIT_BYTES and len(sizes) <= FILES_MAX:
        return
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:_LARGEST]
    named = ", ".join(f"{path} ({format_bytes(sizes[path])})" for path in largest)
    raise InputError(
        f"{root} has {plural(len(sizes), 'file')} with {format_bytes(total)}, and a job's files may be {FILES_MAX:,} "
        f"with {format_bytes(LIMIT_BYTES)}; the largest: {named}",
        hint=f"name what the job does not need in {root / IGNORE_FILE}, in the language of .gitignore",
    )


def _listed(root: Path) -> Iterator[str]:
    """Yield the paths of files and links below a folder that belong to the job."""
    if shutil.which("git") is None:
        yield from _walked(root)
        return
    with tempfile.TemporaryDirectory() as scratch:
        base = ["git", "-C", str(root)]
        if not _has_repository(base):
            own = Path(scratch, "none.git")
            _git(["git", "init", "-q", "--bare", str(own)])
            base += [f"--git-dir={own}", f"--work-tree={root}"]
        command = [*base, "ls-files", "-z", "--cached", "--others"]
        never = [f"--exclude={pattern}" for pattern in _NEVER]
        paths = _split(_git([*command, "--exclude-standard", *never]))
        if any(path.rpartition("/")[2] == IGNORE_FILE for path in paths):
            ignored = _git([*command, "--ignored", f"--exclude-per-directory={IGNORE_FILE}"])
            paths -= _split(ignored)
    for path in paths:
        whole = root / path
        if not os.path.lexists(whole):
            continue  # git tracks it, and it was removed
        if whole.is_dir() and not whole.is_symlink():
            yield from (f"{path.rstrip('/')}/{below}" for below in _listed(whole))
        else:
            yield path


def _has_repository(base: Sequence[str]) -> bool:
    """Return whether the folder is in a working tree of git that does not ignore it as a whole."""
    if _git([*base, "rev-parse", "--is-inside-work-tree"], may_fail=True) is None:
        return False
    return _git([*base, "check-ignore", "-q", "."], may_fail=True) is None


def _split(listed: bytes | None) -> set[str]:
    try:
        return {path.decode() for path in (listed or b"").split(b"\0") if path}
    except UnicodeDecodeError as error:
        raise InputError(
            f"a file has a name that is not UTF-8: {error.object!r:.200}",
            hint=f"rename it, or name it in {IGNORE_FILE}",
        ) from None


def _walked(root: Path) -> Iterator[str]:
    """Yield all files of a folder on a machine without git, which cannot read ignore rules."""
    never = {pattern.rstrip("/") for pattern in _NEVER} | {".git"}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in never]
        links = [name for name in names if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder, name)
            if name == IGNORE_FILE:
                raise InputError(f"{path} is read by git, which is not installed", hint="install git, or remove it")
            if path.is_symlink() or path.is_file():
                yield path.relative_to(root).as_posix()


def _commit(root: Path) -> tuple[str | None, bytes]:
    """Return the commit that is checked out, and the changes since."""
    if shutil.which("git") is None:
        return None, b""
    base = ["git", "-C", str(root)]
    commit = _git([*base, "rev-parse", "--verify", "-q", "HEAD"], may_fail=True)
    if commit is None:
        return None, b""
    diff = _git([*base, "diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", "."]) or b""
    return commit.decode().strip(), diff if len(diff) <= LIMIT_BYTES else b""


def _git(command: Iterable[str], *, may_fail: bool = False) -> bytes | None:
    try:
        done = subprocess.run(
            [*command], capture_output=True, check=False, timeout=_GIT_S_MAX, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"git did not answer within {_GIT_S_MAX} s", hint="submit from a smaller folder") from None
    if done.returncode == 0:
        return done.stdout
    if may_fail and b"dubious ownership" not in done.stderr:
        return None
    said = done.stderr.decode(errors="replace").strip()
    raise InputError(f"git cannot list the job's files: {said}", hint="repair the repository, or submit from a copy")
