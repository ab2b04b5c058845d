"""Artifacts as an OCI image layout, a folder that `oras`, `skopeo` and registries read: each file is a layer.

Specification: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, "Guidelines for artifact
usage"). File names are in the annotation that ORAS uses, org.opencontainers.image.title.
"""

import hashlib
import json
import os
import posixpath
import secrets
import shutil
from pathlib import Path
from typing import Any

from cordee.errors import InputError
from cordee.storage.registry.store import Found
from cordee.units import MiB

_TITLE = "org.opencontainers.image.title"
_REF = "org.opencontainers.image.ref.name"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"
_LAYER = "application/octet-stream"
TYPE = "application/vnd.cordee.artifact.v1"
_MARK = "oci-layout"


def is_layout(folder: Path) -> bool:
    """Return whether a folder is an OCI image layout."""
    return (folder / _MARK).is_file() and (folder / "index.json").is_file()


def write_layout(source: Path, out: Path, ref: str, annotations: dict[str, str]) -> None:
    """Turn a folder of files into an OCI image layout, whole or not at all; the source is used up.

    Args:
        source: folder with the files.
        out: new or empty folder.
        ref: tag of the artifact in the layout.
        annotations: of the manifest.

    Raises:
        InputError: the folder has something in it.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty", hint="name a new folder")
    half = out.with_name(f".{out.name}.{secrets.token_hex(4)}.half")
    blobs = half / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    try:
        layers = []
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            digest, size_bytes = _sha256(path), path.stat().st_size
            name = path.relative_to(source).as_posix()
            path.rename(blobs / digest)
            layers.append(_described(_LAYER, digest, size_bytes, {_TITLE: name}))
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": TYPE,
            "config": _write(blobs, b"{}", _EMPTY),
            "layers": layers,
            "annotations": annotations,
        }
        entry = _write(blobs, json.dumps(manifest, sort_keys=True).encode(), _MANIFEST)
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [{**entry, "annotations": {_REF: ref}}]}
        (half / "index.json").write_text(json.dumps(index, sort_keys=True))
        (half / _MARK).write_text('{"imageLayoutVersion": "1.0.0"}')
        if out.exists():
            out.rmdir()
        half.rename(out)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def files_of_layout(folder: Path) -> list[Found]:
    """Return the files of the one artifact in a layout, verified by their SHA-256.

    Raises:
        InputError: it has several artifacts, a file without a name, or one that was altered.
    """
    try:
        entries = json.loads((folder / "index.json").read_bytes())["manifests"]
        if len(entries) != 1:
            raise InputError(f"{folder} has {len(entries)} artifacts", hint="copy one of them into a layout of its own")
        manifest = json.loads(_blob(folder, entries[0]).read_bytes())
        layers = manifest["layers"]
        found = [Found(_name(layer), _blob(folder, layer)) for layer in layers]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder} is no OCI image layout that can be read: {error!r}") from None
    if len({each.name for each in found}) < len(found) or not found:
        raise InputError(f"{folder} has {len(found)} files, of which two have one name, or none")
    return found


def _name(layer: dict[str, Any]) -> str:
    name = str((layer.get("annotations") or {}).get(_TITLE) or "")
    if not name or name.startswith(("/", "../")) or name == ".." or posixpath.normpath(name) != name:
        raise InputError(
            f"a layer of the layout is called {name!r:.200}", hint="layers need org.opencontainers.image.title"
        )
    return name


def _blob(folder: Path, entry: dict[str, Any]) -> Path:
    algorithm, _, digest = str(entry["digest"]).partition(":")
    if algorithm != "sha256" or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InputError(f"{entry['digest']!r:.100} is no SHA-256 digest")
    path = folder / "blobs" / "sha256" / digest
    if not path.is_file() or _sha256(path) != digest:
        raise InputError(f"{path} is missing or was altered", hint="copy the layout again")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := os.read(file.fileno(), MiB):
            digest.update(block)
    return digest.hexdigest()


def _write(blobs: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return _described(media_type, digest, len(data))


def _described(media_type: str, digest: str, size_bytes: int, notes: dict[str, str] | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size_bytes}
    return entry | ({"annotations": notes} if notes else {})
