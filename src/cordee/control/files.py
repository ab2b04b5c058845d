"""The files of jobs in the server's home, from their upload to the end of the last job that needs them.

The home's disk has the log of the cluster too: what clients and agents send leaves a part of it free.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from cordee.agent.copies import files_of_job
from cordee.answers.files import FilesView
from cordee.answers.jobs import AttemptView
from cordee.control.sent import Sent
from cordee.errors import DestinationError, InputError, NotFoundError, SpecError, StoreError
from cordee.storage.content import Contents, pack, unpack
from cordee.storage.destination import is_remote, level_urls
from cordee.storage.folder import FILES_MAX, LIMIT_BYTES
from cordee.storage.sealed import Damaged
from cordee.storage.tree import Tree
from cordee.units import GiB, MiB, format_bytes, plural
from cordee.workload.spec import JobSpec

FOLDER = "files"
_WRITTEN_SHOWN = 20
PACK_BYTES_MAX = LIMIT_BYTES + MiB  # a content that is larger than a pack travels alone
_COLLECT_EVERY_S = 3600.0
_RESERVE_BYTES_MAX, _RESERVE_FRACTION = GiB, 0.05


def check_room(folder: Path, n_bytes: int) -> None:
    """Check that the disk of a folder keeps its reserve when so many bytes are written.

    Raises:
        StoreError: it does not; nothing was written.
    """
    usage = shutil.disk_usage(folder)
    reserve = min(_RESERVE_BYTES_MAX, int(usage.total * _RESERVE_FRACTION))
    if usage.free < n_bytes + reserve:
        raise StoreError(
            f"the server's disk has {format_bytes(usage.free)} left, of which {format_bytes(reserve)} are kept for its "
            f"log: {format_bytes(n_bytes)} were not stored",
            hint=f"free space on the disk of {folder}",
        )


class JobFiles:
    """Contents and trees of submitted files, in the folder `files` of a home; `operator` may name any of them."""

    def __init__(self, home: Path, operator: str | None = None) -> None:
        self._home, self._folder, self._operator = home, home / FOLDER, operator
        self._contents, self._sent = Contents(self._folder), Sent(self._folder / "sent")
        self._lock = threading.Lock()  # between the check of a submission and the collection of contents
        self._next_collect_s = 0.0

    def missing(self, digests: Sequence[str], owner: str | None = None) -> list[str]:
        """Return the digests whose content must be sent; the others are kept for as long as a new upload is.

        A content that this user has not sent counts as missing: to know a digest is not to have the content.

        Args:
            digests: of contents.
            owner: the user who is to name them; None: the server itself.
        """
        with self._lock:
            absent = set(self._contents.missing(digests)) | set(self._unsent(digests, owner))
        return [digest for digest in digests if digest in absent]

    def add(self, packed: bytes, owner: str | None = None) -> int:
        """Store the contents of a pack durably, and return their number; trees of the user may then name them.

        Raises:
            InputError: the pack is damaged.
            StoreError: the disk is full.
        """
        check_room(self._folder, len(packed))
        try:
            added = self._contents.add(unpack(packed), durable=True)
            if owner is not None:
                for digest, _ in unpack(packed):
                    self._sent.note(owner, digest)
            return added
        except (DestinationError, OSError) as error:
            why = error.message if isinstance(error, DestinationError) else str(error)
            raise StoreError(why, hint=f"free space on the disk of {self._folder}") from error

    def _unsent(self, digests: Iterable[str], owner: str | None) -> list[str]:
        """Return the contents that a user may not name; the server and its operator may name all."""
        if owner is None or owner == self._operator:
            return []
        return [each for each in digests if not self._sent.has(owner, each)]

    def check(self, spec: JobSpec, owner: str | None = None) -> None:
        """Check that the files of a job are here, and that its checkpoints do not lie in a copy of them.

        Args:
            spec: of the job.
            owner: its user, who must have sent the files; None: that is known.

        Raises:
            SpecError: they are not, or they do.
        """
        if spec.files is None:
            return
        if self._unsent([spec.files], owner):
            raise SpecError(
                f"{owner} has not sent the files {spec.files[:12]}, so a job of {owner} may not run them",
                hint="submit with `cordee run`, which sends them",
            )
        for to in (spec.checkpoint.to, spec.checkpoint.base):
            for place in level_urls(to) if to else ():
                if not (is_remote(place) or "://" in place or Path(place).expanduser().is_absolute()):
                    raise SpecError(
                        f"checkpoint.to: {place} would lie in the copy of the submitted files, which is removed after "
                        "each attempt",
                        hint="give the absolute path of a folder that every node sees, or a URL such as s3://bucket/run",
                    )
        with self._lock:
            absent = [spec.files] if self._contents.missing([spec.files]) else self._absent(spec.files, owner)
        if absent:
            raise SpecError(
                f"{plural(len(absent), 'content')} of the job's files are not on the server: {absent[0]}",
                hint="submit with `cordee run`, which sends them",
            )

    def _absent(self, digest: str, owner: str | None) -> list[str]:
        """Return the contents of a tree that are not here.

        Raises:
            SpecError: the tree is too large, or names a content that this user has not sent.
        """
        tree = self.tree(digest)
        if tree.size_bytes > LIMIT_BYTES or len(tree.files) > FILES_MAX:
            raise SpecError(f"the job's files have {format_bytes(tree.size_bytes)}, over {format_bytes(LIMIT_BYTES)}")
        unsent = self._unsent([*tree.digests, *filter(None, [tree.diff])], owner)
        if unsent:
            raise SpecError(
                f"{owner} has not sent {plural(len(unsent), 'content')} that the job's files name: {unsent[0]}",
                hint="submit with `cordee run`, which sends them",
            )
        absent = self._contents.missing(tree.digests)
        for file in tree.files if not absent else ():
            held = 0 if file.kind == "link" else self._contents.size_bytes(file.content)
            if held != file.size_bytes:
                raise SpecError(f"the job's file {file.path} has {held} bytes, and not {file.size_bytes}")
        return absent

    def tree(self, digest: str) -> Tree:
        """Return the tree of this digest.

        Raises:
            NotFoundError: it is not here.
            InputError: it is no tree.
        """
        return _decoded(digest, self._read(digest))

    def view(
        self, digest: str | None, job_id: str, attempts: Sequence[AttemptView], *, names: bool = False
    ) -> FilesView | None:
        """Return what is known of a job's code, and of its newest copy on this machine; `names`: of other files, too.

        None: it has none, or it was removed after the job's end.
        """
        try:
            tree = self.tree(digest) if digest else None
        except (NotFoundError, InputError):
            return None
        if tree is None:
            return None
        folders = [
            self._home / "attempts" / job_id / str(attempt.epoch) / node / FOLDER
            for attempt in reversed(attempts)
            for node in attempt.leases
        ]
        newest = next((each for each in folders if each.is_dir()), None)
        found = () if newest is None or not names else islice(files_of_job(newest), _WRITTEN_SHOWN)
        written = [os.path.relpath(path, newest) for path in found]
        return FilesView(
            files=len(tree.files),
            size_bytes=tree.size_bytes,
            commit=tree.commit,
            changed=tree.diff is not None or tree.changed > 0,
            files_changed=tree.changed,
            branch=tree.branch,
            folder=tree.root,
            links=list(tree.links) if names else [],
            copy_folder=None if newest is None else str(newest),
            written=written,
        )

    def pack(self, digest: str, wanted: Iterable[str]) -> bytes:
        """Return a pack of contents of one tree, or of the tree itself.

        Raises:
            NotFoundError: the tree does not have them, or they are not here any more.
        """
        tree = self.tree(digest)
        of_tree = {digest, *tree.digests, *filter(None, [tree.diff])}
        foreign = [each for each in wanted if each not in of_tree]
        if foreign:
            raise NotFoundError(f"the job's files have no content {foreign[0]}")
        return pack(wanted, self._read)

    def _read(self, digest: str) -> bytes:
        try:
            return self._contents.get(digest)
        except Damaged as error:
            raise NotFoundError(f"the job's files are not complete: {error}", hint="submit the job again") from None

    def collect(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Remove the contents that no unfinished job needs and nobody used for a week; look once an hour.

        Args:
            rows: of all unfinished jobs.
        """
        if time.monotonic() < self._next_collect_s:
            return 0
        self._next_collect_s = time.monotonic() + _COLLECT_EVERY_S
        trees = {JobSpec.model_validate_json(row["spec"]).files for row in rows}
        with self._lock:
            needed = set[str]()
            for digest in filter(None, trees):
                try:
                    tree = self.tree(digest)
                except (NotFoundError, InputError):
                    continue  # its job cannot start any more, and says so
                needed |= {digest, *tree.digests} | ({tree.diff} if tree.diff else set())
            self._sent.collect()
            return self._contents.collect(needed)


@lru_cache(maxsize=16)
def _decoded(digest: str, data: bytes) -> Tree:
    return Tree.decode(data)
