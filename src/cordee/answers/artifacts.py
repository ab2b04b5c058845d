"""Requests and answers of the HTTP API about artifacts, as pydantic models."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cordee.answers.files import FilesWanted
from cordee.answers.view import View

DIGEST = r"[0-9a-f]{64}"
TAG = r"^[A-Za-z][A-Za-z0-9._-]{0,62}$"
_NOTE_CHARS = 2_000
_MANIFEST_CHARS = 64 * 2**20


def _no_bool(value: object) -> object:
    """Refuse true, which pydantic reads as 1 and JSON Schema does not."""
    if isinstance(value, bool):
        raise ValueError("should be a whole number")
    return value


class StoreView(View):
    """Where the chunks of artifacts lie: a destination; `here`: a folder of the server's machine.

    `direct`: who asks reads and writes there without the server, on a machine that reaches it.
    """

    to: str
    here: bool
    direct: bool


class BlobSize(View):
    """The size of a chunk or a manifest; null: there is none."""

    size_bytes: int | None


class PushOpened(View):
    """A push that may write chunks; nothing of it is collected while it is renewed within `lease_s`."""

    push: str
    lease_s: float


class PushCommit(View):
    """The request to make a version of what a push has written.

    `manifest` is its canonical JSON; `queue` is whose roles say who sees and changes the name: as before, or the job's,
    if it is not said; `parents` are references of versions that it was made from, beside those that its
    job has pulled.
    """

    name: str
    manifest: Annotated[str, Field(max_length=_MANIFEST_CHARS)]
    stored_bytes: Annotated[int, Field(ge=0)]
    queue: str = ""
    job: str = ""
    parents: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    note: Annotated[str, Field(max_length=_NOTE_CHARS)] = ""
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""
    tag: str = ""


class Committed(View):
    """The result of a commit: the version, or the chunks that must be sent again."""

    version: "VersionView | None"
    missing: list[str]
    is_new: bool


class MakerView(View):
    """The job that made a version: its code, its plan's layout, and what it has used until now."""

    job_id: str
    name: str
    owner: str
    state: str
    commit: str | None
    command: str
    layout: str
    steps: int | None
    gpu_us: int
    micro_usd: int


class RelativeView(View):
    """Another version in the lineage of one: what it was made from, or what was made from it."""

    ref: str
    how: Literal["made from", "stored as a difference to", "parent of", "base of"]
    digest: str
    removed: bool


class VersionView(View):
    """A version of an artifact. `stored_bytes` are those that its push wrote; `ref` names it."""

    ref: str
    name: str
    version: int
    digest: str
    kind: str
    size_bytes: int
    stored_bytes: int
    pushed_us: int
    by: str
    queue: str
    tags: list[str]
    stage: str
    base: str
    job_id: str | None
    note: str
    key: str
    signed: bool


class ChangeView(View):
    """A change of an artifact's versions, tags or stages."""

    at_us: int
    by: str
    what: str


class VersionDetailView(VersionView):
    """A version with its lineage, and the history of its name."""

    signature: str
    maker: MakerView | None
    used_by: list[str]
    lineage: list[RelativeView]
    history: list[ChangeView]


class TagRequest(View):
    """A tag for a version; without `version` the tag is removed."""

    ref: str
    tag: Annotated[str, Field(pattern=TAG)]
    remove: bool = False


class StageRequest(View):
    """The stage that a version has come to; "": none."""

    ref: str
    stage: Annotated[str, Field(pattern=r"^([a-z][a-z0-9-]{0,30})?$")]


class UseRequest(View):
    """A job pulls a version."""

    ref: str
    job: str


class RemoveRequest(View):
    """A version that goes, and why."""

    ref: str
    why: Annotated[str, Field(max_length=_NOTE_CHARS)] = ""


class CollectRequest(View):
    """Which versions go: all but the newest `keep` of each name, those with a tag or a stage, and bases of others.

    Without `keep` no version goes, only chunks that none needs.
    """

    keep: Annotated[int, Field(ge=1), BeforeValidator(_no_bool)] | None = None
    name: str = ""
    dry: bool = True


class CollectedView(View):
    """The result of a collection: the versions and chunks that it has removed, or would remove."""

    versions: list[VersionView]
    chunks: int
    freed_bytes: int
    dry: bool


class ArtifactBlobsWanted(FilesWanted):
    """The chunks or manifests that a node asks for, of the artifacts that an attempt there reads."""

    kind: Literal["chunks", "manifests"]
