"""What the cloud announces, asked of a stand-in for its metadata service (tests/metadata_service.py)."""

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cordee.agent.reclaim import Reclaims
from cordee.errors import InputError
from cordee.hardware.labels import check_labels
from cordee.telemetry.cloud import Aws, Azure, Cloud, CloudWatch, Gcp, Hint, Http, Reclaim, cloud_here, detect
from metadata_service import MetadataService

ACTION = "/latest/meta-data/spot/instance-action"
EVENTS = "/metadata/scheduledevents"


class Heard:
    """A watch, and what it tells."""

    def __init__(self, service: MetadataService, cloud: Cloud) -> None:
        cloud.every_s = 0.01
        self.news: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.watch = CloudWatch(
            cloud,
            on_reclaim=lambda found: self.news.put(("reclaim", found)),
            on_hint=lambda found: self.news.put(("hint", found)),
            on_withdrawn=lambda found: self.news.put(("withdrawn", found)),
            url=service.url,
        )

    def next(self) -> tuple[str, Any]:
        return self.news.get(timeout=30)


@pytest.fixture
def service() -> Iterator[MetadataService]:
    service = MetadataService()
    yield service
    service.set(preempted="closing")  # lets go of whoever waits for a change
    service.close()


@pytest.fixture
def listen(service: MetadataService) -> Iterator[Callable[[Cloud], Heard]]:
    heard: list[Heard] = []

    def start(cloud: Cloud) -> Heard:
        heard.append(Heard(service, cloud))
        return heard[-1]

    yield start
    for each in heard:
        each.watch.close()
    service.set(preempted="closing")
    for each in heard:
        each.watch.close(30)


def test_aws_says_when_and_what(service: MetadataService, listen: Callable[[Cloud], Heard]) -> None:
    heard = listen(Aws())
    service.until_asked(ACTION, 3)
    assert heard.news.empty(), "404 is the answer as long as nothing is announced"
    service.set(rebalance={"noticeTime": "2026-11-20T10:00:00Z"})
    assert heard.next() == ("hint", Hint(why="rebalance recommendation of 2026-11-20T10:00:00Z"))
    service.tokens.clear()  # they end after six hours
    service.interrupt(120)
    kind, found = heard.next()
    assert kind == "reclaim" and found.why == "spot interruption (terminate)"
    assert 100 < found.left_s() <= 120
    service.until_asked(ACTION, 3)
    assert heard.news.empty(), "it is told once"
    service.interrupt(30)
    assert heard.next()[1].left_s() <= 30, "a new time is told"
    service.set(action=None)
    assert heard.next()[0] == "withdrawn"
    assert service.asked.count("/latest/api/token") == 2, "a token is kept as long as it is taken"


def test_google_tells_who_waits_at_once(service: MetadataService, listen: Callable[[Cloud], Heard]) -> None:
    service.set(maintenance="MIGRATE_ON_HOST_MAINTENANCE")
    heard = listen(Gcp(notice_s=30.0, wait_s=3600))
    service.until_asked("/computeMetadata/v1/instance/maintenance-event", since=0)  # it asks once, and then waits
    assert heard.news.empty(), "who is moved while running need not know"
    service.set(preempted="TRUE")  # the request that waits an hour is answered now
    kind, found = heard.next()
    assert (kind, found.why) == ("reclaim", "preempted") and 0 < found.left_s() <= 30
    assert heard.news.empty()


def test_google_announces_maintenance_that_ends_a_machine(
    service: MetadataService, listen: Callable[[Cloud], Heard]
) -> None:
    service.set(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
    assert listen(Gcp(wait_s=0)).next() == ("hint", Hint(why="maintenance will end this machine"))


def test_azure_speaks_of_other_machines_too(service: MetadataService, listen: Callable[[Cloud], Heard]) -> None:
    service.schedule("Preempt", 30, "trainer_4")
    service.schedule("Freeze", 900)
    heard = listen(Azure())
    service.until_asked(EVENTS, 2)
    assert heard.news.empty(), "another machine's, and a pause of seconds"
    service.schedule("Redeploy", 600)
    kind, found = heard.next()
    assert kind == "hint" and found.why.startswith("redeploy not before ")
    service.schedule("Terminate", 300, "trainer_4", "Trainer_3")
    kind, found = heard.next()
    assert (kind, found.why) == ("reclaim", "terminate") and 200 < found.left_s() <= 300
    service.schedule("Preempt", None)
    kind, found = heard.next()
    assert (kind, found.why) == ("reclaim", "preempt") and found.left_s() == 0.0, "it has started: no time is left"
    service.set(events=[])
    assert heard.next()[0] == "withdrawn"


def test_a_service_that_fails_is_asked_again(
    service: MetadataService, listen: Callable[[Cloud], Heard], caplog: pytest.LogCaptureFixture
) -> None:
    service.set(status=503)
    heard = listen(Azure())
    service.until_asked("/metadata/instance/compute/name", 3)
    service.schedule("Preempt", 30)
    service.set(status=None)
    assert heard.next()[0] == "reclaim"
    lines = [
        record.message for record in caplog.records if record.name == "cordee" and "cannot be asked" in record.message
    ]
    assert len(lines) == 1, "said once, not each second"


@pytest.mark.parametrize(
    "body",
    ["", "[]", '{"action": "stop"}', '{"action": "stop", "time": "soon"}'],
    ids=["empty", "list", "half", "when"],
)
def test_an_answer_that_cannot_be_read_is_no_announcement(service: MetadataService, body: str) -> None:
    service.answer = lambda method, path, query, headers: (200, body, {})  # type: ignore[method-assign]
    with pytest.raises((ValueError, LookupError)):
        Aws().look(Http(service.url))


def test_nobody_there_is_no_announcement_and_ends_no_thread() -> None:
    heard: list[Reclaim] = []
    cloud = Aws()
    cloud.every_s = 0.01
    watch = CloudWatch(cloud, on_reclaim=heard.append, url="http://127.0.0.1:9")
    until_s = time.monotonic() + 30
    while watch._answered is None and time.monotonic() < until_s:
        watch._ended.wait(0.01)
    assert watch._answered is False and watch._thread.is_alive() and not heard
    watch.close(30)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("said", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine\n"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "None"}, None),  # Hyper-V at home
        ({"sys_vendor": "QEMU", "product_name": "Standard PC"}, None),
        ({}, None),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, said: dict[str, str], cloud: str | None) -> None:
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    assert detect(tmp_path) == cloud
    here = cloud_here({}, tmp_path)
    assert (here.name if here else None) == cloud
    assert cloud_here({"CORDEE_CLOUD": "none"}, tmp_path) is None
    told = cloud_here({"CORDEE_CLOUD": "gcp", "CORDEE_CLOUD_NOTICE_S": "120"}, tmp_path)
    assert isinstance(told, Gcp) and told._notice_s == 120.0


def test_a_cloud_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CORDEE_CLOUD=oracle is not known"):
        cloud_here({"CORDEE_CLOUD": "oracle"}, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("URL", "metadata", "cannot be asked"),
        ("URL", "ftp://x", "cannot be asked"),
        ("NOTICE_S", "2m", "is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path, name: str, value: str, why: str) -> None:
    with pytest.raises(InputError, match=f"CORDEE_CLOUD_{name}={value} {why}"):
        cloud_here({"CORDEE_CLOUD": "gcp", f"CORDEE_CLOUD_{name}": value}, tmp_path)


def test_an_agent_lives_with_what_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CORDEE_CLOUD", "oracle")
    reclaims = Reclaims(lambda: None)
    reclaims.start(lambda reclaim: None, lambda reclaim: None, lambda hint: None, lambda labels: None)
    reclaims.take_in()
    reclaims.close()
    assert "CORDEE_CLOUD=oracle is not known" in caplog.text


@pytest.mark.parametrize(
    ("cloud", "values", "labels"),
    [
        (Aws(), {}, {"capacity": "on-demand"}),
        (
            Aws(),
            {"life_cycle": "spot", "group": "train", "partition": "3"},
            {"capacity": "spot", "rack": "train-3"},
        ),
        (Gcp(), {}, {"capacity": "on-demand"}),
        (
            Gcp(),
            {"preemptible": "TRUE", "physical_host": "/c4/7f0a/91bb"},
            {"capacity": "spot", "block": "c4", "rack": "7f0a"},
        ),
        (Azure(), {"priority": "Regular"}, {"capacity": "on-demand"}),
        (Azure(), {"priority": "Spot"}, {"capacity": "spot"}),
    ],
)
def test_the_cloud_says_how_and_where_it_runs_the_machine(
    service: MetadataService, cloud: Cloud, values: dict[str, str], labels: dict[str, str]
) -> None:
    service.set(**values)
    assert cloud.labels(Http(service.url)) == labels
    check_labels(labels)


def test_an_agents_labels_arrive_once_on_its_loop(service: MetadataService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CLOUD", "aws")
    monkeypatch.setenv("CORDEE_CLOUD_URL", service.url)
    service.set(life_cycle="spot")
    woken: queue.Queue[None] = queue.Queue()
    found: list[Mapping[str, str]] = []
    reclaims = Reclaims(lambda: woken.put(None))
    reclaims.start(lambda reclaim: None, lambda reclaim: None, lambda hint: None, found.append)
    woken.get(timeout=30)
    assert found == []
    reclaims.take_in()
    reclaims.close()
    assert found == [{"capacity": "spot"}]
