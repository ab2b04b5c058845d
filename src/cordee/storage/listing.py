"""The files of a folder by the rules of git and .cordeeignore, and what git knows of the folder.

git reads the ignore rules, also in a folder that is no repository; submodules and nested repositories are read too.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import InputError

IGNORE_FILE = ".cordeeignore"
NEVER = ("__pycache__/", "*.pyc", ".venv/", "venv/", ".ipynb_checkpoints/")  # unless git tracks them
DIFF_BYTES_MAX = 100_000_000
_GIT_S_MAX = 60
_EXCLUDED_CHARS_MAX = 500_000
_WALKED_MAX = 1_000_000  # files of a folder without git


@dataclass(frozen=True, slots=True)
class CheckedOut:
    """The commit that is checked out in a folder.

    Attributes:
        commit: its hash; None: there is none.
        branch: None: a detached one.
        diff: the changes of tracked files since.
    """

    commit: str | None = None
    branch: str | None = None
    diff: bytes = b""

    @property
    def changed(self) -> int:
        """Number of tracked files that differ from the commit."""
        return self.diff.startswith(b"diff --git ") + self.diff.count(b"\ndiff --git ")


def top_of(folder: Path) -> Path | None:
    """Return the top of the working tree of git that has this folder and does not ignore it; None: there is none."""
    if shutil.which("git") is None:
        return None
    base = ["git", "-C", str(folder)]
    found = _git([*base, "rev-parse", "--show-toplevel"], may_fail=True)
    if not found or _git([*base, "check-ignore", "-q", "."], may_fail=True) is not None:
        return None
    return Path(os.fsdecode(found.rstrip(b"\n")))


def listed(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the paths of files and links below a folder that belong to the job, and whether git tracks each.

    Raises:
        InputError: git cannot list them, or a name is not UTF-8.
    """
    if shutil.which("git") is None:
        yield from ((path, False) for path in _walked(root))
        return
    with tempfile.TemporaryDirectory() as scratch:
        base = ["git", "-C", str(root)]
        if top_of(root) is None:
            own = Path(scratch, "none.git")
            _git(["git", "init", "-q", "--bare", str(own)])
            base += [f"--git-dir={own}", f"--work-tree={root}"]
        command = [*base, "ls-files", "-z", "-t", "--cached", "--others"]
        never = [f"--exclude={pattern}" for pattern in NEVER]
        paths = _tagged(_git([*command, "--exclude-standard", *never]))
        if any(path.rpartition("/")[2] == IGNORE_FILE for path in paths):
            ignored = _git([*command, "--ignored", f"--exclude-per-directory={IGNORE_FILE}"])
            for path in _tagged(ignored):
                paths.pop(path, None)
    for path, tracked in paths.items():
        whole = root / path
        if not os.path.lexists(whole):
            continue  # git tracks it, and it was removed
        if whole.is_dir() and not whole.is_symlink():
            yield from ((f"{path.rstrip('/')}/{below}", its) for below, its in listed(whole))
        else:
            yield path, tracked


def commit_of(root: Path, kept: Collection[str] | None = None) -> CheckedOut:
    """Return the commit that is checked out in a folder, and the changes since.

    Args:
        root: the folder.
        kept: the paths below it whose changes may be shown, besides those of files that were removed; None: none.
    """
    if shutil.which("git") is None:
        return CheckedOut()
    base = ["git", "--no-optional-locks", "-C", str(root)]
    commit = _git([*base, "rev-parse", "--verify", "-q", "HEAD"], may_fail=True)
    if commit is None:
        return CheckedOut()
    branch = _git([*base, "symbolic-ref", "-q", "--short", "HEAD"], may_fail=True) or b""
    diff = b"" if kept is None else _diff(root, base, kept)
    named = os.fsdecode(branch.strip()).encode(errors="replace").decode() or None
    return CheckedOut(commit.decode().strip(), named, diff if len(diff) <= DIFF_BYTES_MAX else b"")


def _diff(root: Path, base: Sequence[str], kept: Collection[str]) -> bytes:
    """Return the changes of the tracked files that are kept, and of those that are gone and that no rule names.

    Nothing, if git cannot be told of all that it must leave out.
    """
    changed = _git(
        [*base, "diff", "--no-ext-diff", "--no-renames", "--name-only", "--relative", "-z", "HEAD", "--", "."]
    )
    paths = [os.fsdecode(path) for path in (changed or b"").split(b"\0") if path]
    hidden = _tagged(
        _git([*base, "ls-files", "-z", "-t", "--cached", "--ignored", f"--exclude-per-directory={IGNORE_FILE}"])
    )
    left_out = [path for path in paths if path not in kept and (path in hidden or os.path.lexists(root / path))]
    if sum(map(len, left_out)) > _EXCLUDED_CHARS_MAX:
        return b""
    out = [f":(exclude,literal){path}" for path in left_out]
    command = [*base, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "HEAD", "--", ".", *out]
    return _git(command) or b""


def _tagged(found: bytes | None) -> dict[str, bool]:
    """Return the paths that git listed with their tags, and whether it tracks each."""
    try:
        entries = [entry.decode() for entry in (found or b"").split(b"\0") if entry]
    except UnicodeDecodeError as error:
        raise InputError(
            f"a file has a name that is not UTF-8: {error.object[2:]!r:.200}",
            hint=f"rename it, or name it in {IGNORE_FILE}",
        ) from None
    return {entry[2:]: entry[0] != "?" for entry in entries}


def _walked(root: Path) -> Iterator[str]:
    """Yield all files of a folder on a machine without git, which cannot read ignore rules."""
    never = {pattern.rstrip("/") for pattern in NEVER} | {".git"}
    count = 0
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in never]
        links = [name for name in names if Path(folder, name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder, name)
            if name == IGNORE_FILE:
                raise InputError(f"{path} is read by git, which is not installed", hint="install git, or remove it")
            if path.is_symlink() or path.is_file():
                count += 1
                if count > _WALKED_MAX:
                    raise InputError(f"{root} has over {_WALKED_MAX:,} files", hint="submit from the job's own folder")
                yield path.relative_to(root).as_posix()


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


def folders_of(paths: Iterable[str]) -> set[str]:
    """Return all folders above these paths, the root as an empty path.

    >>> sorted(folders_of(["a/b/c", "d"]))
    ['', 'a', 'a/b']
    """
    found = {""}
    for path in paths:
        above = path.rpartition("/")[0]
        while above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def beside(root: Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Return what lies beside these files in their folders and is none of them, without caches and git's own."""
    folders, found = folders_of(paths), list[str]()
    taken = {*paths, *folders}
    for folder in folders:
        try:
            entries = [entry.name for entry in os.scandir(root / folder)]
        except OSError:
            continue
        for name in entries:
            path = f"{folder}/{name}" if folder else name
            own = name in (".git", "__pycache__") or name.endswith(".pyc")
            if path not in taken and not own and path.isprintable():
                found.append(path)
    return tuple(sorted(found))
