"""The dataset cache: stories of faults from new seeds, and jobs of which readers and fetchers are killed."""

import fcntl
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fault_story
import pytest
from agent_world import World, python
from cache_world import in_s3, minute_of_503, to_s3
from soaking import Soak

from cordee.control.engines.local import NodeConfig
from cordee.errors import DataDamagedError
from cordee.events import Outcome
from cordee.storage.cache.fetching import Fetching
from cordee.storage.cache.pins import Pin
from s3_world import Proxy, empty

READER = """
import hashlib, sys
import cordee
data = cordee.data(sys.argv[1], cache=sys.argv[2], copy=True)
samples = data.samples(record_bytes=65536)
data._channel.ask("settle")  # starts the fetcher
print(data._channel._owner.peek()[2][2][-1][1].pid, flush=True)
for _ in range(3):
    found = hashlib.sha256()
    for at in range(0, len(samples), 8):
        for each in samples.__getitems__(list(range(at, min(at + 8, len(samples))))):
            found.update(each)
    print(found.hexdigest(), flush=True)
data.close()
"""


def test_stories_of_faults(soak: Soak, tmp_path: Path) -> None:
    logging.getLogger("cordee.data").setLevel(logging.CRITICAL)
    soak.play(lambda seed: fault_story.play(seed, tmp_path / str(seed)), at_most=2_000, say_every=50)


def test_killed_readers_and_fetchers(soak: Soak, tmp_path: Path) -> None:
    """Three jobs start in the same instant; one reader and two fetchers get SIGKILL at times from the seed."""

    def story(seed: int) -> str:
        rng, folder = random.Random(seed), tmp_path / str(seed)
        fault_story.fill(folder / "set", {f"{number}.bin": 4_000_000 for number in range(4)}, seed)
        command = [sys.executable, "-c", READER, str(folder / "set"), str(folder / "cache")]
        with (folder / "errors").open("w") as errors:
            jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) for _ in range(3)]
        fetchers = [int(job.stdout.readline()) for job in jobs]
        for pid in rng.sample([jobs[0].pid, *fetchers[1:]], 3):
            time.sleep(rng.random() * 0.3)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        found = [job.stdout.read().split() for job in jobs]
        ended = [job.wait(120) for job in jobs]
        assert len(found[1]) == len(found[2]) == 3, f"seed {seed}: {ended} {(folder / 'errors').read_text()[-3000:]}"
        assert len({each for lines in found for each in lines}) == 1, f"seed {seed}: other bytes"
        for job in jobs:
            job.stdout.close()
        return f"{len(found[0])} epochs of the killed reader"

    soak.play(story, at_most=200)


def test_minutes_of_503(soak: Soak, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minute is one of the fetcher's own clock; the requests and answers are real."""
    monkeypatch.setattr(logging.getLogger("cordee.data"), "disabled", True)

    def story(seed: int) -> str:
        rng = random.Random(seed)
        contents = {f"{number}.bin": rng.randbytes(rng.randrange(1, 2_000_000)) for number in range(3)}
        empty(s3)
        data = in_s3(to_s3(s3.behind, contents), tmp_path / str(seed), patience_s=300.0).data
        met = minute_of_503(s3, monkeypatch, data, rng)
        assert met.found == contents, f"seed {seed}: wrong bytes"
        assert met.waited_s > 55, f"seed {seed}: it did not wait"
        data.close()
        return f"{met.refused} requests refused"

    soak.play(story, at_most=200)


def test_damage_on_the_way_and_in_the_store(soak: Soak, s3: Proxy, tmp_path: Path) -> None:
    """A byte of an object is another one, once or for ever: whoever reads it is told at the latest at its end."""
    logging.getLogger("cordee.data").setLevel(logging.CRITICAL)

    def story(seed: int) -> str:
        rng = random.Random(seed)
        contents = {f"{number}.bin": rng.randbytes(rng.randrange(1, 1_500_000)) for number in range(2)}
        empty(s3)
        url, cache = to_s3(s3.behind, contents), tmp_path / str(seed)
        first = in_s3(url, cache)
        assert first.data.open("0.bin").read() == contents["0.bin"]
        first.data.check(settle=True)  # this store's tags are digests
        damage = Damage(first.fetching, rng.randrange(len(contents["1.bin"])), rng.choice([1, 10**9]))
        with pytest.raises(DataDamagedError):
            first.data.open("1.bin").read()
            first.data.check(settle=True)
        again = in_s3(url, cache)
        if damage.left:
            Damage(again.fetching, damage.at, damage.left)
            again.fetching._digests_hold = True  # as another object has shown
            with pytest.raises(DataDamagedError):
                again.data.open("1.bin").read()
                again.data.check(settle=True)
            return "in the store"
        assert again.data.open("1.bin").read() == contents["1.bin"], f"seed {seed}: fetched again, and wrong"
        again.data.check(settle=True)
        return "on the way"

    soak.play(story, at_most=200)


class Damage:
    """A store that gives another byte at a place of `1.bin`, a few times or for ever."""

    def __init__(self, fetching: Fetching, at: int, times: int) -> None:
        self.source, self.at, self.left = fetching.source, at, times
        fetching.source = lambda url: self

    def read(self, pin: Pin, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield what the store gives, and the damage."""
        for data in self.source(pin.url).read(pin, start, stop, piece_bytes):
            if pin.name == "1.bin" and start <= self.at < start + len(data) and self.left:
                self.left -= 1
                data[self.at - start] ^= 1
            start += len(data)
            yield data


def test_agents_that_are_killed_in_a_prefetch(soak: Soak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt reads what is right, and so does a job beside the agent, in the same cache, all the time."""
    cache, folder = tmp_path / "cache", tmp_path / "set"
    monkeypatch.setenv("CORDEE_CACHE", str(cache))
    contents = fault_story.fill(folder, {f"{number}.bin": 4_000_000 for number in range(8)}, 1)
    wanted = hashlib.sha256(b"".join(contents[name] for name in sorted(contents))).hexdigest()
    whole = "import cordee, hashlib\nhere = cordee.data({at!r}, cache={cache!r}, copy=True)\n"
    whole += "print('read', hashlib.sha256(b''.join(here.open(n).read() for n in here)).hexdigest(), flush=True)\n"
    code = (whole + "here.close()").format(at=str(folder), cache=str(cache))
    world = World(tmp_path / "home", nodes=(NodeConfig(name="local", slots=2),))
    epochs = iter(range(1, 10**6))

    def story(seed: int) -> str:
        rng, epoch = random.Random(seed), next(epochs)
        shutil.rmtree(cache / "objects", ignore_errors=True)
        cache.mkdir(exist_ok=True)
        world.until(lambda: world.connected() == {"local"}, "the agent")
        pid = world.until(world.agent_pid)
        beside = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with (cache / "lock").open("w") as lock:  # the prefetch stands at its first object while this is held
            fcntl.flock(lock, fcntl.LOCK_EX)
            world.start(python("print('runs')"), epoch=epoch, data={"sets": [str(folder)], "wait_s": "all"})
            world.until(lambda: _prefetches(folder), "the prefetch")
            if rng.random() < 0.5:
                fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(rng.random() * 0.4)
            os.kill(pid, signal.SIGKILL)
            ended = world.ended(epoch=epoch)
            assert not _prefetches(folder), f"seed {seed}: its prefetch goes on: {ended}"
        assert ended.outcome in (Outcome.LOST, Outcome.FINISHED), f"seed {seed}: {ended}"
        again = next(epochs)
        world.start(python(code), epoch=again, data={"sets": [str(folder)], "wait_s": "all"})
        world.logged(f"read {wanted}", epoch=again)
        assert world.ended(epoch=again).outcome is Outcome.FINISHED
        assert beside.communicate(timeout=60)[0].split() == ["read", wanted], f"seed {seed}: the job beside it"
        return f"{ended.outcome}: {ended.why}"

    try:
        soak.play(story, at_most=200)
    finally:
        world.close()


def _prefetches(folder: Path) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"cordee.storage.cache.prefetch" in words and str(folder).encode() in words:
                return True
    return False
