"""Copying of a process's output to its log file; secrets are masked before a byte reaches the disk."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

TAIL_LINES = 40
_LINE_CHARS_MAX = 2000
_TAIL_BYTES = 1 << 16
_READS_MAX = 16
_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+).*?\bexitcode\s*:\s*(-?\d+)", re.DOTALL)


class Masker:
    """A filter that replaces the values of secrets by [NAME] in a stream of bytes, also across chunks."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._names = {value.encode(): f"[{name}]".encode() for name, value in secrets.items() if value}
        longest_first = sorted(self._names, key=lambda value: (-len(value), value))
        self._values = re.compile(b"|".join(map(re.escape, longest_first))) if longest_first else None
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that may be written now; hold back an end that may be the beginning of a secret."""
        if self._values is None:
            return chunk
        rest, written = self._held + chunk, bytearray()
        while True:
            sure = len(rest) - max(_overlap(rest, value) for value in self._names)
            match = self._values.search(rest)
            if match is None or match.start() >= sure:
                break
            written += rest[: match.start()] + self._names[match[0]]
            rest = rest[match.end() :]
        self._held = rest[sure:]
        return bytes(written) + rest[:sure]

    def finish(self) -> bytes:
        """Return the bytes held back."""
        held, self._held = self._held, b""
        return held if self._values is None else self._values.sub(lambda match: self._names[match[0]], held)


def _overlap(data: bytes, value: bytes) -> int:
    """Return the length of the longest end of `data` that is a proper prefix of `value`."""
    longest = min(len(data), len(value) - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(value[:n])), 0)


class LogPump:
    """A copier of a process's output from a pipe to its log."""

    def __init__(self, path: Path, secrets: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._masker = Masker(secrets)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def note(self, line: str) -> None:
        """Write a line of the agent itself."""
        self._write(line.encode() + b"\n")

    def started(self) -> None:
        """Close the agent's copy of the writing end, since the process has its own."""
        os.close(self.write_fd)
        self.write_fd = -1

    def pump(self) -> bool:
        """Copy the available output; return False when every writer is gone."""
        for _ in range(_READS_MAX):  # bounded, so that a process with much output does not block the agent
            try:
                chunk = os.read(self.read_fd, _TAIL_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._write(self._masker.feed(chunk))
        return True

    def close(self) -> None:
        """Copy the rest of the pipe and close."""
        self.pump()
        self._write(self._masker.finish())
        for fd in (self.read_fd, self._file, self.write_fd):
            if fd >= 0:
                os.close(fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError:
                return  # a full disk loses the log, not the job


def tail(path: Path) -> tuple[str, ...]:
    """Return the last lines of a log, with very long lines cut."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line[:_LINE_CHARS_MAX] for line in text.splitlines()[-TAIL_LINES:])


def torchrun_root_cause(lines: tuple[str, ...]) -> tuple[int, int] | None:
    """Return rank and exit code (negative: a signal) of the worker that failed first, by torchrun's summary.

    >>> torchrun_root_cause(("Root Cause (first observed failure):", "  rank      : 1 (local_rank: 1)",
    ...                      "  exitcode  : -9 (pid: 42)"))
    (1, -9)
    """
    match = _ROOT_CAUSE.search("\n".join(lines))
    return (int(match[1]), int(match[2])) if match else None
