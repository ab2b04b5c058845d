"""A home with its server, and jobs of the gang script on it, for the fault tests of real torch ranks."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.events import CheckpointCommitted, JobEnded
from cordee.ids import JobId
from cordee.ids import job_id as new_id

SCRIPT = Path(__file__).with_name("gang_script.py")
# Drawn: two runs at once must not end each other's processes.
ALONE, GANG = new_id("alone", os.urandom(6)), new_id("gang", os.urandom(6))
RANKS, STEPS = 2, 20
WAIT_S = 90


class Scene:
    """A home with its server, and two jobs of the same script."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.home, self.steps = folder, folder / "home", steps
        self.server = start_server(self.home, slots=str(RANKS)).pid

    def submit(self, job_id: JobId, allowed: int) -> None:
        self.out(job_id).mkdir()
        self.allow(job_id, allowed)
        run = [sys.executable, str(SCRIPT), str(self.out(job_id)), str(self.steps)]
        spec: dict[str, Any] = {"run": run, "gpus": RANKS, "tier": "preemptible"}
        spec |= {"cwd": str(self.folder), "checkpoint": {"to": str(self.folder / "checkpoints")}}
        # torch asks the name server about each of its peers; a slow one would stall the test.
        spec |= {"env": {"RES_OPTIONS": "timeout:1 attempts:1"}, "name": job_id.partition("-")[0]}
        with Client(self.home) as client:
            client.submit(spec, job_id=job_id)

    def out(self, job_id: JobId) -> Path:
        return self.folder / job_id

    def allow(self, job_id: JobId, step: int) -> None:
        new = self.out(job_id) / "allowed.new"
        new.write_text(str(step))
        new.replace(self.out(job_id) / "allowed")

    def diary(self, job_id: JobId, rank: int) -> list[dict[str, Any]]:
        path = self.out(job_id) / f"diary{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, epoch: int) -> list[int]:
        """Of the ranks of an attempt."""
        lines = [line for rank in range(RANKS) for line in self.diary(GANG, rank)]
        return [line["pid"] for line in lines if line.get("start") == epoch]

    def uploader(self, epoch: int, rank: int) -> psutil.Process:
        children = psutil.Process(self.pids(epoch)[rank]).children()
        return next(each for each in children if "cordee.train.checkpoint.uploader" in each.cmdline())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain\n{self.told()}"
            time.sleep(0.05)

    def events(self, kind: type, job_id: JobId = GANG) -> list[Any]:
        with Client(self.home) as client:
            found = [event for _, event in client.events()]
        return [event for event in found if isinstance(event, kind) and getattr(event, "job_id", job_id) == job_id]

    def until_step(self, epoch: int, step: int) -> None:
        line = {"epoch": epoch, "step": step}
        self.until(lambda: all(line in self.diary(GANG, rank) for rank in range(RANKS)))

    def until_committed(self, step: int) -> None:
        self.until(lambda: any(event.step == step for event in self.events(CheckpointCommitted)))

    def parts(self, rank: int) -> set[Path]:
        """What this rank's uploaders have written for the committer; retention clears old ones away."""
        return set((self.folder / "checkpoints" / GANG).glob(f"parts/*/*.rank-{rank:06d}"))

    def ended(self, job_id: JobId) -> bool:
        return bool(self.events(JobEnded, job_id))

    def told(self) -> str:
        files = [*self.home.rglob("agent.log"), *self.home.rglob("rank*.log")]
        diaries = [f"{rank}: {self.diary(GANG, rank)}" for rank in range(RANKS)]
        return "\n".join([*diaries, *(f"--- {path}\n{path.read_text()}" for path in files)])

    def down(self) -> None:
        with Client(self.home) as client:
            client.down()
        os.waitpid(self.server, 0)
        self.until(lambda: not processes_of(self.folder))


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything that a scene starts names its folder, or carries it in its environment."""
    found = []
    for each in psutil.process_iter(["cmdline", "environ"]):
        words = [*(each.info["cmdline"] or ()), (each.info["environ"] or {}).get("CORDEE_SPOOL", "")]
        if any(str(folder) in word for word in words):
            found.append(each)
    return found
