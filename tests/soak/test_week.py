"""One week of one researcher on one box: real processes, from the first verb to the bill.

Twelve jobs: some without GPUs, a chain, a sweep of three, two preemptions, a rank that dies, a loss that is not a
number, a shell, a drained node, and a reboot in which everything is killed at once.
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
from cordee.demo.costs import leased_gpu_us

WAIT_S = 300.0
SCRIPT = Path(__file__).with_name("week_train.py")


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
        return done.stdout

    def run(self, name: str, *words: str, gpus: int = 1, **flags: str) -> str:
        """Queue a training job; its id."""
        train = [sys.executable, "train.py", "--name", name, "--out", str(self.out)]
        train += [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", value)]
        said = self.cordee(
            *("run", "--name", name, "--gpus", str(gpus), "--checkpoint-to", str(self.folder / "ckpt" / name)),
            *("--yes", *words, "--", *train),
        )
        return said.split()[0]

    def typed(self, *words: str) -> str:
        """Queue a job by its whole command; its id."""
        return self.cordee(*words[:1], "--yes", *words[1:]).split()[0]

    def names(self) -> list[str]:
        """Return the ids of all jobs."""
        with Client(self.home) as client:
            return [each.job_id for each in client.jobs()]

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
    gpus_total, hurry = 2, week.folder / "hurry"

    # Monday: data is prepared without a GPU, what needs it waits, and a twin of `gpt` shows how that ends undisturbed.
    prep = week.typed("run", "--name", "prep", "--gpus", "0", "--", "sh", "-c", f"echo ready > {week.out}/data")
    twin = week.run("twin", "--after", prep, steps="800")
    alarm = week.typed("run", "--name", "alarm", "--gpus", "0", "--after", f"{twin}:failed", "--", "true")
    week.ends(prep)
    week.ends(twin)
    week.ends(alarm, "stopped")
    assert "this one was to start after it" in week.cordee("why", alarm)
    assert (week.out / "data").read_text() == "ready\n"

    # Tuesday: three learning rates, two at a time.
    week.cordee(
        *("run", "--name", "lr", "--gpus", "1", "--sweep", "lr=0.01,0.05,0.2", "--max-running", "2", "--yes"),
        *("--checkpoint-to", str(week.folder / "ckpt" / "lr"), "--"),
        *(sys.executable, "train.py", "--name", "lr{lr}", "--lr", "{lr}", "--steps", "15", "--out", str(week.out)),
    )
    rates = ("0.01", "0.05", "0.2")
    week.until(lambda: all((week.out / f"lr{lr}.0.weights").exists() for lr in rates), "the trials")
    assert "lr" in week.cordee("sweep", "list")

    # Wednesday: production pushes `gpt` aside, twice; the second of the gangs that do so loses a rank, and goes on.
    gpt = week.run("gpt", "--tier", "preemptible", steps="800", slow_until=str(hurry))
    week.at_step("gpt", 6)
    week.ends(week.run("urgent", "--tier", "production", gpus=2, steps="10"))
    week.at_step("gpt", 12)
    crashed = week.ends(week.run("dying", "--tier", "production", gpus=2, steps="12", die=str(week.folder / "died")))
    assert (week.folder / "died").exists() and len(crashed["attempts"]) == 2

    # Thursday: somebody edits the script, to no avail; a look into the job; a batch that spoils the loss is left out.
    (week.project / "train.py").write_text("raise SystemExit('this is not what was submitted')\n")
    assert "on-this-node" in week.cordee("exec", gpt, "--", "sh", "-c", "echo on-this-node $CORDEE_JOB")
    shutil.copy(SCRIPT, week.project / "train.py")
    spoilt = week.ends(week.run("spoilt", steps="24", on_spike="rollback", nan_at=_sample(week.diary("twin"), 16)))
    assert "nan" in week.cordee("logs", spoilt["job_id"]).lower()
    assert all(float.fromhex(each) == float.fromhex(each) for each in week.weights("spoilt").split())

    # Friday: the node is drained for its disk, in a shell nobody had ended; then the machine goes dark.
    assert "shell-says-hello" in _typed(week, "shell", "--gpus", "1", lines=("echo shell-says-'hello'", "exit"))
    week.cordee("nodes", "drain", "local", "--why", "its disk is noisy")
    week.until(lambda: week.job(gpt)["state"] != "running", "the drain")
    week.cordee("nodes", "uncordon", "local")
    week.at_step("gpt", int(week.diary("gpt")[-1].split()[0]) + 2)
    for process in _of(week.folder):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    week.cordee("up", "--slots", str(gpus_total), "--price-as", "H100")
    hurry.touch()
    tidy = week.typed("run", "--name", "tidy", "--gpus", "0", "--after", gpt, "--", "true")
    preempted = week.ends(gpt)
    assert len(preempted["attempts"]) >= 4, "two preemptions, a drain, and a reboot"

    week.ends(tidy)

    # The week is over: no step was lost, and every microsecond is on the bill.
    assert week.weights("gpt") == week.weights("twin")
    assert {int(line.split()[0]) for line in week.diary("gpt")} == set(range(800))
    assert dict(line.split(" ", 1) for line in week.diary("gpt")) == dict(
        line.split(" ", 1) for line in week.diary("twin")
    )
    bill = json.loads(week.cordee("cost", "--json"))
    for unit in ("gpu_us", "micro_usd"):
        parts = {name: sum(row[unit][name] for row in bill["rows"]) for name in bill[unit]}
        assert parts == bill[unit]
    assert len(week.names()) >= 12, week.names()
    with Client(week.home) as client:
        log = [event for _, event in client.events()]
    held_us = bill["gpu_us"].pop("held")
    assert held_us == sum(bill["gpu_us"].values()) == leased_gpu_us(log)
    week.cordee("down", "--yes")
    week.cordee("admin", "check")


def _sample(diary: list[str], step: int) -> str:
    """Return a sample that this step trained on."""
    return next(line.split()[1] for line in diary if int(line.split()[0]) == step)
