"""A knowledge base as its users have it: built, served by a server, an agent and a gateway, asked with a key, paid."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines_world import FLAGS, until_ended

sys.path.insert(0, str(Path(__file__).parents[2] / "cli"))

from verbs import code_of, run

from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.telemetry.host import free_port

CORDEE = (sys.executable, "-m", "cordee")


@dataclass
class Served:
    """A service of a knowledge base behind a gateway."""

    home: Path
    client: Client
    index: Path
    url: str
    secret: str

    def ask(self, question: str, key: str = "", **more: Any) -> bytes:
        messages = [{"role": "user", "content": question}]
        body = {"model": "rag/kb", "messages": messages, "max_tokens": 6, "temperature": 0, **more}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.secret}"}
        asked = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return bytes(answer.read())


def until(found: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 120
    while not found():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("service")
    docs, kb, home = place / "docs", place / "kb", place / "home"
    docs.mkdir()
    (docs / "rope.md").write_text("# Ropes\n\nA rope holds a fall. Its sheath wears.\n")
    (docs / "snow.md").write_text("# Snow\n\nSnow falls in October above the hut.\n")
    assert code_of("rag", "build", str(kb), str(docs)) == 0
    flags = [f"--flag {name.lstrip('-')}={value}" for name, value in FLAGS.items()]
    words = [
        *CORDEE, "rag", "serve", str(kb), "--generator", str(tiny_folder / "tiny.gguf"), "--name", "kb", "--slots 2",
        "--context 1024", "--top 1", "--memory 2GB", "--listen $CORDEE_HOST:$CORDEE_PORT", *flags,
    ]  # fmt: skip
    spec = place / "kb.yaml"
    service = {"engine": "command", "model": "rag/kb", "drain": "1s"}
    spec.write_text(json.dumps({"name": "kb", "gpus": 1, "run": " ".join(words), "service": service}))
    start_server(home, slots="1", gateway=str(free_port()))
    try:
        with Client(home) as client:
            client.set_tenant("acme")
            secret = client.create_key("acme", models=["kb"]).secret
            words = [*CORDEE, "serve", "run", str(spec)]
            subprocess.run(words, check=True, env={**os.environ, "CORDEE_HOME": str(home)}, stdout=subprocess.PIPE)

            def ready() -> bool:
                found = client.service("kb")
                assert found.state != "failed", found
                return bool(found.urls) and [each.state for each in found.replicas] == ["ready"]

            until(ready, "the service is ready")
            yield Served(home, client, kb, client.service("kb").urls[0], secret)
    finally:
        with Client(home) as client:
            client.down()
        until_ended(home)


def test_a_tenant_asks_and_pays_for_both_parts(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(served.ask("when does snow fall?"))
    assert whole["model"] == "rag/kb" and [each["title"] for each in whole["citations"]] == ["Snow"]
    raw = served.ask("when does snow fall?", stream=True)
    events = [json.loads(each[6:]) for each in raw.split(b"\n\n") if each.startswith(b"data: {")]
    assert raw.endswith(b"data: [DONE]\n\n") and events[0]["citations"] == whole["citations"]
    said = "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
    assert said == whole["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.ask("when does snow fall?", "sk-of-nobody")
    assert refused.value.code == 401

    def counted() -> Any:
        return next((each.tokens for each in served.client.usage("tenant").rows if each.key == "acme"), None)

    # A gateway that ends reports at once what its clients have used; the server starts the next one.
    os.kill(int((served.home / "gateway.pid").read_text().split()[0]), signal.SIGTERM)
    until(lambda: (found := counted()) is not None and found.requests == 2, "both requests are in the ledger")
    usages = [whole["usage"], events[-1].get("usage") or events[-2]["usage"]]
    assert counted().retrieval_us == sum(each["retrieval_us"] for each in usages) > 0
    assert counted().generation_us == sum(each["generation_us"] for each in usages) > 0
    monkeypatch.setenv("CORDEE_HOME", str(served.home))
    code, out, _ = run(capsys, "cost", "--by", "tenant")
    assert code == 0 and "acme: requests spent" in out and "in retrieval and" in out


def test_a_served_index_follows_its_documents_and_the_log_has_its_changes(served: Served, tmp_path: Path) -> None:
    food = tmp_path / "food.txt"
    food.write_text("Oats and nuts for the glacier.")
    assert code_of("rag", "add", str(served.index), str(food)) == 0

    def cited() -> bool:
        try:
            answer = json.loads(served.ask("oats for the glacier"))
        except OSError:  # The next gateway is being started.
            return False
        return bool(answer["citations"][0]["document"] == str(food))

    until(cited, "the new document is found")
    events = (served.index / "events.jsonl").read_text()
    assert "RLIMIT_DATA keeps this process" in events or "the cgroup keeps" in events
    kinds = [event.what for _, event in served.client.events() if type(event).__name__ == "RagChanged"]
    assert "partitions" in kinds, "the server's log has the changes"
