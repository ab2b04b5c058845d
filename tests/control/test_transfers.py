"""Logs of ranks come from their nodes, files of jobs go there: each node by its own token, for its own attempts."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from api_scene import SPEC, Api
from stage import NODE

from cordee.agent import log_shipping
from cordee.agent.log_shipping import LogShipper
from cordee.agent.settings import AgentSettings
from cordee.agent.uplink import Uplink, UplinkError
from cordee.artifacts import ArtifactClient, PushWanted
from cordee.control import logs
from cordee.control.home import Home
from cordee.control.listen import Listener
from cordee.control.node_tokens import DerivedTokens
from cordee.events import NodeUp, Outcome, RanksEnded
from cordee.ids import JobId
from cordee.storage.content import pack, unpack
from cordee.storage.registry.manifest import ArtifactManifest
from cordee.storage.tree import Tree, TreeFile, digest_of


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def node_token(api: Api, node: str) -> str:
    tokens = DerivedTokens("secret")
    api.operations.members = replace(api.operations.members, derived=tokens)
    return tokens.issue(node)


class Nodes:
    """Two nodes that hold one attempt, by the folders of their agents."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.uplinks: list[Uplink] = []
        for name in ("n1", "n2"):
            node = replace(NODE, name=name, gpus=2)
            api.scene.agents.report(NodeUp(at_us=api.scene.time.now_us(), node=node), f"node/{name}/1")
        api.client.cordon("local")
        api.scene.control.tick()
        content = b"print(1)"
        tree = Tree(root="/x", files=(TreeFile("train.py", "file", len(content), digest_of(content)),)).encode()
        self.digests = [digest_of(tree), digest_of(content)]
        api.client.send_files(pack(self.digests, dict(zip(self.digests, (tree, content), strict=True)).__getitem__))
        spec = SPEC | {"gpus": 4, "files": self.digests[0]}
        self.job_id = api.client.submit(spec).job.job_id
        api.scene.control.tick()
        assert sorted(api.client.job(self.job_id).attempts[0].leases) == ["n1", "n2"]

    def end(self) -> None:
        """End the ranks of the attempt, so that the GPUs are free for the next job."""
        now_us, job_id = self.api.scene.time.now_us(), JobId(self.job_id)
        for node in ("n1", "n2"):
            ended = RanksEnded(at_us=now_us, job_id=job_id, epoch=1, node=node, outcome=Outcome.KILLED)
            self.api.scene.agents.report(ended, f"node/{node}/1")
        for _ in range(2):
            self.api.scene.control.tick()

    def uplink(self, node: str, of: str | None = None) -> Uplink:
        folder = self.folder / node
        token = node_token(self.api, of or node)
        AgentSettings(node=node, servers=(self.api.url,), token=token).write(folder)
        self.uplinks.append(Uplink(folder))
        return self.uplinks[-1]

    def log(self, node: str, name: str = "rank0.log") -> Path:
        path = self.folder / node / "attempts" / self.job_id / "1" / node / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def received(self, node: str, name: str = "rank0.log") -> bytes:
        path = self.api.operations.home / "attempts" / self.job_id / "1" / node / "logs" / name
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def nodes(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(api, tmp_path_factory.mktemp("nodes"))
    yield nodes
    for uplink in nodes.uplinks:
        uplink.close()


def test_a_part_is_appended_where_the_log_ends_and_nowhere_else(nodes: Nodes) -> None:
    uplink = nodes.uplink("n1")
    assert uplink.put_log(nodes.job_id, 1, "rank0.log", 0, b"one\n") == 4
    assert uplink.put_log(nodes.job_id, 1, "rank0.log", 0, b"one\n") == 4, "sent again, since the answer was lost"
    assert uplink.put_log(nodes.job_id, 1, "rank0.log", 9, b"gap") == 4
    assert uplink.put_log(nodes.job_id, 1, "rank0.log", 4, b"two\n") == 8
    assert nodes.received("n1") == b"one\ntwo\n"
    for job_id, epoch, name, start in (
        *((nodes.job_id, 1, "..%2Fevil.log", 0), (nodes.job_id, 1, "rank0.sh", 0), (nodes.job_id, 2, "rank0.log", 0)),
        *(("other-abcdef", 1, "rank0.log", 0), (nodes.job_id, 1, "rank0.log", logs.LOG_BYTES_MAX)),
    ):
        with pytest.raises(UplinkError) as refused:
            uplink.put_log(job_id, epoch, name, start, b"x")
        assert not refused.value.again
    assert len(list((nodes.api.operations.home / "attempts").rglob("*.log"))) == 1


def test_a_node_gets_the_files_of_its_own_attempts_only(nodes: Nodes) -> None:
    uplink = nodes.uplink("n1")
    assert [digest for digest, _ in unpack(uplink.files(nodes.job_id, 1, nodes.digests))] == nodes.digests
    foreign = digest_of(b"of another job")
    nodes.api.client.send_files(pack([foreign], lambda _: b"of another job"))
    for asked in ((nodes.job_id, 1, [foreign]), (nodes.job_id, 2, nodes.digests), ("x-abcdef", 1, nodes.digests)):
        with pytest.raises(UplinkError) as refused:
            uplink.files(*asked)
        assert not refused.value.again
    with pytest.raises(UplinkError, match="n2"):
        nodes.uplink("n1", of="n2").files(nodes.job_id, 1, nodes.digests)
    user = httpx.get(
        f"{nodes.api.url}/v1/jobs", headers={"Authorization": f"Bearer {node_token(nodes.api, 'n1')}"}, timeout=60
    )
    assert user.status_code == 403, "an agent is no user"


def test_a_node_gets_the_artifacts_of_its_own_attempts_only(nodes: Nodes, tmp_path: Path) -> None:
    versions = []
    for word in ("served", "other"):
        (tmp_path / word).write_text(word)
        versions.append(ArtifactClient(nodes.api.client).push(tmp_path / word, word, PushWanted()).version.digest)
    job_id = nodes.api.client.submit(SPEC | {"gpus": 4, "artifacts": [versions[0]]}).job.job_id
    nodes.api.client.stop(nodes.job_id, now=True)
    nodes.api.scene.control.tick()
    nodes.end()
    assert nodes.api.client.job(job_id).epoch == 1
    uplink = nodes.uplink("n1")
    [(digest, data)] = unpack(uplink.artifacts(job_id, 1, "manifests", versions[:1]))
    [chunk] = ArtifactManifest.decode(data).chunks()
    assert digest == versions[0]
    assert [data for _, data in unpack(uplink.artifacts(job_id, 1, "chunks", [chunk.stored]))] == [b"served"]
    for asked in (
        *((job_id, 1, "manifests", versions[1:]), (job_id, 1, "chunks", [digest_of(b"other")])),
        *((job_id, 2, "manifests", versions[:1]), (nodes.job_id, 1, "manifests", versions[:1])),
    ):
        with pytest.raises(UplinkError) as refused:
            uplink.artifacts(*asked)
        assert not refused.value.again
    with pytest.raises(UplinkError, match="n2"):
        nodes.uplink("n1", of="n2").artifacts(job_id, 1, "manifests", versions[:1])


@pytest.fixture
def shipper(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogShipper]:
    monkeypatch.setattr(log_shipping, "RETRY_S_MAX", 0.05)
    monkeypatch.setattr(log_shipping, "PART_BYTES", 1000)
    made = LogShipper(nodes.uplink("n1"), lambda: None)
    yield made
    made.close()


def test_a_log_arrives_as_it_grows_and_whole_before_the_end_is_reported(nodes: Nodes, shipper: LogShipper) -> None:
    path = nodes.log("n1")
    shipper.begin(nodes.folder / "n1" / "attempts", "n1")
    shipper.follow(nodes.job_id, 1, "n1", path.parents[1])
    with path.open("ab", buffering=0) as file:
        file.write(b"first\n")
        until(lambda: nodes.received("n1") == b"first\n")
        assert shipper.holds_until_s is None
        file.write(b"x" * 5000)
        shipper.complete(nodes.job_id, 1)
        until(lambda: shipper.holds_until_s is None)
    assert nodes.received("n1") == b"first\n" + b"x" * 5000


def test_a_new_agent_goes_on_where_the_servers_copy_ends(nodes: Nodes, shipper: LogShipper) -> None:
    nodes.log("n1").write_bytes(b"0123456789" * 300)
    nodes.log("n1", "rank1.log").write_bytes(b"")
    nodes.uplink("n1").put_log(nodes.job_id, 1, "rank0.log", 0, b"0123456789" * 150)
    shipper.begin(nodes.folder / "n1" / "attempts", "n1")
    until(lambda: shipper.holds_until_s is None)
    assert nodes.received("n1") == b"0123456789" * 300
    again = LogShipper(nodes.uplink("n1"), lambda: None)
    again.begin(nodes.folder / "n1" / "attempts", "n1")
    assert again.holds_until_s is None, "they are marked as sent"
    again.close()


def test_another_server_gets_the_log_of_a_rank_that_writes_nothing_more(nodes: Nodes, shipper: LogShipper) -> None:
    path = nodes.log("n1")
    path.write_bytes(b"0123456789" * 300)
    shipper.begin(nodes.folder / "none", "n1")
    shipper.follow(nodes.job_id, 1, "n1", path.parents[1])
    until(lambda: nodes.received("n1") == path.read_bytes())
    shipper.connected()
    shutil.rmtree(nodes.api.operations.home / "attempts")
    shipper.connected()
    until(lambda: nodes.received("n1") == path.read_bytes())


def test_a_log_waits_while_there_is_no_server_and_does_not_hold_the_end_for_ever(
    nodes: Nodes, shipper: LogShipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nodes.log("n1")
    path.write_bytes(b"while the server was away\n")
    AgentSettings(node="n1", servers=("http://127.0.0.1:9",), token="t").write(nodes.folder / "n1")
    monkeypatch.setattr(log_shipping, "HOLD_S", 0.05)
    shipper.begin(nodes.folder / "none", "n1")
    shipper.follow(nodes.job_id, 1, "n1", path.parents[1])
    shipper.complete(nodes.job_id, 1)
    until(lambda: (shipper.holds_until_s or 1e18) < time.monotonic())
    nodes.uplink("n1")
    shipper.connected()
    until(lambda: shipper.holds_until_s is None)
    assert nodes.received("n1") == path.read_bytes()


def test_a_full_disk_keeps_logs_on_the_node(small_disk: Path, tmp_path: Path) -> None:
    api = Api(small_disk)
    nodes = Nodes(api, tmp_path)
    path = nodes.log("n1")
    path.write_bytes(b"kept\n" * 1000)
    with (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(shutil.disk_usage(small_disk).free - 900_000))
    uplink = nodes.uplink("n1")
    with pytest.raises(UplinkError, match=r"disk has \d+ kB left, of which 1\.\d+ MB are kept") as refused:
        uplink.put_log(nodes.job_id, 1, "rank0.log", 0, path.read_bytes())
    assert refused.value.again and nodes.received("n1") == b""
    shipper = LogShipper(uplink, lambda: None)
    shipper.begin(nodes.folder / "n1" / "attempts", "n1")
    (small_disk / "filler").unlink()
    until(lambda: nodes.received("n1") == path.read_bytes())
    shipper.close()
    api.close()


def test_an_agent_pins_the_servers_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    listener = Listener.of(Home(home), "127.0.0.1:0", None, None)
    assert listener is not None
    api = Api(home, listener)
    nodes = Nodes(api, tmp_path)
    token = node_token(api, "n1")
    for fingerprint, sent in ((listener.fingerprint, 4), ("0" * 64, None)):
        AgentSettings(node="n1", servers=(listener.url,), token=token, fingerprint=fingerprint).write(tmp_path / "n1")
        uplink = Uplink(tmp_path / "n1")
        if sent is not None:
            assert uplink.put_log(nodes.job_id, 1, "rank0.log", 0, b"one\n") == sent
        else:
            with pytest.raises(UplinkError, match="another certificate than expected"):
                uplink.put_log(nodes.job_id, 1, "rank0.log", 4, b"two\n")
        uplink.close()
    assert nodes.received("n1") == b"one\n"
    api.close()


def test_the_end_of_a_log_that_is_too_long_says_where_the_rest_is(
    nodes: Nodes, shipper: LogShipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipping, "LOG_BYTES_MAX", 2500)
    path = nodes.log("n1")
    path.write_bytes(b"x" * 4000)
    shipper.begin(nodes.folder / "n1" / "attempts", "n1")
    until(lambda: shipper.holds_until_s is None)
    received = nodes.received("n1")
    assert received.startswith(b"x" * 2500 + b"\ncordee: this log has more than")
    assert str(path).encode() in received and received.count(b"\n") == 2
