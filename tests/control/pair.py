"""Two real servers over one PostgreSQL, their agents with real ranks, and what becomes of them when the leader dies.

Each round submits a job, kills or freezes the leader somewhere around its start, and submits another one to whichever
server leads. A gang runs through all rounds. In the end everything has run once.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kill_story import left_behind

from cordee.client import Client
from cordee.errors import CordeeError
from cordee.events import AttemptPlaced, Event, JobEnded, RanksStarted
from cordee.ids import JobId
from cordee.ids import job_id as new_id
from postgres import Postgres

WAIT_S = 60
SLOTS = 8
# A rank says that it starts; with a second word it runs until the file of that name is there.
SCRIPT = """\
echo "start $CORDEE_ATTEMPT $RANK" >> "$STORY/diary"
while [ "$1" ] && [ ! -e "$STORY/$1" ]; do sleep 0.05; done
echo "end $CORDEE_ATTEMPT $RANK" >> "$STORY/diary"
"""


@dataclass
class Round:
    """One change of leaders: seconds from the kill or freeze to the new leader's events."""

    how: str
    leads_s: float  # until the new leader is up
    decides_s: float  # until it has placed the job that a client submitted meanwhile


@dataclass
class _Process:
    name: str
    home: Path
    process: subprocess.Popen[bytes]


@dataclass
class Pair:
    """Two servers, a and b, of which one leads."""

    folder: Path
    database: str
    rounds: list[Round] = field(default_factory=list)
    jobs: list[JobId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._servers: dict[str, _Process] = {}
        for home in (self.folder / "a", self.folder / "b"):
            home.mkdir()
            (home / "token").write_text("a-token-that-both-servers-know\n")
            (home / "token").chmod(0o600)
        (self.folder / "job.sh").write_text(SCRIPT)
        (self.folder / "diary").touch()
        self._start("a")
        self._start("b", "--standby")
        self.gang = self._job("gang")
        self._submit(self.gang, 2, "release")
        self._until(lambda: self._started(self.gang) == 2)

    # -- the world --------------------------------------------------------------------------------------------------

    def _start(self, name: str, *more: str) -> None:
        home = self.folder / name
        argv = [sys.executable, "-m", "cordee.control", "--home", str(home), "--slots", str(SLOTS)]
        with (self.folder / f"{name}.output").open("ab") as output:
            process = subprocess.Popen(
                [*argv, "--database", self.database, *more], stdout=subprocess.PIPE, stderr=output, cwd="/"
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        process.stdout.close()
        assert "ready" in json.loads(line or "{}"), self.report()
        self._servers[name] = _Process(name, home, process)
        if more:
            self._until(self._paired)

    def _paired(self) -> bool:
        """Return whether one leads, the other stands by, and clients of both homes learn of both."""
        homes = [each.home for each in self._servers.values()]
        roles = {self._facts(home).get("role") for home in homes}
        if roles != {"leader", "standby"}:
            return False
        said = [json.loads((home / "server.json").read_text()) for home in homes]
        urls = {each["url"] for each in said}
        return all(urls <= set(each["servers"]) for each in said)

    def _facts(self, home: Path) -> dict[str, object]:
        try:
            url = json.loads((home / "server.json").read_text())["url"]
            with Client(home, url=url) as client:
                client._line._http.timeout = 1.0  # type: ignore[assignment]  # a frozen server does not answer
                return client.health().model_dump()
        except (OSError, ValueError, KeyError, CordeeError):
            return {}

    def leader(self) -> _Process:
        found: list[_Process] = []

        def look() -> bool:
            found[:] = [each for each in self._servers.values() if self._facts(each.home).get("role") == "leader"]
            return len(found) == 1

        self._until(look)
        return found[0]

    def _client(self) -> Client:
        """Connect by either home, as a user on either machine does."""
        for name in ("a", "b"):
            try:
                return Client(self.folder / name)
            except CordeeError:
                continue
        raise AssertionError("no server.json")

    def _job(self, name: str) -> JobId:
        self.jobs.append(new_id(name, os.urandom(6)))
        return self.jobs[-1]

    def _submit(self, job_id: JobId, gpus: int, *words: str) -> None:
        spec = {"run": ["sh", str(self.folder / "job.sh"), *words], "gpus": gpus, "name": job_id.partition("-")[0]}
        spec |= {"cwd": str(self.folder), "env": {"STORY": str(self.folder)}}
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with self._client() as client:
                    client.submit(spec, job_id=job_id, unprotected=True)
                return
            except CordeeError:
                assert time.monotonic() < deadline, self.report()

    def _diary(self) -> list[str]:
        return (self.folder / "diary").read_text().splitlines()

    def _started(self, job_id: JobId) -> int:
        return sum(line.startswith(f"start {job_id}.") for line in self._diary())

    def _until(self, holds: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not holds():
            assert time.monotonic() < deadline, f"waited too long\n{self.report()}"
            time.sleep(0.03)

    def log(self) -> list[tuple[int, Event]]:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with Client(self.leader().home) as client:
                    return list(client.events())
            except CordeeError:
                assert time.monotonic() < deadline, self.report()

    def report(self) -> str:
        texts = [path.read_text()[-6000:] for path in sorted(self.folder.glob("[ab]/server.log"))]
        texts += [path.read_text()[-2000:] for path in sorted(self.folder.glob("[ab].output"))]
        texts += [path.read_text()[-2000:] for path in sorted(self.folder.glob("[ab]/nodes/*/agent.log"))]
        return "\n".join([*texts, *self._diary()[-20:]])

    # -- the rounds -------------------------------------------------------------------------------------------------

    def play(self, how: str, draw: random.Random) -> Round:
        """Kill or freeze the leader, and bring it back as a standby."""
        old = self.leader()
        number = max(number for number, _ in self.log())
        self._submit(self._job("before"), 1)
        time.sleep(draw.random() * 0.1)  # some moment of that job's life
        began_us = time.time_ns() // 1000
        os.kill(old.process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        meanwhile = self._job("meanwhile")
        self._submit(meanwhile, 1)
        new = self.leader()
        assert new.name != old.name
        times: dict[str, int] = {}

        def decided() -> bool:
            with Client(new.home) as client:
                for _, event in client.events(after=number):
                    if isinstance(event, AttemptPlaced) and event.job_id == meanwhile:
                        times["decides"] = event.at_us
                    if type(event).__name__ == "ServerUp":
                        times["leads"] = event.at_us
            return len(times) == 2

        self._until(decided)
        if how == "kill":
            old.process.wait()
            self._start(old.name, "--standby")
        else:
            file = old.home / "server.json"
            before_ns = file.stat().st_mtime_ns
            os.kill(old.process.pid, signal.SIGCONT)
            self._until(lambda: file.stat().st_mtime_ns > before_ns and self._paired())
        self._until(lambda: self._started(meanwhile) == 1)
        done = Round(how, *((times[key] - began_us) / 1e6 for key in ("leads", "decides")))
        self.rounds.append(done)
        return done

    def restart(self, postgres: Postgres) -> None:
        """Crash the database under both servers, while a job runs, and start it again."""
        before, after = self._job("before"), self._job("after")
        self._submit(before, 1, "go-on")
        self._until(lambda: self._started(before) == 1)
        postgres.stop("immediate")
        (self.folder / "go-on").touch()
        postgres.start()
        self._submit(after, 1)
        self._until(lambda: self._started(after) == 1)

    def end(self) -> None:
        """End the gang, check that everything has run once and that nothing of the log is lost; end both servers."""
        (self.folder / "release").touch()
        self._until(lambda: {e.job_id for _, e in self.log() if isinstance(e, JobEnded)} >= set(self.jobs))
        log = self.log()
        assert [number for number, _ in log] == list(range(1, len(log) + 1))
        kinds = (AttemptPlaced, RanksStarted, JobEnded)
        for kind in kinds:
            found = Counter(e.job_id for _, e in log if isinstance(e, kind))
            wrong = {job_id for job_id in self.jobs if found[job_id] != 1}
            story = [each for each in log if getattr(each[1], "job_id", None) in wrong or hasattr(each[1], "node")]
            assert found == Counter(self.jobs), f"{kind.__name__} of {wrong}:\n" + "\n".join(map(str, story[-200:]))
        assert {e.state for _, e in log if isinstance(e, JobEnded)} == {"done"}
        ranks = Counter(line.partition(" ")[2] for line in self._diary() if line.startswith("start"))
        assert ranks == Counter([f"{self.gang}.1 1", *(f"{job_id}.1 0" for job_id in self.jobs)])
        assert Counter(line.partition(" ")[2] for line in self._diary() if line.startswith("end")) == ranks
        with Client(self.leader().home) as client:
            client.down()
        assert [each.process.wait(WAIT_S) for each in self._servers.values()] == [0, 0]

    def close(self) -> None:
        (self.folder / "release").touch()
        for server in self._servers.values():
            server.process.kill()
            server.process.wait()
        for process in left_behind(self.folder):
            process.kill()
