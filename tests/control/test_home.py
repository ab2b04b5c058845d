"""The home: refused on network file systems, owned by one server, its secrets for its owner only."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cordee.control.home import Home, file_system
from cordee.control.roles import ADMIN, Bearer
from cordee.errors import HomeInUseError, HomeUnsuitableError

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
nas:/export {nas} nfs4 rw 0 0
tmpfs {nas}/scratch tmpfs rw 0 0
me@host:/ {fuse} fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize("place", ["nas", "fuse"])
def test_a_network_file_system_is_refused_and_nothing_is_made(tmp_path: Path, place: str) -> None:
    mounts = MOUNTS.format(nas=tmp_path / "nas", fuse=tmp_path / "fuse")
    with pytest.raises(HomeUnsuitableError, match=r"is on a network file system \((nfs4|fuse\.sshfs)\)"):
        Home(tmp_path / place / "home", mounts=mounts)
    assert list(tmp_path.iterdir()) == []


def test_a_local_mount_inside_a_network_one_is_fine(tmp_path: Path) -> None:
    mounts = MOUNTS.format(nas=tmp_path / "nas", fuse=tmp_path / "fuse")
    assert Home(tmp_path / "nas" / "scratch" / "home", mounts=mounts).path.is_dir()


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nas")
    mounts = MOUNTS.format(nas=tmp_path / "nas", fuse="/fuse")
    assert file_system(tmp_path / "link" / "home", mounts) == "nfs4"


def test_a_mount_point_with_a_space_is_understood() -> None:
    assert file_system(Path("/my disk/x"), "a / ext4 rw\nb /my\\040disk nfs rw") == "nfs"


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(HomeUnsuitableError, match="cannot be used"):
        Home(tmp_path / "home")


def test_two_servers_cannot_own_one_home(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    first.lock()
    with pytest.raises(HomeInUseError, match=rf"a server already runs on {tmp_path} \(pid {os.getpid()}\)"):
        second.lock()


def test_a_dead_server_leaves_no_lock(tmp_path: Path) -> None:
    code = "import sys, os, pathlib; from cordee.control.home import Home\n"
    code += "Home(pathlib.Path(sys.argv[1])).lock(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    Home(tmp_path).lock()


def test_the_token_is_drawn_once_and_private(tmp_path: Path) -> None:
    home = Home(tmp_path)
    token = home.token()
    assert len(token) >= 32
    assert Home(tmp_path).token() == token
    assert set(token) <= set("0123456789abcdef")  # no "-" in front, which `connect` would take for an option
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_tokens_have_owners(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.owners("ada") == {home.token(): Bearer("ada", grants=ADMIN)}
    path = tmp_path / "tokens"
    path.write_text("# who may submit\n\nbob aaaaaaaaaaaaaaaaaaaaaaaa\n  ci   bbbbbbbbbbbbbbbbbbbbbbbb\n")
    path.chmod(0o600)
    others = {"a" * 24: Bearer("bob"), "b" * 24: Bearer("ci")}
    assert home.owners("ada") == {home.token(): Bearer("ada", grants=ADMIN), **others}


def test_a_token_may_be_one_to_read_with_and_end_with_a_day(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"grafana {'c' * 24} read\nintern {'d' * 24} until=2026-12-31 read\n")
    path.chmod(0o600)
    found = Home(tmp_path).owners("ada")
    assert found["c" * 24] == Bearer("grafana", reads_only=True)
    new_year_us = 1_798_761_600_000_000  # 2027-01-01, midnight UTC
    assert found["d" * 24] == Bearer("intern", reads_only=True, until_us=new_year_us)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("bob aaaaaaaaaaaaaaaaaaaaaaaa\n", 0o640, "open to others"),
        ("bob aaaaaaaaaaaaaaaaaaaaaaaa\nshort aaaaaaaaaaaa\n", 0o600, "line 2"),
        ("aaaaaaaaaaaaaaaaaaaaaaaa\n", 0o600, "line 1"),
        ("bob aaaaaaaaaaaaaaaaaaaaaaaa\neve aaaaaaaaaaaaaaaaaaaaaaaa\n", 0o600, "line 2"),
        ("bob aaaaaaaaaaaaaaaaaaaaaaaa write\n", 0o600, "line 1: 'write' is no term of a token"),
        ("bob aaaaaaaaaaaaaaaaaaaaaaaa until=soon\n", 0o600, "'until=soon' is no term"),
    ],
)
def test_tokens_that_cannot_be_trusted_are_refused_and_not_repeated(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    (tmp_path / "tokens").write_text(text)
    (tmp_path / "tokens").chmod(mode)
    with pytest.raises(HomeUnsuitableError, match=says) as refused:
        Home(tmp_path).owners("ada")
    assert "aaaa" not in str(refused.value)


def test_the_announcement_is_private_and_can_be_withdrawn(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.announce({"pid": 1})
    home.announce({"pid": 2})
    assert (tmp_path / "server.json").read_text() == '{"pid": 2}\n'
    home.withdraw()
    home.withdraw()
    assert not (tmp_path / "server.json").exists()
