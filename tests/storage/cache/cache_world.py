"""A dataset in a folder or in S3, a cache, and readers of it in this process."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3

from cordee.storage.cache.api import Data
from cordee.storage.cache.fetcher import Fetcher
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pins import Pin
from cordee.storage.cache.sources import FolderSource


class Counted(FolderSource):
    """A folder as a store: it counts the bytes that are read, and does what a test says before each read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lock, self.read_bytes = threading.Lock(), 0
        self.before = lambda pin, start: None

    def read(self, pin: Pin, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        for data in super().read(pin, start, stop, piece_bytes):
            changed = self.before(pin, start)
            with self.lock:
                self.read_bytes += len(data)
            start += len(data)
            yield memoryview(changed) if changed is not None else data


class Direct:
    """A channel to a fetcher in this process."""

    def __init__(self, node: NodeCache, source: FolderSource) -> None:
        self.fetcher = Fetcher(node)
        self.fetcher._fetching._sources[source.url] = source
        self.fetching = self.fetcher._fetching

    def ask(self, op: str, **request):
        head, body = self.fetcher.answer({"op": op, **request})
        from cordee.storage.cache.channel import result

        return result(head, body)

    def hint(self, **hint) -> None:
        self.ask("hint", **hint)

    def close(self) -> None:
        self.fetcher.close()


def fill(folder: Path, sizes: dict[str, int], seed: int = 0) -> dict[str, bytes]:
    """Write files with random bytes."""
    rng, found = random.Random(seed), {}
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))
        found[name] = path.read_bytes()
    return found


def direct(folder: Path, cache: Path, limit_bytes: int | None = None, source: Counted | None = None) -> SimpleNamespace:
    """A dataset that is read through a fetcher in this process."""
    node = NodeCache(cache, limit_bytes)
    source = source or Counted(str(folder))
    channel = Direct(node, source)
    data = Data(source.url, tuple(source.pins()), node, channel)
    return SimpleNamespace(data=data, node=node, source=source, channel=channel, fetching=channel.fetching)


def to_s3(port: int, contents: dict[str, bytes], prefix: str = "set") -> str:
    """Put objects into the bucket, in one part each."""
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    for name, data in contents.items():
        client.put_object(Bucket="bucket", Key=f"{prefix}/{name}", Body=data)
    client.close()
    return f"s3://bucket/{prefix}"


def in_s3(url: str, cache: Path, patience_s: float = 60.0) -> SimpleNamespace:
    """A dataset in S3 that is read through a fetcher in this process."""
    node = NodeCache(cache)
    channel = Direct(node, FolderSource("/"))
    channel.fetching._patience_s = patience_s
    pins = tuple(Pin(*row) for row in channel.ask("pins", url=url))
    return SimpleNamespace(data=Data(url, pins, node, channel), node=node, channel=channel, fetching=channel.fetching)


def minute_of_503(s3, monkeypatch, data, rng) -> SimpleNamespace:
    """Read all objects; from a drawn request on, the store answers 503 for a minute of the fetcher's own clock."""
    met = SimpleNamespace(waited_s=0.0, refused=0, found={}, from_s=None)
    asked, begin = [0], rng.randrange(1, 3)
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            met.waited_s += seconds

    def fault(method: str, path: str) -> str | None:
        with lock:
            asked[0] += 1
            if asked[0] == begin:
                met.from_s = met.waited_s
            busy = met.from_s is not None and met.waited_s < met.from_s + 60
            met.refused += busy
        return "503" if busy else None

    clock = SimpleNamespace(monotonic=lambda: met.waited_s, sleep=sleep)
    with monkeypatch.context() as patched, s3.failing(fault):
        patched.setattr("cordee.storage.cache.sources.time", clock)
        met.found = {name: data.open(name).read() for name in data}
    return met
