"""The dataset cache: stories of faults from new seeds, and jobs of which readers and fetchers are killed."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fault_story
from soaking import Soak

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
