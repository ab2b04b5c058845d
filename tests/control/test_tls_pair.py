"""Two servers that other machines reach over TLS, of which the first is killed: a node, a user there and a user of the
first server's home turn to the second. Real servers, agent and ranks over one PostgreSQL.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cordee.agent.settings import AgentSettings
from cordee.cli.capture import capture_job
from cordee.client import Client
from cordee.control.spawn import is_owned, start_server
from cordee.errors import HomeUnsuitableError
from cordee.events import NodeDown, NodeUp, RanksStarted
from cordee.ids import JobId
from cordee.servers import ServerAddress, keep_remote
from cordee.workload.spec import JobSpec
from postgres import Postgres

DEADLINE_S = 60.0
SECRET = "hf_a-secret-of-the-submitter"
SCRIPT = """
import os, time
from pathlib import Path
from lib import NAME

print(f"{NAME} before", flush=True)
while not Path(os.environ["STAGE"], "release").exists():
    time.sleep(0.02)
print(f"{NAME} after", flush=True)
"""
HASHES = """
import hashlib, os
from lib import NAME

print(NAME, hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest())
"""


class TlsPair:
    """Servers a, which leads, and b; node n1; and the home of a user on another machine."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database = folder, database
        self.a, self.b, self.far = (folder / name for name in ("a", "b", "far"))
        self.first = self.start(self.a)

    def start(self, home: Path, *, standby: bool = False, listen: str = "127.0.0.1:0") -> dict[str, object]:
        options = {"on": "none", "listen": listen, "database": self.database, "standby": standby}
        return start_server(home, **options).model_dump()  # type: ignore[arg-type]

    def join(self, name: str, slots: int) -> None:
        with Client(self.a) as client:
            made = client.join_token()
        argv = [sys.executable, "-m", "cordee", "nodes", "join", made.url, made.token, "--name", name]
        subprocess.run([*argv, "--slots", str(slots), "--folder", str(self.folder / name)], check=True)

    def connect(self) -> None:
        """Do as `cordee connect` does."""
        token = (self.a / "token").read_text().strip()
        with Client(self.a) as client:
            health = client.health()
        assert health.listens is not None
        others = tuple(url for url in health.servers if url != health.listens)
        keep_remote(self.far, ServerAddress(health.listens, token, health.fingerprint, others=others))

    def project(self, name: str, script: str = SCRIPT) -> JobSpec:
        """Send a folder with a script, which is then gone, and return its job."""
        folder, stage = self.folder / name, self.folder / "stage"
        folder.mkdir()
        stage.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        (folder / "lib.py").write_text(f"NAME = {name!r}")
        run = (sys.executable, str(folder / "train.py"))
        env = {"PATH": os.environ["PATH"], "STAGE": str(stage)}
        with Client(self.far) as client:
            job = JobSpec(name=name, run=run, gpus=1, cwd=str(folder), env=env)
            spec, _ = capture_job(client, job, remote=True)
        shutil.rmtree(folder)
        return spec

    def log_of(self, job_id: JobId) -> list[str]:
        with Client(self.far) as client:
            lines = client.logs(job_id) if client.job(job_id).attempts else ()
            return [line for line in lines if not line.startswith("cordee: ")]

    def close(self) -> None:
        (self.folder / "stage" / "release").touch()
        argv = [sys.executable, "-m", "cordee", "nodes", "leave", "--here", "--folder", str(self.folder / "n1")]
        subprocess.run(argv, check=True)  # the first server that it knows is dead
        for home in (self.a, self.b):
            if is_owned(home):
                os.kill(json.loads((home / "server.json").read_text())["pid"], signal.SIGTERM)
        until(lambda: not is_owned(self.a) and not is_owned(self.b))


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def submit(home: Path, spec: JobSpec, environ: dict[str, str] | None = None) -> JobId:
    with Client(home) as client:
        return JobId(client.submit(spec.model_dump(mode="json"), environ=environ or {}).job.job_id)


@pytest.fixture
def pair(tmp_path: Path, postgres: Postgres) -> Iterator[TlsPair]:
    pair = TlsPair(tmp_path, postgres.database())
    yield pair
    pair.close()


def test_agents_and_clients_turn_to_the_other_server_over_tls(pair: TlsPair, postgres: Postgres) -> None:
    with pytest.raises(HomeUnsuitableError, match=r"(?s)its token and its certificate differ.*copy token, certificate"):
        pair.start(pair.b, standby=True)
    for name in ("token", "certificate.pem", "certificate.key"):
        shutil.copy(pair.a / name, pair.b / name)
    with pytest.raises(HomeUnsuitableError, match=r"(?s)other machines do not reach it.*--listen"):
        pair.start(pair.b, standby=True, listen="off")
    assert pair.start(pair.b, standby=True)["role"] == "standby"
    until(lambda: len(json.loads((pair.a / "server.json").read_text())["servers"]) == 2)
    pair.connect()
    pair.join("n1", slots=2)
    servers = AgentSettings.read(pair.folder / "n1").servers
    assert len(servers) == 2 and all(url.startswith("https://") for url in servers)

    runs = submit(pair.far, pair.project("runs"))
    until(lambda: pair.log_of(runs) == ["runs before"])
    hashes = pair.project("waits", HASHES).model_copy(update={"gpus": 2, "secrets": ("HF_TOKEN",)})
    waits = submit(pair.a, hashes, {"HF_TOKEN": SECRET})
    assert not (pair.a / "secrets").exists(), "the other server would not see it"
    held = [path.relative_to(pair.a) for path in (pair.a / "files").glob("??/*")]
    until(lambda: all((pair.b / path).exists() for path in held))  # the files of jobs, which no node has yet

    os.kill(int(str(pair.first["pid"])), signal.SIGKILL)
    until(lambda: not is_owned(pair.a))
    after = submit(pair.far, pair.project("after"))
    until(lambda: pair.log_of(after) == ["after before"])
    until(lambda: pair.log_of(runs) == ["runs before"])  # from its beginning, of which this server had nothing

    postgres.stop("immediate")
    postgres.start()
    (pair.folder / "stage" / "release").touch()
    with Client(pair.a) as client:  # its home names both servers
        until(lambda: {client.job(job_id).state for job_id in (runs, after, waits)} == {"done"})
        log = [event for _, event in client.events()]
    assert pair.log_of(runs) == ["runs before", "runs after"]
    assert pair.log_of(after) == ["after before", "after after"]
    said = f"waits {hashlib.sha256(SECRET.encode()).hexdigest()}"
    assert sum(line.endswith(said) for line in pair.log_of(waits)) == 2
    assert sorted(event.job_id for event in log if isinstance(event, RanksStarted)) == sorted([runs, after, waits])
    assert len([event for event in log if isinstance(event, NodeUp)]) == 1
    assert not [event for event in log if isinstance(event, NodeDown)]
