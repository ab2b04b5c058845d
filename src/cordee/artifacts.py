"""Artifacts from Python and for the command line: push a folder under a name, pull a version, and what is known of it.

    from cordee.artifacts import ArtifactClient
    with Client() as client:
        made = ArtifactClient(client).push(Path("out"), "team/llama-sft", PushWanted(base="llama-3-8b:1"))

Chunks go straight to the store if this machine can reach it, else through the server.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cordee.answers.artifacts import (
    BlobSize,
    CollectedView,
    CollectRequest,
    Committed,
    PushOpened,
    StoreView,
    VersionDetailView,
    VersionView,
)
from cordee.client import Client
from cordee.errors import CordeeError, InputError, MissingExtraError, NotFoundError, ServerError

try:
    from cordee.storage.destination import open_blobs
    from cordee.storage.files import Blobs, Data
    from cordee.storage.registry import oci
    from cordee.storage.registry.compare import ArtifactDiff, compare
    from cordee.storage.registry.manifest import Kind
    from cordee.storage.registry.pickles import check_pickles
    from cordee.storage.registry.signature import is_signed, public_key, sign
    from cordee.storage.registry.store import Artifact, ArtifactStore, Found, Pushed, files_below
except ImportError as error:
    raise MissingExtraError(
        f"artifacts need the library {error.name}, which is not installed", hint='pip install "cordee[artifacts]"'
    ) from error

NO_BASE = "none"
_TRIES = 3
_RENEWALS = 3  # in a lease
_DENSE = {"safetensors", "bin", "pt", "pth", "gguf"}

Seen = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushWanted:
    """The facts of a new version beside its files.

    Attributes:
        kind: of the artifact; None: by its files.
        base: reference of a version from which it probably differs little; chunks are stored as the difference. "": the
            base of the name's newest version, or that version; `none`: none.
        parents: references of versions that it was made from, beside those that its job has pulled.
        job: id or name of the job that made it; "": the one in whose attempt this runs, if any.
        queue: whose roles say who sees and changes the name; "": as before, or that of the job.
        note: in words.
        tag: that names it from now on.
        key: file of a private key that signs it.
        allow_pickles: scan files that run code when they are loaded, instead of refusing them.
    """

    kind: Kind | None = None
    base: str = ""
    parents: tuple[str, ...] = ()
    job: str = ""
    queue: str = ""
    note: str = ""
    tag: str = ""
    key: Path | None = None
    allow_pickles: bool = False


class PushResult(NamedTuple):
    """A version, whether it is new, and what its push has written and found."""

    version: VersionView
    is_new: bool
    written_bytes: int
    known_bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactClient:
    """The requests about artifacts over a connection to a server."""

    client: Client

    def versions(self, name: str = "") -> list[VersionView]:
        """Return the newest version of each name; with a name all of its versions."""
        return self.client.ask(list[VersionView], "GET", "/v1/artifacts", params={"name": name})

    def show(self, ref: str) -> VersionDetailView:
        """Return a version: of `name`, `name:3`, `name:tag` or `name@digest`.

        Raises:
            NotFoundError: there is none.
        """
        return self.client.ask(VersionDetailView, "GET", "/v1/artifacts/version", params={"ref": ref})

    def push(self, source: Path, name: str, wanted: PushWanted, on_bytes: Seen = lambda n: None) -> PushResult:
        """Make a version of a file or a folder; the same content again makes none.

        Args:
            source: the file or folder.
            name: of the artifact.
            wanted: what the version says beside its files.
            on_bytes: called with the number of bytes of each chunk that is done.

        Raises:
            InputError: a file cannot be read, or would run code when it is loaded; or the name is not valid.
            NotFoundError: the base, a parent or the job does not exist.
            ForbiddenError: the name is another user's.
        """
        files = _files_of(source)
        scanned = check_pickles(files, allowed=wanted.allow_pickles)
        facts = {"pickles": [each.name for each in scanned]} if scanned else {}
        base, of = self._base(name, wanted.base)
        with self._opened() as opened:
            for _ in range(_TRIES):
                store = self._store(*of, push=opened.push)
                over = store.read(base) if base else None
                pushed = store.push(files, wanted.kind or kind_of(files), base=over, facts=facts, on_bytes=on_bytes)
                made = self._commit(opened.push, name, wanted, pushed)
                if made.version is not None:
                    return PushResult(made.version, made.is_new, pushed.written_bytes, pushed.known_bytes)
        raise ServerError(f"the store lacks {len(made.missing)} chunks that were sent {_TRIES} times")

    def pull(self, ref: str, folder: Path, key: str = "", on_bytes: Seen = lambda n: None) -> VersionDetailView:
        """Write the files of a version into a new folder, all or none, and note that this attempt's job uses it.

        Args:
            ref: of the version.
            folder: new, or empty.
            key: public key in hex that must have signed the version; "": no signature is asked for.
            on_bytes: called with the number of bytes of each chunk that is done.

        Raises:
            InputError: the folder is not empty, or the signature is not of this key.
            CheckpointError: a chunk is missing or was altered.
        """
        version = self.show(ref)
        if key:
            check_signature(version, key)
        store = self._store(version.digest)
        store.pull(store.read(version.digest), folder, on_bytes)
        if job := job_here():
            with suppress(NotFoundError):  # a job of another server
                self._post("uses", {"ref": version.ref, "job": job})
        return version

    def verify(self, ref: str, on_bytes: Seen = lambda n: None) -> list[str]:
        """Read every chunk of a version, and return a sentence about each that is missing or was altered."""
        store, artifact = self.read(ref)
        return store.verify(artifact, on_bytes)

    def diff(self, first: str, second: str) -> ArtifactDiff:
        """Return how the second version differs from the first: files, tensors, bytes."""
        digests = [self.show(ref).digest for ref in (first, second)]
        store = self._store(*digests)
        return compare(store, *map(store.read, digests))

    def read(self, ref: str) -> tuple[ArtifactStore, Artifact]:
        """Return a version's content, and the store that has it."""
        digest = self.show(ref).digest
        store = self._store(digest)
        return store, store.read(digest)

    def tag(self, ref: str, tag: str, *, remove: bool = False) -> VersionView:
        """Let a tag name a version, or remove the tag."""
        return self._post("tags", {"ref": ref, "tag": tag, "remove": remove})

    def stage(self, ref: str, stage: str) -> VersionView:
        """Say to which stage a version has come; "": none."""
        return self._post("stages", {"ref": ref, "stage": stage})

    def remove(self, ref: str, why: str = "") -> VersionView:
        """Remove a version that no tag, no stage and no other version needs."""
        return self._post("removals", {"ref": ref, "why": why})

    def collect(self, wanted: CollectRequest) -> CollectedView:
        """Remove old versions and the chunks that none needs, or say which would go."""
        return self.client.ask(CollectedView, "POST", "/v1/artifacts/collections", json=wanted.model_dump())

    def _base(self, name: str, wanted: str) -> tuple[str, list[str]]:
        """Return the digest of the base of a push, "" without one, and those of versions whose chunks it may name."""
        newest = None
        with suppress(NotFoundError):
            newest = self.show(name)
        of = [] if newest is None else [newest.digest]
        if wanted and wanted != NO_BASE:
            base = self.show(wanted).digest
            return base, [base, *of]
        return ("" if newest is None or wanted else newest.base or newest.digest), of

    def _post(self, path: str, body: dict[str, object]) -> VersionView:
        return self.client.ask(VersionView, "POST", f"/v1/artifacts/{path}", json=body)

    def _commit(self, push: str, name: str, wanted: PushWanted, pushed: Pushed) -> Committed:
        digest = pushed.manifest.digest
        body = {
            "name": name,
            "manifest": pushed.manifest.encode().decode(),
            "stored_bytes": pushed.written_bytes,
            "queue": wanted.queue,
            "job": wanted.job or job_here(),
            "parents": list(wanted.parents),
            "note": wanted.note,
            "key": "" if wanted.key is None else public_key(wanted.key),
            "signature": "" if wanted.key is None else sign(wanted.key, digest),
            "tag": wanted.tag,
        }
        return self.client.ask(Committed, "POST", f"/v1/artifacts/pushes/{push}/commit", json=body)

    @contextmanager
    def _opened(self) -> Iterator[PushOpened]:
        """Open a push, keep it open, and end it."""
        opened = self.client.ask(PushOpened, "POST", "/v1/artifacts/pushes")
        path, done = f"/v1/artifacts/pushes/{opened.push}", threading.Event()
        home, url, token = self.client.home, self.client.url, self.client.token

        def renew() -> None:
            with Client(home, url=url, token=token, fingerprint=self.client.address.fingerprint) as own:
                while not done.wait(opened.lease_s / _RENEWALS):
                    with suppress(CordeeError):  # the commit says what is missing
                        own.exchange("POST", f"{path}/renew")

        renewing = threading.Thread(target=renew, name="renew-push", daemon=True)
        renewing.start()
        try:
            yield opened
        finally:
            done.set()
            renewing.join()
            with suppress(CordeeError):
                self.client.exchange("DELETE", path)

    def _store(self, *of: str, push: str = "") -> ArtifactStore:
        """Return the store, to read these versions: opened here if this machine reaches it, else through the server."""
        store = self.client.ask(StoreView, "GET", "/v1/artifacts/store")
        if store.direct and (not store.here or self.client.home is not None):
            return ArtifactStore(open_blobs(store.to))
        return ArtifactStore(ServerBlobs(self.client, push, of))


@dataclass
class ServerBlobs:
    """Chunks and manifests through the server's API, for machines that cannot reach the store.

    Attributes:
        client: of the server.
        push: that is open; "": none.
        of: digests of versions, whose chunks the server hands out.
    """

    client: Client
    push: str
    of: tuple[str, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one thread at a time may use a client

    def __str__(self) -> str:
        return self.client.url

    @property
    def levels(self) -> tuple[Blobs, ...]:
        """Return itself: the server has the levels."""
        return (self,)

    def put_if_absent(self, key: str, data: Data, *, durable: bool = True) -> bool:
        """Send the blob, unless the server has it."""
        if self.size(key) == memoryview(data).nbytes:
            return False
        self.put(key, data)
        return True

    def put(self, key: str, data: Data) -> None:
        """Send the blob."""
        with self._lock:
            self.client.exchange("PUT", _path(key), params={"push": self.push}, content=bytes(data))

    def get(self, key: str) -> bytes | None:
        """Return the blob, or None if the server has none."""
        try:
            with self._lock:
                return self.client.exchange("GET", _path(key), params={"of": list(self.of)})
        except NotFoundError:
            return None

    def size(self, key: str) -> int | None:
        """Return the size of the blob in bytes, or None if the server has none."""
        with self._lock:
            return self.client.ask(BlobSize, "GET", f"{_path(key)}/size", params={"of": list(self.of)}).size_bytes

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: the server has written them durably."""

    def list(self, prefix: str) -> Iterator[str]:
        """Refuse: only the server lists its store."""
        raise InputError(f"the server does not list {prefix}", hint="collections run on the server")

    def delete(self, key: str) -> None:
        """Refuse: only the server deletes from its store."""
        raise InputError(f"the server does not delete {key} for a client", hint="cordee artifact gc")

    def read_blocks(
        self, key: str, seen: Callable[[memoryview], object], into: memoryview | None = None, *, from_disk: bool = False
    ) -> int | None:
        """Pass the blob to `seen`; return its size, or None."""
        data = self.get(key)
        if data is None:
            return None
        seen(memoryview(data))
        if into is not None and len(into) == len(data):
            into[:] = data
        return len(data)

    def sweep_tmp(self) -> None:
        """Do nothing: the server sweeps its own."""


def kind_of(files: Iterable[Found]) -> Kind:
    """Return the kind of an artifact by the names of its files: adapters and models have a configuration."""
    names = {each.name for each in files}
    if "adapter_config.json" in names:
        return "adapter"
    if "config.json" in names or any(name.rpartition(".")[2] in _DENSE for name in names):
        return "model"
    return "other"


def pushed_bytes(source: Path) -> int:
    """Return the size of what a push of a file, a folder or an OCI image layout reads."""
    return sum(each.path.stat().st_size for each in _files_of(source))


def _files_of(source: Path) -> list[Found]:
    return oci.files_of_layout(source) if oci.is_layout(source) else files_below(source)


def job_here() -> str:
    """Return the job in whose attempt this process runs; "": in none."""
    return os.environ.get("CORDEE_JOB", "")


def check_signature(version: VersionDetailView, key: str) -> None:
    """Check that a version was signed by the private part of a public key.

    Raises:
        InputError: it was not.
    """
    if not version.signature:
        raise InputError(f"{version.ref} is not signed", hint="push it with --sign KEY")
    if version.key != key or not is_signed(version.digest, version.signature, key):
        raise InputError(
            f"{version.ref} was signed by the key {version.key[:12]}, and not by {key[:12]}",
            hint="ask whoever pushed it for the right public key: cordee artifact key FILE",
        )


def _path(key: str) -> str:
    """Return the API's path of a key: `chunks/ab/<digest>`, `manifests/<digest>`."""
    return f"/v1/artifacts/{key.partition('/')[0]}/{key.rpartition('/')[2]}"
