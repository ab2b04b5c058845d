"""A blob store in an object store (S3, Google Cloud Storage, Azure), with the same protocol and guarantees as `files`.

Object stores write a blob whole or not at all, and their conditional create has one winner. But networks lose answers:
such requests are tried again, and a create that then finds its own bytes has won.
Credentials come from the environment, as for the provider's own tools.
"""

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cordee.errors import DestinationError, MissingExtraError
from cordee.storage.files import Blobs, Data
from cordee.units import MiB

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az")
# Answers after which another try would also fail.
REFUSALS = (400, 401, 403)
TRIES = 7
# The first wait; each later one is up to twice as long, 12.6 s in total.
WAIT_S = 0.2
REQUEST_S = 120
CONNECT_S = 10
# Blobs of this size or more are sent in parallel parts. The library cannot make that conditional, and it need not be:
# such blobs are chunks, and their keys identify content and writer.
MULTIPART_BYTES = 16 * MiB
PART_BYTES = 8 * MiB


class RemoteBlobs:
    """`Blobs` below a URL: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`."""

    def __init__(self, url: str, *, wait_s: float = WAIT_S, request_s: float = REQUEST_S) -> None:
        self.url = url.rstrip("/")
        self.levels: tuple[Blobs, ...] = (self,)
        self._wait_s = wait_s
        self._obstore, self._store = connect(self.url, request_s)

    def __str__(self) -> str:
        return self.url

    def put_if_absent(self, key: str, data: Data, *, durable: bool = True) -> bool:
        """Create the blob whole; False if the key exists. After a lost answer, True if the key has these bytes."""
        if memoryview(data).nbytes >= MULTIPART_BYTES:
            if self.size(key) is not None:
                return False
            self.put(key, data)
            return True
        tried = False

        def create() -> bool:
            nonlocal tried
            again, tried = tried, True
            try:
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
                return again and self.get(key) == data
            return True

        return self._trying(f"create {key}", create)

    def put(self, key: str, data: Data) -> None:
        """Create or replace the blob, atomically."""
        size_bytes = memoryview(data).nbytes
        parts = size_bytes >= MULTIPART_BYTES
        self._trying(
            f"write {key}",
            lambda: self._obstore.put(
                self._store, key, data, use_multipart=parts, chunk_size=PART_BYTES, max_concurrency=4
            ),
        )

    def get(self, key: str) -> bytes | None:
        """Return the blob, or None if there is none."""

        def read() -> bytes | None:
            try:
                found = self._obstore.get(self._store, key)
                data = bytes(found.bytes())
            except FileNotFoundError:
                return None
            size_bytes = found.meta["size"]
            if len(data) != size_bytes:
                raise self._obstore.exceptions.GenericError(f"{len(data)} of {size_bytes} bytes arrived")
            return data

        return self._trying(f"read {key}", read)

    def size(self, key: str) -> int | None:
        """Return the size of the blob in bytes, or None if there is none."""

        def look() -> int | None:
            try:
                return int(self._obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

        return self._trying(f"look at {key}", look)

    def list(self, prefix: str) -> Iterator[str]:
        """Return all keys below the folder `prefix`, sorted and once each, whatever the store's listing does."""

        def walk() -> set[str]:
            pages = self._obstore.list(self._store, prefix=f"{prefix}/")
            return {str(entry["path"]) for page in pages for entry in page}

        return iter(sorted(self._trying(f"list {prefix}", walk)))

    def delete(self, key: str) -> None:
        """Remove the blob; no error if there is none."""

        def remove() -> None:
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                pass

        self._trying(f"delete {key}", remove)

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: all blobs are durable once they are put."""

    def read_blocks(
        self, key: str, seen: Callable[[memoryview], object], into: memoryview | None = None, *, from_disk: bool = False
    ) -> int | None:
        """Pass the blob to `seen`, and copy it into the memory; there is no cache to bypass."""
        data = self.get(key)
        if data is None:
            return None
        if into is None or len(into) == len(data):
            if into is not None:
                into[:] = data
            seen(memoryview(data))
        return len(data)

    def sweep_tmp(self) -> None:
        """Do nothing: the bucket's lifecycle rule removes unfinished uploads."""

    def _trying(self, doing: str, call: Callable[[], T]) -> T:
        errors = self._obstore.exceptions
        problem: Exception | None = None
        for turn in range(TRIES):
            if turn:
                # At random, so that ranks that were refused together do not try again together.
                time.sleep(self._wait_s * 2 ** (turn - 1) * random.uniform(0.5, 1))
            try:
                return call()
            except FileNotFoundError as error:
                raise self._failed(doing, error, "does the bucket exist, in this region?") from error
            except (errors.BaseError, OSError) as error:
                if any(f"status code: {code}" in str(error) for code in REFUSALS):
                    raise self._failed(doing, error, "check the credentials in the environment") from error
                problem = error
        assert problem is not None, "at least one try was made"
        raise self._failed(doing, problem, f"it was tried {TRIES} times; is the store reachable?") from problem

    def _failed(self, doing: str, error: Exception, hint: str | None) -> DestinationError:
        return DestinationError(f"cannot {doing} in {self.url}: {short_answer(str(error))}", hint=hint)


def short_answer(text: str) -> str:
    """Return the store's answer in one line, without the library's description of the request."""
    line = " ".join(text.partition("\n\nDebug source")[0].split())
    answer = re.split(r" in [\d.]+[nµm]?s - ", line, maxsplit=1)[-1]
    return answer if len(answer) <= 300 else f"{answer[:297]}..."


def connect(url: str, request_s: float) -> tuple[Any, object]:
    """Return obstore and its store of this URL.

    Raises:
        MissingExtraError: obstore is not installed.
        DestinationError: the environment does not lead to such a store.
    """
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingExtraError(
            f"{url} needs the library obstore, which is not installed", hint="pip install 'cordee[remote]'"
        ) from error
    scheme = urlsplit(url).scheme
    kinds = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}
    # Without TLS only if the environment names such an endpoint.
    options = {
        "timeout": timedelta(seconds=request_s),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "allow_http": True,
    }
    try:
        # Its own retries are off: they would hide a lost answer from `put_if_absent`.
        store = kinds[scheme].from_url(url, client_options=options, retry_config={"max_retries": 0})
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise DestinationError(
            f"{url!r} cannot be used: {short_answer(str(error))}", hint="check the environment variables of that store"
        ) from error
    return obstore, store
