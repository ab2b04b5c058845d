"""Two machines (folders with an agent each) join a real server over TLS, and run a gang that a remote user submits."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from verbs import code_of

from cordee.agent.settings import is_running
from cordee.client import Client
from cordee.control.spawn import is_owned, start_server
from cordee.errors import (
    CertificateError,
    HomeInUseError,
    HomeUnsuitableError,
    InputError,
    NameTakenError,
    NotFoundError,
    TokenError,
)
from cordee.servers import write_join_token

DEADLINE_S = 60.0
OTHER_FINGERPRINT = "ab" * 32
SECRET = "hf_a-secret-of-the-submitter"

MEETS = """
import hashlib, os, socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as listener:
        others = [listener.accept()[0] for _ in range(world - 1)]
        names = sorted(other.recv(100).decode() for other in others)
        for other in others:
            other.sendall(b"go")
    print("met", *names, flush=True)
else:
    while True:
        try:
            with socket.create_connection(where) as me:
                me.sendall(f"{rank}@{os.environ['CORDEE_NODE']}".encode())
                assert me.recv(2) == b"go"
            break
        except ConnectionRefusedError:
            pass
token = os.environ["HF_TOKEN"]
print(f"rank {rank} has {hashlib.sha256(token.encode()).hexdigest()} of {token}", flush=True)
"""


class Cluster(NamedTuple):
    """A server, and a user on another machine."""

    home: Path
    folder: Path
    remote: Client

    def machine(self, name: str) -> Path:
        return self.folder / name

    def token(self, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
        """Return the words after `cordee nodes join` of a new token."""
        assert code_of("nodes", "token", *words, "--home", str(self.home)) == 0
        command = capsys.readouterr().out.split()
        assert command[:3] == ["cordee", "nodes", "join"]
        return command[3:]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, [node.model_dump() for node in self.remote.nodes()]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    home = folder / "home"
    health = start_server(home, slots="1", listen="127.0.0.1:0")
    assert health.listens is not None
    token = (home / "token").read_text().strip()
    with Client(url=health.listens, token=token, fingerprint=health.fingerprint) as remote:
        yield Cluster(home, folder, remote)
        for name in ("gpu-1", "gpu-2"):
            code_of("nodes", "leave", "--here", "--folder", str(folder / name))
        remote.down()
    deadline = time.monotonic() + DEADLINE_S
    while is_owned(home) and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def joined(cluster: Cluster) -> Cluster:
    """Return the cluster after gpu-1 and gpu-2 have joined."""
    made = cluster.remote.join_token(uses=2)
    for name in ("gpu-1", "gpu-2"):
        words = ["--name", name, "--slots", "2", "--label", "rack=r7", "--folder", str(cluster.machine(name))]
        assert code_of("nodes", "join", made.url, made.token, *words) == 0
    cluster.until(lambda: sum(node.up for node in cluster.remote.nodes()) == 3)
    return cluster


def test_a_machine_joins_and_is_listed(joined: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {node.name: node for node in joined.remote.nodes()}
    assert shown.keys() == {"gpu-1", "gpu-2", "local"}
    assert (shown["gpu-1"].gpus, shown["gpu-1"].domain) == (2, ["r7"])
    settings = joined.machine("gpu-1") / "agent.json"
    assert settings.stat().st_mode & 0o777 == 0o600
    assert code_of("nodes", "--home", str(joined.home)) == 0
    assert "gpu-2" in capsys.readouterr().out


def test_a_gang_over_both_machines_with_a_secret(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Submitted by URL and fingerprint, its logs are read back over the same connection."""
    address = joined.remote.address
    monkeypatch.setenv("CORDEE_URL", address.url)
    monkeypatch.setenv("CORDEE_TOKEN", address.token)
    monkeypatch.setenv("CORDEE_FINGERPRINT", address.fingerprint or "")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meets.py").write_text(MEETS)
    assert code_of("nodes", "cordon", "local", "--why", "the gang is for the others") == 0
    words = ["--gpus", "4", "--name", "gang", "--secret", "HF_TOKEN", "--follow", "--", sys.executable, "meets.py"]
    assert code_of("run", *words) == 0
    said = capfd.readouterr().out
    job = joined.remote.job("gang")
    assert job.attempts[0].leases == {"gpu-1": [0, 1], "gpu-2": [0, 1]}
    assert "met 1@gpu-1 2@gpu-2 3@gpu-2" in said
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    for rank in range(4):
        assert f"rank {rank} has {digest} of [HF_TOKEN]" in said
    assert not (joined.home / "secrets").exists()
    for place in (joined.home, joined.machine("gpu-1"), joined.machine("gpu-2")):
        held = [path for path in place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        assert not held
    assert code_of("nodes", "uncordon", "local") == 0


def test_a_machine_that_joined_does_not_join_twice(joined: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = joined.token(capsys)
    folder = ["--folder", str(joined.machine("gpu-1"))]
    assert code_of("nodes", "join", *words, *folder) == InputError.exit_code
    assert "this machine is node gpu-1 already" in capsys.readouterr().err
    other = ["--folder", str(joined.machine("another"))]
    assert code_of("nodes", "join", *words, "--name", "gpu-2", *other) == NameTakenError.exit_code
    said = capsys.readouterr().err
    assert "the name gpu-2 is taken: " in said
    assert "--name" in said and "cordee nodes leave gpu-2" in said
    assert not (joined.machine("another") / "agent.json").exists()


def test_what_is_refused_before_anything_is_written(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    url, token = cluster.token(capsys)
    folder = cluster.machine("refused")
    wrong = write_join_token(token.partition(".")[0], OTHER_FINGERPRINT)
    cases: list[tuple[int, str, list[str]]] = [
        (CertificateError.exit_code, f"not {OTHER_FINGERPRINT}", [url, wrong]),
        (TokenError.exit_code, "the join token is unknown", [url, f"x{token}"]),
        (InputError.exit_code, "not a join token", [url, token[:-9]]),
        (InputError.exit_code, "a join token is needed", [url]),
        (InputError.exit_code, "the label 'r7' is not KEY=VALUE", [url, token, "--label", "r7"]),
        (InputError.exit_code, "is not the URL of a server", ["head:8470", token]),
        (InputError.exit_code, "need the URL and a token", ["--name", "gpu-9"]),
        (InputError.exit_code, "this machine has not joined", []),
    ]
    for code, said, words in cases:
        assert code_of("nodes", "join", *words, "--folder", str(folder)) == code, words
        assert said in capsys.readouterr().err
    assert not (folder / "agent.json").exists()


def test_a_node_leaves_by_itself_and_is_gone(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = cluster.token(capsys)
    folder = ["--folder", str(cluster.machine("gpu-3"))]
    assert code_of("nodes", "join", *words, "--name", "gpu-3", "--slots", "1", *folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["node"] == "gpu-3"
    cluster.until(lambda: any(node.name == "gpu-3" and node.up for node in cluster.remote.nodes()))
    assert code_of("nodes", "leave", "--here", *folder) == 0
    assert "gpu-3 has left" in capsys.readouterr().out
    cluster.until(lambda: all(node.name != "gpu-3" for node in cluster.remote.nodes()))
    assert not (cluster.machine("gpu-3") / "agent.json").exists()


def processes(place: Path) -> tuple[psutil.Process, psutil.Process]:
    """Return the keeper and the agent of a folder, which this process has started."""
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    [keeper] = [each for each in alive if str(place) in each.cmdline()]
    [agent] = keeper.children()
    return keeper, agent


def test_an_agent_that_is_killed_is_replaced_by_one_that_ends_its_ranks(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = cluster.machine("gpu-5")
    folder = ["--folder", str(place)]
    assert code_of("nodes", "join", *cluster.token(capsys), "--name", "gpu-5", "--slots", "1", *folder) == 0
    others = [node.name for node in cluster.remote.nodes() if node.name != "gpu-5"]
    for name in others:
        cluster.remote.cordon(name, why="the job is for gpu-5")
    rank = "import os, time\nopen(os.environ['CORDEE_EPOCH'], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    spec = {"name": "outlives", "run": [sys.executable, "-c", rank], "gpus": 1, "cwd": str(tmp_path)}
    job = cluster.remote.submit(spec).job.job_id

    def pid(epoch: int) -> int:
        path = tmp_path / str(epoch)
        cluster.until(lambda: path.exists() and path.read_text())
        return int(path.read_text())

    first, (keeper, agent) = pid(1), processes(place)
    agent.kill()
    cluster.until(lambda: not psutil.pid_exists(first))
    assert pid(2) != first
    again = processes(place)
    assert again[0] == keeper and again[1] != agent
    cluster.remote.stop(job, now=True)
    for name in others:
        cluster.remote.uncordon(name, why="")
    assert code_of("nodes", "leave", "--here", *folder) == 0
    assert keeper.wait(DEADLINE_S) == 0, "the agent was asked to end, so nobody is started again"


def test_an_agent_is_started_again_without_a_token(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a reboot of its machine."""
    words = cluster.token(capsys)
    place = cluster.machine("gpu-4")
    folder = ["--folder", str(place)]
    assert code_of("nodes", "join", *words, "--name", "gpu-4", "--slots", "1", *folder) == 0
    keeper, agent = processes(place)
    keeper.kill()
    agent.kill()
    psutil.wait_procs([keeper, agent])
    assert not is_running(place)
    assert code_of("nodes", "join", *folder) == 0
    assert "gpu-4 has joined https://" in capsys.readouterr().out
    assert code_of("nodes", "leave", "gpu-4", "--home", str(cluster.home)) == 0
    assert capsys.readouterr().out.endswith("gpu-4 has left\n")
    # An agent that was away meanwhile dials once, and ends.
    cluster.until(lambda: not is_running(place))
    argv = [sys.executable, "-m", "cordee", "nodes", "join", "--foreground", *folder]
    away = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert away.returncode == 0 and "refused by the server: node gpu-4 has left" in away.stderr
    assert code_of("nodes", "leave", "gpu-4", "--here", *folder) == InputError.exit_code
    assert code_of("nodes", "leave", "gpu-99", "--home", str(cluster.home)) == NotFoundError.exit_code


def test_a_home_is_connected_once(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = cluster.remote.address
    here, there = ["--home", str(tmp_path)], ["--home", str(cluster.home)]
    pinned = ["--fingerprint", address.fingerprint or ""]
    assert code_of("connect", address.url, address.token, "--fingerprint", OTHER_FINGERPRINT, *here) == 36
    assert code_of("connect", address.url, "another-token-of-nobody", *pinned, *here) == TokenError.exit_code
    assert not (tmp_path / "remote.json").exists()
    capsys.readouterr()
    assert code_of("connect", address.url, address.token, *pinned, *here) == 0
    assert f"connected to {address.url} (Cordee " in capsys.readouterr().out
    assert code_of("nodes", "--json", *here) == 0
    assert any(node["name"] == "local" for node in json.loads(capsys.readouterr().out))
    assert code_of("up", *here) == HomeUnsuitableError.exit_code
    assert "is connected to the server at https://" in capsys.readouterr().err
    assert code_of("connect", address.url, address.token, *pinned, *there) == HomeInUseError.exit_code
    assert code_of("connect", "--forget", *here) == 0
    assert code_of("connect", *here) == 31
    assert "no server runs on" in capsys.readouterr().err


def test_a_head_that_is_no_node_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(tmp_path / "head")]
    try:
        assert code_of("up", "--on", "none", "--listen", "127.0.0.1:0", *home) == 0
        said = capsys.readouterr().out
        assert "other machines reach it at https://127.0.0.1:" in said and "cordee nodes token" in said
        assert code_of("nodes", "--json", *home) == 0
        assert json.loads(capsys.readouterr().out) == []
        assert code_of("nodes", *home) == 0
        assert "no node" in capsys.readouterr().out
    finally:
        assert code_of("down", "--yes", *home) == 0
