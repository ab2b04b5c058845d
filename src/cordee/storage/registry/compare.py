"""Two artifacts beside each other: files and tensors that one of them lacks, or that differ."""

from collections.abc import Mapping
from dataclasses import dataclass

from cordee.storage.registry.cut import spans_of
from cordee.storage.registry.manifest import ArtifactFile
from cordee.storage.registry.store import Artifact, ArtifactStore
from cordee.storage.tree import digest_of


@dataclass(frozen=True, slots=True)
class Differences:
    """Names that only the second artifact has, that only the first has, and that differ; and how many are the same."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    same: int


@dataclass(frozen=True, slots=True)
class ArtifactDiff:
    """The difference of two artifacts: files that are not weights, tensors, and the bytes that both have."""

    files: Differences
    tensors: Differences
    shared_bytes: int
    second_bytes: int


def compare(store: ArtifactStore, first: Artifact, second: Artifact) -> ArtifactDiff:
    """Return how the second artifact differs from the first.

    Raises:
        CheckpointError: a chunk is missing or was altered.
    """
    there = {chunk.content for chunk in first.manifest.chunks()}
    shared = {chunk.content: chunk.length_bytes for chunk in second.manifest.chunks() if chunk.content in there}
    return ArtifactDiff(
        _differences(_plain_files(first), _plain_files(second)),
        _differences(_tensors(store, first), _tensors(store, second)),
        sum(shared.values()),
        second.manifest.size_bytes,
    )


def _differences(first: Mapping[str, object], second: Mapping[str, object]) -> Differences:
    both = first.keys() & second.keys()
    changed = sorted(name for name in both if first[name] != second[name])
    return Differences(
        tuple(sorted(second.keys() - first.keys())),
        tuple(sorted(first.keys() - second.keys())),
        tuple(changed),
        len(both) - len(changed),
    )


def _is_weights(file: ArtifactFile) -> bool:
    return file.path.endswith(".safetensors")


def _plain_files(artifact: Artifact) -> dict[str, str]:
    return {file.path: file.content for file in artifact.manifest.files if not _is_weights(file)}


def _tensors(store: ArtifactStore, artifact: Artifact) -> dict[str, tuple[object, ...]]:
    """Return type, shape and content of each tensor; the content of small ones is read."""
    found: dict[str, tuple[object, ...]] = {}
    for file in artifact.manifest.files:
        if not _is_weights(file):
            continue
        header = store.content(artifact, file.chunks[0])
        ends, at = [], 0
        for chunk in file.chunks:
            ends.append((at, at + chunk.length_bytes, chunk))
            at += chunk.length_bytes
        for name, span in spans_of(header).items():
            digests = []
            for begin, end, chunk in ends:
                if end <= span.begin or span.end <= begin:
                    continue
                if span.begin <= begin and end <= span.end:
                    digests.append(chunk.content)
                else:
                    data = store.content(artifact, chunk)
                    part = data[max(0, span.begin - begin) : span.end - begin]
                    digests.append(digest_of(part))
            found[name] = (span.dtype, span.shape, *digests)
    return found
