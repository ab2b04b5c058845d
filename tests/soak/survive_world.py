"""One job of a few real ranks, started again and again on 4, 2 or 3 of them, and what can befall it.

The supervisor does here what an agent would: it gives epochs and spools, and ends what is left of a gang that one rank
has failed. What it saw of each attempt becomes, with the ranks' own records, the log from which the ledger is made.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gang_scene import processes_of
from soaking import Soak
from survive_job import EVERY, HOLD, STEPS_PER_S

from cordee.account.ledger import Ledger
from cordee.event_json import decode
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobSubmitted,
    Lease,
    Node,
    NodeUp,
    Outcome,
    RanksEnded,
)
from cordee.ids import JobId
from cordee.storage.destination import open_blobs
from cordee.storage.generations import check_generation, commit_of
from cordee.storage.log import live_commits, read_entries

JOB = JobId("survive-aaaaaa")
SLOTS = 4
WORLDS = (4, 4, 2, 3)  # drawn from
PAUSE_S = (0.0, 16.0)  # between two faults
EARLY = 0.2  # the part of the attempts that something may befall before their first step
BARREN = 1  # so many attempts without a new step are let pass before one is left alone until it runs
LEFTOVERS_S = 15.0  # ranks of a gang that one has failed end by themselves, or are ended
STILL_S = 120.0  # nothing that befalls the job may hold it up for longer
UPLOADERS_S = 150.0


@dataclass
class Attempt:
    """What the supervisor saw of one."""

    epoch: int
    world: int
    placed_us: int
    whole: tuple[int, int]  # before it: the steps of the newest generation, and of the newest that verifies
    ended_us: int = 0
    codes: dict[int, int] = field(default_factory=dict)
    rows: list[list[list[Any]]] = field(default_factory=list)  # of each rank
    noticed: bool = False
    uploaders_killed: int = 0
    full_s: float = 0.0  # with a disk that had no room

    @property
    def begun(self) -> int | None:
        return min((rows[0][0] for rows in self.rows if rows), default=None)

    @property
    def reached(self) -> int | None:
        """The first step that none of its ranks has done."""
        return max((rows[-1][0] + 1 for rows in self.rows if rows), default=None)

    @property
    def failed(self) -> bool:
        """Whether it ended though nothing befell it."""
        return self.full_s == 0 and self.outcome is Outcome.FAILED

    @property
    def outcome(self) -> Outcome:
        codes = set(self.codes.values())
        if codes == {0}:
            return Outcome.FINISHED
        if codes == {75}:
            return Outcome.CHECKPOINTED
        return Outcome.LOST if min(codes) < 0 else Outcome.KILLED if self.noticed else Outcome.FAILED


class World:
    """The job, its disk, and what befalls it until the time is up."""

    def __init__(self, folder: Path, disk: Path, steps: int, soak: Soak, seed: int, *, small: bool) -> None:
        self.folder, self.to, self.steps, self.soak = folder, disk / "to", steps, soak
        self.draw = random.Random(seed)
        self.faults = dict.fromkeys(("rank", "ranks", "uploader", "notice", "usr1", "resize", "freeze", "flip"), 0)
        self.faults |= {"full": 0} if small else {}
        self.attempts: list[Attempt] = []
        self.pids: list[int] = []
        self._filler, self._full_until_s, self._looked_s = disk / "filler", 0.0, 0.0
        self._next_s, self._barren, self._world = 0.0, 0, SLOTS
        self._begun = self._early = False
        env = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
        env |= {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        rank = [sys.executable, str(Path(__file__).with_name("survive_rank.py")), str(folder)]
        self._forker = subprocess.Popen(rank, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    # -- attempts ------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Attempts, until one comes to the end."""
        began_s = self.soak.elapsed_s
        self.over = lambda: self.soak.elapsed_s - began_s >= self.soak.seconds
        while not self.attempts or self.attempts[-1].outcome is not Outcome.FINISHED:
            self._attempt()

    def uninterrupted(self) -> tuple[list[list[Any]], list[list[float]]]:
        """The rows and the last weights of the same job on one rank that nothing befalls."""
        (self.folder / "fast").touch()
        codes: dict[int, int] = {}
        self._order({}, 1, "alone")
        while not codes:
            self._hear(codes, 1.0)
        assert codes == {0: 0}, (self.folder / "alone.0.log").read_text()[-4000:]
        return self._rows("alone", 0), json.loads((self.folder / "alone.weights").read_text())

    def weights(self) -> list[list[float]]:
        found: list[list[float]] = json.loads((self.folder / f"{self.attempts[-1].epoch}.weights").read_text())
        return found

    def _attempt(self) -> None:
        attempt = Attempt(len(self.attempts) + 1, self._world, time.time_ns() // 1000, self.newest())
        self.attempts.append(attempt)
        env = {"CORDEE_JOB": JOB, "CORDEE_EPOCH": str(attempt.epoch), "CORDEE_SIGNALS": "USR1", "CORDEE_GRACE_S": "10"}
        env |= {"CORDEE_SPOOL": str(self.folder / f"spool{attempt.epoch}"), "CORDEE_CHECKPOINT_TO": str(self.to)}
        self._order(env, attempt.world, str(attempt.epoch))
        self._begun, self._early = False, self._barren <= BARREN and self.draw.random() < EARLY
        self._world = self.draw.choice(WORLDS)
        failed_s: float | None = None
        while len(attempt.codes) < attempt.world:
            self._hear(attempt.codes, 0.05)
            self._look_at_disk(attempt)
            assert self._still_s(attempt) < STILL_S, f"nothing goes on\n{self.told()}"
            if failed_s is None and any(code not in (0, 75) for code in attempt.codes.values()):
                failed_s = self.soak.elapsed_s
            if failed_s is not None and self.soak.elapsed_s - failed_s > LEFTOVERS_S:
                self._kill(range(attempt.world))
            if not self.over():
                self._befall(attempt)
            else:
                (self.folder / "fast").touch()
        attempt.rows = [self._rows(str(attempt.epoch), rank) for rank in range(attempt.world)]
        # Else the next one begins while uploaders still work on captures: it has to wait for them, or fence them.
        if self.draw.random() < 0.75:
            deadline_s = self.soak.elapsed_s + UPLOADERS_S
            while self.uploaders():
                self._look_at_disk(attempt)
                assert self.soak.elapsed_s < deadline_s, f"uploaders do not end\n{self.told()}"
                if not self.over():
                    self._befall(attempt)
                time.sleep(0.1)
        attempt.ended_us = time.time_ns() // 1000
        earlier = max((each.reached or 0 for each in self.attempts[:-1]), default=0)
        self._barren = 0 if (attempt.reached or 0) > earlier else self._barren + 1
        said = f"attempt {attempt.epoch} on {attempt.world} ranks: steps {attempt.begun} to {attempt.reached}"
        self.soak.say(f"{said}, {attempt.outcome} {sorted(attempt.codes.values())}")

    def _order(self, env: dict[str, str], world: int, name: str) -> None:
        assert self._forker.stdin is not None and self._forker.stdout is not None
        order = {"env": env, "world": world, "out": str(self.folder / name), "steps": self.steps}
        self._forker.stdin.write(json.dumps(order).encode() + b"\n")
        self.pids = json.loads(self._forker.stdout.readline())["pids"]

    def _hear(self, codes: dict[int, int], wait_s: float) -> None:
        assert self._forker.stdout is not None
        if select.select([self._forker.stdout], [], [], wait_s)[0]:
            said = json.loads(self._forker.stdout.readline())
            codes[said["rank"]] = said["code"]

    def _rows(self, name: str, rank: int) -> list[list[Any]]:
        path = self.folder / f"{name}.{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _still_s(self, attempt: Attempt) -> float:
        last_s = attempt.placed_us / 1e6
        for path in self.folder.glob(f"{attempt.epoch}.*.jsonl"):
            last_s = max(last_s, path.stat().st_mtime)
        return time.time() - last_s

    def newest(self) -> tuple[int, int]:
        """The steps of the newest generation and of the newest one that verifies."""
        blobs = open_blobs(str(self.to))
        commits = [commit_of(entry) for entry in live_commits(read_entries(blobs))]
        whole = (commit.step for commit in reversed(commits) if check_generation(blobs, commit.manifest) is None)
        return (commits[-1].step if commits else 0), next(whole, 0)

    def uploaded_s_max(self) -> float:
        """Of all commits, from the capture until it was durable."""
        records = [entry.record for entry in read_entries(open_blobs(str(self.to)))]
        return max(each.fields["uploaded_us"] for each in records if each and each.kind == "commit") / 1e6

    def uploaders(self) -> list[psutil.Process]:
        found = []
        for each in processes_of(self.folder):
            with suppress(psutil.NoSuchProcess):
                if "cordee.train.checkpoint.uploader" in each.cmdline():
                    found.append(each)
        return sorted(found, key=lambda each: each.pid)

    def told(self) -> str:
        logs = sorted(self.folder.glob(f"{len(self.attempts)}.*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs)

    def close(self) -> None:
        self._forker.kill()
        with self._forker:  # closes its pipes
            pass
        for each in processes_of(self.folder):
            if each.pid != os.getpid():
                each.kill()

    # -- faults --------------------------------------------------------------------------------------------

    def _befall(self, attempt: Attempt) -> None:
        """Perhaps something, now."""
        if not self._begun and self._rows(str(attempt.epoch), 0):
            self._begun = True
            self._next_s = max(self._next_s, self.soak.elapsed_s + self.draw.uniform(*PAUSE_S) / 2)
        if self.soak.elapsed_s < self._next_s or not (self._begun or self._early):
            return
        what = self.draw.choice(list(self.faults))
        if getattr(self, f"_{what}")(attempt):
            self.faults[what] += 1
            self.soak.say(f"  {what}")
            # Often two in a row, the second while the first is still being dealt with.
            pause_s = self.draw.choice([self.draw.uniform(0, 1), self.draw.uniform(*PAUSE_S)])
            self._next_s = self.soak.elapsed_s + pause_s

    def _kill(self, ranks: Any, how: int = signal.SIGKILL) -> bool:
        able = [rank for rank in ranks if rank not in self.attempts[-1].codes]
        for rank in able:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], how)
        return bool(able)

    def _rank(self, attempt: Attempt) -> bool:
        return self._kill([self.draw.randrange(attempt.world)])

    def _ranks(self, attempt: Attempt) -> bool:
        return self._kill(range(attempt.world))

    def _uploader(self, attempt: Attempt) -> bool:
        uploaders = self.uploaders()
        if uploaders:
            uploader = self.draw.choice(uploaders)
            with suppress(psutil.NoSuchProcess):  # it may be one that still brings what an earlier attempt held
                self.attempts[int(uploader.environ()["CORDEE_EPOCH"]) - 1].uploaders_killed += 1
                uploader.kill()
        return bool(uploaders)

    def _notice(self, attempt: Attempt, how: int = signal.SIGTERM) -> bool:
        attempt.noticed = True
        return self._kill(self.draw.choice([range(attempt.world), [self.draw.randrange(attempt.world)]]), how)

    def _usr1(self, attempt: Attempt) -> bool:
        return self._notice(attempt, signal.SIGUSR1)

    def _resize(self, attempt: Attempt) -> bool:
        """All leave for another number of ranks."""
        self._world = self.draw.choice([world for world in set(WORLDS) if world != attempt.world])
        return self._notice(attempt)

    def _freeze(self, attempt: Attempt) -> bool:
        """A rank that stands still for a while and is then killed; at times it was told to leave meanwhile."""
        rank = [self.draw.randrange(attempt.world)]
        frozen = self._kill(rank, signal.SIGSTOP)
        if frozen and self.draw.random() < 0.3:
            attempt.noticed = True
            self._kill(range(attempt.world), signal.SIGTERM)
        time.sleep(self.draw.uniform(0.5, 4))
        return self._kill(rank) and frozen

    def _flip(self, attempt: Attempt) -> bool:
        """A bit of the newest generation, of several that are whole: `keep` says how many may go bad."""
        blobs = open_blobs(str(self.to))
        live = live_commits(read_entries(blobs))
        whole = [each for each in live if check_generation(blobs, commit_of(each).manifest) is None]
        # Not before the attempt has read the log: the supervisor has said what it has to find there.
        if not self._begun or len(whole) < 3 or whole[-1] is not live[-1]:
            return False
        record = live[-1].record
        assert record is not None
        files = sorted((self.to / "chunks").glob(f"*/*.{record.fields['save']}.{record.epoch}"))
        if not files:
            return False
        with self.draw.choice(files).open("r+b") as file:
            data = file.read()
            at = self.draw.randrange(len(data))
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << self.draw.randrange(8)]))
        return True

    def _full(self, attempt: Attempt) -> bool:
        """No room on the disk, or hardly any, for a while."""
        if self._full_until_s:
            return False
        stat = os.statvfs(self._filler.parent)
        room = self.draw.choice([0, self.draw.randrange(60_000)])
        with self._filler.open("wb") as file, suppress(OSError):  # ranks write too, and may take the last page first
            os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - room))
        self._full_until_s = self.soak.elapsed_s + self.draw.uniform(1, 8)
        return True

    def _look_at_disk(self, attempt: Attempt) -> None:
        looked_s, self._looked_s = self._looked_s, self.soak.elapsed_s
        if self._full_until_s:
            attempt.full_s += self._looked_s - looked_s
        if self._full_until_s and (self.soak.elapsed_s >= self._full_until_s or self.over()):
            self._filler.unlink()
            self._full_until_s = 0.0

    # -- accounts ------------------------------------------------------------------------------------------

    def lost_max(self, attempt: Attempt) -> float:
        """Steps that may be done twice after an attempt that left without a checkpoint, by what else befell it."""
        interval = (
            EVERY if attempt.uploaders_killed or attempt.full_s else HOLD
        )  # what is held needs its uploader, and room
        late = interval + 1 + STEPS_PER_S * self.uploaded_s_max()  # a step more, and what one upload takes
        return late * (1 + attempt.uploaders_killed + (attempt.full_s > 0)) + STEPS_PER_S * attempt.full_s

    def ledger(self) -> Ledger:
        """Of the whole job: what the supervisor saw, and what the ranks and uploaders told in their spools."""
        ledger, first_us = Ledger(), self.attempts[0].placed_us
        ledger.apply(NodeUp(at_us=first_us, node=Node(name="here", epoch=1, gpu_name="slot", gpus=SLOTS)))
        job = Job(job_id=JOB, name="survive", owner="soak", gpus=SLOTS, sizes=(3, 2))
        ledger.apply(JobSubmitted(at_us=first_us, job=job, spec="{}"))
        for each in self.attempts:
            told = {"job_id": JOB, "epoch": each.epoch}
            leases = (Lease(node="here", gpus=tuple(range(each.world))),)
            ledger.apply(AttemptPlaced(at_us=each.placed_us, leases=leases, **told))
            for event in sorted(self._spooled(each.epoch), key=lambda event: event.at_us):
                ledger.apply(event)
            ledger.apply(RanksEnded(at_us=each.ended_us, node="here", outcome=each.outcome, **told))
            ledger.apply(AttemptEnded(at_us=each.ended_us, outcome=each.outcome, why="", **told))
        return ledger

    def _spooled(self, epoch: int) -> list[Event]:
        paths = (self.folder / f"spool{epoch}").glob("rank*.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [decode(json.loads(line)["event"]) for line in lines]
