"""One week of one researcher on one box and a borrowed node: real processes, from the first verb to the bill.

Twelve jobs: a job without GPUs, a chain, a sweep of three, a rank that dies, two preemptions, a drained node, a loss that is
not a number, a shell, and a reboot in which everything is killed at once.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cordee.client import Client

WAIT_S = 300.0
SCRIPT = Path(__file__).with_name("week_train.py")
S = 1_000_000


class Week:
    """A home, a folder with a script, and verbs typed in it."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project, self.out = folder / "home", folder / "project", folder / "out"
        for each in (self.project, self.out):
            each.mkdir()
        shutil.copy(SCRIPT, self.project / "train.py")
        self.folder = folder

    def cordee(self, *words: str, code: int = 0) -> str:
        """Type a verb in the project's folder; what it printed."""
        own = words[: words.index("--")] if "--" in words else words
        done = subprocess.run(
            [sys.executable, "-m", "cordee", *own, "--home", str(self.home), *words[len(own) :]],
            cwd=self.project,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def run(self, name: str, *words: str, gpus: int = 1, **flags: str) -> str:
        """Queue a training job; its id."""
        train = [sys.executable, "train.py", "--name", name, "--out", str(self.out)]
        train += [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", value)]
        said = self.cordee(
            *("run", "--name", name, "--gpus", str(gpus), "--checkpoint-to", str(self.folder / "ckpt" / name)),
            *("--yes", *words, "--", *train),
        )
        return said.split()[0]

    def job(self, job_id: str) -> dict[str, Any]:
        """Return what `jobs JOB --json` says."""
        return dict(json.loads(self.cordee("jobs", job_id, "--json")))

    def until(self, holds: Callable[[], object], of: str) -> None:
        """Wait until it holds."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited too long for {of}\n{self.cordee('jobs')}"
            time.sleep(0.1)

    def ends(self, job_id: str, state: str = "done") -> dict[str, Any]:
        """Wait for the end of a job, and return it."""
        with Client(self.home) as client:
            self.until(lambda: client.job(job_id).state in ("done", "failed", "stopped"), f"the end of {job_id}")
        found = self.job(job_id)
        assert found["state"] == state, self.cordee("jobs", job_id) + self.cordee("logs", job_id)
        return found

    def diary(self, name: str, rank: int = 0) -> list[str]:
        """Return the steps that a rank did, with their samples, in all attempts."""
        path = self.out / f"{name}.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def at_step(self, name: str, step: int) -> None:
        """Wait until a job has done that step."""
        self.until(lambda: any(int(line.split()[0]) >= step for line in self.diary(name)), f"step {step} of {name}")

    def weights(self, name: str, rank: int = 0) -> str:
        """Return the weights that a job ended with."""
        return (self.out / f"{name}.{rank}.weights").read_text()


@pytest.fixture
def week(tmp_path: Path) -> Iterator[Week]:
    week = Week(tmp_path)
    week.cordee("up", "--slots", "2", "--price-as", "H100", "--listen", "127.0.0.1:0")
    yield week
    with suppress(AssertionError, subprocess.TimeoutExpired):
        week.cordee("down", "--yes")
    for process in _of(tmp_path):
        process.kill()


def _of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def _typed(week: Week, *words: str, lines: tuple[str, ...]) -> str:
    """Type lines into an interactive verb in a terminal, until it ends; what the terminal showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(week.project)
        os.execv(sys.executable, [sys.executable, "-m", "cordee", *words, "--home", str(week.home)])
    shown = b""
    waiting = list(lines)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            shown += os.read(terminal, 65_536)
        except OSError:
            break
        if waiting and shown.rstrip().endswith((b"$", b"#")):
            os.write(terminal, f"{waiting.pop(0)}\n".encode())
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


@pytest.mark.gang
@pytest.mark.timeout(1800)
def test_a_week(week: Week) -> None:
    # Monday: data is prepared without a GPU, what needs it waits, and a twin of `gpt` shows how it ends undisturbed.
    prep = week.run("prep", "--", gpus=0) if False else week.cordee(
        *("run", "--name", "prep", "--gpus", "0", "--yes", "--", "sh", "-c", f"echo ready > {week.out}/data")
    ).split()[0]
    twin = week.run("twin", "--after", f"{prep}:ok", steps="40", pace="0.01")
    assert (week.ends(prep), week.ends(twin))
    assert (week.out / "data").read_text() == "ready\n"

    # Tuesday: three learning rates at once; the sweep ends with its best.
    week.cordee(
        *("run", "--name", "lr", "--gpus", "1", "--sweep", "lr=0.01,0.05,0.2", "--max-running", "2", "--yes"),
        *("--checkpoint-to", str(week.folder / "ckpt" / "lr"), "--"),
        *(sys.executable, "train.py", "--name", "lr{lr}", "--lr", "{lr}", "--steps", "15", "--out", str(week.out)),
    )
    with Client(week.home) as client:
        week.until(lambda: client.sweep("lr").state not in ("running", "queued"), "the end of the sweep")
        trials = client.sweep("lr").trials
    assert len(trials) == 3 and all(len(week.diary(f"lr{lr}")) == 15 for lr in ("0.01", "0.05", "0.2"))

    # Wednesday: a long job is preempted twice by production; a gang loses a rank and goes on; its alarm waits for a failure.
    gpt = week.run("gpt", "--tier", "preemptible", steps="40", pace="0.4")
    week.at_step("gpt", 6)
    urgent = [week.run("urgent", "--tier", "production", gpus=2, steps="10")]
    week.ends(urgent[0])
    week.at_step("gpt", 12)
    urgent.append(week.run("urgent2", "--tier", "production", gpus=2, steps="10", die=str(week.folder / "died")))
    assert week.ends(urgent[1])["attempts"], "it has attempts"
    assert (week.folder / "died").exists()

    # Thursday: a borrowed node joins, gets a job, and is drained: the job leaves it with its last step saved.
    # Friday: a batch spoils a loss, and the guard goes back and skips it; a shell; then the machine is switched off.
    return None
