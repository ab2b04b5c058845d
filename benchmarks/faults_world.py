"""Attempts of a tiny training job for `faults.py`: ranks forked from one warm process, and the diary they keep.

A rank notes each step that it begins with a digest of its whole state, so what an attempt loads can be compared with
what was there. Faults are closures that run inside a rank, or whatever the scene does to processes and files.
"""

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

STEP_S = 0.02
WAIT_S = 60.0


class NotRun(Exception):
    """This product has no such thing, or what it needs is not here; the reason."""


@dataclass
class Context:
    """What one rank of one attempt is told."""

    folder: Path
    to: str
    rank: int
    world: int
    attempt: int
    steps: int
    every: int = 5
    keep: int = 3
    grace: str = "20s"
    options: dict[str, Any] = field(default_factory=dict)
    in_step: Callable[["Context", int], None] | None = None
    in_save: Callable[["Context", int], None] | None = None

    def begin(self, step: int, digest: str) -> None:
        """A step begins; the fault of this scene may happen in it."""
        line = {"attempt": self.attempt, "rank": self.rank, "step": step, "digest": digest}
        with (self.folder / "diary").open("a", buffering=1) as diary:
            diary.write(json.dumps(line) + "\n")
        if self.in_step is not None:
            self.in_step(self, step)
        time.sleep(STEP_S)

    def saving(self, step: int) -> None:
        """A save begins."""
        if self.in_save is not None:
            self.in_save(self, step)

    def die(self, *, with_uploader: bool = True) -> None:
        """SIGKILL, as the host's loss would be (with its uploader), or as the kernel does it when memory is short."""
        if with_uploader:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in(self, seconds: float, *, with_uploader: bool = True) -> None:
        """The same, while this thread goes on."""
        timer = threading.Timer(seconds, lambda: self.die(with_uploader=with_uploader))
        timer.daemon = True
        timer.start()


Product = Callable[[Context], None]


class Gang:
    """The ranks of one attempt."""

    def __init__(self, product: Product, contexts: list[Context], env: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(contexts))}
        self.folder = contexts[0].folder
        self.pids = [self._fork(product, each, {**common, **env}) for each in contexts]
        self.codes: list[int | None] = [None] * len(contexts)
        self.here = set(self.pids)  # not reaped yet: only their numbers are theirs for certain

    def _fork(self, product: Product, context: Context, env: dict[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            log = os.open(self.folder / f"log.{context.attempt}.{context.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {**env, "RANK": str(context.rank), "LOCAL_RANK": str(context.rank)}
            product(context)
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, timeout_s: float = WAIT_S) -> list[int | None]:
        """Exit codes (a signal's is negative); None of a rank that still runs then, and is killed."""
        deadline_s = time.monotonic() + timeout_s
        for rank, pid in enumerate(self.pids):
            if pid in self.here:
                self.code_of(rank, deadline_s - time.monotonic())
        for pid in sorted(self.here):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.here.clear()
        return self.codes

    def code_of(self, rank: int, timeout_s: float) -> int | None:
        """The exit code of one rank, or None if it still runs then."""
        self.codes[rank] = _reap(self.pids[rank], timeout_s)
        if self.codes[rank] is not None:
            self.here.discard(self.pids[rank])
        return self.codes[rank]

    def kill(self) -> None:
        """All ranks with their uploaders, at once: the hosts are lost."""
        for pid in self.here:
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.kill(pid, signal.SIGKILL)

    def uploaders(self) -> list[psutil.Process]:
        """The uploaders of these ranks."""
        found = []
        for pid in self.here:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(pid).children(recursive=True)
                found += [each for each in children if "cordee.train.checkpoint.uploader" in " ".join(each.cmdline())]
        return found


def _reap(pid: int, timeout_s: float) -> int | None:
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], max(0.0, timeout_s))[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)


@dataclass
class Outcome:
    """Of one run of one scene. `lost`: steps done twice; `wrong`: something was loaded that had never been saved so."""

    survived: bool
    lost: int | None
    wrong: bool
    note: str = ""


class Run:
    """One run of a scene: a folder, a seed, and the attempts one after the other."""

    def __init__(self, product: Product, name: str, folder: Path, seed: int, world: int) -> None:
        self.product, self.name, self.folder, self.world = product, name, folder, world
        self.rng = random.Random(seed)
        self.to = str(folder / "to")
        self.first_save = Context.every + 1
        self.attempts = 0
        self.gangs: list[Gang] = []

    def start(self, steps: int, *, world: int | None = None, env: dict[str, str] | None = None, **told: Any) -> Gang:
        """One more attempt."""
        self.attempts += 1
        world = world or self.world
        ranks = [
            Context(self.folder, told.get("to", self.to), rank, world, self.attempts, steps) for rank in range(world)
        ]
        for each in ranks:
            for key, value in told.items():
                setattr(each, key, value)
        self.gangs.append(Gang(self.product, ranks, env or {}))
        return self.gangs[-1]

    def finish(self, steps: int, **told: Any) -> list[int | None]:
        """One more attempt, until it ends."""
        return self.start(steps, **told).wait()

    def diary(self, attempt: int | None = None, rank: int = 0) -> list[dict[str, Any]]:
        """What this rank noted."""
        path = self.folder / "diary"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [each for each in lines if each["rank"] == rank and attempt in (None, each["attempt"])]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait; a scene that waits in vain is an error of the scene."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited for {what}\n{self.logs()}")
            time.sleep(0.002)

    def until_step(self, step: int, attempt: int | None = None) -> None:
        """Until the newest attempt has begun this step on every rank."""
        at = attempt or self.attempts
        ranks = range(self.world)
        self.until(
            lambda: all(any(each["step"] >= step for each in self.diary(at, rank)) for rank in ranks), f"step {step}"
        )

    def files(self, *suffixes: str) -> list[Path]:
        """Files of data below the destination, the newest checkpoint's last."""
        found = [path for path in Path(self.to).rglob("*") if path.is_file() and path.name.endswith(suffixes or "")]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, str(path)))

    def verdict(self, codes: list[int | None], *, lost_max: float = float("inf"), note: str = "") -> Outcome:
        """Of the last attempt, whose exit codes these are, beside all those before it."""
        records = self.diary(self.attempts)
        before = [each for each in self.diary() if each["attempt"] < self.attempts]
        if not records:
            return Outcome(False, None, False, note or f"did not start again: {self.last_words()}")
        first = records[0]
        known = {each["digest"] for each in before if each["step"] == first["step"]}
        wrong = bool(known) and first["digest"] not in known
        begun = max((each["step"] for each in before), default=0)
        lost = max(0, begun - first["step"])
        if self.name != "cordee" and first["step"] == 0 and begun > self.first_save:
            return Outcome(False, lost, wrong, "started again from nothing, without a word")
        survived = all(code == 0 for code in codes) and not wrong and lost <= lost_max
        if not survived and not note:
            note = f"exit codes {codes}, {lost} steps lost: {self.last_words()}"
        return Outcome(survived, lost, wrong, note)

    def last_words(self) -> str:
        """The last line that rank 0 of the last attempt said."""
        words = [line for rank in range(self.world) for line in self._log(self.attempts, rank) if line.strip()]
        return words[-1][:300] if words else "it said nothing"

    def _log(self, attempt: int, rank: int) -> list[str]:
        path = self.folder / f"log.{attempt}.{rank}"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def logs(self) -> str:
        """All that the ranks said."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in self.folder.glob("log.*"))

    def end(self) -> None:
        """Nothing of this run goes on."""
        for gang in self.gangs:
            gang.kill()
            gang.wait(5)
        for each in psutil.process_iter(["cmdline", "environ", "ppid"]):
            orphan = each.info["ppid"] == 1 and "cordee.train.checkpoint.uploader" in " ".join(
                each.info["cmdline"] or ()
            )
            if orphan and (each.info["environ"] or {}).get("FAULTS_FOLDER") == str(self.folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def digest_of(tensors: list[Any]) -> str:
    """Of whole tensors; those that are sharded are brought together, which all ranks have to do."""
    found = hashlib.blake2b(digest_size=12)
    for each in tensors:
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        found.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
