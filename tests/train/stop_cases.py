"""Notices at bad moments, on real ranks: `stop_cases.py NAME...` runs cases, `stop_cases.py --seed 7` a random one.

torch is imported once; each case forks its ranks. A rank trains a counter, and at STEP something happens that a notice
has to cope with: the case's phase. Prints one line of JSON for each case.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from cordee.event_json import decode
from cordee.events import RankLeft
from cordee.storage.destination import open_blobs
from cordee.storage.log import read_entries
from cordee.telemetry.host import free_port
from cordee.telemetry.notices import Notice, write_notice
from cordee.train.entry import job
from cordee.train.job import Job
from metadata_service import MetadataService

STEP = 15  # where the phase begins
SLOW_UPLOAD_S = 12.0
LIMIT_S = 120.0
DEAD = 9


@dataclass(frozen=True)
class Case:
    """What happens, and who is told how.

    Attributes:
        phase: see `Rank.at_step`.
        odd: the rank that does not come to the collective.
        notices: (rank, kind); the cloud and the agent tell a machine, not a rank.
        grace_s: of a signal.
    """

    phase: str
    world: int = 2
    every: int = 10
    grace_s: float = 3.0
    odd: int = 1
    notices: tuple[tuple[int, str], ...] = ((0, "TERM"),)


CASES = {
    # Nothing special: every step that was run is saved. A second notice changes nothing.
    "step": Case("step", grace_s=60.0, notices=((1, "TERM"), (0, "USR1"))),
    # One rank never comes to a collective; SIGTERM comes twice. What was captured before is what is left.
    "collective": Case("collective", notices=((0, "TERM"), (0, "TERM"))),
    # As before, and what was captured last is only held in memory: the uploaders bring it.
    "held": Case("held", grace_s=5.0),
    # An evaluation that asks between its batches, and one that does not.
    "points": Case("points", grace_s=60.0),
    "eval": Case("eval", world=1),
    # Before the first step nothing can be lost.
    "warmup": Case("warmup", world=1),
    # A store has become slow, and the capture before is still on its way: no other one is begun.
    "finish": Case("finish", grace_s=20.0, notices=((1, "TERM"),)),
    # The store that lasts is too slow for the time there is, and the machine stays: the near one has to do.
    "near": Case("near", grace_s=20.0),
    # A rank dies while the gang leaves: the other does not fail of it.
    "dies": Case("dies", grace_s=60.0),
    # The agent says that there is less time than the signal's grace.
    "agent": Case("eval", world=1, grace_s=600.0, notices=((0, "TERM"), (0, "agent"))),
    # The cloud gives a hint, then a notice; one rank of the node asks.
    "cloud": Case("step", every=1_000_000, grace_s=600.0, notices=((0, "hint"), (0, "cloud"))),
}


class Rank:
    """One rank's script, in a forked process."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case, self.rank, self.folder = case, rank, folder
        self.state: dict[str, Any] = {"count": torch.zeros(4096), "seen": 0}

    def run(self) -> None:
        torch.set_num_threads(1)
        logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
        if self.case.world > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        with job(self.state, every=self.case.every) as made:
            (self.folder / f"start{self.rank}").write_text(str(made.start_step))
            if (self.folder / "again").exists():
                return
            if self.case.phase == "warmup":
                self.ready()
                threading.Event().wait()
            for step in made.steps(1_000_000):
                if step == STEP:
                    self.before(made)
                self.train()
                (self.folder / f"ran{self.rank}").write_text(str(step))
                self.after(made, step)

    def ready(self) -> None:
        (self.folder / f"ready{self.rank}").touch()

    def train(self) -> None:
        one = torch.ones(1)
        if self.case.world > 1:
            dist.all_reduce(one)
        self.state["count"] += one
        self.state["seen"] += 1
        threading.Event().wait(0.01)

    def before(self, made: Job) -> None:
        """Something at the beginning of the step, or not."""
        phase = self.case.phase
        if phase == "held":
            assert made._saving is not None and made._saving.save(STEP, reach=0)
        if phase in ("collective", "loader", "held", "dies"):
            self.ready()
            if self.rank == self.case.odd:
                if phase == "loader":
                    next(iter(torch.utils.data.DataLoader(Never(), num_workers=1)))
                if phase == "dies":
                    until(lambda: made._agreement is not None and made._agreement.is_leaving())
                    os._exit(DEAD)
                threading.Event().wait()

    def after(self, made: Job, step: int) -> None:
        """Something after its training, or not."""
        phase, saving = self.case.phase, made._saving
        assert saving is not None and saving.checkpointer._link is not None
        if step == 5:
            for _ in range(self.rank):  # an evaluation that differs from rank to rank; the next step is the same again
                made.safe_point()
        if step == STEP and phase in ("points", "eval"):
            self.ready()
            while phase == "points":
                made.safe_point()
                threading.Event().wait(0.01)
            threading.Event().wait()
        if step == STEP and phase == "step":
            self.ready()
        if phase == "finish" and step == STEP:
            until(lambda: saving.durable_step == 10 and not saving.uploading)
            saving.checkpointer._record._upload_s = [SLOW_UPLOAD_S]  # as if it had taken so long
        if phase == "near" and step == STEP:
            until(lambda: saving.durable_step == 10 and not saving.uploading)
            saving.checkpointer._record._upload_s = [0.5, 10 * SLOW_UPLOAD_S]
            self.ready()
            until(lambda: noticed(made))
        if phase == "finish" and step == 19:  # 20 will be captured, and not uploaded before the ranks have decided
            uploader = saving.checkpointer._link.pid
            os.kill(uploader, signal.SIGSTOP)
            (self.folder / f"uploader{self.rank}").write_text(str(uploader))
        if phase == "finish" and step == 20:
            self.ready()
            until(lambda: noticed(made))


class Never(torch.utils.data.Dataset[int]):
    """A data set that blocks."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        return index


def noticed(made: Job) -> bool:
    """It has pledged, so the ranks will meet at the end of this step."""
    return made._agreement is not None and made._agreement._pledge is not None


def until(done: Callable[[], bool], what: str = "it") -> None:
    until_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < until_s, f"{what} did not come"
        threading.Event().wait(0.01)


class Gang:
    """The ranks of one case, and who tells them to leave."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.spool = case, folder, folder / "spool"
        self.spool.mkdir()
        self.service = MetadataService()
        self.pids = self.start(epoch=1)

    def start(self, epoch: int) -> list[int]:
        near = self.case.phase == "near"
        port = free_port()
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.case.world),
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks the name server about each peer
            "CORDEE_JOB": "case-abcdef",
            "CORDEE_EPOCH": str(epoch),
            "CORDEE_SPOOL": str(self.spool),
            "CORDEE_CHECKPOINT_TO": f"{self.folder}/near,{self.folder}/to" if near else str(self.folder / "to"),
            "CORDEE_GRACE_S": str(self.case.grace_s),
            "CORDEE_SIGNALS": "usr1",
            "CORDEE_CLOUD": "azure" if any(kind in ("hint", "cloud") for _, kind in self.case.notices) else "none",
            "CORDEE_CLOUD_URL": self.service.url,
        }
        return [self.fork(rank, env) for rank in range(self.case.world)]

    def fork(self, rank: int, env: dict[str, str]) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
            os.dup2(os.open(self.folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            Rank(self.case, rank, self.folder).run()
            code = 0
        except SystemExit as leaves:
            code = int(leaves.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def tell(self, rank: int, kind: str) -> None:
        if kind == "agent":
            write_notice(self.spool, Notice(deadline_us=time.time_ns() // 1000 + 3_000_000))
        elif kind == "hint":
            self.service.schedule("Redeploy", 600)
            until(lambda: bool(self.commits()), "the save that the hint asks for")
        elif kind == "cloud":
            self.service.schedule("Preempt", 30)
        else:
            os.kill(self.pids[rank], getattr(signal, f"SIG{kind}"))

    def let_go(self) -> None:
        """The uploaders that were stopped go on once the ranks have decided."""
        if self.case.phase == "finish":
            until(lambda: "all ranks: " in self.log(0), "the decision")
            for path in self.folder.glob("uploader*"):
                os.kill(int(path.read_text()), signal.SIGCONT)

    def reap(self) -> list[int]:
        codes: dict[int, int] = {}

        def ended() -> bool:
            for pid in self.pids:
                if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(found[1])
            return len(codes) == len(self.pids)

        try:
            until(ended, "the end of the ranks")
        finally:
            for pid in set(self.pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = -signal.SIGKILL
        return [codes[pid] for pid in self.pids]

    def orphans(self) -> list[int]:
        """Workers of data loaders that are still there; a rank leads a process group of its own."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, group = (path / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                if (
                    int(group) in self.pids
                    and state != "Z"
                    and b"checkpoint.uploader" not in (path / "cmdline").read_bytes()
                ):
                    found.append(int(path.name))
        return found

    def uploaders(self) -> list[int]:
        """Those that go on alone."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"CORDEE_SPOOL={self.spool}\0".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def close(self) -> None:
        """End them before their folder goes."""
        self.service.close()
        for pid in self.uploaders():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def commits(self) -> list[int]:
        entries = read_entries(open_blobs(str(self.folder / "to")))
        return [each.record.fields["step"] for each in entries if each.record and each.record.kind == "commit"]

    def chunks(self, store: str) -> int:
        return sum(path.is_file() for path in (self.folder / store / "chunks").rglob("*"))

    def log(self, rank: int) -> str:
        path = self.folder / f"log{rank}"
        return path.read_text() if path.exists() else ""

    def number(self, what: str) -> list[int]:
        paths = [self.folder / f"{what}{rank}" for rank in range(self.case.world)]
        return [int(path.read_text()) if path.exists() else -1 for path in paths]

    def left(self) -> list[list[Any]]:
        found = []
        for path in sorted(self.spool.glob("rank*.jsonl")):
            events = [decode(json.loads(line)["event"]) for line in path.read_text().splitlines()]
            found += [[event.rank, event.how, event.step] for event in events if isinstance(event, RankLeft)]
        return found


def run_case(case: Case, *, again: bool = False, pauses: random.Random | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stop-", ignore_cleanup_errors=True) as base:
        gang = Gang(case, Path(base))
        try:
            until(lambda: all((gang.folder / f"ready{rank}").exists() for rank in range(case.world)), "the phase")
            for rank, kind in case.notices:
                gang.tell(rank, kind)
                if pauses is not None:
                    threading.Event().wait(pauses.random() * 0.2)
            gang.let_go()
        except AssertionError:
            print(*(gang.log(rank) for rank in range(case.world)), sep="\n", flush=True)
            raise
        finally:
            codes = gang.reap()
        until(lambda: not gang.orphans(), "the end of what the ranks had started")
        until(lambda: not gang.uploaders(), "the end of the uploaders")
        result = {
            "codes": codes,
            "left": gang.left(),
            "commits": gang.commits(),
            "chunks": [gang.chunks(name) for name in ("near", "to")],
            "ran": gang.number("ran"),
            "asked": gang.service.asked.count("/metadata/instance/compute/name"),
            "logs": [gang.log(rank)[-3000:] for rank in range(case.world)],
        }
        if again:
            (gang.folder / "again").touch()
            gang.pids = gang.start(epoch=2)
            result |= {
                "again": gang.reap(),
                "start": gang.number("start"),
                "later": gang.commits(),
                "logs": [gang.log(rank)[-3000:] for rank in range(case.world)],
            }
        gang.close()
        return result


def drawn(seed: int) -> Case:
    """A random case."""
    draw = random.Random(seed)
    phase = draw.choice(["step", "step", "collective", "loader", "points", "eval", "warmup", "dies"])
    world = draw.randrange(1, 5) if phase in ("step", "points", "eval", "warmup") else draw.randrange(2, 5)
    kinds = ["TERM", "USR1"] if phase == "dies" else ["TERM", "USR1", "cloud"]
    notices = tuple((draw.randrange(world), draw.choice(kinds)) for _ in range(draw.choice([1, 1, 2, 3])))
    grace_s = 60.0 if phase in ("step", "points", "dies") else 4.0
    if grace_s < 30.0 and all(kind == "cloud" for _, kind in notices):
        notices = (*notices, (0, "TERM"))  # the cloud's 30 s are long for a test
    return Case(phase, world, draw.choice([5, 10]), grace_s, draw.randrange(world), notices)


def check(case: Case, result: dict[str, Any]) -> None:
    """What holds whatever was drawn."""
    codes, durable = result["codes"], max(result["commits"], default=0)
    wanted = {"step": 75, "points": 75, "warmup": 75}.get(case.phase, 60)
    for rank, code in enumerate(codes):
        dead = case.phase == "dies" and rank == case.odd
        # Rank 0 takes the store along: who has not been told by then sees a crash like any other.
        unheard = case.phase == "dies" and case.odd == 0 and code == 1
        assert unheard or code == (DEAD if dead else wanted), f"rank {rank} exited with {code}"
    for _, how, step in result["left"]:
        assert how != "checkpointed" or step <= durable, f"step {step} is said to be durable, and {durable} is"
    if case.phase in ("step", "points"):
        assert result["ran"] == [durable - 1] * case.world, f"steps were lost: {result['ran']}, durable {durable}"
    elif case.phase != "warmup":
        assert durable >= STEP - STEP % case.every - case.every, "what was captured was not brought"
    assert result["again"] == [0] * case.world, f"the next attempt ended with {result['again']}"
    newest = max(result["later"], default=0)  # the uploaders of the dead may have gone on
    assert result["start"] == [newest] * case.world and newest >= durable, f"it began at {result['start']}: {result}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    for name in args.names:
        print(json.dumps({"name": name, **run_case(CASES[name])}), flush=True)
    for seed in range(args.seed, args.seed + args.rounds) if args.seed is not None else ():
        case = drawn(seed)
        result: dict[str, Any] = {}
        try:
            result = run_case(case, again=True, pauses=random.Random(seed))
            check(case, result)
        except AssertionError as error:
            print(f"{case}: {error}", *result.get("logs", ()), sep="\n")
            print(f"replay: python tests/train/stop_cases.py --seed {seed}", flush=True)
            return 1
        print(f"seed {seed}: {case.phase} on {case.world} ranks, {len(case.notices)} notices", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
