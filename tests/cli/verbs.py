"""Verbs called in this process."""

from cordee.cli.main import main


def code_of(*words: str) -> int:
    """Run a verb in this process; its exit code."""
    try:
        main([*words])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
