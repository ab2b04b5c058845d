"""Attempts of a job, each in processes of its own, for tests of loops that are not ours and of the examples."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import forks

PATIENT = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


class Runs:
    """Runs a script's main; `lines` is what the last run printed."""

    def __init__(self, orders: IO[str], answers: IO[str], errors: Path) -> None:
        self._orders, self._answers, self._errors = orders, answers, errors
        self.lines: list[str] = []

    def __call__(self, *argv: str, world: int = 1, notice: str | None = None, env: dict[str, str] | None = None) -> Any:
        """The exit codes of the ranks; the last one is given notice as soon as one prints the text."""
        self._orders.write(json.dumps({"world": world, "argv": argv, "notice": notice, "env": env or {}}) + "\n")
        self._orders.flush()
        answer = self._answers.readline()
        assert answer, self.said()
        told = json.loads(answer)
        self.lines = told["lines"]
        return told["codes"]

    def said(self) -> str:
        """All that was written to standard error so far."""
        return self._errors.read_text()


@contextmanager
def runs_of(script: Path) -> Iterator[Runs]:
    """The script's `main(argv)`, imported once."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("forked.py")), str(script), folder]
        errors = Path(folder) / "errors"
        (given, write), (read, told) = os.pipe(), os.pipe()
        with errors.open("w") as stderr, os.fdopen(given) as stdin, os.fdopen(told) as stdout:
            files = {"stdin": stdin.fileno(), "stdout": stdout.fileno(), "stderr": stderr.fileno()}
            process = forks.start(command, {**outside, **PATIENT, **OFFLINE}, **files)
        with os.fdopen(read) as answers:
            with os.fdopen(write, "w") as orders:
                assert answers.readline() == "{}\n", errors.read_text()
                yield Runs(orders, answers, errors)
            assert process.wait(60) == 0, errors.read_text()
