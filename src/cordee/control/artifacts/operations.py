"""The API of artifacts without HTTP: one method for each request that a client can make."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cordee.answers.artifacts import (
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
from cordee.control.artifacts.pushes import LEASE_S, Pushes
from cordee.control.artifacts.views import detail_view, maker_view, served_by, version_view
from cordee.control.home import artifact_store
from cordee.control.operations import Operations
from cordee.control.versions import LATEST, NAME, TAG, Artifacts, Named, Version, split_ref
from cordee.errors import ForbiddenError, InputError, MissingExtraError, NotFoundError
from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    ArtifactUsed,
)
from cordee.ids import JobId

try:
    from cordee.storage.content import pack
    from cordee.storage.destination import is_remote, level_urls, open_blobs
    from cordee.storage.files import Blobs
    from cordee.storage.registry.manifest import ArtifactManifest
    from cordee.storage.registry.signature import is_signed
    from cordee.storage.registry.store import CHUNKS, ArtifactStore, key_of
except ImportError as error:
    raise MissingExtraError(
        f"artifacts need the library {error.name}, which is not installed", hint='pip install "cordee[artifacts]"'
    ) from error


@dataclass(slots=True)
class ArtifactOperations:
    """The requests about artifacts.

    Attributes:
        operations: those on jobs, which share the log.
        pushes: that are open.
    """

    operations: Operations
    pushes: Pushes = field(default_factory=Pushes)

    def store(self) -> StoreView:
        """Return where chunks lie."""
        to = self._to()
        return StoreView(to=to, here=not any(map(is_remote, level_urls(to))))

    def blobs(self) -> Blobs:
        """Return the store of chunks and manifests."""
        return open_blobs(self._to())

    def pack(self, versions: Sequence[str], kind: str, wanted: Sequence[str]) -> bytes:
        """Return a pack of the chunks or manifests through which some versions are read.

        Raises:
            NotFoundError: the versions do not need them, or they are not here.
        """
        blobs = self.blobs()
        needed = frozenset[str]().union(*(_needed(self._to(), version, kind) for version in versions))

        def read(digest: str) -> bytes:
            data = blobs.get(key_of(kind, digest)) if digest in needed else None
            if data is None:
                raise NotFoundError(f"there is no {kind[:-1]} {digest[:12]} of {versions[0][:12]}")
            return data

        return pack(wanted, read)

    def open(self) -> PushOpened:
        """Open a push."""
        return PushOpened(push=self.pushes.open(), lease_s=LEASE_S)

    def commit(self, push: str, wanted: PushCommit, by: str) -> Committed:
        """Make the next version of a name from what a push has written; the same content again makes none.

        Raises:
            NotFoundError: the push is not open, or a parent or the base does not exist.
            ForbiddenError: the name is another user's.
            InputError: the manifest, the name, the tag or the signature is not valid.
        """
        self.pushes.renew(push)
        _check_word(NAME, wanted.name, "name of an artifact", "lower-case letters, digits, - _ . and up to three /")
        if wanted.tag:
            _check_tag(wanted.tag)
        manifest = ArtifactManifest.decode(wanted.manifest.encode())
        digest = manifest.digest
        if wanted.signature and not is_signed(digest, wanted.signature, wanted.key):
            raise InputError(f"the signature is not that of {digest[:12]} by the key {wanted.key[:12]}")
        store = ArtifactStore(self.blobs())
        if missing := store.absent(manifest):
            return Committed(version=None, missing=missing, is_new=False)
        store.read(digest)  # the manifest itself, and those of its bases
        job_id = JobId(self.operations.job_id(wanted.job)) if wanted.job else None
        with self.operations.control.changed:
            view, is_new = self._commit(wanted, manifest, job_id, by)
        self.pushes.close(push)
        return Committed(version=view, missing=[], is_new=is_new)

    def _commit(
        self, wanted: PushCommit, manifest: ArtifactManifest, job_id: JobId | None, by: str
    ) -> tuple[VersionView, bool]:
        artifacts, digest = self._artifacts, manifest.digest
        if wanted.name in artifacts.named:
            self._check_owner(artifacts.named[wanted.name], by)
        if manifest.base and artifacts.by_digest(manifest.base) is None:
            raise NotFoundError(
                f"the base {manifest.base[:12]} was removed meanwhile", hint="push again, with another base or none"
            )
        parents = [self._find(ref)[1].pushed.digest for ref in wanted.parents]
        if job_id is not None:
            parents += artifacts.used_by(job_id)
        before = artifacts.find(wanted.name)
        is_new = before is None or before[1].pushed.digest != digest
        if is_new:
            known = artifacts.named.get(wanted.name)
            number = 1 + (max(known.versions) if known is not None else 0)
            self.operations.control.note(
                ArtifactPushed(
                    at_us=self.operations.clock.now_us(),
                    name=wanted.name,
                    version=number,
                    digest=digest,
                    artifact_kind=manifest.kind,
                    size_bytes=manifest.size_bytes,
                    stored_bytes=wanted.stored_bytes,
                    by=by,
                    queue=wanted.queue,
                    maker=job_id,
                    base=manifest.base,
                    parents=tuple(dict.fromkeys(each for each in parents if each != digest)),
                    note=wanted.note,
                    key=wanted.key,
                    signature=wanted.signature,
                )
            )
        named, version = self._find(wanted.name)
        if wanted.tag and named.tags.get(wanted.tag) != version.pushed.version:
            self._note_tag(named, wanted.tag, version.pushed.version, by)
        return version_view(named, version), is_new

    def versions(self, name: str = "") -> list[VersionView]:
        """Return the newest version of each name; with a name all of its versions. The newest come first.

        Raises:
            NotFoundError: there is no such name.
        """
        with self.operations.control.changed:
            if name:
                found = self._artifacts.named.get(name)
                if found is None or not found.live:
                    raise self._unknown(name)
                return [version_view(found, each) for each in reversed(found.live)]
            newest = [(named, named.live[-1]) for named in self._artifacts.named.values() if named.live]
            newest.sort(key=lambda each: -each[1].pushed.at_us)
            return [version_view(*each) for each in newest]

    def show(self, ref: str) -> VersionDetailView:
        """Return a version with the job that made it, its lineage, and the history of its name."""
        with self.operations.control.changed:
            job_id = self._find(ref)[1].pushed.maker
        maker = None if job_id is None else maker_view(self.operations, job_id)
        with self.operations.control.changed:
            return detail_view(self._artifacts, *self._find(ref), maker)

    def tag(self, wanted: TagRequest, by: str) -> VersionView:
        """Let a tag name a version, or none.

        Raises:
            InputError: it is no tag, or none of this name.
        """
        _check_tag(wanted.tag)
        with self.operations.control.changed:
            named, version = self._find(wanted.ref)
            self._check_owner(named, by)
            if wanted.remove and wanted.tag not in named.tags:
                raise InputError(f"{named.name} has no tag {wanted.tag!r}", hint=f"cordee artifact show {named.name}")
            number = 0 if wanted.remove else version.pushed.version
            if named.tags.get(wanted.tag, 0) != number:
                self._note_tag(named, wanted.tag, number, by)
            return version_view(named, version)

    def stage(self, wanted: StageRequest, by: str) -> VersionView:
        """Say to which stage a version has come."""
        with self.operations.control.changed:
            named, version = self._find(wanted.ref)
            self._check_owner(named, by)
            if version.stage != wanted.stage:
                now_us, number = self.operations.clock.now_us(), version.pushed.version
                self.operations.control.note(
                    ArtifactStaged(at_us=now_us, name=named.name, version=number, stage=wanted.stage, by=by)
                )
            return version_view(named, version)

    def use(self, wanted: UseRequest) -> VersionView:
        """Note that a job pulls a version."""
        job_id = JobId(self.operations.job_id(wanted.job))
        with self.operations.control.changed:
            named, version = self._find(wanted.ref)
            if job_id not in version.used_by:
                now_us, number = self.operations.clock.now_us(), version.pushed.version
                self.operations.control.note(ArtifactUsed(at_us=now_us, name=named.name, version=number, job_id=job_id))
            return version_view(named, version)

    def remove(self, wanted: RemoveRequest, by: str) -> VersionView:
        """Remove a version; its chunks go with the next collection.

        Raises:
            InputError: it has a tag or a stage, a service serves it, or other versions are differences to it.
        """
        with self.operations.control.changed:
            named, version = self._find(wanted.ref)
            self._check_owner(named, by)
            if why := self._why_kept(named, version):
                raise InputError(f"{_ref(named, version)} {why}", hint="take that away first")
            view = version_view(named, version)
            self._note_removed(named, version, by, wanted.why or "no reason given")
            return view

    def collect(self, wanted: CollectRequest, by: str) -> CollectedView:
        """Remove old versions and the chunks that no version needs, or say which would go.

        Raises:
            BusyError: a push is open.
            ForbiddenError: versions of other users would go, and this is not the operator.
        """
        with self.operations.control.changed:
            doomed = list(self._doomed(wanted))
            views = [version_view(*each) for each in doomed]
            for named, version in doomed if not wanted.dry else ():
                self._check_owner(named, by)
                self._note_removed(named, version, by, f"not among the newest {wanted.keep}")
            gone = {id(version) for _, version in doomed}
            live = {each.pushed.digest for _, each in self._artifacts.versions() if id(each) not in gone}
        store = ArtifactStore(self.blobs())
        if wanted.dry:
            return CollectedView(versions=views, chunks=(freed := store.remove_unneeded(live, dry=True))[0],
                                 freed_bytes=freed[1], dry=True)  # fmt: skip
        with self.pushes.collecting():
            with self.operations.control.changed:
                live = {each.pushed.digest for _, each in self._artifacts.versions()}
            chunks, freed_bytes = store.remove_unneeded(live, dry=False)
        return CollectedView(versions=views, chunks=chunks, freed_bytes=freed_bytes, dry=False)

    def _doomed(self, wanted: CollectRequest) -> Iterator[tuple[Named, Version]]:
        if wanted.keep is None:
            return
        for named in self._artifacts.named.values():
            if wanted.name in ("", named.name):
                for version in named.live[: -wanted.keep]:
                    if not self._why_kept(named, version):
                        yield named, version

    def _why_kept(self, named: Named, version: Version) -> str:
        """Return why a version cannot be removed; "": it can."""
        if tags := named.tags_of(version.pushed.version):
            return f"has the tag {tags[0]}"
        if version.stage:
            return f"is in the stage {version.stage}"
        if services := served_by(self.operations.control.fold.directory, version.pushed.digest):
            return f"is served by {services[0]}"
        digest = version.pushed.digest
        others = [each for each in self._artifacts.versions() if each[1].pushed.digest == digest]
        for other in self._artifacts.versions():
            if other[1].pushed.base == digest and len(others) == 1:
                return f"is the base of {_ref(*other)}"
        return ""

    @property
    def _artifacts(self) -> Artifacts:
        return self.operations.control.fold.artifacts

    def _to(self) -> str:
        return artifact_store(self.operations.home)

    def _note_tag(self, named: Named, tag: str, version: int, by: str) -> None:
        now_us = self.operations.clock.now_us()
        self.operations.control.note(ArtifactTagged(at_us=now_us, name=named.name, tag=tag, version=version, by=by))

    def _note_removed(self, named: Named, version: Version, by: str, why: str) -> None:
        now_us, number = self.operations.clock.now_us(), version.pushed.version
        self.operations.control.note(ArtifactRemoved(at_us=now_us, name=named.name, version=number, by=by, why=why))

    def _check_owner(self, named: Named, by: str) -> None:
        if by not in (named.owner, self.operations.members.operator):
            raise ForbiddenError(
                f"{named.name} is {named.owner}'s, so {by} may not change it", hint="push under a name of your own"
            )

    def _find(self, ref: str) -> tuple[Named, Version]:
        found = self._artifacts.find(ref)
        if found is None:
            raise self._unknown(ref)
        return found

    def _unknown(self, ref: str) -> NotFoundError:
        name = split_ref(ref)[0]
        named = self._artifacts.named.get(name)
        if named is not None and named.live:
            numbers = [str(each.pushed.version) for each in named.live]
            known = ", ".join([*numbers[-5:], *sorted(named.tags)])
            return NotFoundError(f"{name} has no version {ref[len(name) + 1 :]!r}", hint=f"it has {known}")
        near = difflib.get_close_matches(name, self._artifacts.named, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return NotFoundError(f"there is no artifact {name!r}", hint=f"{hint}`cordee artifact ls` shows them")


@lru_cache(maxsize=32)
def _needed(to: str, version: str, kind: str) -> frozenset[str]:
    """Return the chunks or the manifests through which a version is read; what a digest names never changes."""
    found = ArtifactStore(open_blobs(to)).read(version)
    manifests = (found.manifest, *found.bases)
    return frozenset(found.needed_bytes() if kind == CHUNKS else (each.digest for each in manifests))


def _ref(named: Named, version: Version) -> str:
    return f"{named.name}:{version.pushed.version}"


def _check_tag(tag: str) -> None:
    _check_word(TAG, tag, "tag", "a letter, then letters, digits, - _ and .")
    if tag == LATEST:
        raise InputError(f"{LATEST} always names the newest version", hint="choose another word")


def _check_word(pattern: str, word: str, what: str, rule: str) -> None:
    if not re.fullmatch(pattern, word):
        raise InputError(f"{word!r:.100} is no {what}", hint=f"it has {rule}")
