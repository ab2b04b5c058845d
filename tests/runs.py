"""Attempts of a job, each in processes of its own, for tests of loops that are not ours and of the examples."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENT = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


class Runs:
    """Runs a script's main; `lines` is what the last run printed."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process, self._errors = process, errors
        self.lines: list[str] = []

    def __call__(self, *argv: str, world: int = 1, notice: str | None = None, env: dict[str, str] | None = None) -> Any:
        """The exit codes of the ranks; the last one is given notice as soon as one prints the text."""
        order = {"world": world, "argv": argv, "notice": notice, "env": env or {}}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
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
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), str(script)]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command,
                env={**outside, **PATIENT, **OFFLINE},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "{}\n", errors.read_text()
            yield Runs(process, errors)
            process.stdin.close()
            process.wait(60)
