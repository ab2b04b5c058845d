"""Verbs called in this process."""

from collections.abc import Callable

import pytest

from cordee.cli.main import main

Verb = Callable[..., str]
"""Runs a verb against the server of the module; what it prints."""


def code_of(*words: str) -> int:
    """Run a verb in this process; its exit code."""
    try:
        main([*words])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a verb in this process; its exit code, and what it printed on standard output and standard error."""
    code = code_of(*words)
    printed = capsys.readouterr()
    return code, printed.out, printed.err
