"""What the README shows is what the command prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_plan_in_the_readme_is_the_plan_that_is_printed() -> None:
    text = README.read_text()
    command = re.search(r"^    cordee (plan [^#\n]+)", text, re.MULTILINE)
    shown = re.search(r"^```text\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    assert command is not None and shown is not None
    done = subprocess.run(
        [sys.executable, "-m", "cordee", *command[1].split()],
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "CORDEE_HOME": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    lines = shown[1].rstrip().splitlines()
    assert printed[: len(lines)] == lines


def test_every_page_that_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
