"""A version of an artifact is served on a node that sees nothing of the server's disk, until its tag moves."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines_world import FLAGS, RunningEngine, until_ended

from cordee.agent.settings import AgentSettings
from cordee.artifacts import ArtifactClient, PushWanted
from cordee.cli.main import main
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server
from cordee.errors import InputError
from cordee.telemetry.host import free_port


def until(done: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the home of a server without free slots, with a gateway, and with a node `n1` in a folder of its own."""
    home, node = tmp_path / "home", tmp_path / "n1"
    start_server(home, slots="1", gateway=str(free_port()))
    url = str(json.loads((home / "server.json").read_text())["url"])
    token = DerivedTokens((home / "token").read_text().strip()).issue("n1")
    AgentSettings(node="n1", servers=(url,), token=token, slots=2).write(node)
    env = {**os.environ, "CORDEE_MODELS": str(tmp_path / "models")}
    with (node / "agent.log").open("wb") as log:
        argv = [sys.executable, "-m", "cordee.agent", "--folder", str(node)]
        agent = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)
    with Client(home) as client:
        until(lambda: {each.name for each in client.nodes() if each.up} == {"local", "n1"}, "both nodes are up")
        client.cordon("local")
        yield home
        client.down()
    until_ended(home)
    agent.terminate()
    agent.wait(60)


def verb(home: Path, *words: str) -> None:
    try:
        main([*words, "--home", str(home)])
    except SystemExit as end:
        assert not end.code


def answer(url: str, prompt: str = "def main") -> str:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as found:
        return str(json.loads(found.read())["choices"][0]["text"])


def test_an_artifact_is_served_elsewhere_until_its_tag_moves(
    home: Path, tiny_folder: Path, llama: RunningEngine, tmp_path: Path
) -> None:
    plain, gguf = tmp_path / "plain", tmp_path / "gguf"
    shutil.copytree(tiny_folder, plain, ignore=shutil.ignore_patterns("*.gguf"))
    gguf.mkdir()
    shutil.copy(tiny_folder / "tiny.gguf", gguf / "model.gguf")
    status, alone = llama.ask("/completion", {"prompt": "def main", "n_predict": 24, "temperature": 0})
    expected = str(json.loads(alone)["content"])
    assert status == 200
    flags = [f"--flag={name[2:]}={value if value != '' else 'true'}" for name, value in FLAGS.items()]
    with Client(home) as client:
        artifacts = ArtifactClient(client)
        artifacts.push(plain, "team/tiny", PushWanted(tag="best"))
        verb(home, "serve", "run", "artifact:team/tiny:best", "--context", "512", "--drain", "1s", "--follow", *flags)
        until(lambda: client.service("tiny").urls, "the gateway says where it is")
        found = client.service("tiny")
        assert [(each.node, each.model) for each in found.replicas] == [("n1", "artifact:team/tiny:1")]
        assert answer(found.urls[0]) == expected, "the same weights, whichever way they came"
        assert len(list((tmp_path / "n1" / "artifacts" / "chunks").rglob("*"))) > 2, "they lie on the node"
        with pytest.raises(InputError, match=r"team/tiny:1 has the tag best"):
            artifacts.remove("team/tiny:1")
        # The tag moves; the service stays as it was declared until it is updated, and nobody takes its version away.
        artifacts.push(gguf, "team/tiny", PushWanted(tag="best"))
        assert [each.model for each in client.service("tiny").replicas] == ["artifact:team/tiny:1"]
        with pytest.raises(InputError, match=r"team/tiny:1 is served by tiny"):
            artifacts.remove("team/tiny:1")
        verb(home, "serve", "update", "tiny", "--follow")
        until(
            lambda: [each.model for each in client.service("tiny").replicas] == ["artifact:team/tiny:2"],
            "the replica of the first version leaves",
        )
        assert answer(found.urls[0]) == expected, "a file of GGUF made from the same weights"
        artifacts.remove("team/tiny:1")
        verb(home, "serve", "stop", "tiny", "--wait")
