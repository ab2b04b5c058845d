"""Starts a test's scripts: forked by one process that has imported torch once, a start costs 0.1 s and not 3.

What torch reads of the environment when it is imported comes too late for a fork: scripts call `torch.set_num_threads`.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
# An optimizer's first step imports the last one.
HEAVY = ["cordee.train.job", "cordee.train.checkpoint.checkpointer", "torch.distributed.fsdp", "torch._dynamo"]
SERVER.set_forkserver_preload(HEAVY)
FILES = {"stdin": 0, "stdout": 1, "stderr": 2}


class Fork:
    """A Python script or module, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], files: dict[str, int]) -> None:
        copies = {FILES[name]: Connection(os.dup(fd), readable=False) for name, fd in files.items()}
        # A daemon, so that nobody waits at the end for one that a failed test has left behind.
        self._process = SERVER.Process(target=_be, args=(argv, env, copies), daemon=True)
        self._process.start()
        for copy in copies.values():
            copy.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be(argv: Sequence[str], env: dict[str, str], files: dict[int, Connection]) -> None:
    for fd, file in files.items():
        os.dup2(file.fileno(), fd)
        file.close()
    if FILES["stdin"] in files:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    # Workers of a loader are started as in any process.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    faulthandler.enable()
    sys.argv = list(argv)
    if argv[0] == "-m":
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


class Asked:
    """A module that answers what it reads: a process as `subprocess.Popen` gives it to `communicate`, but forked."""

    def __init__(self, argv: Sequence[str], **_: object) -> None:
        self._argv, self._process = argv[1:], None
        self.returncode: int | None = None

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def communicate(self, text: str, timeout: float) -> tuple[str, str]:
        """What it writes to stdout and to stderr, however long that takes: who is patient is shown by a real one."""
        with ExitStack() as stack:
            asked, said, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            asked.write(text)
            asked.seek(0)
            files = {"stdin": asked.fileno(), "stdout": said.fileno(), "stderr": errors.fileno()}
            self._process = Fork(self._argv, dict(os.environ), files)
            self.returncode = self._process.wait()
            said.seek(0)
            errors.seek(0)
            return said.read(), errors.read()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def start(command: Sequence[str], env: dict[str, str], **files: int) -> "Fork | subprocess.Popen[bytes]":
    """`stdin`, `stdout` and `stderr` are descriptors. Only what Python runs as a script is forked, not `python -m`."""
    if command[0] == sys.executable and command[1].endswith(".py"):
        return Fork(command[1:], env, files)
    return subprocess.Popen(command, env=env, **files)


def run(
    commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]], timeout_s: float
) -> list[tuple[int, str, str]]:
    """Start them all, and wait: of each the exit code and what it wrote to stdout and to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [[Path(folder) / f"{name}{number}" for name in ("stdout", "stderr")] for number in range(len(commands))]
        started = []
        for command, env, (out, err) in zip(commands, envs, paths, strict=True):
            with out.open("w") as stdout, err.open("w") as stderr:
                started.append(start(command, env, stdout=stdout.fileno(), stderr=stderr.fileno()))
        try:
            codes = [each.wait(timeout_s) for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()
        return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, paths, strict=True)]
