"""Files of a job: which ones a folder has, their limits, and the copies that are made from them."""

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cordee.errors import InputError
from cordee.storage import folder as folders
from cordee.storage.content import PACK_FILES, Contents, batches, pack, unpack
from cordee.storage.folder import FilesWanted, capture
from cordee.storage.sealed import Damaged
from cordee.storage.tree import Tree, TreeFile, digest_of


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def read_folder(root: Path, **wanted: Any) -> tuple[Tree, Mapping[str, Path | bytes]]:
    captured = capture(root, FilesWanted(**wanted))
    return captured.tree, captured.contents


def paths(tree: Tree) -> list[str]:
    return [file.path for file in tree.files]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write(tmp_path / "project", train_py="print(1)", src__model_py="m", gone_py="g", data__big="tracked")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / ".cordeeignore").write_text("/data/\n*.tmp\n")
    git(tmp_path, "init", "-q", "project")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_repository_gives_what_it_tracks_and_what_nobody_ignores(repository: Path) -> None:
    write(repository, new_py="n", **{"run.log": "ignored", "x.tmp": "ours", "__pycache__/a.pyc": "never"})
    write(repository, train_py="print(2)")
    (repository / "gone.py").unlink()
    git(repository, "init", "-q", "nested")
    write(repository, nested__inner_py="i")
    tree, contents = read_folder(repository)
    assert paths(tree) == [".cordeeignore", ".gitignore", "nested/inner.py", "new.py", "src/model.py", "train.py"]
    assert tree.commit is not None and len(tree.commit) == 40
    assert tree.diff is not None and b"+print(2)" in contents[tree.diff]  # type: ignore[operator]


def test_the_diff_has_only_what_was_captured(repository: Path) -> None:
    write(repository, train_py="print(2)", data__big="secret", src__model_py="left out")
    tree, contents = read_folder(repository, without=[repository / "src"])
    diff = contents[str(tree.diff)]
    assert isinstance(diff, bytes) and b"+print(2)" in diff and b"secret" not in diff and b"left out" not in diff
    assert read_folder(repository, only=["train.py"])[0].diff is None


@pytest.mark.parametrize("row", [(1, "file", 0, "a" * 64), ("a", "file", "0", "a" * 64), ("a", "pipe", 0, "a" * 64)])
def test_a_tree_of_wrong_types_is_refused(row: Any) -> None:
    with pytest.raises(InputError, match="not a tree of files"):
        Tree.decode(Tree(root="/x", files=(TreeFile(*row),)).encode())
    with pytest.raises(InputError, match="not a tree of files"):
        Tree.decode(Tree(root="/x", files=(), diff="../x").encode())


def test_links_come_after_all_files_and_an_empty_folder_is_used(tmp_path: Path) -> None:
    def read(digest: str) -> bytes:
        assert not (tmp_path / "lib").is_symlink(), "a disk that ignores case would write through it"
        return b""

    before = tmp_path.stat().st_ino
    files = (TreeFile("lib", "link", 0, "/etc"), TreeFile("LIB/a", "file", 0, digest_of(b"")))
    Tree(root="/x", files=files).lay_out(read, tmp_path)
    assert (tmp_path / "lib").is_symlink() and tmp_path.stat().st_ino == before


def test_rules_hold_where_their_file_lies_and_without_a_repository(repository: Path, tmp_path: Path) -> None:
    sub = write(repository / "sub", a_py="a", data__x="dropped", **{"y.log": "ignored above"})
    (sub / ".cordeeignore").write_text("/data/\n")
    assert paths(read_folder(sub)[0]) == [".cordeeignore", "a.py"]
    plain = write(
        tmp_path / "plain", a_py="a", data__x="dropped", **{".gitignore": "*.log", "y.log": "", ".venv/z": ""}
    )
    (plain / ".cordeeignore").write_text("data/\n")
    assert paths(read_folder(plain)[0]) == [".cordeeignore", ".gitignore", "a.py"]
    assert read_folder(plain)[0].commit is None
    ignored = write(repository / "out.log", a_py="a")
    assert paths(read_folder(ignored)[0]) == ["a.py"], "a folder that its repository ignores is read on its own"
    assert paths(read_folder(plain, without=[plain / "a.py"])[0]) == [".cordeeignore", ".gitignore"]


def test_a_machine_without_git_reads_all_files_and_refuses_rules_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a_py="a", **{".git/config": "", "__pycache__/b": "", "c/d": "d"})
    monkeypatch.setenv("PATH", "/nowhere")
    assert paths(read_folder(tmp_path)[0]) == ["a.py", "c/d"]
    (tmp_path / ".cordeeignore").write_text("c/")
    with pytest.raises(InputError, match="git, which is not installed"):
        read_folder(tmp_path)


def test_a_folder_over_its_limit_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    write(tmp_path, train_py="t", **{"data/small": "s"})
    for name, size in (("a.bin", 70_000_000), ("data/b.bin", 40_000_000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    with pytest.raises(InputError) as refused:
        read_folder(tmp_path)
    assert "4 files with 110 MB" in refused.value.message
    assert "the largest: a.bin (70 MB), data/b.bin (40 MB)" in refused.value.message
    assert ".cordeeignore" in (refused.value.hint or "")


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, a_py="a")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "listener"))
        assert paths(read_folder(tmp_path)[0]) == ["a.py"]


def test_a_copy_has_the_same_files_and_none_of_them_is_the_original(tmp_path: Path) -> None:
    source = write(tmp_path / "source", train_py="t", lib__x_py="x", **{"run.sh": "#!/bin/sh"})
    (source / "run.sh").chmod(0o755)
    (source / "inside").symlink_to(source / "lib")
    (source / "outside").symlink_to("../elsewhere")
    tree, contents = read_folder(source)
    store = Contents(tmp_path / "store")
    read = {digest: path.read_bytes() for digest, path in contents.items() if isinstance(path, Path)}
    assert store.add(unpack(pack(read, read.__getitem__)), durable=True) == 3
    copy = tmp_path / "deep" / "copy"
    write(copy, old_py="of an attempt that was cut off")
    Tree.decode(tree.encode()).lay_out(store.get, copy)
    assert sorted(path.name for path in copy.iterdir()) == ["inside", "lib", "outside", "run.sh", "train.py"]
    assert os.access(copy / "run.sh", os.X_OK) and not os.access(copy / "train.py", os.X_OK)
    assert (copy / "inside" / "x.py").read_text() == "x" and (copy / "inside").readlink() == Path("lib")
    assert (copy / "outside").readlink() == tmp_path / "elsewhere"
    write(copy, train_py="changed", out__model="new")
    assert (source / "train.py").read_text() == "t" and store.get(digest_of(b"t")) == b"t"


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "a//b", "", "./a", "twice", "link/below"])
def test_a_tree_that_would_write_elsewhere_is_refused(path: str) -> None:
    digest = digest_of(b"")
    files = (
        TreeFile("twice", "file", 0, digest),
        TreeFile("link", "link", 0, "/etc"),
        TreeFile(path, "file", 0, digest),
    )
    with pytest.raises(InputError, match="would not lie in its copy"):
        Tree.decode(Tree(root="/x", files=files).encode())
    for data in (b"", b"[]", b'{"version": 1}', b'{"version": 9, "root": "", "files": [], "import_paths": []}'):
        with pytest.raises(InputError):
            Tree.decode(data)


def test_altered_contents_and_packs_are_noticed(tmp_path: Path) -> None:
    store = Contents(tmp_path)
    digest = digest_of(b"hello")
    packed = pack([digest], lambda _: b"hello")
    for damaged in (packed[:-1], packed[1:], b"x" + packed, packed.replace(b"hello", b"hallo")):
        with pytest.raises(InputError):
            store.add(unpack(damaged), durable=False)
    store.add(unpack(packed), durable=False)
    assert store.missing([digest, "0" * 64]) == ["0" * 64]
    (tmp_path / digest[:2] / digest).write_bytes(b"hell0")
    with pytest.raises(Damaged, match="altered"):
        store.get(digest)
    with pytest.raises(Damaged, match="missing"):
        store.get(digest)


def test_contents_go_when_they_are_neither_needed_nor_new(tmp_path: Path) -> None:
    store = Contents(tmp_path)
    digests = [digest_of(data) for data in (b"needed", b"old", b"new")]
    store.add(zip(digests, (b"needed", b"old", b"new"), strict=True), durable=False)
    for digest in digests[:2]:
        os.utime(tmp_path / digest[:2] / digest, (0, 0))
    assert store.collect({digests[0]}) == 1
    assert store.missing(digests) == [digests[1]]


def test_batches_are_bounded() -> None:
    sizes = {f"{number}": 1 for number in range(PACK_FILES + 1)} | {"large": 10**9, "last": 1}
    assert [len(each) for each in batches(sizes)] == [PACK_FILES, 1, 1, 1]
    assert folders.LIMIT_BYTES == 100_000_000


def test_only_files_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "project", a_py="a", b_py="b", c_py="c")
    long_ago_ns = 1_000_000_000_000_000_000
    monkeypatch.setattr("cordee.storage.captured._RACY_NS", -(2**62))  # as if they had been written long ago
    first, _ = read_folder(folder, home=tmp_path)
    read: list[str] = []
    real = folders.read_regular
    monkeypatch.setattr(folders, "read_regular", lambda path: read.append(path.name) or real(path))
    assert read_folder(folder, home=tmp_path)[0] == first and not read
    (folder / "b.py").write_text("B")
    os.utime(folder / "b.py", ns=(long_ago_ns, long_ago_ns))
    assert read_folder(folder, home=tmp_path)[0] != first and read == ["b.py"]
    monkeypatch.setattr("cordee.storage.captured._RACY_NS", 2**62)  # as if they had been written just now
    (folder / "c.py").write_text("C")
    read_folder(folder, home=tmp_path)
    read.clear()
    read_folder(folder, home=tmp_path)
    assert read == ["c.py"]
    [index] = (tmp_path / "captured").iterdir()
    index.write_text("torn")
    read.clear()
    read_folder(folder, home=tmp_path)
    assert read == ["a.py", "b.py", "c.py"]


def test_what_cannot_be_copied_is_linked_on_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", train_py="t", data__x_bin="ignored", **{".gitignore": "data/\n"})
    (source / "large").write_bytes(b"x" * 5000)
    (source / "checkpoints" / "gpt-abcdef" / "log").mkdir(parents=True)
    for part in ("log", "chunks", "manifests"):
        write(source, **{f"checkpoints/gpt-abcdef/{part}/1": "saved"})
    monkeypatch.setattr(folders, "LIMIT_BYTES", 4000)
    with pytest.raises(InputError, match="the largest: large"):
        read_folder(source)
    captured = capture(source, FilesWanted(linked=True, below="sub"))
    assert paths(captured.tree) == [".gitignore", "train.py"] and captured.too_large == {"large": 5000}
    assert captured.tree.links == ("checkpoints", "data", "large")
    store = Contents(tmp_path / "store")
    read = {digest: path.read_bytes() for digest, path in captured.contents.items() if isinstance(path, Path)}
    store.add(unpack(pack(read, read.__getitem__)), durable=False)
    tree = Tree.decode(captured.tree.encode())
    tree.lay_out(store.get, tmp_path / "copy")
    assert (tmp_path / "copy" / "data" / "x_bin").read_text() == "ignored" and (tmp_path / "copy" / "sub").is_dir()
    source.rename(tmp_path / "moved")
    write(source, data__x_bin="of another folder")
    tree.lay_out(store.get, tmp_path / "elsewhere")
    assert sorted(each.name for each in (tmp_path / "elsewhere").iterdir()) == [".gitignore", "sub", "train.py"]
    monkeypatch.setattr(folders, "FILES_MAX", 3)
    with pytest.raises(InputError, match=r"has 4 files, .* most are in: data \(3\), a \(1\)"):
        read_folder(source, linked=True, only=["data/1", "data/2", "data/3", "a"])
