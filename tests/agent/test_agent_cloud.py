"""The cloud reclaims an agent's machine; tests/metadata_service.py stands in for its metadata service."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_world import World

from cordee.events import NodeReclaimed, NodeUp, Outcome
from cordee.telemetry.notices import read_hint
from metadata_service import MetadataService

LEAVES = """
import os, signal, sys, time
from pathlib import Path
def leave(*_):
    print("notice", (Path(os.environ["CORDEE_SPOOL"]) / "notice.json").read_text(), flush=True)
    while sys.argv[1] == "stays":
        time.sleep(60)
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
print("ready", os.environ["CORDEE_CLOUD"], flush=True)
while True:
    time.sleep(0.1)  # a handler that comes just before a sleep waits for its end
"""


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    service = MetadataService()
    for name, value in {"": "gcp", "_URL": service.url, "_NOTICE_S": "20"}.items():
        monkeypatch.setenv(f"CORDEE_CLOUD{name}", value)
    yield service
    service.set(preempted="closing")
    service.close()


@pytest.fixture
def cloud_world(google: MetadataService, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    (world.home / "leaves.py").write_text(LEAVES)
    yield world
    world.close()


def test_ranks_and_server_get_a_reclaim_and_it_can_be_withdrawn(google: MetadataService, cloud_world: World) -> None:
    world = cloud_world
    world.start([sys.executable, "leaves.py", "leaves"], on_preempt={"grace_s": 60})
    world.logged("ready none")  # the ranks need not ask
    google.set(preempted="TRUE")
    assert world.ended().outcome is Outcome.CHECKPOINTED
    reclaimed = next(event for event in world.log if isinstance(event, NodeReclaimed))
    assert reclaimed.node == "local" and reclaimed.epoch == 1
    text = world.log_text("rank0.log")
    notice = json.loads(text[text.index("{") : text.index("}") + 1])
    assert notice["machine_stays"] is False
    assert abs(notice["deadline_us"] - reclaimed.deadline_us) < 1_000_000, (
        "the cloud's time, which is before the grace's"
    )
    assert reclaimed.deadline_us / 1e6 - 20 <= time.time()
    google.set(preempted="FALSE")
    world.until(lambda: [e for e in world.log if isinstance(e, NodeUp) and e.node.epoch == 2], "another agent's claim")


@pytest.mark.soak  # Google's maintenance is asked for each 11 s
def test_the_ranks_get_a_hint(google: MetadataService, cloud_world: World) -> None:
    cloud_world.start([sys.executable, "leaves.py", "leaves"])
    cloud_world.logged("ready")
    google.set(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
    spool = cloud_world.folder() / "spool"
    _, why = cloud_world.until(lambda: read_hint(spool), "the hint")
    assert why == "maintenance will end this machine"


def test_a_second_notice_counts_if_it_leaves_less_time(google: MetadataService, cloud_world: World) -> None:
    world = cloud_world
    world.start([sys.executable, "leaves.py", "stays"], on_preempt={"grace_s": 60})
    world.logged("ready")
    world.notice(50)
    world.logged('"machine_stays": true')
    google.set(preempted="TRUE")
    path = world.folder() / "spool" / "notice.json"
    world.until(lambda: not json.loads(path.read_text())["machine_stays"], "the second notice")
    world.notice(0.1)
    assert world.ended().outcome is Outcome.KILLED
    assert world.log_text("rank0.log").count("notice") == 1, "one SIGTERM"
    assert json.loads(path.read_text())["machine_stays"] is False
