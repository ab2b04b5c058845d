"""Versions of artifacts as clients see them: with the job that made each, and what it was made from."""

from collections.abc import Iterator

from cordee.answers.artifacts import ChangeView, MakerView, RelativeView, VersionDetailView, VersionView
from cordee.control.directory import Directory
from cordee.control.operations import Operations
from cordee.control.versions import Artifacts, Named, Version
from cordee.errors import NotFoundError
from cordee.workload.spec import JobSpec

HISTORY_SHOWN = 100


def version_view(named: Named, version: Version) -> VersionView:
    """Return a version as it stands."""
    pushed = version.pushed
    return VersionView(
        ref=f"{named.name}:{pushed.version}",
        name=named.name,
        version=pushed.version,
        digest=pushed.digest,
        kind=pushed.artifact_kind,
        size_bytes=pushed.size_bytes,
        stored_bytes=pushed.stored_bytes,
        pushed_us=pushed.at_us,
        by=pushed.by,
        queue=pushed.queue,
        tags=named.tags_of(pushed.version),
        stage=version.stage,
        base=pushed.base,
        job_id=pushed.maker,
        note=pushed.note,
        key=pushed.key,
        signed=bool(pushed.signature),
    )


def detail_view(artifacts: Artifacts, named: Named, version: Version, maker: MakerView | None) -> VersionDetailView:
    """Return a version with its lineage and the newest changes of its name, the newest first."""
    changes = reversed(named.history[-HISTORY_SHOWN:])
    return VersionDetailView(
        **version_view(named, version).model_dump(),
        signature=version.pushed.signature,
        maker=maker,
        used_by=list(version.used_by),
        lineage=list(_lineage(artifacts, version)),
        history=[ChangeView(at_us=each.at_us, by=each.by, what=each.what) for each in changes],
    )


def maker_view(operations: Operations, job_id: str) -> MakerView | None:
    """Return the job that made a version, with what it has used; None: the server does not know it any more."""
    try:
        job = operations.job(job_id)
    except NotFoundError:
        return None
    row = next((each for each in operations.cost("job").rows if each.key == job_id), None)
    return MakerView(
        job_id=job.job_id,
        name=job.name,
        owner=job.owner,
        state=job.state,
        commit=None if job.files is None else job.files.commit,
        command=str(job.spec.get("run") or ""),
        layout="" if job.estimate is None else job.estimate.layout,
        steps=job.checkpoint_step if job.step is None else job.step,
        gpu_us=0 if row is None else row.gpu_us.held,
        micro_usd=0 if row is None else row.micro_usd.held,
    )


def served_by(directory: Directory, digest: str) -> list[str]:
    """Return the services whose replicas read a version."""
    return [
        service.name
        for service in directory.services.values()
        if (not service.ended or service.replicas)
        and (section := JobSpec.model_validate_json(service.spec).service) is not None
        and any(each.digest == digest for each in section.versions.values())
    ]


def _lineage(artifacts: Artifacts, version: Version) -> Iterator[RelativeView]:
    pushed = version.pushed
    for digest in pushed.parents:
        yield _relative(artifacts, digest, "made from")
    if pushed.base and pushed.base not in pushed.parents:
        yield _relative(artifacts, pushed.base, "stored as a difference to")
    for named, other in artifacts.versions():
        if other is version:
            continue
        ref = f"{named.name}:{other.pushed.version}"
        if pushed.digest in other.pushed.parents:
            yield RelativeView(ref=ref, how="parent of", digest=other.pushed.digest, removed=False)
        elif other.pushed.base == pushed.digest:
            yield RelativeView(ref=ref, how="base of", digest=other.pushed.digest, removed=False)


def _relative(artifacts: Artifacts, digest: str, how: str) -> RelativeView:
    found = artifacts.by_digest(digest)
    ref = digest[:12] if found is None else f"{found[0].name}:{found[1].pushed.version}"
    return RelativeView.model_validate({"ref": ref, "how": how, "digest": digest, "removed": found is None})
