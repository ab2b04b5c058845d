"""Events of artifacts: versions come, get tags and stages, are used and go."""

from dataclasses import dataclass

from cordee.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPushed:
    """A version of an artifact is whole in the store, under the next number of its name."""

    at_us: int
    name: str
    version: int
    digest: str  # of its manifest
    artifact_kind: str
    size_bytes: int  # of its files
    stored_bytes: int  # that its push wrote
    by: str
    queue: str = ""  # whose roles say who sees and changes the name; "": `default`
    maker: JobId | None = None  # the job that made it
    base: str = ""  # digest of the version from which it is stored as a difference
    parents: tuple[str, ...] = ()  # digests of versions that it was made from
    note: str = ""
    key: str = ""  # public, of the signature
    signature: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactTagged:
    """A tag names this version from now on; version 0: it names none."""

    at_us: int
    name: str
    tag: str
    version: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactStaged:
    """A version has come to a stage, such as `production`; several may be in one; "": it is in none."""

    at_us: int
    name: str
    version: int
    stage: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactUsed:
    """A job has pulled a version, so that what the job makes is made from it."""

    at_us: int
    name: str
    version: int
    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRemoved:
    """A version was removed; its chunks go with the next collection if no other version needs them."""

    at_us: int
    name: str
    version: int
    by: str
    why: str
