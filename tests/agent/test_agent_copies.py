"""Copies of submitted files on a node: what they have, what is fetched, what points into them, and when they go."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_world import World

from cordee.agent.copies import NAME, Copied, Copies, CopyError, files_of_job, placed
from cordee.agent.launch import Assignment
from cordee.agent.uplink import UplinkError
from cordee.events import Lease, Outcome, RanksStarted
from cordee.storage.content import Contents, pack
from cordee.storage.files import FileBlobs
from cordee.storage.folder import FilesWanted, capture
from cordee.storage.registry.store import ArtifactStore, files_below, key_of
from cordee.storage.tree import Tree, digest_of


class Server:
    """The server's end of an uplink, in memory."""

    def __init__(self, folder: Path) -> None:
        captured = capture(folder)
        self.tree, where = captured.tree, captured.contents
        self.held = {digest: each.read_bytes() for digest, each in where.items() if isinstance(each, Path)}
        self.held[self.digest] = self.tree.encode()
        self.asked: list[list[str]] = []
        self.down: UplinkError | None = None

    @property
    def digest(self) -> str:
        return digest_of(self.tree.encode())

    def files(self, job_id: str, epoch: int, digests: list[str]) -> bytes:
        self.asked.append(digests)
        if self.down is not None:
            raise self.down
        return pack(digests, self.held.__getitem__)

    def close(self) -> None:
        """Nothing is open."""


class ArtifactServer(Server):
    """A server that has a version of an artifact as well."""

    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__(folder)
        self.store = ArtifactStore(FileBlobs(store))
        self.version = self.store.push(files_below(folder), "other").manifest.digest

    def artifacts(self, job_id: str, epoch: int, kind: str, digests: list[str]) -> bytes:
        self.asked.append(digests)
        if self.down is not None:
            raise self.down
        return pack(digests, lambda each: self.store.blobs.get(key_of(kind, each)) or b"")


class Node:
    """A node whose copies are made; `made` waits for one."""

    def __init__(self, folder: Path, server: Server | None, contents: Path | None = None) -> None:
        self.folder = folder
        self._woken = threading.Semaphore(0)
        self.contents = Contents(contents or folder / "files")
        uplink, artifacts = (None, None) if server is None else (lambda: server, folder / "artifacts")
        self.copies = Copies(self.contents, uplink, self._woken.release, artifacts)  # type: ignore[arg-type]

    def made(self, order: Assignment) -> tuple[Copied, Path]:
        group = self.folder / "attempts" / order.job_id / str(order.epoch) / order.node
        self.copies.make(order, group)
        assert self._woken.acquire(timeout=60)
        [copied] = self.copies.made()
        return copied, group


def order(digest: str, epoch: int = 1) -> Assignment:
    return Assignment(
        job_id="gpt-abcdef",
        epoch=epoch,
        node="n1",
        leases=(Lease(node="n1", gpus=(0,)),),
        spec={"run": ["python3", "train.py"], "files": digest, "cwd": "/gone"},
        master_addr="127.0.0.1",
        master_port=1,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "src" / "model.py").write_text("layers = 2")
    return folder


@pytest.fixture
def server(project: Path) -> Server:
    return Server(project)


def test_a_node_fetches_each_content_once_and_makes_each_copy_anew(
    tmp_path: Path, project: Path, server: Server
) -> None:
    shutil.rmtree(project)
    node = Node(tmp_path / "F", server)
    first, group = node.made(order(server.digest))
    assert first.why == "" and first.spec["cwd"] == str(group / NAME)
    assert (group / NAME / "src" / "model.py").read_text() == "layers = 2"
    assert [len(each) for each in server.asked] == [1, 2]
    (group / NAME / "train.py").write_text("changed by the job")
    second, other = node.made(order(server.digest, epoch=2))
    assert (other / NAME / "train.py").read_text() == "print(1)" and len(server.asked) == 2
    assert second.spec["cwd"] != first.spec["cwd"]


@pytest.mark.parametrize("with_files", [False, True])
def test_a_node_fetches_the_artifacts_that_its_ranks_read(tmp_path: Path, project: Path, with_files: bool) -> None:
    server = ArtifactServer(project, tmp_path / "store")
    node, wanted = Node(tmp_path / "F", server), order(server.digest)
    spec = wanted.spec | {"artifacts": [server.version]} | ({} if with_files else {"files": None})
    copied, group = node.made(replace(wanted, spec=spec))
    assert copied.why == "" and (group / NAME / "train.py").exists() == with_files
    here = ArtifactStore(FileBlobs(Path(copied.spec["env"]["CORDEE_ARTIFACTS"])))
    here.pull(here.read(server.version), tmp_path / "out")
    assert (tmp_path / "out" / "src" / "model.py").read_text() == "layers = 2"
    asked = len(server.asked)
    node.made(replace(wanted, spec=spec, epoch=2))
    assert len(server.asked) == asked
    server.down = UplinkError("it reads no artifacts", again=False)
    refused, _ = node.made(replace(wanted, spec=spec | {"artifacts": ["0" * 64]}))
    assert refused.why == "its artifacts cannot be fetched: it reads no artifacts"
    own = Node(tmp_path / "G", None, tmp_path / "F" / "files")
    assert "CORDEE_ARTIFACTS" not in own.made(replace(wanted, spec=spec))[0].spec.get("env", {}), "it sees the store"


def test_a_damaged_content_is_fetched_again(tmp_path: Path, server: Server) -> None:
    node = Node(tmp_path / "F", server)
    node.made(order(server.digest))
    for text, count in (("print(1)", 3), ("layers = 2", 4)):
        digest = digest_of(text.encode())
        (tmp_path / "F" / "files" / digest[:2] / digest).write_text("print(0)")
        _, group = node.made(order(server.digest, epoch=count))
        assert (group / NAME / "train.py").read_text() == "print(1)"
        assert len(server.asked) == count and server.asked[-1] == [digest]


def test_a_node_of_the_servers_machine_reads_its_contents_and_says_when_they_are_lost(
    tmp_path: Path, server: Server
) -> None:
    Contents(tmp_path / "home").add(server.held.items(), durable=False)
    node = Node(tmp_path / "F", None, tmp_path / "home")
    copied, group = node.made(order(server.digest))
    assert copied.why == "" and (group / NAME / "train.py").exists() and not (tmp_path / "F" / "files").exists()
    shutil.rmtree(tmp_path / "home")
    lost, _ = node.made(order(server.digest, epoch=2))
    assert lost.why.startswith("its files cannot be laid out: the server has lost 1 content")


def test_a_refusal_ends_the_attempt_and_an_absent_server_does_not(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordee.agent.copies.RETRY_S", 0.01)
    node = Node(tmp_path / "F", server)
    server.down = UplinkError("gpt-abcdef.1 is no attempt on n1", again=False)
    assert "is no attempt on n1" in node.made(order(server.digest))[0].why
    server.down = UplinkError("no server runs", again=True)
    back = threading.Thread(target=lambda: (_until(lambda: len(server.asked) > 3), setattr(server, "down", None)))
    back.start()
    assert node.made(order(server.digest, epoch=2))[0].why == ""
    back.join()


def _until(true: object) -> None:
    assert callable(true)
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_copy_goes_unless_the_job_wrote_into_it(tmp_path: Path, server: Server) -> None:
    node = Node(tmp_path / "F", server)
    for epoch, name in ((1, None), (2, "__pycache__/a.pyc"), (3, "results.csv"), (4, "train.py")):
        _, group = node.made(order(server.digest, epoch=epoch))
        if name is not None:
            (group / NAME / name).parent.mkdir(exist_ok=True)
            (group / NAME / name).write_text("1,2")
        node.copies.remove(f"gpt-abcdef.{epoch}", group)
        if epoch <= 2:
            _until(lambda group=group: not (group / NAME).exists())
        else:
            assert name in [path.name for path in files_of_job(group / NAME)]
            assert (group / NAME / (name or "")).read_text() == "1,2"
    node.copies.close()


def test_the_next_attempt_finds_what_the_job_has_written(tmp_path: Path, server: Server) -> None:
    node = Node(tmp_path / "F", server)
    _, first = node.made(order(server.digest))
    (first / NAME / "out").mkdir()
    (first / NAME / "out" / "losses.csv").write_text("1,2")
    (first / NAME / "train.py").write_text("changed by the job")
    _, third = node.made(order(server.digest, epoch=3))
    assert (third / NAME / "out" / "losses.csv").read_text() == "1,2"
    assert (third / NAME / "train.py").read_text() == "print(1)"
    assert [path.name for path in files_of_job(third / NAME)] == ["losses.csv"]


def test_what_a_fast_job_writes_is_newer_than_its_copy(tmp_path: Path, server: Server) -> None:
    _, group = Node(tmp_path / "F", server).made(order(server.digest))
    (group / NAME / "a.csv").write_text("1,2")
    ready, written = (path.stat().st_ctime_ns for path in (group / "files.ready", group / NAME / "a.csv"))
    assert written - ready > 10_000_000, "more than two ticks of a file system's clock"
    assert [path.name for path in files_of_job(group / NAME)] == ["a.csv"]


def test_nothing_is_carried_through_a_link_into_the_submitters_folder(tmp_path: Path, project: Path) -> None:
    (project / "out").mkdir()
    (project / ".cordeeignore").write_text("out/\n")
    plain, linked = Server(project), Server(project)
    linked.tree = capture(project, FilesWanted(linked=True)).tree
    linked.held = plain.held | {linked.digest: linked.tree.encode()}
    node = Node(tmp_path / "F", plain)
    _, first = node.made(order(plain.digest))
    (first / NAME / "out").mkdir()
    (first / NAME / "out" / "losses.csv").write_text("1,2")
    Contents(tmp_path / "F" / "files").add(linked.held.items(), durable=False)
    _, second = node.made(order(linked.digest, epoch=2))
    assert (second / NAME / "out").is_symlink() and not list((project / "out").iterdir())
    assert (first / NAME / "out" / "losses.csv").read_text() == "1,2"


def test_what_pointed_into_the_folder_points_into_the_copy(project: Path, tmp_path: Path) -> None:
    tree = capture(project, FilesWanted(import_paths=["src"])).tree
    copy = tmp_path / "copy"
    root = str(project)
    spec = {
        "run": ["python", f"{root}/train.py", f"--out={root}/train.py", f"{root}/absent", root, f"{root}2/train.py"],
        "env": {"PYTHONPATH": f"/lib:{root}:{root}/src:{root}/.venv", "DATA": f"{root}/src", "PATH": "/bin"},
    }
    made = placed(spec, tree, copy, "n1")
    assert made["run"] == [
        *("python", f"{copy}/train.py", f"--out={root}/train.py", f"{root}/absent", str(copy), f"{root}2/train.py")
    ]
    assert made["env"] == {
        "PYTHONPATH": f"{copy}/src:/lib:{copy}:{copy}/src:{root}/.venv",
        "DATA": f"{root}/src",
        "PATH": "/bin",
        "CORDEE_FILES": str(copy),
    }
    line = f"cd {root} && A={root}/train.py python '{root}/train.py' {root}2/x {root}/absent; ls {root}/src/"
    wanted = f"cd {copy} && A={copy}/train.py python '{copy}/train.py' {root}2/x {root}/absent; ls {copy}/src"
    assert placed({"run": line}, tree, copy, "n1")["run"] == wanted


def test_the_program_is_the_submitters_or_named_as_missing(project: Path, tmp_path: Path) -> None:
    mine = tmp_path / "env" / "bin" / "python3"
    other = tmp_path / "other" / "python3"
    for each in (mine, other):
        each.parent.mkdir(parents=True)
        each.write_text("#!/bin/sh\n")
        each.chmod(0o755)
    tree = capture(project, FilesWanted(program=str(mine))).tree
    spec = {"run": ["python3", "train.py"], "env": {"PATH": f"{other.parent}:/bin"}}
    assert placed(spec, tree, tmp_path / "copy", "n1")["env"]["PATH"] == f"{mine.parent}:{other.parent}:/bin"
    mine.unlink()
    with pytest.raises(CopyError) as missing:
        placed(spec, tree, tmp_path / "copy", "gpu-3")
    assert f"python3 is {mine} where the job was submitted, and node gpu-3 has no such program" in str(missing.value)
    assert f"its PATH has {other}" in str(missing.value)
    assert Tree.decode(tree.encode()) == tree and os.sep in str(mine)


def stored(world: World, server: Server) -> str:
    Contents(world.home / "files").add(server.held.items(), durable=False)
    return server.digest


def test_an_agent_of_the_servers_machine_runs_a_copy(world: World, project: Path, server: Server) -> None:
    (project / "train.py").write_text("edited")
    world.start(["cat", "train.py"], files=stored(world, server))
    assert world.ended().outcome is Outcome.FINISHED
    assert "print(1)" in world.log_text("rank0.log")
    world.until(lambda: not (world.folder() / NAME).exists(), "the removal of the copy")
    world.start(["true"], epoch=2, files="0" * 64)
    lost = world.ended(epoch=2)
    assert lost.outcome is Outcome.FAILED and "the server has lost 1 content" in lost.why


@pytest.mark.parametrize("order", ["kill", "notice"])
def test_an_attempt_that_ends_before_its_copy_is_made_starts_no_rank(world: World, server: Server, order: str) -> None:
    digest = stored(world, server)
    content = world.home / "files" / digest[:2] / digest
    content.unlink()
    os.mkfifo(content)  # reading it takes until somebody writes
    world.start(["true"], files=digest)
    world.until(lambda: not world.pending, "the confirmation of the start")
    world.kill() if order == "kill" else world.notice(30)
    ended = world.ended()
    assert ended.outcome is Outcome.KILLED
    assert ("the test said so" if order == "kill" else "before its ranks had started") in ended.why
    content.write_bytes(server.held[digest])  # the copy is made after all
    content.unlink()
    content.write_bytes(server.held[digest])
    world.start(["true"], epoch=2, files=digest)
    assert world.ended(epoch=2).outcome is Outcome.FINISHED
    assert not world.of(RanksStarted)
