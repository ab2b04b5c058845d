"""Files of jobs on the server: sent once, checked, kept while a job needs them; and ranges of a log."""

import os
from pathlib import Path

import httpx
import pytest
from api_scene import OTHER, SPEC, TOKEN, Api

from cordee.cli.capture import capture_job, write_code
from cordee.client import Client
from cordee.control import files as job_files
from cordee.control.access import Access
from cordee.control.mirror import Mirror
from cordee.control.roles import Bearer
from cordee.control.tunnels import Opening, Tunnels
from cordee.errors import ForbiddenError, InputError, NotFoundError, SpecError, StoreError
from cordee.storage.content import pack, unpack
from cordee.storage.tree import Tree, TreeFile, digest_of
from cordee.workload.spec import JobSpec


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text("print(1)")
    (folder / "lib").mkdir()
    (folder / "lib" / "model.py").write_text("layers = 2")
    return folder


def spec_in(folder: Path, **more: object) -> JobSpec:
    path = os.environ["PATH"]
    return JobSpec.model_validate(
        SPEC | {"run": ["python3", "train.py"], "cwd": str(folder), "env": {"PATH": path}} | more
    )


def send_files(client: Client, spec: JobSpec, *, remote: bool) -> JobSpec:
    return capture_job(client, spec, remote=remote)[0]


def test_a_job_holds_the_tree_of_its_files_and_they_are_sent_once(
    api: Api, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = send_files(api.client, spec_in(project), remote=True)
    assert sent.files is not None
    tree = api.operations.files.tree(sent.files)
    assert [file.path for file in tree.files] == ["lib/model.py", "train.py"]
    assert tree.root == str(project) and tree.program is not None and tree.program.endswith("/python3")
    made = api.client.submit(sent.model_dump(mode="json"))
    assert api.client.job(made.job.job_id).spec["files"] == sent.files
    packs: list[bytes] = []
    monkeypatch.setattr(api.client, "send_files", packs.append)
    assert send_files(api.client, spec_in(project), remote=True).files == sent.files and not packs
    (project / "train.py").write_text("print(2)")
    assert send_files(api.client, spec_in(project), remote=True).files != sent.files
    assert [len(each.split(b"\nprint(2)")) for each in packs] == [2], "the new tree and the script, in one pack"


def test_a_job_without_its_files_on_the_server_is_refused(api: Api) -> None:
    def submit(files: str) -> None:
        api.client.submit(SPEC | {"files": files})

    with pytest.raises(SpecError, match="1 content of the job's files are not on the server"):
        submit("a" * 64)
    tree = Tree(root="/x", files=(TreeFile("a", "file", 1, "b" * 64), TreeFile("c", "file", 1, "c" * 64))).encode()
    api.client.send_files(pack([digest_of(tree)], lambda _: tree))
    with pytest.raises(SpecError, match="2 contents"):
        submit(digest_of(tree))
    api.client.send_files(pack([digest_of(b"x")], lambda _: b"x"))
    with pytest.raises(InputError, match="not a tree of files"):
        submit(digest_of(b"x"))
    assert not api.client.jobs()


def test_a_user_names_only_trees_that_this_user_has_sent(api: Api, project: Path) -> None:
    mine = send_files(api.client, spec_in(project), remote=True).model_dump(mode="json")
    job_id = api.client.submit(mine).job.job_id
    with Client(url=api.url, token=OTHER) as other:
        with pytest.raises(SpecError, match="has not sent the files"):
            other.submit(mine)
        with pytest.raises(ForbiddenError):
            other.job_files(job_id, [mine["files"]])
        theirs = send_files(other, spec_in(project), remote=True).model_dump(mode="json")
        assert theirs["files"] == mine["files"], "who has the same files may run them"
        own_id = other.submit(theirs).job.job_id
        assert [digest for digest, _ in unpack(other.job_files(own_id, [mine["files"]]))] == [mine["files"]]


@pytest.mark.parametrize("how", ["file", "diff"])
def test_a_tree_gives_nobody_the_contents_of_another_user(api: Api, project: Path, how: str) -> None:
    mine = str(send_files(api.client, spec_in(project), remote=True).files)
    file = (TreeFile("stolen", "file", 1, mine),) if how == "file" else ()
    tree = Tree(root="/x", files=file, diff=mine if how == "diff" else None).encode()
    digest = digest_of(tree)
    with Client(url=api.url, token=OTHER) as bob:
        assert bob.missing_files([mine, digest]) == [mine, digest]
        bob.send_files(pack([digest], lambda _: tree))
        with pytest.raises(SpecError, match="bob has not sent 1 content that the job's files name"):
            bob.submit(SPEC | {"files": digest})
        assert bob.missing_files([mine, digest]) == [mine]
    assert not api.client.jobs()


def test_sizes_are_those_of_the_contents(api: Api) -> None:
    tree = Tree(root="/x", files=(TreeFile("a", "file", 0, digest_of(b"four")),)).encode()
    held = {digest_of(tree): tree, digest_of(b"four"): b"four"}
    api.client.send_files(pack(held, held.__getitem__))
    with pytest.raises(SpecError, match="the job's file a has 4 bytes, and not 0"):
        api.client.submit(SPEC | {"files": digest_of(tree)})


def test_a_tunnel_looks_up_a_job_without_its_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*_: object, **__: object) -> None:
        raise AssertionError("its copy was walked")

    job_id = api.client.submit(SPEC).job.job_id
    monkeypatch.setattr(api.operations.files, "view", walked)
    tunnels = Tunnels(api.operations, None)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="none of its processes runs"):
        tunnels.target(job_id, Access(Bearer("ada"), api.operations), Opening(what="shell"))
    with pytest.raises(ForbiddenError, match="is ada's"):
        tunnels.target(job_id, Access(Bearer("bob"), api.operations), Opening(what="shell"))


def test_only_owner_and_operator_see_which_files_a_job_has(api: Api, project: Path) -> None:
    (project / "data").mkdir()
    (project / ".cordeeignore").write_text("data/\n")
    sent, _ = capture_job(api.client, spec_in(project))
    job_id = api.client.submit(sent.model_dump(mode="json")).job.job_id
    mine = api.client.job(job_id)
    assert mine.spec["files"] == sent.files and mine.files is not None and "data" in mine.files.links
    with Client(url=api.url, token=OTHER) as bob:
        theirs = bob.job(job_id)
        assert "files" not in theirs.spec and theirs.files is not None
        assert theirs.files.links == theirs.files.written == []
        with pytest.raises(ForbiddenError, match="may not read the files"):
            write_code(bob, job_id, diff=True, to=None)


def test_a_job_on_this_machine_has_a_copy_unless_it_is_live(api: Api, project: Path, tmp_path: Path) -> None:
    (project / "data").mkdir()
    (project / "data" / "x.bin").write_text("1")
    (project / ".cordeeignore").write_text("data/\n")
    sent, notes = capture_job(api.client, spec_in(project))
    assert sent.files is not None and "not copied but linked: data" in notes[0]
    tree = api.operations.files.tree(sent.files)
    assert "data" in tree.links and tree.has_root()
    assert capture_job(api.client, spec_in(project, live=True)) == (spec_in(project, live=True), [])
    assert capture_job(api.client, spec_in(project), ship=False)[0].files is None
    assert capture_job(api.client, spec_in(project / "data", run="true"))[0].files is not None
    empty = tmp_path / "empty"
    empty.mkdir()
    assert capture_job(api.client, spec_in(empty, run="true")) == (spec_in(empty, run="true"), [])
    live, [said] = capture_job(api.client, spec_in(project / "data", run="python ../train.py"))
    assert live.files is None and "../train.py is outside" in said


def test_a_home_folder_gives_what_the_command_names(api: Api, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    sent, [note] = capture_job(api.client, spec_in(project))
    assert sent.files is not None and "lib" in note
    assert [file.path for file in api.operations.files.tree(sent.files).files] == ["train.py"]
    assert capture_job(api.client, spec_in(project, run="python3 -c 'print(1)'"))[0].files is None


def test_the_code_of_a_job_is_written_out(
    api: Api, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent, _ = capture_job(api.client, spec_in(project))
    job_id = api.client.submit(sent.model_dump(mode="json")).job.job_id
    (project / "train.py").write_text("edited")
    write_code(api.client, job_id, diff=True, to=tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_text() == "print(1)"
    with pytest.raises(InputError, match="not empty"):
        write_code(api.client, job_id, diff=False, to=tmp_path / "code")
    live = api.client.submit(SPEC).job.job_id
    with pytest.raises(InputError, match="no code was captured"):
        write_code(api.client, live, diff=True, to=None)


def test_damaged_packs_are_refused(api: Api) -> None:
    good = pack([digest_of(b"x")], lambda _: b"x")
    for damaged in (good[:-1], b"x" + good, good.replace(b"\nx", b"\ny")):
        with pytest.raises(InputError, match=r"cut off or damaged|do not have the digest"):
            api.client.send_files(damaged)
    named = httpx.post(
        f"{api.url}/v1/files/missing",
        json={"digests": ["../../x"]},
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=60,
    )
    assert named.status_code == 422
    assert api.client.missing_files([digest_of(b"x")]) == [digest_of(b"x")]


def test_relative_checkpoints_lie_in_the_submitters_folder_or_are_refused(api: Api, project: Path) -> None:
    (project / "ckpt").mkdir()
    (project / "ckpt" / "large").write_text("not sent")
    spec = spec_in(project, checkpoint={"to": "ckpt,s3://bucket/x every 10"})
    local = send_files(api.client, spec, remote=False)
    assert local.checkpoint.to == f"{project}/ckpt,s3://bucket/x every 10"
    assert local.files is not None
    assert "ckpt/large" not in [file.path for file in api.operations.files.tree(local.files).files]
    remote = send_files(api.client, spec, remote=True)
    with pytest.raises(SpecError, match="ckpt would lie in the copy of the submitted files") as refused:
        api.client.submit(remote.model_dump(mode="json"))
    assert "s3://bucket/run" in (refused.value.hint or "")


def test_a_file_above_the_folder_is_refused(api: Api, project: Path) -> None:
    with pytest.raises(SpecError, match=r"\.\./train.py is outside"):
        send_files(api.client, spec_in(project / "lib", run="python ../train.py"), remote=True)
    with pytest.raises(SpecError, match="the server is on another machine"):
        capture_job(api.client, spec_in(project), ship=False, remote=True)


def test_folders_of_editable_installs_are_recorded(api: Api, project: Path) -> None:
    site = project / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "_project.pth").write_text(f"{project}/lib\n/elsewhere\nimport x\n")
    (project / ".venv" / "bin").mkdir()
    python = project / ".venv" / "bin" / "python3"
    python.symlink_to("/bin/sh")
    spec = spec_in(project, env={"PATH": f"{project}/.venv/bin:/bin"})
    files = send_files(api.client, spec, remote=True).files
    assert files is not None
    tree = api.operations.files.tree(files)
    assert tree.import_paths == ("lib",) and tree.program == str(python)
    assert all(not file.path.startswith(".venv") for file in tree.files)


def test_search_paths_through_a_link_name_the_folder_itself(api: Api, project: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(project)
    env = {"PYTHONPATH": f"/lib:{link}/lib:{link}:", "DATA": f"{link}/lib", "PATH": "/bin"}
    sent = send_files(api.client, spec_in(link, env=env, run="python train.py"), remote=True)
    assert sent.env == env | {"PYTHONPATH": f"/lib:{project}/lib:{project}:{project}"}


def test_contents_stay_while_a_job_needs_them(api: Api, project: Path) -> None:
    sent = send_files(api.client, spec_in(project), remote=True)
    made = api.client.submit(sent.model_dump(mode="json"))
    api.client.send_files(pack([digest_of(b"left over")], lambda _: b"left over"))

    def collect() -> int:
        for path in (api.operations.home / "files").glob("??/*"):
            os.utime(path, (0, 0))
        api.operations.files._next_collect_s = 0.0
        return api.operations.files.collect(api.operations.store.unfinished())

    assert collect() == 1, "the content that no job names"
    api.client.stop(made.job.job_id, now=True)
    api.scene.control.tick()
    assert api.client.job(made.job.job_id).state == "stopped"
    assert collect() == 3
    assert api.operations.files.collect(api.operations.store.unfinished()) == 0, "once an hour"


def test_a_full_disk_refuses_files_and_keeps_a_reserve_for_the_log(small_disk: Path) -> None:
    api = Api(small_disk)
    try:
        data = os.urandom(7_000_000)
        assert api.client.send_files(pack([digest_of(data)], lambda _: data)) == 1
        large = os.urandom(13_500_000)
        with pytest.raises(StoreError) as refused:
            api.client.send_files(pack([digest_of(large)], lambda _: large))
        assert "are kept for its log: 13.5 MB were not stored" in refused.value.message
        made = api.client.submit(SPEC)
        assert api.client.job(made.job.job_id).state == "queued"
        with pytest.raises(StoreError):
            job_files.check_room(small_disk, 20_000_000)
    finally:
        api.close()


def test_a_range_of_one_log(api: Api) -> None:
    made = api.client.submit(SPEC)
    url = f"{api.url}/v1/jobs/{made.job.job_id}/logs"
    logs = api.operations.home / "attempts" / made.job.job_id / "0" / "n0" / "logs"
    logs.mkdir(parents=True)
    for rank in range(2):
        (logs / f"rank{rank}.log").write_bytes(f"rank {rank}: 0123456789\n".encode())

    def get(rank: int | None, wanted: str, **more: str) -> httpx.Response:
        params = more | ({} if rank is None else {"rank": str(rank)})
        return httpx.get(url, params=params, headers={"Authorization": f"Bearer {TOKEN}", "Range": wanted}, timeout=60)

    part = get(1, "bytes=5-12")
    assert (part.status_code, part.content) == (206, b"1: 01234")
    assert part.headers["Content-Range"] == "bytes 5-12/19"
    assert get(1, "bytes=-3").content == b"89\n"
    assert get(1, "bytes=100-").status_code == 416
    for refused in (get(None, "bytes=0-"), get(1, "bytes=0-", follow="true"), get(1, "bytes=0-", tail="3")):
        assert refused.status_code == 422 and "Range needs one log" in refused.text


def test_only_the_operator_reads_the_files_of_all_jobs(api: Api, project: Path) -> None:
    """As a standby does, with the token that it shares."""
    spec = send_files(api.client, spec_in(project), remote=True)
    job_id = api.client.submit(spec.model_dump(mode="json")).job.job_id
    assert [digest for digest, _ in unpack(api.client.job_files(job_id, [str(spec.files)]))] == [spec.files]
    with pytest.raises(NotFoundError, match="the job's files have no content"):
        api.client.job_files(job_id, ["ab" * 32])
    with Client(url=api.url, token=OTHER) as bob, pytest.raises(ForbiddenError, match="may read its files"):
        bob.job_files(job_id, [str(spec.files)])
    plain = api.client.submit(SPEC).job.job_id
    with pytest.raises(NotFoundError, match="was submitted without its files"):
        api.client.job_files(plain, [str(spec.files)])


def test_a_standby_copies_the_files_of_unfinished_jobs(api: Api, project: Path, tmp_path: Path) -> None:
    jobs, trees = [], []
    for number in range(3):
        (project / "train.py").write_text(f"print({number})")
        spec = send_files(api.client, spec_in(project), remote=True)
        jobs.append(api.client.submit(spec.model_dump(mode="json")).job.job_id)
        trees.append(str(spec.files))
    lost = digest_of(b"print(0)")
    (api.operations.home / "files" / lost[:2] / lost).unlink()
    api.client.stop(jobs[2], now=True)
    api.scene.control.tick()
    copies = job_files.JobFiles(tmp_path / "standby")
    mirror = Mirror(
        copies,
        unfinished=api.operations.store.unfinished,
        number=lambda: api.scene.control.number,
        leader=lambda: Client(url=api.url, token=TOKEN),
    )
    with pytest.raises(NotFoundError, match=f"{lost} is missing"):
        mirror.step()
    held = {path.name for path in (tmp_path / "standby" / "files").glob("??/*")}
    assert held == {*trees[:2], digest_of(b"print(1)"), digest_of(b"layers = 2")}
    mirror.step()  # nothing has changed: nobody is asked
    (project / "train.py").write_text("print(0)")
    again = send_files(api.client, spec_in(project), remote=True)
    api.client.submit(again.model_dump(mode="json"))
    mirror.step()
    assert copies.missing([lost]) == []
