"""Copies of submitted files, made for each attempt by a thread of their own and removed when it is settled; and the
versions of artifacts that its ranks read.

A node fetches each content once. Contents are verified whenever a copy is made, and fetched again if they have changed.
What a job wrote into its copy moves on into that of its next attempt on the node.
"""

import logging
import os
import queue
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from cordee.agent.launch import Assignment
from cordee.agent.uplink import Uplink, UplinkError
from cordee.errors import CordeeError
from cordee.storage.content import KEEP_S, Contents, batches, unpack
from cordee.storage.sealed import Damaged
from cordee.storage.tree import Tree
from cordee.units import format_bytes, plural
from cordee.workload.launcher import ARTIFACTS_ENV, SEARCH_PATHS

NAME = "files"
_READY = "files.ready"  # when the copy was made
RETRY_S = 1.0
_COLLECT_EVERY_S = 3600.0
_THREADS = 2
_TICK_S = 0.02

_log = logging.getLogger("cordee.agent")


class CopyError(Exception):
    """A copy cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The end of one order of `Copies.make`: the spec to run there, or the reason that there is no copy."""

    order: Assignment
    spec: Mapping[str, Any]
    why: str = ""


class Copies:
    """The copies of one node.

    Args:
        contents: the contents on this node; those of the server, if it is on this machine.
        uplink: makes the connection to the servers; None: `contents` are the server's.
        wake: wakes the agent's loop when a copy was made.
        artifacts: the folder of artifacts on this node; None: ranks read them from the server's store.
    """

    def __init__(
        self,
        contents: Contents,
        uplink: Callable[[], Uplink] | None,
        wake: Callable[[], None],
        artifacts: Path | None = None,
    ) -> None:
        self._contents, self._wake, self._artifacts = contents, wake, artifacts
        self._new_uplink = uplink
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for number in range(_THREADS):  # a stuck disk must not keep the agent from its exit
            threading.Thread(target=self._run, name=f"cordee-copies-{number}", daemon=True).start()
        self._made: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self._wanted: set[str] = set()  # tags of orders that nobody has cancelled
        self._next_collect_s = 0.0

    def make(self, order: Assignment, folder: Path) -> None:
        """Begin to make the copy of an order, in the folder of its rank group."""
        self._wanted.add(order.tag)
        self._work.put(partial(self._make, order, folder / NAME))

    def made(self) -> list[Copied]:
        """Return the orders whose copy was made, or could not be made, since the last call."""
        found = []
        while not self._made.empty():
            found.append(self._made.get())
        return found

    def remove(self, tag: str, folder: Path) -> None:
        """Remove the copy of a rank group that has ended, unless it has files that were not submitted."""
        self._wanted.discard(tag)
        if (folder / NAME).exists():
            self._work.put(partial(self._remove, folder / NAME))

    def close(self) -> None:
        """Ask the servers for nothing more."""
        self._wanted.clear()

    # -- on a thread of its own ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _make(self, order: Assignment, copy: Path) -> None:
        spec, what = order.spec, "its files cannot be laid out"
        try:
            if spec.get("files") is not None:
                spec = placed(spec, self._lay_out(order, copy), copy, order.node)
            what = "its artifacts cannot be fetched"
            copied = Copied(order, self._with_artifacts(order, spec))
        except (CopyError, CordeeError, Damaged, OSError) as error:
            why = error.message if isinstance(error, CordeeError) else str(error)
            copied = Copied(order, order.spec, f"{what}: {why}")
        except Exception as error:  # an unforeseen error must not leave the attempt without an end
            _log.exception("%s: the copy of its files failed", order.tag)
            copied = Copied(order, order.spec, f"{what}: {error!r}")
        self._made.put(copied)
        self._wake()

    def _lay_out(self, order: Assignment, copy: Path) -> Tree:
        began_s, fetched = time.monotonic(), 0
        digest = str(order.spec["files"])
        fetched += self._fetch(order, {digest: 0})
        tree = Tree.decode(self._read(order, digest))
        fetched += self._fetch(order, tree.digests)
        tree.lay_out(lambda each: self._read(order, each), copy)
        (copy.parent / _READY).touch()
        time.sleep(_TICK_S)  # so that all that is written from now on is newer for the file system's clock, too
        _carry(copy, {file.path for file in tree.files})
        took_s = time.monotonic() - began_s
        files = plural(len(tree.files), "file")
        _log.info("%s: %s laid out in %.2f s, %d of them fetched", order.tag, files, took_s, fetched)
        self._collect(copy)
        return tree

    def _read(self, order: Assignment, digest: str) -> bytes:
        """Return a content; fetch it again if it was altered on this node's disk."""
        try:
            return self._contents.get(digest)
        except Damaged as error:
            _log.warning("%s: %s; it is fetched again", order.tag, error)
            self._fetch(order, {digest: 0})
            return self._contents.get(digest)

    def _fetch(self, order: Assignment, sizes: Mapping[str, int]) -> int:
        """Fetch the contents that are missing here; return their number."""
        missing = self._contents.missing(sizes)
        if missing and self._new_uplink is None:
            raise CopyError(f"the server has lost {plural(len(missing), 'content')} of it: {missing[0]}")
        for group in batches({digest: sizes[digest] for digest in missing}):
            packed = self._ask(order, lambda uplink, group=group: uplink.files(order.job_id, order.epoch, group))  # type: ignore[misc]
            self._contents.add(unpack(packed), durable=False)
        return len(missing)

    def _with_artifacts(self, order: Assignment, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fetch the artifacts that the ranks read, and return the spec with the folder in which they lie."""
        digests, folder = spec.get("artifacts") or (), self._artifacts
        if not digests or folder is None:
            return spec
        try:
            from cordee.storage.registry.mirror import ArtifactMirror
        except ImportError as error:
            raise CopyError(f'this node lacks {error.name}: pip install "cordee[artifacts]"') from error

        def ask(kind: str, wanted: list[str]) -> bytes:
            return self._ask(order, lambda uplink: uplink.artifacts(order.job_id, order.epoch, kind, wanted))

        mirror, began_s = ArtifactMirror(folder), time.monotonic()
        for digest in digests:
            fetched_bytes = mirror.fetch(str(digest), ask)
            size, took_s = format_bytes(fetched_bytes), time.monotonic() - began_s
            _log.info("%s: artifact %s: %s fetched in %.2f s", order.tag, str(digest)[:12], size, took_s)
        mirror.collect()
        return {**spec, "env": {**(spec.get("env") or {}), ARTIFACTS_ENV: str(folder)}}

    def _ask(self, order: Assignment, request: Callable[[Uplink], bytes]) -> bytes:
        """Ask the servers until one answers, or the attempt is given up."""
        assert self._new_uplink is not None, "checked by the caller"
        uplink = self._new_uplink()
        try:
            while order.tag in self._wanted:
                try:
                    return request(uplink)
                except UplinkError as error:
                    if not error.again:
                        raise CopyError(str(error)) from error
                    _log.warning("%s waits for the server: %s", order.tag, error)
                    time.sleep(RETRY_S)
        finally:
            uplink.close()
        raise CopyError("its attempt has ended")

    def _remove(self, copy: Path) -> None:
        try:
            left = next(files_of_job(copy), None)
            if left is None:
                shutil.rmtree(copy, ignore_errors=True)
            else:
                _log.warning("its job wrote %s: the copy is kept for a week", left)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", copy, error)

    def _collect(self, copy: Path) -> None:
        """Remove contents and copies that nobody has used for a week; look once an hour."""
        if time.monotonic() < self._next_collect_s:
            return
        self._next_collect_s = time.monotonic() + _COLLECT_EVERY_S
        if self._new_uplink is not None:
            self._contents.collect(())
        before_s = time.time() - KEEP_S
        for ended in copy.parents[3].glob(f"*/*/{copy.parent.name}/ended.json"):
            if ended.stat().st_mtime < before_s and (ended.parent / _READY).exists():
                shutil.rmtree(ended.parent / NAME, ignore_errors=True)


def files_of_job(copy: Path) -> Iterator[Path]:
    """Yield the files of a copy that were written after it was made, without Python's caches."""
    try:
        ready_ns = (copy.parent / _READY).stat().st_ctime_ns
    except OSError:
        return  # it is being made, or was removed
    for folder, names, files in os.walk(copy):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in [*files, *names]:
            path = Path(folder, name)
            with suppress(OSError):  # it goes meanwhile
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode) and path.suffix != ".pyc" and status.st_ctime_ns > ready_ns:
                    yield path


def _carry(copy: Path, submitted: Collection[str]) -> None:
    """Move what the attempt before wrote into its copy on this node, but not over files that were submitted."""
    epoch, node = int(copy.parent.parent.name), copy.parent.name
    with suppress(OSError):
        earlier = [int(each.name) for each in copy.parents[2].iterdir() if each.name.isdecimal()]
    for number in sorted((each for each in earlier if each < epoch), reverse=True):
        before = copy.parents[2] / str(number) / node / NAME
        if before.is_symlink() or not before.is_dir():
            continue
        with suppress(OSError):  # it may be removed at this moment, since it has nothing of its job
            written = list(files_of_job(before))
            for path in written:
                name = path.relative_to(before).as_posix()
                above = [copy / each for each in PurePosixPath(name).parents]
                linked = any(each.is_symlink() for each in above)  # into the submitter's folder, or elsewhere
                if name not in submitted and not linked and not os.path.lexists(copy / name):
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    path.rename(copy / name)


def placed(spec: Mapping[str, Any], tree: Tree, copy: Path, node: str) -> dict[str, Any]:
    """Return a spec whose folder is the copy: so are the paths below the submitter's folder that the copy has.

    Raises:
        CopyError: the submitter's program does not exist on this node.
    """
    known = {parent for file in tree.files for parent in (file.path, *map(str, PurePosixPath(file.path).parents))}

    def in_copy(path: str) -> str:
        below = os.path.relpath(path, tree.root) if path.startswith("/") else path
        return os.path.normpath(copy / below) if path.startswith("/") and below in known else path

    run = spec["run"]
    if isinstance(run, str):
        absolute = rf"(?<![^\s='\":]){re.escape(tree.root)}(?![^\s'\";|&<>():/])[^\s'\";|&<>():]*"
        run = re.sub(absolute, lambda found: in_copy(found[0]), run)
    else:
        run = [in_copy(str(word)) for word in run]
    env = dict(spec.get("env") or {})
    for name in SEARCH_PATHS:
        if name in env:
            env[name] = os.pathsep.join(map(in_copy, env[name].split(os.pathsep)))
    imported = [in_copy(os.path.join(tree.root, path)) for path in tree.import_paths]  # noqa: PTH118
    if imported:
        env["PYTHONPATH"] = os.pathsep.join([*imported, *filter(None, [env.get("PYTHONPATH")])])
    if tree.program is not None:
        env["PATH"] = _path_with(in_copy(tree.program), env.get("PATH", os.defpath), node)
    env["CORDEE_FILES"] = str(copy)
    if tree.has_root():
        env["CORDEE_FOLDER"] = os.path.join(tree.root, tree.below)  # noqa: PTH118
    return {**spec, "cwd": str(copy / tree.below), "run": run, "env": env}


def _path_with(program: str, path: str, node: str) -> str:
    """Return a PATH by which a program's name finds the submitter's program."""
    name = Path(program).name
    found = shutil.which(name, path=path)
    if found == program:
        return path
    if not os.access(program, os.X_OK):
        other = f"its PATH has {found}" if found else "nor has its PATH another"
        raise CopyError(
            f"{name} is {program} where the job was submitted, and node {node} has no such program ({other}); install "
            "it there under this path, or write the whole path of the node's program into `run`"
        )
    return f"{Path(program).parent}{os.pathsep}{path}"
