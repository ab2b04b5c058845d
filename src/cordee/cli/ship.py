"""Send the files of a job to the server: each attempt then runs what was submitted, on nodes without its folder too."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cordee.client import Client
from cordee.errors import InputError, SpecError
from cordee.workload.launcher import SEARCH_PATHS, commands_of
from cordee.workload.spec import JobSpec

SHIP_BY_DEFAULT = False
"""Whether a job to a server on this machine runs a copy of its files, too, unless it is submitted with `--live`."""


def ships(wanted: bool | None, *, remote: bool) -> bool:
    """Return whether the files of a job are sent; `wanted` is `--ship` or `--live`.

    Raises:
        SpecError: `--live` for a server that may not see the folder.
    """
    if wanted is False and remote:
        raise SpecError(
            "--live runs the job in this folder, and the server is on another machine",
            hint="leave --live out, or give the job file a `cwd` that every node has",
        )
    return SHIP_BY_DEFAULT or remote if wanted is None else wanted


def send_files(client: Client, spec: JobSpec, *, remote: bool) -> JobSpec:
    """Send the files that the server lacks, and return the job that runs a copy of them.

    Relative destinations of checkpoints lie in the submitter's folder, if the server is on this machine.

    Raises:
        InputError: the files are too large, or one changed meanwhile.
        SpecError: the program is outside the folder.
    """
    from cordee.storage.content import batches, pack
    from cordee.storage.destination import is_remote, level_urls, moved
    from cordee.storage.folder import read_folder
    from cordee.storage.tree import digest_of

    root = Path(spec.cwd or Path.cwd()).resolve()
    if not remote:
        places = {name: getattr(spec.checkpoint, name) for name in ("to", "base")}
        absolute = {
            name: moved(to, lambda place: place if "://" in place else str(root / Path(place).expanduser()))
            for name, to in places.items()
            if to
        }
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=absolute)})
    spec = spec.model_copy(update={"env": _resolved(spec.env, root)})
    _check_inside(spec, root)
    without = [client.home] if client.home else []
    if spec.checkpoint.to:
        places_on_disk = [place for place in level_urls(spec.checkpoint.to) if not is_remote(place)]
        without += [root / place.removeprefix("file://") for place in places_on_disk]
    program = _program(spec)
    tree, contents = read_folder(root, without=without, program=program, import_paths=_import_paths(program, root))
    data = tree.encode()
    sizes = {digest_of(data): len(data), **tree.digests}
    held: dict[str, Path | bytes] = {digest_of(data): data, **contents}

    def read(digest: str) -> bytes:
        where = held[digest]
        found = where.read_bytes() if isinstance(where, Path) else where
        if digest_of(found) != digest:
            assert isinstance(where, Path), "bytes in memory stay the same"
            raise InputError(f"{where} changed while it was sent", hint="submit again")
        return found

    if tree.diff is not None:
        sizes[tree.diff] = len(read(tree.diff))
    missing = client.missing_files(sizes)
    for group in batches({digest: sizes[digest] for digest in missing}):
        client.send_files(pack(group, read))
    return spec.model_copy(update={"files": digest_of(data)})


def _resolved(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return an environment whose search paths name the folder by its real path, by which nodes find it in a copy."""
    found = dict(env)
    for name in env.keys() & SEARCH_PATHS:
        entries = [Path(entry).resolve() if entry else root for entry in env[name].split(os.pathsep)]
        pairs = zip(env[name].split(os.pathsep), entries, strict=True)
        found[name] = os.pathsep.join(str(real) if real.is_relative_to(root) else entry for entry, real in pairs)
    return found


def _check_inside(spec: JobSpec, root: Path) -> None:
    """Raise SpecError if the command names a file above the folder: a copy has none."""
    for command in commands_of(spec.run):
        for word in command:
            if word.startswith("../") and not Path(os.path.normpath(root / word)).is_relative_to(root):
                raise SpecError(
                    f"{word} is outside {root}, whose files are sent",
                    hint="submit from the folder that has all files of the job",
                )


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
