"""The pages of artifacts: the list of names, and one version with its lineage, files, versions and history."""

from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from cordee.answers.lineage import lineage_of
from cordee.control.access import HIDDEN, HIDDEN_ARTIFACT, Access
from cordee.control.web.parts import Parts
from cordee.errors import CordeeError
from cordee.units import plural
from cordee.view.lineage import lineage_html
from cordee.view.page import part

if TYPE_CHECKING:
    from cordee.control.artifacts.operations import ArtifactOperations
    from cordee.storage.registry.manifest import ArtifactManifest

NAMES_SHOWN = 500
FILES_SHOWN, VERSIONS_SHOWN, HISTORY_SHOWN = 200, 50, 40
_TEMPLATE = "web/artifacts.html.j2"


def artifacts_parts(artifacts: "ArtifactOperations | None", viewer: Access) -> Parts:
    """Return the list of artifacts; None: their libraries are not installed."""
    found = [] if artifacts is None else viewer.views(artifacts.versions("", viewer))
    shown = [(each, version_page(each.ref)) for each in found[:NAMES_SHOWN]]
    return {"artifacts": part("artifacts", shown, len(found) - len(shown), artifacts is None, template=_TEMPLATE)}


def artifact_parts(artifacts: "ArtifactOperations", ref: str, viewer: Access) -> Parts:
    """Return the parts of one version.

    Raises:
        NotFoundError: there is none that may be seen.
    """
    found = viewer.view(artifacts.show(ref, viewer))
    versions = viewer.views(artifacts.versions(found.name, viewer))
    try:
        manifest, problem = _manifest(artifacts, found.digest), ""
    except CordeeError as error:
        manifest, problem = None, error.message
    drawing = lineage_html(lineage_of(found, job_page, version_page), f"Lineage of {found.ref}")
    files = [] if manifest is None else sorted(manifest.files, key=lambda file: (-file.size_bytes, file.path))
    rows = [(each, version_page(each.ref)) for each in versions[:VERSIONS_SHOWN]]
    return {
        "summary": _part("summary", found, None if manifest is None else len(files)),
        "lineage": _part("lineage", found, drawing),
        "about": _part("about", found, _scan_text(manifest)),
        "files": _part("files", files[:FILES_SHOWN], len(files) - FILES_SHOWN, problem),
        "versions": _part("versions", found, rows, len(versions) - len(rows)),
        "history": _part("history", found.history[:HISTORY_SHOWN], len(found.history) - HISTORY_SHOWN),
    }


def version_page(ref: str) -> str:
    """Return the address of the page of a version; "": it may not be seen."""
    return "" if ref == HIDDEN_ARTIFACT else f"/artifacts/{quote(ref, safe='/:')}"


def job_page(job_id: str) -> str:
    """Return the address of the page of a job; "": it may not be seen."""
    return "" if job_id == HIDDEN else f"/jobs/{quote(job_id)}"


def _part(macro: str, *values: object) -> str:
    return part(macro, *values, template=_TEMPLATE)


def _scan_text(manifest: "ArtifactManifest | None") -> str:
    """Return what the push has found in files that run code when they are loaded."""
    if manifest is None:
        return "not known: its files cannot be listed"
    pickles = manifest.facts.get("pickles") or []
    if not pickles:
        return "no file that runs code when it is loaded"
    return f"{plural(len(pickles), 'pickle')}, scanned and allowed by who pushed: {', '.join(map(str, pickles[:5]))}"


def _manifest(artifacts: "ArtifactOperations", digest: str) -> "ArtifactManifest":
    return _read(artifacts.store_url, digest)


@lru_cache(maxsize=64)
def _read(to: str, digest: str) -> "ArtifactManifest":
    """Return a manifest, whose digest says all of it."""
    from cordee.storage.destination import open_blobs
    from cordee.storage.registry.store import ArtifactStore

    return ArtifactStore(open_blobs(to)).manifest(digest)
