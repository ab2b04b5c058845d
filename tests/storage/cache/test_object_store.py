"""The cache over a real S3 server: faults of the network, objects that change, digests, killed fetchers."""

import logging
import multiprocessing
import os
import random
import signal
import time

import pytest
from cache_world import in_s3, minute_of_503, to_s3
from torch.utils.data import DataLoader

import cordee
from cordee.errors import DataDamagedError, DataError, DataReplacedError
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import PIECE_BYTES
from cordee.storage.cache.prefetch import prefetch

PIECES = 5


@pytest.fixture
def contents() -> dict[str, bytes]:
    return {f"{number}.bin": os.urandom(PIECES * PIECE_BYTES + number) for number in range(2)}


@pytest.fixture
def url(s3, contents) -> str:
    url = to_s3(s3.behind, contents)
    s3.seen.clear()
    return url


def whole(data, name: str) -> bytes:
    return data.open(name).read()


def gets(s3) -> int:
    return sum(method == "GET" and ".bin" in path for method, path in s3.seen)


def test_an_object_is_fetched_in_few_requests_and_checked_by_its_md5(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    world.data.ensure([(number, 0, pin.size_bytes) for number, pin in enumerate(world.data.pins)])
    assert {name: whole(world.data, name) for name in world.data} == contents
    assert gets(s3) == 2 and world.data.fetched_bytes() == sum(map(len, contents.values()))
    assert world.node.open(world.data.pins[0].object_id).checked


def test_equal_objects_of_two_datasets_are_one_in_the_cache(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    assert whole(world.data, "0.bin") == contents["0.bin"]
    other = in_s3(to_s3(s3.behind, {"copy.bin": contents["0.bin"]}, "other"), tmp_path)
    s3.seen.clear()
    assert whole(other.data, "copy.bin") == contents["0.bin"] and gets(s3) == 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_network_does_the_bytes_are_right(s3, url, contents, tmp_path, seed) -> None:
    world = in_s3(url, tmp_path)
    with s3.failing(s3.by_chance(seed, 0.4)):
        assert {name: whole(world.data, name) for name in world.data} == contents, f"replay: seed {seed}"


def test_a_store_that_is_too_busy_for_longer_than_its_time_is_named(s3, url, tmp_path) -> None:
    world = in_s3(url, tmp_path, patience_s=0.3)
    with s3.failing(lambda method, path: "503"), pytest.raises(DataError, match=r"cannot read s3://bucket/set/0\.bin"):
        whole(world.data, "0.bin")
    assert whole(world.data, "0.bin")
    with s3.failing(lambda method, path: "403"), pytest.raises(DataError, match="credentials"):
        whole(world.data, "1.bin")


def test_an_object_that_is_replaced_within_the_epoch_is_named(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    assert world.data.read(0, 0, 9) == contents["0.bin"][:9]
    to_s3(s3.behind, {"0.bin": contents["1.bin"]})
    assert world.data.read(0, 0, 9) == contents["0.bin"][:9]
    with pytest.raises(DataReplacedError, match="another object is there now"):
        world.data.read(0, 4 * PIECE_BYTES, 4 * PIECE_BYTES + 1)
    again = in_s3(url, tmp_path)
    assert whole(again.data, "0.bin") == contents["1.bin"], "pinned as it is now"


class Flip:
    """Changes a byte of what the store gives."""

    def __init__(self, fetching, times: int) -> None:
        self.source, self.left = fetching.source, times
        fetching.source = lambda url: self

    def pins(self):
        return self.source("").pins()

    def read(self, pin, start, stop, piece_bytes):
        for data in self.source(pin.url).read(pin, start, stop, piece_bytes):
            if self.left:
                self.left -= 1
                data[7] ^= 1
            yield data


def test_damage_on_the_way_is_found_by_the_md5_and_named_to_those_that_read_it(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    Flip(world.fetching, 1)
    assert whole(world.data, "0.bin") != contents["0.bin"], "nobody can know yet"
    with pytest.raises(DataDamagedError, match=r"0\.bin had other bytes than its store says"):
        world.data.check(settle=True)
    assert whole(in_s3(url, tmp_path).data, "0.bin") == contents["0.bin"], "fetched again"


@pytest.mark.parametrize("apart_s", [-86_400, 86_400])
def test_damage_is_named_whatever_the_clocks_say(s3, url, contents, tmp_path, monkeypatch, apart_s) -> None:
    """The clock steps between the call of `cordee.data` and the finding, and one from before is none."""
    world = in_s3(url, tmp_path)
    Flip(world.fetching, 1)
    whole(world.data, "0.bin")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + apart_s)
    world.channel.ask("settle")
    [mark] = (tmp_path / "damaged").iterdir()
    os.utime(mark, (now_s + apart_s,) * 2)
    with pytest.raises(DataDamagedError, match="had other bytes"):
        world.data.check(settle=True)
    later = in_s3(url, tmp_path)
    assert whole(later.data, "0.bin") == contents["0.bin"]
    later.data.check(settle=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_is_too_busy_for_a_minute_only_delays(s3, url, contents, tmp_path, monkeypatch, seed) -> None:
    world = in_s3(url, tmp_path, patience_s=300.0)
    met = minute_of_503(s3, monkeypatch, world.data, random.Random(seed))
    assert met.found == contents and met.refused > 3 and met.waited_s > 55, f"replay: seed {seed}"


def test_damage_in_the_store_is_named(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    assert whole(world.data, "1.bin") == contents["1.bin"]
    world.data.check(settle=True)  # this store's tags are digests
    Flip(world.fetching, 10**9)
    whole(world.data, "0.bin")
    with pytest.raises(DataDamagedError, match="had other bytes"):
        world.data.check(settle=True)


def test_tags_that_are_no_digests_are_no_damage(s3, url, contents, tmp_path, caplog) -> None:
    """As with keys of KMS: a tag looks like an MD5 and is none."""
    world = in_s3(url, tmp_path)
    Flip(world.fetching, 10**9)
    whole(world.data, "0.bin")
    with caplog.at_level(logging.WARNING, "cordee.data"):
        world.data.check(settle=True)
    assert "its tag is not the MD5 of its bytes" in caplog.text


def test_a_prefetched_object_that_was_damaged_on_its_way_is_fetched_again(s3, url, contents, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    Flip(world.fetching, 1)
    assert world.fetching.prefetch(world.data.pins) == 2
    later = in_s3(url, tmp_path)
    s3.seen.clear()
    assert {name: whole(later.data, name) for name in later.data} == contents and gets(s3) == 0
    later.data.check(settle=True)


def read_forever(data, ready, samples) -> None:
    while True:
        for index in range(len(samples)):
            samples[index]
        ready.set()


def test_readers_and_fetchers_that_are_killed_harm_nobody(s3, url, contents, tmp_path) -> None:
    """A loader's workers are forks of a process that has used the fetcher; a reader and both fetchers are killed."""
    record = PIECE_BYTES // 4
    data = cordee.data(url, cache=tmp_path)
    samples = data.samples(record_bytes=record)
    wanted = sorted(b[at : at + record] for b in contents.values() for at in range(0, len(b) - record + 1, record))
    other = cordee.data(url, cache=tmp_path)
    ready = multiprocessing.get_context("fork").Event()
    reader = multiprocessing.get_context("fork").Process(
        target=read_forever, args=(other, ready, other.samples(record_bytes=record))
    )
    reader.start()
    sampler = cordee.ElasticBatchSampler(samples, 4, drop_last=False)
    loader = DataLoader(samples, batch_sampler=sampler, num_workers=2, collate_fn=list)
    found, batches = [], sampler.batches(loader)
    for step in range(sampler.steps_in(1)):
        if step == 2:
            for each in (data, other):
                os.kill(_fetcher(each).pid, signal.SIGKILL)
        if step == 4:
            ready.wait()
            reader.kill()
        found += next(batches)
    assert sorted(found) == wanted
    reader.join()
    reader.close()
    batches.close()
    assert data.path("0.bin").read_bytes() == contents["0.bin"]
    other.close()
    data.close()


def _fetcher(data):
    return data._channel._owner.peek()[2][2][-1][1]


def test_a_fetcher_ends_with_its_job(s3, url, tmp_path) -> None:
    script = f"import cordee, os, signal; d = cordee.data({url!r}, cache={str(tmp_path)!r}); print(d._channel._owner"
    script += ".peek()[2][2][-1][1].pid, d.read(0, 0, 3), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    pid = int(done.stdout.split()[0])
    while _runs(pid):
        time.sleep(0.01)  # bounded by the test's time-out


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_object_that_left_before_its_check_stays_away(s3, url, tmp_path) -> None:
    world = in_s3(url, tmp_path)
    pin = world.data.pins[0]
    assert world.fetching.fetch(pin, 0, PIECES)
    world.node.drop(pin.object_id)
    world.fetching.check(pin)
    assert world.node.open(pin.object_id) is None


def test_a_prefetch_brings_what_has_room_and_says_so(s3, url, contents, tmp_path) -> None:
    found = prefetch(NodeCache(tmp_path / "small", (PIECES + 1) * PIECE_BYTES), [url])
    assert (found["objects"], found["objects_there"]) == (2, 1) and found["bytes"] == sum(map(len, contents.values()))
    found = prefetch(NodeCache(tmp_path / "large"), [url])
    assert found["bytes_there"] == found["fetched_bytes"] == found["bytes"]
    assert prefetch(NodeCache(tmp_path / "large"), [url])["fetched_bytes"] == 0
