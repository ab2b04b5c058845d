"""Commands that are started beside an attempt's ranks: in a terminal of their own, or between pipes.

They carry the attempt's tag, so they end with it, but nothing that would make them one of its ranks.
"""

import fcntl
import os
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

_OF_RANKS = re.compile(
    r"CORDEE_(SPOOL|CHECKPOINT_.*|ESTIMATE|LAYOUT|HANG_.*)|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|NNODES|PET_.*"
)
_IN_TERMINAL = 'exec "$@" <"$0" >"$0" 2>&1'  # a session's first process gets the terminal that it opens


def beside_ranks(env: Mapping[str, str], more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a rank without what makes a process a rank: it must not report, meet or save.

    >>> beside_ranks({"RANK": "0", "CORDEE_SPOOL": "/s", "CUDA_VISIBLE_DEVICES": "3"}, {"TERM": "xterm"})
    {'CUDA_VISIBLE_DEVICES': '3', 'TERM': 'xterm'}
    """
    return {name: value for name, value in env.items() if not _OF_RANKS.fullmatch(name)} | dict(more or {})


def spawn_in_terminal(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str, size: tuple[int, int]
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a command in a session and a terminal of its own; return it and the terminal's other end, non-blocking.

    Raises:
        OSError: it cannot be started.
    """
    master, slave = os.openpty()
    try:
        resize(slave, size)
        popen = subprocess.Popen(
            ["/bin/sh", "-c", _IN_TERMINAL, os.ttyname(slave), *argv],
            env=env, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    os.set_blocking(master, False)
    return popen, master


def spawn_with_pipes(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str
) -> tuple["subprocess.Popen[bytes]", tuple[int, int, int]]:
    """Start a command in a session of its own; return it and the pipes of its input, output and errors, non-blocking.

    Raises:
        OSError: it cannot be started.
    """
    popen = subprocess.Popen(
        argv, env=env, cwd=cwd, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert popen.stdin is not None and popen.stdout is not None and popen.stderr is not None, "they are pipes"
    pipes = []
    for each in (popen.stdin, popen.stdout, popen.stderr):
        pipes.append(os.dup(each.fileno()))
        each.close()
        os.set_blocking(pipes[-1], False)
    return popen, (pipes[0], pipes[1], pipes[2])


def resize(fd: int, size: tuple[int, int]) -> None:
    """Set rows and columns of a terminal; its programs get SIGWINCH."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def exit_code_of(code: int) -> int:
    """Return an exit code as a shell shows it; `code` is negative for a signal.

    >>> exit_code_of(3), exit_code_of(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code
