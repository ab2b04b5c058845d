"""The HTTP face of artifacts: versions, tags and lineage, and the chunks for clients that cannot reach the store."""

from asyncio import to_thread
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response

from cordee.answers.artifacts import (
    DIGEST,
    ArtifactBlobsWanted,
    BlobSize,
    CollectedView,
    CollectRequest,
    Committed,
    PushCommit,
    PushOpened,
    RemoveRequest,
    StageRequest,
    StoreView,
    TagRequest,
    UseRequest,
    VersionDetailView,
    VersionView,
)
from cordee.control.agents.transfers import spec_of
from cordee.control.api_route import user_router
from cordee.control.artifacts.operations import ArtifactOperations
from cordee.control.dependencies import Asked, By, Itself, body_of
from cordee.errors import InputError, NotFoundError
from cordee.storage.registry.manifest import MANIFEST_BYTES_MAX
from cordee.storage.tree import digest_of

router = user_router("/v1")
node_router = APIRouter(prefix="/v1/agents", include_in_schema=False)
_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


async def _artifacts(request: Request) -> ArtifactOperations:
    artifacts = request.app.state.artifacts
    assert isinstance(artifacts, ArtifactOperations), "create_app put it there"
    return artifacts


Artifacts = Annotated[ArtifactOperations, Depends(_artifacts)]
PushId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]
BlobKind = Annotated[str, Path(pattern="^(chunks|manifests)$")]
BlobDigest = Annotated[str, Path(pattern=f"^{DIGEST}$")]
Of = Annotated[tuple[Annotated[str, Query(pattern=f"^{DIGEST}$")], ...], Query(max_length=4)]
"""Digests of versions, of which one has the chunk."""


@router.get("/artifacts")
def list_artifacts(artifacts: Artifacts, by: By, name: Annotated[str, Query(max_length=300)] = "") -> list[VersionView]:
    """Return the newest version of each name; with a name, all of its versions."""
    return by.views(artifacts.versions(name, by))


@router.get("/artifacts/version")
def show_artifact(artifacts: Artifacts, by: By, ref: Annotated[str, Query(max_length=400)]) -> VersionDetailView:
    """Return one version with its lineage: of `name`, `name:3`, `name:tag` or `name@digest`."""
    return by.view(artifacts.show(ref, by))


@router.get("/artifacts/store")
def artifact_store(artifacts: Artifacts, by: By) -> StoreView:
    """Return where the chunks lie."""
    return artifacts.store(by)


@router.post("/artifacts/pushes", status_code=201)
def open_push(artifacts: Artifacts) -> PushOpened:
    """Open a push, so that nothing that it counts on is collected."""
    return artifacts.open()


@router.post("/artifacts/pushes/{push}/renew", status_code=204)
def renew_push(push: PushId, artifacts: Artifacts) -> None:
    """Keep a push open for another lease."""
    artifacts.pushes.renew(push)


@router.delete("/artifacts/pushes/{push}", status_code=204)
def close_push(push: PushId, artifacts: Artifacts) -> None:
    """End a push without a version."""
    artifacts.pushes.close(push)


@router.post("/artifacts/pushes/{push}/commit")
def commit_push(push: PushId, wanted: PushCommit, artifacts: Artifacts, by: By) -> Committed:
    """Make the next version of a name from what a push has written, or say which chunks are missing."""
    return by.view(artifacts.commit(push, wanted, by))


@router.post("/artifacts/tags")
def tag_artifact(wanted: TagRequest, artifacts: Artifacts, by: By) -> VersionView:
    """Let a tag name a version, or none."""
    return by.view(artifacts.tag(wanted, by))


@router.post("/artifacts/stages")
def stage_artifact(wanted: StageRequest, artifacts: Artifacts, by: By) -> VersionView:
    """Say to which stage a version has come."""
    return by.view(artifacts.stage(wanted, by))


@router.post("/artifacts/uses")
def use_artifact(wanted: UseRequest, artifacts: Artifacts, by: By) -> VersionView:
    """Note that a job pulls a version, so that what it makes is made from it."""
    return by.view(artifacts.use(wanted, by))


@router.post("/artifacts/removals")
def remove_artifact(wanted: RemoveRequest, artifacts: Artifacts, by: By) -> VersionView:
    """Remove a version that no tag, no stage and no other version needs."""
    return by.view(artifacts.remove(wanted, by))


@router.post("/artifacts/collections")
def collect_artifacts(wanted: CollectRequest, artifacts: Artifacts, by: By) -> CollectedView:
    """Remove old versions and the chunks that none needs, or say which would go."""
    return by.view(artifacts.collect(wanted, by))


@router.get("/artifacts/{kind}/{digest}", response_class=Response, responses=_BYTES)
def read_artifact_blob(kind: BlobKind, digest: BlobDigest, artifacts: Artifacts, by: By, of: Of = ()) -> Response:
    """Return a chunk or a manifest of the server's disk, of a version that the token may see."""
    return Response(artifacts.chunk(kind, digest, of, by), media_type="application/octet-stream")


@router.get("/artifacts/{kind}/{digest}/size")
def artifact_blob_size(kind: BlobKind, digest: BlobDigest, artifacts: Artifacts, by: By, of: Of = ()) -> BlobSize:
    """Return the size of a chunk or a manifest that a push of this token's user may name without sending it."""
    return BlobSize(size_bytes=artifacts.size(kind, digest, of, by))


@router.put("/artifacts/{kind}/{digest}", status_code=204)
async def write_artifact_blob(
    kind: BlobKind, digest: BlobDigest, push: Annotated[str, Query()], request: Request, artifacts: Artifacts, by: By
) -> None:
    """Store a chunk or a manifest of an open push; its content must have the digest."""
    artifacts.pushes.renew(push)
    data = await body_of(request, MANIFEST_BYTES_MAX + 2**20)
    if digest_of(data) != digest:
        raise InputError(f"{len(data)} bytes came that do not have the digest {digest[:12]}", hint="send them again")
    await to_thread(artifacts.add, kind, digest, data, by)


@node_router.post("/{node}/artifacts")
def send_artifacts(node: Itself, wanted: ArtifactBlobsWanted, operations: Asked, artifacts: Artifacts) -> Response:
    """Return a pack of chunks or manifests of the artifacts that an attempt on a node reads."""
    digests = spec_of(operations, node, wanted.job_id, wanted.epoch).get("artifacts")
    if not isinstance(digests, list) or not digests:
        raise NotFoundError(f"{wanted.job_id} reads no artifacts")
    packed = artifacts.pack(tuple(map(str, digests)), wanted.kind, wanted.digests)
    return Response(packed, media_type="application/octet-stream")
