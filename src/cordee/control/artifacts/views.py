"""Versions of artifacts as clients see them: with the job that made each, and what it was made from."""

import shlex
from collections.abc import Callable, Iterator

from cordee.answers.artifacts import ChangeView, MakerView, RelativeView, VersionDetailView, VersionView
from cordee.control.access import HIDDEN_ARTIFACT
from cordee.control.costs import cost
from cordee.control.directory import Directory, Service
from cordee.control.operations import Operations
from cordee.control.versions import Artifacts, Named, Version
from cordee.errors import NotFoundError
from cordee.workload.spec import JobSpec

HISTORY_SHOWN = 100
Sees = Callable[[Named], bool]
"""Whether who asks may see a name."""


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
        queue=named.queue,
        tags=named.tags_of(pushed.version),
        stage=version.stage,
        base=pushed.base,
        job_id=pushed.maker,
        note=pushed.note,
        key=pushed.key,
        signed=bool(pushed.signature),
    )


def detail_view(
    artifacts: Artifacts, named: Named, version: Version, maker: MakerView | None, sees: Sees
) -> VersionDetailView:
    """Return a version with its lineage and the newest changes of its name, the newest first."""
    changes = reversed(named.history[-HISTORY_SHOWN:])
    return VersionDetailView(
        **version_view(named, version).model_dump(),
        signature=version.pushed.signature,
        maker=maker,
        used_by=list(version.used_by),
        lineage=list(_lineage(artifacts, version, sees)),
        history=[ChangeView(at_us=each.at_us, by=each.by, what=each.what) for each in changes],
    )


def maker_view(operations: Operations, job_id: str) -> MakerView | None:
    """Return the job that made a version, with what it has used; None: the server does not know it any more."""
    try:
        job = operations.job(job_id)
    except NotFoundError:
        return None
    row = next((each for each in cost(operations, "job").rows if each.key == job_id), None)
    return MakerView(
        job_id=job.job_id,
        name=job.name,
        owner=job.owner,
        state=job.state,
        commit=None if job.files is None else job.files.commit,
        command=run if isinstance(run := job.spec.get("run") or "", str) else shlex.join(run),
        layout="" if job.estimate is None else job.estimate.layout,
        steps=job.checkpoint_step if job.step is None else job.step,
        gpu_us=0 if row is None else row.gpu_us.held,
        micro_usd=0 if row is None else row.micro_usd.held,
    )


def served_by(directory: Directory, digest: str) -> list[Service]:
    """Return the services whose replicas read a version."""
    return [
        service
        for service in directory.services.values()
        if (not service.ended or service.replicas)
        and (section := JobSpec.model_validate_json(service.spec).service) is not None
        and any(each.digest == digest for each in section.versions.values())
    ]


def name_of(named: Named, version: Version, sees: Sees) -> str:
    """Return a version as `name:3`, or a word for one that may not be seen."""
    return f"{named.name}:{version.pushed.version}" if sees(named) else HIDDEN_ARTIFACT


def _lineage(artifacts: Artifacts, version: Version, sees: Sees) -> Iterator[RelativeView]:
    pushed = version.pushed
    for digest in pushed.parents:
        yield _relative(artifacts, digest, "made from", sees)
    if pushed.base and pushed.base not in pushed.parents:
        yield _relative(artifacts, pushed.base, "stored as a difference to", sees)
    for named, other in artifacts.versions():
        if other is version:
            continue
        digest, ref = other.pushed.digest, name_of(named, other, sees)
        if pushed.digest in other.pushed.parents:
            yield RelativeView(ref=ref, how="parent of", digest=digest, removed=False)
        elif other.pushed.base == pushed.digest:
            yield RelativeView(ref=ref, how="base of", digest=digest, removed=False)


def _relative(artifacts: Artifacts, digest: str, how: str, sees: Sees) -> RelativeView:
    found = artifacts.all_of(digest)
    seen = [each for each in found if sees(each[0])]
    ref = name_of(*(seen or found)[-1], sees) if found else digest[:12]
    return RelativeView.model_validate({"ref": ref, "how": how, "digest": digest, "removed": not found})
