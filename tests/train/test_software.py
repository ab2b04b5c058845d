"""The software of an attempt: what has changed since the one that saved."""

import json
from pathlib import Path

import pytest
import torch

from cordee.train import software
from cordee.train.software import software_changed, software_here


def test_a_resume_says_what_has_changed_since_the_attempt_that_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = [tmp_path / "gpt-abcdef" / str(epoch) / "n1" / "spool" for epoch in (1, 2, 3)]
    for spool in spools:
        spool.mkdir(parents=True)
    assert software_changed(spools[0], None) is None, "nothing was saved yet"
    assert json.loads((spools[0].parent / "software.json").read_text())["torch"] == torch.__version__
    assert software_changed(spools[1], 1) is None, "nothing has changed"
    now = software_here()
    upgraded = {name: version for name, version in now.items() if name != "numpy"} | {"Python": "4.0", "new": "1"}
    monkeypatch.setattr(software, "software_here", lambda: upgraded)
    said = "the software has changed since attempt 1 saved"
    numpy = f"numpy {now['numpy']} -> none"
    assert software_changed(spools[2], 1) == f"{said}: Python {now['Python']} -> 4.0, new none -> 1, {numpy}"
    assert software_changed(spools[2], 9) is None, "that attempt ran on another node"
