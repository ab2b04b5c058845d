"""The story that the tests of a killed server play: a home, its server that dies at moments, and a diary of the ranks.

A moment is a named point (`reports.after_commit:3` is its third pass) or a time after the server's birth (`0.25s`).
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from cordee.client import Client
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.errors import NoServerError
from cordee.events import AttemptPlaced, JobEnded, NodeUp, NoticeGiven
from cordee.ids import JobId
from cordee.ids import job_id as new_id

T = TypeVar("T")

# Each rank first says whose ranks still run; a zombie has no environment.
SCRIPT = """\
for other in "$STORY"/pids/*; do
    attempt=$(basename "$other"); attempt=${attempt%:*}
    [ "$attempt" = "$CORDEE_ATTEMPT" ] && continue
    grep -qs "CORDEE_ATTEMPT=$attempt" "/proc/$(cat "$other")/environ" && echo "$attempt overlaps" >> "$STORY/diary"
done
echo $$ > "$STORY/pids/$CORDEE_ATTEMPT:$RANK"
echo "start $CORDEE_ATTEMPT $RANK" >> "$STORY/diary"
trap 'echo "left $CORDEE_ATTEMPT $RANK" >> "$STORY/diary"; exit 75' TERM
while [ ! -e "$STORY/release-$CORDEE_JOB" ]; do sleep 0.02; done
echo "end $CORDEE_ATTEMPT $RANK" >> "$STORY/diary"
"""
# Drawn: two runs at once must not end each other's processes.
LOW, HIGH = new_id("low", os.urandom(6)), new_id("high", os.urandom(6))
WAIT_S = 60

# How often the story passes each point at least; a seed picks one of these passes.
POINTS = {
    "submit.before_commit": 2,
    "submit.after_commit": 2,
    "reports.before_commit": 5,
    "reports.after_commit": 5,
    "reports.acknowledged": 5,
    "decision.before_commit": 5,
    "decision.after_commit": 5,
    "command.before_carry_out": 4,
    "command.before_confirm": 4,
    "command.after_confirm": 4,
}


class Nursery:
    """The process that forks servers."""

    def __init__(self) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


def left_behind(folder: Path) -> list[psutil.Process]:
    """Everything that a story starts names its folder."""
    running = psutil.process_iter(["cmdline"])
    return [each for each in running if any(str(folder) in word for word in each.info["cmdline"] or ())]


class Stage:
    """A maker of stories in one folder."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._folder, self._nursery = folder, nursery

    def story(self, kill_at: str) -> "Story":
        """Begin a story whose servers are killed at these moments, one after the other; never if there are none."""
        return Story(self._folder, self._nursery, kill_at)


class Story:
    """A home, its server that may be killed at moments, and the diary that the ranks write."""

    def __init__(self, folder: Path, nursery: Nursery, kill_at: str) -> None:
        self.folder, self.home = folder, folder / "home"
        self._nursery = nursery
        self._moments = kill_at.split("+")
        self.deaths = 0
        (folder / "job.sh").write_text(SCRIPT)
        (folder / "diary").touch()
        (folder / "pids").mkdir()
        (folder / "pids" / "nobody:0").write_text("0")  # so that the pattern always names something
        self.start()

    def start(self) -> None:
        moment = self._moments[self.deaths] if self.deaths < len(self._moments) else ""
        after_s = float(moment[:-1]) if moment.endswith("s") else None
        env = {"CORDEE_TEST_KILL_AT": "" if after_s else moment}
        answer = self._nursery.ask(home=str(self.home), slots=2, env=env, kill_after_s=after_s)
        self.pid = answer["pid"]
        if answer["said"] is None:  # it was killed before it was ready
            self._bury()

    def _bury(self) -> None:
        assert self._nursery.ask(wait=self.pid)["code"] == -9, "only the test's own kill ends a server"
        self.deaths += 1
        self.start()

    def ask(self, question: Callable[[Client], T]) -> T:
        """Ask the server; if it was killed, start it and ask again."""
        while True:
            try:
                with Client(self.home) as client:
                    return question(client)
            except NoServerError:
                self._bury()

    def submit(self, job_id: JobId, tier: str) -> None:
        name = job_id.partition("-")[0]
        spec = {"run": ["sh", str(self.folder / "job.sh")], "gpus": 2, "name": name, "tier": tier}
        spec |= {"cwd": str(self.folder), "env": {"STORY": str(self.folder)}}
        self.ask(lambda client: client.submit(spec, job_id=job_id, unprotected=True))

    def release(self, job_id: JobId) -> None:
        (self.folder / f"release-{job_id}").touch()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition, and restart the server whenever it is dead."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited too long\n{self.report()}"
            self.ask(Client.health)
            time.sleep(0.01)

    def diary(self) -> list[str]:
        return (self.folder / "diary").read_text().splitlines()

    def wrote(self, *lines: str) -> Callable[[], bool]:
        return lambda: set(lines) <= set(self.diary())

    def ended(self, job_id: JobId) -> Callable[[], bool]:
        return lambda: self.ask(lambda client: client.job(job_id)).ended_us is not None

    def log(self) -> list[object]:
        return [event for _, event in self.ask(lambda client: list(client.events()))]

    def report(self) -> str:
        server = (self.home / "server.log").read_text()
        agent = "".join(path.read_text() for path in self.home.glob("nodes/*/agent.log"))
        return "\n".join(["diary:", *self.diary(), "server:", server, "agent:", agent])

    def await_end(self) -> None:
        """Wait for the end of a server that shuts down, or was killed before it could; then start it."""
        code = self._nursery.ask(wait=self.pid)["code"]
        assert code in (0, -9)
        self.deaths += code == -9
        self.start()

    def down(self) -> None:
        self.ask(Client.down)
        code = self._nursery.ask(wait=self.pid)["code"]
        assert code in (0, -9)
        if code == -9:
            self.deaths += 1
            self.start()
            self.down()
        deadline = time.monotonic() + WAIT_S
        while left := left_behind(self.folder):
            assert time.monotonic() < deadline, f"{left} are left behind"
            time.sleep(0.01)


def play(story: Story) -> None:
    """Play the story, and restart the server whenever it is dead."""
    story.submit(LOW, "preemptible")
    story.until(story.wrote(f"start {LOW}.1 0", f"start {LOW}.1 1"))
    story.submit(HIGH, "production")
    story.until(story.wrote(f"start {HIGH}.1 0", f"start {HIGH}.1 1"))
    story.release(HIGH)
    story.until(story.ended(HIGH))
    story.until(story.wrote(f"start {LOW}.2 0", f"start {LOW}.2 1"))
    story.release(LOW)
    story.until(story.ended(LOW))


def check(story: Story) -> None:
    """Check that nothing runs twice, nothing is lost and the server's deaths restarted no rank; end the server."""
    log = story.log()
    story.down()
    starts = Counter(line for line in story.diary() if line.startswith("start"))
    wanted = [f"start {attempt} {rank}" for attempt in (f"{LOW}.1", f"{HIGH}.1", f"{LOW}.2") for rank in (0, 1)]
    assert starts == Counter(wanted), story.report()
    assert Counter(line for line in story.diary() if line.startswith("left")) == Counter(
        [f"left {LOW}.1 0", f"left {LOW}.1 1"]
    )
    attempts = [(event.job_id, event.epoch) for event in log if isinstance(event, AttemptPlaced)]
    assert attempts == [(LOW, 1), (HIGH, 1), (LOW, 2)]
    assert [event.job_id for event in log if isinstance(event, NoticeGiven)] == [LOW]
    assert {event.job_id: event.state for event in log if isinstance(event, JobEnded)} == {LOW: "done", HIGH: "done"}
    assert [event.node.epoch for event in log if isinstance(event, NodeUp)] == [1], "the agent was adopted"
    # The later gang started after the earlier one had left.
    diary = story.diary()
    assert max(diary.index(f"left {LOW}.1 {rank}") for rank in (0, 1)) < diary.index(f"start {HIGH}.1 0")
    replay(story)


def shut_down(story: Story) -> None:
    """Ask the server once to shut down while a gang runs."""
    story.submit(LOW, "preemptible")
    story.until(story.wrote(f"start {LOW}.1 0", f"start {LOW}.1 1"))
    with suppress(NoServerError), Client(story.home) as client:
        client.down()


def check_shut_down(story: Story) -> None:
    """Check that the job goes on after `up` and its ranks never overlap; end the server."""
    if any(isinstance(event, NoticeGiven) for event in story.log()):
        story.until(story.wrote(f"start {LOW}.2 0", f"start {LOW}.2 1"))
    story.release(LOW)
    story.until(story.ended(LOW))
    story.down()
    diary = story.diary()
    starts = [line for line in diary if line.startswith("start")]
    assert len(starts) == len(set(starts)), "a rank was started twice"
    assert sum(line.startswith("end") for line in diary) == 2
    if f"start {LOW}.2 0" in diary:
        gone = [diary.index(f"left {LOW}.1 {rank}") for rank in (0, 1)]
        assert max(gone) < diary.index(f"start {LOW}.2 0")
    replay(story)


class _Nobody:
    """A clock and an executor for a control plane that only reads."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def reports(self) -> list[Any]:
        return []

    def acknowledge(self, source: str, seq: int) -> None:
        raise AssertionError("nothing to acknowledge")

    def carry_out(self, pending: object) -> bool:
        raise AssertionError(f"{pending} was left behind")


def replay(story: Story) -> None:
    """Check that the log gives a state with nothing open and a ledger that adds up; no two gangs overlapped."""
    assert not [line for line in story.diary() if "overlaps" in line], story.report()
    store = SqlStore(f"sqlite:///{story.home}/cordee.db")
    control = Control(clock=_Nobody(), store=store, executor=_Nobody())
    assert control.state.attempts == {}
    assert list(store.pending()) == []
    totals = control.ledger.totals(0)
    held = sum((each.ended_us or 0) - each.placed_us for each in control.ledger.rows(0))
    assert totals.gpu_us.held == 2 * held
    states = {row["job_id"]: row["state"] for row in store.jobs()}
    store.close()
    assert states == {job_id: record.phase.value for job_id, record in control.state.jobs.items()}
