"""The software of jobs' interpreters, so that the ranks of a gang do not meet under two versions of torch.

A thread asks the interpreter for its metadata, without an import of torch; the answer holds until one of its folders of
packages has changed.
"""

import json
import logging
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cordee.workload.launcher import PYTHON, interpreter_of

PROBE_S = 10.0

_PROBE = """
import json, os, platform, sys
from importlib.metadata import PackageNotFoundError, version
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = ""
print(json.dumps([platform.python_version(), torch, [path for path in sys.path if os.path.exists(path)]]))
"""

_log = logging.getLogger("cordee.agent")


class Software(NamedTuple):
    """The versions of an interpreter and of its torch; "" where one is not known or not there."""

    python: str = ""
    torch: str = ""

    def __str__(self) -> str:
        return f"Python {self.python} with {f'torch {self.torch}' if self.torch else 'no torch'}"

    def fits(self, other: "Software") -> bool:
        """Return whether ranks of both may meet: one minor version of Python, one torch."""
        minors = {each.python.rpartition(".")[0] for each in (self, other) if each.python}
        return len(minors) < 2 and len({each.torch for each in (self, other) if each.torch}) < 2


class _Key(NamedTuple):
    interpreter: str
    python_path: str


class _Answer(NamedTuple):
    software: Software
    changed_ns: Mapping[str, int]  # of the interpreter and its folders of packages


class Interpreters:
    """The interpreters of one node.

    Args:
        wake: wakes the agent's loop when one was read.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._known: dict[_Key, _Answer] = {}
        self._waiting: dict[_Key, list[Callable[[Software], None]]] = {}
        self._read: queue.SimpleQueue[tuple[_Key, _Answer]] = queue.SimpleQueue()

    def ask(self, spec: Mapping[str, Any], base_env: Mapping[str, str], then: Callable[[Software], None]) -> None:
        """Call `then` with the software of a job's interpreter: at once if it is known, else in a later `step`."""
        own = {str(name): str(value) for name, value in (spec.get("env") or {}).items()}
        path = interpreter_path(spec, own.get("PATH") or base_env.get("PATH", os.defpath))
        if path is None:
            then(Software())
            return
        key = _Key(path, own.get("PYTHONPATH") or base_env.get("PYTHONPATH", ""))
        known = self._known.get(key)
        if known is not None and known.changed_ns == _changed_ns(known.changed_ns):
            then(known.software)
            return
        waiting = self._waiting.setdefault(key, [])
        waiting.append(then)
        if len(waiting) == 1:
            env = {name: value for name, value in base_env.items() if not name.startswith("CORDEE_")} | own
            threading.Thread(target=self._probe, args=(key, env), name="cordee-interpreter", daemon=True).start()

    def step(self) -> None:
        """Pass on what was read."""
        while not self._read.empty():
            key, answer = self._read.get()
            self._known[key] = answer
            for then in self._waiting.pop(key):
                then(answer.software)

    def _probe(self, key: _Key, env: Mapping[str, str]) -> None:
        answer = _Answer(Software(), {})
        try:
            argv = [key.interpreter, "-c", _PROBE]
            # The agent's loop may reap the process first, so its exit code says nothing.
            done = subprocess.run(
                argv, check=False, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S
            )
            python, torch, folders = json.loads(done.stdout)
            answer = _Answer(Software(python, torch), _changed_ns([key.interpreter, *folders]))
        except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            _log.warning("the versions of %s cannot be read: %s", key.interpreter, error)
        self._read.put((key, answer))
        self._wake()


def interpreter_path(spec: Mapping[str, Any], path: str) -> str | None:
    """Return the interpreter of a job's ranks, as far as its command says; None: not known."""
    program = interpreter_of(spec.get("run") or "")
    found = program and shutil.which(program, path=path)
    if not found or PYTHON.fullmatch(Path(found).name):
        return found or None
    try:
        with Path(found).open("rb") as script:
            mark, _, line = script.readline(1000).decode(errors="replace").strip().partition("#!")
    except OSError:
        return None
    named = line.removeprefix("/usr/bin/env ").split()
    shebang = named[0] if not mark and named else ""
    return shutil.which(shebang, path=path) if PYTHON.fullmatch(Path(shebang).name) else None


def _changed_ns(paths: Iterable[str]) -> dict[str, int]:
    found = {}
    for path in paths:
        try:
            found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116
        except OSError:
            found[path] = 0
    return found
