"""The API of artifacts without HTTP: one method for each request that a client can make.

A name is its first pusher's, and of the queue that its newest push names; `access.py` says who sees and changes it.
Whoever knows a digest does not have the bytes: they are read by those who see a version with them, and named in a push
by those and by whoever has sent them.
"""

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
from cordee.control.access import Access
from cordee.control.artifacts.pushes import LEASE_S, Pushes
from cordee.control.artifacts.views import detail_view, maker_view, name_of, served_by, version_view
from cordee.control.files import check_room
from cordee.control.home import artifact_store
from cordee.control.operations import Operations
from cordee.control.roles import Action
from cordee.control.sent import Sent
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
from cordee.near import meant
from cordee.schedule.quota.queues import DEFAULT, near

try:
    from cordee.storage.content import pack
    from cordee.storage.destination import is_remote, level_urls, open_blobs
    from cordee.storage.files import Blobs
    from cordee.storage.registry.manifest import ArtifactManifest
    from cordee.storage.registry.signature import is_signed
    from cordee.storage.registry.store import CHUNKS, MANIFESTS, ArtifactStore, key_of
except ImportError as error:
    raise MissingExtraError(
        f"artifacts need the library {error.name}, which is not installed", hint='pip install "cordee[artifacts]"'
    ) from error


_SENT = "artifacts-sent"


@dataclass(slots=True)
class ArtifactOperations:
    """The requests about artifacts.

    Attributes:
        operations: those on jobs, which share the log.
        pushes: that are open.
    """

    operations: Operations
    pushes: Pushes = field(default_factory=Pushes)

    def store(self, by: Access) -> StoreView:
        """Return where chunks lie."""
        here = self._is_here()
        return StoreView(to=self.store_url, here=here, direct=not here or by.sees_all)

    def chunk(self, kind: str, digest: str, of: Sequence[str], by: Access) -> bytes:
        """Return a chunk or a manifest of the server's disk.

        Args:
            kind: `chunks` or `manifests`.
            digest: of its stored form.
            of: digests of versions, of which one must have it and be seen by who asks.
            by: who asks.

        Raises:
            NotFoundError: it is not there, or in none of them.
            InputError: chunks do not lie here.
        """
        self._check_here()
        data = self.blobs().get(key_of(kind, digest)) if by.sees_all or self._reads(kind, digest, of, by) else None
        if data is None:
            raise NotFoundError(f"there is no {kind[:-1]} {digest[:12]} of a version that {by.name} sees")
        return data

    def size(self, kind: str, digest: str, of: Sequence[str], by: Access) -> int | None:
        """Return the size of a chunk or a manifest that who asks may name in a push; None: it has to be sent."""
        self._check_here()
        known = by.sees_all or self._sent.has(by.name, digest) or self._reads(kind, digest, of, by)
        return self.blobs().size(key_of(kind, digest)) if known else None

    def add(self, kind: str, digest: str, data: bytes, by: Access) -> None:
        """Store a chunk or a manifest, whose digest was checked, on the server's disk.

        Raises:
            StoreError: the disk is full.
            InputError: chunks do not lie here.
        """
        self._check_here()
        check_room(self.operations.home, len(data))
        blobs, key = self.blobs(), key_of(kind, digest)
        if blobs.size(key) != len(data):
            blobs.put(key, data)
        self._sent.note(by.name, digest)

    def _reads(self, kind: str, digest: str, of: Sequence[str], by: Access) -> bool:
        """Return whether one of these versions needs a chunk or a manifest, and is seen."""
        seen = [each for each in of if self._sees_digest(each, by)]
        return any(digest in _needed(self.store_url, each, kind) for each in seen)

    def _sees_digest(self, digest: str, by: Access) -> bool:
        with self.operations.control.changed:
            return any(by.sees(named) for named, _ in self._artifacts.all_of(digest))

    def _check_here(self) -> None:
        if not self._is_here():
            raise InputError(
                f"the server hands out chunks of its own disk only, and they lie in {self.store_url}",
                hint="read and write there, with credentials of your own",
            )

    def blobs(self) -> Blobs:
        """Return the store of chunks and manifests."""
        return open_blobs(self.store_url)

    def pack(self, versions: Sequence[str], kind: str, wanted: Sequence[str]) -> bytes:
        """Return a pack of the chunks or manifests through which some versions are read.

        Raises:
            NotFoundError: the versions do not need them, or they are not here.
        """
        blobs = self.blobs()
        needed = frozenset[str]().union(*(_needed(self.store_url, version, kind) for version in versions))

        def read(digest: str) -> bytes:
            data = blobs.get(key_of(kind, digest)) if digest in needed else None
            if data is None:
                raise NotFoundError(f"there is no {kind[:-1]} {digest[:12]} of {versions[0][:12]}")
            return data

        return pack(wanted, read)

    def open(self) -> PushOpened:
        """Open a push."""
        return PushOpened(push=self.pushes.open(), lease_s=LEASE_S)

    def commit(self, push: str, wanted: PushCommit, by: Access) -> Committed:
        """Make the next version of a name from what a push has written; the same content again makes none.

        Raises:
            NotFoundError: the push is not open, or a parent or the base does not exist or may not be seen.
            ForbiddenError: the name or the job is another user's, or nothing may be submitted to the queue.
            InputError: the manifest, the name, the queue, the tag or the signature is not valid.
        """
        self.pushes.renew(push)
        _check_word(NAME, wanted.name, "name of an artifact", "lower-case letters, digits, - _ . and up to three /")
        if wanted.tag:
            _check_tag(wanted.tag)
        manifest = ArtifactManifest.decode(wanted.manifest.encode())
        digest = manifest.digest
        if wanted.signature and not is_signed(digest, wanted.signature, wanted.key):
            raise InputError(f"the signature is not that of {digest[:12]} by the key {wanted.key[:12]}")
        job_id = by.job(wanted.job, Action.CHANGE, "say what it has made") if wanted.job else None
        with self.operations.control.changed:
            queue = self._queue_of(wanted, job_id, by)
            before = self._artifacts.find(wanted.name)
        newest = () if before is None else (before[1].pushed.digest,)
        if manifest.base and not self._reads(MANIFESTS, manifest.base, (manifest.base, *newest), by):
            raise NotFoundError(
                f"the base {manifest.base[:12]} was removed meanwhile", hint="push again, with another base or none"
            )
        store = ArtifactStore(self.blobs())
        if missing := store.absent(manifest) or self._unsent(manifest, newest, by):
            return Committed(version=None, missing=missing, is_new=False)
        store.read(digest)  # the manifest itself, and those of its bases
        with self.operations.control.changed:
            view, is_new = self._commit(wanted, manifest, queue, job_id, by)
        self.pushes.close(push)
        return Committed(version=view, missing=[], is_new=is_new)

    def _queue_of(self, wanted: PushCommit, job_id: JobId | None, by: Access) -> str:
        """Return the queue of a push: as said, as it is, or that of its job.

        Raises:
            InputError: there is no such queue.
            ForbiddenError: the name is another user's, or nothing may be submitted to the queue.
        """
        named = self._artifacts.named.get(wanted.name)
        if named is not None and not by.sees(named):
            raise ForbiddenError(f"the name {wanted.name} is taken by another artifact", hint="choose another name")
        if named is not None:
            self._check_changes(named, by, "push to it")
        queues = self.operations.control.state.quotas.queues
        known = {each.name for each in queues} | {DEFAULT}
        if wanted.queue and queues and wanted.queue not in known:
            raise InputError(f"there is no queue {wanted.queue!r}", hint=near(wanted.queue, known))
        of_job = "" if job_id is None else str(self.operations.row(job_id)["queue"])
        queue = wanted.queue or (named.queue if named is not None else of_job or DEFAULT)
        if not by.may(Action.SUBMIT, queue=queue):
            raise ForbiddenError(
                f"{by.name} may not push to the queue {queue}", hint="name one of yours: cordee artifact push --queue"
            )
        return queue

    def _unsent(self, manifest: ArtifactManifest, newest: Sequence[str], by: Access) -> list[str]:
        """Return the chunks of a manifest that this user neither sent nor can read; none of an object store."""
        if by.sees_all or not self._is_here():
            return []
        of = (*filter(None, [manifest.base]), *newest)
        unsent = [each for each in manifest.stored_sizes() if not self._sent.has(by.name, each)]
        return [each for each in unsent if not self._reads(CHUNKS, each, of, by)]

    def _commit(
        self, wanted: PushCommit, manifest: ArtifactManifest, queue: str, job_id: JobId | None, by: Access
    ) -> tuple[VersionView, bool]:
        artifacts, digest = self._artifacts, manifest.digest
        if manifest.base and artifacts.by_digest(manifest.base) is None:
            raise NotFoundError(
                f"the base {manifest.base[:12]} was removed meanwhile", hint="push again, with another base or none"
            )
        parents = [self._find(ref, by)[1].pushed.digest for ref in wanted.parents]
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
                    by=by.name,
                    queue=queue,
                    maker=job_id,
                    base=manifest.base,
                    parents=tuple(dict.fromkeys(each for each in parents if each != digest)),
                    note=wanted.note,
                    key=wanted.key,
                    signature=wanted.signature,
                )
            )
        named, version = self._find(wanted.name, by)
        if wanted.tag and named.tags.get(wanted.tag) != version.pushed.version:
            self._note_tag(named, wanted.tag, version.pushed.version, by.name)
        return version_view(named, version), is_new

    def versions(self, name: str, by: Access) -> list[VersionView]:
        """Return the newest version of each name; with a name all of its versions. The newest come first.

        Raises:
            NotFoundError: there is no such name.
        """
        with self.operations.control.changed:
            if name:
                found = self._artifacts.named.get(name)
                if found is None or not found.live or not by.sees(found):
                    raise self._unknown(name, by)
                return [version_view(found, each) for each in reversed(found.live)]
            seen = (each for each in self._artifacts.named.values() if each.live and by.sees(each))
            newest = [(named, named.live[-1]) for named in seen]
            newest.sort(key=lambda each: -each[1].pushed.at_us)
            return [version_view(*each) for each in newest]

    def of_job(self, job_id: JobId, by: Access) -> tuple[list[VersionView], list[VersionView]]:
        """Return the versions that a job has made, and those that it has read, the newest first."""
        with self.operations.control.changed:
            seen = [each for each in self._artifacts.versions() if by.sees(each[0])]
            seen.sort(key=lambda each: -each[1].pushed.at_us)
            made = [version_view(*each) for each in seen if each[1].pushed.maker == job_id]
            return made, [version_view(*each) for each in seen if job_id in each[1].used_by]

    def show(self, ref: str, by: Access) -> VersionDetailView:
        """Return a version with the job that made it, its lineage, and the history of its name."""
        with self.operations.control.changed:
            job_id = self._find(ref, by)[1].pushed.maker
        maker = None if job_id is None or not by.sees_id(job_id) else maker_view(self.operations, job_id)
        with self.operations.control.changed:
            return detail_view(self._artifacts, *self._find(ref, by), maker, by.sees)

    def tag(self, wanted: TagRequest, by: Access) -> VersionView:
        """Let a tag name a version, or none.

        Raises:
            InputError: it is no tag, or none of this name.
        """
        _check_tag(wanted.tag)
        with self.operations.control.changed:
            named, version = self._changed(wanted.ref, by, "tag it")
            if wanted.remove and wanted.tag not in named.tags:
                raise InputError(f"{named.name} has no tag {wanted.tag!r}", hint=f"cordee artifact show {named.name}")
            number = 0 if wanted.remove else version.pushed.version
            if named.tags.get(wanted.tag, 0) != number:
                self._note_tag(named, wanted.tag, number, by.name)
            return version_view(named, version)

    def stage(self, wanted: StageRequest, by: Access) -> VersionView:
        """Say to which stage a version has come."""
        with self.operations.control.changed:
            named, version = self._changed(wanted.ref, by, "set its stage")
            if version.stage != wanted.stage:
                now_us, number = self.operations.clock.now_us(), version.pushed.version
                self.operations.control.note(
                    ArtifactStaged(at_us=now_us, name=named.name, version=number, stage=wanted.stage, by=by.name)
                )
            return version_view(named, version)

    def use(self, wanted: UseRequest, by: Access) -> VersionView:
        """Note that a job pulls a version."""
        job_id = by.job(wanted.job, Action.CHANGE, "say what it uses")
        with self.operations.control.changed:
            named, version = self._find(wanted.ref, by)
            if job_id not in version.used_by:
                now_us, number = self.operations.clock.now_us(), version.pushed.version
                self.operations.control.note(ArtifactUsed(at_us=now_us, name=named.name, version=number, job_id=job_id))
            return version_view(named, version)

    def remove(self, wanted: RemoveRequest, by: Access) -> VersionView:
        """Remove a version; its chunks go with the next collection.

        Raises:
            InputError: it has a tag or a stage, a service serves it, or other versions are differences to it.
        """
        with self.operations.control.changed:
            named, version = self._changed(wanted.ref, by, "remove it")
            if why := self._why_kept(named, version, by):
                raise InputError(f"{_ref(named, version)} {why}", hint="take that away first")
            view = version_view(named, version)
            self._note_removed(named, version, by.name, wanted.why or "no reason given")
            return view

    def collect(self, wanted: CollectRequest, by: Access) -> CollectedView:
        """Remove old versions of names that may be changed, and the chunks that none needs; or say which would go.

        Raises:
            BusyError: a push is open.
            NotFoundError: there is no such name.
            ForbiddenError: the name is another user's.
        """
        with self.operations.control.changed:
            if wanted.name:
                self._changed(wanted.name, by, "remove versions of it")
            doomed = list(self._doomed(wanted, by))
            views = [version_view(*each) for each in doomed]
            for named, version in doomed if not wanted.dry else ():
                self._note_removed(named, version, by.name, f"not among the newest {wanted.keep}")
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
            self._sent.collect()
        return CollectedView(versions=views, chunks=chunks, freed_bytes=freed_bytes, dry=False)

    def _doomed(self, wanted: CollectRequest, by: Access) -> Iterator[tuple[Named, Version]]:
        if wanted.keep is None:
            return
        for named in self._artifacts.named.values():
            if wanted.name in ("", named.name) and by.changes(named):
                for version in named.live[: -wanted.keep]:
                    if not self._why_kept(named, version, by):
                        yield named, version

    def _why_kept(self, named: Named, version: Version, by: Access) -> str:
        """Return why a version cannot be removed; "": it can."""
        if tags := named.tags_of(version.pushed.version):
            return f"has the tag {tags[0]}"
        if version.stage:
            return f"is in the stage {version.stage}"
        digest = version.pushed.digest
        if services := served_by(self.operations.control.fold.directory, digest):
            seen = [each.name for each in services if by.sees_spec(each.owner, each.spec)]
            return f"is served by {seen[0] if seen else 'another service'}"
        for other in self._artifacts.versions():
            if other[1].pushed.base == digest and len(self._artifacts.all_of(digest)) == 1:
                return f"is the base of {name_of(*other, by.sees)}"
        return ""

    @property
    def _artifacts(self) -> Artifacts:
        return self.operations.control.fold.artifacts

    @property
    def _sent(self) -> Sent:
        return Sent(self.operations.home / _SENT)

    @property
    def store_url(self) -> str:
        """Return the destination of chunks and manifests."""
        return artifact_store(self.operations.home)

    def _is_here(self) -> bool:
        return not any(map(is_remote, level_urls(self.store_url)))

    def _note_tag(self, named: Named, tag: str, version: int, by: str) -> None:
        now_us = self.operations.clock.now_us()
        self.operations.control.note(ArtifactTagged(at_us=now_us, name=named.name, tag=tag, version=version, by=by))

    def _note_removed(self, named: Named, version: Version, by: str, why: str) -> None:
        now_us, number = self.operations.clock.now_us(), version.pushed.version
        self.operations.control.note(ArtifactRemoved(at_us=now_us, name=named.name, version=number, by=by, why=why))

    def _changed(self, ref: str, by: Access, what: str) -> tuple[Named, Version]:
        """Return a version whose name may be changed.

        Raises:
            NotFoundError: there is none that may be seen.
            ForbiddenError: it is another user's.
        """
        found = self._find(ref, by)
        self._check_changes(found[0], by, what)
        return found

    def _check_changes(self, named: Named, by: Access, what: str) -> None:
        if not by.changes(named):
            owner = named.owner
            raise ForbiddenError(
                f"{named.name} is {owner}'s: only {owner} and operators of {named.queue} may {what}",
                hint=f"ask {owner}, or push under a name of your own",
            )

    def _find(self, ref: str, by: Access) -> tuple[Named, Version]:
        found = self._artifacts.find(ref)
        if found is None or not by.sees(found[0]):
            raise self._unknown(ref, by)
        return found

    def _unknown(self, ref: str, by: Access) -> NotFoundError:
        name = split_ref(ref)[0]
        seen = {each.name: each for each in self._artifacts.named.values() if by.sees(each)}
        named = seen.get(name)
        if named is not None and named.live:
            numbers = [str(each.pushed.version) for each in named.live]
            known = ", ".join([*numbers[-5:], *sorted(named.tags)])
            return NotFoundError(f"{name} has no version {ref[len(name) + 1 :]!r}", hint=f"it has {known}")
        hint = meant(name, seen) + "`cordee artifact ls` shows them"
        return NotFoundError(f"there is no artifact {name!r}", hint=hint)


@lru_cache(maxsize=64)
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
