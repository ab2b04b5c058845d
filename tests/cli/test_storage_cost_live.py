"""`cordee cost --storage` of a real server: two owners with checkpoints and artifacts, a dataset in a node's cache."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from verbs import code_of

from cordee.account import storage
from cordee.artifacts import ArtifactClient, PushWanted
from cordee.cli import cost_storage
from cordee.client import Client

TOKEN = "the-token-of-bea-in-this-home-00"
SAVES = """
import torch, cordee
torch.set_num_threads(1)
with cordee.job({"w": torch.zeros(50_000)}, every=1) as job:
    for step in job.steps(4):
        pass
"""
SET_BYTES = 300_000


@pytest.fixture
def home(s3: Any, tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "tokens").write_text(f"bea {TOKEN}\n")
    (home / "tokens").chmod(0o600)
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    assert code_of("up", "--home", str(home), "--slots", "1") == 0
    yield home
    assert code_of("down", "--home", str(home)) == 0


@pytest.mark.soak
def test_what_two_owners_store_and_what_a_cache_has_saved(
    s3: Any, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, to = "s3://bucket/set", str(tmp_path / "checkpoints")
    bucket = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3.behind}")
    bucket.put_object(Bucket="bucket", Key="set/0.bin", Body=b"x" * SET_BYTES)
    bucket.close()
    (tmp_path / "saves.py").write_text(SAVES)
    with Client(home) as ours, Client(url=ours.url, token=TOKEN) as beas:
        for client in (ours, beas):
            run = {"run": [sys.executable, str(tmp_path / "saves.py")], "gpus": 1, "name": "saves"}
            more = {"data": {"sets": [url], "wait_s": "all"}, "checkpoint": {"to": to, "keep": "4"}}
            job = client.submit(run | more, unprotected=True).job
            said = list(client.logs(job.job_id, follow=True))
            assert client.job(job.job_id).state == "done", said
        for version in range(3):
            (tmp_path / "weights.bin").write_bytes(bytes([version]) + b"not a pickle" * 1000)
            ArtifactClient(beas).push(tmp_path / "weights.bin", "beas", PushWanted(base="none"))
        ArtifactClient(beas).tag("beas:1", "best")
        owner = ours.job(ours.jobs()[-1].job_id).owner
    later_us = storage.IDLE_US + 86_400_000_000
    monkeypatch.setattr(cost_storage, "_now_us", lambda now_us=cost_storage._now_us: now_us() + later_us)
    found = shown(capsys, home)
    rows = {row["owner"]: row for row in found["rows"]}
    assert set(rows) == {owner, "bea"}
    assert min(row["checkpoint_bytes"] for row in rows.values()) > 4 * 200_000
    assert rows["bea"]["artifact_bytes"] > 0 == rows[owner]["artifact_bytes"]
    [cached] = found["cached"]
    sizes = {name: cached[name] for name in ("nodes", "held_bytes", "found_bytes", "fetched_bytes")}
    assert (cached["url"], sizes) == (
        url, {"nodes": 1, "held_bytes": SET_BYTES, "found_bytes": SET_BYTES, "fetched_bytes": SET_BYTES}
    )  # fmt: skip
    assert {each["what"].partition(" of ")[0] for each in found["deletions"]} == {"checkpoints", "beas:2"}
    for deletion in found["deletions"]:
        first = deletion["command"].partition(" && ")[0]
        home_of = [] if deletion["kind"] == "checkpoint" else ["--home", str(home)]
        assert code_of(*shlex.split(first)[1:], *home_of) == 0, first
    left = shown(capsys, home)
    assert left["deletions"] == [], "what was removed is not proposed again"


def shown(capsys: pytest.CaptureFixture[str], home: Path) -> Any:
    capsys.readouterr()
    assert code_of("cost", "--storage", "--json", "--home", str(home)) == 0
    return json.loads(capsys.readouterr().out)
