"""Capture the code of a job when it is submitted: each attempt then runs that, whatever is edited since."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cordee.client import Client
from cordee.errors import ForbiddenError, InputError, SpecError
from cordee.servers import default_home
from cordee.units import format_bytes, plural
from cordee.workload.launcher import SEARCH_PATHS, commands_of
from cordee.workload.spec import JobSpec

if TYPE_CHECKING:
    from cordee.storage.folder import CapturedFiles

_TRIES = 3  # to read files that change meanwhile
_NAMED = 4  # links and files that a note names


class _Changed(Exception):
    """A file is not any more what was read."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder to capture.

    Attributes:
        root: the folder.
        below: where the job starts in it.
        only: its files that are captured, since it is no folder of a project; None: all that belong to the job.
    """

    root: Path
    below: str = ""
    only: tuple[str, ...] | None = None


def capture_job(
    client: Client, spec: JobSpec, *, ship: bool | None = None, remote: bool = False
) -> tuple[JobSpec, list[str]]:
    """Send the code of a job, and return the job that runs a copy of it, with notes for its submitter.

    Args:
        client: of the server.
        spec: the job; `live` leaves it in its folder.
        ship: `--ship` or `--live`; None: neither.
        remote: the server is on another machine, which may not see the folder.

    Raises:
        InputError: the files are too large or too many, or one cannot be read.
        SpecError: the job is live and the server is on another machine, or the program lies outside the folder.
    """
    if spec.files is not None:
        return spec, []
    live = spec.live if ship is None else not ship
    if live and remote:
        raise SpecError(
            "--live runs the job in this folder, and the server is on another machine",
            hint="leave --live out, or give the job file a `cwd` that every node has",
        )
    if live:
        return spec, []
    folder = Path(spec.cwd or Path.cwd()).resolve()
    forced = remote or ship is True
    problem: InputError | SpecError | None = None
    for place in _places(spec, folder, forced=forced):
        if place.only == ():
            return spec, []  # the command uses no file of the folder
        word = _outside(spec, folder, place.root)
        if word is not None:
            hint = "submit from the folder that has all files of the job"
            problem = SpecError(f"{word} is outside {place.root}, whose files are sent", hint=hint)
            continue
        try:
            sent, captured = _send(client, spec, place, remote=remote)
        except InputError as error:  # a repository may be too large, and the folder in it not
            problem = problem or error
        else:
            if not captured.tree.files and not forced:
                return spec, []  # an empty folder
            return sent, [] if remote else _notes(captured)
    assert problem is not None, "there is a place, and it was left for a reason"
    if forced or (isinstance(problem, InputError) and next(_named_files(spec, folder), None) is not None):
        raise problem
    return spec, [f"it runs in {folder} itself, so edits reach it: {problem.message}"]


def _places(spec: JobSpec, folder: Path, *, forced: bool) -> list[_Place]:
    """Return what to capture, the best first: the repository that has the folder, the folder, or files in it."""
    from cordee.storage.listing import top_of

    if _is_broad(folder) and not forced:
        return [_Place(folder, only=tuple(_named_files(spec, folder)))]
    top = top_of(folder)
    if top is None or _is_broad(top) or top == folder:
        return [_Place(folder)]
    return [_Place(top, folder.relative_to(top).as_posix()), _Place(folder)]


def _is_broad(folder: Path) -> bool:
    """Return whether a folder has everything of a person or of a machine, and not one project."""
    home = Path.home().resolve()
    return home.is_relative_to(folder) or folder in {Path(each).resolve() for each in (tempfile.gettempdir(), "/tmp")}


def _words(spec: JobSpec) -> Iterator[str]:
    for command in commands_of(spec.run):
        for word in command:
            yield word
            if "=" in word:
                yield word.partition("=")[2]


def _named_files(spec: JobSpec, folder: Path) -> Iterator[str]:
    """Yield the files below the folder that the command names."""
    seen = set[str]()
    for word in _words(spec):
        path = Path(os.path.normpath(folder / word))
        if len(word) < os.pathconf("/", "PC_NAME_MAX") and path.is_relative_to(folder) and path.is_file():
            name = path.relative_to(folder).as_posix()
            if name not in seen:
                seen.add(name)
                yield name


def _outside(spec: JobSpec, folder: Path, root: Path) -> str | None:
    """Return a word of the command that names a file above the root, which a copy does not have."""
    for word in _words(spec):
        if word.startswith("../") and not Path(os.path.normpath(folder / word)).is_relative_to(root):
            return word
    return None


def _send(client: Client, spec: JobSpec, place: _Place, *, remote: bool) -> tuple[JobSpec, "CapturedFiles"]:
    """Read the files, send those that the server lacks, and return the job that runs them.

    Relative destinations of checkpoints lie in the submitter's folder, if the server is on this machine.
    """
    from cordee.storage.destination import is_remote, level_urls, moved
    from cordee.storage.folder import FilesWanted, capture
    from cordee.storage.tree import digest_of

    folder = place.root / place.below
    if not remote:
        places = {name: getattr(spec.checkpoint, name) for name in ("to", "base")}
        absolute = {
            name: moved(to, lambda each: each if "://" in each else str(folder / Path(each).expanduser()))
            for name, to in places.items()
            if to
        }
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=absolute)})
    spec = spec.model_copy(update={"env": _resolved(spec.env, place.root, folder)})
    without = [client.home] if client.home else []
    if spec.checkpoint.to:
        on_disk = [each for each in level_urls(spec.checkpoint.to) if not is_remote(each)]
        without += [folder / each.removeprefix("file://") for each in on_disk]
    program = _program(spec)
    wanted = FilesWanted(
        without=without,
        only=place.only,
        linked=not remote,
        below=place.below,
        program=program,
        import_paths=_import_paths(program, place.root),
        home=client.home or default_home(),
    )
    for left in reversed(range(_TRIES)):
        captured = capture(place.root, wanted)
        wanted = replace(wanted, home=None)  # what has changed may not be what the index says
        data = captured.tree.encode()
        held = {digest_of(data): data, **captured.contents}
        try:
            _send_contents(client, held, captured)
        except _Changed as changed:
            if not left:
                raise InputError(f"{changed} changed while it was sent", hint="submit again") from None
        else:
            break
    return spec.model_copy(update={"files": digest_of(data)}), captured


def _send_contents(client: Client, held: Mapping[str, Path | bytes], captured: "CapturedFiles") -> None:
    """Send the contents that the server lacks.

    Raises:
        _Changed: a file is not any more what was read.
    """
    from cordee.storage.content import batches, pack
    from cordee.storage.folder import read_regular
    from cordee.storage.tree import digest_of

    def read(digest: str) -> bytes:
        where = held[digest]
        if not isinstance(where, Path):
            return where
        try:
            found = read_regular(where)
        except OSError:
            found = b""
        if digest_of(found) != digest:
            raise _Changed(str(where))
        return found

    in_memory = {digest: len(where) for digest, where in held.items() if not isinstance(where, Path)}
    sizes = {**in_memory, **captured.tree.digests}
    missing = client.missing_files(sizes)
    for group in batches({digest: sizes[digest] for digest in missing}):
        client.send_files(pack(group, read))


def _notes(captured: "CapturedFiles") -> list[str]:
    """Return what the submitter should know of a copy on this machine."""
    tree = captured.tree
    said = [f"it runs a copy of {tree.root} as it is now ({copied_text(tree.commit, tree.changed, len(tree.files))})"]
    shown = [each for each in tree.links if not each.rpartition("/")[2].startswith(".")]
    if shown:
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        said[0] += f"; not copied but linked: {', '.join(shown[:_NAMED])}{more}"
    if captured.too_large:
        named = [f"{path} ({format_bytes(size)})" for path, size in captured.too_large.items()]
        more = f" and {plural(len(named) - _NAMED, 'other')}" if len(named) > _NAMED else ""
        said.append(
            f"too large to copy, so edits of {', '.join(named[:_NAMED])}{more} reach it; name data in .cordeeignore"
        )
    return said


def copied_text(commit: str | None, changed: int, files: int) -> str:
    """Return what a copy was made of.

    >>> copied_text("1a2b3c4d5e6f", 2, 40), copied_text("1a2b3c4d5e6f", 0, 40), copied_text(None, 0, 1)
    ('commit 1a2b3c4 + 2 files changed', 'commit 1a2b3c4', '1 file')
    """
    if commit is None:
        return plural(files, "file")
    return f"commit {commit[:7]}" + (f" + {plural(changed, 'file')} changed" if changed else "")


def _resolved(env: Mapping[str, str], root: Path, folder: Path) -> dict[str, str]:
    """Return an environment whose search paths name the folder by its real path, by which nodes find it in a copy."""
    found = dict(env)
    for name in env.keys() & SEARCH_PATHS:
        entries = [(folder / entry).resolve() for entry in env[name].split(os.pathsep)]
        pairs = zip(env[name].split(os.pathsep), entries, strict=True)
        found[name] = os.pathsep.join(str(real) if real.is_relative_to(root) else entry for entry, real in pairs)
    return found


def names_program(spec: JobSpec) -> bool:
    """Return whether the command says where its program is, and does not leave that to PATH."""
    commands = commands_of(spec.run)
    return bool(commands) and commands[0][0].startswith("/")


def _program(spec: JobSpec) -> str | None:
    """Return the path of the program that this shell's PATH gives the job; None if the job names its own."""
    commands = commands_of(spec.run)
    if len(commands) != 1 or "/" in commands[0][0]:
        return None
    return shutil.which(commands[0][0], path=spec.env.get("PATH", os.defpath))


def _import_paths(program: str | None, root: Path) -> Sequence[str]:
    """Return the folders below the root that the program's environment imports from: those of editable installs."""
    if program is None:
        return ()
    found = []
    for path in Path(program).parent.parent.glob("lib/python*/site-packages/*.pth"):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("/") and Path(line).resolve().is_relative_to(root) and Path(line).is_dir():
                found.append(Path(line).resolve().relative_to(root).as_posix())
    return tuple(sorted(set(found)))


def write_code(client: Client, ref: str | None, *, diff: bool, to: Path | None) -> None:
    """Print the changes since a job's commit, or write its captured files into a new folder.

    Raises:
        InputError: no job is named, the folder has files, or the job has no captured code.
        ForbiddenError: it is another user's.
    """
    from cordee.storage.content import batches, unpack
    from cordee.storage.tree import Tree

    if ref is None:
        raise InputError("--diff and --code-to show the code of one job", hint="cordee jobs JOB --diff")
    job = client.job(ref)
    digest = job.spec.get("files")
    if digest is None and job.files is not None:
        raise ForbiddenError(f"you may not read the files of {job.job_id}", hint=f"ask {job.owner}")
    if digest is None:
        raise InputError(f"{job.job_id} runs in {job.spec.get('cwd')} itself: no code was captured")
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} is there already, and not empty", hint="name a new folder")
    [(_, data)] = unpack(client.job_files(job.job_id, [digest]))
    tree = Tree.decode(data)
    if diff and tree.diff is not None:
        [(_, changes)] = unpack(client.job_files(job.job_id, [tree.diff]))
        sys.stdout.write(changes.decode(errors="replace"))
    if to is not None:
        held: dict[str, bytes] = {}
        for group in batches(tree.digests):
            held |= dict(unpack(client.job_files(job.job_id, group)))
        replace(tree, inode=None).lay_out(held.__getitem__, to)
        print(f"{plural(len(tree.files), 'file')} in {to}")
