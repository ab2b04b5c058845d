"""A standby's copy of the files of jobs: it asks the leader for what unfinished jobs need and its own home lacks."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import structlog

from cordee.client import Client
from cordee.control.files import JobFiles
from cordee.errors import CordeeError, NotFoundError
from cordee.storage.content import batches

_LOOK_S = 0.5


class Mirror:
    """A thread that copies while its server stands by, so that no takeover waits for a transfer."""

    def __init__(
        self,
        files: JobFiles,
        *,
        unfinished: Callable[[], Iterable[Mapping[str, Any]]],
        number: Callable[[], int],
        leader: Callable[[], Client],
    ) -> None:
        """Prepare to copy.

        Args:
            files: the files in this server's home.
            unfinished: returns the rows of all jobs that have not ended.
            number: returns the log's last number that this server knows: it looks again when that has grown.
            leader: returns a connection to the server that leads.
        """
        self._files, self._unfinished, self._number, self._leader = files, unfinished, number, leader
        self._seen, self._whole = -1, set[str]()
        self._problem = ""
        self._ended = threading.Event()

    def __enter__(self) -> "Mirror":
        threading.Thread(target=self._run, name="files", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()  # the last transfer may end later: it only adds contents

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.step()
                self._problem = ""
            except (CordeeError, OSError) as error:
                if self._problem != str(error):
                    structlog.get_logger().warning("files of jobs are not copied from the leader", error=str(error))
                    self._problem = str(error)

    def step(self) -> None:
        """Copy what is missing, if the log has grown or the leader did not answer the last time.

        Raises:
            NotFoundError: the leader lacks contents itself.
            CordeeError: it does not answer, or this disk is full.
        """
        number = self._number()
        if number == self._seen:
            return
        rows = list(self._unfinished())
        self._files.collect(rows)
        wanted = {digest: row["job_id"] for row in rows if (digest := json.loads(row["spec"]).get("files"))}
        lacking = {digest: job_id for digest, job_id in wanted.items() if digest not in self._whole}
        lost: NotFoundError | None = None
        if lacking:
            with self._leader() as leader:
                for digest, job_id in lacking.items():
                    try:
                        self._copy(leader, job_id, digest)
                    except NotFoundError as error:  # of this job; those of the others are copied
                        lost = error
        self._whole &= wanted.keys()
        self._seen = number
        if lost is not None:
            raise lost

    def _copy(self, leader: Client, job_id: str, digest: str) -> None:
        if self._files.missing([digest]):
            self._files.add(leader.job_files(job_id, [digest]))
        sizes = self._files.tree(digest).digests
        for group in batches({each: sizes[each] for each in self._files.missing(list(sizes))}):
            if self._ended.is_set():
                return
            self._files.add(leader.job_files(job_id, group))
        self._whole.add(digest)
