"""Checkpoints that earlier versions wrote (`tests/data/README.md`) load, verify, list, and take new generations."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import cordee
from cordee.storage.audit import generations, verify
from cordee.storage.destination import open_blobs
from cordee.storage.history import past_attempts
from cordee.storage.log import live_commits, read_entries

OLD = Path(__file__).parents[1] / "data" / "checkpoint_0_1"
WEIGHTS = json.loads((OLD / "weights.json").read_text())
TO = {"single": ["single"], "levels": ["levels/near", "levels/home"]}
STEPS = {"single": 2, "levels": 3}


def state() -> dict:
    model = torch.nn.Linear(6, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "seen": 0}


@pytest.fixture(params=sorted(TO))
def name(request) -> str:
    return request.param


@pytest.fixture
def to(name: str, tmp_path: Path) -> str:
    shutil.copytree(OLD, tmp_path / "old")
    return ",".join(str(tmp_path / "old" / place) for place in TO[name])


def test_a_resume_finds_what_the_earlier_version_saved(to: str, name: str) -> None:
    here = state()
    with cordee.job(here, to=to, every=1, keep=5, ram="off") as job:
        assert job.start_step == STEPS[name]
        assert here["model"].weight.tolist() == WEIGHTS[name]
        assert here["seen"] == 2 * STEPS[name]
        for _ in job.steps(STEPS[name] + 2):
            here["model"](torch.randn(2, 6)).square().mean().backward()
            here["optimizer"].step()
            here["seen"] += 2
    blobs = open_blobs(to)
    steps = [each.commit.step for each in generations(blobs, read_entries(blobs))]
    assert steps[: STEPS[name]] == list(range(1, STEPS[name] + 1)) and steps[-1] == STEPS[name] + 2
    again = state()
    with cordee.job(again, to=to, every=1, keep=5, ram="off") as job:
        assert job.start_step == STEPS[name] + 2
        assert torch.equal(again["model"].weight, here["model"].weight)


def test_the_log_of_an_earlier_version_reads_as_this_ones(to: str, name: str) -> None:
    blobs = open_blobs(to)
    entries = read_entries(blobs)
    found = generations(blobs, entries)
    assert [each.commit.step for each in found] == list(range(1, STEPS[name] + 1))
    assert all(each.verified and each.stored_bytes and each.commit.uploaded_us > 0 for each in found)
    assert [each.commit.missing_levels for each in found] == {"single": [0, 0], "levels": [0, 1, 0]}[name]
    assert all(verify(blobs, entry).lost is None for entry in live_commits(entries))
    (attempt,) = past_attempts([*entries, entries[0]])
    assert attempt.left and attempt.seconds > 0
