"""Probes as processes of their own, by any interpreter with torch: a line that they print is one thing measured."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cordee.errors import InputError, MissingExtraError, ScriptError
from cordee.hardware.measured import Refused, Sample

MODULE = "cordee.train.calibration"


@dataclass(frozen=True, slots=True)
class Number:
    """A single number that a probe found: memory, context, speed of a copy."""

    name: str
    value: float


Found = Sample | Number | Refused


def probe(work: str, *options: str, python: str = sys.executable) -> Iterator[Found]:
    """Yield what a probe measures, and what it cannot, as soon as it prints it.

    Raises:
        MissingExtraError: torch is not installed there.
        ScriptError: the process failed.
    """
    for found in records(work, *options, python=python):
        if "number" in found:
            yield Number(found["number"], found["value"])
        elif "table" in found:
            yield Sample(**(found | {"at": tuple(found["at"])}))
        elif "refused" in found:
            yield Refused(found["refused"], found["why"])


def records(work: str, *options: str, python: str = sys.executable) -> Iterator[dict[str, Any]]:
    """Yield the objects that a probe prints.

    Raises:
        MissingExtraError: torch, or what the work needs beside it, is not installed there.
        ScriptError: the process failed.
    """
    argv = [python, "-m", MODULE, work, *options]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None, "asked for"
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        yield json.loads(line)
            finally:
                if process.poll() is None and sys.exc_info()[0] is not None:
                    process.send_signal(signal.SIGTERM)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if process.returncode == 0:
        return
    last = said[-1].strip() if said else "without a word"
    if "No module named 'torch'" in last:
        raise MissingExtraError("a calibration runs torch", hint=f"install torch as your machine needs it for {python}")
    for kind in (MissingExtraError, InputError):
        if process.returncode == kind.exit_code:
            message, _, hint = last.rpartition(": ")
            raise kind(message, hint=hint or None)
    raise ScriptError(f"{work} failed with exit code {process.returncode}: {last[:200]}", hint=_shown(argv))


def _shown(argv: Sequence[str]) -> str:
    return " ".join(["python", *argv[1:]])
