"""Servers that start, cannot start, or do not answer."""

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from verbs import code_of

from cordee import __version__, errors
from cordee.client import Client
from cordee.errors import CordeeError
from cordee.events import AttemptPlaced, NodeDown, RanksStarted

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(
    "words",
    [
        ("jobs",),
        ("down",),
        ("nodes",),
        ("queues",),
        ("cost",),
        ("stop", "x"),
        ("why", "x"),
        ("logs", "x"),
        ("run", "--dry-run", "--gpus", "1", "true"),
    ],
)
def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert code_of(*words, "--home", str(tmp_path / "home")) == errors.NoServerError.exit_code
    assert "hint: start one with `cordee up`" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_bad_input_starts_no_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert code_of("run", "--gpus", "1", "--home", str(home), "--", "no-such-program") == errors.ScriptError.exit_code
    assert not home.exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [(("--slots", "many"), errors.InputError), (("--price-as", "H1000"), errors.CatalogueError)],
)
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], error: type[CordeeError]
) -> None:
    assert code_of("up", "--home", str(tmp_path / "home"), *words) == error.exit_code
    assert words[1] in capsys.readouterr().err


def test_a_home_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cordee.control.home._mounts", lambda: f"nas:/x {tmp_path} nfs4 rw 0 0\n")
    code = code_of("up", "--foreground", "--home", str(tmp_path / "home"))
    assert code == errors.HomeUnsuitableError.exit_code
    assert "on a network file system (nfs4)" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_the_version_and_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--version") == code_of("version") == 0
    assert capsys.readouterr().out.split() == [__version__] * 2
    assert code_of() == 2
    assert "Queue a job" in capsys.readouterr().out


def test_a_client_needs_nothing_that_only_posix_has() -> None:
    """A laptop with another system talks to a server elsewhere."""
    program = (
        "import sys\n"
        "posix = 'fcntl grp pwd pty resource termios tty syslog'.split()\n"
        "sys.modules.update(dict.fromkeys(posix))\n"
        "from cordee.cli.main import main\n"
        "import cordee.client, cordee.cli.jobs, cordee.cli.run, cordee.cli.operate, cordee.control.spawn\n"
        "try: main(['jobs'])\n"
        "except SystemExit as left: assert left.code == 31, left.code\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'sqlalchemy', 'alembic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"CORDEE_HOME": "/no/such/home"},
    )
    assert done.returncode == 0, done.stderr


def test_a_home_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home").write_text("")
    assert code_of("up", "--home", str(tmp_path / "home")) == errors.HomeUnsuitableError.exit_code
    assert "cannot be used" in capsys.readouterr().err


def test_two_runs_at_once_start_one_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    argv = [sys.executable, "-m", "cordee", "run", "--gpus", "1", "--slots", "2", "--home", str(home), "--", "true"]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate() for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    with Client(home) as client:
        assert len(client.jobs()) == 2
    assert code_of("down", "--home", str(home)) == 0


def test_jobs_go_on_after_down_and_a_bare_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    assert code_of("up", "--home", str(home), "--slots", "2", "--price-as", "H100") == 0
    assert code_of("run", "--gpus", "2", "--name", "long", "--home", str(home), "--", "sleep", "600") == 0
    with Client(home) as client:
        next(number for number, event in client.events(follow=True) if isinstance(event, RanksStarted))
    assert code_of("down", "--home", str(home)) == 0
    assert not (home / "server.json").exists()
    assert code_of("up", "--home", str(home)) == 0
    assert "1 job continues" in capsys.readouterr().out
    with Client(home) as client:
        again = (event for _, event in client.events(follow=True) if isinstance(event, AttemptPlaced))
        assert [event.epoch for event in islice(again, 2)] == [1, 2]
        assert [isinstance(event, NodeDown) for _, event in client.events()].count(True) == 1
        assert client.nodes()[0].gpus == 2
        assert client.nodes()[0].micro_usd_per_gpu_hour == 2_990_000
        client.stop("long", now=True)
    assert code_of("down", "--home", str(home)) == 0


def test_an_agent_that_outlived_its_server_keeps_its_slots_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ("--home", str(tmp_path / "home"))
    assert code_of("up", *home, "--slots", "1") == 0
    with Client(tmp_path / "home") as client:
        pid = client.health().pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert code_of("up", *home, "--slots", "2") == 0
    said = capsys.readouterr()
    assert "node local: 1 x slot" in said.out
    assert "local keeps its old number of slots (1) until its agent ends" in said.err
    assert code_of("down", *home) == 0
    assert code_of("up", *home) == 0
    assert "node local: 2 x slot" in capsys.readouterr().out
    assert code_of("down", *home) == 0


def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cordee.control.spawn.find_spec", lambda name: None if name == "uvicorn" else name)
    assert code_of("up", "--home", str(tmp_path / "home")) == errors.MissingExtraError.exit_code
    assert "a server needs uvicorn" in capsys.readouterr().err


def asked(answer: str, *words: str) -> tuple[int, str]:
    """Run a verb whose whole terminal this is; its exit code, and what was said."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "cordee", *words]
    with subprocess.Popen(
        argv, env=os.environ | {"COLUMNS": "200"}, stdin=theirs, stdout=theirs, stderr=theirs
    ) as done:
        os.close(theirs)
        os.write(ours, answer.encode())
        said = b""
        with suppress(OSError):
            while chunk := os.read(ours, 65536):
                said += chunk
        os.close(ours)
    return done.returncode, said.decode()


def test_run_asks_before_a_preemption_on_a_terminal_only(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    assert code_of("up", *home, "--slots", "1", "--price-as", "H100") == 0
    assert (
        code_of(
            "run", "--gpus", "1", "--name", "low", "--tier", "preemptible", "--unprotected", *home, "--", "sleep", "600"
        )
        == 0
    )
    push = ("run", "--gpus", "1", "--name", "high", *home)
    command = ("--", "sleep", "600")
    with Client(tmp_path / "home") as client:
        next(number for number, event in client.events(follow=True) if isinstance(event, RanksStarted))
        number = client.health().log_number
        code, said = asked("n\n", *push, *command)
        assert code == 1
        assert re.search(r"it preempts low-\w{6} of \w+, which is expected to lose \$", said)
        code, said = asked("n\n", "down", *home)
        assert code == 1 and "writes no checkpoint" in said
        assert client.health().log_number == number
        assert asked("y\n", *push, *command)[0] == 0
        assert asked("", *push, "--yes", *command)[0] == 0
        assert code_of(*push, *command) == 0
        assert [job.name for job in client.jobs()] == ["high", "high", "high", "low"]
        for job in client.jobs():
            client.stop(job.job_id, now=True)
    assert code_of("down", *home) == 0
