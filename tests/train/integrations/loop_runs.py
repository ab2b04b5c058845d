"""Attempts of a job, each in a process of its own, for the tests of the loops that are not ours."""

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
    """Runs the script's main, and remembers what it wrote to standard error."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process, self._errors = process, errors

    def __call__(self, out: Path, *argv: str, world: int = 1) -> list[int]:
        """The exit codes of the ranks."""
        out.mkdir(exist_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"world": world, "argv": ["--out", str(out), *argv]}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("["):
                codes: list[int] = json.loads(line)
                return codes
        raise AssertionError(self.said())

    def said(self) -> str:
        return self._errors.read_text()


@contextmanager
def runs_of(script: str) -> Iterator[Runs]:
    """`script` is a module beside this one."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    command = [sys.executable, str(Path(__file__).with_name("loop_forked.py")), script]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command,
                env={**outside, **PATIENT, **OFFLINE},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        with process:
            yield Runs(process, errors)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def end_of(out: Path, rank: int = 0) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((out / f"end{rank}.json").read_text())
    return end
