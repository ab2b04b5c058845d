"""`exec`, `shell` and `port-forward` on one server with one agent, as people use them: in terminals, through ports."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verbs import code_of

from cordee.cli.shell import shell_spec
from cordee.client import Client
from cordee.errors import InputError
from interrupts import interruptible

WAIT_S = 120.0

# It echoes what it gets when the other side has sent its end, and tells by its output where it listens.
JOB = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
print("port", server.getsockname()[1], flush=True)
def echo(each):
    received = b""
    while chunk := each.recv(65536):
        received += chunk
    each.sendall(received[::-1])
    each.close()
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shells")
    home = folder / "home"
    (home).mkdir()
    (home / "tokens").write_text("bob the-token-of-bob-whoever\n")
    (home / "tokens").chmod(0o600)
    assert code_of("up", "--home", str(home), "--slots", "2") == 0
    yield home
    assert code_of("down", "--home", str(home)) == 0


@pytest.fixture(scope="module")
def job(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A job that runs, with the port at which it listens."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "echo.py").write_text(JOB)
    spec = {"run": [sys.executable, "echo.py"], "gpus": 1, "name": "echo", "cwd": str(folder)}
    with Client(home) as client:
        job_id = client.submit(spec).job.job_id
        lines = client.logs(job_id, follow=True)
        port = next(int(found[1]) for line in lines if (found := re.match(r"port (\d+)", line)))
        yield job_id, port
        client.stop(job_id, now=True)


def called(home: Path, *words: str, given: bytes = b"", **env: str) -> "subprocess.CompletedProcess[bytes]":
    own = words[: words.index("--")] if "--" in words else words
    argv = [sys.executable, "-m", "cordee", *own, "--home", str(home), *words[len(own) :]]
    return subprocess.run(
        argv, input=given, capture_output=True, timeout=WAIT_S, check=False, env=os.environ | {"COLUMNS": "200"} | env
    )


class Person:
    """Somebody at a terminal in which a verb runs."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self._fd, theirs = pty.openpty()
        self.modes = termios.tcgetattr(theirs)
        self._theirs = theirs
        env = os.environ | {"TERM": "xterm", "SHELL": "/bin/sh", "PS1": "$ ", "ENV": ""}
        self.run = subprocess.Popen(
            [sys.executable, "-m", "cordee", *words], env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
        )
        self.seen = ""

    def types(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def sees(self, text: str) -> None:
        """Wait until the terminal shows a text, and forget what came before it."""
        until_s = time.monotonic() + WAIT_S
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def leaves(self) -> int:
        """Wait for the end of the verb; its exit code. The terminal is as it was."""
        until_s = time.monotonic() + WAIT_S
        while self.run.poll() is None and time.monotonic() < until_s:
            if select.select([self._fd], [], [], 0.05)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        code = self.run.wait(1)
        assert termios.tcgetattr(self._theirs) == self.modes, "the terminal is not as it was"
        return code

    def close(self) -> None:
        self.run.kill()
        self.run.wait()
        os.close(self._fd)
        os.close(self._theirs)


At = Callable[..., Person]


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[At]:
    people: list[Person] = []

    def start(*words: str) -> Person:
        people.append(Person(*words, cwd=tmp_path))
        return people[-1]

    yield start
    for person in people:
        person.close()


def test_exec_carries_streams_and_the_exit_code(home: Path, job: tuple[str, int]) -> None:
    script = 'cat; echo "$CORDEE_ATTEMPT ${RANK-no rank} ${CORDEE_SPOOL-no spool}"; ls; echo aside >&2; exit 7'
    done = called(home, "exec", job[0], "--", "sh", "-c", script, given=b"given\n" * 50_000)
    assert done.returncode == 7 and done.stderr == b"aside\n"
    assert done.stdout == b"given\n" * 50_000 + f"{job[0]}.1 no rank no spool\necho.py\n".encode()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("exec", "{job}", "--rank", "3", "--", "true"), 35, "has no rank 3"),
        (("exec", "nobody", "--", "true"), 35, "there is no job 'nobody'"),
        (("exec", "{job}", "--", "no-such-program"), 30, "cannot be started on local"),
        (("port-forward", "{job}", "80x"), 10, "'80x' is not a port"),
        (("shell", "--attach", "{job}"), 10, "a shell needs a terminal"),
    ],
)
def test_what_cannot_be_is_said(
    home: Path,
    job: tuple[str, int],
    words: tuple[str, ...],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = tuple(word.format(job=job[0]) for word in words)
    own = words[: words.index("--")] if "--" in words else words
    assert code_of(*own, "--home", str(home), *words[len(own) :]) == code
    assert says in capsys.readouterr().err


def test_another_user_gets_no_tunnel(
    home: Path, job: tuple[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORDEE_TOKEN", "the-token-of-bob-whoever")
    assert code_of("exec", job[0], "--home", str(home), "--", "true") == 37
    assert "ask" in capsys.readouterr().err


def test_port_forward_carries_many_connections_each_way_to_its_end(home: Path, job: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        local = free.getsockname()[1]
    argv = [sys.executable, "-m", "cordee", "port-forward", job[0], f"{local}:{job[1]}", "--home", str(home)]
    with interruptible():
        forward = subprocess.Popen(argv, stderr=subprocess.PIPE, env=os.environ | {"COLUMNS": "200"})
    try:
        assert forward.stderr is not None
        assert f"127.0.0.1:{local} leads to port {job[1]}".encode() in forward.stderr.readline()
        sent = [bytes([65 + n]) * 300_000 + b"!" for n in range(4)]
        opened = [socket.create_connection(("127.0.0.1", local), WAIT_S) for _ in sent]
        for each, data in zip(opened, sent, strict=True):
            each.sendall(data)
        for each, data in zip(opened, sent, strict=True):
            each.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := each.recv(65536):
                received += chunk
            assert received == data[::-1]
            each.close()
        forward.send_signal(signal.SIGINT)
        assert forward.wait(WAIT_S) == 0
    finally:
        forward.kill()
        with forward:
            pass


def test_a_shell_is_a_job_that_outlives_its_client(home: Path, at_terminal: At, tmp_path: Path) -> None:
    first = at_terminal("shell", "--gpus", "0", "--keep", "5m", "--home", str(home), "--name", "mine")
    first.sees("waiting for the shell")
    first.types("echo here $((40 + 2)) ${RANK-no rank}; pwd\r")
    first.sees("here 42 no rank")
    first.sees(tmp_path.name)
    first.types("marked=yes; echo marked $?\r")
    first.sees("marked 0")
    with Client(home) as client:
        shell = client.job("mine")
        assert (shell.state, shell.gpus) == ("running", 0)
        first.run.send_signal(signal.SIGHUP)
        assert first.leaves() == 255 and f"cordee shell --attach {shell.job_id}" in first.seen
        second = at_terminal("shell", "--attach", "mine", "--home", str(home))
        second.sees("here 42 no rank")  # what was shown before
        second.types("echo still $marked; exit 5\r")
        second.sees("still yes")
        assert second.leaves() == 5, "the shell's exit code is the client's"
        list(client.logs(shell.job_id, follow=True))
        ended = client.job(shell.job_id)
        assert (ended.state, len(ended.attempts)) == ("done", 1)


def test_a_command_in_a_terminal_ends_with_its_job(home: Path, at_terminal: At, tmp_path: Path) -> None:
    with Client(home) as client:
        spec = {"run": ["sh", "-c", "echo up; sleep 1000"], "gpus": 0, "name": "short", "cwd": str(tmp_path)}
        job_id = client.submit(spec).job.job_id
        assert any("up" in line for line in client.logs(job_id, follow=True))
        person = at_terminal("exec", job_id, "--home", str(home), "--", "sh", "-c", "tty; echo ready; cat")
        person.sees("/dev/")
        person.sees("ready")
        client.stop(job_id, now=True)
        person.sees(f"{job_id}.1 has ended")
        assert person.leaves() == 137


def test_the_job_of_a_shell_is_started_once_and_lies_on_one_node() -> None:
    spec = shell_spec("4", "30m", "10m", {"TERM": "xterm"}, (), {"name": "shell"})
    assert (spec.launch, spec.place.within, spec.on_preempt.then) == ("node", "node", "stop")
    assert (spec.retries.infrastructure, spec.retries.script) == (0, 0)
    assert "--idle 1800 --keep 600" in str(spec.run)
    with pytest.raises(InputError, match="--idle 59s is below a minute"):
        shell_spec("1", "59s", "10m", {}, (), {})
