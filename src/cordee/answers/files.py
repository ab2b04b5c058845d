"""Files of a job that go from its submitter to nodes, and its logs that come back."""

from typing import Annotated

from pydantic import Field

from cordee.answers.view import View


class FilesView(View):
    """The code that was captured when a job was submitted.

    Attributes:
        files: their number.
        commit, branch: of git, which were checked out; null: none.
        changed: whether the files are others than those of the commit.
        files_changed: number of these.
        folder: the submitter's.
        links: what lay in that folder beside the files, and is linked into copies on a node that has it.
        copy_folder: of the newest attempt, if it is on the server's machine and still there.
        written: the first files that the job has written there.
    """

    files: int
    size_bytes: int
    commit: str | None
    changed: bool
    files_changed: int = 0
    branch: str | None = None
    folder: str = ""
    links: list[str] = Field([])
    copy_folder: str | None = None
    written: list[str] = Field([])


class FileDigests(View):
    """Contents of submitted files, by digest: the ones that a client has, or those of them that the server lacks."""

    digests: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]], Field(max_length=100_000)]


class FilesWanted(FileDigests):
    """The contents that a node asks for, of an attempt that holds GPUs there."""

    job_id: str
    epoch: Annotated[int, Field(ge=1)]


class FilesReceived(View):
    """The number of contents in a pack that were stored."""

    received: int


class LogReceived(View):
    """The size of a log on the server, where the next part begins."""

    size_bytes: int
